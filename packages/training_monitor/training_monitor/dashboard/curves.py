"""Keeps runs' metrics as columns over their steps.

A step's metrics are one JSON document; a chart wants one number of each of
thousands. So a run's columns are kept in memory, and brought up to date from
the database's list of changes.

Promises: an answer is the state of the database when the query began, also
after a resumed run has made steps again. Memory is bounded: the most recently
used runs are kept.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any, Iterable, Sequence

import numpy as np
import orjson
import sqlalchemy as sa

from training_monitor.core.statistics import success_rates
from training_monitor.schema import database
from training_monitor.schema import tables

_MOST_RUNS = 24
_MOST_CHANGED = 2000
_COLUMNS = {
  "loss": "loss",
  "kl": "kl_divergence",
  "grad_norm": "policy_gradient_norm",
  "reward_mean": "reward_mean",
  "reward_std": "reward_std",
  "learning_rate": "learning_rate",
  "tokens": "num_tokens",
  "episodes": "num_trajectories",
}
"""Metric -> the column of `step` that may hold it as well."""

DERIVED = {"engine_idle": ("engine_busy",)}
"""Complements of shares: name -> the metric that it is 1 minus of."""


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
  """Readings of a run's steps.

  Attributes:
    steps_N: int64[N], ascending.
    values: metric -> float64[N], NaN where a step has none.
  """

  steps_N: np.ndarray
  values: dict[str, np.ndarray]

  def window(self, first: int | None, last: int | None) -> tuple[int, int]:
    """Places of the steps from `first` to `last`."""
    low = 0 if first is None else int(np.searchsorted(self.steps_N, first))
    high = len(self.steps_N)
    if last is not None:
      high = int(np.searchsorted(self.steps_N, last, side="right"))
    return low, max(low, high)

  def recent(self, name: str) -> float | None:
    """Returns a metric's mean over the run's last `RECENT_STEPS` readings.

    The largest of them of a metric that is a maximum itself.
    """
    column = self.values.get(name)
    if column is None:
      return None
    return _summary(name, column[np.isfinite(column)])

  def ahead(self, other: Columns, name: str) -> tuple[int, float] | None:
    """Returns (step, difference to another run) at the last common readings.

    The difference of their `recent` readings, of the last steps that both have
    made.
    """
    if name not in self.values or name not in other.values:
      return None
    theirs_N = _at(other, name, self.steps_N)
    (both,) = np.nonzero(np.isfinite(self.values[name] - theirs_N))
    own_mean = _summary(name, self.values[name][both])
    other_mean = _summary(name, theirs_N[both])
    if own_mean is None or other_mean is None:
      return None
    return int(self.steps_N[both[-1]]), own_mean - other_mean


class _Run:
  """The mutable owner of one run's columns."""

  def __init__(self):
    self.lock = threading.Lock()
    self.seen = -1  # Last change that is in the columns; -1: none.
    self.columns = Columns(np.zeros(0, np.int64), {})


class Curves:
  """Columns of runs, kept and brought up to date."""

  def __init__(self, engine: sa.Engine):
    self._engine = engine
    self._runs: collections.OrderedDict[int, _Run] = collections.OrderedDict()
    self._lock = threading.Lock()

  def of(self, training: int) -> Columns:
    """Returns a run's present columns, which must not be changed. Blocks."""
    with self._lock:
      run = self._runs.get(training)
      if run is None:
        run = self._runs[training] = _Run()
      self._runs.move_to_end(training)
      while len(self._runs) > _MOST_RUNS:
        self._runs.popitem(last=False)
    with run.lock:
      with database.reading(self._engine) as connection:
        self._update(connection, training, run)
      return run.columns

  def _update(
    self, connection: sa.Connection, training: int, run: _Run
  ) -> None:
    change, step = tables.change, tables.step
    oldest, newest = connection.execute(
      sa.select(
        sa.select(sa.func.min(change.c.id)).scalar_subquery(),
        sa.select(sa.func.max(change.c.id)).scalar_subquery(),
      )
    ).one()
    oldest, newest = oldest or 0, newest or 0
    query = sa.select(
      step.c.step,
      step.c.metrics_json,
      *(step.c[c] for c in dict.fromkeys(_COLUMNS.values())),
    ).where(step.c.training_id == training)
    reread = run.seen < 0 or run.seen < oldest - 1 or run.seen > newest
    if not reread:
      if run.seen == newest:
        return
      ids = list(
        connection.scalars(
          sa.select(change.c.entity_id)
          .where(
            change.c.id > run.seen,
            change.c.training_id == training,
            change.c.kind == "step",
          )
          .limit(_MOST_CHANGED)
        )
      )
      reread = len(ids) == _MOST_CHANGED
      if not reread:
        if ids:
          query = query.where(step.c.id.in_(set(ids)))
          run.columns = _merged(run.columns, connection.execute(query))
        run.seen = newest
        return
    run.columns = _merged(
      Columns(np.zeros(0, np.int64), {}), connection.execute(query)
    )
    run.seen = newest


def _merged(old: Columns, rows: Iterable[Any]) -> Columns:
  """Returns `old` with the readings of some steps put in or replaced."""
  new_readings = {}
  for row in rows:
    try:
      metrics = orjson.loads(row.metrics_json) if row.metrics_json else {}
    except orjson.JSONDecodeError:
      metrics = {}  # Written by raw SQL.
    readings = {
      name: float(value)
      for name, value in (metrics.items() if isinstance(metrics, dict) else ())
      if isinstance(value, (int, float))
    }
    for name, field in _COLUMNS.items():
      value = getattr(row, field)
      if value is not None:
        readings.setdefault(name, float(value))
    new_readings[row.step] = readings
  new_steps = np.fromiter(new_readings, np.int64, len(new_readings))
  steps = np.union1d(old.steps_N, new_steps)
  old_places = np.searchsorted(steps, old.steps_N)
  changed = np.searchsorted(steps, new_steps)
  names = dict.fromkeys(old.values)
  for readings in new_readings.values():
    names.update(dict.fromkeys(readings))
  values = {}
  for name in names:
    column = np.full(len(steps), np.nan)
    if name in old.values:
      column[old_places] = old.values[name]
    values[name] = column
  for place, readings in zip(changed, new_readings.values()):
    for name in names:
      values[name][place] = readings.get(name, np.nan)
  return Columns(steps, values)


def _summary(name: str, readings: np.ndarray) -> float | None:
  """Returns `Columns.recent` of finite readings."""
  if not len(readings):
    return None
  last = readings[-success_rates.RECENT_STEPS :]
  return float(last.max() if name.endswith("_max") else last.mean())


def chart(
  columns: Columns,
  names: Sequence[str],
  first: int | None = None,
  last: int | None = None,
  points: int = 1200,
) -> dict[str, Any]:
  """Returns columns as JSON for charts.

  Args:
    columns: Columns of a run.
    names: Metrics; a name that ends in "/" stands for every metric with that
      prefix.
    first, last: steps, inclusive.
    points: most of a series; more become means of equal runs of steps.

  Returns:
    {step, series: {metric: values}, steps: number in the window, bucket:
    steps a point}; a point is named by the last step of its bucket.
  """
  low, high = columns.window(first, last)
  count = high - low
  bucket = max(1, -(-count // points))
  chosen: list[str] = []
  for name in names:
    if name.endswith("/"):
      chosen += sorted(n for n in columns.values if n.startswith(name))
    elif DERIVED.get(name, (name,))[0] in columns.values:
      chosen.append(name)
  series = {}
  for name in dict.fromkeys(chosen):
    column = _reading(columns, name)
    series[name] = _readable(_means(column[low:high], bucket))
  steps = columns.steps_N[low:high]
  ends = np.arange(bucket - 1, count + bucket - 1, bucket)
  return {
    "step": steps[np.minimum(ends, count - 1)].tolist(),
    "series": series,
    "steps": count,
    "bucket": bucket,
  }


def _reading(columns: Columns, name: str) -> np.ndarray:
  if name in DERIVED:
    return 1.0 - columns.values[DERIVED[name][0]]
  return columns.values[name]


def _at(columns: Columns, name: str, steps_N: np.ndarray) -> np.ndarray:
  """Returns a run's readings at another one's steps; NaN where it made none."""
  if not len(columns.steps_N):
    return np.full(len(steps_N), np.nan)
  places = np.searchsorted(columns.steps_N, steps_N)
  places = np.minimum(places, len(columns.steps_N) - 1)
  same = columns.steps_N[places] == steps_N
  return np.where(same, _reading(columns, name)[places], np.nan)


def sample(column: np.ndarray, points: int = 60) -> list[float | None]:
  """Returns a column as at most `points` means, None where there is none."""
  return _readable(_means(column, max(1, -(-len(column) // points))))


def _means(column: np.ndarray, bucket: int) -> np.ndarray:
  """Returns means of runs of `bucket` values that leave out NaN."""
  if bucket == 1 or not len(column):
    return column
  pad = -len(column) % bucket
  padded = np.concatenate([column, np.full(pad, np.nan)]).reshape(-1, bucket)
  finite = np.isfinite(padded)
  counts = finite.sum(1)
  sums = np.where(finite, padded, 0.0).sum(1)
  return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def _readable(column: np.ndarray) -> list[float | None]:
  """Returns float values at the precision of the float32 that they were."""
  return [
    float(f"{v:.7g}") if f else None
    for v, f in zip(column.tolist(), np.isfinite(column).tolist())
  ]
