"""A greedy episode beside a group, and sampling masks of its tokens."""

import asyncio
import dataclasses

import collected
import loop_cases as cases
import numpy as np
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.queue import group_queue

Status = trajectory_lib.TrajectoryStatus


def tokens_of(group):
  return [t.sequences[0].tokens.tolist() for t in group]


# --- a greedy episode beside a group ------------------------------------------


class GreedyAware(cases.SeededClient):
  """Draws from the seed, and one same answer at temperature 0."""

  def __init__(self):
    super().__init__()
    self.greedy = 0

  async def generate(self, prompt, sampling, *, session):
    if sampling.temperature == 0:
      self.greedy += 1
      sampling = dataclasses.replace(sampling, seed=7)
    return await super().generate(prompt, sampling, session=session)


def greedy_collector(client, pair=cases.good_pair, **config):
  model = cases.model_of(client)
  greedy = dataclasses.replace(
    model, sampling=dataclasses.replace(model.sampling, temperature=0.0)
  )
  return tc.GroupCollector(
    pair,
    model,
    tc.CollectConfig(group_size=3, min_valid=2, **config),
    greedy_call=greedy,
  )


def test_a_greedy_episode_is_beside_the_group_and_not_in_it():
  client = GreedyAware()
  one, two = asyncio.run(collected.groups(greedy_collector(client), ["a", "b"]))
  plain = asyncio.run(
    collected.groups(
      cases.make_collector(cases.SeededClient(), group_size=3), ["a", "b"]
    )
  )
  # The members are those of a group without it.
  assert [tokens_of(g) for g in (one, two)] == [tokens_of(g) for g in plain]
  for group in (one, two):
    assert len(group) == len(group.valid) == 3
    assert group.extra.trajectory_id == f"{group.group_id}.greedy"
  assert (
    one.extra.sequences[0].tokens.tolist()
    == two.extra.sequences[0].tokens.tolist()
  )
  assert client.greedy


def test_a_group_whose_greedy_episode_broke_is_tried_again():
  builds = []

  def pair(task):
    builds.append(task)
    # The fourth episode of the first attempt is the greedy one.
    if len(builds) == 4:
      raise ConnectionError("down")
    return cases.good_pair(task)

  queue = group_queue.GroupQueue(1)
  loop = tc.CollectLoop(
    greedy_collector(GreedyAware(), pair, concurrency=1),
    iter(["a"]),
    queue,
    backoff=0.0,
  )
  asyncio.run(loop.run())
  assert loop.counts["requeued"] == loop.counts["accepted"] == 1
  group = queue.get(timeout=0)
  assert group.attempt == 1 and group.extra.status.is_policy_outcome


def test_the_greedy_episode_is_announced_with_its_group(monkeypatch):
  """With admission=finished, room for it is kept from the next group."""
  announced = []
  announce = tc.GroupCollector.announce

  def noted(self, episodes):
    announced.append(episodes)
    announce(self, episodes)

  monkeypatch.setattr(tc.GroupCollector, "announce", noted)
  config = group_queue.QueueConfig(max_staleness=1, admission="finished")
  for collector, want in (
    (greedy_collector(GreedyAware()), [4, 4]),
    (cases.make_collector(group_size=3), [3, 3]),
  ):
    announced.clear()
    queue = group_queue.GroupQueue(2, config)
    loop = tc.CollectLoop(collector, iter(["a", "b"]), queue)
    asyncio.run(loop.run())
    assert announced == want and queue.qsize() == 2


# --- sampling masks -----------------------------------------------------------


class MaskedClient(cases.SeededClient):
  """Reports alternatives where it is asked for some."""

  async def generate(self, prompt, sampling, *, session):
    found = await super().generate(prompt, sampling, session=session)
    if not sampling.top_logprobs:
      return found
    tops = np.stack([found.tokens, found.tokens + 1], axis=1)
    return dataclasses.replace(
      found, top_tokens=tops, top_logprobs=np.full(tops.shape, -0.69)
    )


def masked(client):
  model = dataclasses.replace(cases.model_of(client), keeps_support=True)
  return tc.GroupCollector(
    cases.good_pair, model, tc.CollectConfig(group_size=2, min_valid=1)
  )


def test_each_sampled_token_keeps_what_could_be_sampled():
  (group,) = asyncio.run(collected.groups(masked(MaskedClient()), ["a"]))
  for member in group:
    (sequence,) = member.sequences
    sampled = sequence.tokens[sequence.loss_mask]
    want = np.stack([sampled + 1, sampled], axis=1)
    np.testing.assert_array_equal(sequence.support[sequence.loss_mask], want)
    assert np.all(sequence.support[~sequence.loss_mask] == -1)


def test_a_sampler_without_a_mask_is_an_error_that_names_the_option():
  client = cases.SeededClient()
  (group,) = asyncio.run(collected.groups(masked(client), ["a"]))
  assert {m.status for m in group} == {Status.MODEL_ERROR}
  assert "--return-sampling-mask" in group.trajectories[0].error
