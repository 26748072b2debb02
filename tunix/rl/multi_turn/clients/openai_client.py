"""Asks an inference server for completions: vLLM, SGLang, or our own.

    client = OpenAIClient("http://127.0.0.1:8000/v1", "my-model", images)

A `PolicyClient` over HTTP. It sends the prompt's tokens and images, never text
that would be tokenised again. Servers take those in different places
(`protocol`):

    tunix   /sessions/{id}/v1/chat/completions, `prompt_token_ids`, the images
            as the parts of one message; a session keeps its cache
    vllm    /v1/completions with an array of ids; with images
            /inference/v1/generate, `token_ids` and `content_parts`
    sglang  /generate, `input_ids` and `image_data`

vLLM and SGLang expand an image's placeholder themselves: they get one for each
image, and the prompt they report is compared with the one that was meant.

Promises: a call returns one completion whose tokens, log-probs and versions
are those of one continuous sampling by the policy (ids of its vocabulary, none
banned, log-probs in [-50, 0]), or raises; a request that is repeated
after a broken connection is never counted twice (ours answers it with the same
completion, the others abort a request whose connection is gone); a completion
that a weight update cut off resumes there; a server that read other tokens than
it was sent is an error. Every call has a deadline.

Where a server returns no token ids (or ids and log-probs of unequal number),
the reply is tokenised; where it returns no log-probs, they are recomputed or 0.
Such a completion has its `fallback` set, and is counted in `counts`.

Does not: render, or load weights into the server (`disk_weights` does). Belongs
to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import secrets
from typing import Awaitable, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.clients import remote_protocols
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.trajectory_collector import completion_checks
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

PROTOCOLS = ("tunix", "vllm", "sglang")
_RELEASE_S = 10.0
_ANY = 1 << 31  # Every id of 32 bits.

Recompute = Callable[
  [policy_client.TokenPrompt, np.ndarray], "np.ndarray | Awaitable[np.ndarray]"
]
"""(prompt, int32[S] sampled tokens) -> float32[S] log-probs."""

RemoteError = remote_protocols.RemoteError
PromptMismatchError = remote_protocols.PromptMismatchError
SessionGoneError = remote_protocols.SessionGoneError


class OpenAIClient:
  """See the module docstring.

  Attributes:
    version: recorded for tokens without a version of the server's: that of
      the weights it was last given. May be set at any time.
    counts: requests, retries, resumed, and the causes of fallbacks.
    before_request: Awaited before each request for a completion; may set
      `version`.
    protocol: the server's.
    url: the server's, without /v1.
  """

  def __init__(
    self,
    base_url: str,
    model: str,
    image_store: images_lib.ImageStore,
    *,
    protocol: str = "tunix",
    api_key: str = "none",
    timeout_s: float = 120.0,
    retries: int = 5,
    context_length: int | None = None,
    max_images: int = 64,
    banned_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    tokenize: Callable[[str], Sequence[int] | np.ndarray] | None = None,
    end_of_turn_id: int | None = None,
    recompute: Recompute | None = None,
    resize: Callable[[np.ndarray], np.ndarray] | None = None,
    version: int = 0,
  ):
    """Args:

      base_url: URL that ends with /v1, as OpenAI's clients expect it.
      model: The server's name of the model.
      image_store: Store of the prompts' images.
      protocol: Protocol of the server: "tunix", "vllm" or "sglang".
      api_key: Key that is presented as a bearer token.
      timeout_s: Deadline of a completion, all repetitions included, without
        what `before_request` waits for.
      retries: Repetitions of a request whose failure may be temporary. A
        request to a full server (429) is repeated until the deadline.
      context_length: Context of a sequence in tokens, if known; `check` asks
        the server.
      max_images: Largest number of images of a prompt.
      banned_token_ids: Ids that are never sampled, such as the image
        placeholder. Our own server knows its own.
      vocab_size: Ids of the policy; None: any id is taken.
      tokenize: Function from text to ids for replies without token ids, such as
        a renderer's `encode`; None makes such a reply an error.
      end_of_turn_id: Id that ends a tokenised reply which was not cut off.
      recompute: Function that computes the log-probs of tokens that came
        without; None makes them 0.
      resize: Resizes an image as the policy does, before it is sent. A server
        that resizes by itself (vLLM, by torchvision) rounds otherwise, and
        does not resize an image of that size.
      version: Version of the server's present weights.

    Raises:
      ValueError: naming the argument.
    """
    if protocol not in PROTOCOLS:
      raise ValueError(
        f"protocol must be one of {', '.join(PROTOCOLS)}; got {protocol!r}"
      )
    base_url = base_url.rstrip("/")
    if not base_url.startswith(("http://", "https://")):
      raise ValueError(
        f"base_url={base_url!r} is not a URL; give http://host:port/v1"
      )
    if not base_url.endswith("/v1"):
      raise ValueError(f"base_url={base_url!r} must end with /v1")
    if not timeout_s > 0:
      raise ValueError(f"timeout_s must be > 0 seconds, got {timeout_s}")
    if retries < 0:
      raise ValueError(f"retries must be >= 0, got {retries}")
    self.model = model
    self.version = version
    self.context_length = context_length
    self.counts: collections.Counter[str] = collections.Counter()
    self.before_request: Callable[[], Awaitable[None]] | None = None
    self.protocol = protocol
    self._timeout_s = timeout_s
    self._max_images = max_images
    self._banned = tuple(banned_token_ids)
    self._vocabulary = completion_checks.Vocabulary(
      _ANY if vocab_size is None else vocab_size, frozenset(self._banned)
    )
    self._tokenize = tokenize
    self._end_of_turn = end_of_turn_id
    self._recompute = recompute
    self._urls = data_urls.DataUrls(image_store, resize=resize)
    self._http = remote_protocols.JsonRequests(
      base_url.removesuffix("/v1"),
      api_key=api_key,
      timeout_s=timeout_s,
      retries=retries,
      counts=self.counts,
    )
    self.url = self._http.root
    self._sessions: dict[str, asyncio.Future[str]] = {}

  # --- PolicyClient ----------------------------------------------------------

  def open_session(self, session: str) -> None:
    """Does nothing: a session starts with its first prompt."""

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
  ) -> policy_client.Completion:
    """Samples one completion; cancelling the await ends it at the server.

    Raises:
      ContextLimitError: the prompt leaves no room to sample.
      ValueError: the server refuses the request; the text has its reason.
      RemoteError: the server failed, cannot be reached, or has read another
        prompt.
      TimeoutError: no completion within the deadline.
    """
    if not len(prompt):
      raise ValueError("prompt.tokens is empty; give at least one token")
    if len(prompt.images) > self._max_images:
      raise ValueError(
        f"the prompt has {len(prompt.images)} images, at most"
        f" max_images={self._max_images} are taken; drop older screenshots"
      )
    for name in ("top_logprobs", "raw_logprobs"):
      # The others return a sampling mask in the place of alternatives.
      is_mask = name == "top_logprobs" and self.protocol != "tunix"
      if getattr(sampling, name) and not is_mask:
        raise ValueError(
          f"{name}={getattr(sampling, name)} is returned by the engine in"
          " this process only; leave it out"
        )
    for name in ("frequency_penalty", "presence_penalty"):
      if getattr(sampling, name):
        raise ValueError(
          f"{name}={getattr(sampling, name)} is applied by the engine in this"
          " process only; leave it out"
        )
    if sampling.seed is None:
      # A repeated request must be the same, another call another one.
      sampling = dataclasses.replace(sampling, seed=secrets.randbelow(1 << 31))
    try:
      return await concurrency.inline_deadline(
        self._generate(prompt, sampling, session), self._timeout_s
      )
    except TimeoutError as error:
      raise TimeoutError(
        f"no completion from {self.url} within timeout_s={self._timeout_s:g} s"
      ) from error

  async def release(self, session: str) -> None:
    """Ends the session and frees its cache. Unknown ids are fine."""
    started = self._sessions.pop(session, None)
    if started is None:
      return
    if not started.done() or _failed(started):
      started.cancel()
      await asyncio.wait({started})  # At once; a start in progress is undone.
      return
    await self._drop(started.result())

  async def check(self) -> int | None:
    """Asks the server for its models; returns the context's length if known.

    Raises:
      ValueError: it does not serve `model`; names the models it serves.
      RemoteError, TimeoutError: it cannot be reached.
    """
    try:
      async with asyncio.timeout(min(self._timeout_s, 30.0)):
        answer = await self._http.request("get", "/v1/models", None)
    except TimeoutError as error:
      raise TimeoutError(f"{self.url} does not answer") from error
    served = {
      entry.get("id"): entry
      for entry in (answer or {}).get("data", ())
      if isinstance(entry, Mapping)
    }
    if self.protocol == "sglang" and len(served) == 1:
      # It calls its one model by the path of the weights that it loaded last.
      served[self.model] = next(iter(served.values()))
    if self.model not in served:
      raise ValueError(
        f"model={self.model!r} is not served by {self.url}; it serves"
        f" {', '.join(map(repr, served)) or 'none'}"
      )
    length = served[self.model].get("max_model_len")
    if not isinstance(length, int):
      return None
    if self.context_length is None:
      self.context_length = length
    return length

  async def aclose(self) -> None:
    """Ends sessions and connections. Idempotent."""

    async def end(session: str) -> None:
      try:
        await self.release(session)
      except (RemoteError, TimeoutError):
        pass  # It ends by its own timeout.

    # All at once: a server that is gone is waited for once.
    ending = [asyncio.ensure_future(end(s)) for s in list(self._sessions)]
    for tasks in (ending, self._http.undoing):
      if tasks:
        _, late = await asyncio.wait(tasks, timeout=_RELEASE_S)
        for task in late:
          task.cancel()
    self._urls.close()
    await self._http.aclose()

  # --- one completion --------------------------------------------------------

  async def _generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    session: str,
  ) -> policy_client.Completion:
    """Asks until the completion is whole."""
    parts: list[policy_client.Completion] = []
    while True:
      sampled = [t for part in parts for t in part.tokens.tolist()]
      at = prompt
      if sampled:
        tokens = np.concatenate([prompt.tokens, np.array(sampled, np.int32)])
        at = policy_client.TokenPrompt(tokens, prompt.images)
      if self.context_length is not None and len(at) >= self.context_length:
        if parts:
          break  # It was cut off at its very last token.
        raise policy_client.ContextLimitError(
          f"prompt of {len(at)} tokens leaves no room in the context of"
          f" {self.context_length}; shorten the history"
        )
      if self.before_request is not None:
        with concurrency.off_the_clock():
          await self.before_request()
      # Weights may change on the way: the older version is the safe one.
      version = self.version
      own_sampling = _rest(sampling, sampled, len(parts))
      answer = await self._ask(at, own_sampling, session)
      if not sampling.top_logprobs:
        answer.support = None
      part = await self._completion(at, answer, version)
      parts.append(part)
      remaining = sampling.max_new_tokens - len(sampled) - len(part.tokens)
      if part.finish_reason is not policy_client.FinishReason.CANCELLED or (
        remaining < 1
      ):
        break
      # Cut off, as servers do when they get new weights.
      self.counts["resumed"] += 1
      await asyncio.sleep(min(0.1 * 2 ** (len(parts) - 1), 5.0))
    last = parts[-1].finish_reason
    if last is policy_client.FinishReason.CANCELLED:
      last = policy_client.FinishReason.LENGTH
    return policy_client.Completion(
      tokens=np.concatenate([p.tokens for p in parts]),
      logprobs=np.concatenate([p.logprobs for p in parts]),
      versions=np.concatenate([p.versions for p in parts]),
      finish_reason=last,
      metrics={"requests": float(len(parts))},
      fallback=next((p.fallback for p in parts if p.fallback), ""),
      support=remote_protocols.joined_support([p.support for p in parts]),
    )

  async def _ask(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    session: str,
  ) -> remote_protocols.Answer:
    pictures = [await self._urls.of(span.image) for span in prompt.images]
    self.counts["requests"] += 1
    if self.protocol == "tunix":
      return await self._ask_tunix(prompt, sampling, session, pictures)
    if self.protocol == "sglang":
      sglang = remote_protocols.sglang_body(
        prompt, sampling, pictures, self._banned
      )
      answer = await self._http.post("/generate", sglang)
      return remote_protocols.of_sglang(answer)
    body = remote_protocols.vllm_body(
      self.model, prompt, sampling, pictures, self._banned
    )
    path = "/inference/v1/generate" if pictures else "/v1/completions"
    return remote_protocols.of_openai(await self._http.post(path, body))

  async def _ask_tunix(
    self, prompt, sampling, session, pictures
  ) -> remote_protocols.Answer:
    content = [
      {"type": "image_url", "image_url": {"url": url}} for url in pictures
    ]
    body = {
      "model": self.model,
      "messages": [{"role": "user", "content": content or ""}],
      "prompt_token_ids": prompt.tokens.tolist(),
      "max_tokens": sampling.max_new_tokens,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "top_k": sampling.top_k,
      "seed": sampling.seed,
      "stop_token_ids": list(sampling.stop_token_ids),
      "logprobs": True,
      "return_token_ids": True,
    }
    if sampling.min_p:
      body["min_p"] = sampling.min_p
    for attempt in range(2):
      name = await self._session(session, sampling)
      try:
        return remote_protocols.of_openai(
          await self._http.post(f"/sessions/{name}/v1/chat/completions", body)
        )
      except SessionGoneError:
        # It was idle for too long. Nothing is lost but its cache.
        self._sessions.pop(session, None)
        if attempt:
          raise
    raise AssertionError("unreachable")

  async def _session(
    self, session: str, sampling: policy_client.SamplingParams
  ) -> str:
    """Returns the server's id of a session; starts a new one."""
    started = self._sessions.get(session)
    if started is None:
      started = asyncio.ensure_future(self._start(session, sampling))
      self._sessions[session] = started
    try:
      return await asyncio.shield(started)
    except BaseException:
      # A session that was started is released, even if the caller is gone.
      if _failed(started) and self._sessions.get(session) is started:
        del self._sessions[session]
      raise

  async def _start(
    self, session: str, sampling: policy_client.SamplingParams
  ) -> str:
    body = {
      "task_id": session,
      "sampling": sampling_rule.fields_of(sampling),
      # Trained on are the replies' own log-probs, whatever their sampling.
      "other_sampling": "train",
    }
    answer = await self._http.request(
      "post", "/rl/start_session", body, undo=self._unstart
    )
    return _id_of(answer)

  async def _unstart(self, answer: object) -> None:
    await self._drop(_id_of(answer))

  async def _drop(self, name: str) -> None:
    async with asyncio.timeout(min(self._timeout_s, _RELEASE_S)):
      try:
        await self._http.post(
          "/export_trajectories", {"session_id": name, "drop": True}
        )
      except ValueError:
        pass  # It has ended by itself.

  async def _completion(
    self,
    prompt: policy_client.TokenPrompt,
    answer: remote_protocols.Answer,
    version: int,
  ) -> policy_client.Completion:
    self._compare(prompt, answer)
    tokens, logprobs, cause = answer.tokens, answer.logprobs, ""
    if tokens is None:
      cause = "no_token_ids"
    elif logprobs is None:
      cause = "no_logprobs"
    elif len(tokens) != len(logprobs):
      cause = "unequal_lengths"
    if cause:
      self.counts[cause] += 1
    if cause in ("no_token_ids", "unequal_lengths"):
      tokens = self._tokenised(answer, cause)
      if logprobs is not None and len(logprobs) != len(tokens):
        logprobs = None
    tokens_S = self._numbers("token ids", tokens, np.int64)
    if logprobs is not None:
      logprobs_S = self._numbers("log-probs", logprobs, np.float32)
    elif self._recompute is not None:
      logprobs_S = await concurrency.maybe_await(
        self._recompute(prompt, tokens_S)
      )
    else:
      logprobs_S = np.zeros(len(tokens_S), np.float32)
    try:
      completion_checks.check_outside(tokens_S, logprobs_S, self._vocabulary)
    except completion_checks.SamplingContractError as error:
      self.counts["refused"] += 1
      raise RemoteError(f"{self.url} answered: {error}") from error
    tokens_S = tokens_S.astype(np.int32)
    starts = [(0, version), *answer.versions]
    versions = np.empty(len(tokens_S), np.int32)
    for first, of in starts:
      versions[max(0, first) :] = of
    return policy_client.Completion(
      tokens_S,
      logprobs_S,
      versions,
      remote_protocols.finish_reason(answer.reason),
      fallback=cause,
      support=remote_protocols.support_of(answer, tokens_S, bool(cause)),
    )

  def _numbers(
    self, what: str, values: object, dtype: np.typing.DTypeLike
  ) -> np.ndarray:
    """Returns an answer's list as an array of one axis."""
    try:
      numbers = np.array(values, dtype)
      if numbers.ndim == 1:
        return numbers
    except (OverflowError, TypeError, ValueError):
      pass
    raise RemoteError(
      f"{self.url} answered with {what} that are no list of numbers:"
      f" {str(values)[:200]}"
    )

  def _tokenised(
    self, answer: remote_protocols.Answer, cause: str
  ) -> list[int]:
    if self._tokenize is None:
      contents = {
        "no_token_ids": "no token ids",
        "unequal_lengths": (
          f"{len(answer.tokens or ())} token ids and"
          f" {len(answer.logprobs or ())} log-probs"
        ),
      }[cause]
      raise RemoteError(
        f"{self.url} returned {contents}; use a server that has"
        " return_token_ids, or give tokenize= to train on a re-tokenised"
        " reply"
      )
    tokens = [int(i) for i in self._tokenize(answer.text)]
    if answer.reason in ("stop", "tool_calls") and (
      self._end_of_turn is not None
    ):
      tokens.append(self._end_of_turn)
    if not tokens:
      raise RemoteError(f"{self.url} returned neither token ids nor a text")
    return tokens

  def _compare(
    self, prompt: policy_client.TokenPrompt, answer: remote_protocols.Answer
  ) -> None:
    """Refuses an answer to another prompt."""
    if answer.prompt is not None:
      same = np.array_equal(prompt.tokens, np.array(answer.prompt, np.int64))
      length = len(answer.prompt)
    else:
      length = answer.prompt_length or 0
      same = answer.prompt_length in (None, len(prompt))
    if same:
      return
    self.counts["prompt_mismatch"] += 1
    raise PromptMismatchError(
      f"{self.url} has read a prompt of {length} tokens, not the"
      f" {len(prompt)} it was sent with {len(prompt.images)} images: its"
      " image processor or tokenizer differs from the policy's; serve the"
      " policy's own directory, and screenshots of sizes that both take as"
      " they are"
    )


# --- pieces -------------------------------------------------------------------


def _failed(started: asyncio.Future[str]) -> bool:
  """Whether it is over without a session."""
  return started.done() and (
    started.cancelled() or started.exception() is not None
  )


def _id_of(answer: object) -> str:
  """Session id in the answer to a start."""
  return remote_protocols.field(answer, "session_id", str)


def _rest(
  sampling: policy_client.SamplingParams, sampled: Sequence[int], number: int
) -> policy_client.SamplingParams:
  """Parameters of the rest after `done`, with other random numbers."""
  if not number:
    return sampling
  digest = hashlib.blake2b(
    f"{sampling.seed}/{number}".encode(), digest_size=8
  ).digest()
  return dataclasses.replace(
    sampling,
    max_new_tokens=sampling.max_new_tokens - len(sampled),
    seed=int.from_bytes(digest, "big") & 0x7FFFFFFF,
  )
