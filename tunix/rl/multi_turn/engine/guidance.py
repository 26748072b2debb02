"""What steers a completion, or ends it, beyond sampling parameters.

The engine does not know text. Who does hands over a `StopWhen`, which sees
tokens that were sampled, or a `Grammar`, which says what may be sampled next.
Both are called in the engine's thread, between decode calls, and hold up all
that it does: they must be quick. One that raises fails its request alone.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Protocol, Sequence

import numpy as np

StopWhen = Callable[[np.ndarray], "int | None"]
"""Told all int32[S] tokens sampled so far; returns how many of them to keep
when the completion has ended with one of them, else None."""


class Grammar(Protocol):
  """What may be said, one token at a time. Made for one completion."""

  def allowed(self) -> np.ndarray:
    """uint32[ceil(V / 32)], bit t % 32 of word t // 32 set when token t may
    come next. Where the text may end, a stop token of the request is one."""

  def advance(self, token: int) -> None:
    """Takes note of a sampled token, unless that was a stop token."""


def pack(tokens_V: np.ndarray) -> np.ndarray:
  """bool[V] as a grammar gives it, uint32[ceil(V / 32)]."""
  padded = np.pad(tokens_V, (0, -len(tokens_V) % 32))
  return np.packbits(padded, bitorder="little").view(np.uint32)


def _ask(call: Callable[..., Any], *args: Any) -> Any:
  """What it says. Native code may raise what is no `Exception`; that, too,
  concerns its request alone."""
  try:
    return call(*args)
  except (Exception, KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:
    raise RuntimeError(f"{type(error).__name__}: {error}") from error


def masks(
    requests: Sequence[Any], unbanned: np.ndarray
) -> tuple[dict[Any, np.ndarray], dict[Any, Exception]]:
  """What each of the `slots.Request`s may sample; and those that cannot go on.

  Args:
    requests: each with a grammar.
    unbanned: uint32[ceil(V / 32)], what may be sampled at all.
  """
  found, failed = {}, {}
  for request in requests:
    try:
      mask = np.asarray(_ask(request.grammar.allowed))
      if mask.shape != unbanned.shape or mask.dtype not in (
          np.uint32, np.int32
      ):  # pyformat: disable
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
      found[request] = mask
    except Exception as error:  # pylint: disable=broad-except
      failed[request] = error
  return found, failed


def show(request: Any, tokens: np.ndarray, start: int, stopped: bool) -> bool:
  """Shows what was sampled from `start` on to who steers the request.

  Args:
    request: a `slots.Request`; its length becomes that of what is kept. Its
      cache keeps all, as a sequence that the next turn does not go on with.
    tokens: int32, prompt and what was sampled.
    start: where the new tokens begin.
    stopped: whether the last one is a stop token.

  Returns:
    Whether it has ended before the last one, or with it.
  """
  if request.grammar is not None and not stopped:
    for token in tokens[start : request.length]:
      _ask(request.grammar.advance, int(token))
  if request.stop_when is None:
    return False
  begin = len(request.prompt)
  keep = _ask(request.stop_when, tokens[begin : request.length].copy())
  if keep is None:
    return False
  try:
    end = begin + operator.index(keep)
  except TypeError:
    raise ValueError(
        f"stop_when returned {keep!r}, which is no number of tokens"
    ) from None
  if not start < end <= request.length:
    raise ValueError(
        f"stop_when returned {keep}, which is none of the new tokens: it was"
        f" shown {start - begin} before, and now {request.length - begin}"
    )
  request.length = end
  return True
