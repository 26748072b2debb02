"""Summaries by the policy: token-exact, once trained, a turn of their own."""

import asyncio

import collector_fakes as fakes
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import test_token_exactness as exactness
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.batches import examples

SUMMARY = "What I saw: 7."


class Sampler(exactness.Sampler):
  """Answers a request of a summary with one, by the agent's state."""

  def __init__(self, turns, agent):
    super().__init__(turns)
    self.turns = turns
    self.played = 0
    self.limits = []
    self.agent = agent
    self.script = self._next

  def _next(self, turn, _):
    if self.agent.is_summarizing:
      return exactness.renderer().encode(SUMMARY).tolist() + [
        exactness.renderer().end_of_turn_id
      ]
    self.played += 1
    return exactness.sampled_ids(self.turns[self.played - 1])

  async def generate(self, prompt, sampling, *, session):
    self.limits.append(sampling.max_new_tokens)
    return await super().generate(prompt, sampling, session=session)


def collect(first, turns, observer=None, **kwargs):
  agent = agents.ToolAgent("Use it.", on_parse_error="retry", **kwargs)
  client = Sampler(turns, agent)
  model = tc.PolicyModel(
    client,
    exactness.renderer(),
    policy_client.SamplingParams(max_new_tokens=64),
  )
  engine = tc.TrajectoryCollectEngine(
    agent,
    exactness.Env(first, turns),
    model,
    max_steps=len(turns),
    gamma=0.5,
    observers=observer,
  )
  return asyncio.run(engine.collect()), client


@exactness.PROPERTY
@given(
  first=exactness.OBSERVATIONS,
  turns=exactness.TURNS,
  summary_at=st.sampled_from([1, 40, 80, 10**6]),
  summary_images=st.integers(1, 3),
  summary_tokens=st.sampled_from([3, 64]),
)
def test_each_sampled_token_is_trained_once(
  first, turns, summary_at, summary_images, summary_tokens
):
  result, client = collect(
    first,
    turns,
    summary_at=summary_at,
    summary_images=summary_images,
    summary_tokens=summary_tokens,
  )
  assert result.error is None
  summaries = [bool(s.info.get("summary")) for s in result.steps]
  summary_turns = sum(summaries)
  # They do not count as turns of the environment.
  assert (
    len(result.steps) == len(client.completions) == len(turns) + summary_turns
  )
  assert result.metrics.get("summary_turns", 0) == summary_turns
  if summary_at == 1:
    assert summary_turns == len(turns) - 1
  if summary_at == 10**6:
    assert not summary_turns

  # 1. Every sampled token is trainable in exactly one sequence, in order,
  #    with its own log-prob and version; nothing else is.
  for name in ("tokens", "logprobs", "versions"):
    trained = [getattr(s, name)[s.loss_mask] for s in result.sequences]
    sampled = [getattr(c, name) for c in client.completions]
    assert np.array_equal(np.concatenate(trained), np.concatenate(sampled))
  for sequence in result.sequences:
    assert not sequence.logprobs[~sequence.loss_mask].any()
    assert (sequence.versions[~sequence.loss_mask] == -1).all()

  # 2. A sequence ends with its summary; the next begins with a new prompt, of
  #    which nothing is trained.
  assert len(result.sequences) == summary_turns + 1
  ends = [int(s.turn_ids[-1]) for s in result.sequences[:-1]]
  assert ends == [i for i, one in enumerate(summaries) if one]
  for sequence, one in zip(result.sequences[1:], ends):
    assert int(sequence.turn_ids[0]) == one + 1 and not sequence.loss_mask[0]

  # 3. Nothing is conditioned on what the policy did not see: each completion
  #    follows the prompt that was sent.
  for turn, (prompt, completion) in enumerate(
    zip(client.prompts, client.completions)
  ):
    (sequence,) = [
      s for s in result.sequences if turn in s.turn_ids[s.loss_mask]
    ]
    expected = np.concatenate([prompt, completion.tokens])
    assert np.array_equal(sequence.tokens[: len(expected)], expected)
  # 4. Each request has its own budget.
  assert [limit == summary_tokens for limit in client.limits] == (
    [one or summary_tokens == 64 for one in summaries]
  )


def turns_of(count):
  return [
    exactness.Turn(
      text="Go on.", raw=(1,), ends=True, observation={"text": "ok"},
      rewrite="no",
    )
    for _ in range(count)
  ]  # fmt: skip


def test_a_summary_has_the_return_of_what_follows_it():
  recorder = fakes.Recorder()
  result, _ = collect(
    {"text": "Go."}, turns_of(3), observer=recorder, summary_at=1
  )
  rewards = [step.reward for step in result.steps]
  assert rewards == [0.0, 0.0, 0.0, 0.0, 1.0] and result.reward == 1.0
  assert [step.mc_return for step in result.steps] == [
    0.0625, 0.125, 0.25, 0.5, 1.0,
  ]  # fmt: skip
  # Turns are reported in order, those of summaries among them.
  finished = recorder.of(events.TurnFinished)
  assert [event.turn for event in finished] == [0, 1, 2, 3, 4]
  assert [bool(e.step.info.get("summary")) for e in finished] == [
    False, True, False, True, False,
  ]  # fmt: skip
  # Credit by turns knows them: rewards of 5 turns, tokens of each.
  assert examples.turn_rewards(result).tolist() == rewards
  assert (examples.turn_tokens(result, 5) > 0).all()
  copy = trajectory_lib.Trajectory.from_json(result.to_json())
  assert copy.to_json() == result.to_json()


@pytest.mark.parametrize("name", ["grpo", "turn_returns", "gigpo"])
def test_all_sequences_of_an_episode_are_credited(name):
  won, _ = collect({"text": "Go."}, turns_of(3), summary_at=1)
  lost, _ = collect({"text": "Go."}, turns_of(3), summary_at=10**6)
  for step in lost.steps:
    step.reward = 0.0
  lost.reward = 0.0
  group = trajectory_lib.TrajectoryGroup("g", "t", (won, lost))
  (learned,), _ = examples.from_groups(
    [group],
    advantages.ESTIMATORS.get(name, "operator"),
    advantages.AdvantageOptions(),
  )
  assert [e.episode for e in learned] == [0, 0, 0, 1]
  for example in learned[:3]:
    assert (example.advantages[example.sequence.loss_mask] > 0).all()


def test_a_summary_without_room_ends_the_episode_by_the_context():
  agent = agents.ToolAgent("Use it.", on_parse_error="retry", summary_at=1)
  turns = turns_of(2)
  client = Sampler(turns, agent)
  model = tc.PolicyModel(client, exactness.renderer(), max_context_tokens=30)
  engine = tc.TrajectoryCollectEngine(
    agent, exactness.Env({"text": "Go."}, turns), model, max_steps=2
  )
  result = asyncio.run(engine.collect())
  assert result.status is trajectory_lib.TrajectoryStatus.CONTEXT_LIMIT
  assert len(result.steps) == 1 and len(result.sequences) == 1
