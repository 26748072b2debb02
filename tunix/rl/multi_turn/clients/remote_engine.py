"""Gives a run an engine in another process, like an engine of its own.

`openai_client` asks for completions, `disk_weights` hands weights over.

Promises: before a run compiles or plays anything, the server has answered one
request of each kind that the run will send: with the model, the context and as
many images as the run needs, with token ids and the log-probs of the
distribution that was sampled from. A refusal names the flag. A later answer
without them is an error, never a completion. While weights are loaded no
request is sent, so that each token's recorded version is that of its weights,
and the deadlines of requests stand still, which the deadlines of the hand-over
bound; after a load that failed none is answered any more, as the engine may
hold half of the weights.

Does not start the server (`vllm` prints the command).
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import math
from typing import Any, Callable, Sequence

from tunix.rl.multi_turn.clients import disk_weights
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.net import concurrency

_CERTAIN = 1e-3
"""Most that a log-prob of the only token left by truncation differs from 0, or
from that of several tokens that are equally likely."""
_TIES = 4
"""Most tokens that are taken to be equally likely."""

_FLAGS = (
  ("scale-out", "start vLLM with --enable-scale-out"),
  (
    "image(s)",
    "start vLLM with --limit-mm-per-prompt '{{\"image\":{images}}}'",
  ),
  ("maximum context length", "start vLLM with a longer --max-model-len"),
  ("room in the context", "start vLLM with a longer --max-model-len"),
  (
    "image count",
    "start SGLang with --limit-mm-data-per-request '{{\"image\":{images}}}'",
  ),
  (
    "return_sampling_mask requires",
    "SGLang's log-probs are those of a truncated distribution with a top_k"
    " only; set sampling.top_k, or sampling.top_p=1 and sampling.min_p=0",
  ),
)
"""(part of a refusal, what to do about it)."""


class RemoteEngine:
  """See the module docstring. `generate` belongs to one event loop."""

  weight_bytes = cache_tokens = cache_bytes = 0  # In this process.

  def __init__(
    self,
    make_client: Callable[[], openai_client.OpenAIClient],
    weights: disk_weights.DiskWeights,
    *,
    context_length: int,
    prompts: Callable[[], Sequence[policy_client.TokenPrompt]],
    sampling: policy_client.SamplingParams,
    adapter: str = "",
    cpu_problem: str = "",
  ):
    """Args:

    make_client: Returns an unused client of the server at each call.
    weights: Hands weights over to the same server.
    context_length: Least context of the server, in tokens.
    prompts: One prompt of each kind that the run will send.
    sampling: Parameters of the run's requests.
    adapter: The server's name of the adapter that `weights` hands over and
      requests ask for; "" where whole weights are handed over.
    cpu_problem: Why vLLM's CPU build cannot serve the policy
      (`vllm.head_problem`); "" where it can.
    """
    self._make_client = make_client
    self._client = make_client()
    self._client.before_request = self._ready
    # `warm_up` asks for the base: there is no adapter before a hand-over.
    self._client.model = adapter or self._client.model
    self._weights = weights
    weights.on_loading = self._loading_changed
    self._loop: asyncio.AbstractEventLoop | None = None
    self._clocks: dict[Any, tuple[concurrency.Clock, ...]] = {}  # By task.
    self._holds_clocks = False
    self._counts: collections.Counter[str] = collections.Counter()
    self._closed = False
    self._prompts, self._sampling = prompts, sampling
    self._cpu_problem = cpu_problem
    self.context_length = context_length

  # --- PolicyClient ----------------------------------------------------------

  def open_session(self, session: str) -> None:
    self._client.open_session(session)

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
  ) -> policy_client.Completion:
    """See `OpenAIClient.generate`."""
    try:
      completion = await self._client.generate(
        prompt, sampling, session=session
      )
    finally:
      clocks = self._clocks.pop(asyncio.current_task(), ())
      if self._holds_clocks:
        for clock in clocks:
          clock.start()
    self._check_weights()
    if problem := _not_own(completion):
      raise openai_client.RemoteError(f"{self._client.url}: {problem}")
    self._check_versions(completion)
    self._counts["completed"] += 1
    self._counts["decode_tokens"] += len(completion.tokens)
    self._counts["prompt_tokens"] += len(prompt)
    return completion

  async def release(self, session: str) -> None:
    await self._client.release(session)

  async def _ready(self) -> None:
    """Waits until no weights are being loaded."""
    while (loading := self._weights.loading) is not None:
      await asyncio.wait([asyncio.wrap_future(loading)])
    self._check_weights()
    self._client.version = max(0, self._weights.version)
    task = asyncio.current_task()
    if task not in self._clocks:
      self._loop = asyncio.get_running_loop()
      # A request that reaches a paused server waits there.
      clocks = self._clocks[task] = concurrency.clocks_around()
      if self._holds_clocks:
        for clock in clocks:
          clock.stop()

  def _loading_changed(self) -> None:
    """Called in the thread of the hand-over."""
    if self._loop is not None:
      with contextlib.suppress(RuntimeError):  # The loop was closed.
        self._loop.call_soon_threadsafe(self._hold_clocks)

  def _hold_clocks(self) -> None:
    """Stops the deadlines of requests while weights are loaded."""
    loads = self._weights.loading is not None
    if loads == self._holds_clocks:
      return
    self._holds_clocks = loads
    for clocks in self._clocks.values():
      for clock in clocks:
        if loads:
          clock.stop()
        else:
          clock.start()

  def _check_weights(self) -> None:
    if (failure := self._weights.failure) is not None:
      raise openai_client.RemoteError(
        f"the engine is not sampled from after a failed hand-over: {failure}"
      )

  def _check_versions(self, completion: policy_client.Completion) -> None:
    newest = int(completion.versions.max(initial=-1))
    own = self._weights.version
    if 0 <= own < newest and self._weights.loading is None:
      raise openai_client.RemoteError(
        f"the server answered with weights of version {newest}, and this run"
        f" has handed over version {own} last: another run gives it weights;"
        " give each run a server of its own (external.url)"
      )

  # --- what a run asks of an engine ------------------------------------------

  @property
  def version(self) -> int:
    """Version of the weights it samples with; -1 before the first hand-over."""
    return self._weights.version

  @property
  def healthy(self) -> bool:
    return not self._closed

  def update_weights(
    self, version: int, params: object
  ) -> concurrent.futures.Future[int]:
    """See `DiskWeights.publish`."""
    return self._weights.publish(version, params)

  def warm_up(
    self, progress: Callable[[int, int, str], None] | None = None
  ) -> float:
    """Sends the first requests, to the base model. Not from an event loop.

    Raises:
      ValueError: The server has another model or too short a context, refuses
        a request, or answers with less than a run needs; names the fix.
      RemoteError, TimeoutError: It failed, or cannot be reached.
    """

    async def check() -> None:
      client = self._make_client()  # Connections belong to a loop.
      try:
        self._check_context(await client.check())
        try:
          await asyncio.to_thread(self._weights.wake)
        except disk_weights.HandOverError as error:
          raise openai_client.RemoteError(str(error)) from error
        for prompt in self._prompts():
          try:
            await self._ask(client, prompt)
          except openai_client.RemoteError as error:
            if self._cpu_problem:
              message = f"the policy {self._cpu_problem} ({error})"
              raise ValueError(message) from error
            raise
      finally:
        await client.aclose()

    asyncio.run(check())
    if progress is not None:
      progress(1, 1, "the server answers")
    return 0.0

  def _check_context(self, length: int | None) -> None:
    if length is not None and length < self.context_length:
      raise ValueError(
        f"the server's context has {length} tokens, the run's"
        f" engine.context_length={self.context_length}; start vLLM with"
        f" --max-model-len {self.context_length}, SGLang with"
        f" --context-length {self.context_length}, or lower the run's"
      )

  async def _ask(
    self, client: openai_client.OpenAIClient, prompt: policy_client.TokenPrompt
  ) -> None:
    """Samples from the run's distribution, then from its likeliest token."""
    images = len(prompt.images)
    first = f"the first request with {images} images, of {len(prompt)} tokens"
    short = dataclasses.replace(self._sampling, max_new_tokens=2, seed=0)
    try:
      answers = [
        await client.generate(prompt, sampling, session="warm-up")
        for sampling in (short, dataclasses.replace(short, top_k=1))
      ]
    except (policy_client.ContextLimitError, ValueError) as error:
      fixes = [fix for sign, fix in _FLAGS if sign in str(error).lower()]
      fix = (
        fixes[0].format(images=images)
        if fixes
        else (
          "start vLLM by the command that `python -m"
          " tunix.rl.multi_turn.clients.vllm` prints, SGLang by that of"
          " docs/serving.md"
        )
      )
      raise ValueError(f"{first}: {error}; {fix}") from error
    for answer in answers:
      if problem := _not_own(answer):
        raise ValueError(f"{first}: {problem}")
    least = float(answers[1].logprobs.min(initial=0.0))
    # Tokens that tie with the likeliest are left beside it.
    certain = all(
      any(abs(value + math.log(k)) <= _CERTAIN for k in range(1, _TIES + 1))
      for value in answers[1].logprobs.tolist()
    )
    if client.protocol != "tunix" and not certain:
      raise ValueError(
        f"{first}: with top_k=1 the one token that can be sampled has the"
        f" log-prob {least:.3g}, not 0: log-probs are not those of the"
        " distribution sampled from; start vLLM with --logprobs-mode"
        " processed_logprobs, or use SGLang 0.5.23"
      )

  def stats(self) -> dict[str, float]:
    """Counters since the beginning."""
    counts = {**self._counts, **self._client.counts}
    return {**counts, "version": self.version}

  async def aclose(self) -> None:
    """Ends the connections, on the loop of `generate`. Idempotent."""
    await self._client.aclose()

  def close(self, timeout_s: float = 30.0) -> None:
    """Ends handing over, a hand-over in progress soon. Idempotent."""
    self._closed = True
    self._weights.close(min(timeout_s, concurrency.STOP_S))


def _not_own(completion: policy_client.Completion) -> str:
  """Returns why a run cannot train on a completion; "" if it can."""
  return completion.fallback and (
    f"the answer has {completion.fallback.replace('_', ' ')}, and a run trains"
    " on the token ids and log-probs of the sampler; use a server that returns"
    " them with every completion (vLLM 0.32, SGLang)"
  )
