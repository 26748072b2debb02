"""One policy and one seed play the same episodes, wherever the gym is.

The shipped policy on the desktop: in this process, behind a gym server in
genv's protocol, in OpenEnv's, and in OpenEnv's with the policy behind the run's
own OpenAI-compatible server.
"""

import asyncio
import dataclasses

import collected
import gym_servers
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import tasks as run_tasks
import two_paths

FAMILIES = ("click-button", "enter-text")


@pytest.fixture(scope="module", name="both")
def _both():
  with two_paths.Both() as paths:
    yield paths


@pytest.fixture(scope="module", name="server")
def _server():
  with gym_servers.serving(gym_servers.desktop(families=FAMILIES)) as server:
    yield server


def _tasks(config):
  """The run's own tasks, with what each server calls them."""
  source = run_tasks.make_tasks(config)
  collected = []
  for index in range(2):
    for family in FAMILIES:
      name = f"{family}@train:{index}:3"
      task = source.train_task(family, index, 3)
      collected.append(
        dataclasses.replace(
          task,
          params={
            **task.params,
            "genv": {"identifier": name},
            "openenv": {"task": name},
          },
        )
      )
  return collected


def _played(both, overrides, mode, through_proxy=False):
  config = config_lib.load_config(
    [*two_paths.SMALL, "rollout.via=proxy", *overrides]
  )
  collector = episodes_lib.make_collector(
    config,
    episodes_lib.EpisodeFactory(config, both.images),
    both.engine,
    both.policy.renderer,
    observers=None,
    mode=mode,
    connection=both.proxy.connection if through_proxy else None,
  )
  tasks = _tasks(both.config)

  async def run():
    return await collected.groups(collector, tasks)

  return both.run(run())


def _seen(trajectory):
  """Returns what the policy saw and did, beyond its tokens."""
  steps = [
    (s.info.get("gui_actions"), s.reward, s.done) for s in trajectory.steps
  ]
  images = [str(image) for s in trajectory.sequences for image in s.images]
  return steps, images


@pytest.mark.parametrize(
  "mode", [pytest.param("train", marks=pytest.mark.slow), "greedy"]
)
def test_the_same_episodes_wherever_the_gym_is(both, server, mode):
  url, app = server
  openenv = ["gym=openenv", f"gym.options.base_url={url}/openenv/desktop"]
  ways = {
    "genv": (["gym=genv", f"gym.options.base_url={url}"], False),
    "openenv": (openenv, False),
  }
  if mode == "train":
    ways["openenv and proxy"] = (openenv, True)
  here = _played(both, [], mode)
  members = 4 if mode == "train" else 1
  assert [len(group) for group in here] == [members] * 4
  # Episodes went on beyond their first screenshots, and differ.
  assert len({s for group in here for t in group for s in _seen(t)[1]}) > 4
  for name, (overrides, through_proxy) in ways.items():
    there = _played(both, overrides, mode, through_proxy)
    assert len(there) == len(here), name
    for own, result in zip(here, there):
      assert len(own) == len(result)
      for one, other in zip(own, result):
        two_paths.assert_equal(other, one)
        assert _seen(other) == _seen(one), name
  # A session of OpenEnv is over when its socket closes, which the server may
  # read a moment after the client has gone on.
  asyncio.run(gym_servers.until(lambda: app.store.open == 0))
