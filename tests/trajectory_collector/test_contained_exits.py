"""Whatever called code raises, wherever: a failed episode, and the run goes on.

Every kind of exit in every place that code of a user's is called from. The
event loop is in a thread, as in a run: in the main thread a KeyboardInterrupt
is Ctrl-C.
"""

import asyncio
import threading

import collected
import collector_fakes as fakes
import numpy as np
import pytest
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments import tool_environment
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.parser.tool_parser.grammars import computer_use
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.tools import tool_base as tools_base

Status = trajectory_lib.TrajectoryStatus


class Strange(BaseException):
  """No Exception, and none of Python's own."""


class Textless(Exception):
  """Its text cannot be had."""

  def __str__(self):
    raise SystemExit("in the text")


def exits():
  return {
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt("out of the blue"),
    "GeneratorExit": GeneratorExit("out of the blue"),
    "CancelledError": asyncio.CancelledError(),
    "Strange": Strange("text"),
    "Textless": Textless(),
  }


@pytest.fixture(scope="module")
def loop():
  thread = loop_thread.LoopThread()
  yield thread
  thread.close(10.0)


class Breaks:
  """Raises in one of its methods.

  `flavour`: "async" methods, "sync" ones (in threads), "inline" ones (on the
  event loop), or a "task" that an async method starts for itself.
  """

  def __init__(self, place, error, flavour):
    self.place = place
    self.error = error
    self.flavour = flavour

  @property
  def runs_inline(self):
    return self.flavour == "inline"

  def run(self, place, result):
    async def raising():
      raise self.error

    async def later():
      if place == self.place:
        if self.flavour == "task":
          await asyncio.create_task(raising())
        raise self.error
      return result

    if self.flavour in ("async", "task"):
      return later()
    if place == self.place:
      raise self.error
    return result


CLICK = (
  '<tool_call>{"name": "computer_use", "arguments": {"action":'
  ' "left_click", "coordinate": [5, 5]}}</tool_call>'
)


class Gym(Breaks):
  def start(self, task):
    return self.run("gym.start", self._seen())

  def act(self, action):
    return self.run("gym.act", self._seen())

  def evaluate(self):
    return self.run("gym.evaluate", gym_base.Evaluation(1.0, True))

  def close(self):
    return self.run("gym.close", None)

  def _seen(self):
    return gym_base.Observation(np.zeros((20, 20, 3), np.uint8))


class GuiParser(computer_use.ComputerUseParser):
  breaks: Breaks

  def to_gui_actions(self, *args):
    if self.breaks.place == "parser.to_gui_actions":
      raise self.breaks.error
    return super().to_gui_actions(*args)

  def parse_result(self, *args):
    if self.breaks.place == "parser.parse_result":
      raise self.breaks.error
    return super().parse_result(*args)


class Agent(fakes.ListAgent):
  def __init__(self, breaks):
    super().__init__()
    self._breaks = breaks

  @property
  def chat_completions(self):
    if self._breaks.place == "agent.chat_completions":
      raise self._breaks.error
    return super().chat_completions

  def update_from_env(self, *args):
    super().update_from_env(*args)
    return self._breaks.run("agent.update_from_env", None)

  def update_from_model(self, response):
    action = super().update_from_model(response)
    return self._breaks.run("agent.update_from_model", action)


class Tool(tools_base.BaseTool):
  def __init__(self, breaks):
    self.breaks = breaks
    super().__init__("tool", "breaks")

  @property
  def is_async(self):
    return self.breaks.flavour in ("async", "task")

  @property
  def json(self):
    if self.breaks.place == "tool.json":
      raise self.breaks.error
    return {"type": "function", "function": {"name": "tool"}}

  def forward(self):
    return self.breaks.run("tool.forward", "fine")

  async_forward = forward


class Client(fakes.TokenClient):
  def __init__(self, breaks):
    super().__init__(lambda turn, sampling: [110, fakes.EOT])
    self.breaks = breaks

  def open_session(self, session):
    if self.breaks.place == "client.open_session":
      raise self.breaks.error

  async def generate(self, *args, **kwargs):
    if self.breaks.place == "client.generate":
      await self.breaks.run("client.generate", None)
    return await super().generate(*args, **kwargs)

  async def release(self, session):
    if self.breaks.place == "client.release":
      await self.breaks.run("client.release", None)


def cua_episode(breaks):
  parser = GuiParser()
  parser.breaks = breaks
  store = images.ImageStore()
  env = cua_env.CUAEnv(
    Gym(breaks.place, breaks.error, breaks.flavour),
    screenshot.ScreenshotTool(store),
    gym_base.Task(
      task_id="t", family="f", seed=0, instruction="do", max_turns=1
    ),
    action_parser=parser,
  )
  env.runs_inline = breaks.runs_inline
  agent = tool_agent.ToolAgent(parser_name=parser)
  return agent, env, lambda messages: CLICK, None


def list_episode(breaks):
  env = fakes.ScriptEnv(rewards=(1.0,))
  return Agent(breaks), env, Client(breaks), None


def reward_episode(breaks):
  def reward(trajectory):
    del trajectory
    return breaks.run("reward", 1.0)

  reward.runs_inline = breaks.runs_inline
  return fakes.ListAgent(), fakes.ScriptEnv(rewards=(1.0,)), fakes.say_x, reward


def model_episode(breaks):
  def model(messages):
    del messages
    return breaks.run("model", "x")

  model.runs_inline = breaks.runs_inline
  return fakes.ListAgent(), fakes.ScriptEnv(rewards=(1.0,)), model, None


def task_reward_episode(breaks):
  env = tool_environment.ToolEnvironment(
    "what?", reward_fn=lambda task, action: breaks.run("task_reward", 1.0)
  )
  return tool_agent.ToolAgent(), env, lambda messages: "an answer", None


PLACES = {
  "gym.start": (cua_episode, Status.ENV_ERROR),
  "gym.act": (cua_episode, Status.ENV_ERROR),
  "gym.evaluate": (cua_episode, Status.ENV_ERROR),
  "gym.close": (cua_episode, Status.SUCCEEDED),
  "parser.to_gui_actions": (cua_episode, Status.ENV_ERROR),
  "parser.parse_result": (cua_episode, Status.ENV_ERROR),
  "agent.chat_completions": (list_episode, Status.ENV_ERROR),
  "agent.update_from_env": (list_episode, Status.ENV_ERROR),
  "agent.update_from_model": (list_episode, Status.ENV_ERROR),
  "client.open_session": (list_episode, Status.MODEL_ERROR),
  "client.generate": (list_episode, Status.MODEL_ERROR),
  "client.release": (list_episode, Status.SUCCEEDED),
  "reward": (reward_episode, Status.ENV_ERROR),
  "model": (model_episode, Status.MODEL_ERROR),
  "task_reward": (task_reward_episode, Status.ENV_ERROR),
}


def play(place, error, flavour):
  make, _ = PLACES[place]
  breaks = Breaks(place, error, flavour)
  agent, env, model, reward = make(breaks)
  if isinstance(model, Client):
    model = tc.PolicyModel(model, fakes.CharRenderer())
  recorder = fakes.Recorder()
  engine = tc.TrajectoryCollectEngine(
    agent, env, model, reward, max_steps=1, observers=recorder
  )
  return engine, recorder


@pytest.mark.parametrize("flavour", ["async", "sync", "inline", "task"])
@pytest.mark.parametrize("kind", list(exits()))
def test_an_exit_is_a_failed_episode(kind, flavour, loop):
  async def all_places():
    found = {}
    for place in PLACES:
      error = exits()[kind]
      if place.startswith("client") and flavour in ("sync", "inline"):
        continue  # A PolicyClient is async.
      found[place] = play(place, error, flavour)
    await asyncio.gather(*(engine.collect() for engine, _ in found.values()))
    return found

  found = loop.wait(all_places(), threading.Event())
  for place, (engine, recorder) in found.items():
    result = engine.trajectory
    faults = [f"{f.kind}: {f.message}" for f in recorder.of(events.Fault)]
    assert result.status is PLACES[place][1], (place, result.error)
    assert len(recorder.of(events.EpisodeFinished)) == 1
    (fault,) = faults
    named = kind in fault or "cancelled itself" in fault
    assert named and "CollectError" not in fault, (place, fault)
    if result.status is not Status.SUCCEEDED:
      assert result.error == fault


@pytest.mark.parametrize("flavour", ["async", "sync", "task"])
@pytest.mark.parametrize("kind", list(exits()))
def test_an_exit_of_a_tool_is_read_by_the_policy(kind, flavour, loop):
  async def outputs():
    found = {}
    for place in ("tool.forward", "tool.json"):
      breaks = Breaks(place, exits()[kind], flavour)
      env = tool_environment.ToolEnvironment(
        "what?", tool_map={"tool": Tool(breaks), "other": Tool(breaks)}
      )
      calls = [{"name": "tool"}, {"name": "other"}]
      found[place] = await env.tool_manager.outputs_async(calls)
    return found

  found = loop.wait(outputs(), threading.Event())
  for place, by_call in found.items():
    assert len(by_call) == 2
    for output in by_call.values():
      said = output.error or ""
      assert kind in said or "cancelled itself" in said, (place, output)


@pytest.mark.parametrize("kind", list(exits()))
def test_an_exit_of_the_factory_is_a_failed_episode(kind, loop):
  def factory(task):
    if task == "bad":
      raise exits()[kind]
    return fakes.ListAgent(), fakes.ScriptEnv(rewards=(1.0,))

  collector = tc.GroupCollector(
    factory, fakes.say_x, tc.CollectConfig(group_size=2, min_valid=1)
  )
  groups = loop.wait(
    collected.groups(collector, ["bad", "good"]), threading.Event()
  )
  bad, good = ([m.status for m in group] for group in groups)
  assert bad == [Status.ENV_ERROR] * 2
  assert good == [Status.SUCCEEDED] * 2


def test_an_exit_of_an_observer_is_counted(loop):
  class Leaves:
    def on_event(self, event):
      raise SystemExit(4)

  observers = events.Observers([Leaves()])

  async def main():
    engine = tc.TrajectoryCollectEngine(
      fakes.ListAgent(), fakes.ScriptEnv(), fakes.say_x, observers=observers
    )
    return await engine.collect()

  assert loop.wait(main(), threading.Event()).status is Status.SUCCEEDED
  assert observers.failures["Leaves"] > 2


def test_a_cancellation_of_the_caller_still_passes(loop):
  started = threading.Event()

  class Waits(fakes.ScriptEnv):
    async def step(self, action):
      started.set()
      await asyncio.sleep(3600)

  env = Waits()
  engine = tc.TrajectoryCollectEngine(fakes.ListAgent(), env, fakes.say_x)

  async def main():
    task = asyncio.create_task(engine.collect())
    await asyncio.to_thread(started.wait, 20)
    task.cancel()
    try:
      await task
    except asyncio.CancelledError:
      return "cancelled"

  assert loop.wait(main(), threading.Event()) == "cancelled"
  assert engine.trajectory.status is Status.CANCELLED
  assert env.closed == 1


def test_ctrl_c_in_the_main_thread_passes():
  def pressed():
    raise KeyboardInterrupt

  runner = concurrency.CallRunner()
  with pytest.raises(KeyboardInterrupt):
    asyncio.run(runner.call(pressed, inline=True))


def test_a_closed_coroutine_ends_quietly():
  async def main():
    with concurrency.contained():
      await asyncio.sleep(3600)

  async def outer():
    task = asyncio.create_task(main())
    await asyncio.sleep(0)
    task.get_coro().close()
    task.cancel()

  asyncio.run(outer())


def test_a_reward_in_a_thread_of_its_own_that_leaves():
  def leave(task, action):
    raise SystemExit("no reward")

  with pytest.raises(RuntimeError, match="SystemExit: no reward"):
    asyncio.run(rewards.evaluate_async(leave, {}, "x"))
