"""Reads recorded episodes from files, group by group.

A path is a file, or a directory whose files are read in the order of their
names; of a run's directory its trajectories.jsonl. Each line of a .jsonl file,
or each item of a .json list (or of {"data": …}, as a buffer exports a read), is

* an episode of a run (`steps`, `sequences`), its screenshots in `images/`
  beside it;
* an item of a rollout buffer (`uid`, `instance_id`, `messages`, `reward`);
* a demonstration: `messages`, or `messages` before and `response_text`; with
  `reward` or `weight` (1 without), `instance_id` or `task_id` (a group of its
  own without).

Promises: every line is looked at once, when the files are opened, and one that
cannot be read raises with its file and number; episodes are read again when
their group is asked for, so that memory holds places only.

Does not: tokenize (see `reader`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pathlib
from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import records

_LOG = logging.getLogger(__name__)
RUN_FILE = "trajectories.jsonl"
_ENDINGS = (".jsonl", ".json")


@dataclasses.dataclass(frozen=True)
class Place:
  """Place of an episode in a file.

  Attributes:
    path: its file.
    offset: byte of its line, or number of its item in a .json file.
    number: its line or item, from 1.
  """

  path: pathlib.Path
  offset: int
  number: int

  @property
  def name(self) -> str:
    what = "line" if self.path.suffix == ".jsonl" else "item"
    return f"{self.path}, {what} {self.number}"


class RecordedGroups:
  """The groups of files, in the order of their first episodes.

  Attributes:
    episodes: Number of episodes in them.
    left_out: episodes that are no training data, by reason.
    digest: Digest of the groups' names and sizes, in their order.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    reader: reader_lib.EpisodeReader,
    images: images_lib.ImageStore,
    *,
    split: str = "train",
    oldest_version: int = 0,
  ):
    """Args:

      path: file or directory.
      reader: Makes episodes of the policy.
      images: receives screenshots.
      split: "train" leaves a run's evaluations out; "all" does not.
      oldest_version: see `OfflineConfig`.

    Raises:
      OSError: it cannot be read.
      ValueError: a line that is no episode, or no episode at all.
    """
    self._reader = reader
    self._images = images
    self._oldest = oldest_version
    self.episodes = 0
    self.left_out: dict[str, int] = {}
    self._json: dict[pathlib.Path, list[Any]] = {}
    groups: dict[str, list[Place]] = {}
    for place, data in self._all(pathlib.Path(path).expanduser()):
      try:
        name = _group_of(data, place, split)
      except ValueError as error:
        raise ValueError(f"{place.name}: {error}") from None
      if name.startswith("\0"):
        reason = name[1:]
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        continue
      self.episodes += 1
      groups.setdefault(name, []).append(place)
    self._groups = list(groups.values())
    self.digest = _digest(groups)
    if not self._groups:
      raise ValueError(
        f"{path} holds no episode to train on"
        + (f" ({_counted(self.left_out)} left out)" if self.left_out else "")
      )

  def __len__(self) -> int:
    return len(self._groups)

  def __getitem__(self, index: int) -> trajectory_lib.TrajectoryGroup:
    """A group; its members are valid or not, as they were recorded.

    Raises:
      ValueError: an episode that this policy cannot learn from, with its
        place.
    """
    places = self._groups[index]
    items: list[records.Record] = []
    episodes: list[trajectory_lib.Trajectory] = []
    for place in places:
      try:
        record, episode = self._read(place)
      except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{place.name}: {error}") from None
      items.append(record)
      episodes.append(episode)
    same = items[0].instance_id
    items = [dataclasses.replace(r, instance_id=same) for r in items]
    group = records.group_of(items, episodes)
    return group.trimmed(self._oldest) if self._oldest else group

  # --- files -----------------------------------------------------------------

  def _all(
    self, path: pathlib.Path
  ) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    if path.is_dir():
      files = [path / RUN_FILE]
      if not files[0].exists():
        files = sorted(f for f in path.iterdir() if f.suffix in _ENDINGS)
    else:
      files = [path]
    for file in files:
      yield from self._of_file(file)

  def _of_file(
    self, path: pathlib.Path
  ) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    if path.suffix == ".json":
      for number, item in enumerate(self._items(path)):
        yield Place(path, number, number + 1), item
      return
    offset = 0
    with path.open("rb") as file:
      for number, line in enumerate(json_text.lines(file), 1):
        place = Place(path, offset, number)
        offset += len(line)
        if line.strip():
          yield place, _object(line, place)

  def _items(self, path: pathlib.Path) -> list[Any]:
    if path not in self._json:
      try:
        data = json_text.read(path)
      except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
      while isinstance(data, dict) and "data" in data:
        data = data["data"]
      if not isinstance(data, list):
        raise ValueError(f"{path}: a list of items is needed")
      self._json[path] = data
    return self._json[path]

  def _data(self, place: Place) -> Mapping[str, Any]:
    if place.path.suffix == ".json":
      return self._items(place.path)[place.offset]
    with place.path.open("rb") as file:
      file.seek(place.offset)
      return _object(file.readline(), place)

  def _read(
    self, place: Place
  ) -> tuple[records.Record, trajectory_lib.Trajectory]:
    data = self._data(place)
    directory = place.path.parent
    if _is_own(data):
      self._put_images(data, directory / "images")
      episode = trajectory_lib.Trajectory.from_json(data)
      self._reader.own(episode)
      record = records.Record(
        uid=episode.trajectory_id,
        instance_id=_own_group(data),
        messages=(),
        reward=episode.reward,
        extra_info={"task_id": data.get("task_id", _own_group(data))},
        raw_reward=None,
        sequences=(),
        data={},
      )
      return record, episode
    record = records.read(_as_item(data, place))
    return record, self._reader.episode(record, directory=directory)

  def _put_images(self, data: Mapping[str, Any], folder: pathlib.Path) -> None:
    for ref in records.refs_of(data).values():
      if ref in self._images:
        continue
      path = folder / f"{ref.sha256}.png"
      if (
        self._images.put(images_lib.decode(path.read_bytes())).sha256
        != ref.sha256
      ):
        raise ValueError(f"{path} is another image than its name says")


def _object(line: bytes, place: Place) -> Mapping[str, Any]:
  try:
    data = json_text.parse(line)
  except ValueError as error:
    raise ValueError(f"{place.name}: no JSON: {error}") from None
  if not isinstance(data, dict):
    raise ValueError(f"{place.name}: an object is needed")
  return data


def _is_own(data: Mapping[str, Any]) -> bool:
  return "trajectory_id" in data and "steps" in data and "sequences" in data


def _own_group(data: Mapping[str, Any]) -> str:
  return str(data.get("group_id") or data["trajectory_id"])


def _group_of(data: object, place: Place, split: str) -> str:
  """The name of an episode's group; "\\0reason" leaves it out."""
  if not isinstance(data, Mapping):
    raise ValueError("an object is needed")
  if _is_own(data):
    if split == "train" and data.get("split") == "eval":
      return "\0of an evaluation"
    status = trajectory_lib.TrajectoryStatus(data["status"])
    if not status.is_policy_outcome:
      return "\0ended by the infrastructure"
    return _own_group(data)
  return records.read(_as_item(data, place)).instance_id


def _as_item(data: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
  """An item of the protocol, of an item or a demonstration."""
  if "uid" in data and "instance_id" in data and "reward" in data:
    return data
  if not isinstance(data.get("messages"), list):
    raise ValueError(
      "no episode: it has neither steps and sequences, nor uid, instance_id"
      " and reward, nor messages"
    )
  item = dict(data)
  text = item.pop("response_text", None)
  if text is not None:
    if not isinstance(text, str):
      raise ValueError(f"response_text must be text, got {text!r}")
    reply = {"role": "assistant", "content": text}
    item["messages"] = [*item["messages"], reply]
  if not any(
    isinstance(m, Mapping) and m.get("role") == "assistant"
    for m in item["messages"]
  ):
    raise ValueError("nothing to learn: no message is the assistant's")
  own = f"{place.path.stem}-{place.number}"
  task = item.get("instance_id", item.get("task_id", own))
  item.setdefault("instance_id", task)
  item.setdefault("uid", own)
  item.setdefault("reward", item.get("weight", 1.0))
  item.setdefault("extra_info", {})
  return item


def _counted(left_out: Mapping[str, int]) -> str:
  return ", ".join(f"{n} {why}" for why, n in left_out.items())


def describe(groups: RecordedGroups) -> str:
  """One line about the data, for people."""
  text = f"{len(groups)} groups of {groups.episodes} recorded episodes"
  if groups.left_out:
    text += f"; left out: {_counted(groups.left_out)}"
  return text


def _digest(groups: Mapping[str, list[Place]]) -> str:
  digest = hashlib.blake2b(digest_size=12)
  for name, places in groups.items():
    digest.update(f"{len(places)} {name}\n".encode("utf-8", "replace"))
  return digest.hexdigest()
