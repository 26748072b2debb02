"""Steers completions by grammars and ends them by stop conditions.

The engine knows tokens, not text. A `StopWhen` sees the sampled tokens and may
end the completion; a `Grammar` allows the tokens that may come next. The engine
calls both in its own thread, between decode calls, while all requests wait:
they must be quick.

Promises: a grammar or stop condition that raises fails its request alone.

Does not parse grammars: `serving.grammars` makes them with llguidance.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Hashable, Protocol, Sequence, TypeVar

import numpy as np
from tunix.rl.multi_turn.core import policy_client

StopWhen = Callable[[np.ndarray], "int | None"]
"""Maps all int32[S] tokens sampled so far to the number of them to keep when
one of them ends the completion, else to None."""


class Grammar(Protocol):
  """The tokens that one completion may continue with, one at a time."""

  def allowed(self) -> np.ndarray:
    """uint32[ceil(V / 32)], bit t % 32 of word t // 32 set when token t may
    come next. Where the text may end, a stop token of the request is one."""
    ...

  def advance(self, token: int) -> None:
    """Takes note of a sampled token, unless that was a stop token."""
    ...


class Steered(Hashable, Protocol):
  """A request, as far as grammars and stop conditions concern it."""

  prompt: policy_client.TokenPrompt
  stop_when: StopWhen | None
  grammar: Grammar | None
  length: int  # Prompt and sampled tokens.

  @property
  def sampled(self) -> int: ...


_S = TypeVar("_S", bound=Steered)


def pack(tokens_V: np.ndarray) -> np.ndarray:
  """Converts bool[V] to a grammar's mask, uint32[ceil(V / 32)]."""
  padded = np.pad(tokens_V, (0, -len(tokens_V) % 32))
  return np.packbits(padded, bitorder="little").view(np.uint32)


class MinTokens:
  """A `Grammar` that holds stop tokens back for the first tokens."""

  def __init__(
    self, least: int, stop_token_ids: Sequence[int], vocabulary: int
  ):
    """Args:

    least: sampled tokens before one of the stop tokens may come.
    stop_token_ids: Stop tokens of the request.
    vocabulary: number of the policy's ids.
    """
    tokens_V = np.ones(vocabulary, bool)
    self._any = pack(tokens_V)
    tokens_V[[t for t in stop_token_ids if t < vocabulary]] = False
    self._held = pack(tokens_V)
    self._left = least

  def allowed(self) -> np.ndarray:
    return self._held if self._left > 0 else self._any

  def advance(self, token: int) -> None:
    del token
    self._left -= 1


def _call(function: Callable[..., Any], *args: Any) -> Any:
  """Returns the function's result; native panics become `RuntimeError`.

  Native code may raise a `BaseException` of its own, which must fail its
  request alone as well.
  """
  try:
    return function(*args)
  except (Exception, KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:
    raise RuntimeError(f"{type(error).__name__}: {error}") from error


def masks(
  requests: Sequence[_S], unbanned: np.ndarray
) -> tuple[dict[_S, np.ndarray], dict[_S, Exception]]:
  """Returns each request's mask of allowed tokens, or its error.

  Args:
    requests: each with a grammar.
    unbanned: uint32[ceil(V / 32)], the tokens that may be sampled at all.
  """
  masks_of: dict[_S, np.ndarray] = {}
  failed: dict[_S, Exception] = {}
  for request in requests:
    try:
      assert request.grammar is not None
      mask = np.asarray(_call(request.grammar.allowed))
      if mask.shape != unbanned.shape or mask.dtype not in (
        np.uint32,
        np.int32,
      ):
        raise ValueError(
          f"grammar allows {mask.dtype}{list(mask.shape)}, which is no"
          f" uint32{list(unbanned.shape)}, a bit a token"
        )
      mask = mask.view(np.uint32)
      if not np.any(mask & unbanned):
        raise ValueError(
          "grammar allows no token that may be sampled after"
          f" {request.sampled} tokens; let it end with a stop token"
        )
      masks_of[request] = mask
    except Exception as error:  # pylint: disable=broad-except
      failed[request] = error
  return masks_of, failed


def ends(
  request: Steered, tokens: np.ndarray, start: int, stopped: bool
) -> bool:
  """Shows the tokens sampled from `start` on to grammar and stop condition.

  Args:
    request: its length becomes that of the tokens to keep. Its cache keeps
      all, as a sequence that the next turn does not extend.
    tokens: int32, prompt and sampled tokens.
    start: Place of the first new token.
    stopped: whether the last one is a stop token.

  Returns:
    Whether the stop condition ends the completion.
  """
  if request.grammar is not None and not stopped:
    for token in tokens[start : request.length]:
      _call(request.grammar.advance, int(token))
  if request.stop_when is None:
    return False
  begin = len(request.prompt)
  keep = _call(request.stop_when, tokens[begin : request.length].copy())
  if keep is None:
    return False
  try:
    end = begin + operator.index(keep)
  except TypeError:
    raise ValueError(
      f"stop_when returned {keep!r}, which is not a number of tokens"
    ) from None
  if not start < end <= request.length:
    raise ValueError(
      f"stop_when returned {keep}, which is none of the new tokens: it was"
      f" shown {start - begin} before, and now {request.length - begin}"
    )
  request.length = end
  return True
