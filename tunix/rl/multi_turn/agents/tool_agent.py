"""Plays an episode by tool calls, with screenshots, trees or texts.

`ToolAgent` takes observations that are a str or a dict with any of:
- `question` or `instruction`: the task, a user message.
- `tool_outputs` {call id: text}: one user message each, with its
  `tool_call_id`, "Tool returned result: …"; before it the images that
  `tool_images` {call id: ImageRefs} has of that call.
- `screenshot` ImageRef: a user message of parts, the image first, then the
  texts of the same observation.
- `axtree`: the page as a tree, after the task and before `text`.
- `text`: anything else for the policy to read.

Promises: messages are kept in full and never copied; `update_from_model`
returns an action for any text, and a malformed call is recorded in the step's
`info["parse_errors"]`; the step of a summary has `info["summary"]`.

Does not: run tools or judge answers; environments do.
"""

from __future__ import annotations

import functools
from typing import Any, Mapping

from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.agents import agent_settings
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.agents import history
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.tools import manager
from tunix.rl.multi_turn.tools import screenshot

Message = trajectory_lib.Message
_MAX_LINE = 300
_PARSE_ERROR_MODES = ("answer", "retry", "end")
_OBSERVATION_KEYS = (
  "question",
  "instruction",
  "tool_outputs",
  "screenshot",
  "axtree",
  "text",
)


class ToolAgent(base_agent.BaseAgent):
  """Plays an episode by tool calls; see the module docstring.

  Attributes:
    is_summarizing: whether the policy's next text is a summary.
    summary_tokens: Longest summary.
    tool_manager: holds the tools' schemas; it runs nothing here.
    tool_parser: reads and writes tool calls.
    tools_prompt: the part of the system prompt that shows the tools.
  """

  def __init__(
    self,
    system_prompt: str = "",
    parser_name: str | parser_base.ToolParser = "qwen",
    tool_map: Mapping[str, Any] | None = None,
    *,
    tools_schema: parser_base.ToolsSchema = None,
    on_parse_error: str = "answer",
    max_images: int | None = None,
    image_stride: int = 1,
    image_note: str = "",
    list_dropped_turns: bool = False,
    show_tools: bool = True,
    screen: tuple[int, int] | None = None,
    observation: str = "screenshot",
    older_scale: float = 1.0,
    image_store: images.ImageStore | None = None,
    summary_at: int = 0,
    summary_tokens: int = 64,
    summary_images: int = 1,
    summary_prompt: str = agent_settings.SUMMARY_PROMPT,
  ):
    """Args:

      system_prompt: text; the tool prompt replaces `$tools_prompt` in it, or
        follows it.
      parser_name: Name of the tool parser; or its class or an instance.
      tool_map: name -> tool class or tool, shown to the model.
      tools_schema: instead of `tool_map`, OpenAI schemas or their text. Without
        either, the parser's own tools are shown.
      on_parse_error: the action for a response without a well-formed call:
        "answer" and "end": an Action with the text, which ends the episode
        ("end" also records it as a parse error); "retry": an Action without
        calls, and the next user message names the error.
      max_images: screenshots or trees the policy sees at once; None for all.
      image_stride, image_note, list_dropped_turns: see
        `history.MessageHistory`; the note is "(an older screenshot)" or "(an
        older page)". A turn's line in the list is the last line of its thought,
        else its call.
      show_tools: False: `system_prompt` is complete and nothing is added.
      screen: (width, height) of the screenshots, which the prompts of some GUI
        grammars state.
      observation: "screenshot", "axtree" or "both": what is seen of a gym's
        screen, which decides the actions of some GUI grammars.
      older_scale: the share of their sides at which screenshots before the
        newest are seen, in (0, 1].
      image_store: Store of the screenshots; `older_scale` needs it.
      summary_at: Tokens of context after whose passing the policy is asked for
        a summary, in place of earlier turns; 0 for never.
      summary_tokens, summary_images, summary_prompt: see
        `agent_settings.AgentConfig`.

    Raises:
      ValueError: naming the argument.
    """
    if on_parse_error not in _PARSE_ERROR_MODES:
      raise ValueError(
        f"on_parse_error must be one of {', '.join(_PARSE_ERROR_MODES)}; got"
        f" {on_parse_error!r}"
      )
    if tool_map and tools_schema is not None:
      raise ValueError("give tool_map or tools_schema, not both")
    self.system_prompt = system_prompt or ""
    self.tool_manager = manager.ToolManager(tool_map)
    self.tool_parser = tool_parser.make_tool_parser(parser_name, "operator")
    if isinstance(self.tool_parser, tool_parser.GuiActionParser):
      self.tool_parser = self.tool_parser.seeing(observation, screen)
    if tool_map:
      tools_schema = self.tool_manager.json
    # Schemas declare their arguments' types; a text is only shown.
    if tools_schema is not None and not isinstance(tools_schema, str):
      self.tool_parser = self.tool_parser.for_tools(tools_schema)
    if not show_tools:
      self.tools_prompt = ""
    elif tools_schema is not None or self.tool_parser.default_tools:
      self.tools_prompt = self.tool_parser.get_tool_prompt(tools_schema)
    else:
      self.tools_prompt = ""
    self.on_parse_error = on_parse_error
    if not 0 < older_scale <= 1:
      raise ValueError(f"older_scale must be in (0, 1], got {older_scale}")
    shrink = None
    if older_scale < 1:
      if image_store is None:
        raise ValueError(f"older_scale={older_scale} needs an image_store")
      shrink = functools.partial(
        screenshot.shrunk, image_store, scale=older_scale
      )
    if not image_note:
      kind = "page" if observation == "axtree" else "screenshot"
      image_note = f"(an older {kind})"
    windows = (max_images, image_stride, image_note, list_dropped_turns)
    self._history_args = (*windows, shrink)
    self._lists_dropped = list_dropped_turns
    self._summary_at = summary_at
    self.summary_tokens = summary_tokens
    self._summary_images = summary_images
    self._summary_prompt = summary_prompt
    self._system: Message = {
      "role": "system",
      "content": prompts.insert_tools(self.system_prompt, self.tools_prompt),
    }
    self.reset()

  def reset(self) -> None:
    self._history = history.MessageHistory(*self._history_args)
    self._history.append(self._system)
    self._trajectory = trajectory_lib.Trajectory()
    self._complaint = ""
    self.is_summarizing = False

  @property
  def chat_completions(self) -> list[Message]:
    return self._history.seen

  @property
  def _messages(self) -> history.MessageView:
    """The history by its name in the source document."""
    return self._history.full

  @property
  def history(self) -> history.MessageView:
    """All messages, including screenshots that the window has dropped."""
    return self._history.full

  @property
  def history_rewrites(self) -> int:
    """Times that an earlier part of `chat_completions` has changed."""
    return self._history.rewrites

  @property
  def trajectory(self) -> trajectory_lib.Trajectory:
    return self._trajectory

  # --- environment ----------------------------------------------------------

  def update_from_env(
    self,
    observation: object,
    reward: float = 0.0,
    done: bool = False,
    info: Mapping[str, Any] | None = None,
  ) -> None:
    """See the base class.

    Raises:
      ValueError: an observation of no known kind, naming its keys.
    """
    info = info or {}
    if self._trajectory.task is None:
      self._trajectory.task = info.get("task", observation)
    step = self.current_step
    if step is not None:
      step.observation = observation
      step.reward = float(reward)
      step.done = bool(done)
      step.info.update(info)
    if done:  # No model reads it.
      return
    complaint, self._complaint = self._complaint, ""
    page = ""
    if isinstance(observation, Mapping):
      page = str(observation.get("axtree") or "")
    for message in _to_messages(observation, complaint):
      holds = page and "tool_call_id" not in message
      self._history.append(message, page=page if holds else "")

  # --- model ----------------------------------------------------------------

  def update_from_model(self, response: str) -> trajectory_lib.Action:
    """See the base class.

    Raises:
      ToolParseError: `response` is not a str.
    """
    result = self.tool_parser.parse_result(response)
    line = _line(result, response) if self._lists_dropped else ""
    self._history.append({"role": "assistant", "content": response}, line)
    step_info: dict[str, Any] = {}
    errors = list(result.errors)
    if result.calls:
      value: Any = list(result.calls)
    else:
      if self.on_parse_error != "answer" and not errors:
        errors = ["no tool call in the response"]
      if self.on_parse_error == "retry":
        value = []
        self._complaint = f"Error: {errors[0]}"
      else:
        reasoned = "</think>" in response and not errors
        value = result.answer if reasoned else response
    if errors:
      step_info["parse_errors"] = errors
    action = trajectory_lib.Action(value)
    self._trajectory.steps.append(
      trajectory_lib.Step(
        chat_completions=self._history.view(),
        thought=result.thought,
        action=action,
        model_response=response,
        info=step_info,
      )
    )
    return action

  def summary_request(self, context_tokens: int) -> list[Message] | None:
    """See the base class."""
    if not self._summary_at or context_tokens < self._summary_at:
      return None
    self._history.append({"role": "user", "content": self._summary_prompt})
    self.is_summarizing = True
    return self._history.seen

  def update_from_summary(self, response: str) -> trajectory_lib.Action:
    """Puts the policy's summary in place of earlier turns."""
    self._history.append({"role": "assistant", "content": response})
    before = self.current_step
    action = trajectory_lib.Action([])
    self._trajectory.steps.append(
      trajectory_lib.Step(
        chat_completions=self._history.view(),
        action=action,
        # The screen is as before.
        observation=before.observation if before is not None else None,
        model_response=response,
        info={"summary": True},
      )
    )
    summary = response.rpartition("</think>")[2].strip()
    self._history.compact(summary, self._summary_images)
    self.is_summarizing = False
    return action


def _line(result: parser_base.ParseResult, response: str) -> str:
  """A turn in a line: what the policy meant to do, else what it wrote."""
  for text in (result.thought, response):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
      line = lines[-1].removeprefix("Action:").strip()
      return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"
  return "(nothing)"


def _to_messages(observation: object, complaint: str) -> list[Message]:
  """User messages for an observation; its texts include the parse error."""
  messages: list[Message] = []
  if observation is None:
    observation = {}
  if isinstance(observation, str):
    observation = {"text": observation}
  if not isinstance(observation, Mapping):
    raise ValueError(
      "an observation must be a str or a dict, got"
      f" {type(observation).__name__}"
    )
  if observation and not any(k in observation for k in _OBSERVATION_KEYS):
    got = ", ".join(map(str, observation))
    raise ValueError(
      f"an observation needs one of {', '.join(_OBSERVATION_KEYS)}; got {got}"
    )
  images = observation.get("tool_images") or {}
  for call_id, output in (observation.get("tool_outputs") or {}).items():
    content: Any = f"Tool returned result: {output}"
    if images.get(call_id):
      shown = [{"type": "image", "image": ref} for ref in images[call_id]]
      content = [*shown, {"type": "text", "text": content}]
    messages.append(
      {"role": "user", "tool_call_id": call_id, "content": content}
    )
  texts = [
    str(observation[key])
    for key in ("question", "instruction", "axtree", "text")
    if observation.get(key)
  ]
  if complaint:
    texts.append(complaint)
  text = "\n".join(texts)
  image = observation.get("screenshot")
  if image is not None:
    if not isinstance(image, trajectory_lib.ImageRef):
      raise ValueError(
        "a screenshot must be an ImageRef, got"
        f" {type(image).__name__}; store pixels with ScreenshotTool.capture"
      )
    parts: list[dict[str, Any]] = [{"type": "image", "image": image}]
    if text:
      parts.append({"type": "text", "text": text})
    messages.append({"role": "user", "content": parts})
  elif text or "question" in observation:
    messages.append({"role": "user", "content": text})
  return messages
