"""Drafts the next tokens of a completion from text that looks alike.

Speculative decoding without a draft model: a decode step computes a row's last
token and a few drafted ones at once, samples a token after each, and keeps the
tokens that follow right drafts. The drafts are the tokens that followed the
longest match of the row's last tokens, in its own sequence or in completions
that ended lately (siblings of its group among them). After prompt lookup
decoding (github.com/apoorvumang/prompt-lookup-decoding).

Exact: a token is drawn from its own logits with its own random bits, number i
of the completion, whatever was drafted; a draft saves a step or nothing. Equal
up to the rounding of a program of another shape.

Axis names: R = rows of a call, C = tokens of the text that drafts come from,
D = tokens of a row that a step computes, one and its drafts.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Sequence

import jax
import jax.numpy as jnp
import numpy as np

RECENT = 512
"""Tokens of ended completions in a row's text, before its own sequence."""

_LONGEST = 4  # Tokens of the longest match; a match has two or more.
_TRIALS = 3  # Calls whose median is the speed of a way.
_FIRST, _MOST = 16, 512  # Calls until the slower way is timed again, doubling.


def propose(text_RC: jax.Array, last_R: jax.Array, count: int) -> jax.Array:
  """Returns int32[R, `count`], drafts of the tokens after `last`; -1: none.

  Args:
    text_RC: int32, a row's tokens up to `last` and, before them, other text;
      negative where there is none.
    last_R: int32, the place of each row's last token.
    count: Drafts of a row.
  """
  # 1. Find the last tokens in the text: two, three or four of them in a row.
  place_C = jnp.arange(text_RC.shape[1])
  matches_RC = (place_C < last_R[:, None]) & (place_C >= _LONGEST)
  length_RC = jnp.zeros(text_RC.shape, jnp.int32)
  for back in range(_LONGEST):
    token_R1 = jnp.take_along_axis(text_RC, last_R[:, None] - back, axis=1)
    matches_RC &= jnp.roll(text_RC, back, axis=1) == token_R1
    length_RC += matches_RC
  # 2. Take the longest match; of equally long ones the latest.
  score_RC = length_RC * text_RC.shape[1] + place_C
  best_R = jnp.argmax(jnp.where(length_RC > 1, score_RC, -1), axis=1)
  found_R1 = jnp.any(length_RC > 1, axis=1, keepdims=True)
  # 3. Draft the tokens after the match; they repeat if they reach the end.
  period_R1 = jnp.maximum(last_R - best_R, 1)[:, None]
  at_RD = best_R[:, None] + 1 + jnp.arange(count) % period_R1
  return jnp.where(found_R1, jnp.take_along_axis(text_RC, at_RD, axis=1), -1)


def count(drafts_RD: jax.Array, most_R: jax.Array) -> jax.Array:
  """Returns the number of drafts that could have been accepted, int32.

  Args:
    drafts_RD: int32[R, D - 1], as of `propose`.
    most_R: int32, tokens that the row may still have.
  """
  place_D = 1 + jnp.arange(drafts_RD.shape[1])
  return jnp.sum((drafts_RD >= 0) & (place_D < most_R[:, None]))


def feed(token, position, vision, drafts_RD, next_R):
  """Returns tokens, positions and vision places of a step with drafts.

  Args:
    token, position, vision: int32[R, 1, …], those of the last tokens.
    drafts_RD: int32[R, D - 1], as of `propose`.
    next_R: int32, rotary position behind the last token.
  """
  after_RD = next_R[:, None] + jnp.arange(drafts_RD.shape[1])
  after = jnp.broadcast_to(
    after_RD[..., None], (*after_RD.shape, position.shape[-1])
  )
  return (
    jnp.concatenate([token, jnp.maximum(drafts_RD, 0)], axis=1),
    jnp.concatenate([position, after], axis=1),
    jnp.pad(vision, ((0, 0), (0, drafts_RD.shape[1])), constant_values=-1),
  )


def write(
  all_RC: jax.Array, new_RD: jax.Array, live_R: jax.Array, at_R: jax.Array
) -> jax.Array:
  """Returns `all` with the rows that are live overwritten from `at` on."""

  def one(row, new, live, at):
    return jnp.where(
      live, jax.lax.dynamic_update_slice_in_dim(row, new, at, 0), row
    )

  return jax.vmap(one)(all_RC, new_RD, live_R, at_R)


def accepted(
  drawn_RD: jax.Array,
  drafts_RD: jax.Array,
  stops_RS: jax.Array,
  most_R: jax.Array,
) -> jax.Array:
  """Returns int32[R], how many of the drawn tokens are a row's next ones.

  Args:
    drawn_RD: int32, a draw behind the last token and behind each draft.
    drafts_RD: int32[R, D - 1].
    stops_RS: int32, tokens that end a row.
    most_R: int32, tokens that the row may still have; 0: none are accepted.
  """
  # 1. A draw counts as long as all drafts before it were right.
  right_RD = jnp.cumprod(drawn_RD[:, :-1] == drafts_RD, axis=1)
  # 2. Nothing counts behind a stop token.
  stop_RD = (drawn_RD[:, :, None] == stops_RS[:, None, :]).any(axis=-1)
  right_RD &= jnp.cumprod(~stop_RD[:, :-1], axis=1)
  return jnp.minimum(1 + right_RD.sum(axis=1), most_R)


@dataclasses.dataclass
class _Trial:
  """Times calls of a kind without drafts and with them.

  Attributes:
    rates: Speeds of the latest calls, without drafts and with.
    countdown: Calls until the slower way is timed again.
    period: Calls between two such times.
    faster: Whether calls with drafts were faster when last compared.
  """

  rates: tuple[list[float], list[float]] = dataclasses.field(
    default_factory=lambda: ([], [])
  )
  countdown: int = _FIRST
  period: int = _FIRST
  faster: bool = False

  def next(self) -> bool:
    """Returns whether the next call should use drafts."""
    plain, drafted = map(len, self.rates)
    if min(plain, drafted) < _TRIALS:
      return drafted <= plain
    before = self.faster
    self.faster = statistics.median(self.rates[1]) > statistics.median(
      self.rates[0]
    )
    if self.faster != before:
      self.countdown = self.period = _FIRST
    self.countdown -= 1
    if self.countdown > 0:
      return self.faster
    self.countdown = self.period = min(2 * self.period, _MOST)
    self.rates[not self.faster].clear()
    return not self.faster


class Drafter:
  """Keeps the texts that drafts come from, and times whether they pay.

  Not thread-safe.
  """

  def __init__(self, always: bool, remembers: bool):
    """Args:

    always: Drafts whether or not they pay.
    remembers: Drafts come from ended completions, too. Without them a row's
      results do not depend on other rows.
    """
    self._always = always
    self._remembers = remembers
    self._recent = np.full(RECENT, -1, np.int32)
    self._trials: dict[tuple[int, ...], _Trial] = {}

  def remember(self, tokens: np.ndarray) -> None:
    """Takes note of the tokens of a completion that has ended."""
    if self._remembers:
      text = np.concatenate([self._recent, tokens, [-1]])
      self._recent = text[-RECENT:].astype(np.int32)

  def texts(
    self, sequences: Sequence[np.ndarray], at: np.ndarray, rows: int, width: int
  ) -> np.ndarray:
    """Returns int32[rows, RECENT + width], each row's text.

    Args:
      sequences: Tokens of each sequence, at most `width`.
      at: Row of each.
      rows: Rows of the call.
      width: Tokens for a sequence and what is sampled.
    """
    texts = np.full((rows, RECENT + width), -1, np.int32)
    texts[at, :RECENT] = self._recent
    for row, tokens in zip(at, sequences, strict=True):
      texts[row, RECENT : RECENT + len(tokens)] = tokens
    return texts

  def pays(self, *kind: int) -> bool:
    """Returns whether the next call of a kind should use drafts."""
    return self._always or self._trials.setdefault(kind, _Trial()).next()

  def note(self, drafted: bool, rate: float, *kind: int) -> None:
    """Takes note of a call's speed: tokens a row and second."""
    rates = self._trials.setdefault(kind, _Trial()).rates[drafted]
    rates.append(rate)
    del rates[:-_TRIALS]
