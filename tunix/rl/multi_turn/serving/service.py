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
import contextlib
import dataclasses
import hashlib
import secrets
import time
from typing import Any, Callable, Iterator, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import conversation_cache as remembered_lib
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import grammars as grammars_lib
from tunix.rl.multi_turn.serving import guides
from tunix.rl.multi_turn.serving import interactions
from tunix.rl.multi_turn.serving import media
from tunix.rl.multi_turn.serving import prompts
from tunix.rl.multi_turn.serving import requests
from tunix.rl.multi_turn.serving import session_store
from tunix.rl.multi_turn.serving import turns as turns_lib

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
    decoder: tokens to text and bytes.
    grammars: what answers may be held to; None: nothing.
    context_length: tokens of a sequence.
    max_stop_token_ids: that the client takes, the renderer's own included;
      None: any number.
    healthy: whether the client can still sample.
    streams: whether `client.generate` tells of tokens as they come.
  """

  name: str
  client: policy_client.PolicyClient
  renderer: Any
  parser: parser_base.ToolParser
  decoder: answers.Decoder
  context_length: int
  grammars: grammars_lib.Grammars | None = None
  max_stop_token_ids: int | None = None
  healthy: Callable[[], bool] = lambda: True
  streams: bool = True


class Service:
  """See the module docstring."""

  def __init__(
      self,
      policy: Policy,
      store: session_store.SessionStore,
      loader: media.MediaLoader,
      *,
      limits: requests.Limits = requests.Limits(),
      max_concurrent: int = 256,
      seed: int = 0,
  ):
    """Args:

      policy: what is served.
      store: of sessions.
      loader: fetches and decodes images.
      limits: of a request.
      max_concurrent: requests that are being answered at a time.
      seed: of requests in sessions that bring none, so that a repeated request
        samples the same.
    """
    self.policy = policy
    self.store = store
    if limits.prompt_tokens is None:
      limits = dataclasses.replace(
          limits, prompt_tokens=policy.context_length
      )
    self.limits = limits
    self.remembered = remembered_lib.Remembered()
    self.tokens = dict.fromkeys(("prompt", "reused", "sampled"), 0)
    """Of answers so far; what is repeated counts once."""
    self._loader = loader
    self._max = max_concurrent
    self._seed = seed
    self._turns: dict[str, turns_lib.Turns] = {}
    self.running = 0

  # --- completions ------------------------------------------------------------

  async def complete(
      self,
      request: requests.Request,
      *,
      answer_id: str,
      session: interactions.Session | None = None,
      key: str = "",
      on_tokens: OnTokens | None = None,
  ) -> answers.Answer:
    """Answers a request.

    Args:
      request: checked.
      answer_id: of a fresh answer, from `new_id`.
      session: of the request, if it has one.
      key: of the body, from `key_of`: tells a repeated request of a session.
      on_tokens: told of tokens as they are sampled. A repeated request is
        answered without.

    Raises:
      ApiError: what the client is to be told.
    """
    if session is None:
      return await self._fresh(request, None, None, on_tokens, answer_id)
    turns = self._turns.get(session.id)
    if turns is None:
      turns = turns_lib.Turns(session.id)
      if not session.ended:
        self._turns[session.id] = turns
    task = turns.by_body.get(key)
    if task is None:
      task = asyncio.create_task(
          self._fresh(request, session, turns, on_tokens, answer_id),
          name=answer_id,
      )
      turns.by_body[key] = task
      task.add_done_callback(
          lambda done: turns.ended(key, done, not request.kept_by_client)
      )
    return await turns.wait_for(task, key)

  def known_id(
      self, session: interactions.Session | None, key: str
  ) -> str | None:
    """Id of the answer that a body has in its session, there or coming."""
    turns = self._turns.get(session.id) if session else None
    if turns is None:
      return None
    task = turns.by_body.get(key)
    return None if task is None else task.get_name()

  async def _fresh(
      self,
      request: requests.Request,
      session: interactions.Session | None,
      turns: turns_lib.Turns | None,
      on_tokens: OnTokens | None,
      answer_id: str,
  ) -> answers.Answer:
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
      with contextlib.ExitStack() as held:
        if session is not None:
          with told():
            # All that is sampled can be stored.
            room = 0 if request.kept_by_client else request.n
            held.enter_context(session.reserve(room))
        messages = await self._messages(request, session)
        answer = await self._sample(
            request, messages, session, turns, on_tokens, answer_id
        )
        if request.remember:
          self.remembered.put(
              answer_id,
              session.id if session else None,
              [*messages, answer.choices[0].message],
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

  async def _messages(
      self,
      request: requests.Request,
      session: interactions.Session | None,
  ) -> list[requests.Message] | None:
    """The conversation, with images in place of their URLs."""
    if request.messages is None:
      return None
    before: Sequence[requests.Message] = ()
    if request.previous is not None:
      before = self.remembered.get(
          request.previous, session.id if session else None
      )
      images = requests.count_images([*before, *request.messages])
      self.limits.check_images(images, "the conversation")
    return [*before, *await self._load_images(request.messages)]

  def _render(
      self,
      request: requests.Request,
      messages: Sequence[requests.Message] | None,
      session: interactions.Session | None,
  ) -> policy_client.TokenPrompt | interactions.PendingPrompt:
    """The prompt: a session's, or one of its own."""
    policy = self.policy
    if request.tokens is not None:  # Before all of them are looked at.
      self._check_room(len(request.tokens), request)
    if request.kept_by_client:
      pictures = [
          part["image"]
          for message in messages
          if isinstance(message["content"], list)
          for part in message["content"]
      ]
      try:
        return policy.renderer.prompt_of_tokens(request.tokens, pictures)
      except ValueError as error:
        raise errors.invalid(request.prompt_field, str(error)) from None
    if request.tokens is not None:
      if policy.renderer.image_token_id in request.tokens:
        raise errors.invalid(
            "prompt",
            f"prompt holds {policy.renderer.image_token_id}, which stands for"
            " an image; send images in the messages of a chat completion",
        )
      if session is not None:
        return session.prompt_tokens(request.tokens)
      return policy_client.TokenPrompt(request.tokens)
    if request.text is not None:
      size = len(request.text)
    else:
      if request.instructions:
        system = {"role": "system", "content": request.instructions}
        messages = [system, *messages]
      messages = prompts.with_tools(messages, request.tools, policy.parser)
      # A message is a token or more, whatever it says.
      size = len(messages) * policy.renderer.longest_token
      size += prompts.characters(messages)
    if size > policy.context_length * policy.renderer.longest_token:
      # Tokenising it would hold up everybody else.
      raise errors.invalid(
          request.prompt_field,
          f"the {request.prompt_field} cannot fit the context of"
          f" {policy.context_length} tokens; shorten the"
          f" {request.prompt_field}",
          "context_length_exceeded",
      )
    if request.text is not None:
      if session is not None:
        return session.prompt_text(request.text)
      return policy_client.TokenPrompt(policy.renderer.encode(request.text))
    if session is not None:
      return session.prompt(messages)
    try:
      return policy.renderer.render(messages)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
      raise errors.invalid(
          "messages", f"the messages cannot be rendered: {error}"
      ) from None

  def _stop_token_ids(self, request: requests.Request) -> tuple[int, ...]:
    """The renderer's, then what is asked for beside them."""
    own = tuple(self.policy.renderer.stop_token_ids)
    asked = dict.fromkeys(request.sampling.stop_token_ids)
    more = tuple(token for token in asked if token not in own)
    most = self.policy.max_stop_token_ids
    if most is not None and len(own) + len(more) > most:
      raise errors.invalid(
          "stop_token_ids",
          f"stop_token_ids holds {len(more)} different ids beside the end of a"
          f" turn, at most {most - len(own)} are taken",
      )
    return own + more

  def _check_room(self, length: int, request: requests.Request) -> int:
    """How many tokens may follow a prompt of that length: one or more."""
    room = self.policy.context_length - length
    if room < 1:
      raise errors.invalid(
          request.prompt_field,
          f"the prompt has {length} tokens, the context"
          f" {self.policy.context_length}; shorten the {request.prompt_field}",
          "context_length_exceeded",
      )
    return room

  async def _sample(
      self, request, messages, session, turns, on_tokens, answer_id
  ) -> answers.Answer:
    with told():
      asked = self._render(request, messages, session)
    pending = None
    number = 0
    prompt = asked
    if isinstance(asked, interactions.PendingPrompt):
      pending, prompt = asked, asked.prompt
    if turns is not None:
      turns.count += 1
      number = turns.count
    room = self._check_room(len(prompt), request)
    sampling = dataclasses.replace(
        request.sampling,
        max_new_tokens=min(request.sampling.max_new_tokens, room),
        stop_token_ids=self._stop_token_ids(request),
    )
    seed = request.sampling.seed
    if seed is None and session is not None:
      seed = _seed_of(self._seed, session.id, number)
    ids = [answers.interaction_id(answer_id, i) for i in range(request.n)]
    if turns is None:
      names = [f"request/{i}" for i in ids]
    else:
      parent = pending.parent if pending else _TOKENS
      names = [turns.take_cache(parent) for _ in ids]
    stored = False
    try:
      watches = [guides.watch(request, self.policy) for _ in names]
      completions = await self._generate(
          request, prompt, sampling, seed, names, on_tokens, watches
      )
      choices = []
      for completion, watch in zip(completions, watches):
        text = self.policy.renderer.decode(completion.tokens)
        text = watch.cut(text) if watch else text
        parser = self.policy.parser if request.parse_tools else None
        choices.append(answers.make_choice(completion, text, parser))
      if pending is not None:
        with told():
          for choice, number_id in zip(choices, ids):
            session.add(
                pending,
                _without_details(choice.completion),
                id=number_id,
                assistant_message=choice.message,
            )
      stored = True
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
    return answers.Answer(
        id=answer_id,
        created=int(time.time()),
        model=self.policy.name,
        prompt=asked,
        num_prompt_tokens=len(prompt),
        reused_tokens=int(completions[0].metrics.get("reused_tokens", 0)),
        choices=tuple(choices),
    )

  async def _generate(
      self, request, prompt, sampling, seed, names, on_tokens, watches
  ) -> list[policy_client.Completion]:
    """One completion a name; all are cancelled if one fails."""
    grammars = [None] * len(names)
    if request.guide is not None:
      grammars = await asyncio.to_thread(
          lambda: [guides.start(request.guide, self.policy) for _ in names]
      )

    async def one(i: int, name: str) -> policy_client.Completion:
      options: dict[str, Any] = {}
      if on_tokens is not None and self.policy.streams:
        options["on_tokens"] = lambda tokens: on_tokens(i, tokens)
      if watches[i] is not None:
        options["stop_when"] = watches[i]
      if grammars[i] is not None:
        options["grammar"] = grammars[i]
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
          request.prompt_field, str(error), "context_length_exceeded"
      ) from None
    except grammars_lib.GrammarError as error:  # It has become too large.
      raise guides.refused(request.guide, error) from None
    except ValueError as error:
      if self._loader.has(span.image for span in prompt.images):
        raise errors.invalid(_param(str(error), request), str(error)) from None
      # Not the client's fault. Images that it sends with each request are
      # there again with the next one.
      raise errors.ApiError(
          503,
          "the server does not hold an image of this prompt any more; send it"
          " again, or start the server with more --image-memory or with an"
          " --image-dir",
          code="image_lost",
          retry_after_s=1.0 if request.previous is None else None,
      ) from None
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
    urls = {
        (i, j): part["url"]
        for i, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if part["type"] == "image_url"
    }
    found = dict(zip(urls, await self._loader.load_all(urls.values())))
    for (i, j), image in found.items():
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
        parts = [
            {"type": "image", "image": found[i, j]} if (i, j) in found else part
            for j, part in enumerate(message["content"])
        ]
        message = {**message, "content": parts}
      result.append(message)
    return result

  # --- sessions ---------------------------------------------------------------

  def start(
      self, task_id: str = "", request: str = ""
  ) -> interactions.Session:
    """Opens a session; the same `request` again gives the same one.

    Raises:
      ApiError: 429, no room; 422, `request` was one of another task.
    """
    with told():
      return self.store.start(task_id, request)

  def session(self, session_id: str) -> interactions.Session:
    with told():
      return self.store.get(session_id)

  async def drop(self, session_id: str) -> None:
    """Forgets a session and all of its interactions."""
    await self.forget(session_id)
    self.store.drop(session_id)
    self.remembered.drop_session(session_id)

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


async def key_of(prefix: str, body: bytes) -> str:
  """What tells a body, sent to an endpoint, from all others."""

  def digest() -> str:
    found = hashlib.sha256(prefix.encode())
    found.update(body)
    return found.hexdigest()

  # Of screenshots it takes longer than changing threads.
  return digest() if len(body) < 1 << 16 else await asyncio.to_thread(digest)


def new_id(prefix: str) -> str:
  """Of an answer, and of its first interaction."""
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
def told() -> Iterator[None]:
  """A session's refusal, as the client is told of it."""
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


def _without_details(
    completion: policy_client.Completion,
) -> policy_client.Completion:
  """What training needs; a session is not to hold more."""
  return dataclasses.replace(
      completion, raw_logprobs=None, top_tokens=None, top_logprobs=None
  )


_TOKENS = "token prompts"
"""What caches of a session's token prompts are kept under, as if it were an
interaction."""


def _param(message: str, request: requests.Request) -> str | None:
  """The field that a client's error is about; its message begins with it."""
  if message.startswith("prompt"):
    return request.prompt_field
  return "stop_token_ids" if message.startswith("stop_token_ids") else None


def _seed_of(seed: int, session: str, number: int) -> int:
  digest = hashlib.blake2b(
      f"{seed}/{session}/{number}".encode(), digest_size=8
  ).digest()
  return int.from_bytes(digest, "big") & 0x7FFFFFFF
