"""Shares of a turn's time and of concurrent work, against known times."""

import asyncio
import itertools

import pytest
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.reporting import metrics as metrics_lib
from tunix.rl.multi_turn.reporting import step_metrics


class Clock:
  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


class Told:
  """An `Overlap` whose time is what the test says."""

  def __init__(self):
    self.clock = Clock()
    self.meter = step_metrics.Overlap(self.clock)

  def at(self, seconds, episode, stage):
    self.clock.now = 1000.0 + seconds
    self.meter.on_event(events.StageChanged(episode, stage))

  def take(self, seconds):
    self.clock.now = 1000.0 + seconds
    return self.meter.take()


def test_known_turns_give_known_shares():
  overlap = Told()
  overlap.at(0, "a", "model")
  overlap.at(1, "b", "env")  # Both from 1 to 3.
  overlap.at(3, "a", "")
  overlap.at(4, "b", "model")  # From one stage to the next.
  overlap.at(6, "a", "env")  # Both from 6 to 7.
  overlap.at(7, "b", "")
  overlap.at(8, "a", "")
  readings = overlap.take(10)
  # a: 0-3, 6-8; b: 1-4, 4-7.
  assert readings["episodes_busy"] == pytest.approx((3 + 2 + 3 + 3) / 10)
  assert readings["overlap"] == pytest.approx((2 + 1) / 10)


def test_what_goes_on_at_a_reading_counts_before_and_after():
  overlap = Told()
  overlap.at(0, "a", "model")
  overlap.at(1, "b", "env")

  def take(seconds):
    readings = overlap.take(seconds)
    return [readings[name] for name in (
        "episodes_busy", "overlap", "time/rollout_model", "time/rollout_env",
        "time/rollout_both", "time/rollout_none",
    )]  # fmt: skip

  assert take(2) == [1.5, 0.5, 1, 0, 1, 0]
  assert take(4) == [2.0, 1.0, 0, 0, 2, 0]
  overlap.at(5, "b", "")
  overlap.at(7, "a", "")
  assert take(8) == [1.0, 0.25, 2, 0, 1, 1]
  assert take(9) == [0.0, 0.0, 0, 0, 0, 1]


def test_nobody_told_is_no_reading():
  overlap = Told()
  assert overlap.take(5) == {}
  assert overlap.take(5) == {}


# --- a gym of known delays ----------------------------------------------------

RESET, MODEL, STEP, CLOSE, OWN = 0.06, 0.04, 0.08, 0.05, 0.03
TURNS, EPISODES = 3, 4


class Gym(base_env.BaseEnv):
  runs_inline = True

  def __init__(self):
    self._turn = itertools.count(1)

  async def reset(self):
    await asyncio.sleep(RESET)
    return {}, {}

  async def step(self, action):
    await asyncio.sleep(STEP)
    return {}, 0.0, next(self._turn) == TURNS, {}

  async def close(self):
    await asyncio.sleep(CLOSE)

  @classmethod
  def from_dict(cls, env_args):
    return cls()


class Agent(base_agent.BaseAgent):
  """Thinks for a while about what the policy said."""

  def __init__(self):
    self.reset()

  @property
  def chat_completions(self):
    return [{"role": "user", "content": "go"}]

  @property
  def trajectory(self):
    return self._trajectory

  def reset(self):
    self._trajectory = trajectory_lib.Trajectory()

  def update_from_env(self, observation, reward, done, info, **kwargs):
    del observation, reward, done, info, kwargs

  async def update_from_model(self, response, **kwargs):
    del kwargs
    await asyncio.sleep(OWN)
    return trajectory_lib.Action(response)


async def model(messages):
  del messages
  await asyncio.sleep(MODEL)
  return "x"


def test_a_gym_of_known_delays_is_measured_turn_by_turn():
  meter = step_metrics.Overlap()
  reports = []

  class Listener:
    def on_event(self, event):
      if isinstance(event, events.StageChanged):
        reports.append(event.stage)
        meter.on_event(event)

  async def run():
    loop = asyncio.get_running_loop()
    meter.take()
    started = loop.time()
    metrics = await asyncio.gather(*(
        tc.TrajectoryCollectEngine(
            Agent(), Gym(), model, max_steps=TURNS, observers=Listener(),
            trajectory_id=f"e{i}",
        ).collect()
        for i in range(EPISODES)
    ))  # fmt: skip
    return metrics, loop.time() - started, meter.take()

  episodes, wall, together = asyncio.run(asyncio.wait_for(run(), 60))
  assert all(e.num_turns == TURNS for e in episodes)
  assert reports.count("model") == TURNS * EPISODES
  assert reports.count("env") == (TURNS + 2) * EPISODES  # Reset and closing.
  assert reports.count("") == reports.count("model") + reports.count("env")
  metrics = metrics_lib.group_metrics(
    [trajectory_lib.TrajectoryGroup("g", "t", episodes)]
  )
  assert not metrics_lib.undocumented({**metrics, **together})
  # Sleeping takes as long as asked, or longer on a busy machine: altogether no
  # longer than the whole did.
  late = wall - (RESET + CLOSE + TURNS * (MODEL + STEP + OWN))
  for name, least in (
    ("turn_seconds_model", MODEL),
    ("turn_seconds_env", STEP),
    ("turn_seconds_other", OWN),
    ("episode_seconds_setup", RESET + CLOSE),
  ):
    times = 1 if "setup" in name else TURNS
    assert least <= metrics[name] < least + late / times + 1e-3, name
  # Nothing is counted twice, and nothing is left over.
  turn = sum(metrics[f"turn_seconds_{k}"] for k in ("model", "env", "other"))
  mean = sum(e.metrics["seconds"] for e in episodes) / EPISODES
  assert TURNS * turn + metrics["episode_seconds_setup"] == pytest.approx(mean)
  busy = sum(
    e.metrics[f"seconds_{k}"]
    for e in episodes
    for k in ("model", "env", "setup")
  )
  assert metrics["env_share"] + metrics["model_share"] == pytest.approx(
    busy / EPISODES / mean
  )
  # The meter has seen the same seconds, through events.
  assert together["episodes_busy"] == pytest.approx(busy / wall, rel=0.1)


def test_with_one_episode_nothing_overlaps_and_with_two_it_may():
  meter = step_metrics.Overlap()

  class Listener:
    def on_event(self, event):
      if isinstance(event, events.StageChanged):
        meter.on_event(event)

  def episode(i):
    return tc.TrajectoryCollectEngine(
      Agent(),
      Gym(),
      model,
      max_steps=TURNS,
      observers=Listener(),
      trajectory_id=f"e{i}",
    ).collect()

  async def alone():
    await episode(0)

  async def together():
    await asyncio.gather(*(episode(i) for i in range(2)), later())

  async def later():
    await asyncio.sleep(RESET + MODEL)  # The first is in its step by now.
    await episode(2)

  asyncio.run(alone())
  assert meter.take()["overlap"] == 0.0
  asyncio.run(together())
  assert meter.take()["overlap"] > 0.0
