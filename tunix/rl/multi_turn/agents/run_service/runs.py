"""Plays runs: an agent, an environment and a model server, until the end.

A `Run` records events, which its caller polls: `step_start`, `model_call`,
`model_output` with the server's whole reply, `action_executed`, `step_end`, and
last `run_end`. Its status is `running`, then `completed` when the policy
decided the outcome (`finished`, `max_steps`, `parse_error`, `context_limit`),
else `failed`.

Promises: a run ends within maxRunTimeSec, whatever its model or environment
does, and its environment is closed; the recorded reply is equal to the
server's, field for field; the order of events does not depend on log-probs
being asked for; times of events only grow.

Does not repeat a model call: a sample that was lost would be another one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import time
from typing import Any, Mapping, Sequence
import uuid

from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.agents.run_service import schemas
from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import content_store
from tunix.rl.multi_turn.core import data_urls
from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import seeds
from tunix.rl.multi_turn.core import trajectory

_LOG = logging.getLogger(__name__)
_CLOSE_S = 15.0
TERMINAL = ("completed", "failed")
STEP_IMAGE = "__step_message_image__"
"""Call id of the screenshot in a step's messages."""


class ModelError(http.CallError):
  """The model server does not answer as it should."""


@dataclasses.dataclass(frozen=True)
class Pictures:
  """Gives screenshots their address, in either form."""

  data_urls: data_urls.DataUrls
  store: content_store.ContentStore
  urls: content_store.SignedUrls

  async def of(self, image: trajectory.ImageRef, form: str) -> str:
    """A data URL ("base64"), or a signed address ("url").

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
    id: of the run.
    body: the request.
    status, reason: see the module docstring.
    events: so far, oldest first.
    steps: `{thinking, text, messages, actions}` of each.
    ended: `time.monotonic()` of its end; None while it runs.
  """

  def __init__(
      self,
      body: schemas.CreateBody,
      agent: tool_agent.ToolAgent,
      env: Any,
      pictures: Pictures,
      judges_itself: bool,
  ):
    self.id = uuid.uuid4().hex
    self.body = body
    self.status = "running"
    self.reason = ""
    self.events: list[dict[str, Any]] = []
    self.steps: list[dict[str, Any]] = []
    self.ended: float | None = None
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
    except asyncio.CancelledError:
      if not concurrency.is_own_cancellation():
        raise
      reason = "an environment or a model call cancelled itself"
    except Exception as error:  # pylint: disable=broad-except
      # Environments are anybody's; a run ends with a reason in any case.
      reason = f"{type(error).__name__}: {error}"[:2000]
    finally:
      await concurrency.to_the_end(self._close())
      if status == "failed":
        self._emit("error", message=reason)
      self._emit("run_end", ok=status == "completed", reason=reason, **extra)
      self.reason, self.status = reason, status
      self.ended = time.monotonic()

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
    seen, info = await concurrency.with_deadline(
        self._env.reset(), limit, "the environment's start"
    )
    agent.reset()
    agent.update_from_env(seen, 0.0, False, info)
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
      reply = await self._http.ask(
          "POST",
          f"{self._url}/chat/completions",
          self.body.maxStepTimeSec,
          body=request,
      )
    except ModelError as error:
      if not _is_context_limit(error):
        raise
      evaluation = await env.evaluate()
      verdict = self._verdict(
          evaluation.reward, bool(evaluation.metadata.get("success"))
      )
      verdict["message"] = _refusal(error)
      return "completed", "context_limit", verdict
    self._emit("model_output", modelOutput=reply)
    text = _text_of(reply)
    action = agent.update_from_model(text)
    started = self._now()
    seen, reward, done, info = await env.step(action)
    await self._record(text, action, info, shown, (before, env.image), started)
    agent.update_from_env(seen, reward, done, info)
    if not done:
      return None
    self._answer = str(info.get("answer") or "")
    reason = {"max_turns": "max_steps", "parse_error": "parse_error"}.get(
        str(info.get("status")), "finished"
    )
    return "completed", reason, self._verdict(
        float(reward), bool(info.get("success"))
    )

  def _verdict(self, score: float, success: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"answer": self._answer} if self._answer else {}
    if self._judges_itself:
      found["evaluation"] = {
          "score": score,
          "success": success,
          "seconds": getattr(self._env, "evaluation_seconds", None),
      }
    return found

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
    """The messages in OpenAI's form."""
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
    """The request's messages, as events show them."""
    if self.body.images == self.body.model.images:
      return sent
    return await self._written(
        self._agent.chat_completions, self.body.images
    )

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
        for name, image in zip(
            ("screenshot_before", "screenshot_after"), screens
        )
    ]
    ended = self._now()
    calls = action.tool_calls
    actions = []
    for index, done in enumerate(info.get("gui_actions") or ()):
      call_id = calls[index].call_id if index < len(calls) else ""
      executed = {
          "name": done["kind"],
          "toolName": calls[index].name if index < len(calls) else None,
          "args": _args(done),
          "callId": call_id,
          "rawFeedback": "; ".join(info.get("invalid_actions") or ()),
          "rawResult": done,
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
    self.steps.append({
        "thinking": newest.thought if newest is not None else "",
        "text": text,
        "messages": [
            *shown["messages"][-1:],
            {
                "callId": STEP_IMAGE,
                "role": "user",
                "content": [{
                    "type": "image_url", "image_url": {"url": shots[0]["url"]},
                }],
            },
        ],
        "actions": actions,
    })  # pyformat: disable

  def _now(self) -> int:
    """Milliseconds since the epoch, never those of an earlier event."""
    self._last_ms = max(self._last_ms + 1, int(time.time() * 1000))
    return self._last_ms

  def _emit(self, kind: str, **fields: Any) -> None:
    at = datetime.datetime.fromtimestamp(self._now() / 1000, datetime.UTC)
    self.events.append({
        "type": kind,
        "ts": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "tsMs": self._last_ms,
        "step": self._step,
        **fields,
    })


def _text_of(reply: Mapping[str, Any]) -> str:
  """The assistant's text.

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
    raise ModelError(
        f"the model server's answer is no chat completion: {str(reply)[:200]!r}"
    ) from None
  return text


def _is_context_limit(error: http.CallError) -> bool:
  text = str(error)
  return error.status == 400 and (
      "context_length_exceeded" in text or "maximum context length" in text
  )


def _refusal(error: http.CallError) -> str:
  """The server's own words: the call's address may hold a key."""
  try:
    body = json_text.parse(error.answer.content if error.answer else b"")
    return str(body["error"]["message"])[:500]
  except (ValueError, KeyError, TypeError):
    return "the prompt is too long"


def _args(done: Mapping[str, Any]) -> dict[str, Any]:
  """A GUI action's fields under the protocol's names."""

  def point(x: str, y: str) -> dict[str, Any] | None:
    if x in done and y in done:
      return {"x": done[x], "y": done[y]}
    return None

  found: dict[str, Any] = {}
  first, second = point("x", "y"), point("x2", "y2")
  if second is not None:
    found |= {"startPoint": first, "endPoint": second}
  elif first is not None:
    found["point"] = first
  if done.get("keys"):
    found["key"] = "+".join(done["keys"])
  if "text" in done:
    found["content"] = done["text"]
  if done.get("duration") is not None:
    found["durationMs"] = int(1000 * done["duration"])
  return found


