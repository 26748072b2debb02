"""Asks the policy for an episode's turns.

`PolicyModel` sends tokens to a `PolicyClient` and yields training sequences;
any plain callable, messages to text, works too and yields none. The engine uses
both through one interface.

Promises: the seed of each turn is a function of the episode's seed, so that
members of a group differ and a run repeats; sessions are released.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Awaitable, Callable, Sequence

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.trajectory_collector import completion_checks
from tunix.rl.multi_turn.trajectory_collector import seeds
from tunix.rl.multi_turn.trajectory_collector import sequence_builder

Message = trajectory.Message
derive_seed = seeds.derive_seed
GuardedCall = Callable[..., Awaitable[Any]]
"""The engine's caller of one step: (fn, *args, inline) under its deadline."""


@dataclasses.dataclass(frozen=True)
class PolicyModel:
  """A policy behind a `PolicyClient`.

  Attributes:
    client: samples the tokens.
    renderer: messages to tokens, see `sequence_builder.Renderer`.
    sampling: parameters of every turn. `seed` is used when the episode has
      none; empty `stop_token_ids` become the renderer's.
    max_context_tokens: prompts that leave no room below this length end the
      episode with status context_limit; completions are cut to fit. None
      leaves the limit to the client.
    runs_inline: `client.generate` is awaited in the episode's own task; only
      for clients that honour cancellation.
    keeps_support: each sampled token keeps the tokens that truncation left to
      be sampled, of which `sampling.top_k` bounds the number.
  """

  client: policy_client.PolicyClient
  renderer: sequence_builder.Renderer
  sampling: policy_client.SamplingParams = policy_client.SamplingParams()
  max_context_tokens: int | None = None
  runs_inline: bool = False
  keeps_support: bool = False

  def __post_init__(self):
    if self.keeps_support:
      object.__setattr__(
        self,
        "sampling",
        dataclasses.replace(
          self.sampling, top_logprobs=policy_client.MAX_TOP_LOGPROBS
        ),
      )
    if self.max_context_tokens is not None and self.max_context_tokens < 2:
      raise ValueError(
        f"max_context_tokens must be >= 2, got {self.max_context_tokens}"
      )
    if not self.sampling.stop_token_ids:
      object.__setattr__(
        self,
        "sampling",
        dataclasses.replace(
          self.sampling,
          stop_token_ids=tuple(int(i) for i in self.renderer.stop_token_ids),
        ),
      )

  def new_session(self, name: str, seed: int | None) -> TokenSession:
    """A session for one episode; see `make_session`."""
    return TokenSession(self, name, seed)


def make_session(
  model_call: Any,
  name: str,
  seed: int | None,
  agent: object = None,
  env: object = None,
) -> Any:
  """One episode's conversation with the policy.

  Args:
    model_call: has `new_session(name, seed)`, which gives an object with the
      methods of `TokenSession`, or `new_session_for(agent, env, name, seed)`
      where the two are of one kind, or is called with messages for a text.
    name: Name of the episode.
    seed: Seed of its sampling.
    agent, env: of the episode.
  """
  of_pair = getattr(model_call, "new_session_for", None)
  if of_pair is not None:
    return of_pair(agent, env, name, seed)
  new_session = getattr(model_call, "new_session", None)
  if new_session is None:
    return TextSession(model_call)
  return new_session(name, seed)


@dataclasses.dataclass(frozen=True)
class Reply:
  """The result of a turn's model call.

  Attributes:
    text: the response without its end-of-turn token.
    truncated: it hit a length limit.
    cancelled: the client stopped sampling before its end.
    prompt_tokens, sampled_tokens: counts, 0 for text-only models.
    fallback: its tokens or log-probs are not the sampler's own.
  """

  text: str
  truncated: bool = False
  cancelled: bool = False
  prompt_tokens: int = 0
  sampled_tokens: int = 0
  fallback: bool = False


class TextSession:
  """One episode's conversation with a messages -> text callable."""

  num_rewrites = 0

  def __init__(self, fn: Callable[[Sequence[Message]], Any]):
    self._fn = fn
    self._inline = concurrency.runs_inline(fn)
    self.render_seconds = 0.0

  async def reply(self, messages, turn, call, max_new_tokens=None) -> Reply:
    """Returns the turn's reply; `call` is the engine's guarded caller."""
    del turn, max_new_tokens  # A callable's own.
    text = await call(self._fn, messages, inline=self._inline)
    if not isinstance(text, str):
      raise TypeError(
        "model_call must return the response as a str, got"
        f" {type(text).__name__}"
      )
    return Reply(text)

  def build(self) -> list[trajectory.TokenSequence]:
    return []

  def sessions(self) -> list[str]:
    return []


class TokenSession:
  """One episode's conversation with a `PolicyModel`."""

  def __init__(self, model: PolicyModel, name: str, seed: int | None):
    self._model = model
    self._name = name
    self._seed = model.sampling.seed if seed is None else seed
    self._builder = sequence_builder.SequenceBuilder(model.renderer)
    self._sessions: list[str] = []
    self.render_seconds = 0.0
    self._open()

  def _open(self) -> None:
    """Names a session; engines that batch in lockstep count it from here."""
    name = f"{self._name}/{len(self._sessions)}"
    self._sessions.append(name)
    announce = getattr(self._model.client, "open_session", None)
    if announce is not None:
      announce(name)

  @property
  def num_rewrites(self) -> int:
    return self._builder.num_rewrites

  async def reply(self, messages, turn, call, max_new_tokens=None) -> Reply:
    """Returns the turn's reply.

    Args:
      messages: Messages of the turn.
      turn: Index of the turn.
      call: The engine's guarded caller.
      max_new_tokens: Longest reply; None for that of the sampling.

    Raises:
      ContextLimitError: no room to sample.
    """
    started = time.perf_counter()
    prompt = self._builder.prompt(messages)
    self.render_seconds = time.perf_counter() - started
    if self._builder.num_sequences > len(self._sessions):
      # The history was rewritten: the old session's cache is of no use.
      self._open()
      await call(self.release, self._sessions[-2], inline=True)
    completion = await call(
      self._generate,
      prompt,
      self._params(turn, len(prompt), max_new_tokens),
      inline=self._model.runs_inline,
    )
    started = time.perf_counter()
    if self._model.keeps_support:
      completion = completion.with_support()
      if completion.support is None:
        raise completion_checks.SamplingContractError(
          "the sampler returned no sampling mask, which"
          " keep_sampling_mask=true needs; start vLLM with"
          " --return-sampling-mask, or use the engine in this process"
        )
    text = self._builder.append(completion)
    self.render_seconds += time.perf_counter() - started
    reason = completion.finish_reason
    return Reply(
      text,
      truncated=reason is policy_client.FinishReason.LENGTH,
      cancelled=reason is policy_client.FinishReason.CANCELLED,
      prompt_tokens=len(prompt),
      sampled_tokens=len(completion.tokens),
      fallback=bool(completion.fallback),
    )

  async def _generate(self, prompt, params) -> policy_client.Completion:
    completion = await self._model.client.generate(
      prompt, params, session=self._sessions[-1]
    )
    if not isinstance(completion, policy_client.Completion):
      raise TypeError(
        "PolicyClient.generate must return a Completion, got"
        f" {type(completion).__name__}"
      )
    return completion

  def _params(
    self, turn: int, length: int, max_new_tokens: int | None
  ) -> policy_client.SamplingParams:
    changes: dict[str, Any] = {}
    longest = max_new_tokens or self._model.sampling.max_new_tokens
    if self._seed is not None:
      changes["seed"] = derive_seed(self._seed, turn)
    limit = self._model.max_context_tokens
    if limit is not None:
      room = limit - length
      if room < 1:
        raise policy_client.ContextLimitError(
          f"the prompt of turn {turn} has {length} tokens; the context holds"
          f" {limit}"
        )
      longest = min(longest, room)
    if longest != self._model.sampling.max_new_tokens:
      changes["max_new_tokens"] = longest
    if not changes:
      return self._model.sampling
    return dataclasses.replace(self._model.sampling, **changes)

  def build(self) -> list[trajectory.TokenSequence]:
    return self._builder.build()

  def sessions(self) -> list[str]:
    """Sessions that the client holds, to be released."""
    return self._sessions[-1:]

  async def release(self, session: str) -> None:
    await self._model.client.release(session)
