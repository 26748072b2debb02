"""Makes a gym an environment: screenshots out, GUI actions in.

The policy sees the screenshot at the screenshot tool's size, the accessibility
tree of a gym that shows one (`axtree` of the observation), or both, and acts in
tool calls; the environment turns them into `GuiAction`s in the gym's pixels.
The episode ends when the policy answers or terminates, when the gym reports it
over, when the policy gives plain text (see `on_text`), or after its last step;
then the gym evaluates the state it is in.

Promises: a call that is not a GUI action never raises: the policy reads the
error (or the episode ends, see `on_invalid`), and the gym is not touched. The
gym's errors propagate: they are the environment's failure, not a reward. A sync
gym runs in threads (`concurrency.Guarded`): it never blocks the event loop, and
an abandoned call keeps the gym to itself until it returns; the gym is closed
then.

Does not: impose deadlines; the collector does.
"""

from __future__ import annotations

import time
from typing import Any, Mapping

from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.tools import tool_base as tools_base

Kind = gui_action.GuiActionKind
Status = trajectory.TrajectoryStatus
_ON_TEXT = ("end", "answer", "retry")
_ON_INVALID = ("observe", "end")
# Above this many bytes a screenshot is resized and hashed in a thread.
_INLINE_BYTES = 1 << 19


class CUAEnv(base_env.BaseEnv):
  """See the module docstring.

  Attributes:
    gym: see `gyms.base.Gym`; its methods may also be sync. With
      `runs_inline = True` they are called on the event loop itself (they must
      be cheap then).
    task: the task of the episode.
    action_parser: the grammar.
    max_steps: turns an episode may take.
    step_count: turns taken.
    image: the newest screenshot; None where the gym shows trees only.
    size: (width, height) of what actions count pixels of.
    evaluation_seconds: Duration of the gym's verdict, None before it.
    runs_inline: Whether this environment is called on the event loop itself.
  """

  runs_inline = False

  def __init__(
    self,
    gym: Any,
    screenshot_tool: screenshot.ScreenshotTool,
    task: gym_base.Task | Mapping[str, Any],
    *,
    action_parser: str | base.ToolParser = "computer_use",
    max_steps: int | None = None,
    reward: Any = "score",
    on_text: str = "end",
    on_invalid: str = "observe",
    max_actions_per_step: int = 10,
  ):
    """Args:

      gym: a gym of this environment's own.
      screenshot_tool: stores the screenshots for the policy.
      task: a Task, or its JSON.
      action_parser: name, class or instance of a GuiActionParser.
      max_steps: turns, None for the task's own, else 10.
      reward: "score" (the evaluation's), "success" (0 or 1), or a reward
        function or its registered name, called with the task's JSON, the
        answer and an info with `success`, `evaluation` and `step_count`.
      on_text: a plain text action "end"s the episode as a parse error, is an
        "answer" that the gym gets, or lets the policy "retry".
      on_invalid: after a call that is not a GUI action, "observe" continues and
        "end" ends the episode as a parse error, without carrying out the
        turn's other calls.
      max_actions_per_step: calls of one turn that are carried out.

    Raises:
      ValueError: naming the argument.
    """
    if on_text not in _ON_TEXT:
      raise ValueError(
        f"on_text must be one of {', '.join(_ON_TEXT)}; got {on_text!r}"
      )
    if on_invalid not in _ON_INVALID:
      raise ValueError(
        f"on_invalid must be one of {', '.join(_ON_INVALID)}; got"
        f" {on_invalid!r}"
      )
    if not isinstance(task, gym_base.Task):
      task = gym_base.Task.from_json(task)
    if max_steps is None:
      max_steps = task.max_turns or 10
    if max_steps < 1 or max_actions_per_step < 1:
      raise ValueError(
        "max_steps and max_actions_per_step must be >= 1, got"
        f" {max_steps} and {max_actions_per_step}"
      )
    parser = tool_parser.make_tool_parser(action_parser, "operator")
    if not isinstance(parser, tool_parser.GuiActionParser):
      raise ValueError(
        f"action_parser {type(parser).__name__} has no GUI actions; use one"
        " such as 'computer_use'"
      )
    if reward not in ("score", "success") and isinstance(reward, str):
      reward = rewards.get_reward_fn(reward, "operator")
    self.gym = gym
    self.screenshot_tool = screenshot_tool
    self.task = task
    self.action_parser = parser.seeing(
      getattr(gym, "observation", parser.observation)
    )
    self.max_steps = max_steps
    self.step_count = 0
    self.image: trajectory.ImageRef | None = None
    self.size = (0, 0)
    self._latest: dict[str, Any] = {}
    self.evaluation_seconds: float | None = None
    self._reward = reward
    self._on_text = on_text
    self._on_invalid = on_invalid
    self._max_actions = max_actions_per_step
    self._scale = (1.0, 1.0)
    self._answer = ""
    self._running = False
    self._calls = concurrency.Guarded(
      gym, inline=concurrency.runs_inline(gym), name="the gym"
    )

  @property
  def scale(self) -> tuple[float, float]:
    """Gym pixels for one pixel of the newest screenshot, along x and y."""
    return self._scale

  async def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
    self._running = False
    self.step_count = 0
    self.evaluation_seconds = None
    self._answer = ""
    first = await self._calls.call("start", self.task)
    self._latest = await self._shown(first)
    observation = dict(self._latest)
    instruction = self.task.instruction or first.instruction
    if instruction:
      observation["instruction"] = instruction
    if first.text:
      observation["text"] = first.text
    self._running = True
    task = {**self.task.to_json(), "instruction": instruction}
    return observation, {"task": task, "gym": dict(first.info)}

  async def step(self, action: object) -> base_env.StepResult:
    """Carries out the actions of a turn.

    Args:
      action: an Action, ToolCalls, dicts, GuiActions in pixels of the
        screenshot, or a str (see `on_text`).

    Raises:
      RuntimeError: no episode is running.
      ValueError: no such action.
    """
    if not self._running:
      raise RuntimeError("no episode is running; call reset first")
    if not isinstance(action, str) and hasattr(action, "action"):
      action = action.action
    self.step_count += 1
    actions, errors, kinds, status = self._read(action)
    carried_out: list[dict[str, Any]] = []
    latest = None
    ended = status is not None
    for gui in actions:
      carried_out.append(gui.to_json())
      if gui.kind is Kind.ANSWER:
        self._answer = gui.text or ""
      if gui.kind is not Kind.SCREENSHOT:
        latest = await self._calls.call("act", gui.scaled(*self._scale))
        if not isinstance(latest, gym_base.Observation):
          raise TypeError(
            f"{type(self.gym).__name__}.act must return an Observation, got"
            f" {type(latest).__name__}"
          )
        ended = ended or latest.done
      if ended or gui.kind in (Kind.ANSWER, Kind.TERMINATE):
        ended = True
        break
    if latest is not None:
      self._latest = await self._shown(latest)
    observation = dict(self._latest)
    texts = [latest.text] if latest is not None and latest.text else []
    texts.extend(f"Error: {error}" for error in errors)
    if texts:
      observation["text"] = "\n".join(texts)
    info: dict[str, Any] = {"gui_actions": carried_out}
    if errors:
      info["invalid_actions"] = errors
      info["invalid_kinds"] = kinds
    if latest is not None and latest.info:
      info["gym"] = dict(latest.info)
    if not ended and self.step_count >= self.max_steps:
      ended, status = True, Status.MAX_TURNS
    if not ended:
      return observation, 0.0, False, info
    self._running = False
    reward = await self._evaluate(info)
    if info["success"]:
      status = Status.SUCCEEDED
    info["status"] = (status or Status.FAILED).value
    return observation, reward, True, info

  async def evaluate(self) -> rewards.RewardOutput:
    """Reward of the present state, for a caller that ends the episode.

    `step` has done it already for episodes that ended by themselves.
    """
    self._running = False
    info: dict[str, Any] = {}
    reward = await self._evaluate(info)
    metadata = {"success": info["success"]}
    if "reward_metadata" in info:
      metadata["parts"] = info["reward_metadata"]
    return rewards.RewardOutput(reward, metadata)

  async def close(self) -> None:
    """Closes the gym.

    Raises:
      StillRunningError: a call of the gym still runs; it is closed when that
        returns.
    """
    self._running = False
    await self._calls.close()

  @classmethod
  def from_dict(cls, env_args: Mapping[str, Any]) -> CUAEnv:
    """Builds the environment from a config; it is not changed.

    A config may be a row of a task file, so that its names are registered ones:
    give code of one's own as an object, or register it.

    Keys: `gym`, a name, {"name": …, and its settings} or a Gym;
    `task`, a Task or its JSON; `image_store`, an ImageStore or None for one of
    its own; `screenshot`, arguments of ScreenshotTool; `action_parser`, a name,
    {"name": …, and arguments} or a parser; and the constructor's other
    arguments.

    Raises:
      ValueError: a missing key or an unknown name.
    """
    args = dict(env_args)
    for key in ("gym", "task"):
      if key not in args:
        raise ValueError(f"a CUAEnv config needs {key!r}")
    gym = args.pop("gym")
    if isinstance(gym, (str, Mapping)):
      gym = gyms.from_config(gym)
    parser = args.get("action_parser")
    if isinstance(parser, str):
      args["action_parser"] = tool_parser.make_tool_parser(parser)
    if args.get("reward") not in (None, "score", "success") and isinstance(
      args["reward"], str
    ):
      args["reward"] = rewards.get_reward_fn(args["reward"])
    if isinstance(parser, Mapping):
      parser = dict(parser)
      if "name" not in parser:
        raise ValueError(f"the action_parser config needs 'name': {parser!r}")
      args["action_parser"] = tool_parser.get_tool_parser(parser.pop("name"))(
        **parser
      )
    store = args.pop("image_store", None)
    if store is None:
      store = images.ImageStore()
    tool = args.pop("screenshot_tool", None)
    options = args.pop("screenshot", None) or {}
    if tool is None:
      tool = screenshot.ScreenshotTool(store, **options)
    return cls(gym, tool, args.pop("task"), **args)

  def _read(
    self, action: object
  ) -> tuple[list[gui_action.GuiAction], list[str], list[str], Status | None]:
    """(actions, errors, their kinds, status when the episode must end)."""
    if isinstance(action, gui_action.GuiAction):
      action = [action]
    if isinstance(action, str):
      if self._on_text == "answer":
        answer = gui_action.GuiAction(Kind.ANSWER, text=action)
        return [answer], [], [], None
      error, kind = "no tool call in the response", trajectory.NO_CALL
      if self._on_text == "retry":
        return [], [error], [kind], None
      return [], [error], [kind], Status.PARSE_ERROR
    if isinstance(action, (list, tuple)) and all(
      isinstance(a, gui_action.GuiAction) for a in action
    ):
      return list(action), [], [], None
    actions: list[gui_action.GuiAction] = []
    errors: list[str] = []
    kinds: list[str] = []
    for call in tools_base.normalize_calls(action):
      if len(actions) >= self._max_actions:
        errors.append(f"at most {self._max_actions} calls a turn")
        kinds.append(trajectory.TOO_MANY_CALLS)
        break
      try:
        actions.extend(self.action_parser.to_gui_actions(call, *self.size))
      except tool_parser.ToolParseError as error:
        # Later calls may depend on it, so they are not carried out.
        errors.append(str(error))
        kinds.append(
          trajectory.TOOL_NAME
          if isinstance(error, tool_parser.UnknownActionError)
          else trajectory.TOOL_ARGUMENTS
        )
        break
    status = None
    if errors and self._on_invalid == "end":
      actions, status = [], Status.PARSE_ERROR
    return actions, errors, kinds, status

  async def _shown(
    self, gym_observation: gym_base.Observation
  ) -> dict[str, Any]:
    """Stores the screenshot; returns what the policy sees of the screen."""
    if not isinstance(gym_observation, gym_base.Observation):
      raise TypeError(
        f"{type(self.gym).__name__} must return an Observation, got"
        f" {type(gym_observation).__name__}"
      )
    pixels, tree = gym_observation.screenshot, gym_observation.axtree
    if pixels is None:
      self.size = self.gym.width, self.gym.height
      return {"axtree": tree}
    if getattr(pixels, "nbytes", 0) > _INLINE_BYTES:
      shot = await concurrency.acall(self.screenshot_tool.capture, pixels)
    else:
      shot = self.screenshot_tool.capture(pixels)
    self.image = shot.image
    self.size = shot.image.width, shot.image.height
    self._scale = shot.scale
    return {"screenshot": shot.image, **({"axtree": tree} if tree else {})}

  async def _evaluate(self, info: dict[str, Any]) -> float:
    """Evaluates the gym's state, fills `info`, returns the reward."""
    started = time.perf_counter()
    evaluation = await self._calls.call("evaluate")
    self.evaluation_seconds = time.perf_counter() - started
    if not isinstance(evaluation, gym_base.Evaluation):
      raise TypeError(
        f"{type(self.gym).__name__}.evaluate must return an Evaluation, got"
        f" {type(evaluation).__name__}"
      )
    score = rewards.as_reward(evaluation.score, "the gym's score").reward
    info["success"] = bool(evaluation.success)
    info["evaluation"] = {
      "score": score,
      "success": bool(evaluation.success),
      "details": dict(evaluation.details),
    }
    if self._answer:
      info["answer"] = self._answer
    if self._reward == "score":
      return score
    if self._reward == "success":
      return float(evaluation.success)
    output = await rewards.evaluate_async(
      self._reward,
      self.task.to_json(),
      self._answer,
      {**info, "step_count": self.step_count},
      timeout=None,
    )
    info["reward_metadata"] = output.metadata
    return output.reward
