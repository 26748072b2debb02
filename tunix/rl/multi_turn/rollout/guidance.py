"""What steers a completion, or ends it, beyond sampling parameters.

The engine does not know text. Who does hands over a `StopWhen`, which sees
tokens that were sampled, or a `Grammar`, which says what may be sampled next.
Both are called in the engine's thread, between decode calls, and hold up all
that it does: they must be quick. One that raises fails its request alone.
"""

from __future__ import annotations

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
      mask = request.grammar.allowed()
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
      request.grammar.advance(int(token))
  if request.stop_when is None:
    return False
  begin = len(request.prompt)
  keep = request.stop_when(tokens[begin : request.length].copy())
  if keep is None:
    return False
  end = begin + keep
  if not start < end <= request.length:
    raise ValueError(
        f"stop_when returned {keep}, which is none of the new tokens: it was"
        f" shown {start - begin} before, and now {request.length - begin}"
    )
  request.length = end
  return True
