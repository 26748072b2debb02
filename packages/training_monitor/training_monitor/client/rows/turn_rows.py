"""Makes the rows of a turn: itself, its actions, what the policy saw.

Turns are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training_monitor.client.rows import live_turns
from training_monitor.client.rows import turn_tokens
from training_monitor.core import trajectory as trajectory_lib


def of_turn(
  name: str,
  index: int,
  step: trajectory_lib.Step,
  time: tuple[float, float, Mapping[str, float]],
  before: trajectory_lib.ImageRef | None,
  tokens: turn_tokens.TurnTokens,
  messages: list[Any] | None,
) -> dict[str, list[dict[str, Any]]]:
  """Returns the rows of the turn number `index`, from 0.

  Args:
    name: Name of the rollout.
    index: Index of the turn.
    step: the turn.
    time: (start, end, seconds by stage).
    before: the screen that the policy saw.
    tokens: Tokens of the turn.
    messages: Messages that were new to the model.
  """
  start, end, seconds = time
  turn = f"{name}:turn:{index + 1}"
  after = live_turns.image_of(step.observation)
  return {
      "turns": [{
          "client_id": turn, "rollout_id": name, "turn": index + 1,
          "start_time": start, "end_time": end, "turn_time": end - start,
          "reward": float(step.reward), "episode_done": bool(step.done),
          "metrics_json": _turn_metrics(step, seconds, tokens),
      }],
      "actions": _actions(turn, step, tokens),
      # In this order, also where the first one's screen is known later.
      "observations": [
          {
              "client_id": f"{turn}:before", "turn_id": turn,
              "obs_type": "screenshot_before", "screenshot_uri": _uri(before),
              "text_content": _text_of_messages(messages),
              "model_input_json": messages,
          },
          {
              "client_id": f"{turn}:after", "turn_id": turn,
              "obs_type": "screenshot_after" if after is not None else "text",
              "screenshot_uri": _uri(after),
              "text_content": _text(step.observation),
          },
      ],
  }  # fmt: skip


def _turn_metrics(
  step: trajectory_lib.Step,
  seconds: Mapping[str, float],
  tokens: turn_tokens.TurnTokens,
) -> dict[str, Any]:
  info = {k: v for k, v in step.info.items() if k not in ("gui_actions", "gym")}
  return {
    "seconds": dict(seconds),
    "thought": step.thought,
    "model_response": step.model_response,
    "mc_return": float(step.mc_return),
    "policy_versions": tokens.versions,
    "prompt_tokens": tokens.prompt,
    "entropies": tokens.entropies,
    "sampled_tokens": len(tokens.ids),
    "mean_logprob": (
      sum(tokens.logprobs) / len(tokens.logprobs) if tokens.logprobs else None
    ),
    "info": _writable(info),
  }


def _actions(
  turn: str, step: trajectory_lib.Step, tokens: turn_tokens.TurnTokens
) -> list[dict[str, Any]]:
  """Returns a row for each action; the first one has the turn's tokens.

  A turn in which nothing could be done has one row all the same.
  """
  calls = (
    step.action.tool_calls
    if isinstance(step.action, trajectory_lib.Action)
    else []
  )
  gestures = gui_actions(step)
  rows: list[dict[str, Any]] = []
  for index in range(max(len(gestures), len(calls))):
    call = calls[index] if index < len(calls) else None
    gui = gestures[index] if index < len(gestures) else None
    rows.append(
      {
        "action_type": gui["kind"] if gui else "invalid",
        "tool_name": call.name if call else _tool_name(step, index),
        # The executed action, in pixels; else the requested one.
        "tool_args": (
          {k: v for k, v in gui.items() if k != "kind"}
          if gui
          else _writable(call.arguments)
          if call
          else None
        ),
        "action_json": _writable(call.to_json()) if call else None,
      }
    )
  if not rows:
    kind = "parse_error" if step.info.get("parse_errors") else "text"
    kind = "summary" if step.info.get("summary") else kind
    rows.append({"action_type": kind})
  for index, row in enumerate(rows):
    row |= {"client_id": f"{turn}:action:{index}", "turn_id": turn}
  if tokens.ids:
    rows[0] |= {
      "tokens": tokens.ids,
      "logprobs": tokens.logprobs,
      "num_tokens": len(tokens.ids),
    }
  return rows


def _tool_name(step: trajectory_lib.Step, index: int) -> str | None:
  """Returns the tool name that another program read for an action."""
  names = step.info.get("tool_names") or ()
  return str(names[index]) if index < len(names) else None


def new_messages(
  step: trajectory_lib.Step, count: int
) -> tuple[list[Any] | None, int]:
  """Messages that this turn's model call had and the one before had not."""
  messages = list(step.chat_completions)
  while messages and messages[-1].get("role") == "assistant":
    messages.pop()  # The reply, which `chat_completions` ends with.
  new = messages[count:] if count <= len(messages) else messages
  return (_writable(new) or None), len(step.chat_completions)


def gui_actions(step: trajectory_lib.Step) -> list[dict[str, Any]]:
  """Returns the actions that the gym performed in a turn."""
  return [dict(a) for a in step.info.get("gui_actions") or () if "kind" in a]


def _text(observation: object) -> str | None:
  if isinstance(observation, str):
    return observation
  if not isinstance(observation, Mapping):
    return None
  texts = [
    str(observation[k])
    for k in ("question", "instruction", "axtree", "text")
    if observation.get(k)
  ]
  outputs = observation.get("tool_outputs") or {}
  texts += [f"{k}: {v}" for k, v in outputs.items()]
  return "\n".join(texts) or None


def _text_of_messages(messages: list[Any] | None) -> str | None:
  """Texts of a turn's new messages, without the policy's own replies."""
  texts = []
  for message in messages or ():
    if message.get("role") in ("system", "assistant"):
      continue
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts += [
      str(part["text"])
      for part in parts
      if isinstance(part, Mapping) and part.get("text")
    ]
  return "\n".join(texts) or None


def _uri(image: trajectory_lib.ImageRef | None) -> str | None:
  return None if image is None else f"sha256:{image.sha256}"


def _writable(value: object) -> Any:
  """Returns JSON values, with text for the rest."""
  try:
    return trajectory_lib.encode(value)
  except TypeError:
    if isinstance(value, Mapping):
      return {str(k): _writable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
      return [_writable(v) for v in value]
    return str(value)
