"""Keeps the checkpoint of the update that an evaluation found best.

`best.json` of the run directory names it: `{"step", "metric", "value"}`. It is
written once the checkpoint is on the disk, and the checkpoint before it is let
go after that, so that the one it names is always there.

Promises: of equal values the earliest update stays. An evaluation without a
value (no valid episode) changes nothing.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core.statistics import evaluation_figures
from tunix.rl.multi_turn.reporting import files

NAME = "best.json"


@dataclasses.dataclass(frozen=True)
class Best:
  """The best update so far.

  Attributes:
    step: Number of the update.
    metric: Metric that chose it.
    value: Value of the metric.
  """

  step: int
  metric: str
  value: float


def load(directory: pathlib.Path) -> Best | None:
  """Returns the best update of a run; None where none was chosen.

  Raises:
    ConfigError: the file is damaged.
  """
  file = directory / NAME
  if not file.exists():
    return None
  data = files.read_json(file)
  try:
    return Best(int(data["step"]), str(data["metric"]), float(data["value"]))
  except (KeyError, TypeError, ValueError):
    raise config_lib.ConfigError(
      [f"{file} is damaged; restore it from a copy, or delete it"]
    ) from None


def save(directory: pathlib.Path, best: Best) -> None:
  """Writes the file so that it survives a power loss.

  Raises:
    OSError: the disk's.
  """
  files.write_json(directory / NAME, dataclasses.asdict(best))


def better(
  metric: str, step: int, results: Mapping[str, Any], before: Best | None
) -> Best | None:
  """Returns the update if it is better than the best so far, else None."""
  value = evaluation_figures.value_of(metric, results)
  if value is None:
    return None
  if (
    before is not None
    and before.metric == metric
    and ((-before.value, before.step) <= (-value, step))
  ):
    return None
  return Best(step, metric, value)
