"""Training on what OpenAI clients do is training on what the collector does."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from tunix.rl.multi_turn import assembly
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import images as images_lib
from tunix.rl.multi_turn import run_proxy
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn import trajectory
from tunix.rl.multi_turn.trajectory_collector import groups as groups_lib

pytestmark = pytest.mark.timeout(400)

Status = trajectory.TrajectoryStatus
SMALL = (
    "tasks=[click-button, enter-text]",
    "collect.group_size=4",
    "collect.min_valid=2",
    "learner.groups_per_step=2",
    "rollout.slots=8",
    "rollout.concurrency=8",
    "report.progress=none",
)


class Both:
  """The shipped policy, reached in both ways."""

  def __init__(self, *overrides):
    self.loop = asyncio.new_event_loop()  # Connections belong to one.
    self.config = config_lib.load_config(
        [*SMALL, "rollout.via=proxy", *overrides]
    )
    config = self.config
    self.images = images_lib.ImageStore()
    self.policy = assembly.make_policy(
        config, None, assembly.warm_start_source(config)
    )
    self.engine = assembly.make_engine(config, self.policy, self.images)
    self.proxy = run_proxy.RunProxy(
        config, self.policy, self.engine, self.images
    )

  def __enter__(self):
    self.engine.warm_up()
    self.proxy.start()
    return self

  def __exit__(self, *exc_info):
    self.proxy.close(self.run)
    self.loop.close()
    self.engine.close()

  def run(self, work):
    return self.loop.run_until_complete(asyncio.wait_for(work, 120))

  def collector(self, mode, connection):
    config = self.config
    return assembly.make_collector(
        config,
        assembly.EpisodeFactory(config, self.images),
        self.engine,
        self.policy.renderer,
        observers=None,
        mode=mode,
        connection=connection,
    )

  def collect(self, mode, through_proxy, number=4):
    source = assembly.make_tasks(self.config)
    tasks = assembly.TrainTasks(source, self.config.gym.tasks, 3)
    connection = self.proxy.connection if through_proxy else None
    collector = self.collector(mode, connection)

    async def run():
      return await groups_lib.collect_groups(
          collector, [next(tasks) for _ in range(number)]
      )

    return run()


def assert_equal(got, want):
  assert got.status is want.status
  kinds = [e and e.partition(":")[0] for e in (got.error, want.error)]
  assert kinds[0] == kinds[1]
  assert got.reward == want.reward
  assert [s.reward for s in got.steps] == [s.reward for s in want.steps]
  assert [s.model_response for s in got.steps] == [
      s.model_response for s in want.steps
  ]
  assert got.task == want.task
  assert len(got.sequences) == len(want.sequences) > 0
  for one, other in zip(got.sequences, want.sequences):
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()
    assert one.versions.tolist() == other.versions.tolist()
    assert one.turn_ids.tolist() == other.turn_ids.tolist()
    assert one.images == other.images
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
  for name in ("turns", "sampled_tokens", "truncated_turns",
               "history_rewrites", "prompt_tokens"):
    assert got.metrics.get(name) == want.metrics.get(name), name


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        # The history is rewritten: an episode is several sequences.
        ("agent.max_images=1",),
        # Complaints, and completions that are cut.
        ("agent.on_parse_error=retry", "sampling.max_new_tokens=6"),
        # Prompts that do not fit any more.
        ("rollout.context_length=220", "agent.on_parse_error=retry",
         "sampling.temperature=3.0"),
    ],
    ids=["plain", "window", "cut", "context"],
)  # pyformat: disable
def test_trajectories_are_those_of_the_path_in_process(overrides):
  async def both():
    for mode in ("train", "greedy"):
      got = await paths.collect(mode, True)
      want = await paths.collect(mode, False)
      assert len(got) == len(want) == 4
      for one, other in zip(got, want):
        assert one.group_id == other.group_id
        assert len(one) == len(other)
        for mine, theirs in zip(one, other):
          assert_equal(mine, theirs)
          statuses.add(mine.status)
          sequences.append(len(mine.sequences))

  statuses, sequences = set(), []
  with Both(*overrides) as paths:
    paths.engine.update_weights(3, paths.policy.model).result(60)
    paths.run(both())
    assert not len(paths.proxy.app._service.store), "sessions are left"
    assert paths.engine.stats()["compiles_after_warm_up"] == 0
    # The engine's thread hears of releases in its own time.
    paths.engine.update_weights(3, paths.policy.model).result(60)
    assert not paths.engine.stats()["sessions"]
  if "agent.max_images=1" in overrides:
    assert max(sequences) > 1
  if "rollout.context_length=220" in overrides:
    assert Status.CONTEXT_LIMIT in statuses
  if not overrides:
    assert statuses >= {Status.SUCCEEDED, Status.FAILED}


def test_without_the_server_an_episode_is_no_reward_of_zero():
  with Both() as paths:
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

  with Both() as paths:
    real = paths.proxy.connection.post
    monkeypatch.setattr(paths.proxy.connection, "post", lost)
    (group,) = paths.run(paths.collect("train", True, 1))
  for episode in group:
    assert episode.status is Status.MODEL_ERROR
    assert "did not hand over" in episode.error
    assert episode.steps and not episode.sequences


def test_a_run_through_the_proxy_trains(tmp_path):
  """The learner finds what the clients' tokens were sampled with."""
  status = train.main([
      *SMALL, f"run.dir={tmp_path}", "name=p", "rollout.via=proxy", "steps=2",
      "eval.episodes_per_task=2", "eval.modes=[sampled]",
  ])  # pyformat: disable
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
  with pytest.raises(config_lib.ConfigError, match="rollout.lockstep=true"):
    config_lib.load_config(["rollout.via=proxy", "rollout.lockstep=true"])
  with pytest.raises(config_lib.ConfigError, match="rollout.via"):
    config_lib.load_config(["rollout.via=carrier_pigeon"])
  config = config_lib.load_config(["rollout.via=proxy"])
  assert not config.lockstep
  direct = dataclasses.replace(config.rollout, via="in_process")
  assert dataclasses.replace(config, rollout=direct).lockstep


def test_the_proxy_answers_nobody_else():
  import openai  # pylint: disable=g-import-not-at-top

  with Both() as paths:
    client = openai.OpenAI(
        base_url=f"{paths.proxy.connection.url}/v1", api_key="none"
    )
    with pytest.raises(openai.AuthenticationError):
      client.models.list()
    assert paths.proxy.connection.url.startswith("http://127.0.0.1:")
