"""Sessions' interactions as training sequences.

Promises: each sampled token is trainable in exactly one of the sequences; an
`Exporter` holds what was there when it was made, so that a thread may put
sequences together while the session goes on.

T = tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator, Mapping, Sequence, TYPE_CHECKING

import numpy as np
from tunix.rl.multi_turn.core import trajectory

if TYPE_CHECKING:
  from tunix.rl.multi_turn.serving import interactions

STYLES = ("individual", "concat")


@dataclasses.dataclass(frozen=True)
class Exported:
  """A training sequence. Its `turn_ids` are interactions' `index`es."""

  id: str  # Of the interaction that it ends with.
  reward: float  # Of that interaction.
  sequence: trajectory.TokenSequence
  trained: tuple[str, ...]  # Ids of the interactions trainable in it.


@dataclasses.dataclass(frozen=True, eq=False)
class Exporter:
  """Training sequences in order of creation, one at a time.

  "individual" is one an interaction, which trains its own completion.
  "concat" is one for each that nothing extends, from its root on; what
  several share trains in the first only, with the reward of that one's end.

  Attributes:
    interactions: all of a session's.
    rewards: of each, by id.
    style: one of `STYLES`.
  """

  interactions: tuple[interactions.Interaction, ...]
  rewards: Mapping[str, float]
  style: str

  def __iter__(self) -> Iterator[Exported]:
    concat = self.style == "concat"
    extended = {i.parent for i in self.interactions}
    untrained = {i.id for i in self.interactions}
    for last in self.interactions:
      if concat and last.id in extended:
        continue
      chain = (*last.ancestors, last)
      # Nobody else's chain holds a leaf: each sequence trains something.
      own = chain if concat else (last,)
      trained = tuple(i.id for i in own if i.id in untrained)
      untrained.difference_update(trained)
      sequence = _sequence(chain, trained)
      yield Exported(last.id, self.rewards[last.id], sequence, trained)


def to_tensor_dict(
    exported: Exported,
    multi_modal: Callable[[Sequence[trajectory.ImageSpan]], Any] | None = None,
) -> dict[str, Any]:
  """A sequence as AReaL's batch of one row.

  input_ids, loss_mask, versions int32[1, T], logprobs float32[1, T],
  attention_mask bool[1, T], rewards float32[1], and multi_modal_input: a list
  with the {pixel_values, image_grid_thw} that `multi_modal` makes of the
  images, {} without images, lest another row's take its place in a batch.
  ValueError: images, but no `multi_modal`.
  """
  sequence = exported.sequence
  if sequence.images and multi_modal is None:
    raise ValueError(f"{exported.id!r} has images; pass multi_modal for them")
  pictures = [multi_modal(sequence.images)] if sequence.images else [{}]
  return {
      "input_ids": sequence.tokens[None].copy(),
      "attention_mask": np.ones((1, len(sequence)), np.bool_),
      "loss_mask": sequence.loss_mask[None].astype(np.int32),
      "logprobs": sequence.logprobs[None].copy(),
      "versions": sequence.versions[None].copy(),
      "rewards": np.array([exported.reward], np.float32),
      "multi_modal_input": pictures,
  }


def _sequence(
    chain: Sequence[interactions.Interaction], trained: Sequence[str]
) -> trajectory.TokenSequence:
  last, prompt = chain[-1].completion, chain[-1].prompt
  own = [i.completion for i in chain if i.id in trained]
  runs = [(len(i.extension), len(i.completion.tokens)) for i in chain]
  whose = np.repeat(np.arange(2 * len(chain)), np.ravel(runs))
  mask = np.ravel([(False, i.id in trained) for i in chain])[whose]
  logprobs = np.zeros(len(mask), np.float32)
  logprobs[mask] = np.concatenate([c.logprobs for c in own])
  versions = np.full(len(mask), -1, np.int32)
  versions[mask] = np.concatenate([c.versions for c in own])
  entropies = None
  if all(c.entropies is not None for c in own):
    entropies = np.zeros(len(mask), np.float32)
    entropies[mask] = np.concatenate([c.entropies for c in own])
  all_T = np.concatenate([prompt.tokens, last.tokens])
  turns = np.array([i.index for i in chain], np.int32)[whose // 2]
  rest = mask, logprobs, versions, turns, prompt.images, entropies
  return trajectory.TokenSequence(all_T, *rest)
