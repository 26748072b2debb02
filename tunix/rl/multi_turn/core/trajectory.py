"""Data types of an episode: tasks, actions, steps, trajectories.

Promises: no illegal value can be built; a failed trajectory records how.
Everything here round-trips through JSON.

Does not: run anything, hold pixels (see `images.py`), or know a tokenizer.
Imports numpy, `reward_equality`, `reward_range` and `token_sequence` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import enum
import math
from typing import Any
import uuid

import numpy as np

from . import reward_equality
from . import reward_range
from . import token_sequence

ImageRef = token_sequence.ImageRef
ImageSpan = token_sequence.ImageSpan
TokenSequence = token_sequence.TokenSequence
check_spans = token_sequence.check_spans

Message = dict[str, Any]
"""An OpenAI-format message. `content` is a string or a list of parts,
`{"type": "text", "text": str}` or `{"type": "image", "image": ImageRef}`."""


_SHOWN = 80
"""Characters of a text that a repr shows."""


def _cut(text: str) -> str:
  return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class TrajectoryStatus(str, enum.Enum):
  """Outcome of an episode."""

  RUNNING = "running"
  SUCCEEDED = "succeeded"
  FAILED = "failed"  # Ran to its end, the task was not solved.
  MAX_TURNS = "max_turns"
  CONTEXT_LIMIT = "context_limit"
  PARSE_ERROR = "parse_error"
  TIMEOUT = "timeout"
  ENV_ERROR = "env_error"
  MODEL_ERROR = "model_error"
  CANCELLED = "cancelled"

  @property
  def is_policy_outcome(self) -> bool:
    """True when the policy, not the infrastructure, decided the outcome.

    Only such trajectories may enter group statistics: a broken browser must
    not be learned from as reward 0.
    """
    return self in _POLICY_OUTCOMES


_POLICY_OUTCOMES = frozenset(
  {
    TrajectoryStatus.SUCCEEDED,
    TrajectoryStatus.FAILED,
    TrajectoryStatus.MAX_TURNS,
    TrajectoryStatus.CONTEXT_LIMIT,
    TrajectoryStatus.PARSE_ERROR,
  }
)


NO_CALL, TOOL_NAME, TOOL_ARGUMENTS, TOO_MANY_CALLS = INVALID_KINDS = (
  "no_call",
  "tool_name",
  "tool_arguments",
  "too_many_calls",
)
"""Why a call was not carried out. `Step.info["invalid_kinds"]` of environments
has one of them for each such call."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A tool call the policy asked for.

  Attributes:
    name: tool name.
    arguments: keyword arguments, JSON values.
    call_id: unique within an episode; filled in when absent.
  """

  name: str
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  call_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

  def __post_init__(self):
    if not isinstance(self.name, str) or not self.name:
      raise ValueError(f"ToolCall.name must be a non-empty str: {self.name!r}")
    if not isinstance(self.arguments, dict):
      raise ValueError(
        f"ToolCall.arguments of {self.name!r} must be a dict, got"
        f" {type(self.arguments).__name__}"
      )

  def to_json(self) -> dict[str, Any]:
    return {
      "name": self.name,
      "arguments": encode(self.arguments),
      "call_id": self.call_id,
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> ToolCall:
    return cls(data["name"], decode(data["arguments"]), data["call_id"])


@dataclasses.dataclass(frozen=True)
class ToolOutput:
  """Result of a tool call.

  Attributes:
    name: tool name.
    output: result, or None when `error` is set.
    error: message of the failure, or None.
    metadata: anything a logger may want.
  """

  name: str
  output: str | list | dict | None = None
  error: str | None = None
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_error(self) -> bool:
    return self.error is not None

  def __str__(self) -> str:
    if self.error is not None:
      return f"Error: {self.error}"
    if self.output is None:
      return ""
    if isinstance(self.output, str):
      return self.output
    import json  # pylint: disable=g-import-not-at-top

    return json.dumps(encode(self.output), ensure_ascii=False)

  def to_json(self) -> dict[str, Any]:
    return {
      "name": self.name,
      "output": encode(self.output),
      "error": self.error,
      "metadata": encode(self.metadata),
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> ToolOutput:
    return cls(
      data["name"],
      decode(data["output"]),
      data["error"],
      decode(data["metadata"]),
    )


@dataclasses.dataclass(frozen=True)
class Action:
  """An agent's output for its environment.

  Attributes:
    action: a list of ToolCalls, or a plain answer string.
  """

  action: Any = None

  @property
  def tool_calls(self) -> list[ToolCall]:
    if isinstance(self.action, (list, tuple)):
      return [c for c in self.action if isinstance(c, ToolCall)]
    return []


@dataclasses.dataclass
class Step:
  """One turn. Fields are those of the source document; units: reward is the
  environment's, `mc_return` is discounted by the engine's gamma."""

  chat_completions: Sequence[Message] = dataclasses.field(default_factory=list)
  thought: str = ""
  action: Any = None
  observation: Any = None
  model_response: str = ""
  reward: float = 0.0
  done: bool = False
  mc_return: float = 0.0
  info: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return {
      f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self)
    }

  def __repr__(self) -> str:
    text = _cut(self.model_response or str(self.action))
    ending = ", done" if self.done else ""
    return f"Step({text!r}, reward {self.reward:g}{ending})"

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Step:
    return cls(**{k: decode(v) for k, v in data.items()})


@dataclasses.dataclass
class Trajectory:
  """One episode.

  Attributes:
    task: the task attempted.
    steps: turns in order.
    reward: undiscounted sum of the steps' rewards, the final one included; see
      `reward_equality.total`.
    status: how it ended.
    error: kind and text of the failure ("EnvStepTimeout: …"), or None.
    sequences: token-exact training sequences, at least one when the policy
      was called.
    metrics: numbers about the episode (seconds, counts).
    stale_tokens: sampled tokens that left the loss for their age; see
      `trimmed`.
  """

  task: Any = None
  steps: list[Step] = dataclasses.field(default_factory=list)
  reward: float = 0.0
  status: TrajectoryStatus = TrajectoryStatus.RUNNING
  error: str | None = None
  sequences: list[TokenSequence] = dataclasses.field(default_factory=list)
  trajectory_id: str = dataclasses.field(
    default_factory=lambda: uuid.uuid4().hex
  )
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  stale_tokens: int = 0

  def __repr__(self) -> str:
    error = f", {_cut(self.error)!r}" if self.error else ""
    return (
      f"Trajectory({_cut(self.trajectory_id)}, {self.status.value}, reward"
      f" {self.reward:g}, {self.num_turns} turns, {self.num_sampled} sampled"
      f" tokens{error})"
    )

  @property
  def num_turns(self) -> int:
    return len(self.steps)

  @property
  def num_sampled(self) -> int:
    return sum(s.num_sampled for s in self.sequences)

  @property
  def untrained_tokens(self) -> int:
    """Tokens sampled from another distribution than the run's: untrained."""
    return int(self.metrics.get("untrained_tokens", 0))

  @property
  def has_loss(self) -> bool:
    """Whether a token is in the loss, or was until it was too old."""
    return self.num_sampled + self.stale_tokens > 0

  @property
  def reward_magnitude(self) -> float:
    """Sum of the turns' absolute rewards: `reward` is exact relative to it."""
    turns = math.fsum(abs(float(step.reward)) for step in self.steps)
    return max(abs(float(self.reward)), turns)

  @property
  def is_trainable(self) -> bool:
    """The policy decided the outcome, and sampled at least one token.

    Also where all its tokens are stale, or of another distribution: its reward
    still counts in its group.
    """
    sampled = self.has_loss or self.untrained_tokens > 0
    return self.status.is_policy_outcome and sampled

  @property
  def versions(self) -> tuple[int, int] | None:
    """(oldest, newest) policy version of any sampled token, or None."""
    sampled = [s.versions[s.loss_mask] for s in self.sequences if s.num_sampled]
    if not sampled:
      return None
    joined = np.concatenate(sampled)
    return int(joined.min()), int(joined.max())

  def trimmed(self, oldest: int) -> Trajectory:
    """A copy without tokens of versions below `oldest` in the loss.

    They stay in the sequences as context, unmasked. Itself when there are
    none.
    """
    sequences = [s.trimmed(oldest) for s in self.sequences]
    dropped = self.num_sampled - sum(s.num_sampled for s in sequences)
    if not dropped:
      return self
    return dataclasses.replace(
      self, sequences=sequences, stale_tokens=self.stale_tokens + dropped
    )

  def to_json(self) -> dict[str, Any]:
    """JSON-able dict; messages shared by consecutive steps are written once."""
    steps = []
    previous: Sequence[Message] = []
    for step in self.steps:
      data = dataclasses.replace(step, chat_completions=[]).to_json()
      shared = 0
      for old, new in zip(previous, step.chat_completions):
        if old is not new and old != new:
          break
        shared += 1
      data["chat_completions"] = {
        "shared": shared,
        "new": encode(step.chat_completions[shared:]),
      }
      steps.append(data)
      previous = step.chat_completions
    return {
      "trajectory_id": self.trajectory_id,
      "task": encode(self.task),
      "steps": steps,
      "reward": self.reward,
      "status": self.status.value,
      "error": self.error,
      "sequences": [s.to_json() for s in self.sequences],
      "metrics": dict(self.metrics),
      **({"stale_tokens": self.stale_tokens} if self.stale_tokens else {}),
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Trajectory:
    steps = []
    previous: Sequence[Message] = []
    for raw in data["steps"]:
      raw = dict(raw)
      messages = raw.pop("chat_completions")
      step = Step.from_json(raw)
      shared = list(previous[: messages["shared"]])
      step.chat_completions = shared + decode(messages["new"])
      previous = step.chat_completions
      steps.append(step)
    return cls(
      task=decode(data["task"]),
      steps=steps,
      reward=float(data["reward"]),
      status=TrajectoryStatus(data["status"]),
      error=data["error"],
      sequences=[TokenSequence.from_json(s) for s in data["sequences"]],
      trajectory_id=data["trajectory_id"],
      metrics=dict(data["metrics"]),
      stale_tokens=int(data.get("stale_tokens", 0)),
    )


EXPERT = "expert"
"""The end of the name of an expert's episode."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrajectoryGroup:
  """Episodes of one task, compared with each other by GRPO.

  Rewards of members whose outcome the policy decided are within
  `reward_range.MAX_REWARD`; others cannot be built.

  Attributes:
    group_id: unique in a run.
    task_id: the task all members share.
    trajectories: all members, invalid ones included; statistics use
      `valid` only.
    start_version: policy version when the group was admitted.
    attempt: 0 for the first try of this task, +1 for each re-queue.
    peer_rewards: rewards of valid members that earlier parts of this group
      held: compared with, and trained on there.
    extra: an episode that was played beside the members and is none: the
      greedy one, for algorithms whose baseline it is, or an `expert`'s success
      where all members failed. None without one.
  """

  group_id: str
  task_id: str
  trajectories: tuple[Trajectory, ...]
  start_version: int = 0
  attempt: int = 0
  peer_rewards: tuple[float, ...] = ()
  extra: Trajectory | None = None

  def __post_init__(self):
    object.__setattr__(self, "trajectories", tuple(self.trajectories))
    object.__setattr__(
      self,
      "peer_rewards",
      tuple(float(reward_range.checked(r)) for r in self.peer_rewards),
    )
    if not self.trajectories:
      raise ValueError(f"group {self.group_id!r} has no trajectory")
    for trajectory in self.played:
      if trajectory.status is TrajectoryStatus.RUNNING:
        raise ValueError(
          f"group {self.group_id!r} holds an unfinished trajectory"
        )
      if trajectory.status.is_policy_outcome:
        try:
          reward_range.checked(trajectory.reward)
          for step in trajectory.steps:
            reward_range.checked(step.reward)
        except (TypeError, ValueError) as e:
          raise ValueError(
            f"group {self.group_id!r}, episode"
            f" {trajectory.trajectory_id!r}: {e}"
          ) from e

  def __repr__(self) -> str:
    return (
      f"TrajectoryGroup({_cut(self.group_id)}, {_cut(self.task_id)},"
      f" {len(self.valid)} of {len(self)} valid, mean reward"
      f" {sum(self.rewards) / max(1, len(self.rewards)):g})"
    )

  def __len__(self) -> int:
    return len(self.trajectories)

  def __iter__(self) -> Iterator[Trajectory]:
    return iter(self.trajectories)

  @property
  def played(self) -> tuple[Trajectory, ...]:
    """The members and `extra`."""
    extra = () if self.extra is None else (self.extra,)
    return (*self.trajectories, *extra)

  @property
  def expert(self) -> Trajectory | None:
    """The expert's success beside members that failed, if there is one."""
    if self.extra is None or not self.extra.trajectory_id.endswith(
      f".{EXPERT}"
    ):
      return None
    return self.extra

  @property
  def valid(self) -> tuple[Trajectory, ...]:
    """The members that count; none where no token of theirs has a loss."""
    members = tuple(t for t in self.trajectories if t.is_trainable)
    return members if any(t.has_loss for t in members) else ()

  @property
  def oldest_version(self) -> int:
    """Version of the oldest sampled token; `start_version` without one."""
    versions = [t.versions[0] for t in self.valid if t.versions]
    return min(versions, default=self.start_version)

  @property
  def newest_version(self) -> int:
    """Version of the newest sampled token; `start_version` without one."""
    versions = [t.versions[1] for t in self.valid if t.versions]
    return max(versions, default=self.start_version)

  @property
  def rewards(self) -> tuple[float, ...]:
    """Rewards that the members are compared with: theirs and the peers'."""
    return (*(float(t.reward) for t in self.valid), *self.peer_rewards)

  @property
  def varies(self) -> bool:
    """Whether `rewards` differ, by more than rounding."""
    magnitudes = [t.reward_magnitude for t in self.valid]
    magnitudes += map(abs, self.peer_rewards)
    return not reward_equality.all_equal(self.rewards, magnitudes)

  @property
  def untrained_note(self) -> str:
    """The end of a sentence about the group; "" where all was trained on."""
    tokens = sum(t.untrained_tokens for t in self.trajectories)
    if not tokens:
      return ""
    return (
      f"; {tokens} sampled tokens are not trained on; see"
      " rollout.other_sampling"
    )

  def trimmed(self, oldest: int) -> TrajectoryGroup:
    """A copy without tokens of versions below `oldest` in the loss."""
    members = tuple(t.trimmed(oldest) for t in self.trajectories)
    if all(a is b for a, b in zip(members, self.trajectories)):
      return self
    return dataclasses.replace(self, trajectories=members)

  def to_json(self) -> dict[str, Any]:
    """JSON values; `extra` only where there is one."""
    extra = {} if self.extra is None else {"extra": self.extra.to_json()}
    return {
      "group_id": self.group_id,
      "task_id": self.task_id,
      "start_version": self.start_version,
      "attempt": self.attempt,
      "trajectories": [t.to_json() for t in self.trajectories],
      **(
        {"peer_rewards": list(self.peer_rewards)} if self.peer_rewards else {}
      ),
      **extra,
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> TrajectoryGroup:
    return cls(
      group_id=data["group_id"],
      task_id=data["task_id"],
      trajectories=tuple(Trajectory.from_json(t) for t in data["trajectories"]),
      start_version=int(data["start_version"]),
      attempt=int(data["attempt"]),
      peer_rewards=tuple(data.get("peer_rewards", ())),
      extra=Trajectory.from_json(data["extra"]) if data.get("extra") else None,
    )


# --- JSON ------------------------------------------------------------------

_TAG = "$type"
_AS_IT_IS = frozenset({str, int, bool, type(None)})


def encode(value: object) -> Any:
  """Converts `value` to JSON values; TypeError names the part that cannot be.

  Typed values become `{"$type": name, ...}` and come back through `decode`; so
  does a mapping that happens to have a key "$type".
  Arrays are not silently stringified: hold an ImageRef instead of pixels.
  """
  if type(value) in _AS_IT_IS:
    return value
  if isinstance(value, (bool, int, str)):
    return value.value if isinstance(value, enum.Enum) else value
  if isinstance(value, float):
    if math.isfinite(value):
      return value
    return {_TAG: "float", "value": repr(value)}
  if isinstance(value, np.generic):
    return encode(value.item())
  if isinstance(value, Mapping):
    plain = {str(k): encode(v) for k, v in value.items()}
    if _TAG in plain:
      return {_TAG: "dict", "items": [[k, v] for k, v in plain.items()]}
    return plain
  if isinstance(value, (list, tuple)):
    return [encode(v) for v in value]
  if isinstance(value, np.ndarray):
    if value.size > 4096:
      raise TypeError(
        f"an array of shape {value.shape} does not belong in a trajectory;"
        " store pixels in an ImageStore and keep the ImageRef"
      )
    if value.dtype.kind not in "biufU":
      raise TypeError(
        f"an array of dtype {value.dtype} cannot be written as JSON; hold"
        " numbers, booleans or text"
      )
    return {
      _TAG: "ndarray",
      "dtype": str(value.dtype),
      "data": encode(value.tolist()),
    }
  if isinstance(value, Action):
    return {_TAG: "Action", "value": encode(value.action)}
  for name, cls in _JSON_TYPES.items():
    if isinstance(value, cls):
      return {_TAG: name, **value.to_json()}
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {
      f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)
    }
  if isinstance(value, Sequence) and not isinstance(
    value, (bytes, bytearray, memoryview)
  ):
    return [encode(v) for v in value]
  raise TypeError(
    f"a {type(value).__name__} cannot be written as JSON; hold plain values,"
    " ImageRef, ToolCall or ToolOutput in trajectories"
  )


def decode(value: object) -> Any:
  """Inverse of `encode` for the typed values.

  Raises:
    ValueError: a "$type" that `encode` does not write, or an array's data
      that are not of its dtype.
  """
  if isinstance(value, list):
    return [decode(v) for v in value]
  if not isinstance(value, dict):
    return value
  tag = value.get(_TAG)
  if tag is None:
    return {k: decode(v) for k, v in value.items()}
  fields = {k: v for k, v in value.items() if k != _TAG}
  if tag == "dict":
    return {k: decode(v) for k, v in fields["items"]}
  if tag == "float":
    return float(fields["value"])
  if tag == "ndarray":
    return _array(decode(fields["data"]), np.dtype(fields["dtype"]))
  if tag == "Action":
    return Action(decode(fields["value"]))
  if tag in _JSON_TYPES:
    return _JSON_TYPES[tag].from_json(fields)
  raise ValueError(f"unknown {_TAG} {tag!r} in JSON")


def _array(data: object, dtype: np.dtype) -> np.ndarray:
  if dtype.kind == "U":  # As wide as its texts: the width may be anybody's.
    return np.array(data, dtype="U")
  if dtype.kind not in "biuf":
    raise ValueError(f"an array of dtype {dtype} in JSON")
  try:
    return np.array(data, dtype=dtype)
  except OverflowError as error:
    raise ValueError(f"{error}, in an array of dtype {dtype}") from error


_JSON_TYPES: dict[str, Any] = {
  "ImageRef": ImageRef,
  "ImageSpan": ImageSpan,
  "TokenSequence": TokenSequence,
  "ToolCall": ToolCall,
  "ToolOutput": ToolOutput,
}
