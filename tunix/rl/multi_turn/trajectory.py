"""The ground floor: what an episode is, as data.

Promises: no illegal value can be built. A trainable token always has a
log-prob and a policy version, an untrainable one never has; an image
placeholder is never trainable and always belongs to an image; a trajectory
that failed says how. Everything here round-trips through JSON.

Does not: run anything, hold pixels (see `images.py`), or know a tokenizer.
Imports numpy only.

Axis names: T = tokens of one sequence.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, Iterator, Mapping, Sequence
import uuid

import numpy as np

Message = dict[str, Any]
"""An OpenAI-format message. `content` is a string or a list of parts,
`{"type": "text", "text": str}` or `{"type": "image", "image": ImageRef}`."""


class TrajectoryStatus(str, enum.Enum):
  """How an episode ended."""

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


_POLICY_OUTCOMES = frozenset({
    TrajectoryStatus.SUCCEEDED,
    TrajectoryStatus.FAILED,
    TrajectoryStatus.MAX_TURNS,
    TrajectoryStatus.CONTEXT_LIMIT,
    TrajectoryStatus.PARSE_ERROR,
})


@dataclasses.dataclass(frozen=True)
class ImageRef:
  """A screenshot by content: SHA-256 of the RGB bytes the policy saw.

  Attributes:
    sha256: 64 lower-case hex digits, see `images.hash_pixels`.
    width: pixels.
    height: pixels.
  """

  sha256: str
  width: int
  height: int

  def __post_init__(self):
    if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
      raise ValueError(
          f"ImageRef.sha256 must be 64 hex digits, got {self.sha256!r}"
      )
    if self.width <= 0 or self.height <= 0:
      raise ValueError(
          f"ImageRef size must be positive, got {self.width}x{self.height}"
      )

  def to_json(self) -> dict[str, Any]:
    return {"sha256": self.sha256, "width": self.width, "height": self.height}

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> ImageRef:
    return cls(data["sha256"], int(data["width"]), int(data["height"]))


@dataclasses.dataclass(frozen=True)
class ImageSpan:
  """An image and the run of placeholder tokens that stands for it.

  Attributes:
    image: which image.
    offset: index of the run's first placeholder token.
    num_tokens: length of the run.
  """

  image: ImageRef
  offset: int
  num_tokens: int

  def __post_init__(self):
    if self.offset < 0 or self.num_tokens <= 0:
      raise ValueError(
          f"ImageSpan needs offset >= 0 and num_tokens > 0, got {self.offset}"
          f" and {self.num_tokens}"
      )

  @property
  def end(self) -> int:
    return self.offset + self.num_tokens

  def shifted(self, by: int) -> ImageSpan:
    return dataclasses.replace(self, offset=self.offset + by)

  def to_json(self) -> dict[str, Any]:
    return {
        "image": self.image.to_json(),
        "offset": self.offset,
        "num_tokens": self.num_tokens,
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> ImageSpan:
    return cls(
        ImageRef.from_json(data["image"]),
        int(data["offset"]),
        int(data["num_tokens"]),
    )


def check_spans(tokens_T: np.ndarray, images: Sequence[ImageSpan]) -> None:
  """Raises ValueError unless spans are ordered, inside, and uniform.

  All placeholders of all spans carry one id, and that id stands nowhere else.
  """
  if not images:
    return
  placeholder = None
  cursor = 0
  covered = 0
  for span in images:
    if span.offset < cursor or span.end > len(tokens_T):
      raise ValueError(
          f"image span [{span.offset}, {span.end}) overlaps an earlier one or"
          f" leaves the {len(tokens_T)} tokens"
      )
    run = tokens_T[span.offset : span.end]
    if placeholder is None:
      placeholder = int(run[0])
    if not np.all(run == placeholder):
      raise ValueError(
          f"image span [{span.offset}, {span.end}) holds tokens other than the"
          f" placeholder id {placeholder}"
      )
    cursor = span.end
    covered += span.num_tokens
  if int(np.sum(tokens_T == placeholder)) != covered:
    raise ValueError(
        f"placeholder id {placeholder} stands outside every image span; a"
        " policy must be banned from sampling it"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSequence:
  """One token-exact training sequence.

  Attributes:
    tokens: int32[T], prompt and sampled ids in the order the policy saw them.
    loss_mask: bool[T], True exactly where the policy sampled the token.
    logprobs: float32[T], log-prob (nats) of each sampled token under the
      distribution it was drawn from, after temperature and truncation; 0 where
      the mask is False.
    versions: int32[T], version of the weights that sampled the token; -1 where
      the mask is False.
    turn_ids: int32[T], 0-based turn whose prompt extension or completion the
      token belongs to; never decreases.
    images: spans of image placeholders, in order.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  turn_ids: np.ndarray
  images: tuple[ImageSpan, ...] = ()

  def __post_init__(self):
    fields = {
        "tokens": np.int32,
        "loss_mask": np.bool_,
        "logprobs": np.float32,
        "versions": np.int32,
        "turn_ids": np.int32,
    }
    for name, dtype in fields.items():
      array = np.array(getattr(self, name), dtype=dtype)
      if array.ndim != 1:
        raise ValueError(f"TokenSequence.{name} must be 1-D")
      array.flags.writeable = False
      object.__setattr__(self, name, array)
    object.__setattr__(self, "images", tuple(self.images))
    length = len(self.tokens)
    for name in fields:
      if len(getattr(self, name)) != length:
        raise ValueError(
            f"TokenSequence.{name} has {len(getattr(self, name))} entries for"
            f" {length} tokens"
        )
    if length and int(self.tokens.min()) < 0:
      raise ValueError("TokenSequence.tokens holds a negative id")
    mask = self.loss_mask
    if not np.all(np.isfinite(self.logprobs)):
      raise ValueError("TokenSequence.logprobs must be finite")
    if np.any(self.logprobs > 1e-4):
      raise ValueError("TokenSequence.logprobs must be <= 0")
    if np.any(self.logprobs[~mask] != 0):
      raise ValueError("a token that was not sampled carries a log-prob")
    if np.any(self.versions[~mask] != -1):
      raise ValueError("a token that was not sampled carries a version")
    if np.any(self.versions[mask] < 0):
      raise ValueError("a sampled token carries no policy version")
    if length > 1 and np.any(np.diff(self.turn_ids) < 0):
      raise ValueError("TokenSequence.turn_ids must not decrease")
    check_spans(self.tokens, self.images)
    for span in self.images:
      if np.any(mask[span.offset : span.end]):
        raise ValueError("an image placeholder is marked as sampled")

  def __len__(self) -> int:
    return len(self.tokens)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, TokenSequence):
      return NotImplemented
    return self.images == other.images and all(
        np.array_equal(getattr(self, f), getattr(other, f))
        for f in ("tokens", "loss_mask", "logprobs", "versions", "turn_ids")
    )

  @property
  def num_sampled(self) -> int:
    return int(self.loss_mask.sum())

  def to_json(self) -> dict[str, Any]:
    return {
        "tokens": self.tokens.tolist(),
        "loss_mask": self.loss_mask.astype(int).tolist(),
        "logprobs": self.logprobs.tolist(),
        "versions": self.versions.tolist(),
        "turn_ids": self.turn_ids.tolist(),
        "images": [span.to_json() for span in self.images],
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> TokenSequence:
    return cls(
        tokens=data["tokens"],
        loss_mask=np.asarray(data["loss_mask"], bool),
        logprobs=data["logprobs"],
        versions=data["versions"],
        turn_ids=data["turn_ids"],
        images=tuple(ImageSpan.from_json(s) for s in data["images"]),
    )


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
  """What a tool returned.

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
  """What an agent hands to its environment.

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

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Step:
    return cls(**{k: decode(v) for k, v in data.items()})


@dataclasses.dataclass
class Trajectory:
  """One episode.

  Attributes:
    task: what was asked.
    steps: turns in order.
    reward: undiscounted sum of the steps' rewards, the final one included.
    status: how it ended.
    error: kind and text of the failure ("EnvStepTimeout: …"), or None.
    sequences: token-exact training sequences, at least one when the policy
      was called.
    metrics: numbers about the episode (seconds, counts).
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

  @property
  def num_turns(self) -> int:
    return len(self.steps)

  @property
  def num_sampled(self) -> int:
    return sum(s.num_sampled for s in self.sequences)

  @property
  def is_trainable(self) -> bool:
    """The policy decided the outcome and at least one token is trainable."""
    return self.status.is_policy_outcome and self.num_sampled > 0

  @property
  def versions(self) -> tuple[int, int] | None:
    """(oldest, newest) policy version of any sampled token, or None."""
    sampled = [
        s.versions[s.loss_mask] for s in self.sequences if s.num_sampled
    ]
    if not sampled:
      return None
    joined = np.concatenate(sampled)
    return int(joined.min()), int(joined.max())

  def to_json(self) -> dict[str, Any]:
    """JSON-able dict; messages shared by consecutive steps are written once."""
    steps = []
    previous: list[Message] = []
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
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Trajectory:
    steps = []
    previous: list[Message] = []
    for raw in data["steps"]:
      raw = dict(raw)
      messages = raw.pop("chat_completions")
      step = Step.from_json(raw)
      step.chat_completions = previous[: messages["shared"]] + decode(
          messages["new"]
      )
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
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TrajectoryGroup:
  """Episodes of one task, compared with each other by GRPO.

  Attributes:
    group_id: unique in a run.
    task_id: the task all members share.
    trajectories: all members, invalid ones included; statistics use
      `valid` only.
    start_version: policy version when the group was admitted.
    attempt: 0 for the first try of this task, +1 for each re-queue.
  """

  group_id: str
  task_id: str
  trajectories: tuple[Trajectory, ...]
  start_version: int = 0
  attempt: int = 0

  def __post_init__(self):
    object.__setattr__(self, "trajectories", tuple(self.trajectories))
    if not self.trajectories:
      raise ValueError(f"group {self.group_id!r} has no trajectory")
    for trajectory in self.trajectories:
      if trajectory.status is TrajectoryStatus.RUNNING:
        raise ValueError(
            f"group {self.group_id!r} holds an unfinished trajectory"
        )

  def __len__(self) -> int:
    return len(self.trajectories)

  def __iter__(self) -> Iterator[Trajectory]:
    return iter(self.trajectories)

  @property
  def valid(self) -> tuple[Trajectory, ...]:
    return tuple(t for t in self.trajectories if t.is_trainable)

  @property
  def oldest_version(self) -> int:
    """Version of the oldest sampled token; `start_version` without one."""
    versions = [t.versions[0] for t in self.valid]
    return min(versions, default=self.start_version)

  def to_json(self) -> dict[str, Any]:
    return {
        "group_id": self.group_id,
        "task_id": self.task_id,
        "start_version": self.start_version,
        "attempt": self.attempt,
        "trajectories": [t.to_json() for t in self.trajectories],
    }

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> TrajectoryGroup:
    return cls(
        group_id=data["group_id"],
        task_id=data["task_id"],
        trajectories=tuple(
            Trajectory.from_json(t) for t in data["trajectories"]
        ),
        start_version=int(data["start_version"]),
        attempt=int(data["attempt"]),
    )


# --- JSON ------------------------------------------------------------------

_TAG = "$type"


def encode(value: Any) -> Any:
  """Returns `value` as JSON values; raises TypeError naming what cannot be.

  Typed values become `{"$type": name, ...}` and come back through `decode`.
  Arrays are not silently stringified: hold an ImageRef instead of pixels.
  """
  if value is None or isinstance(value, (bool, int, str)):
    return value.value if isinstance(value, enum.Enum) else value
  if isinstance(value, float):
    if math.isfinite(value):
      return value
    return {_TAG: "float", "value": repr(value)}
  if isinstance(value, np.generic):
    return encode(value.item())
  if isinstance(value, Mapping):
    return {str(k): encode(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [encode(v) for v in value]
  if isinstance(value, np.ndarray):
    if value.size > 4096:
      raise TypeError(
          f"an array of shape {value.shape} does not belong in a trajectory;"
          " store pixels in an ImageStore and keep the ImageRef"
      )
    return {
        _TAG: "ndarray",
        "dtype": str(value.dtype),
        "data": value.tolist(),
    }
  if isinstance(value, Action):
    return {_TAG: "Action", "value": encode(value.action)}
  for name, cls in _JSON_TYPES.items():
    if isinstance(value, cls):
      return {_TAG: name, **value.to_json()}
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {
        f.name: encode(getattr(value, f.name))
        for f in dataclasses.fields(value)
    }
  if isinstance(value, Sequence) and not isinstance(
      value, (bytes, bytearray, memoryview)
  ):
    return [encode(v) for v in value]
  raise TypeError(
      f"a {type(value).__name__} cannot be written as JSON; hold plain values,"
      " ImageRef, ToolCall or ToolOutput in trajectories"
  )


def decode(value: Any) -> Any:
  """Inverse of `encode` for the typed values."""
  if isinstance(value, list):
    return [decode(v) for v in value]
  if not isinstance(value, dict):
    return value
  tag = value.get(_TAG)
  if tag is None:
    return {k: decode(v) for k, v in value.items()}
  rest = {k: v for k, v in value.items() if k != _TAG}
  if tag == "float":
    return float(rest["value"])
  if tag == "ndarray":
    return np.array(rest["data"], dtype=rest["dtype"])
  if tag == "Action":
    return Action(decode(rest["value"]))
  if tag in _JSON_TYPES:
    return _JSON_TYPES[tag].from_json(rest)
  raise ValueError(f"unknown {_TAG} {tag!r} in JSON")


_JSON_TYPES: dict[str, Any] = {
    "ImageRef": ImageRef,
    "ImageSpan": ImageSpan,
    "TokenSequence": TokenSequence,
    "ToolCall": ToolCall,
    "ToolOutput": ToolOutput,
}
