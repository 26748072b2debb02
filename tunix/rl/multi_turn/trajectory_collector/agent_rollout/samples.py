"""Turns items of a rollout buffer into samples, and keeps them.

Promises: `tokens` of an item with a token-exact part are that part's; of an
item of text only they are the loss mask generator's, and the sample's metadata
carries `text_only`. A sample in which nothing is trained has response length 0
and an empty loss mask. Order by index is natural: math_2 is before math_10.

Does not: talk to the service, or normalise what `rewards_of` is told to leave.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
import threading
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.trajectory_collector import loss_mask as loss_mask_lib
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences
from tunix.rl.multi_turn.trajectory_collector import records

TEXT_ONLY = "text_only"
"""Key of metadata: the tokens are the mask generator's, not the policy's."""
_STD_EPS = 1e-6


class Status(enum.Enum):
  """How a sample ended."""

  COMPLETED = "completed"
  TRUNCATED = "truncated"


@dataclasses.dataclass
class Sample:
  """One episode to train on.

  Attributes:
    index: its instance id.
    prompt: its uid; training does not read it.
    tokens: ids of the whole conversation.
    response_length: tokens from the first trained one to the end.
    reward: as the service gave it.
    loss_mask: of the response, 1 for a trained token.
    status: TRUNCATED where a limit of length ended it.
    metadata: the item's extra_info, and raw_reward.
    rollout_log_probs: of the response, None for a token without one; None
      where no log-prob was recorded.
    weight_versions: the same, of the weights that sampled each token.
  """

  index: str
  prompt: str
  tokens: list[int]
  response_length: int
  reward: float
  loss_mask: list[int]
  status: Status = Status.COMPLETED
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
  rollout_log_probs: list[float | None] | None = None
  weight_versions: list[int | None] | None = None

  @property
  def truncated(self) -> bool:
    return self.status is Status.TRUNCATED


def natural_key(index: str) -> tuple[Any, ...]:
  """Sorts math_2 before math_10, and numbers before words."""
  return tuple(
      (0, int(part), "") if part.isdecimal() else (1, 0, part)
      for part in re.split(r"(\d+)", str(index))
      if part
  )


def make_samples(
    item: Mapping[str, Any] | records.Record,
    generator: loss_mask_lib.MultiTurnLossMaskGenerator | None,
) -> list[Sample]:
  """The samples of one item: one, or one a token sequence.

  Args:
    item: of the service.
    generator: for an item of text only.

  Raises:
    ValueError: the item is none, or has no tokens and there is no generator.
  """
  record = item if isinstance(item, records.Record) else records.read(item)
  raw = record.reward if record.raw_reward is None else record.raw_reward
  metadata = {**record.extra_info, "raw_reward": raw}
  found = record.sequences or (masked(record, generator),)
  if not record.sequences:
    metadata[TEXT_ONLY] = True
  samples = []
  for sequence in found:
    length = loss_mask_lib.response_length(sequence.loss_mask.tolist())
    start = len(sequence.tokens) - length
    mask = sequence.loss_mask[start:]
    samples.append(
        Sample(
            index=record.instance_id,
            prompt=record.uid,
            tokens=sequence.tokens.tolist(),
            response_length=length,
            reward=record.reward,
            loss_mask=mask.astype(int).tolist(),
            status=Status.TRUNCATED if record.truncated else Status.COMPLETED,
            metadata=dict(metadata),
            rollout_log_probs=_where(
                sequence.logprobs[start:],
                mask & ~np.isnan(sequence.logprobs[start:]),
            ),
            weight_versions=_where(
                sequence.versions[start:], sequence.versions[start:] >= 0
            ),
        )
    )
  return samples


def _where(values: np.ndarray, known: np.ndarray) -> list[Any] | None:
  if not known.any():
    return None
  out = values.astype(object)
  out[~known] = None
  return list(out)


def masked(
    record: records.Record,
    generator: loss_mask_lib.MultiTurnLossMaskGenerator | None,
) -> recorded_sequences.Recorded:
  """Tokens of an item of text only, without log-probs and versions.

  Raises:
    ValueError: no generator, or messages that its format has no place for.
  """
  if generator is None:
    raise ValueError(
        f"item uid={record.uid!r} has messages only; give a tokenizer and"
        " --loss-mask-type"
    )
  try:
    made = loss_mask_lib.masked_tokens(generator, record.messages)
  except ValueError as error:
    raise ValueError(f"item uid={record.uid!r}: {error}") from None
  mask = np.array(made.loss_mask, bool)
  return recorded_sequences.Recorded(
      tokens=np.array(made.token_ids, np.int32),
      loss_mask=mask,
      logprobs=np.where(mask, np.nan, 0.0).astype(np.float32),
      versions=np.full(len(mask), -1, np.int32),
      turn_ids=recorded_sequences.turns_of(mask),
  )


# --- selection ----------------------------------------------------------------


def newest_first(
    items: Sequence[Mapping[str, Any]],
) -> list[list[Mapping[str, Any]]]:
  """Groups of the items, the one with the newest timestamp first."""
  groups: dict[str, list[Mapping[str, Any]]] = collections.OrderedDict()
  for item in items:
    groups.setdefault(str(item["instance_id"]), []).append(item)

  def newest(group: list[Mapping[str, Any]]) -> float:
    return max(records.read(i).timestamp for i in group)

  return sorted(groups.values(), key=newest, reverse=True)


BufferFilter = Callable[[Any, int, list[Sample], int], list[Sample]]
"""(args, rollout_id, buffer, num_samples) -> samples, removed from `buffer`."""


def pop_first(
    args: Any, rollout_id: int, buffer: list[Sample], num_samples: int
) -> list[Sample]:
  """The default filter: the samples that came first."""
  del args, rollout_id
  taken = buffer[:num_samples]
  del buffer[:num_samples]
  return taken


def load_function(path: str, option: str) -> Callable[..., Any]:
  """A function by its dotted path, "package.module.function".

  Raises:
    ValueError: there is none; names the option.
  """
  dotted = path
  if ":" not in path:
    module, _, name = path.rpartition(".")
    dotted = f"{module}:{name}"
  try:
    found = registry.import_path(dotted)
  except (ValueError, ImportError, AttributeError) as error:
    raise ValueError(
        f"{option} {path}: {error}; give package.module.function"
    ) from None
  if not callable(found):
    kind = type(found).__name__
    raise ValueError(f"{option} {path} is a {kind}, no function")
  return found


class DataBuffer:
  """The trainer's own buffer of samples. Thread-safe.

  Attributes:
    metadata: instance ids trained on, by rollout id; kept in checkpoints.
  """

  def __init__(self, args: Any = None):
    """Args:

      args: `buffer_filter_path` names the filter; FIFO without.

    Raises:
      ValueError: no function there.
    """
    self.args = args
    self.metadata: dict[str, Any] = {}
    self._samples: list[Sample] = []
    self._lock = threading.Lock()
    path = getattr(args, "buffer_filter_path", None)
    self._filter: BufferFilter = pop_first
    if path:
      self._filter = load_function(path, "--buffer-filter-path")

  def __len__(self) -> int:
    return len(self._samples)

  get_buffer_length = __len__

  def add_samples(self, samples: Iterable[Sample]) -> None:
    with self._lock:
      self._samples.extend(samples)

  def get_samples(self, num_samples: int, rollout_id: int = 0) -> list[Sample]:
    """Takes samples as the filter chooses them."""
    with self._lock:
      return list(
          self._filter(self.args, rollout_id, self._samples, num_samples)
      )

  def get_metadata(self) -> dict[str, Any]:
    return dict(self.metadata)

  def update_metadata(self, metadata: Mapping[str, Any]) -> None:
    self.metadata.update(metadata)

  def state_dict(self) -> dict[str, Any]:
    """JSON that a checkpoint keeps: the metadata, and samples not taken."""
    with self._lock:
      return {
          "metadata": dict(self.metadata),
          "samples": [
              {**dataclasses.asdict(s), "status": s.status.value}
              for s in self._samples
          ],
      }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    with self._lock:
      self.metadata = dict(state["metadata"])
      self._samples = [
          Sample(**{**s, "status": Status(s["status"])})
          for s in state["samples"]
      ]


# --- training data ------------------------------------------------------------


def rewards_of(args: Any, samples: Sequence[Sample]) -> list[float]:
  """Rewards to train on.

  Each is (r - mean) / (std + 1e-6) over the samples of its index, as
  `disable_rewards_normalization` is not set; untouched else.
  """
  if getattr(args, "disable_rewards_normalization", False):
    return [s.reward for s in samples]
  groups: dict[str, list[int]] = {}
  for number, sample in enumerate(samples):
    groups.setdefault(sample.index, []).append(number)
  out = np.zeros(len(samples))
  for numbers in groups.values():
    values = np.array([samples[n].reward for n in numbers])
    if not reward_equality.all_equal(values):
      out[numbers] = (values - values.mean()) / (values.std() + _STD_EPS)
  return [float(r) for r in out]


def train_data(args: Any, samples: Sequence[Sample]) -> dict[str, list[Any]]:
  """Columns for a trainer, sorted by index."""
  ordered = sorted(samples, key=lambda s: natural_key(s.index))
  return {
      "tokens": [s.tokens for s in ordered],
      "response_lengths": [s.response_length for s in ordered],
      "rewards": rewards_of(args, ordered),
      "raw_reward": [s.metadata.get("raw_reward", s.reward) for s in ordered],
      "truncated": [int(s.truncated) for s in ordered],
      "sample_indices": [s.index for s in ordered],
      "loss_masks": [s.loss_mask for s in ordered],
  }
