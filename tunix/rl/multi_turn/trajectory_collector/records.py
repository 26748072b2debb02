"""Writes and reads trajectories as JSON items, one an episode.

    {"uid", "instance_id", "messages", "reward", "extra_info", "raw_reward"?,
     "sequences"?: [{"tokens", "loss_mask", "logprobs"?, "versions"?,
                     "turn_ids"?, "images"?, "entropies"?, "support"?}],
     "images"?: {sha256: base64 of a PNG}, "sampling_params"?,
     "trajectory"?, "group"?}

`instance_id` names the group, `uid` the member. An item of one sequence may
have the sequence's keys at its own top level. A number that was not recorded
is null or absent. `trajectory` and `group` are of this package's own items.
`sampling_params`, also in `extra_info`, are those of the requests: one object,
or a list of one a turn.

Promises: `read_group(write_group(group))` is that group; an item of elsewhere
is refused with the field and the value, or read without loss; a log-prob or a
version that was not recorded stays unrecorded (NaN, -1) in a `Recorded`. An
image is checked against its SHA-256.

Does not: tokenize messages (see `loss_mask`), fill in log-probs, or know HTTP.

Axis names: T = tokens of one sequence.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import math
import time
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences

REQUIRED = ("uid", "instance_id", "messages", "reward", "extra_info")
SAMPLING = "sampling_params"
LENGTH = "length"
"""`extra_info.finish_reason` of an episode that a limit ended."""
RAW_REWARD = "raw_reward"
"""Name in `Trajectory.metrics` of the reward before normalisation."""
LOGPROBS_MISSING, VERSIONS_MISSING = "logprobs_missing", "versions_missing"
"""Names in `Trajectory.metrics`: 1 where a sampled token has no recorded
log-prob, or no recorded version. See `Record.trajectory`."""

Status = trajectory_lib.TrajectoryStatus
_CUT = frozenset({Status.MAX_TURNS, Status.CONTEXT_LIMIT})


# --- Items ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """One item, checked.

  Attributes:
    uid: Id of the episode.
    instance_id: Its group's; a number in the item is text here.
    messages: OpenAI's, with `ImageRef`s for this package's images.
    reward: finite.
    extra_info: timestamp, round_number, finish_reason and the generator's own.
    raw_reward: before normalisation; None where it was not recorded.
    sequences: token-exact part; () in an item of text only.
    data: the item.
    sampling_params: One object for all turns, or one a turn; () where not
      recorded.
  """

  uid: str
  instance_id: str
  messages: tuple[Mapping[str, Any], ...]
  reward: float
  extra_info: Mapping[str, Any]
  raw_reward: float | None
  sequences: tuple[recorded_sequences.Recorded, ...]
  data: Mapping[str, Any]
  sampling_params: tuple[Mapping[str, Any], ...] = ()

  @property
  def truncated(self) -> bool:
    """Whether a limit of length ended the episode."""
    return self.extra_info.get("finish_reason") == LENGTH

  @property
  def timestamp(self) -> float:
    """Seconds since 1970 of its end, written as a number or as text.

    0 where it was not recorded, or is no number: its form is the generator's.
    """
    try:
      seconds = float(self.extra_info.get("timestamp", 0.0))
    except (TypeError, ValueError, OverflowError):
      return 0.0
    return seconds if math.isfinite(seconds) else 0.0

  @property
  def task_id(self) -> str:
    group = self.data.get("group")
    task_id = self.extra_info.get("task_id")
    if isinstance(group, Mapping):
      task_id = group["task_id"]
    return self.instance_id if task_id is None else str(task_id)

  def trajectory(
    self,
    sequences: Sequence[recorded_sequences.Recorded] | None = None,
    *,
    version: int | None = None,
    placeholder_logprobs: bool = False,
  ) -> trajectory_lib.Trajectory:
    """The episode.

    Its metrics carry `LOGPROBS_MISSING` and `VERSIONS_MISSING` where something
    stands in for values that were not recorded.

    Args:
      sequences: Replacement of the item's own, which one of text only lacks.
      version, placeholder_logprobs: see `recorded_sequences.Recorded`.

    Raises:
      ValueError: See `Recorded.token_sequence`; it names the item.
    """
    own = self.sequences if sequences is None else tuple(sequences)
    try:
      built = [
        s.token_sequence(
          version=version, placeholder_logprobs=placeholder_logprobs
        )
        for s in own
      ]
    except ValueError as error:
      raise ValueError(f"item uid={self.uid!r}: {error}") from None
    if "trajectory" in self.data:
      result = _own_trajectory(self)
    else:
      result = _foreign_trajectory(self)
    result.sequences = built
    if not all(s.has_logprobs for s in own):
      result.metrics[LOGPROBS_MISSING] = 1.0
    if not all(s.has_versions for s in own):
      result.metrics[VERSIONS_MISSING] = 1.0
    return result


def read(item: object, *, required: Sequence[str] = REQUIRED) -> Record:
  """A checked item.

  Args:
    item: JSON values.
    required: keys without which it is refused.

  Raises:
    ValueError: naming the field, the value and what it must be.
  """
  if not isinstance(item, Mapping):
    raise ValueError(f"an item must be an object, got {json_text.short(item)}")
  missing = [key for key in required if key not in item]
  if missing:
    raise ValueError(
      f"{missing[0]} is missing; an item needs {', '.join(required)}"
    )
  info = item.get("extra_info")
  if info is not None and not isinstance(info, Mapping):
    raise ValueError(
      f"extra_info={json_text.short(info)} must be an object; {{}} where there"
      " is nothing to say"
    )
  messages = item.get("messages")
  if not isinstance(messages, list):
    raise ValueError(
      f"messages={json_text.short(messages)} must be a list of objects with"
      " 'role' and 'content'"
    )
  for place, one in enumerate(messages):
    if not (isinstance(one, Mapping) and isinstance(one.get("role"), str)):
      raise ValueError(
        f"messages.{place}={json_text.short(one)} must be an object with a"
        " text 'role'"
      )
  try:
    decoded = tuple(trajectory_lib.decode(messages))
  except (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
  ) as error:
    raise ValueError(
      f"messages hold a damaged value ({type(error).__name__}: {error});"
      " $type is this package's own key"
    ) from None
  raw = item.get("raw_reward")
  return Record(
    uid=_text(item.get("uid"), "uid"),
    instance_id=_text(item.get("instance_id"), "instance_id"),
    messages=decoded,
    reward=number(item.get("reward"), "reward"),
    extra_info=dict(info or {}),
    raw_reward=None if raw is None else number(raw, "raw_reward"),
    sequences=recorded_sequences.of_item(item),
    data=item,
    sampling_params=_sampling_params(
      item.get(SAMPLING) or (info or {}).get(SAMPLING)
    ),
  )


def _sampling_params(value: object) -> tuple[Mapping[str, Any], ...]:
  listed = [value] if isinstance(value, Mapping) else value or []
  if not isinstance(listed, list) or not all(
    isinstance(one, Mapping) for one in listed
  ):
    raise ValueError(
      f"{SAMPLING} must be an object, or a list of one a turn, got"
      f" {json_text.short(value, 60)}"
    )
  return tuple(listed)


def _text(value: object, name: str) -> str:
  right = isinstance(value, (str, int)) and not isinstance(value, bool)
  if not right or value == "":
    raise ValueError(
      f"{name}={json_text.short(value)} must be a text, or a whole number"
    )
  return str(value)


def number(value: object, name: str) -> float:
  """A reward that an item may have.

  Raises:
    ValueError: it is no finite number, or too large a one.
  """
  if not isinstance(value, (int, float, np.number)):
    raise ValueError(f"{name}={json_text.short(value)} must be a finite number")
  try:
    return float(reward_range.checked(value))
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from None


# --- Trajectories to items --------------------------------------------------


def write_group(
  group: trajectory_lib.TrajectoryGroup,
  images: images_lib.ImageStore | None = None,
  *,
  instance_id: str = "",
  timestamp: float | None = None,
) -> list[dict[str, Any]]:
  """The items of a group's members, in order.

  Args:
    group: Group to write.
    images: pixels of its screenshots; None writes references only.
    instance_id: Instance of the items; the group's own id by default.
    timestamp: seconds since 1970; now by default.

  Raises:
    KeyError: the store no longer has a screenshot.
  """
  now = time.time() if timestamp is None else timestamp
  items = []
  for index, member in enumerate(group.trajectories):
    about = {
      "group_id": group.group_id,
      "task_id": group.task_id,
      "start_version": group.start_version,
      "attempt": group.attempt,
      "index": index,
      "size": len(group.trajectories),
    }
    if group.peer_rewards:
      about["peer_rewards"] = list(group.peer_rewards)
    if index == 0 and group.extra is not None:
      about["extra"] = group.extra.to_json()
    item = write(
      member,
      instance_id or group.group_id,
      task_id=group.task_id,
      timestamp=now,
    )
    item["group"] = about
    if images is not None:
      item["images"] = write_images(item, images)
    items.append(item)
  return items


def write(
  episode: trajectory_lib.Trajectory,
  instance_id: str,
  *,
  task_id: str = "",
  timestamp: float | None = None,
) -> dict[str, Any]:
  """The item of one episode, without pixels; see `write_images`."""
  messages = list(episode.steps[-1].chat_completions) if episode.steps else []
  fields = episode.to_json()
  for name in ("sequences", "reward"):
    del fields[name]
  for raw, step in zip(fields["steps"], episode.steps, strict=True):
    history = list(step.chat_completions)
    if history == messages[: len(history)]:
      raw["chat_completions"] = {"messages": len(history)}
  return {
    "uid": episode.trajectory_id,
    "instance_id": instance_id,
    "messages": trajectory_lib.encode(messages),
    "reward": float(episode.reward),
    "extra_info": {
      "timestamp": time.time() if timestamp is None else timestamp,
      "round_number": episode.num_turns,
      "finish_reason": LENGTH if episode.status in _CUT else "stop",
      "status": episode.status.value,
      **({"task_id": task_id} if task_id else {}),
    },
    "sequences": [recorded_sequences.write(s) for s in episode.sequences],
    "trajectory": fields,
  }


def write_images(
  item: Mapping[str, Any], images: images_lib.ImageStore
) -> dict[str, str]:
  """sha256 -> base64 PNG of every screenshot that an item names.

  Raises:
    KeyError: the store does not have one.
  """
  from PIL import Image  # pylint: disable=g-import-not-at-top

  out = {}
  for ref in refs_of(item).values():
    file = io.BytesIO()
    Image.fromarray(images.get(ref)).save(file, format="PNG", compress_level=1)
    out[ref.sha256] = base64.b64encode(file.getvalue()).decode()
  return out


def refs_of(data: object) -> dict[str, trajectory_lib.ImageRef]:
  """Every reference to a screenshot in JSON values, by hash."""
  refs: dict[str, trajectory_lib.ImageRef] = {}
  stack = [data]
  while stack:
    value = stack.pop()
    if isinstance(value, Mapping):
      if {"sha256", "width", "height"} <= set(value):
        ref = trajectory_lib.ImageRef.from_json(value)
        refs[ref.sha256] = ref
      stack.extend(v for v in value.values() if isinstance(v, (dict, list)))
    elif isinstance(value, list):
      # Not token by token.
      stack.extend(v for v in value if isinstance(v, (dict, list)))
  return refs


# --- Items to trajectories --------------------------------------------------


def read_images(item: Mapping[str, Any], images: images_lib.ImageStore) -> None:
  """Puts an item's screenshots into the store.

  Raises:
    ValueError: one is no PNG, or another than its SHA-256 names.
  """
  pictures = item.get("images")
  if pictures is None or isinstance(pictures, list):
    return
  if not isinstance(pictures, Mapping):
    raise ValueError(
      "images must be an object sha256 -> base64 PNG, got"
      f" {json_text.short(pictures, 60)}"
    )
  for sha256, text in pictures.items():
    try:
      content = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
      raise ValueError(f"images[{sha256[:12]}…] is not base64") from None
    try:
      digest = images.put(images_lib.decode(content)).sha256
    except ValueError as error:
      raise ValueError(f"images[{sha256[:12]}…]: {error}") from None
    if digest != sha256:
      raise ValueError(
        f"images[{sha256[:12]}…] is another image ({digest[:12]}…); its key"
        ' is the SHA-256 of "rgb8 WxH\\n" and its RGB bytes'
      )


def read_group(
  items: Iterable[Mapping[str, Any] | Record],
  images: images_lib.ImageStore | None = None,
) -> trajectory_lib.TrajectoryGroup:
  """The group of `write_group`.

  Raises:
    ValueError: a damaged or missing member, or a value that was not recorded.
  """
  records = [i if isinstance(i, Record) else read(i) for i in items]
  if images is not None:
    for record in records:
      read_images(record.data, images)
  return group_of(records, [r.trajectory() for r in records])


def group_of(
  records: Sequence[Record],
  episodes: Sequence[trajectory_lib.Trajectory],
  *,
  start_version: int = 0,
) -> trajectory_lib.TrajectoryGroup:
  """A group of the records of one instance and their trajectories.

  Items of this package come back in their own order and with their own ids;
  members of equal uid, as padding makes them, get ids of their own.

  Args:
    records: Items of one instance_id.
    episodes: Episodes of the records.
    start_version: Version of a group that does not record its own.

  Raises:
    ValueError: no record, or records of several instances.
  """
  names = {r.instance_id for r in records}
  if len(names) != 1:
    raise ValueError(f"a group needs records of one instance_id, got {names}")
  notes = [r.data.get("group") for r in records]
  pairs = list(zip(notes, episodes, strict=True))
  own = all(isinstance(t, Mapping) for t in notes)
  if own:
    pairs.sort(key=lambda pair: pair[0]["index"])  # type: ignore[index]
  numbers: dict[str, int] = {}
  members = []
  for _, episode in pairs:
    copies = numbers.get(episode.trajectory_id, 0)
    numbers[episode.trajectory_id] = copies + 1
    if copies:
      episode = dataclasses.replace(
        episode, trajectory_id=f"{episode.trajectory_id}#{copies + 1}"
      )
    members.append(episode)
  first: Mapping[str, Any] = pairs[0][0] if own and pairs[0][0] else {}
  extra = first.get("extra")
  return trajectory_lib.TrajectoryGroup(
    group_id=first.get("group_id", records[0].instance_id),
    task_id=records[0].task_id,
    trajectories=tuple(members),
    start_version=int(first.get("start_version", start_version)),
    attempt=int(first.get("attempt", 0)),
    peer_rewards=tuple(first.get("peer_rewards", ())),
    extra=None if extra is None else trajectory_lib.Trajectory.from_json(extra),
  )


def _own_trajectory(record: Record) -> trajectory_lib.Trajectory:
  try:
    data = dict(record.data["trajectory"])
    steps = []
    previous: Sequence[Any] = []
    for raw in data["steps"]:
      raw = dict(raw)
      messages = raw.pop("chat_completions")
      step = trajectory_lib.Step.from_json(raw)
      if "messages" in messages:
        step.chat_completions = [
          dict(m) for m in record.messages[: messages["messages"]]
        ]
      else:
        step.chat_completions = [
          *previous[: messages["shared"]],
          *trajectory_lib.decode(messages["new"]),
        ]
      previous = step.chat_completions
      steps.append(step)
    result = trajectory_lib.Trajectory.from_json(
      {**data, "steps": [], "sequences": [], "reward": record.reward}
    )
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"item uid={record.uid!r}: trajectory is damaged"
      f" ({type(error).__name__}: {error})"
    ) from None
  result.steps = steps
  if record.raw_reward is not None and record.raw_reward != record.reward:
    result.metrics[RAW_REWARD] = record.raw_reward
  return result


def _foreign_trajectory(record: Record) -> trajectory_lib.Trajectory:
  """Of an item of elsewhere: one step an assistant message.

  Its status is `extra_info.status` where that is one; else context_limit for
  finish_reason "length", succeeded for a (raw) reward above 0, failed
  otherwise.
  """
  raw = record.reward if record.raw_reward is None else record.raw_reward
  recorded = record.extra_info.get("status")
  if recorded in {s.value for s in Status if s is not Status.RUNNING}:
    status = Status(recorded)
  elif record.truncated:
    status = Status.CONTEXT_LIMIT
  else:
    status = Status.SUCCEEDED if raw > 0 else Status.FAILED
  replies = [
    i for i, m in enumerate(record.messages) if m["role"] == "assistant"
  ]
  steps = [
    trajectory_lib.Step(
      chat_completions=[dict(m) for m in record.messages[: i + 1]],
      model_response=text_of(record.messages[i]),
      reward=record.reward if i == replies[-1] else 0.0,
      done=i == replies[-1],
    )
    for i in replies
  ]
  metrics = {}
  if record.raw_reward is not None:
    metrics[RAW_REWARD] = record.raw_reward
  return trajectory_lib.Trajectory(
    task={"task_id": record.task_id, "instance_id": record.instance_id},
    steps=steps,
    reward=record.reward,
    status=status,
    trajectory_id=record.uid,
    metrics=metrics,
  )


def text_of(message: Mapping[str, Any]) -> str:
  """The text of a message's content; "" where it has none."""
  content = message.get("content")
  if isinstance(content, str):
    return content
  return "".join(
    str(part.get("text", ""))
    for part in content or ()
    if isinstance(part, Mapping) and part.get("type") == "text"
  )
