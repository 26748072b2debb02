"""Writes trajectories.jsonl and images/: a bounded sample of the episodes.

Promises: at most `ReportConfig.episodes` are kept, spread evenly over the run,
however long it becomes: when there are too many, every second one is deleted,
with the screenshots that no episode refers to any more. The emitting thread
encodes and writes nothing; a bounded queue stands between, and episodes that do
not fit are dropped and counted. A failure to write is counted and never stops a
run. The end of the run is the one event that waits, under a deadline, until
everything is written.

A line is the trajectory's JSON (`Trajectory.from_json` reads it) with
`index`, `time`, `split`, `group_id`, `task_id`, `family` and `version` (weights
published when the episode ended) beside; an evaluation's also with `mode`, and
the `version` of its newest tokens.
"""

from __future__ import annotations

import collections
import json
import logging
import pathlib
import queue
import threading
import time
from typing import Any

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import episode_tally
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import reporting_settings

_LOG = logging.getLogger(__name__)
_STOP = object()


def image_refs(record: object) -> dict[str, trajectory_lib.ImageRef]:
  """Every screenshot in a trajectory's JSON, by hash."""
  refs: dict[str, trajectory_lib.ImageRef] = {}
  stack = [record]
  while stack:
    value = stack.pop()
    if isinstance(value, dict):
      sha = value.get("sha256")
      if isinstance(sha, str) and sha not in refs:
        refs[sha] = trajectory_lib.ImageRef.from_json(value)
      stack.extend(v for v in value.values() if isinstance(v, (dict, list)))
    elif isinstance(value, list):
      stack.extend(v for v in value if isinstance(v, (dict, list)))
  return refs


class _Thinner:
  """Chooses which of an unknown number of items to keep, so that few remain."""

  def __init__(self, limit: int):
    self.limit = limit
    self.seen = 0
    self.stride = 1
    self.kept = 0

  def offer(self) -> int | None:
    """The item's index when it is to be kept."""
    index = self.seen
    self.seen += 1
    return index if self.limit and index % self.stride == 0 else None


class TrajectoryWriter:
  """Observer of `EpisodeFinished`; see the module docstring."""

  receives = (
    events.EpisodeFinished,
    events.EvalStarted,
    events.WeightsPublished,
    events.RunFinished,
  )

  def __init__(
    self,
    directory: str | pathlib.Path,
    image_store: images_lib.ImageStore | None,
    config: reporting_settings.ReportConfig = reporting_settings.ReportConfig(),
    *,
    resume: bool = False,
    trains: bool = True,
  ):
    """Args:

    directory: the run directory.
    image_store: pixels of the screenshots; None keeps none. Its own
      directory, if it has one, must be another than `directory`/images:
      thinning deletes files there.
    config: `episodes`, `images` and `max_pending`.
    resume: append to an existing file.
    trains: False for a run of evaluations alone, whose episodes then have
      all the room.
    """
    self._directory = pathlib.Path(directory)
    self._path = self._directory / "trajectories.jsonl"
    self._images = self._directory / "images"
    self._store = image_store if config.images else None
    share = config.episodes // 4 if trains else config.episodes
    self._thin = {
      "train": _Thinner(config.episodes - share),
      "eval": _Thinner(share),
    }
    self._lock = threading.Lock()
    self._pending: queue.Queue[Any] = queue.Queue(config.max_pending)
    self.counters: collections.Counter[str] = collections.Counter()
    self._references: collections.Counter[str] = collections.Counter()
    self._version = 0
    self._mode = ""
    self._directory.mkdir(parents=True, exist_ok=True)
    if self._path.exists() and not resume:
      self._path.unlink()
    elif self._path.exists():
      self._recall()
    self._closed = False
    self._thread = threading.Thread(
      target=self._run, name="trajectory-writer", daemon=True
    )
    self._thread.start()

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.WeightsPublished):
      self._version = event.version
    elif isinstance(event, events.EvalStarted):
      self._mode = event.mode
    elif isinstance(event, events.RunFinished):
      self.close()
    elif isinstance(event, events.EpisodeFinished) and not self._closed:
      with self._lock:
        index = self._thin[_split(event.split)].offer()
      if index is None:
        return
      mode = self._mode if event.split == "eval" else ""
      version = self._version
      if mode:  # Perhaps of an engine of its own, beside collection.
        version = _version_of(event.trajectory, version)
      try:
        self._pending.put_nowait((index, event, version, mode))
      except queue.Full:
        self.counters["dropped"] += 1

  def flush(self, timeout_s: float = 30.0) -> bool:
    """Waits until accepted episodes are written; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    while self._pending.unfinished_tasks:
      if time.monotonic() > deadline or not self._thread.is_alive():
        return not self._pending.unfinished_tasks
      time.sleep(0.005)
    return True

  def close(self, timeout_s: float = 30.0) -> bool:
    """Writes pending episodes and ends the thread; False when it could not.

    Idempotent. Later episodes are not recorded.
    """
    if not self._closed:
      self._closed = True
      try:
        self._pending.put(_STOP, timeout=timeout_s)
      except queue.Full:
        return False
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  # --- the writing thread ----------------------------------------------------

  def _run(self) -> None:
    while True:
      item = self._pending.get()
      try:
        if item is _STOP:
          return
        self._write(*item)
      except Exception as error:  # pylint: disable=broad-except
        # Trajectories are for people; training continues without them.
        if not self.counters["failed"]:
          _LOG.warning("an episode was not recorded: %r", error)
        self.counters["failed"] += 1
      finally:
        self._pending.task_done()

  def _write(
    self, index: int, event: events.EpisodeFinished, version: int, mode: str
  ) -> None:
    split = _split(event.split)
    thin = self._thin[split]
    if index % thin.stride:  # Thinned while it waited.
      return
    episode = event.trajectory
    record = {
      "index": index,
      "time": event.time,
      "split": split,
      **({"mode": mode} if mode else {}),
      "group_id": event.group_id,
      "task_id": event.task_id,
      "family": episode_tally.family_of(episode),
      "version": version,
      **episode.to_json(),
    }
    line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    refs = image_refs(record) if self._store is not None else {}
    for ref in refs.values():
      self._save(ref)
    with self._path.open("a", encoding="utf-8") as file:
      file.write(line + "\n")
    self._references.update(list(refs))
    self.counters["written"] += 1
    thin.kept += 1
    if thin.kept > thin.limit:
      self._halve(split)

  def _save(self, ref: trajectory_lib.ImageRef) -> None:
    path = self._images / f"{ref.sha256}.png"
    if self._store is None or path.exists():
      return
    try:
      pixels = self._store.get(ref)
    except KeyError:  # Evicted from a store that keeps nothing on disk.
      self.counters["images_missing"] += 1
      return
    from PIL import Image  # pylint: disable=g-import-not-at-top

    self._images.mkdir(exist_ok=True)
    partial = path.with_suffix(".part")
    Image.fromarray(pixels).save(partial, format="PNG")
    partial.replace(path)

  def _halve(self, split: str) -> None:
    """Drops every second episode of a split, and its lonely screenshots."""
    thin = self._thin[split]
    with self._lock:
      thin.stride *= 2
    lost: list[str] = []
    remaining = 0

    def keep(line: dict[str, Any]) -> bool:
      nonlocal remaining
      if line["split"] != split:
        return True
      if line["index"] % thin.stride == 0:
        remaining += 1
        return True
      lost.extend(image_refs(line))
      return False

    files.rewrite_lines(self._path, keep)
    thin.kept = remaining
    for sha in lost:
      if self._references[sha] > 1:
        self._references[sha] -= 1
      elif self._references.pop(sha, 0):
        (self._images / f"{sha}.png").unlink(missing_ok=True)

  def _recall(self) -> None:
    """Continues the counts of an existing file."""
    last = {"train": -1, "eval": -1}
    step: dict[str, int] = {}

    def keep(line: dict[str, Any]) -> bool:
      try:
        split, index = _split(line["split"]), int(line["index"])
        references = image_refs(line)
      except (KeyError, TypeError, ValueError):
        return False  # Damaged.
      gap = index - last[split]
      if last[split] >= 0 and gap > 0:
        step[split] = min(step.get(split, gap), gap)
      last[split] = max(last[split], index)
      self._thin[split].kept += 1
      self._references.update(list(references))
      return True

    # A line torn by a crash would swallow the next one.
    files.rewrite_lines(self._path, keep)
    for split, thin in self._thin.items():
      thin.stride = step.get(split, 1)
      thin.seen = last[split] + 1


def _version_of(episode: trajectory_lib.Trajectory, otherwise: int) -> int:
  """Of the newest sampled token; `otherwise` where none is recorded."""
  newest = [
    int(sequence.versions.max())
    for sequence in episode.sequences
    if len(sequence.versions)
  ]
  return max(newest) if newest and max(newest) >= 0 else otherwise


def _split(name: str) -> str:
  return "eval" if name == "eval" else "train"
