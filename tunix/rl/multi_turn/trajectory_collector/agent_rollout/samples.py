"""Turns items of a rollout buffer into samples, and keeps them.

Promises: `tokens` of an item with a token-exact part are that part's; of an
item of text only they are the loss mask generator's, and the sample's metadata
carries `text_only`. A sample in which nothing is trained has response length 0
and an empty loss mask. Order by index is natural: math_2 is before math_10.

Does not: talk to the service, normalise rewards (the learner compares them), or
hold screenshots: an item with some is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import re
import threading
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.trajectory_collector import loss_mask as loss_mask_lib
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences
from tunix.rl.multi_turn.trajectory_collector import records

TEXT_ONLY = "text_only"
"""Key of metadata: the tokens are the mask generator's, not the policy's."""


class Status(enum.Enum):
  """State in which a sample ended."""

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
    reward: The service's reward.
    loss_mask: Mask of the response, 1 for a trained token.
    status: TRUNCATED where a limit of length ended it.
    metadata: the item's extra_info, and raw_reward.
    rollout_log_probs: The response's, None for a token without one; None
      where no log-prob was recorded.
    weight_versions: the same, of the weights that sampled each token.
    sequence: number of the token sequence in its episode: an episode whose
      history was rewritten is several samples, of one index and prompt.
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
  sequence: int = 0

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
    item: Item of the service.
    generator: Maker of tokens for an item of text only.

  Raises:
    ValueError: the item is none, has no tokens and there is no generator, or
      has screenshots.
  """
  record = item if isinstance(item, records.Record) else records.read(item)
  raw = record.reward if record.raw_reward is None else record.raw_reward
  metadata = {**record.extra_info, "raw_reward": raw}
  if record.sampling_params:
    metadata[records.SAMPLING] = list(record.sampling_params)
  sequences = record.sequences or (masked(record, generator),)
  if not record.sequences:
    metadata[TEXT_ONLY] = True
  if any(sequence.images for sequence in sequences):
    raise ValueError(
      f"item uid={record.uid!r} has screenshots, which a sample does not"
      " hold; leave out --rollout-function-path and --buffer-filter-path:"
      " the run then reads the service itself"
    )
  samples = []
  for number, sequence in enumerate(sequences):
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
          sequence.logprobs[start:], mask & ~np.isnan(sequence.logprobs[start:])
        ),
        weight_versions=_where(
          sequence.versions[start:], sequence.versions[start:] >= 0
        ),
        sequence=number,
      )
    )
  return samples


def _where(values: np.ndarray, present: np.ndarray) -> list[Any] | None:
  if not present.any():
    return None
  out = values.astype(object)
  out[~present] = None
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
    tokens = loss_mask_lib.masked_tokens(generator, record.messages)
  except ValueError as error:
    raise ValueError(f"item uid={record.uid!r}: {error}") from None
  mask = np.array(tokens.loss_mask, bool)
  return recorded_sequences.Recorded(
    tokens=np.array(tokens.token_ids, np.int32),
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


BufferFilter = Callable[[Any, int, list[list[Sample]], int], list[list[Sample]]]
"""(args, rollout_id, buffer, num_groups) -> groups, removed from `buffer`."""


def pop_first(
  args: object, rollout_id: int, buffer: list[list[Sample]], num_groups: int
) -> list[list[Sample]]:
  """The default filter: the groups that came first."""
  del args, rollout_id
  first = buffer[:num_groups]
  del buffer[:num_groups]
  return first


class DataBuffer:
  """The trainer's own buffer of groups of samples. Thread-safe.

  Attributes:
    metadata: instance ids trained on, by rollout id; kept in checkpoints.
  """

  def __init__(self, args: object = None):
    """Args:

      args: `buffer_filter_path` names the filter; FIFO without. Samples that
        are added without groups are cut into `n_samples_per_prompt`.

    Raises:
      ValueError: no function there.
    """
    self.args = args
    self.metadata: dict[str, Any] = {}
    self._groups: list[list[Sample]] = []
    self._lock = threading.Lock()
    path = getattr(args, "buffer_filter_path", None)
    self._filter: BufferFilter = pop_first
    if path:
      try:
        self._filter = registry.import_function(path)
      except (ValueError, ImportError) as error:
        raise ValueError(
          f"--buffer-filter-path {path}: {error}; give package.module.function"
        ) from None

  def __len__(self) -> int:
    return len(self._groups)

  get_buffer_length = __len__

  def add_samples(
    self, samples: Iterable[Sample] | Iterable[Sequence[Sample]]
  ) -> None:
    """Adds groups, or their samples one after another; see `groups_of`."""
    groups = groups_of(list(samples), self._size)
    with self._lock:
      self._groups.extend(groups)

  def put_back(self, groups: Iterable[list[Sample]]) -> None:
    """Adds groups before the present ones."""
    with self._lock:
      self._groups[:0] = groups

  def get_samples(
    self, num_groups: int, rollout_id: int = 0
  ) -> list[list[Sample]]:
    """Takes groups as the filter chooses them."""
    with self._lock:
      return list(self._filter(self.args, rollout_id, self._groups, num_groups))

  @property
  def _size(self) -> int:
    return int(getattr(self.args, "n_samples_per_prompt", 0) or 1)

  def get_metadata(self) -> dict[str, Any]:
    return dict(self.metadata)

  def update_metadata(self, metadata: Mapping[str, Any]) -> None:
    self.metadata.update(metadata)

  def state_dict(self) -> dict[str, Any]:
    """JSON that a checkpoint keeps: the metadata, and groups not taken."""
    with self._lock:
      return {
        "metadata": dict(self.metadata),
        "groups": [[_to_json(s) for s in group] for group in self._groups],
      }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    with self._lock:
      self.metadata = dict(state["metadata"])
      self._groups = [
        [_from_json(s) for s in group] for group in state["groups"]
      ]


def _to_json(sample: object) -> dict[str, Any]:
  """A sample as JSON values; also one of another class with its attributes."""
  values = {
    field.name: getattr(sample, field.name)
    for field in dataclasses.fields(Sample)
    if hasattr(sample, field.name)
  }
  if "status" in values:
    values["status"] = _status_text(values["status"])
  return _plain(values)


def _status_text(status: Any) -> Any:
  """Returns the value of a status that is an enum; any other unchanged."""
  return status.value if isinstance(status, enum.Enum) else status


def _plain(value: object) -> Any:
  """Returns the value with lists and numbers in the place of arrays."""
  if hasattr(value, "tolist"):
    return value.tolist()
  if isinstance(value, Mapping):
    return {key: _plain(one) for key, one in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(one) for one in value]
  return value


def _from_json(data: Mapping[str, Any]) -> Sample:
  cut = data.get("status") == Status.TRUNCATED.value
  status = Status.TRUNCATED if cut else Status.COMPLETED
  return Sample(**{**data, "status": status})


# --- conversions --------------------------------------------------------------


def groups_of(samples: Sequence[Any], size: int) -> list[list[Any]]:
  """Returns groups unchanged; gathers samples by index, `size` a group."""
  if all(isinstance(group, (list, tuple)) for group in samples):
    return [list(group) for group in samples]
  groups: list[list[Any]] = []
  count = 0
  for sample in samples:
    if not getattr(sample, "sequence", 0):
      if groups and count < size and groups[-1][0].index == sample.index:
        count += 1
      else:
        groups.append([])
        count = 1
    groups[-1].append(sample)
  return groups


_NEEDED = ("index", "prompt", "tokens", "response_length", "reward",
           "loss_mask")  # fmt: skip


def items_of(group: Sequence[Any]) -> list[dict[str, Any]]:
  """The token-exact items of a group's samples, one an episode.

  Args:
    group: Samples of one index, this class's or others with its attributes.

  Raises:
    ValueError: an attribute is missing, lengths do not agree, or a value is
      no JSON.
  """
  items: list[dict[str, Any]] = []
  for sample in group:
    if missing := [name for name in _NEEDED if not hasattr(sample, name)]:
      raise ValueError(
        f"a {type(sample).__name__} has no {', '.join(missing)}; a rollout"
        " function returns samples, see agent_rollout.Sample"
      )
    try:
      sequence = _sequence_of(sample)
      reward = float(sample.reward)
      info = _plain(dict(getattr(sample, "metadata", None) or {}))
      json.dumps(info)
    except TypeError as error:
      raise ValueError(
        f"sample {sample.prompt!r} of {sample.index!r}: {error}; give"
        " numbers, and metadata of JSON values"
      ) from None
    if getattr(sample, "sequence", 0) and items:
      items[-1]["sequences"].append(sequence)
      continue
    raw = info.pop("raw_reward", None)
    status = getattr(sample, "status", None)
    if _status_text(status) == Status.TRUNCATED.value:
      info["finish_reason"] = records.LENGTH
    items.append(
      {
        "uid": str(sample.prompt),
        "instance_id": str(sample.index),
        "messages": [],
        "reward": reward,
        "extra_info": info,
        "sequences": [sequence],
        **({} if raw is None else {"raw_reward": raw}),
      }
    )
  return items


def _sequence_of(sample: Any) -> dict[str, Any]:
  """The whole sequence: the response's values, and nulls before it."""
  tokens = [int(token) for token in sample.tokens]
  length = int(sample.response_length)
  # Where nothing is trained, a slice of the last 0 values is everything.
  mask = [int(flag) for flag in sample.loss_mask] if length else []
  if len(mask) != length or length > len(tokens):
    raise ValueError(
      f"sample {sample.prompt!r} of {sample.index!r}: loss_mask has"
      f" {len(mask)} values, response_length is {length} of {len(tokens)}"
      " tokens; give one value a token of the response"
    )
  before = len(tokens) - length
  sequence: dict[str, Any] = {
    "tokens": tokens,
    "loss_mask": [0] * before + mask,
  }
  readings: tuple[tuple[str, Any, Callable[[Any], Any]], ...] = (
    ("logprobs", getattr(sample, "rollout_log_probs", None), float),
    ("versions", getattr(sample, "weight_versions", None), int),
  )
  for key, values, read in readings:
    # A list of another length is of turns, not of tokens.
    if values is not None and length and len(values) == length:
      own = [
        None if v is None or not m else read(v) for v, m in zip(values, mask)
      ]
      sequence[key] = [None] * before + own
  return sequence
