"""Episodes of a run directory, as a notebook looks at them.

    run.episodes[-1]
    run.episodes.where(split="eval", success=False)[0].trajectory.steps[0]

Promises: an episode decodes when it is looked at, not before: a file of
hundreds with their tokens opens at once. Lines that another version wrote or
a crash tore are left out and counted (`Episodes.unread`).
"""

from __future__ import annotations

import functools
import html
from typing import Any, Iterator, Mapping, overload, Sequence

from tunix.rl.multi_turn.api import drawings
from tunix.rl.multi_turn.api import html as html_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import run_data

_TABLE = 40  # Episodes that a table shows.
_COLUMNS = (
    "index", "split", "family", "task_id", "group_id", "version", "turns",
    "reward",
)  # fmt: skip


class Episode:
  """One kept episode: a line of trajectories.jsonl.

  Attributes:
    index: its number in its split, from 0, counting those not kept.
    split: train or eval.
    family, task_id, group_id: of its task.
    version: Version of the weights published when it ended.
    reward: undiscounted.
    status: how it ended.
  """

  def __init__(self, run: run_data.RunDirectory, line: Mapping[str, Any]):
    """Raises KeyError, TypeError or ValueError for a line of something else."""
    self._run = run
    drawings.remember(run.directory)
    self._line = line
    self.index = int(line["index"])
    self.split = str(line["split"])
    self.family = str(line["family"])
    self.task_id = str(line["task_id"])
    self.group_id = str(line["group_id"])
    self.version = int(line["version"])
    self.reward = float(line["reward"])
    self.status = trajectory_lib.TrajectoryStatus(line["status"])
    self.turns = len(line["steps"])
    self._place: Any = None

  def keep(self, place: object) -> None:
    """Keeps an object, its temporary directory, for as long as itself."""
    self._place = place

  @property
  def success(self) -> bool:
    return self.status is trajectory_lib.TrajectoryStatus.SUCCEEDED

  @functools.cached_property
  def trajectory(self) -> trajectory_lib.Trajectory:
    """With its messages, actions, tokens and log-probs."""
    return trajectory_lib.Trajectory.from_json(
      {k: v for k, v in self._line.items() if k not in run_data.BESIDE}
    )

  @functools.cached_property
  def shown(self) -> run_data.ShownEpisode:
    return run_data.shown_episode(dict(self._line))

  def screenshot(self, turn: int) -> Any:
    """The screen before turn `turn` (from 0; -1 is the last), a PIL image.

    Raises:
      IndexError: it has no such turn.
      FileNotFoundError: the screenshot was not kept.
    """
    frames = self.shown.frames
    if not -len(frames) <= turn < len(frames):
      raise IndexError(f"{self!r} has {len(frames)} screens, none at {turn}")
    image = frames[turn].image
    if image is None:
      raise FileNotFoundError(f"turn {turn} of {self!r} has no screenshot")
    from PIL import Image  # pylint: disable=g-import-not-at-top

    with Image.open(self._run.image_path(image)) as opened:
      return opened.convert("RGB")

  def film(self, width: int = 320) -> html_lib.Shown:
    """Its screens in a row, with what was done on each, `width` px wide."""
    frames = self.shown.frames
    parts = [report.film(self._run, self.shown, len(frames), width)]
    height = drawings.strip_height(frames)
    return html_lib.Shown(
      html_lib.framed(repr(self), parts, height), repr(self)
    )

  def _repr_html_(self) -> str:
    return self.film().html

  def __repr__(self) -> str:
    return (
      f"Episode({self.split} {self.index}, {self.family},"
      f" {self.status.value}, reward {self.reward:g}, {self.turns} turns,"
      f" version {self.version})"
    )


class Episodes(Sequence[Episode]):
  """The kept episodes of a run, in order of time.

  Attributes:
    unread: lines left out.
    played: Episodes that the run has played, kept or not; None of a selection,
      or where no summary counts them.
  """

  def __init__(
    self,
    episodes: Sequence[Episode],
    unread: int = 0,
    played: int | None = None,
  ):
    self._found = tuple(episodes)
    self.unread = unread
    self.played = played

  @classmethod
  def read(cls, run: run_data.RunDirectory) -> Episodes:
    """Reads the episodes of a run directory; none where nothing was kept."""
    dated: list[tuple[float, Episode]] = []
    unread = 0
    for line in files.read_lines(run.directory / "trajectories.jsonl"):
      try:
        dated.append((float(line["time"]), Episode(run, line)))
      except (KeyError, TypeError, ValueError):
        unread += 1
    dated.sort(key=lambda pair: pair[0])
    counts = (run.summary.get("episodes") or {}).values()
    played = sum(counts) if counts else None
    return cls([episode for _, episode in dated], unread, played)

  def to_pandas(self) -> Any:
    """A DataFrame with one row an episode.

    Columns: index, split, family, task_id, group_id, version, turns, reward,
    status, success.

    Raises:
      ImportError: pandas is not installed.
    """
    try:
      import pandas  # pylint: disable=g-import-not-at-top
    except ImportError as error:
      raise ImportError(
        "to_pandas needs the package pandas; pip install pandas"
      ) from error
    rows = [
      {name: getattr(e, name) for name in _COLUMNS}
      | {"status": e.status.value, "success": e.success}
      for e in self._found
    ]
    return pandas.DataFrame(rows, columns=[*_COLUMNS, "status", "success"])

  def where(
    self,
    *,
    split: str | None = None,
    family: str | None = None,
    task_id: str | None = None,
    group_id: str | None = None,
    success: bool | None = None,
  ) -> Episodes:
    """Returns the episodes that match every argument.

    Raises:
      ValueError: a split that does not exist.
    """
    if split not in (None, "train", "eval"):
      raise ValueError(f"split={split!r} must be 'train' or 'eval'")
    criteria = {
      "split": split,
      "family": family,
      "task_id": task_id,
      "group_id": group_id,
      "success": success,
    }
    criteria = {k: v for k, v in criteria.items() if v is not None}
    return Episodes(
      [
        e
        for e in self._found
        if all(getattr(e, k) == v for k, v in criteria.items())
      ]
    )

  @overload
  def __getitem__(self, index: int) -> Episode: ...

  @overload
  def __getitem__(self, index: slice) -> Episodes: ...

  def __getitem__(self, index: int | slice) -> Episode | Episodes:
    if isinstance(index, slice):
      return Episodes(self._found[index])
    try:
      return self._found[index]
    except IndexError:
      raise IndexError(
        f"there are {len(self)} kept episodes, none at {index}"
      ) from None

  def __len__(self) -> int:
    return len(self._found)

  def __iter__(self) -> Iterator[Episode]:
    return iter(self._found)

  def __repr__(self) -> str:
    solved = sum(e.success for e in self._found)
    of = ""
    if self.played is not None and self.played > len(self):
      of = f" kept of {self.played:,} played"
    return f"Episodes({len(self)}{of}, {solved} succeeded)"

  def _repr_html_(self) -> str:
    rows = "".join(
      f"<tr><td>{number}</td><td>{html.escape(e.split)}</td>"
      f"<td>{html.escape(e.family)}</td><td>{html.escape(e.task_id)}</td>"
      f"<td>{e.version}</td><td>{e.turns}</td><td>{e.reward:g}</td>"
      f"<td>{html.escape(e.status.value)}</td></tr>"
      for number, e in enumerate(self._found[:_TABLE])
    )
    more = len(self) - _TABLE
    note = f"<p>{more} more; slice or .where(…)</p>" if more > 0 else ""
    return (
      f"<p>{html.escape(repr(self))}</p><table><tr><th></th><th>split</th>"
      "<th>family</th><th>task</th><th>version</th><th>turns</th>"
      f"<th>reward</th><th>status</th></tr>{rows}</table>{note}"
    )
