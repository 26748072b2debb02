"""Renders runs: the list, one run, several compared."""

from __future__ import annotations

import math
import statistics
from typing import Annotated, Any, Literal, Mapping, Sequence

import numpy as np
import pydantic
import sqlalchemy as sa

from training_monitor.core.statistics import success_rates
from training_monitor.dashboard import advice
from training_monitor.dashboard import charts as charts_lib
from training_monitor.dashboard import curves as curves_lib
from training_monitor.dashboard import measurements
from training_monitor.dashboard import overview
from training_monitor.dashboard import page_request
from training_monitor.dashboard import task_comparison
from training_monitor.dashboard import text
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import errors
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib

SILENT_S = 60.0
"""A run is called silent after this; see `MonitorConfig.heartbeat_s`."""
MOST_COMPARED = 10
_PAGE = 50
_SPARK_POINTS = 40
_RECENT_STEPS = 30
_COMPARED = (
  "reward_mean",
  "success_rate",
  "entropy",
  "kl",
  "grad_norm",
  "rollout_tokens_per_second",
  "seconds_total",
)
STATES = ("running", "silent", "paused", "completed", "failed", "cancelled")

Row = dict[str, Any]


class RunsQuery(query_lib.PageQuery):
  """The list of runs.

  Attributes:
    q: words of names, models and messages.
    tag: tags that a run has all of.
    run: runs that are ticked for comparison.
    after: a page begins behind this run.
  """

  q: query_lib.Search = ""
  state: Annotated[str, query_lib.one_of(STATES)] | None = None
  tag: query_lib.Tags = ()
  run: tuple[str, ...] = ()
  after: query_lib.Id | None = None


class CurvesPageQuery(query_lib.PageQuery):
  """Options for drawing curves; the page's script reads `smooth`."""

  smooth: str = ""
  x: Literal["step", "time"] = "step"


class RunQuery(CurvesPageQuery):
  """One run.

  Attributes:
    more: metrics with a chart of their own.
    against: a run whose curves are drawn, too.
    flat: whether curves that never change have charts, too.
  """

  more: tuple[str, ...] = ()
  against: query_lib.Id | None = None
  flat: query_lib.Flag = False


class StepsQuery(query_lib.PageQuery):
  """Steps of a run, before number `after`."""

  after: query_lib.Id | None = None


class CompareQuery(CurvesPageQuery):
  """Several runs.

  Attributes:
    run: the runs, each once.
    base: the run that the others differ from.
    differences: whether equal settings are left out; 0 shows every one.
  """

  run: Annotated[
    tuple[query_lib.Id, ...], pydantic.Field(validate_default=True)
  ] = ()
  base: query_lib.Id | None = None
  differences: query_lib.Flag = True

  @pydantic.field_validator("run")
  @classmethod
  def _several(cls, runs: tuple[int, ...]) -> tuple[int, ...]:
    chosen = tuple(dict.fromkeys(runs))
    if not 2 <= len(chosen) <= MOST_COMPARED:
      raise ValueError(
        f"choose 2 to {MOST_COMPARED} runs to compare, not {len(chosen)}"
      )
    return chosen


def state(training: Mapping[str, Any]) -> str:
  """Returns a run's status, or "silent" after a long silence of its client."""
  status = training["status"]
  if status in vocabulary.FINISHED["training"] or status == "paused":
    return status
  quiet = text.between(training["last_heartbeat"], None)
  return "silent" if quiet is None or quiet > SILENT_S else "running"


class RunPages:
  """See the module docstring."""

  def __init__(
    self,
    engine: sa.Engine,
    queries: queries_lib.Queries,
    curves: curves_lib.Curves,
  ):
    self._engine = engine
    self._queries = queries
    self._curves = curves

  # --- the list ---------------------------------------------------------------

  def runs(self, request: page_request.PageRequest) -> page_request.Page:
    """Lists the pinned baseline, then the newest runs."""
    asks = request.read(RunsQuery)
    chosen_state, after = asks.state, asks.after
    t, owner = tables.training, tables.training_project
    query = (
      sa.select(*(c for c in t.c if c.name != "config_json"))
      .join(owner, owner.c.training_id == t.c.id)
      .where(
        owner.c.project_id == request.project, *queries_lib.tagged(asks.tag)
      )
      .order_by(t.c.id.desc())
    )
    for word in asks.q.split():
      like = f"%{page_request.escaped(word)}%"
      query = query.where(
        sa.or_(
          t.c.run_name.ilike(like, escape="\\"),
          t.c.model_name.ilike(like, escape="\\"),
          t.c.status_message.ilike(like, escape="\\"),
        )
      )
    if chosen_state in ("running", "silent"):
      query = query.where(
        t.c.status.in_(("pending", "initializing", "running"))
      )
    elif chosen_state:
      query = query.where(t.c.status == chosen_state)
    pinned = self._queries.pinned(request.project)
    first = None
    if pinned is not None:
      first = query.where(t.c.id == pinned["id"])
      query = query.where(t.c.id != pinned["id"])
    if after is not None:
      query = query.where(t.c.id < after)
    with database.reading(self._engine) as connection:
      rows = _rows(connection, query.limit(_PAGE + 1))
      more = rows[_PAGE - 1]["id"] if len(rows) > _PAGE else None
      rows = rows[:_PAGE]
      if first is not None and after is None:
        rows = _rows(connection, first) + rows
      queries_lib.add_tags_and_pin(connection, request.project, rows)
      for row in rows:
        row["state"] = state(row)
      if chosen_state in ("running", "silent"):
        rows = [r for r in rows if r["state"] == chosen_state]
      sparks = self._sparks(connection, rows)
      recent = self._recent_rewards(connection, rows)
      evals = self._last_evals(connection, [r["id"] for r in rows])
    for row in rows:
      row["spark"] = sparks.get(row["id"], [])
      row["reward"] = recent[row["id"]]
      row["eval"] = evals.get(row["id"])
      row["seconds"] = text.between(
        row["start_time"] or row["created_at"],
        row["end_time"] if row["end_time"] else row["last_heartbeat"],
      )
    return page_request.Page("runs.html", {
        "rows": rows, "q": asks.q, "state": chosen_state or "", "more": more,
        "states": STATES, "tags": asks.tag,
        "every_tag": self._queries.tags(request.project)["items"],
        "chosen": {i for i in asks.run if i.isdigit()},
    })  # fmt: skip

  def _sparks(
    self, connection: sa.Connection, rows: Sequence[Row]
  ) -> dict[int, list[float]]:
    """Returns mean rewards of a few steps of each run."""
    s = tables.step
    conditions = []
    for row in rows:
      last = row["current_step"] or 0
      if last <= 0:
        continue
      count = min(last, _SPARK_POINTS)
      steps = {
        round(1 + (last - 1) * i / max(1, count - 1)) for i in range(count)
      }
      conditions.append(
        sa.and_(s.c.training_id == row["id"], s.c.step.in_(steps))
      )
    rewards: dict[int, list[float]] = {}
    # One SELECT a run keeps each an index look-up.
    for condition in conditions:
      for training, reward in connection.execute(
        sa.select(s.c.training_id, s.c.reward_mean)
        .where(condition)
        .order_by(s.c.step)
      ):
        rewards.setdefault(training, []).append(reward)
    return rewards

  def _recent_rewards(
    self, connection: sa.Connection, rows: Sequence[Row]
  ) -> dict[int, float | None]:
    """Maps a run to the mean reward of its last steps, as its page shows it."""
    s = tables.step
    means = {}
    for row in rows:
      last = connection.scalars(
        sa.select(s.c.reward_mean)
        .where(s.c.training_id == row["id"], s.c.reward_mean.is_not(None))
        .order_by(s.c.step.desc())
        .limit(success_rates.RECENT_STEPS)
      ).all()
      means[row["id"]] = statistics.fmean(last) if last else None
    return means

  def _last_evals(
    self, connection: sa.Connection, trainings: Sequence[int]
  ) -> dict[int, Row]:
    e = tables.eval_
    last = (
      sa.select(sa.func.max(e.c.step))
      .where(
        e.c.training_id == tables.training.c.id, e.c.success_rate.is_not(None)
      )
      .correlate(tables.training)
      .scalar_subquery()
    )
    rows = connection.execute(
      sa.select(
        e.c.training_id, e.c.step, e.c.success_rate, e.c.successful_tasks
      )
      .join(tables.training, tables.training.c.id == e.c.training_id)
      .where(e.c.training_id.in_(trainings), e.c.step == last)
    )
    return {r.training_id: dict(r._mapping) for r in rows}  # pylint: disable=protected-access

  # --- one run ----------------------------------------------------------------

  def head(self, project: int, training: int) -> Row:
    """Returns the header of a run's pages.

    Raises:
      ApiError: 404.
    """
    run = self._queries.one(project, "training", training)
    run["state"] = state(run)
    run["baseline"] = self._queries.pinned(project)
    columns = self._curves.of(training)
    run["eta_s"] = eta(run, columns)
    run["seconds"] = text.between(
      run["start_time"] or run["created_at"],
      run["end_time"] or run["last_heartbeat"],
    )
    return run

  def run(self, request: page_request.PageRequest) -> page_request.Page:
    training = request.id()
    asks = request.read(RunQuery)
    run = self.head(request.project, training)
    columns = self._curves.of(training)
    evals = self.eval_points(training)
    shown = charts_lib.measured(lambda name: _has(columns, name))
    charted = {n for c in (*charts_lib.CHARTS, *shown) for n in c["names"]}
    flat_ones = [] if asks.flat else [c for c in shown if _flat(columns, c)]
    shown = [chart for chart in shown if chart not in flat_ones]
    uncharted = sorted(
      n
      for n in columns.values
      if n not in charted
      and not n.startswith(("success_rate/", "status/"))
      and n not in ("step", "version", "time")
    )
    more = [n for n in asks.more if n in uncharted]
    shown += [
      {"key": n, "title": n, "names": (n,), "section": "more"} for n in more
    ]
    shown = [
      {**chart, "about": advice.chart_about(chart["names"])} for chart in shown
    ]
    against = self._against(request.project, training, asks.against)
    other_columns = None if against is None else self._curves.of(against["id"])
    named = [{"id": training, "name": run["run_name"]}]
    if against is not None:
      named.append(
        {"id": against["id"], "name": against["run_name"], "baseline": True}
      )
    return page_request.Page("run.html", {
        "run": run, "tab": "overview",
        "tiles": _tiles(columns, evals, other_columns), "against": against,
        "advice": advice.lines(columns, evals),
        "named": named,
        "charts": shown, "others": uncharted, "more": more,
        "latest": overview.latest(self._engine, training),
        "groups": overview.newest_groups(self._engine, training),
        "columns": columns,
        "smooth": asks.smooth, "axis": asks.x,
        "flat": [
            {"title": c["title"], "unit": c.get("unit"),
             "value": columns.recent(c["names"][0])}
            for c in flat_ones
        ],
    })  # fmt: skip

  def _against(
    self, project: int, training: int, other: int | None
  ) -> Row | None:
    """Returns the run whose curves are drawn, too.

    Raises:
      ApiError: 404, there is none; 400, it is this run.
    """
    if other is None:
      return None
    if other == training:
      raise errors.ApiError(
        400, f"against={other}: give another run than this one"
      )
    return self._queries.one(project, "training", other)

  def steps(self, request: page_request.PageRequest) -> page_request.Page:
    """Renders the steps, the last one first."""
    training = request.id()
    run = self.head(request.project, training)
    before = request.read(StepsQuery).after
    s = tables.step
    query = sa.select(s).where(s.c.training_id == training)
    if before is not None:
      query = query.where(s.c.step < before)
    with database.reading(self._engine) as connection:
      rows = [
        dict(r._mapping)  # pylint: disable=protected-access
        for r in connection.execute(
          query.order_by(s.c.step.desc()).limit(_PAGE + 1)
        )
      ]
    more = rows[_PAGE - 1]["step"] if len(rows) > _PAGE else None
    for row in rows:
      row["metrics"] = text.read_object(row["metrics_json"])
      row["progress"] = text.read_object(row["rollout_progress"])
    return page_request.Page(
      "steps.html",
      {"run": run, "tab": "steps", "rows": rows[:_PAGE], "more": more},
    )

  def eval_points(self, training: int) -> list[Row]:
    """Returns the success of each evaluation of a run, for the chart."""
    points = []
    with database.reading(self._engine) as connection:
      for one in measurements.checkpoints(connection, training):
        if one["done"]:
          low, high = success_rates.wilson_interval(one["wins"], one["done"])
          points.append({
              "step": one["step"], "name": one["name"], "kind": one["kind"],
              "id": one["id"], "rate": one["wins"] / one["done"], "low": low,
              "high": high, "n": one["done"], "mode": one["mode"],
          })  # fmt: skip
    return points

  # --- several ----------------------------------------------------------------

  def compare(
    self, request: page_request.PageRequest
  ) -> page_request.Page | page_request.Redirect:
    """Curves and configurations; `base` is the run that others differ from."""
    asks = request.read(CompareQuery)
    ids = asks.run
    runs = [self.head(request.project, i) for i in ids]
    pinned = self._queries.pinned(request.project)
    base = asks.base
    if base is None and pinned is not None and pinned["id"] in ids:
      # Into the URL, which shows the same when another run is pinned.
      link = page_request.Link(request.path, request.query)
      return page_request.Redirect(link(base=pinned["id"]))
    base = ids[0] if base is None else base
    if base not in ids:
      raise errors.ApiError(400, f"base={base} is none of the runs compared")
    only = asks.differences
    configs = {r["id"]: flat(r["config_json"] or {}) for r in runs}
    names = sorted({name for config in configs.values() for name in config})
    rows = []
    for name in names:
      values = [configs[i].get(name) for i in ids]
      reference = configs[base].get(name)
      differs = [v != reference for v in values]
      if any(differs) or not only:
        rows.append({"name": name, "values": values, "differs": differs})
    columns = {i: self._curves.of(i) for i in ids}
    measured = lambda name: any(_has(c, name) for c in columns.values())
    shown = [
      {
        **chart,
        "names": chart["names"][:1],
        "title": chart["title"]
        if len(chart["names"]) == 1
        else f"{chart['title']}: {chart['names'][0]}",
      }
      for chart in charts_lib.measured(measured)
      if not chart["names"][0].endswith("/") and measured(chart["names"][0])
    ]
    results = []
    for name in _COMPARED:
      values = [columns[i].recent(name) for i in ids]
      if any(v is not None for v in values):
        results.append(
          {
            "name": name,
            "values": values,
            "ahead": [columns[i].ahead(columns[base], name) for i in ids],
          }
        )
    points = {i: self.eval_points(i) for i in ids}
    for run in runs:
      run["eval"] = points[run["id"]][-1] if points[run["id"]] else None
    by_id = {run["id"]: run for run in runs}
    by_task = []
    with database.reading(self._engine) as connection:
      for i in ids:
        if i != base and (
          comparison := task_comparison.between_runs(connection, base, i)
        ):
          by_task.append(
            {"first": by_id[base], "second": by_id[i], "found": comparison}
          )
    return page_request.Page("compare.html", {
        "by_task": by_task,
        "runs": runs, "named": [
            {"id": r["id"], "name": r["run_name"]} for r in runs
        ], "base": base, "rows": rows, "pinned": pinned,
        "may_add": pinned is not None and pinned["id"] not in ids
        and len(ids) < MOST_COMPARED,
        "base_place": ids.index(base), "only": only,
        "all": len(names), "charts": shown, "results": results,
        "smooth": asks.smooth, "axis": asks.x,
    })  # fmt: skip


def eta(
  training: Mapping[str, Any], columns: curves_lib.Columns
) -> float | None:
  """Returns the seconds that a run still needs; None if unknown."""
  total, times = training["total_steps"], columns.values.get("time")
  if not total or times is None or training["state"] != "running":
    return None
  recent = times[-_RECENT_STEPS:]
  recent = recent[recent == recent]
  if len(recent) < 2:
    return None
  current = training["current_step"] or int(columns.steps_N[-1])
  pace = (float(recent[-1]) - float(recent[0])) / (len(recent) - 1)
  seconds = max(0.0, (total - current) * pace)
  return seconds if math.isfinite(seconds) else None


def flat(config: object, prefix: str = "") -> dict[str, Any]:
  """Returns nested objects as dotted names; lists are values."""
  if not isinstance(config, Mapping):
    return {prefix or "config": config}
  settings: dict[str, Any] = {}
  for key, value in config.items():
    name = f"{prefix}.{key}" if prefix else str(key)
    if isinstance(value, Mapping) and value:
      settings |= flat(value, name)
    else:
      settings[name] = value
  return settings


def _has(columns: curves_lib.Columns, name: str) -> bool:
  name = curves_lib.DERIVED.get(name, (name,))[0]
  if name.endswith("/"):
    return any(n.startswith(name) for n in columns.values)
  return name in columns.values


def _flat(columns: curves_lib.Columns, chart: Mapping[str, Any]) -> bool:
  """Returns whether all of a chart's curves have been one value for many steps.

  A change of a billionth is rounding.
  """
  if chart.get("evals"):
    return False
  for name in chart["names"]:
    for key in [
      k
      for k in columns.values
      if k == name or name.endswith("/") and k.startswith(name)
    ]:
      readings = columns.values[key]
      readings = readings[np.isfinite(readings)]
      if len(readings) < success_rates.RECENT_STEPS or np.ptp(readings) > max(
        1e-9, 1e-9 * float(np.abs(readings).max())
      ):
        return False
  return any(name in columns.values for name in chart["names"])


def _tiles(
  columns: curves_lib.Columns,
  evals: Sequence[Row],
  other: curves_lib.Columns | None = None,
) -> list[Row]:
  """Returns the headline figures of a run.

  Args:
    columns: Columns of the run.
    evals: Evaluations of the run.
    other: Columns of another run; `ahead` of a tile is (step, difference).
  """
  tiles = []
  for name, title, kind in (
    ("reward_mean", "reward", "number"),
    ("success_rate", "success", "percent"),
    ("entropy", "entropy", "number"),
    ("rollout_tokens_per_second", "tokens/s", "number"),
    ("rollout_calls_per_second", "model calls/s", "number"),
    ("staleness_max", "staleness, max", "number"),
    ("seconds_total", "step time", "seconds"),
  ):
    value = columns.recent(name)
    if value is None:
      continue
    tiles.append(
      {
        "title": title,
        "kind": kind,
        "value": value,
        "spark": curves_lib.sample(columns.values[name]),
        "ahead": other and columns.ahead(other, name),
      }
    )
  if evals:
    last = evals[-1]
    tiles.insert(2, {
        "title": f"evaluation, {last['name']}", "kind": "percent",
        "value": last["rate"], "low": last["low"], "high": last["high"],
        "n": last["n"], "mode": last["mode"],
    })  # fmt: skip
  return tiles


def _rows(connection: sa.Connection, query: sa.Select) -> list[Row]:
  return [
    dict(r._mapping)  # pylint: disable=protected-access
    for r in connection.execute(query)
  ]
