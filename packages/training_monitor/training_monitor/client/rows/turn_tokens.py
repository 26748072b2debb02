"""Takes an episode's sequences apart into the tokens of each turn.

Every sampled token is in exactly one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
from typing import Any

import numpy as np

from training_monitor.core import trajectory as trajectory_lib


@dataclasses.dataclass(frozen=True)
class TurnTokens:
  """A turn's tokens.

  Attributes:
    ids: sampled.
    logprobs: nats, of each.
    versions: [version, how many in a row] of them.
    entropies: nats, float32 of each; None where the sampler has none.
    prompt: tokens that the turn added to the prompt, [id, how many in a
      row]: screenshots are long runs of one id.
  """

  ids: list[int]
  logprobs: list[float]
  versions: list[list[int]]
  entropies: np.ndarray | None = None
  prompt: list[list[int]] | None = None


NONE = TurnTokens([], [], [])


def by_turn(episode: trajectory_lib.Trajectory) -> dict[int, TurnTokens]:
  """Maps turns to their tokens; each sampled token is in one sequence."""
  sampled: dict[int, list[tuple[Any, slice]]] = {}
  prompts: dict[int, list[list[int]]] = {}
  for sequence in episode.sequences:
    before: dict[int, list[list[int]]] = {}
    for turn, chosen, part in _stretches(sequence):
      if chosen:
        sampled.setdefault(turn, []).append((sequence, part))
        prompts.setdefault(turn, []).extend(before.pop(turn, ()))
      else:
        before.setdefault(turn, []).extend(_runs(sequence.tokens[part]))
  tokens = {}
  for turn, parts in sampled.items():
    silent = any(s.entropies is None for s, _ in parts)
    tokens[turn] = TurnTokens(
      _joined(parts, "tokens").tolist(),
      _joined(parts, "logprobs").tolist(),
      _runs(_joined(parts, "versions")),
      None if silent else _joined(parts, "entropies"),
      prompts[turn],
    )
  return tokens


def _joined(parts: Iterable[tuple[Any, slice]], name: str) -> np.ndarray:
  return np.concatenate([getattr(s, name)[part] for s, part in parts])


def _stretches(sequence: Any) -> Iterator[tuple[int, bool, slice]]:
  """Yields (turn, sampled, slice) of adjacent tokens that agree in both."""
  key = 2 * sequence.turn_ids.astype(np.int64) + sequence.loss_mask
  cuts = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)]
  for start, stop in zip(cuts, cuts[1:]):
    if stop > start:
      turn, sampled = divmod(int(key[start]), 2)
      yield turn, bool(sampled), slice(start, stop)


def _runs(values: np.ndarray) -> list[list[int]]:
  """Returns the run-length encoding [value, count] of integers."""
  cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]
  cuts.append(len(values))
  return (
    [
      [value, stop - start]
      for value, start, stop in zip(values[cuts[:-1]].tolist(), cuts, cuts[1:])
    ]
    if len(values)
    else []
  )
