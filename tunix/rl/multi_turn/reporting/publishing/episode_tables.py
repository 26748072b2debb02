"""A run's kept episodes as a data set: Parquet, one episode a row.

`datasets.load_dataset(folder)` reads it, screenshots as images, and
`Trajectory.from_json(json.loads(row["trajectory"]))` gives the episode back,
with its tokens and log-probs. What the policy saw and wrote is unchanged;
errors name no path and no host of the machine, see `public`.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Iterator

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import run_data
from tunix.rl.multi_turn.reporting.publishing import hub
from tunix.rl.multi_turn.reporting.publishing import policy_folder
from tunix.rl.multi_turn.reporting.publishing import public

_GROUP_BYTES = 64 << 20  # Of a row group: what a reader holds at once.
_FILE_BYTES = 500 << 20
_SPLITS = ("train", "eval")
REPLACED = tuple(f"data/{split}-*.parquet" for split in _SPLITS)
"""Files that an earlier push may have left under other names."""
_COLUMNS = {
  "episode_id": "name in the run",
  "split": "train or eval",
  "mode": "of an evaluation: sampled or greedy",
  "family, task_id, instruction": "the task",
  "group_id": "attempts at one task in one update share it",
  "weights_version": "updates that the policy had when the episode ended",
  "reward, success, status, error": "the outcome",
  "turns": (
    "by turn: `image`, the place in `images` of the screen that the policy"
    " saw (-1: not kept), its `response`, the `actions` as JSON in pixels"
    " of that screen, `note` of faults, `reward`"
  ),
  "images": "the screenshots, each once",
  "trajectory": (
    "the whole episode as JSON with tokens and log-probs, for"
    " `Trajectory.from_json`"
  ),
}


def write(
  run: run_data.RunDirectory, folder: pathlib.Path, described: public.Described
) -> None:
  """See `publishing.save`."""
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise hub.PublishError(
      "publishing episodes needs the package datasets; pip install"
      " 'tunix-multi-turn[hub]'"
    ) from error
  text = datasets.Value("string")
  features = datasets.Features({
      **{
          name: text
          for name in (
              "episode_id", "split", "mode", "family", "task_id",
              "instruction", "group_id", "status", "error",
          )
      },
      "weights_version": datasets.Value("int64"),
      "reward": datasets.Value("float64"),
      "success": datasets.Value("bool"),
      "turns": datasets.List({
          "image": datasets.Value("int32"), "response": text, "actions": text,
          "note": text, "reward": datasets.Value("float64"),
      }),
      "images": datasets.List(datasets.Image()),
      "trajectory": text,
  })  # fmt: skip
  shards: dict[str, _Shards] = {}
  try:
    for row in _rows(run):
      split = row["split"]
      if split not in shards:
        shards[split] = _Shards(folder / "data", split, features.arrow_schema)
      shards[split].add(row)
    for shard in shards.values():
      shard.close()
  finally:
    for shard in shards.values():
      shard.end()
  if not shards:
    raise hub.PublishError(
      f"{run.directory} kept no episode; train with report.episodes above 0"
    )
  counts = {split: shard.rows for split, shard in shards.items()}
  card = _card(run, counts, described)
  (folder / "README.md").write_text(card, encoding="utf-8")


def _rows(run: run_data.RunDirectory) -> Iterator[dict[str, Any]]:
  for line in files.read_lines(run.directory / "trajectories.jsonl"):
    try:
      shown = run_data.shown_episode(line)
    except (KeyError, TypeError, ValueError):
      continue  # Written by another version, or torn.
    if shown.split not in _SPLITS:
      continue
    places: dict[str, int] = {}
    images: list[dict[str, Any]] = []
    for frame in shown.frames:
      if frame.image is not None and frame.image.sha256 not in places:
        path = run.image_path(frame.image)
        try:
          if path.is_symlink():
            continue  # May lead anywhere.
          body = path.read_bytes()
        except OSError:
          continue  # Not kept.
        places[frame.image.sha256] = len(images)
        images.append({"bytes": body, "path": f"{frame.image.sha256}.png"})
    steps = line["steps"]
    turns = [
      {
        "image": _place(frame.image, places),
        "response": frame.text,
        "actions": json.dumps(frame.actions, ensure_ascii=False),
        "note": frame.note,
        "reward": float(step.get("reward") or 0.0),
      }
      # After the turns comes the last screen.
      for frame, step in zip(shown.frames, steps, strict=False)
    ]
    record = {k: v for k, v in line.items() if k not in run_data.BESIDE}
    error = public.text(shown.error) if shown.error else shown.error
    if error:
      record["error"] = error
    yield {
      "episode_id": str(line.get("trajectory_id") or shown.index),
      "split": shown.split,
      "mode": str(line.get("mode") or ""),
      "family": shown.family,
      "task_id": shown.task_id,
      "instruction": shown.instruction,
      "group_id": str(line.get("group_id") or ""),
      "status": shown.status.value,
      "error": error,
      "weights_version": shown.version,
      "reward": shown.reward,
      "success": shown.success,
      "turns": turns,
      "images": images,
      "trajectory": json.dumps(record, ensure_ascii=False),
    }


def _place(
  image: trajectory_lib.ImageRef | None, places: dict[str, int]
) -> int:
  return -1 if image is None else places.get(image.sha256, -1)


class _Shards:
  """Files of a split, each of some hundred megabytes."""

  def __init__(self, folder: pathlib.Path, split: str, schema: object):
    self._folder, self._split, self._schema = folder, split, schema
    self._held: list[dict[str, Any]] = []
    self._held_bytes = self._file_bytes = 0
    self._files = 0
    self._writer: Any = None
    self.rows = 0

  def add(self, row: dict[str, Any]) -> None:
    self._held.append(row)
    self.rows += 1
    size = len(row["trajectory"]) + sum(len(i["bytes"]) for i in row["images"])
    self._held_bytes += size
    if self._held_bytes >= _GROUP_BYTES:
      self._flush()
    if self._file_bytes >= _FILE_BYTES:
      self._end_file()

  def _flush(self) -> None:
    import pyarrow  # pylint: disable=g-import-not-at-top
    from pyarrow import parquet  # pylint: disable=g-import-not-at-top

    if not self._held:
      return
    if self._writer is None:
      self._folder.mkdir(exist_ok=True)
      path = self._folder / f"{self._split}-{self._files:05d}.parquet"
      self._writer = parquet.ParquetWriter(path, self._schema)
    table = pyarrow.Table.from_pylist(self._held, schema=self._schema)
    self._writer.write_table(table)
    self._file_bytes += self._held_bytes
    self._held, self._held_bytes = [], 0

  def end(self) -> None:
    """Ends the file; what is held is dropped."""
    self._held, self._held_bytes = [], 0
    self._end_file()

  def _end_file(self) -> None:
    if self._writer is not None:
      self._writer.close()
      self._writer, self._file_bytes = None, 0
      self._files += 1

  def close(self) -> None:
    self._flush()
    self._end_file()


def _card(
  run: run_data.RunDirectory,
  counts: dict[str, int],
  described: public.Described,
) -> str:
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  data = huggingface_hub.DatasetCardData(
    license=described.license or None,
    task_categories=["reinforcement-learning", "image-text-to-text"],
    tags=["computer-use", "gui-agent", "trajectories", "tunix"],
    pretty_name=f"Episodes of {run.name}",
    configs=[
      {
        "config_name": "default",
        "data_files": [
          {"split": split, "path": f"data/{split}-*.parquet"}
          for split in counts
        ],
      }
    ],
  )
  gym = policy_folder.chosen(policy_folder.settings(run), "gym", "name")
  sizes = ", ".join(f"{count} of {split}" for split, count in counts.items())
  return "\n".join(
    [
      "---",
      data.to_yaml(),
      "---",
      "",
      f"# Episodes of {policy_folder.inline(run.name)}",
      "",
      f"Episodes that an agent played in the gym {gym} while"
      f" `tunix.rl.multi_turn` trained it: {sizes}, a sample spread over the"
      " run.",
      "",
      "    import datasets, json",
      "    from tunix.rl.multi_turn.core import trajectory",
      "",
      f'    rows = datasets.load_dataset("FOLDER", split="{list(counts)[0]}")',
      '    rows[0]["images"][0]',
      '    kept = json.loads(rows[0]["trajectory"])',
      "    trajectory.Trajectory.from_json(kept)",
      "",
      "| column | |",
      "|---|---|",
      *(f"| {name} | {text} |" for name, text in _COLUMNS.items()),
      "",
      *policy_folder.evaluation_table(run),
    ]
  )
