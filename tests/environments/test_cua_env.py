"""A computer to be used: what reaches the gym, what the policy sees, gets."""

import asyncio
import json
import threading

import numpy as np
import pytest
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.core.statistics import reward_parts
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.parser import tool_parser

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
PARSER = tool_parser.make_tool_parser("computer_use")
WIDTH, HEIGHT = 100, 50
TASK = {"task_id": "t-1", "family": "click", "instruction": "press it"}


class ButtonGym:
  """A button at (70, 20), 10 pixels around; a click on it solves the task."""

  def __init__(self, end_on_click=False):
    self.acted = []
    self.calls = []
    self.solved = False
    self.end_on_click = end_on_click

  def observe(self, ended=False, **kwargs):
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[0, 0, 0] = len(self.acted)
    return gym_base.Observation(pixels, done=ended, **kwargs)

  async def start(self, task):
    self.calls.append("start")
    self.acted, self.solved = [], False
    return self.observe(info={"url": "about:blank", "raw": object()})

  async def act(self, action):
    self.calls.append("act")
    self.acted.append(action)
    if action.kind is Kind.CLICK:
      self.solved = abs(action.x - 70) <= 10 and abs(action.y - 20) <= 10
    ended = self.end_on_click and action.kind is Kind.CLICK
    return self.observe(ended, text="beep" if self.solved else "")

  async def evaluate(self):
    self.calls.append("evaluate")
    return gym_base.Evaluation(
      0.75 if self.solved else 0.0, self.solved, {"why": np.zeros(9999)}
    )

  async def close(self):
    self.calls.append("close")


class SyncButtonGym(ButtonGym):
  """The same without a coroutine."""

  def start(self, task):
    return asyncio.run(super().start(task))

  def act(self, action):
    return asyncio.run(super().act(action))

  def evaluate(self):
    return asyncio.run(super().evaluate())

  def close(self):
    self.calls.append("close")


def make(gym=None, size=None, task=None, **kwargs):
  tool = tools.ScreenshotTool(images.ImageStore(), size=size)
  return environments.CUAEnv(gym or ButtonGym(), tool, task or TASK, **kwargs)


def use(**arguments):
  return trajectory.ToolCall("computer_use", arguments)


HIT = use(action="left_click", coordinate=[700, 400])
MISS = use(action="left_click", coordinate=[10, 10])
WAIT = use(action="wait")
DONE = use(action="terminate", status="success")


def run(env, *actions):
  """Resets, steps and closes; returns (reset result, step results)."""

  async def main():
    first = await env.reset()
    results = [await env.step(action) for action in actions]
    await env.close()
    return first, results

  return asyncio.run(main())


class TestReset:
  def test_screenshot_by_reference_and_the_instruction(self):
    env = make()
    (observation, info), _ = run(env)
    assert observation["instruction"] == "press it"
    shot = observation["screenshot"]
    assert (shot.width, shot.height) == (WIDTH, HEIGHT)
    assert shot in env.screenshot_tool.image_store
    assert info["task"]["task_id"] == "t-1"
    assert info["gym"]["url"] == "about:blank"

  def test_instruction_may_come_from_the_gym(self):
    class Tells(ButtonGym):
      async def start(self, task):
        return self.observe(instruction="focus it", text="hello")

    env = make(Tells(), task={"task_id": "t", "family": "f"})
    (observation, info), _ = run(env)
    assert (observation["instruction"], observation["text"]) == (
      "focus it",
      "hello",
    )
    assert info["task"]["instruction"] == "focus it"

  def test_step_before_reset_is_refused(self):
    with pytest.raises(RuntimeError, match="call reset first"):
      asyncio.run(make().step([HIT]))


class TestActions:
  def test_coordinates_reach_the_gym_in_its_pixels(self):
    gym = ButtonGym()
    _, ((observation, reward, ended, info),) = run(make(gym), [HIT])
    assert gym.acted == [Action(Kind.CLICK, x=70, y=20)]
    assert (reward, ended) == (0.0, False)
    assert observation["text"] == "beep" and "instruction" not in observation
    assert info == {"gui_actions": [{"kind": "click", "x": 70.0, "y": 20.0}]}

  @pytest.mark.parametrize("name", ["computer_use", "computer_use_absolute"])
  def test_resized_screenshot_is_scaled_back(self, name):
    gym = ButtonGym()
    parser = tool_parser.make_tool_parser(name)
    env = make(gym, size=(50, 100), action_parser=name)
    text = parser.format_gui_action(Action(Kind.CLICK, x=35, y=40), 50, 100)
    _, ((observation, _, _, info),) = run(env, parser.parse(text))
    assert (
      observation["screenshot"].width,
      observation["screenshot"].height,
    ) == (50, 100)
    assert gym.acted == [Action(Kind.CLICK, x=70, y=20)]
    # The log speaks of what the policy saw.
    assert info["gui_actions"] == [{"kind": "click", "x": 35.0, "y": 40.0}]

  @pytest.mark.parametrize(
    "action",
    [
      HIT,
      [HIT],
      trajectory.Action([HIT]),
      {"name": "computer_use", "arguments": HIT.arguments},
      [
        {
          "function": {
            "name": "computer_use",
            "arguments": json.dumps(HIT.arguments),
          }
        }
      ],
      Action(Kind.CLICK, x=70, y=20),
      [Action(Kind.CLICK, x=70, y=20)],
    ],
  )
  def test_every_shape_of_action(self, action):
    gym = ButtonGym()
    run(make(gym), action)
    assert gym.acted == [Action(Kind.CLICK, x=70, y=20)]

  def test_several_calls_in_order_and_one_observation(self):
    gym = ButtonGym()
    env = make(gym)
    _, ((observation, _, _, info),) = run(env, [WAIT, MISS, HIT])
    assert [a.kind for a in gym.acted] == [Kind.WAIT, Kind.CLICK, Kind.CLICK]
    assert len(info["gui_actions"]) == 3
    pixels = env.screenshot_tool.image_store.get(observation["screenshot"])
    assert pixels[0, 0, 0] == 3

  def test_calls_of_one_turn_are_bounded(self):
    gym = ButtonGym()
    _, ((observation, _, _, info),) = run(
      make(gym, max_actions_per_step=2), [WAIT] * 5
    )
    assert len(gym.acted) == 2 and "at most 2 calls" in observation["text"]
    assert len(info["invalid_actions"]) == 1

  def test_scroll_distances_are_scaled_like_positions(self):
    gym = ButtonGym()
    scroll = Action(Kind.SCROLL, x=35, y=40, dx=10, dy=-30)
    run(make(gym, size=(50, 100)), scroll)
    assert gym.acted == [Action(Kind.SCROLL, x=70, y=20, dx=20, dy=-15)]

  def test_screenshot_action_does_not_touch_the_gym(self):
    gym = ButtonGym()
    first, (result,) = run(make(gym), [Action(Kind.SCREENSHOT)])
    assert not gym.acted
    assert result[0]["screenshot"] == first[0]["screenshot"]

  def test_a_sync_gym_does_not_block_the_loop_unless_it_says_so(self):
    threads = []

    class Gym(SyncButtonGym):
      def act(self, action):
        threads.append(threading.current_thread())
        return super().observe()

    gym = Gym()
    run(make(gym), [WAIT])
    assert threads[-1] is not threading.current_thread()
    gym.start = lambda task: gym.observe()
    gym.runs_inline = True
    run(make(gym), [WAIT])
    assert threads[-1] is threading.current_thread()

  def test_a_hanging_sync_gym_ends_by_its_deadline_and_is_closed_later(self):
    gate = threading.Event()

    class Hanging(SyncButtonGym):
      def act(self, action):
        gate.wait(30)
        self.calls.append("act")
        return self.observe()

    async def main():
      gym = Hanging()
      env = make(gym)
      text = PARSER.format_gui_action(Action(Kind.WAIT), WIDTH, HEIGHT)
      result = await asyncio.wait_for(
        tc.TrajectoryCollectEngine(
          agents.ToolAgent("", "computer_use"),
          env,
          lambda messages: text,
          deadlines=tc.Deadlines(step=0.2),
        ).collect(),
        20,
      )
      assert result.error.startswith("EnvStepTimeout")
      assert result.metrics["close_failed"] == 1
      assert gym.calls == ["start"]  # Not closed beside its own call.
      with pytest.raises(RuntimeError, match="Hanging.act was given up"):
        await env.reset()
      with pytest.raises(RuntimeError, match="closed when it returns"):
        await env.close()
      gate.set()
      while "close" not in gym.calls:
        await asyncio.sleep(0.01)
      assert gym.calls == ["start", "act", "close"]
      await env.close()

    asyncio.run(main())

  @pytest.mark.parametrize("gym", [ButtonGym, SyncButtonGym])
  def test_gyms_may_be_sync(self, gym):
    gym = gym()
    assert run(make(gym), [HIT], [DONE])[1][-1][1] == 0.75
    assert gym.calls[-1] == "close"


class TestInvalid:
  @pytest.mark.parametrize(
    "call, reason",
    [
      (use(action="left_click"), "needs 'coordinate'"),
      (use(action="fly"), "unknown action 'fly'"),
      (use(action="left_click", coordinate=[5000, 1]), "between 0 and 999"),
      (trajectory.ToolCall("browser", {}), "unknown tool 'browser'"),
    ],
  )
  def test_is_told_and_the_episode_goes_on(self, call, reason):
    gym = ButtonGym()
    first, (reply, hit, end) = run(make(gym), [call], [HIT], [DONE])
    observation, reward, ended, info = reply
    assert reason in observation["text"] and observation["text"].startswith(
      "Error:"
    )
    assert observation["screenshot"] == first[0]["screenshot"]
    assert (reward, ended, info["gui_actions"]) == (0.0, False, [])
    assert reason in info["invalid_actions"][0]
    assert "Error" not in hit[0]["text"] and end[1] == 0.75

  def test_what_follows_an_invalid_call_is_not_carried_out(self):
    gym = ButtonGym()
    run(make(gym), [WAIT, use(action="fly"), HIT])
    assert [a.kind for a in gym.acted] == [Kind.WAIT]

  def test_may_end_the_episode(self):
    _, ((_, reward, ended, info),) = run(
      make(on_invalid="end"), [use(action="fly")]
    )
    assert (reward, ended, info["status"]) == (0.0, True, "parse_error")

  def test_what_ends_the_episode_touches_the_gym_with_no_call_of_its_turn(self):
    gym = ButtonGym()
    env = make(gym, on_invalid="end")
    _, ((_, _, ended, info),) = run(env, [WAIT, HIT, use(action="fly")])
    assert ended and info["status"] == "parse_error"
    assert not gym.acted and info["gui_actions"] == []

  def test_no_call_is_a_turn_without_action(self):
    gym = ButtonGym()
    _, ((observation, _, ended, _),) = run(make(gym), [])
    assert not gym.acted and not ended and set(observation) == {"screenshot"}

  def test_plain_text_by_choice(self):
    for on_text, ends, status in (
      ("end", True, "parse_error"),
      ("retry", False, None),
      ("answer", True, "failed"),
    ):
      gym = ButtonGym()
      _, ((_, _, ended, info),) = run(make(gym, on_text=on_text), "it is 8")
      assert (ended, info.get("status")) == (ends, status)
      answered = [Action(Kind.ANSWER, text="it is 8")]
      assert gym.acted == (answered if on_text == "answer" else [])


class TestEnd:
  @pytest.mark.parametrize("last", [DONE, use(action="answer", text="8")])
  def test_terminate_and_answer_reach_the_gym_and_end(self, last):
    gym = ButtonGym()
    _, (_, (_, reward, ended, info)) = run(make(gym), [HIT], [last, MISS])
    assert len(gym.acted) == 2  # Nothing after the end.
    assert (reward, ended) == (0.75, True)
    assert info["success"] and info["status"] == "succeeded"
    assert info["evaluation"]["score"] == 0.75
    assert gym.calls == ["start", "act", "act", "evaluate", "close"]

  def test_claiming_success_does_not_make_it(self):
    _, ((_, reward, _, info),) = run(make(), [DONE])
    assert (reward, info["success"], info["status"]) == (0.0, False, "failed")

  def test_gym_may_end_it(self):
    gym = ButtonGym(end_on_click=True)
    _, ((observation, reward, ended, _),) = run(make(gym), [HIT, WAIT])
    assert (reward, ended, len(gym.acted)) == (0.75, True, 1)
    assert observation["screenshot"]

  def test_last_step_is_evaluated(self):
    _, results = run(make(max_steps=2), [WAIT], [WAIT])
    assert [r[2] for r in results] == [False, True]
    assert results[-1][3]["status"] == "max_turns"
    _, results = run(make(max_steps=1), [HIT])
    assert results[-1][1] == 0.75 and results[-1][3]["status"] == "succeeded"

  def test_turns_come_from_the_task_by_default(self):
    assert make(task={**TASK, "max_turns": 4}).max_steps == 4
    assert make().max_steps == 10
    assert make(task={**TASK, "max_turns": 4}, max_steps=2).max_steps == 2

  def test_after_the_end_only_reset(self):
    env = make()

    async def main():
      await env.reset()
      await env.step([DONE])
      with pytest.raises(RuntimeError, match="call reset first"):
        await env.step([DONE])
      await env.reset()
      return await env.step([HIT])

    assert asyncio.run(main())[2] is False and env.step_count == 1

  @pytest.mark.parametrize(
    "reward, expected",
    [
      ("score", 0.75),
      ("success", 1.0),
      (lambda task, action, info: info["evaluation"]["score"] * 2, 1.5),
    ],
  )
  def test_reward_modes(self, reward, expected):
    _, (_, result) = run(make(reward=reward), [HIT], [DONE])
    assert result[1] == expected

  @pytest.mark.parametrize("limit", [2, 1], ids=["environment", "engine"])
  def test_an_episode_keeps_its_rewards_parts(self, limit):
    """The engine may end it, and rewards of the whole episode may follow."""
    plan = rewards.plan({"success": 1, "zero": 0.5, "format": 0.25})
    env = make(reward=plan.environment, max_steps=2)
    model = iter(
      [
        PARSER.format_gui_action(Action(Kind.CLICK, x=70, y=20), 100, 50),
        PARSER.format_gui_action(Action(Kind.TERMINATE, success=True), 100, 50),
      ]
    )
    engine = tc.TrajectoryCollectEngine(
      agents.ToolAgent("", "computer_use"),
      env,
      lambda messages: next(model),
      plan.episode,
      max_steps=limit,
    )
    result = asyncio.run(engine.collect())
    parts = reward_parts.of_episode(result)
    assert {name: part.weight for name, part in parts.items()} == {
      "success": 1.0,
      "zero": 0.5,
      "format": 0.25,
    }
    assert parts["success"].value == 1.0
    assert result.reward == pytest.approx(
      sum(part.weight * part.value for part in parts.values())
    )
    assert result.status.value == "succeeded"

  def test_a_reward_function_has_the_callers_deadline_only(self, monkeypatch):
    deadlines = []
    real = rewards.evaluate_async

    async def watched(*args, timeout=30.0):
      deadlines.append(timeout)
      return await real(*args, timeout=timeout)

    monkeypatch.setattr(rewards, "evaluate_async", watched)
    env = make(reward=lambda task, action, info: 0.5)
    assert run(env, [DONE])[1][-1][1] == 0.5
    assert deadlines == [None]

  def test_nothing_but_pixels_state_and_no_image_bytes_in_the_trajectory(self):
    agent = agents.ToolAgent("", "computer_use", on_parse_error="retry")
    env = make()
    texts = [
      "nonsense",
      PARSER.format_gui_action(Action(Kind.CLICK, x=70, y=20), 100, 50),
      PARSER.format_gui_action(Action(Kind.TERMINATE, success=True), 100, 50),
    ]

    model = iter(texts)
    engine = tc.TrajectoryCollectEngine(
      agent, env, lambda messages: next(model)
    )
    result = asyncio.run(engine.collect())
    assert (result.reward, result.status.value) == (0.75, "succeeded")
    first, second, last = result.steps
    assert first.info["parse_errors"] and last.info["success"]
    assert (
      "Error: no tool call" in agent.chat_completions[3]["content"][1]["text"]
    )
    assert len(json.dumps(result.to_json())) < 15_000


class TestBrokenGym:
  @pytest.mark.parametrize("method", ["start", "act", "evaluate", "close"])
  def test_what_it_raises_goes_through(self, method):
    gym = ButtonGym()

    async def broken(*unused):
      raise ConnectionResetError(method)

    setattr(gym, method, broken)
    with pytest.raises(ConnectionResetError, match=method):
      run(make(gym), [DONE])

  @pytest.mark.parametrize(
    "method, garbage, reason",
    [
      ("start", None, "must return an Observation, got NoneType"),
      ("act", {"screenshot": 1}, "act must return an Observation, got dict"),
      ("act", gym_base.Observation(np.zeros((2, 2))), r"uint8\[H, W, 3\]"),
      ("evaluate", 1.0, "must return an Evaluation, got float"),
      ("evaluate", gym_base.Evaluation(float("nan"), True), "finite"),
    ],
  )
  def test_garbage_is_refused(self, method, garbage, reason):
    gym = ButtonGym()

    async def odd(*unused):
      return garbage

    setattr(gym, method, odd)
    with pytest.raises((TypeError, ValueError), match=reason):
      run(make(gym), [WAIT], [DONE])


class TestConfig:
  def test_from_dict_builds_everything_by_name(self):
    gyms.register("button", ButtonGym)
    try:
      config = {
        "type": "cua",
        "gym": {"name": "button", "end_on_click": True},
        "task": TASK,
        "screenshot": {"size": (50, 25)},
        "action_parser": {"name": "computer_use", "grid": (4, 4)},
        "max_steps": 3,
      }
      copy = json.dumps(config)
      env = environments.BaseEnv.from_dict(config)
      assert json.dumps(config) == copy
      assert isinstance(env, environments.CUAEnv) and env.gym.end_on_click
      assert env.action_parser.grid == (4, 4) and env.max_steps == 3
      (observation, _), (result,) = run(env, [HIT])
      assert observation["screenshot"].width == 50 and result[1] == 0.75
    finally:
      gyms.unregister("button")

  def test_real_desktop_from_a_config(self):
    env = environments.BaseEnv.from_dict(
      {
        "type": "cua",
        "gym": {"name": "desktop", "width": 224, "height": 160},
        "task": {"task_id": "d", "family": "click-button", "seed": 3},
        "max_steps": 2,
      }
    )
    (observation, _), results = run(env, [WAIT], [DONE])
    shot = observation["screenshot"]
    assert (shot.width, shot.height) == (224, 160)
    assert observation["instruction"]
    assert results[-1][1:3] == (0.0, True)

  def test_gym_settings_that_are_wrong_are_refused(self):
    with pytest.raises(ValueError, match="widht"):
      gyms.from_config({"name": "desktop", "widht": 224})

  def test_dotted_path_is_imported_when_made(self):
    gyms.register("later", "no.such.module:Gym")
    try:
      with pytest.raises(ImportError):
        gyms.make("later")
    finally:
      gyms.unregister("later")

  def test_named_gyms(self):
    assert {"desktop", "gymnasium", "miniwob"} <= set(gyms.names())
    with pytest.raises(ValueError, match="did you mean 'miniwob'"):
      gyms.make("miniwobb")

  @pytest.mark.parametrize(
    "kwargs, reason",
    [
      ({"on_text": "stop"}, "on_text"),
      ({"on_invalid": "stop"}, "on_invalid"),
      ({"max_steps": 0}, "max_steps"),
      ({"action_parser": "qwen"}, "has no GUI actions"),
      ({"action_parser": "computer_user"}, "did you mean 'computer_use'"),
      ({"reward": "scor"}, "unknown reward"),
    ],
  )
  def test_bad_settings_are_refused(self, kwargs, reason):
    with pytest.raises(ValueError, match=reason):
      make(**kwargs)

  def test_missing_keys_are_named(self):
    with pytest.raises(ValueError, match="needs 'gym'"):
      environments.CUAEnv.from_dict({"task": TASK})
    with pytest.raises(ValueError, match="needs 'name'"):
      environments.CUAEnv.from_dict({"task": TASK, "gym": {}})
