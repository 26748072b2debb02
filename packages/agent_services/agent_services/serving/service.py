"""Answers checked requests from a policy and keeps sessions, without HTTP.

A request in a session continues the token sequence of an earlier turn if its
messages continue that turn's; any other starts a sequence of its own. An equal
body in a session gets the completion that exists or is being sampled, so a
client that repeats a request after a timeout causes no second sample.

Promises: nothing sampled in a session is lost or stored twice; a request that
is cancelled frees its slot and leaves no trace.

Does not parse bodies, or speak HTTP. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import secrets
import time
import typing
from typing import Any, Awaitable, Callable, Iterable, Iterator, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

from agent_services.serving import answers
from agent_services.serving import errors
from agent_services.serving import grammars as grammars_lib
from agent_services.serving import media
from agent_services.serving import parts as parts_lib
from agent_services.serving import prompts
from agent_services.serving import requests
from agent_services.serving import tool_results
from agent_services.serving.sessions import caches
from agent_services.serving.sessions import interactions
from agent_services.serving.sessions import session_sampling
from agent_services.serving.sessions import session_store

T = typing.TypeVar("T")
_LOG = logging.getLogger(__name__)

# AReaL's clients, and generators of rollout buffers, name no other.
DEFAULT_MODELS = ("default", "custom")
OnTokens = Callable[[int, np.ndarray], None]
"""(number of the choice, int32[S] new tokens)."""


class Service:
  """Answers requests; see the module docstring."""

  def __init__(
    self,
    policy: prompts.ServedPolicy,
    store: session_store.SessionStore,
    loader: media.MediaLoader,
    *,
    limits: requests.RequestLimits = requests.RequestLimits(),
    max_concurrent: int = 256,
    seed: int = 0,
  ):
    """Args:

    policy: Policy that samples.
    store: Store of the sessions.
    loader: Loader that fetches and decodes images.
    limits: Limits of a request.
    max_concurrent: Largest number of requests in progress.
    seed: Seed for requests in sessions without a seed of their own, so that a
      repeated request samples the same.
    """
    self.policy = policy
    self.store = store
    if limits.prompt_tokens is None:
      limits = dataclasses.replace(limits, prompt_tokens=policy.context_length)
    self.limits = limits
    self.conversations = caches.ConversationCache()
    self.tokens = dict.fromkeys(("prompt", "reused", "sampled", "untrained"), 0)
    """Totals of answers; a repeated request counts once."""
    self._loader = loader
    self._max = max_concurrent
    self._seed = seed
    self._caches: dict[str, caches.SessionCache] = {}
    self.running = 0

  # --- completions ------------------------------------------------------------

  async def complete(
    self,
    request: requests.SamplingRequest,
    *,
    answer_id: str,
    session: session_store.ServedSession | None = None,
    key: str = "",
    on_tokens: OnTokens | None = None,
  ) -> answers.SampledAnswer:
    """Answers a request.

    Args:
      request: Checked request.
      answer_id: Id of a new answer, from `new_id`.
      session: Session of the request, if it has one.
      key: Key of the body from `key_of`, equal for a repeated request.
      on_tokens: Receives tokens while they are sampled; not called for a
        repeated request.

    Raises:
      ApiError: the client's error.
    """
    if session is None:
      return await self._fresh(request, None, None, on_tokens, answer_id)
    cache = self._caches.get(session.id)
    if cache is None:
      cache = caches.SessionCache(session.id)
      if not session.ended:
        self._caches[session.id] = cache
    task = cache.by_body.get(key)
    if task is None:
      task = asyncio.create_task(
        self._fresh(request, session, cache, on_tokens, answer_id),
        name=answer_id,
      )
      cache.by_body[key] = task
      task.add_done_callback(
        lambda ended: cache.ended(key, ended, not request.kept_by_client)
      )
    return await cache.wait_for(task, key)

  async def render(
    self,
    request: requests.SamplingRequest,
    session: session_store.ServedSession | None = None,
  ) -> policy_client.TokenPrompt:
    """Returns the prompt that the request would be sampled from.

    Raises:
      ApiError: the client's error.
    """
    self.check_model(request.model)
    messages = await self._messages(request, session)
    with api_errors():
      rendered = prompts.render(request, messages, session, self.policy)
    if isinstance(rendered, interactions.PendingPrompt):
      return rendered.prompt
    return rendered

  def check_room(self, session: session_store.ServedSession | None) -> None:
    """Refuses a request that would find no room, before its body is read.

    One that may repeat a request that is being answered is not refused: it
    needs no room of its own.

    Raises:
      ApiError: 429.
    """
    cache = self._caches.get(session.id) if session else None
    if cache is None or not cache.by_body:
      self._check_running()

  def _check_running(self) -> None:
    if self.running >= self._max:
      raise errors.ApiError(
        429,
        f"{self.running} requests are being answered, no more are accepted;"
        " repeat this one later",
        code="too_many_requests",
        retry_after_s=1.0,
      )

  def known_id(
    self, session: session_store.ServedSession | None, key: str
  ) -> str | None:
    """Id of the answer to a body in its session, finished or not."""
    cache = self._caches.get(session.id) if session else None
    if cache is None:
      return None
    task = cache.by_body.get(key)
    return None if task is None else task.get_name()

  async def _fresh(
    self,
    request: requests.SamplingRequest,
    session: session_store.ServedSession | None,
    cache: caches.SessionCache | None,
    on_tokens: OnTokens | None,
    answer_id: str,
  ) -> answers.SampledAnswer:
    if not self.policy.healthy():
      raise errors.ApiError(
        503, "the rollout engine has failed", code="engine_dead"
      )
    self.check_model(request.model)
    self._check_running()
    self.running += 1
    if session is not None:
      session.busy += 1
    try:
      with contextlib.ExitStack() as stack:
        if session is not None:
          with api_errors():
            # Before sampling, so that every completion can be stored.
            room = 0 if request.kept_by_client else request.choices
            stack.enter_context(session.reserve(room))
        messages = await self._messages(request, session)
        answer = await self._sample(
          request, messages, session, cache, on_tokens, answer_id
        )
        if request.remember:
          self.conversations.put(
            answer_id,
            session.id if session else None,
            [*messages, answer.choices[0].message],
            (dataclasses.replace(request, messages=None), answer),
          )
        self.tokens["prompt"] += answer.num_prompt_tokens
        self.tokens["reused"] += answer.reused_tokens
        self.tokens["sampled"] += answer.num_sampled
        return answer
    finally:
      self.running -= 1
      if session is not None:
        session.busy -= 1
        session.touch()

  def check_model(self, name: str) -> None:
    """Raises ApiError for a model that is not served."""
    if name not in (self.policy.name, *DEFAULT_MODELS):
      raise errors.ApiError(
        404,
        f"the model {name!r} is not served here; use {self.policy.name!r}",
        code="model_not_found",
        param="model",
      )

  async def _messages(
    self,
    request: requests.SamplingRequest,
    session: session_store.ServedSession | None,
  ) -> list[requests.Message]:
    """Returns the conversation, with images in place of their URLs."""
    if request.messages is None:
      return []
    before: Sequence[requests.Message] = ()
    if request.previous is not None:
      before = self.conversations.get(
        request.previous, session.id if session else None
      )
      images = requests.count_images([*before, *request.messages])
      self.limits.check_images(images, "the conversation")
    ordered = tool_results.in_order(
      [*before, *request.messages], request.prompt_field
    )
    new = ordered[len(before) :]  # What comes before is in order.
    return [*before, *await self._load_images(new)]

  async def _sample(
    self, request, messages, session, cache, on_tokens, answer_id
  ) -> answers.SampledAnswer:
    ids = [answers.interaction_id(answer_id, i) for i in range(request.choices)]
    with api_errors():
      parts = [
        self._part(part, messages, session, cache, ids, number)
        for number, part in enumerate(request.parts())
      ]
    # Once nothing can refuse the request any more: they are returned below.
    parts = [part.with_names(cache) for part in parts]
    stored = False
    try:
      choices = await self._choices(parts, on_tokens)
      for part, own in zip(parts, choices):
        with api_errors():
          for choice, id_ in zip(own, part.ids if part.pending else ()):
            session.add(
              part.pending,
              # A session holds the fields that training needs.
              dataclasses.replace(
                choice.completion,
                raw_logprobs=None,
                top_tokens=None,
                top_logprobs=None,
              ),
              id=id_,
              assistant_message=choice.message,
              sampling=sampling_rule.fields_of(part.sampling),
              untrained=part.untrained,
            )
            self._count_untrained(session, part, choice)
      stored = True
    finally:
      for part in parts:
        for name in part.gone(cache, stored):
          await self.policy.client.release(name)
    firsts = [own[0].completion.metrics for own in choices]
    return answers.SampledAnswer(
      id=answer_id,
      created=int(time.time()),
      model=self.policy.name,
      prompts=tuple(part.rendered for part in parts),
      num_prompt_tokens=sum(len(part.prompt) for part in parts),
      reused_tokens=sum(int(m.get("reused_tokens", 0)) for m in firsts),
      choices=tuple(choice for own in choices for choice in own),
    )

  def _count_untrained(
    self,
    session: session_store.ServedSession,
    part: parts_lib.Part,
    choice: answers.Choice,
  ) -> None:
    if not part.untrained:
      return
    self.tokens["untrained"] += len(choice.completion.tokens)
    if session.untrained_answers == 1:
      _LOG.warning(
        "session %s of task %r: %s; the answer's tokens are not trained on,"
        " nor are those of further answers like it",
        session.id,
        session.task_id,
        part.untrained,
      )

  def _part(
    self, request, messages, session, cache, ids, number
  ) -> parts_lib.Part:
    """Returns a prompt of the request, with what its sampling needs."""
    rendered = prompts.render(request, messages, session, self.policy)
    pending = None
    if isinstance(rendered, interactions.PendingPrompt):
      pending, prompt = rendered, rendered.prompt
    else:
      prompt = rendered
    room = prompts.check_room(len(prompt), request, self.policy)
    stops = prompts.stop_token_ids(request, self.policy)
    sampling, untrained = request.sampling, ""
    if session is not None and pending is not None:
      sampling = session.sampling.complete(request)
      untrained = session.sampling.difference(request, sampling)
    sampling = dataclasses.replace(
      sampling,
      max_new_tokens=min(request.sampling.max_new_tokens, room),
      stop_token_ids=stops,
    )
    turn = 0
    if cache is not None:
      cache.count += 1
      turn = cache.count
    seed = request.sampling.seed
    if seed is None and session is not None:
      seed = _seed_of(self._seed, session.id, turn)
    parser = None
    if request.parse_tools:
      parser = self.policy.parser.for_tools(request.tools)
    first = number * request.n
    own = ids[first : first + request.n]
    return parts_lib.Part(
      request,
      rendered,
      prompt,
      pending,
      sampling,
      seed,
      first,
      own,
      parser=parser,
      untrained=untrained,
    )

  async def _choices(
    self, parts: Sequence[parts_lib.Part], on_tokens: OnTokens | None
  ) -> list[list[answers.Choice]]:
    """Returns the choices of each part."""
    return await _all(self._choices_of(part, on_tokens) for part in parts)

  async def _choices_of(
    self, part: parts_lib.Part, on_tokens: OnTokens | None
  ) -> list[answers.Choice]:
    request = part.request
    watches = [prompts.stop_strings(request, self.policy) for _ in part.names]
    completions = await self._generate(part, on_tokens, watches)
    choices = []
    for completion, watch in zip(completions, watches):
      text = self.policy.renderer.decode(completion.tokens)
      stop = watch.string(text) if watch else None
      text = watch.cut(text) if watch else text
      parser = part.parser
      if request.guide is not None and not request.guide.reads_calls(text):
        parser = None
      only_calls = request.guide is not None and request.guide.only_calls
      choices.append(
        answers.make_choice(completion, text, parser, stop, only_calls)
      )
    return choices

  async def _generate(
    self,
    part: parts_lib.Part,
    on_tokens: OnTokens | None,
    watches: Sequence[answers.StopStrings | None],
  ) -> list[policy_client.Completion]:
    """Returns one completion a name; all are cancelled if one fails."""
    request, names, seed = part.request, part.names, part.seed
    grammars: list[Any] = [None] * len(names)
    if (guide := request.guide) is not None:
      grammars = await asyncio.to_thread(
        lambda: [
          prompts.start_grammar(
            guide, self.policy, part.sampling.max_new_tokens
          )
          for _ in names
        ]
      )
    elif request.min_tokens:
      stops = part.sampling.stop_token_ids
      grammars = [
        prompts.hold_back_stops(request, stops, self.policy) for _ in names
      ]

    async def one(i: int, name: str) -> policy_client.Completion:
      options: dict[str, Any] = {}
      if on_tokens is not None and self.policy.streams:
        options["on_tokens"] = lambda tokens: on_tokens(part.first + i, tokens)
      if watches[i] is not None:
        options["stop_when"] = watches[i]
      if grammars[i] is not None:
        options["grammar"] = grammars[i]
      return await self.policy.client.generate(
        part.prompt,
        dataclasses.replace(
          part.sampling, seed=None if seed is None else (seed + i) % 2**31
        ),
        session=name,
        **options,
      )

    with self._client_errors(part):
      return await _all(one(i, name) for i, name in enumerate(names))

  @contextlib.contextmanager
  def _client_errors(self, part: parts_lib.Part) -> Iterator[None]:
    """Turns what sampling raises into the client's errors."""
    request = part.request
    try:
      yield
    except policy_client.ContextLimitError as error:
      raise errors.invalid(
        request.prompt_field, str(error), "context_length_exceeded"
      ) from None
    except grammars_lib.GrammarError as error:  # Too large by now.
      assert request.guide is not None
      raise prompts.refused_grammar(request.guide, error) from None
    except ValueError as error:
      if self._loader.has(span.image for span in part.prompt.images):
        raise errors.invalid(_param(str(error), request), str(error)) from None
      # Not the client's fault. It sends the images again with the next request,
      # unless it names the conversation.
      raise errors.ApiError(
        503,
        "the server no longer holds an image of this prompt; send it again,"
        " or start the server with more --image-memory or an --image-dir",
        code="image_lost",
        retry_after_s=1.0 if request.previous is None else None,
      ) from None
    except RuntimeError as error:  # The engine's.
      raise errors.ApiError(500, str(error), code="engine_error") from None

  async def _load_images(
    self, messages: Sequence[requests.Message]
  ) -> list[requests.Message]:
    """Returns the messages with images in place of their URLs."""
    urls = {
      (i, j): part["url"]
      for i, message in enumerate(messages)
      if isinstance(message.get("content"), list)
      for j, part in enumerate(message["content"])
      if part["type"] == "image_url"
    }
    images = dict(zip(urls, await self._loader.load_all(urls.values())))
    for (i, j), image in images.items():
      if isinstance(image, media.MediaError):
        raise errors.ApiError(
          503 if image.retryable else 400,
          str(image),
          code=image.code,
          param=f"messages[{i}].content[{j}].image_url",
          retry_after_s=1.0 if image.retryable else None,
        )
    result = []
    for i, message in enumerate(messages):
      if isinstance(message.get("content"), list):
        parts = list(message["content"])
        for j in range(len(parts)):
          if (i, j) in images:
            parts[j] = {"type": "image", "image": images[i, j]}
        message = {**message, "content": parts}
      result.append(message)
    return result

  # --- sessions ---------------------------------------------------------------

  def start(
    self,
    task_id: str = "",
    request: str = "",
    sampling: session_sampling.SessionSampling | None = None,
  ) -> session_store.ServedSession:
    """Opens a session, or returns the one that `request` opened before.

    Raises:
      ApiError: 429, no room; 422, `request` opened a session of another task.
    """
    with api_errors():
      return self.store.start(task_id, request, sampling)

  def session(self, session_id: str) -> session_store.ServedSession:
    with api_errors():
      return self.store.get(session_id)

  async def drop(self, session_id: str) -> None:
    """Forgets a session and all of its interactions."""
    await self.forget(session_id)
    self.store.drop(session_id)
    self.conversations.drop_session(session_id)

  def by_key(self, key: str) -> session_store.ServedSession | None:
    """Returns the session whose secret this is, if it is one."""
    try:
      return self.store.by_key(key)
    except interactions.InteractionError:
      return None

  async def forget(self, session_id: str) -> None:
    """Releases a session's caches in the client; its interactions stay."""
    cache = self._caches.pop(session_id, None)
    for name in cache.close() if cache else ():
      await self.policy.client.release(name)


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
  """Returns the results; cancels what still runs if any fails."""
  tasks = [asyncio.ensure_future(one) for one in work]
  try:
    return list(await asyncio.gather(*tasks))
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def key_of(prefix: str, body: bytes) -> str:
  """Returns a digest of a body and its endpoint."""

  def digest() -> str:
    sha256 = hashlib.sha256(prefix.encode())
    sha256.update(body)
    return sha256.hexdigest()

  # Hashing screenshots takes longer than changing threads.
  return digest() if len(body) < 1 << 16 else await asyncio.to_thread(digest)


def new_id(prefix: str) -> str:
  """Returns an id for an answer and its first interaction."""
  return prefix + secrets.token_hex(12)


_STATUS = {
  "unknown_session": 404,
  "unknown_interaction": 404,
  "session_ended": 409,
  "session_full": 409,
  "reward_already_discounted": 409,
  "capacity": 429,
  "request_differs": 422,
}


@contextlib.contextmanager
def api_errors() -> Iterator[None]:
  """Turns a session's refusal into the client's error."""
  try:
    yield
  except interactions.InteractionError as error:
    status = _STATUS.get(error.code, 400)
    raise errors.ApiError(
      status,
      str(error),
      code=error.code,
      retry_after_s=1.0 if status == 429 else None,
    ) from None


def _param(message: str, request: requests.SamplingRequest) -> str | None:
  """Returns the field of a client's error, which its message begins with."""
  if message.startswith("prompt"):
    return request.prompt_field
  return "stop_token_ids" if message.startswith("stop_token_ids") else None


def _seed_of(seed: int, session: str, number: int) -> int:
  digest = hashlib.blake2b(
    f"{seed}/{session}/{number}".encode(), digest_size=8
  ).digest()
  return int.from_bytes(digest, "big") & 0x7FFFFFFF
