"""Training on agents that have a loop of their own."""

import asyncio
import dataclasses
import json
import pathlib
import sys

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.run import proxy
import two_paths

pytestmark = pytest.mark.timeout(400)
Status = trajectory.TrajectoryStatus
# Does nothing, and is an action.
IDLE = (
  '<tool_call>\n{"name": "computer_use", "arguments": {"action": "key",'
  ' "keys": ["shift"]}}\n</tool_call>'
)
EXAMPLES = str(pathlib.Path(__file__).resolve().parents[1] / "examples")


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
  monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(scope="module", name="paths")
def _paths():
  sys.path.insert(0, EXAMPLES)
  try:
    with two_paths.Both(
      "rollout.agent=openai_agent:play", "collect.deadlines.model=20"
    ) as paths:
      yield paths
  finally:
    sys.path.remove(EXAMPLES)


def episodes_of(paths, monkeypatch, play, mode="train", number=1):
  monkeypatch.setattr(paths.proxy.connection, "_play", play)
  groups = paths.run(paths.collect(mode, True, number))
  assert not len(paths.proxy.app._service.store), "sessions are left"
  return [episode for group in groups for episode in group]


@pytest.mark.slow
def test_the_example_plays_as_the_run_does(paths):
  """Shows what the policy reads, and how its answers are parsed."""

  async def both():
    return (
      await paths.collect("greedy", True, 6),
      await paths.collect("greedy", False, 6),
    )

  statuses = set()
  for got, want in zip(*paths.run(both())):
    for own, other in zip(got, want):
      # It is the agent that knows how long its prompts are.
      own.metrics["prompt_tokens"] = other.metrics["prompt_tokens"]
      own.metrics.setdefault(
        "truncated_turns", other.metrics.get("truncated_turns")
      )
      two_paths.assert_equal(own, other)
      statuses.add(own.status)
  assert Status.SUCCEEDED in statuses


def test_all_that_an_agent_had_sampled_is_trained_on(paths, monkeypatch):
  counted = []

  async def thinks(client, model, computer, **options):
    observation = await computer.reset()
    for number in range(3):
      # Of another kind of prompt, and two at a time.
      plans = await asyncio.gather(
        *(
          client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"plan {number} {which}"}],
            **{**options, "max_tokens": 4},
          )
          for which in "ab"
        )
      )
      answer = await client.chat.completions.create(
        model=model,
        # The same request again would be answered with the same completion.
        messages=[{"role": "system", "content": f"{number}"}, observation],
        **options,
      )
      counted.extend(a.usage.completion_tokens for a in (*plans, answer))
      observation = await computer.act(IDLE)
      if observation is None:
        return

  episodes = episodes_of(paths, monkeypatch, thinks)
  assert sum(e.num_sampled for e in episodes) == sum(counted) > 0
  for episode in episodes:
    assert episode.is_trainable and episode.num_turns == 3
    assert len(episode.sequences) == 9  # Nothing extends anything.
    images = [len(s.images) for s in episode.sequences]
    assert sorted(images) == [0] * 6 + [1] * 3


@pytest.mark.parametrize("fault", ["raises", "gives up", "hangs", "goes on"])
def test_an_agent_that_fails_ends_its_episode_and_no_other(
  paths, monkeypatch, fault
):
  ended = []

  async def play(client, model, computer, **options):
    del client, model, options
    try:
      await computer.reset()
      if fault == "raises":
        raise RuntimeError("no idea")
      if fault == "hangs":
        await asyncio.sleep(60)
      if fault == "goes on":
        while True:
          await computer.act(IDLE)
    finally:
      ended.append(fault)

  if fault == "hangs":
    collect = dataclasses.replace(
      paths.config.collect,
      deadlines=dataclasses.replace(paths.config.collect.deadlines, model=5.0),
    )
    monkeypatch.setattr(
      paths, "config", dataclasses.replace(paths.config, collect=collect)
    )
  if fault == "goes on":  # Never told when to stop, it is cancelled.
    monkeypatch.setattr(agent_session, "_GRACE_S", 0.05)
  episodes = episodes_of(paths, monkeypatch, play)
  assert len(ended) == len(episodes) == 4
  for episode in episodes:
    if fault == "raises":
      assert episode.status is Status.MODEL_ERROR
      assert "no idea" in episode.error
    elif fault == "hangs":
      assert episode.status is Status.TIMEOUT
      assert "deadlines.model" in episode.error
    elif fault == "gives up":
      assert episode.status is Status.PARSE_ERROR
    else:
      assert episode.status in (Status.MAX_TURNS, Status.FAILED)
    assert not episode.num_sampled and not episode.is_trainable


def test_a_prompt_that_is_too_long_is_a_context_limit(paths, monkeypatch):
  async def talks(client, model, computer, **options):
    message = await computer.reset()
    await client.chat.completions.create(
      model=model, messages=[message], **options
    )
    await client.chat.completions.create(
      model=model,
      messages=[message, {"role": "user", "content": "ever " * 700}],
      **options,
    )

  for episode in episodes_of(paths, monkeypatch, talks):
    assert episode.status is Status.CONTEXT_LIMIT
    assert episode.num_sampled  # What came before is learned from.


@pytest.mark.parametrize(
  "agent, words",
  [
    ("play", "write module:function"),
    ("no_such_module:play", "cannot be imported"),
    ("openai_agent:dance", "cannot be imported"),
    ("openai_agent:main", "must be a coroutine function"),
  ],
)
def test_an_agent_that_is_none_is_named(agent, words):
  config = config_lib.load_config(
    ["rollout.via=proxy", f"rollout.agent={agent}"]
  )
  with pytest.raises(config_lib.ConfigError, match=words) as refused:
    proxy.RunProxy(config, None, None, None)
  assert agent in str(refused.value)
  with pytest.raises(config_lib.ConfigError, match="set rollout.via=proxy"):
    config_lib.load_config([f"rollout.agent={agent}"])


@pytest.mark.slow
def test_turns_at_an_agents_own_temperature_are_not_trained_on(tmp_path):
  """The run goes on, with the tokens that the learner can account for."""
  status = train.main([
      *two_paths.SMALL, f"run.dir={tmp_path}", "name=c", "steps=2",
      "rollout.via=proxy", "rollout.agent=cold_agent:play", "eval.on=false",
      "algorithm.entropy_coef=0.01", "learner.skip_zero_advantage=false",
  ])  # fmt: skip
  assert status == 0
  lines = (tmp_path / "c" / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert [m["step"] for m in metrics] == [1, 2]
  for step in metrics:
    assert step["untrained_tokens"] > 0 and step["episode_tokens_mean"] > 0
    assert step["logprob_gap_max"] < 1e-3  # With the cold turns, .1.
  episodes = [
    json.loads(line) for line in (tmp_path / "c" / "trajectories.jsonl").open()
  ]
  assert any(e["metrics"].get("untrained_tokens") for e in episodes)
