"""What the server does with a checked request, without HTTP.

A request in a session continues the token sequence of the turn before it where
its messages do; any other starts one of its own. The same body again gets the
completion that is there, or the one that is on its way: a client that repeats
a request after a timeout causes no second sample.

Promises: nothing sampled in a session is lost or stored twice; a request that
is cancelled frees its slot and leaves no trace.

Does not parse bodies, or speak HTTP. One event loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import secrets
import time
from typing import Any, Callable, Sequence

import numpy as np
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.rollout import interactions
from tunix.rl.multi_turn.rollout import media
from tunix.rl.multi_turn.rollout.server import errors
from tunix.rl.multi_turn.rollout.server import requests
from tunix.rl.multi_turn.rollout.server import responses

OnTokens = Callable[[int, np.ndarray], None]
"""(number of the choice, int32[S] new tokens)."""


@dataclasses.dataclass
class Policy:
  """What is served.

  Attributes:
    name: of the model.
    client: samples; `generate` takes `on_tokens` where `streams`.
    renderer: messages to tokens.
    parser: tool calls.
    context_length: tokens of a sequence.
    healthy: whether the client can still sample.
    streams: whether `client.generate` tells of tokens as they come.
  """

  name: str
  client: policy_client.PolicyClient
  renderer: Any
  parser: parser_base.ToolParser
  context_length: int
  healthy: Callable[[], bool] = lambda: True
  streams: bool = True


class _Turns:
  """What is kept of a session beside its interactions.

  Attributes:
    by_body: hash of a body -> its answer, there or on its way. It is sampled
      for all who ask, and cancelled when none of them is left.
    count: requests so far, for their seeds.
    closed: no cache is kept any more.
  """

  _KEPT = 8  # Caches a session may hold; an engine evicts idle ones anyway.

  def __init__(self, session_id: str):
    self.by_body: dict[str, asyncio.Task[responses.Answer]] = {}
    self._asking: collections.Counter[asyncio.Task[Any]] = collections.Counter()
    self.count = 0
    self.closed = False
    self._id = session_id
    self._made = 0
    self._cache_of: dict[str, str] = {}  # Interaction -> the client's session.
    self._idle: collections.OrderedDict[str, None] = collections.OrderedDict()

  async def wait_for(
      self, task: asyncio.Task[responses.Answer], key: str
  ) -> responses.Answer:
    self._asking[task] += 1
    try:
      return await asyncio.shield(task)
    except asyncio.CancelledError:
      if self.closed and task.cancelled():
        raise errors.ApiError(
            409, "the session was ended", code="session_ended"
        ) from None
      raise
    finally:
      self._asking[task] -= 1
      if not self._asking[task]:
        del self._asking[task]
        if not task.done():
          # Gone at once: who asks now must not wait for what is cancelled.
          if self.by_body.get(key) is task:
            del self.by_body[key]
          task.cancel()
          await asyncio.wait({task})  # Its slot is free when this returns.

  def forget_failed(
      self, key: str, task: asyncio.Task[responses.Answer]
  ) -> None:
    """A request that failed is a new one when it is repeated."""
    failed = task.cancelled() or task.exception() is not None
    if failed and self.by_body.get(key) is task:
      del self.by_body[key]

  def take_cache(self, parent: str | None) -> str:
    """The client's session that holds `parent`'s tokens, or a new one."""
    name = self._cache_of.get(parent) if parent else None
    if name in self._idle:
      del self._idle[name]
      return name
    self._made += 1
    return f"{self._id}/{self._made}"

  def give_back(self, name: str, interaction: str | None) -> list[str]:
    """Ends the use of a client's session; returns those to release."""
    if interaction is not None:
      self._cache_of[interaction] = name
    self._idle[name] = None
    gone = []
    while len(self._idle) > (0 if self.closed else self._KEPT):
      gone.append(self._idle.popitem(last=False)[0])
    return gone

  def close(self) -> list[str]:
    """Ends all of it; returns the client's sessions to release."""
    self.closed = True
    for task in list(self._asking):
      task.cancel()
    return list(self._idle)


class Service:
  """See the module docstring."""

  def __init__(
      self,
      policy: Policy,
      store: interactions.SessionStore,
      loader: media.MediaLoader,
      *,
      max_concurrent: int = 256,
      seed: int = 0,
  ):
    """Args:

      policy: what is served.
      store: of sessions.
      loader: fetches and decodes images.
      max_concurrent: requests that are being answered at a time.
      seed: of requests in sessions that bring none, so that a repeated request
        samples the same.
    """
    self.policy = policy
    self.store = store
    self._loader = loader
    self._max = max_concurrent
    self._seed = seed
    self._turns: dict[str, _Turns] = {}
    self.running = 0

  # --- completions ------------------------------------------------------------

  async def complete(
      self,
      request: requests.ChatRequest,
      *,
      session: interactions.Session | None = None,
      body: bytes = b"",
      on_tokens: OnTokens | None = None,
      answer_id: str | None = None,
  ) -> responses.Answer:
    """Answers a request.

    Args:
      request: checked.
      session: of the request, if it has one.
      body: tells a repeated request of a session.
      on_tokens: told of tokens as they are sampled. A repeated request is
        answered without.
      answer_id: of a fresh answer, from `new_id`.

    Raises:
      ApiError: what the client is to be told.
    """
    answer_id = answer_id or new_id()
    if session is None:
      return await self._fresh(request, None, None, on_tokens, answer_id)
    turns = self._turns.get(session.id)
    if turns is None:
      turns = _Turns(session.id)
      if not session.ended:
        self._turns[session.id] = turns
    key = hashlib.sha256(body).hexdigest()
    task = turns.by_body.get(key)
    if task is None:
      task = asyncio.ensure_future(
          self._fresh(request, session, turns, on_tokens, answer_id)
      )
      turns.by_body[key] = task
      task.add_done_callback(lambda done: turns.forget_failed(key, done))
    return await turns.wait_for(task, key)

  async def _fresh(
      self,
      request: requests.ChatRequest,
      session: interactions.Session | None,
      turns: _Turns | None,
      on_tokens: OnTokens | None,
      answer_id: str,
  ) -> responses.Answer:
    if not self.policy.healthy():
      raise errors.ApiError(
          503, "the rollout engine has failed", code="engine_dead"
      )
    if request.model != self.policy.name:
      raise errors.ApiError(
          404,
          f"the model {request.model!r} is not served here; use"
          f" {self.policy.name!r}",
          code="model_not_found",
          param="model",
      )
    if self.running >= self._max:
      raise errors.ApiError(
          429,
          f"{self.running} requests are being answered, no more are taken",
          code="too_many_requests",
          retry_after_s=1.0,
      )
    self.running += 1
    if session is not None:
      session.busy += 1
    try:
      messages = await self._load_images(request.messages)
      return await self._sample(
          request, messages, session, turns, on_tokens, answer_id
      )
    finally:
      self.running -= 1
      if session is not None:
        session.busy -= 1
        session.touch()

  async def _sample(
      self, request, messages, session, turns, on_tokens, answer_id
  ) -> responses.Answer:
    shown = _with_tools(messages, request.tools, self.policy.parser)
    if _characters(shown) > (
        self.policy.context_length * self.policy.renderer.longest_token
    ):  # Tokenising it would hold up everybody else.
      raise errors.invalid(
          "messages",
          "the messages cannot fit the context of"
          f" {self.policy.context_length} tokens; shorten them",
          "context_length_exceeded",
      )
    pending = None
    number = 0
    if request.prompt_token_ids:
      # Its caller keeps the tokens: of the session it uses the cache, and that
      # the same body again gets the same completion.
      prompt = _token_prompt(
          request.prompt_token_ids, shown, self.policy.renderer
      )
    elif session is None:
      prompt = self.policy.renderer.render(shown)
    else:
      try:
        pending = session.prompt(shown)
      except interactions.InteractionError as error:
        raise of_interaction(error) from None
      prompt = pending.prompt
    if turns is not None:
      turns.count += 1
      number = turns.count
    room = self.policy.context_length - len(prompt)
    if room < 1:
      raise errors.invalid(
          "messages",
          f"the prompt has {len(prompt)} tokens, the context"
          f" {self.policy.context_length}; shorten the messages",
          "context_length_exceeded",
      )
    sampling = dataclasses.replace(
        request.sampling,
        max_new_tokens=min(request.sampling.max_new_tokens, room),
        stop_token_ids=(
            *self.policy.renderer.stop_token_ids,
            *request.sampling.stop_token_ids,
        ),
    )
    seed = request.sampling.seed
    if seed is None and session is not None:
      seed = _seed_of(self._seed, session.id, number)
    ids = [responses.interaction_id(answer_id, i) for i in range(request.n)]
    if turns is None:
      names = [f"request/{i}" for i in ids]
    else:
      parent = pending.parent if pending else _TOKENS
      names = [turns.take_cache(parent) for _ in ids]
    stored = False
    try:
      completions = await self._generate(
          prompt, sampling, seed, names, on_tokens
      )
      choices = []
      for completion in completions:
        text = self.policy.renderer.decode(completion.tokens)
        parser = self.policy.parser if request.parse_tools else None
        choices.append(responses.make_choice(completion, text, parser))
      if pending is not None:
        for choice, number_id in zip(choices, ids):
          session.add(
              pending,
              choice.completion,
              id=number_id,
              assistant_message=choice.message,
          )
      stored = True
    except interactions.InteractionError as error:
      raise of_interaction(error) from None
    finally:
      if turns is None:
        gone = names
      else:
        gone = [
            old
            for name, kept in zip(names, ids)
            for old in turns.give_back(
                name, (kept if pending else _TOKENS) if stored else None
            )
        ]
      for name in gone:
        await self.policy.client.release(name)
    return responses.Answer(
        id=answer_id,
        created=int(time.time()),
        model=self.policy.name,
        prompt_tokens=prompt.tokens,
        reused_tokens=int(completions[0].metrics.get("reused_tokens", 0)),
        choices=tuple(choices),
    )

  async def _generate(
      self, prompt, sampling, seed, names, on_tokens
  ) -> list[policy_client.Completion]:
    """One completion a name; all are cancelled if one fails."""

    async def one(i: int, name: str) -> policy_client.Completion:
      options: dict[str, Any] = {}
      if on_tokens is not None and self.policy.streams:
        options["on_tokens"] = lambda tokens: on_tokens(i, tokens)
      return await self.policy.client.generate(
          prompt,
          dataclasses.replace(
              sampling, seed=None if seed is None else (seed + i) % 2**31
          ),
          session=name,
          **options,
      )

    tasks = [asyncio.ensure_future(one(i, n)) for i, n in enumerate(names)]
    try:
      return list(await asyncio.gather(*tasks))
    except policy_client.ContextLimitError as error:
      raise errors.invalid(
          "messages", str(error), "context_length_exceeded"
      ) from None
    except ValueError as error:
      raise errors.invalid(None, str(error)) from None
    except RuntimeError as error:  # The engine's.
      raise errors.ApiError(500, str(error), code="engine_error") from None
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _load_images(
      self, messages: Sequence[requests.Message]
  ) -> list[requests.Message]:
    """The messages with images in place of their URLs."""
    result = []
    for i, message in enumerate(messages):
      content = message.get("content")
      if isinstance(content, list):
        parts = []
        for j, part in enumerate(content):
          if part["type"] == "image_url":
            try:
              image = await self._loader.load(part["url"])
            except media.MediaError as error:
              raise errors.ApiError(
                  503 if error.retryable else 400,
                  str(error),
                  code=error.code,
                  param=f"messages[{i}].content[{j}].image_url",
                  retry_after_s=1.0 if error.retryable else None,
              ) from None
            part = {"type": "image", "image": image}
          parts.append(part)
        message = {**message, "content": parts}
      result.append(message)
    return result

  # --- sessions ---------------------------------------------------------------

  def start(self, task_id: str = "") -> interactions.Session:
    """Opens a session.

    Raises:
      ApiError: 429, no room.
    """
    try:
      return self.store.start(task_id)
    except interactions.InteractionError as error:
      raise of_interaction(error) from None

  def session(self, session_id: str) -> interactions.Session:
    try:
      return self.store.get(session_id)
    except interactions.InteractionError as error:
      raise of_interaction(error) from None

  async def drop(self, session_id: str) -> None:
    """Forgets a session and all of its interactions."""
    await self.forget(session_id)
    self.store.drop(session_id)

  def by_key(self, key: str) -> interactions.Session | None:
    """The session whose secret this is, if it is one."""
    try:
      return self.store.by_key(key)
    except interactions.InteractionError:
      return None

  async def forget(self, session_id: str) -> None:
    """Frees what a session held of the client; its interactions stay."""
    turns = self._turns.pop(session_id, None)
    for name in turns.close() if turns else ():
      await self.policy.client.release(name)


def new_id() -> str:
  """Of an answer, and of its first interaction."""
  return f"chatcmpl-{secrets.token_hex(12)}"


_STATUS = {
    "unknown_session": 404,
    "unknown_interaction": 404,
    "session_ended": 409,
    "reward_already_discounted": 409,
    "capacity": 429,
}


def of_interaction(error: interactions.InteractionError) -> errors.ApiError:
  """A session's refusal as the client is told of it."""
  status = _STATUS.get(error.code, 400)
  return errors.ApiError(
      status,
      str(error),
      code=error.code,
      retry_after_s=1.0 if status == 429 else None,
  )


_TOKENS = "token prompts"
"""What caches of a session's token prompts are kept under, as if it were an
interaction."""


def _token_prompt(
    ids: Sequence[int], messages: Sequence[requests.Message], renderer: Any
) -> policy_client.TokenPrompt:
  """The prompt, its placeholders matched with the images in their order."""
  pictures = [
      part["image"]
      for message in messages
      if isinstance(message["content"], list)
      for part in message["content"]
  ]
  try:
    return renderer.prompt_of_tokens(ids, pictures)
  except ValueError as error:
    raise errors.invalid("prompt_token_ids", str(error)) from None


def _with_tools(
    messages: Sequence[requests.Message],
    tools: Sequence[Any],
    parser: parser_base.ToolParser,
) -> list[requests.Message]:
  """The messages with the tools shown where Qwen's template shows them."""
  messages = list(messages)
  if not tools:
    return messages
  shown = parser.get_tool_prompt(tools)
  if messages[0]["role"] != "system":
    return [{"role": "system", "content": shown}, *messages]
  content = messages[0].get("content") or ""
  if isinstance(content, list):
    content = "".join(part["text"] for part in content)
  text = f"{content}\n\n{shown}" if content else shown
  return [{"role": "system", "content": text}, *messages[1:]]


def _characters(messages: Sequence[requests.Message]) -> int:
  """Of the messages' text."""
  total = 0
  for message in messages:
    content = message.get("content") or ""
    if isinstance(content, str):
      total += len(content)
    else:
      total += sum(len(part.get("text", "")) for part in content)
  return total


def _seed_of(seed: int, session: str, number: int) -> int:
  digest = hashlib.blake2b(
      f"{seed}/{session}/{number}".encode(), digest_size=8
  ).digest()
  return int.from_bytes(digest, "big") & 0x7FFFFFFF
