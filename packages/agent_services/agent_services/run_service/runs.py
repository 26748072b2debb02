"""Plays runs: an agent, an environment and a model server, until the end.

A `Run` records events, which its caller polls: `step_start`, `model_call`,
`model_output` with the server's whole reply, `action_executed`, `step_end`, and
last `run_end`. Its status is `running`, then `completed` when the policy
decided the outcome (`finished`, `max_steps`, `parse_error`, `context_limit`),
else `failed`.

Promises: a run ends within maxRunTimeSec, whatever its model or environment
does, and its environment is closed; the recorded reply is equal to the
server's, field for field; the order of events does not depend on log-probs
being asked for; times of events only grow. A reason holds no word of a server
that was called: it may have echoed a key. The log has the text, keys masked.

Does not repeat a model call: a sample that was lost would be another one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import re
import time
from typing import Any, Callable, Mapping, Sequence
import uuid

from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.trajectory_collector import seeds

from agent_services import content_store
from agent_services.run_service import schemas

_LOG = logging.getLogger(__name__)
_CLOSE_S = 15.0
_CONTEXT = re.compile(
  r"maximum context length is (\d{1,9})\D[^0-9]*(\d{1,9})\b"
)
_MAX_REPLY = 64 << 20  # Bytes of a model's answer.
_NODE_BYTES = 64  # Of a JSON value in memory, without its text.
_LONG_TEXT = 4096
TERMINAL = ("completed", "failed")
STEP_IMAGE = "__step_message_image__"
"""Call id of the screenshot in a step's messages."""


class ModelError(http.CallError):
  """The model server does not answer as it should."""


class ReplyError(ModelError):
  """The model server's answer is none that a run can use."""

  @property
  def summary(self) -> str:
    """The message itself, which has no word of the server's."""
    return f"ModelError: {self}"


class RecordsFull(RuntimeError):
  """The service has no memory left for a run's events."""


@dataclasses.dataclass(frozen=True)
class Pictures:
  """Gives screenshots their address, in either form."""

  data_urls: data_urls.DataUrls
  store: content_store.ContentStore
  urls: content_store.SignedUrls

  async def of(self, image: trajectory.ImageRef, form: str) -> str:
    """Returns a data URL ("base64"), or a signed address ("url").

    Raises:
      KeyError: the image was evicted.
    """
    data = await self.data_urls.of(image)
    if form == "base64":
      return data
    return content_store.externalize(data, self.store, self.urls)


class Run:
  """One run; see the module docstring.

  Attributes:
    id: Id of the run.
    body: the request.
    status, reason: see the module docstring.
    events: so far, oldest first.
    steps: `{thinking, text, messages, actions}` of each.
    ended: `time.monotonic()` of its end; None while it runs.
    size: Bytes of `events` and `steps`, estimated.
  """

  def __init__(
    self,
    body: schemas.CreateBody,
    agent: tool_agent.ToolAgent,
    env: cua_env.CUAEnv,
    pictures: Pictures,
    judges_itself: bool,
    make_room: Callable[[Run, int], None] = lambda run, size: None,
  ):
    """Args:

    body: The request.
    agent, env: Of this run's own.
    pictures: Gives screenshots their addresses.
    judges_itself: Whether the environment's evaluation counts.
    make_room: Called with the bytes of each event before it is recorded;
      raises RecordsFull where there is no memory for it.
    """
    self.id = uuid.uuid4().hex
    self.body = body
    self.status = "running"
    self.reason = ""
    self.events: list[dict[str, Any]] = []
    self.steps: list[dict[str, Any]] = []
    self.ended: float | None = None
    self.size = 0
    self._make_room = make_room
    self._texts: set[int] = set()
    self._agent = agent
    self._env = env
    self._pictures = pictures
    self._judges_itself = judges_itself
    self._last_ms = 0
    self._step = 0
    self._answer = ""
    model = body.model
    base = http.address(
      model.baseUrl, "model.baseUrl", "http://127.0.0.1:8000/v1"
    )
    self._url = base if base.endswith("/v1") else f"{base}/v1"
    key = model.apiKey
    self._http = http.Http(
      ModelError, headers={"authorization": f"Bearer {key}"} if key else {}
    )

  async def play(self) -> None:
    """Plays to the end; never raises but for the caller's cancellation."""
    status, reason = "failed", "cancelled"
    extra: dict[str, Any] = {}
    try:
      status, reason, extra = await concurrency.with_deadline(
        self._play(), self.body.maxRunTimeSec, "the run"
      )
    except concurrency.DeadlineExceeded as error:
      reason = f"timeout: {error}"
    except http.CallError as error:
      reason = error.summary
      _LOG.warning("run %s: %s", self.id, self._masked(str(error)))
    except asyncio.CancelledError:
      if not concurrency.is_own_cancellation():
        raise
      reason = "an environment or a model call cancelled itself"
    except Exception as error:  # pylint: disable=broad-except
      # Environments are anybody's; a run ends with a reason in any case.
      reason = self._masked(f"{type(error).__name__}: {error}")[:2000]
    finally:
      await concurrency.to_the_end(self._close())
      if status == "failed":
        self._emit("error", False, message=reason)
      self._emit(
        "run_end", False, ok=status == "completed", reason=reason, **extra
      )
      self.reason, self.status = reason, status
      self.ended = time.monotonic()

  def _masked(self, text: str) -> str:
    """`text` without this run's key."""
    key = self.body.model.apiKey
    return text.replace(key, "***") if key else text

  async def _close(self) -> None:
    for what, closing in (
      ("environment", self._env.close()),
      ("connections", self._http.aclose()),
    ):
      try:
        await concurrency.with_deadline(closing, _CLOSE_S, f"closing {what}")
      except Exception as error:  # pylint: disable=broad-except
        _LOG.warning("run %s: its %s did not close: %r", self.id, what, error)

  async def _play(self) -> tuple[str, str, dict[str, Any]]:
    """(status, reason, fields of run_end)."""
    body, agent = self.body, self._agent
    limit = body.maxStepTimeSec
    observation, info = await concurrency.with_deadline(
      self._env.reset(), limit, "the environment's start"
    )
    agent.reset()
    agent.update_from_env(observation, 0.0, False, info)
    for step in range(1, body.maxSteps + 1):
      self._step = step
      self._emit("step_start")
      ended = await concurrency.with_deadline(
        self._turn(), limit, f"step {step} (maxStepTimeSec)"
      )
      self._emit("step_end")
      if ended is not None:
        return ended
    # An environment ends at its last step by itself.
    raise RuntimeError("the environment did not end at maxSteps")

  async def _turn(self) -> tuple[str, str, dict[str, Any]] | None:
    """One step; what `_play` returns if it was the last."""
    agent, env = self._agent, self._env
    messages = agent.chat_completions
    sent = await self._written(messages, self.body.model.images)
    request = self._request(sent)
    shown = {**request, "messages": await self._shown(sent)}
    before = self._env.image
    self._emit("model_call", modelSpecificInput=shown)
    try:
      answer = await self._http.call(
        "POST",
        f"{self._url}/chat/completions",
        self.body.maxStepTimeSec,
        body=request,
        limit=_MAX_REPLY,
      )
    except ModelError as error:
      if not _is_context_limit(error):
        raise
      evaluation = await env.evaluate()
      verdict = self._verdict(
        evaluation.reward, bool(evaluation.metadata.get("success"))
      )
      verdict["message"] = _refusal(error)
      _LOG.info("run %s: %s", self.id, self._masked(str(error)))
      return "completed", "context_limit", verdict
    reply = _reply_of(answer)
    self._emit("model_output", modelOutput=reply)
    text = _text_of(reply)
    action = agent.update_from_model(text)
    started = self._now()
    observation, reward, over, info = await env.step(action)
    await self._record(text, action, info, shown, (before, env.image), started)
    agent.update_from_env(observation, reward, over, info)
    if not over:
      return None
    self._answer = str(info.get("answer") or "")
    reason = {"max_turns": "max_steps", "parse_error": "parse_error"}.get(
      str(info.get("status")), "finished"
    )
    return (
      "completed",
      reason,
      self._verdict(float(reward), bool(info.get("success"))),
    )

  def _verdict(self, score: float, success: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"answer": self._answer} if self._answer else {}
    if self._judges_itself:
      fields["evaluation"] = {
        "score": score,
        "success": success,
        "seconds": getattr(self._env, "evaluation_seconds", None),
      }
    return fields

  def _request(self, messages: list[Any]) -> dict[str, Any]:
    model = self.body.model
    request: dict[str, Any] = {
      "model": model.name,
      "messages": messages,
      **model.sampling.model_dump(exclude_none=True),
    }
    if model.sampling.seed is not None:
      request["seed"] = seeds.derive_seed(model.sampling.seed, self._step - 1)
    if model.logprobs:
      request["logprobs"] = True
      if model.topLogprobs is not None:
        request["top_logprobs"] = model.topLogprobs
      # vLLM, this package's server and SGLang, which has a flag for the
      # prompt's, return no ids otherwise.
      request["return_token_ids"] = True
      request["return_prompt_token_ids"] = True
    return request

  async def _written(
    self, messages: Sequence[trajectory.Message], form: str
  ) -> list[dict[str, Any]]:
    """Returns the messages in OpenAI's form."""
    out = []
    for message in messages:
      content = message.get("content")
      if isinstance(content, list):
        content = [await self._part(part, form) for part in content]
      written = {**message, "content": content}
      if message["role"] != "tool":
        # Agents mark outputs of tools with it; OpenAI has it for "tool" only.
        written.pop("tool_call_id", None)
      out.append(written)
    return out

  async def _part(self, part: Mapping[str, Any], form: str) -> dict[str, Any]:
    if part.get("type") != "image":
      return dict(part)
    url = await self._pictures.of(part["image"], form)
    return {"type": "image_url", "image_url": {"url": url}}

  async def _shown(self, sent: list[Any]) -> list[Any]:
    """Returns the request's messages, as events show them."""
    if self.body.images == self.body.model.images:
      return sent
    return await self._written(self._agent.chat_completions, self.body.images)

  async def _record(
    self,
    text: str,
    action: trajectory.Action,
    info: Mapping[str, Any],
    shown: Mapping[str, Any],
    screens: tuple[Any, Any],
    started: int,
  ) -> None:
    """Events of a step's actions, and the step itself."""
    form = self.body.images
    shots = [
      {"name": name, "url": await self._pictures.of(image, form)}
      for name, image in zip(("screenshot_before", "screenshot_after"), screens)
    ]
    ended = self._now()
    calls = action.tool_calls
    actions = []
    for index, gui_action in enumerate(info.get("gui_actions") or ()):
      call_id = calls[index].call_id if index < len(calls) else ""
      executed = {
        "name": gui_action["kind"],
        "toolName": calls[index].name if index < len(calls) else None,
        "args": _args(gui_action),
        "callId": call_id,
        "rawFeedback": "; ".join(info.get("invalid_actions") or ()),
        "rawResult": gui_action,
        "obs": {"screenshots": shots},
      }
      actions.append(executed)
      self._emit(
        "action_executed",
        actionIndex=index,
        action=executed,
        startTs=started,
        endTs=ended,
        durationMs=ended - started,
      )
    newest = self._agent.current_step
    self._record_step(
      {
        "thinking": newest.thought if newest is not None else "",
        "text": text,
        "messages": [
          *shown["messages"][-1:],
          {
            "callId": STEP_IMAGE,
            "role": "user",
            "content": [
              {"type": "image_url", "image_url": {"url": shots[0]["url"]}}
            ],
          },
        ],
        "actions": actions,
      }
    )

  def _record_step(self, step: dict[str, Any]) -> None:
    self._count(step)
    self.steps.append(step)

  def _count(self, record: object) -> None:
    """Adds a record to `size`; raises RecordsFull where there is no room."""
    size = _size_of(record, self._texts)
    self._make_room(self, size)
    self.size += size

  def _now(self) -> int:
    """Milliseconds since the epoch, never those of an earlier event."""
    self._last_ms = max(self._last_ms + 1, int(time.time() * 1000))
    return self._last_ms

  def _emit(self, kind: str, counts: bool = True, **fields: Any) -> None:
    if counts:
      self._count(fields)
    at = datetime.datetime.fromtimestamp(self._now() / 1000, datetime.UTC)
    self.events.append(
      {
        "type": kind,
        "ts": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "tsMs": self._last_ms,
        "step": self._step,
        **fields,
      }
    )


def _reply_of(answer: bytes) -> dict[str, Any]:
  """Returns the model server's answer, as the run's record keeps it.

  Raises:
    ModelError: the reply is not a JSON object that can be written again.
  """
  try:
    reply = json_models.parse(answer)
  except ValueError:
    reply = None
  if not isinstance(reply, dict):
    raise ReplyError(
      "the answer, of status 200, cannot be used: it is no JSON object, or"
      " holds what cannot be written again: half a surrogate pair, NaN, a"
      " number larger than any float, more than 200 levels"
    )
  return reply


def _text_of(reply: Mapping[str, Any]) -> str:
  """Returns the assistant's text.

  Raises:
    ModelError: the reply has none.
  """
  try:
    text = reply["choices"][0]["message"]["content"]
    if text is None:
      text = ""
    if not isinstance(text, str):
      raise TypeError
  except (KeyError, IndexError, TypeError):
    raise ReplyError(
      "the answer, of status 200, cannot be used: it is no chat completion"
      " with a text at choices[0].message.content"
    ) from None
  return text


def _is_context_limit(error: http.CallError) -> bool:
  text = str(error)
  return error.status == 400 and (
    "context_length_exceeded" in text or "maximum context length" in text
  )


def _refusal(error: http.CallError) -> str:
  """Why a prompt was refused: of the server's words only the numbers."""
  numbers = _CONTEXT.search(str(error))
  if numbers is None:
    return "the prompt is too long for the model's context"
  return (
    f"the model's maximum context length is {numbers[1]} tokens, and the"
    f" prompt has {numbers[2]}"
  )


def _size_of(record: object, texts: set[int]) -> int:
  """Bytes that a record takes, estimated.

  Args:
    record: JSON values.
    texts: Identities of long texts that were counted already, as events share
      the data URLs of screenshots; those of this record are added.
  """
  size, pending = 0, [record]
  while pending:
    one = pending.pop()
    size += _NODE_BYTES
    if isinstance(one, str):
      if len(one) < _LONG_TEXT or id(one) not in texts:
        size += len(one)
      if len(one) >= _LONG_TEXT:
        texts.add(id(one))
    elif isinstance(one, Mapping):
      pending.extend(one.values())
    elif isinstance(one, (list, tuple)):
      pending.extend(one)
  return size


def _args(gui_action: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a GUI action's fields under the protocol's names."""

  def point(x: str, y: str) -> dict[str, Any] | None:
    if x in gui_action and y in gui_action:
      return {"x": gui_action[x], "y": gui_action[y]}
    return None

  fields: dict[str, Any] = {}
  first, second = point("x", "y"), point("x2", "y2")
  if second is not None:
    fields |= {"startPoint": first, "endPoint": second}
  elif first is not None:
    fields["point"] = first
  if gui_action.get("keys"):
    fields["key"] = "+".join(gui_action["keys"])
  if "text" in gui_action:
    fields["content"] = gui_action["text"]
  if gui_action.get("duration") is not None:
    fields["durationMs"] = int(1000 * gui_action["duration"])
  return fields
