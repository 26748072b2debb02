"""Plays episodes with a model behind any OpenAI-compatible server, as text.

For evaluation: messages and screenshots go to `/chat/completions`, text comes
back. Nothing is rendered, and no tokens are recorded, so such episodes cannot
be trained on; `openai_client` is for those.

Promises: a request whose failure may pass is repeated within the deadline, a
full server is asked on; `check` refuses a server that is not there, a key that
is missing or wrong, a model that is not served or takes no images, before an
episode begins. The key is in no message.

Does not: stream, or read tool calls of the server's own format: agents parse
the text. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import dataclasses
import io
import json
import time
from typing import Any, Mapping, Sequence

import tenacity
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector import model_calls

Message = trajectory.Message
_LIMIT = 8 << 20  # Bytes of an answer.
_CHECK_S = 60.0
_MAY_PASS = (0, 408, 409, 500, 502, 503, 504)
_OPTIONAL = ("temperature", "top_p", "top_k", "min_p", "seed")


class ServerRefusal(ValueError):
  """The server cannot be evaluated; the text names the setting and the fix."""


class ChatConnection:
  """Connects episodes to the server.

  Attributes:
    name: the server's name of the model; `check` finds it out where none was
      given.
    left_out: request fields that the model does not take.
  """

  def __init__(
    self,
    url: str,
    model: str,
    image_store: images_lib.ImageStore,
    *,
    api_key: str = "",
    key_name: str = "the key",
    timeout_s: float = 120.0,
    tries: int = 4,
    connections: int = 100,
  ):
    """Args:

      url: URL of the server with its version, e.g. http://127.0.0.1:8000/v1.
      model: The server's name of the model; "" = the only one that it serves.
      image_store: Store of the screenshots.
      api_key: Key that is sent as a bearer token; "" for none.
      key_name: Name of the key in messages, e.g. "$OPENAI_API_KEY".
      timeout_s: Deadline of a completion, all attempts included, in seconds.
      tries: Attempts at a request.
      connections: Number of connections that are open at a time.

    Raises:
      ValueError: naming the argument.
    """
    self.url = http.address(url, "server", "http://127.0.0.1:8000/v1")
    self.name = model
    self.left_out: set[str] = set()
    self.urls = data_urls.DataUrls(image_store)
    self._key = api_key
    self._key_name = key_name
    self._timeout_s = timeout_s
    self._longest = "max_tokens"
    self._sampled: collections.Counter[str] = collections.Counter()
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    self._http = http.Http(
      headers=headers, proxies=True, connections=connections
    )
    self._retry = http.RetryPolicy(
      tries=tries,
      wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
      retry=tenacity.retry_if_exception(_may_pass),
    )

  def model(self, sampling: policy_client.SamplingParams) -> ChatModel:
    """Returns a model with that sampling; seeds are the episodes'."""
    return ChatModel(self, sampling)

  # --- before an episode -----------------------------------------------------

  async def check(
    self, sampling: policy_client.SamplingParams, screen: tuple[int, int] | None
  ) -> list[str]:
    """Asks the server for its models, and the model for a few tokens.

    Args:
      sampling: Sampling of the episodes; fields that the model refuses are left
        out of all requests.
      screen: (width, height) of the screenshots to come; None for none.

    Returns:
      What is left out, for the user.

    Raises:
      ServerRefusal: naming the setting.
    """
    await self.find_model()
    first, image = sampling, None if screen is None else _blank(*screen)
    notes: list[str] = []
    while True:
      try:
        await self._try(first, image)
        return notes
      except http.CallError as error:
        if (note := self._adapted(error)) is not None:
          notes += [note] if note else []
          continue
        if image is None:
          raise self._refusal(error, "a request") from None
        without = None
        try:
          await self._try(first, None)
        except http.CallError as failure:
          without = failure
        if without is not None or error.status not in (400, 404, 415, 422, 500):
          raise self._refusal(error, "a request") from None
        raise ServerRefusal(
          f"evaluate.model={self.name} takes no images at {self.url}:"
          f" {_text(error)}; choose a vision-language model, or an"
          " environment without screenshots"
        ) from None

  async def find_model(self) -> None:
    """Asks the server for its models.

    Raises:
      ServerRefusal: naming the setting.
    """
    try:
      answer = await self._http.ask(
        "GET", f"{self.url}/models", _CHECK_S, limit=_LIMIT
      )
    except http.CallError as error:
      if error.status not in (404, 405, 501) or error.late:
        raise self._refusal(error, "its list of models") from None
      if not self.name:
        raise ServerRefusal(
          f"evaluate.server={self.url} lists no models; name one with"
          " evaluate.model"
        ) from None
      return  # A server without a list: the first request shows it.
    served = [
      str(entry["id"])
      for entry in answer.get("data") or ()
      if isinstance(entry, Mapping) and "id" in entry
    ]
    if not self.name and len(served) == 1:
      self.name = served[0]
    if not self.name:
      raise ServerRefusal(
        f"evaluate.server={self.url} serves {len(served)} models"
        f" ({', '.join(served[:8])}); name one with evaluate.model"
      )
    if served and self.name not in served:
      wrong = registry.unknown_name("model", self.name, served)
      raise ServerRefusal(f"evaluate.server={self.url}: {wrong}")

  async def _try(
    self, sampling: policy_client.SamplingParams, image: str | None
  ) -> None:
    content: list[dict[str, Any]] = [
      {"type": "text", "text": "Answer with OK."}
    ]
    if image is not None:
      content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    messages = [{"role": "user", "content": content}]
    body = self._body(messages, sampling, 0) | {self._longest: 16}
    await self._http.ask(
      "POST",
      f"{self.url}/chat/completions",
      _CHECK_S,
      body=body,
      limit=_LIMIT,
      retry=self._retry,
    )

  def _adapted(self, error: http.CallError) -> str | None:
    """Leaves out the field that an answer refuses; None where there is none."""
    if error.status not in (400, 422):
      return None
    reason, param = _error_of(error)
    text = reason.lower()
    if self._longest == "max_tokens" and "max_completion_tokens" in text:
      self._longest = "max_completion_tokens"
      return ""
    for field in _OPTIONAL:
      named = param == field or f"'{field}'" in text or f'"{field}"' in text
      if named and field not in self.left_out:
        self.left_out.add(field)
        return (
          f"{self.name} does not take {field} ({reason[:120]}); it is left"
          " out of every request"
        )
    return None

  def _refusal(self, error: http.CallError, what: str) -> ServerRefusal:
    where = f"evaluate.server={self.url}"
    if error.status in (401, 403):
      if not self._key:
        return ServerRefusal(
          f"{where} needs a key ({error.status}); put it into"
          f" {self._key_name}, or name its variable with"
          " evaluate.api_key_env"
        )
      return ServerRefusal(
        f"{where} refuses the key in {self._key_name} ({error.status})"
      )
    if error.late:
      return ServerRefusal(
        f"{where} did not answer {what} within {_CHECK_S:g} s"
      )
    if error.answer is None:
      return ServerRefusal(
        f"{where} cannot be reached ({error}); start the server, or give"
        " the address that its clients use, with /v1"
      )
    return ServerRefusal(f"{where} refuses {what}: {_text(error)}")

  # --- completions -----------------------------------------------------------

  def _body(
    self,
    messages: Sequence[Mapping[str, Any]],
    sampling: policy_client.SamplingParams,
    seed: int | None,
  ) -> dict[str, Any]:
    body: dict[str, Any] = {
      "model": self.name,
      "messages": list(messages),
      self._longest: sampling.max_new_tokens,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
    }
    # Extensions of vLLM and SGLang, which OpenAI's own server refuses.
    if sampling.top_k:
      body["top_k"] = sampling.top_k
    if sampling.min_p:
      body["min_p"] = sampling.min_p
    if seed is not None:
      body["seed"] = seed & 0x7FFFFFFF
    return {k: v for k, v in body.items() if k not in self.left_out}

  async def complete(
    self,
    messages: Sequence[Mapping[str, Any]],
    sampling: policy_client.SamplingParams,
    seed: int | None,
  ) -> Mapping[str, Any]:
    """Returns the server's answer.

    Raises:
      ContextLimitError: the messages are too long for the model.
      CallError: no answer.
      TimeoutError: none within the deadline.
    """
    body = self._body(messages, sampling, seed)
    due = asyncio.get_running_loop().time() + self._timeout_s

    async def attempt() -> Mapping[str, Any]:
      return await self._http.ask(
        "POST", f"{self.url}/chat/completions", None, body=body, limit=_LIMIT
      )

    try:
      async with asyncio.timeout(self._timeout_s):
        return await self._retry.run(attempt, due=due)
    except http.CallError as error:
      reason, _ = _error_of(error)
      code = _field(error, "code")
      if code == "context_length_exceeded" or (
        error.status == 400 and "context length" in reason.lower()
      ):
        raise policy_client.ContextLimitError(reason[:300]) from error
      raise

  def count(self, name: str, tokens: int) -> None:
    self._sampled[name] += tokens

  def sampled_tokens(self, name: str) -> int:
    """Returns the tokens that the server counted for an episode, once."""
    return self._sampled.pop(name, 0)

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    self.urls.close()
    await self._http.aclose()


class ChatModel:
  """The model of a collector; see `model_calls.make_session`."""

  def __init__(
    self, connection: ChatConnection, sampling: policy_client.SamplingParams
  ):
    self.connection = connection
    self.sampling = sampling

  def new_session(self, name: str, seed: int | None) -> ChatSession:
    return ChatSession(self, name, seed)


class ChatSession:
  """One episode; its requests hold all messages, the server keeps nothing."""

  num_rewrites = 0

  def __init__(self, model: ChatModel, name: str, seed: int | None):
    self._connection = model.connection
    self._sampling = model.sampling
    self._name = name
    self._seed = seed
    self.render_seconds = 0.0

  async def reply(
    self,
    messages: Sequence[Message],
    turn: int,
    call: Any,
    max_new_tokens: int | None = None,
  ) -> model_calls.Reply:
    """Returns the turn's reply; see `model_calls.TokenSession`."""
    return await call(self._reply, messages, turn, max_new_tokens, inline=True)

  async def _reply(
    self, messages: Sequence[Message], turn: int, max_new_tokens: int | None
  ) -> model_calls.Reply:
    started = time.perf_counter()
    urls = self._connection.urls
    written = [await proxy.openai_message(m, urls) for m in messages]
    self.render_seconds = time.perf_counter() - started
    seed = self._seed
    if seed is not None:
      seed = model_calls.derive_seed(seed, turn)
    sampling = self._sampling
    if max_new_tokens:
      sampling = dataclasses.replace(sampling, max_new_tokens=max_new_tokens)
    answer = await self._connection.complete(written, sampling, seed)
    try:
      choice = answer["choices"][0]
      text = choice["message"].get("content") or ""
    except (KeyError, IndexError, TypeError, AttributeError):
      text = None
    if not isinstance(text, str):
      raise RuntimeError(
        f"{self._connection.url} answered without a message:"
        f" {json.dumps(answer)[:200]}"
      )
    usage = answer.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    sampled = int(usage.get("completion_tokens") or 0)
    self._connection.count(self._name, sampled)
    return model_calls.Reply(
      text,
      truncated=choice.get("finish_reason") == "length",
      prompt_tokens=int(usage.get("prompt_tokens") or 0),
      sampled_tokens=sampled,
    )

  def build(self) -> list[trajectory.TokenSequence]:
    return []

  def sessions(self) -> list[str]:
    return []


# --- pieces -------------------------------------------------------------------


def _may_pass(error: BaseException) -> bool:
  return isinstance(error, http.CallError) and error.status in _MAY_PASS


def _blank(width: int, height: int) -> str:
  """Data URL of a white screen."""
  from PIL import Image  # pylint: disable=g-import-not-at-top

  out = io.BytesIO()
  Image.new("RGB", (width, height), "white").save(out, format="PNG")
  return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _body_of(error: http.CallError) -> Mapping[str, Any]:
  if error.answer is None:
    return {}
  try:
    data = json_text.parse(error.answer.content)
  except ValueError:
    return {}
  body = data.get("error", data) if isinstance(data, Mapping) else {}
  return body if isinstance(body, Mapping) else {"message": str(body)}


def _field(error: http.CallError, name: str) -> str:
  value = _body_of(error).get(name)
  return value if isinstance(value, str) else ""


def _error_of(error: http.CallError) -> tuple[str, str]:
  """Returns (the server's reason, the field that it is about or "")."""
  body = _body_of(error)
  reason = body.get("message") or body.get("detail") or str(error)
  return " ".join(str(reason).split()), _field(error, "param")


def _text(error: http.CallError) -> str:
  reason, _ = _error_of(error)
  return f"{error.status} {reason[:300]}"
