"""Training on what OpenAI clients do is training on what the collector does."""

import dataclasses
import json

import pytest
import trials
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import trajectory
import two_paths

pytestmark = pytest.mark.timeout(400)

Status = trajectory.TrajectoryStatus
SUMMARIES = (
  "agent.history=summary",
  "agent.summary_at=200",
  "agent.summary_tokens=9",
  "agent.on_parse_error=retry",
)


@pytest.mark.parametrize(
  "overrides",
  [
    # The other cases cover everything that this one covers.
    pytest.param(
      (),
      id="plain",
      marks=[
        pytest.mark.slow,
        pytest.mark.skipif(trials.share() < 1, reason="make test-all runs it"),
      ],
    ),
    # The history is rewritten: an episode is several sequences.
    pytest.param(("agent.max_images=1",), id="window"),
    # The policy rewrites it, in turns of their own.
    pytest.param(SUMMARIES, id="summaries"),
    # Complaints, and completions that are cut.
    pytest.param(
      ("agent.on_parse_error=retry", "sampling.max_new_tokens=6"),
      id="cut",
      marks=pytest.mark.slow,
    ),
    # Prompts that do not fit any more.
    pytest.param(
      (
        "engine.context_length=220",
        "agent.on_parse_error=retry",
        "sampling.temperature=3.0",
      ),
      id="context",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_trajectories_are_those_of_the_path_in_process(overrides):
  async def both():
    for mode in ("train", "greedy"):
      got = await paths.collect(mode, True)
      want = await paths.collect(mode, False)
      assert len(got) == len(want) == 4
      for one, other in zip(got, want):
        assert one.group_id == other.group_id
        assert len(one) == len(other)
        for own, result in zip(one, other):
          two_paths.assert_equal(own, result)
          statuses.add(own.status)
          sequences.append(len(own.sequences))

  statuses, sequences = set(), []
  with two_paths.Both(*overrides) as paths:
    paths.engine.update_weights(3, paths.policy.model).result(60)
    paths.run(both())
    assert not len(paths.proxy.app._service.store), "sessions are left"
    assert paths.engine.stats()["compiles_after_warm_up"] == 0
    # The engine's thread hears of releases in its own time.
    paths.engine.update_weights(3, paths.policy.model).result(60)
    assert not paths.engine.stats()["sessions"]
  if "agent.max_images=1" in overrides or overrides is SUMMARIES:
    assert max(sequences) > 1
  if "engine.context_length=220" in overrides:
    assert Status.CONTEXT_LIMIT in statuses
  if not overrides:
    assert statuses >= {Status.SUCCEEDED, Status.FAILED}


def test_without_the_server_an_episode_is_no_reward_of_zero():
  with two_paths.Both() as paths:
    url = paths.proxy.connection.url

    async def run():
      groups = await paths.collect("train", True, 1)
      paths.proxy._server.close()
      return groups, await paths.collect("train", True, 1)

    (before,), (after,) = paths.run(run())
  assert before.valid and not after.valid
  for episode in after:
    assert episode.status is Status.MODEL_ERROR
    assert "APIConnectionError" in episode.error, (url, episode.error)


def test_tokens_that_the_server_lost_are_not_trained_on(monkeypatch):
  async def lost(path, body):
    if path == "/export_trajectories":
      raise ConnectionError("gone")
    return await real(path, body)

  with two_paths.Both() as paths:
    real = paths.proxy.connection.post
    monkeypatch.setattr(paths.proxy.connection, "post", lost)
    (group,) = paths.run(paths.collect("train", True, 1))
  for episode in group:
    assert episode.status is Status.MODEL_ERROR
    assert "did not return the tokens" in episode.error
    assert episode.steps and not episode.sequences


def test_a_run_through_the_proxy_trains(tmp_path):
  """The learner finds what the clients' tokens were sampled with."""
  status = train.main([
      *two_paths.SMALL, f"run.dir={tmp_path}", "name=p", "steps=2",
      "rollout.via=proxy", "eval.episodes_per_task=2",
      "eval.modes=[sampled]",
      # Also groups of equal rewards are learned from.
      "algorithm.entropy_coef=0.01", "learner.skip_zero_advantage=false",
  ])  # fmt: skip
  assert status == 0
  lines = (tmp_path / "p" / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert [m["step"] for m in metrics] == [1, 2]
  for step in metrics:
    # Its log-probs are computed from the same tokens, images and weights.
    assert step["logprob_gap_max"] < 1e-3
    assert step["fallback_turns"] == 0
    assert step["episode_tokens_mean"] > 5
  summary = json.loads((tmp_path / "p" / "summary.json").read_text())
  assert summary["status"] == "completed"
  assert not summary.get("faults")


def test_what_cannot_go_with_the_proxy_is_refused():
  with pytest.raises(config_lib.ConfigError, match="engine.lockstep=true"):
    config_lib.load_config(["rollout.via=proxy", "engine.lockstep=true"])
  with pytest.raises(config_lib.ConfigError, match="rollout.via"):
    config_lib.load_config(["rollout.via=carrier_pigeon"])
  with pytest.raises(config_lib.ConfigError, match="algorithm.importance=tis"):
    config_lib.load_config(
      ["rollout.via=proxy", "rollout.other_sampling=train"]
    )
  config_lib.load_config(
    [
      "rollout.via=proxy",
      "rollout.other_sampling=train",
      "algorithm.importance=tis",
    ]
  )
  config = config_lib.load_config(["rollout.via=proxy"])
  assert not config.lockstep
  direct = dataclasses.replace(config.rollout, via="in_process")
  assert dataclasses.replace(config, rollout=direct).lockstep


@pytest.mark.slow
def test_the_proxy_answers_nobody_else():
  import openai  # pylint: disable=g-import-not-at-top

  with two_paths.Both() as paths:
    client = openai.OpenAI(
      base_url=f"{paths.proxy.connection.url}/v1", api_key="none"
    )
    with pytest.raises(openai.AuthenticationError):
      client.models.list()
    assert paths.proxy.connection.url.startswith("http://127.0.0.1:")
