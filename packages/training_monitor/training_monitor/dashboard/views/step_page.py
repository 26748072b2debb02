"""Renders the rollouts of a step, evaluation or baseline, group by group."""

from __future__ import annotations

import math
import statistics
from typing import Annotated, Any, Callable, Literal, Sequence

import pydantic
import sqlalchemy as sa

from training_monitor.core import reward_equality
from training_monitor.dashboard import group_overlays
from training_monitor.dashboard import measurements
from training_monitor.dashboard import page_request
from training_monitor.dashboard import pictures
from training_monitor.dashboard import text
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import errors
from training_monitor.server import query as query_lib

_MOST_ROLLOUTS = 5000
_GROUPS = 16
_LISTED = 96
_TURNS = 30
_LOOK_BACK = 64
"""Steps before an update in which its episodes may have begun."""

Row = dict[str, Any]
SORTS: dict[str, Callable[[Row], float] | None] = {
  "group": None,
  "reward": lambda r: _or_low(r["reward"]),
  "advantage": lambda r: _or_low(r["advantage"]),
  "turns": lambda r: _or_low(r["num_turns"]),
  "seconds": lambda r: _or_low(r["rollout_time"]),
  "errors": lambda r: r["faults"],
}
OUTCOMES = ("success", "failure", "broken", "errors")
_FAULTS = tables.FAULTS
_COLUMNS = (
    "id", "rollout_id", "group", "env_index", "task_id", "status",
    "status_message", "error_message", "task_success", "reward", "num_turns",
    "current_turn", "max_turns", "rollout_time", "temperature", "batch",
    "num_total_actions", "summary_json", *_FAULTS,
)  # fmt: skip


class StepQuery(query_lib.PageQuery):
  """Rollouts of a step or a measurement.

  Attributes:
    by: rollouts that began in the step, or that its update learned from.
    low: smallest reward, `from` in the URL.
    high: largest reward, `to`.
    task: a task family.
    page: Number of the page, from 0.
    turn: Turn whose actions are drawn on the groups' screens, from 1; 0 is the
      one in which the attempts of a group first differ.
  """

  by: Literal["begun", "learned"] = "begun"
  outcome: Annotated[str, query_lib.one_of(OUTCOMES)] | None = None
  low: Annotated[query_lib.Real | None, pydantic.Field(alias="from")] = None
  high: Annotated[query_lib.Real | None, pydantic.Field(alias="to")] = None
  task: query_lib.Search = ""
  sort: Annotated[str, query_lib.one_of(SORTS)] = "group"
  order: query_lib.Order = "down"
  page: query_lib.Id = 0
  turn: query_lib.Id = 0

  _labels = pydantic.field_validator("outcome", mode="before")(
    query_lib.outcome_key
  )


def advantage_kind(run: Row) -> str | None:
  """Returns `algorithm.advantage` of the run's configuration, if it has one."""
  config = run.get("config_json")
  algorithm = config.get("algorithm") if isinstance(config, dict) else None
  kind = algorithm.get("advantage") if isinstance(algorithm, dict) else None
  return str(kind) if kind else None


def recorded_advantage(summary: object) -> float | None:
  """Returns an episode's advantage in its update, the mean of its turns.

  Args:
    summary: the rollout's `summary_json`.

  Returns:
    None before an update has learned from it, and where none does.
  """
  advantage = text.read_object(summary).get("advantage")
  if isinstance(advantage, bool) or not isinstance(advantage, (int, float)):
    return None
  return float(advantage) if math.isfinite(advantage) else None


def members_of(
  connection: sa.Connection,
  condition: sa.ColumnElement[bool],
  limit: int = _MOST_ROLLOUTS,
) -> list[Row]:
  """Rollouts with their tasks and advantages, by group and place in it."""
  r, t = tables.rollout, tables.task
  rows = connection.execute(
    sa.select(
      *(r.c[c] for c in _COLUMNS),
      t.c.task_id.label("task_name"),
      t.c.description,
      t.c.app_name,
    )
    .join(t, t.c.id == r.c.task_id)
    .where(condition)
    .order_by(r.c.group, r.c.env_index, r.c.id)
    .limit(limit)
  )
  members = [dict(row._mapping) for row in rows]  # pylint: disable=protected-access
  for row in members:
    row["faults"] = sum(row[name] or 0 for name in _FAULTS)
    row["advantage"] = recorded_advantage(row.pop("summary_json"))
  return members


class StepPages(page_request.RunTab):
  """See the module docstring."""

  def step(self, request: page_request.PageRequest) -> page_request.Page:
    training, number = request.id(), request.id("step")
    by = request.read(StepQuery).by
    run = self._head(request.project, training)
    s, r = tables.step, tables.rollout
    with database.reading(self._engine) as connection:
      id_ = connection.execute(
        sa.select(s.c.id).where(s.c.training_id == training, s.c.step == number)
      ).scalar()
      if id_ is None:
        raise errors.ApiError(404, f"this run has no step {number}")
      near = {}
      for name, condition, order in (
        ("previous", s.c.step < number, s.c.step.desc()),
        ("following", s.c.step > number, s.c.step),
      ):
        near[name] = connection.execute(
          sa.select(s.c.step)
          .where(s.c.training_id == training, condition)
          .order_by(order)
          .limit(1)
        ).scalar()
      if by == "begun":
        condition = sa.and_(r.c.source_type == "step", r.c.step_id == id_)
      else:
        around = sa.select(s.c.id).where(
          s.c.training_id == training,
          s.c.step > number - _LOOK_BACK,
          s.c.step <= number,
        )
        condition = sa.and_(
          r.c.source_type == "step",
          r.c.step_id.in_(around),
          r.c.batch == number,
        )
      members = members_of(connection, condition)
    step = self._queries.one(request.project, "step", id_)
    base = f"/runs/{training}/steps/"
    return self._page(request, run, members, {
        "tab": "steps", "kind": "step", "one": step, "by": by,
        "title": f"Step {number}",
        "previous": None if near["previous"] is None
        else f"{base}{near['previous']}",
        "following": None if near["following"] is None
        else f"{base}{near['following']}",
        "previous_name": f"step {near['previous']}",
        "following_name": f"step {near['following']}",
    })  # fmt: skip

  def measurement(self, request: page_request.PageRequest) -> page_request.Page:
    """Returns the rollouts of an evaluation or a baseline."""
    training = request.id()
    kind, id_ = request.where["kind"], request.id("measurement")
    if kind not in ("eval", "baseline"):
      raise errors.ApiError(404, f"{kind[:30]!r} is neither eval nor baseline")
    run = self._head(request.project, training)
    r = tables.rollout
    with database.reading(self._engine) as connection:
      previous, own, following = measurements.beside(
        connection, training, kind, id_
      )
      if own is None:
        raise errors.ApiError(404, f"this run has no {kind} {id_}")
      members = members_of(
        connection, sa.and_(r.c.source_type == kind, r.c[f"{kind}_id"] == id_)
      )
    one = self._queries.one(request.project, kind, id_)
    near = {}
    for name, other in (("previous", previous), ("following", following)):
      near[name] = other and (f"/runs/{training}/{other['kind']}/{other['id']}")
      near[f"{name}_name"] = other and f"{other['kind']} {other['name']}"
    return self._page(request, run, members, {
        "tab": "evals", "kind": kind, "one": one, "by": "begun",
        "title": f"{kind.capitalize()}, {own['name']}", **near,
    })  # fmt: skip

  def _page(
    self,
    request: page_request.PageRequest,
    run: Row,
    members: list[Row],
    values: Row,
  ) -> page_request.Page:
    asks = request.read(StepQuery)
    outcome, family, sort = asks.outcome or "", asks.task, asks.sort
    low, high, up = asks.low, asks.high, asks.order == "up"
    rewards = [m["reward"] for m in members if m["reward"] is not None]
    chosen = [
      m
      for m in members
      if _matches(m, outcome)
      and (not family or family == (m["app_name"] or m["task_name"]))
      and (low is None or (m["reward"] is not None and m["reward"] >= low))
      and (high is None or (m["reward"] is not None and m["reward"] <= high))
    ]
    page = asks.page
    groups: list[Row] = []
    listed: list[Row] = []
    if (key := SORTS[sort]) is None:
      every = grouped(members)
      keep = {m["id"] for m in chosen}
      every = [g for g in every if any(m["id"] in keep for m in g["members"])]
      groups = every[page * _GROUPS : (page + 1) * _GROUPS]
      more = len(every) > (page + 1) * _GROUPS
      for group in groups:
        for member in group["members"]:
          member["chosen"] = member["id"] in keep
      shown = [m for g in groups for m in g["members"]]
      pages = -(-len(every) // _GROUPS)
    else:
      chosen.sort(key=key, reverse=not up)
      listed = chosen[page * _LISTED : (page + 1) * _LISTED]
      more = len(chosen) > (page + 1) * _LISTED
      shown = listed
      pages = -(-len(chosen) // _LISTED)
    with database.reading(self._engine) as connection:
      last = measurements.last_screenshots(connection, [m["id"] for m in shown])
      several = [g for g in groups if len(g["members"]) > 1]
      group_overlays.add(connection, several, asks.turn)
    for member in shown:
      member["screenshot"] = last.get(member["id"])
    valid = [m for m in members if m["status"] == "completed"]
    all_groups = grouped(members)
    return page_request.Page("step.html", {
        "run": run, **values, "groups": groups, "listed": listed,
        "turn": asks.turn, "turns": min(_TURNS, max(
            (m["num_turns"] or 0 for g in groups for m in g["members"]),
            default=0,
        )),
        "sort": sort, "up": up, "outcome": outcome, "family": family,
        "low": low, "high": high, "page": page, "more": more, "pages": pages,
        "chosen": len(chosen), "count": len(members),
        "families": sorted(
            {m["app_name"] or m["task_name"] for m in members}
        ),
        "bins": histogram(rewards, low, high),
        "most": max(
            (abs(m["advantage"]) for m in members
             if m["advantage"] is not None), default=0.0,
        ),
        "advantage_kind": advantage_kind(run),
        "wins": _wins(values["kind"], valid),
        "reward": _mean([m["reward"] for m in valid]),
        "broken": sum(m["status"] == "failed" for m in members),
        "faulty": sum(bool(m["faults"]) for m in members),
        "open": sum(
            m["status"] not in ("completed", "failed", "cancelled")
            for m in members
        ),
        "with_gradient": sum(g["has_gradient"] for g in all_groups),
        "all_groups": len(all_groups), "outcomes": OUTCOMES,
        "sorts": tuple(SORTS), "truncated": len(members) >= _MOST_ROLLOUTS,
    })  # fmt: skip


def grouped(members: Sequence[Row]) -> list[Row]:
  """Returns groups of attempts at one task that are compared."""
  groups: dict[Any, Row] = {}
  for member in members:
    key = member["group"], member["task_id"]
    if key not in groups:
      groups[key] = {
        "group": member["group"],
        "task": member["description"],
        "task_id": member["task_id"],
        "members": [],
        "family": member["app_name"] or member["task_name"],
      }
    groups[key]["members"].append(member)
  for group in groups.values():
    valid = [
      m["reward"]
      for m in group["members"]
      if m["status"] == "completed" and m["reward"] is not None
    ]
    group["won"] = sum(bool(m["task_success"]) for m in group["members"])
    group["mean"] = statistics.fmean(valid) if valid else None
    group["has_gradient"] = not reward_equality.all_equal(valid)
  return list(groups.values())


def histogram(
  rewards: Sequence[float], low: float | None, high: float | None
) -> list[Row]:
  """Bins with the places of their bars, in a picture 100 wide and 40 high."""
  buckets = pictures.bins(rewards)
  most = max((b["count"] for b in buckets), default=0)
  for index, one in enumerate(buckets):
    width = 100 / len(buckets)
    one["x"], one["width"] = index * width, width
    one["height"] = 40 * one["count"] / most
    one["last"] = index == len(buckets) - 1
    # A bin ends before the next one begins; a filter includes its ends.
    one["to"] = one["high"] if one["last"] else _before(one["high"])
    one["chosen"] = (
      low is not None
      and high is not None
      and low <= one["low"]
      and one["to"] <= high
    )
  return buckets


def _wins(kind: str, valid: Sequence[Row]) -> list[tuple[str, Row | None]]:
  """Returns (mode, success) pairs; a step has one pair, without a mode."""
  modes = [("", valid)]
  if kind != "step":
    greedy = [m for m in valid if m["temperature"] == 0]
    sampled = [m for m in valid if m["temperature"] != 0]
    modes = [(n, m) for n, m in zip(measurements.MODES, (sampled, greedy)) if m]
  return [
    (
      mode,
      measurements.cell(
        sum(bool(m["task_success"]) for m in attempts), len(attempts)
      ),
    )
    for mode, attempts in modes or [("", valid)]
  ]


def _mean(values: Sequence[float | None]) -> float | None:
  numbers = [v for v in values if v is not None]
  return statistics.fmean(numbers) if numbers else None


def _before(value: float) -> float:
  return math.nextafter(value, -math.inf)


def _matches(member: Row, outcome: str) -> bool:
  if outcome == "success":
    return bool(member["task_success"])
  if outcome == "failure":
    return member["status"] == "completed" and member["task_success"] == 0
  if outcome == "broken":
    return member["status"] in ("failed", "cancelled")
  if outcome == "errors":
    return bool(member["faults"] or member["error_message"])
  return True


def _or_low(value: float | None) -> float:
  return float("-inf") if value is None else value
