"""Lists rollouts of a run, or of all runs, filtered and sorted.

Promises: every filter and order is in the URL; a page reads one
index of `tables.LISTED`, and little of it for the newest, the best and the
faulty ones; the following page costs the same (keyset pagination).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Sequence

import pydantic
import sqlalchemy as sa

from training_monitor.dashboard import annotations as annotations_lib
from training_monitor.dashboard import few_turns
from training_monitor.dashboard import page_request
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib

_PAGE = 50
_NEAR = 5000
"""Newest, or oldest, rollouts that are searched for a page first."""
_ALL = 1 << 62
"""More than there are, and an id that is beyond all."""
_NOTHING = 1e308
"""Stands for NULL, which comes last either way."""

Row = dict[str, Any]
_one_of = query_lib.one_of
_R = tables.rollout
# Not the bare columns: their own indices would be taken, and then the rollouts'
# rows read one by one.
_STATUS = sa.func.coalesce(_R.c.status, "")
_TASK = _R.c.task_id + 0
SORTS: dict[str, sa.ColumnElement[float] | None] = {
  "newest": None,
  "reward": _R.c.reward,
  "turns": sa.cast(_R.c.num_turns, sa.Double()),
  "seconds": _R.c.rollout_time,
  "errors": sa.cast(tables.NUM_FAULTS, sa.Double()),
}
"""The orders' columns, as doubles: the next page's URL holds one."""
OUTCOMES = {
  "success": _R.c.task_success == 1,
  "failure": sa.and_(_STATUS == "completed", _R.c.task_success == 0),
}
ERRORS = {
  "any": sa.or_(tables.FAULTY, _STATUS == "failed"),
  "broken": _STATUS == "failed",
  "parse": _R.c.parse_errors > 0,
  "tool name": _R.c.tool_name_errors > 0,
  "tool arguments": _R.c.tool_arg_errors > 0,
  "runtime": _R.c.runtime_errors > 0,
}

_DECIDED = _STATUS == "completed"
_LOST = sa.and_(_DECIDED, _R.c.task_success == 0)
ENDS = {
  "succeeded": sa.and_(_DECIDED, _R.c.task_success == 1),
  "cancelled": _STATUS == "cancelled",
  # Both conditions on the word, so that the partial index serves.
  **{
    word: sa.and_(
      tables.ENDED,
      _R.c.status_message == word,
      _STATUS == "failed"
      if word in ("timeout", "env_error", "model_error")
      else _LOST,
    )
    for word in tables.UNSOLVED
  },
}
"""How an episode ended, in the collector's words."""
_SHORT = "success in few turns"
ODD = {
  "success without reward": sa.and_(
    _DECIDED, _R.c.task_success == 1, _R.c.reward <= 0
  ),
  "reward without success": sa.and_(
    _DECIDED, _R.c.task_success == 0, _R.c.reward > 0
  ),
  "claims success": sa.and_(
    _DECIDED, _R.c.task_success == 0, _R.c.agent_reported_success == 1
  ),
  "repeats itself": _R.c.consecutive_repeated_actions >= 3,
  _SHORT: few_turns.WON,
}
"""Where a reward may be hacked, or a policy is stuck."""


def _place(text: str) -> tuple[float, int]:
  value, _, id_ = text.partition(",")
  try:
    place = float(value), int(id_)
  except ValueError:
    place = math.nan, 0
  if not math.isfinite(place[0]) or not 0 <= place[1] < _ALL:
    raise ValueError("follow the link to the next page")
  return place


class RolloutListQuery(query_lib.PageQuery):
  """Filters and order of a list of rollouts.

  Attributes:
    error: a kind of fault, of `ERRORS`.
    end: how the episode ended, of `ENDS`.
    odd: Sign of reward hacking, one of `ODD`.
    group: number of the group.
    source: kind of the step, evaluation or baseline.
    low: smallest reward, `from` in the URL.
    high: largest reward, `to`.
    step: number of the step or evaluation.
    q: words of the task.
    label: Label of the rollout or one of its turns.
    after: (value of the order, id) of the last rollout of the page before.
  """

  status: Annotated[str, _one_of(vocabulary.STATUSES["rollout"])] | None = None
  outcome: Annotated[str, _one_of(OUTCOMES)] | None = None
  error: Annotated[str, _one_of(ERRORS)] | None = None
  end: Annotated[str, _one_of(ENDS)] | None = None
  odd: Annotated[str, _one_of(ODD)] | None = None
  group: query_lib.Id | None = None
  source: Annotated[str, _one_of(vocabulary.SOURCE_TYPES)] | None = None
  low: Annotated[query_lib.Real | None, pydantic.Field(alias="from")] = None
  high: Annotated[query_lib.Real | None, pydantic.Field(alias="to")] = None
  step: query_lib.Id | None = None
  task: query_lib.Id | None = None
  q: query_lib.Search = ""
  label: query_lib.Label | None = None
  sort: Annotated[str, _one_of(SORTS)] = "newest"
  order: query_lib.Order = "down"
  after: Annotated[tuple[float, int] | None, *query_lib.textual(_place)] = None

  _labels = pydantic.field_validator("outcome", mode="before")(
    query_lib.outcome_key
  )


@dataclasses.dataclass(frozen=True)
class Selection:
  """The rollouts of a list, and their order.

  Attributes:
    conditions: on rollouts.
    step: Number of a step or an evaluation; None for any.
    sources: Kinds of source.
    sort: Order, one of `SORTS`.
    up: the least first.
    after: (value of the order, id) of the last one seen; None from the start.
  """

  conditions: tuple[sa.ColumnElement[bool], ...]
  step: int | None
  sources: tuple[str, ...]
  sort: str
  up: bool
  after: tuple[float, int] | None

  @property
  def key(self) -> sa.ColumnElement[Any]:
    """The order's column, before ids."""
    column = SORTS[self.sort]
    if column is None:
      # Not the bare id: its own order would be taken for a short cut, past
      # all rollouts of other runs.
      return _R.c.id + 0
    if self.sort == "errors":  # A sum is never NULL.
      return column
    return sa.func.coalesce(column, _real(_NOTHING if self.up else -_NOTHING))

  def narrowed(self, condition: sa.ColumnElement[bool]) -> Selection:
    """Returns the selection narrowed by further conditions."""
    return dataclasses.replace(self, conditions=(*self.conditions, condition))

  def beyond(self) -> list[sa.ColumnElement[bool]]:
    """Returns conditions on rollouts behind `after`."""
    if self.after is None:
      return []
    value, id_ = _real(self.after[0]), self.after[1]
    past = self.key > value if self.up else self.key < value
    return [sa.or_(past, sa.and_(self.key == value, _R.c.id + 0 < id_))]

  def order(self) -> list[sa.ColumnElement[Any]]:
    key = self.key.asc() if self.up else self.key.desc()
    return [key, (_R.c.id + 0).desc()]


class RolloutLists(page_request.RunTab):
  """See the module docstring."""

  def of_run(self, request: page_request.PageRequest) -> page_request.Page:
    """Rollouts of one run."""
    run = self._head(request.project, request.id())
    values = self._values(request, run["id"])
    return page_request.Page(
      "run_rollouts.html", {"run": run, "tab": "rollouts", **values}
    )

  def of_all(self, request: page_request.PageRequest) -> page_request.Page:
    """Rollouts of the project's runs."""
    return page_request.Page("rollouts.html", self._values(request, None))

  def _values(
    self, request: page_request.PageRequest, training: int | None
  ) -> Row:
    asks = request.read(RolloutListQuery)
    chosen = selection(asks)
    with database.reading(self._engine) as connection:
      if asks.label is not None:
        chosen = chosen.narrowed(_labelled(connection, asks.label))
      if asks.odd == _SHORT:
        chosen = _few_turns(connection, request.project, training, chosen)
      places = pick(connection, request.project, training, chosen)
      rows = _described(connection, [id_ for _, id_ in places[:_PAGE]])
      labels = annotations_lib.every_label(
        connection, request.project, training
      )
      task = None
      if asks.task is not None:
        task = connection.execute(
          sa.select(tables.task.c.description).where(
            tables.task.c.id == asks.task
          )
        ).scalar()
    more = None
    if len(places) > _PAGE:
      value, id_ = places[_PAGE - 1]
      more = f"{value!r},{id_}"
    return {
        "rows": rows, "more": more, "sort": chosen.sort, "up": chosen.up,
        "q": asks.q, "task": task, "sorts": tuple(SORTS),
        "outcomes": tuple(OUTCOMES), "faults": tuple(ERRORS),
        "ends": tuple(ENDS), "odds": tuple(ODD),
        "statuses": vocabulary.STATUSES["rollout"],
        "sources": vocabulary.SOURCE_TYPES, "labels": labels,
        "label": asks.label or "",
        "asks": {
            name: request.query.get(name, "")
            for name in (
                "status", "outcome", "error", "source", "from", "to", "step",
                "end", "odd", "group",
            )
        },
        "narrowed": bool(chosen.conditions) or chosen.step is not None
        or len(chosen.sources) < len(vocabulary.SOURCE_TYPES),
    }  # fmt: skip


def selection(asks: RolloutListQuery) -> Selection:
  """Returns the rollouts that a query selects."""
  conditions: list[sa.ColumnElement[bool]] = []
  if asks.status is not None:
    conditions.append(_STATUS == asks.status)
  if asks.outcome is not None:
    conditions.append(OUTCOMES[asks.outcome])
  if asks.error is not None:
    conditions.append(ERRORS[asks.error])
  if asks.end is not None:
    conditions.append(ENDS[asks.end])
  if asks.odd is not None:
    conditions.append(ODD[asks.odd])
  if asks.group is not None:
    conditions.append(_R.c.group == asks.group)
  if asks.low is not None:
    conditions.append(_R.c.reward >= asks.low)
  if asks.high is not None:
    conditions.append(_R.c.reward <= asks.high)
  if asks.task is not None:
    conditions.append(_TASK == asks.task)
  if asks.q:
    conditions.append(_TASK.in_(_tasks(asks.q)))
  sources: tuple[str, ...] = vocabulary.SOURCE_TYPES
  if asks.source:
    sources = (asks.source,)
  if asks.step is not None:  # A baseline is before all of them.
    sources = tuple(s for s in sources if s != "baseline")
  return Selection(
    tuple(conditions),
    asks.step,
    sources,
    asks.sort,
    asks.order == "up",
    asks.after,
  )


def pick(
  connection: sa.Connection,
  project: int,
  training: int | None,
  chosen: Selection,
  count: int = _PAGE + 1,
) -> list[tuple[float, int]]:
  """Returns (value of the order, id) of the first selected rollouts.

  Args:
    connection: Connection to the database.
    project: Project that the rollouts belong to.
    training: only its rollouts; None for those of all the project's runs.
    chosen: Filters and order.
    count: at most.
  """
  if chosen.sort != "errors" or chosen.up:
    return _pick(connection, project, training, chosen, count)
  places, last = [], chosen.after
  if last is None or last[0] > 0:
    places = _pick(
      connection, project, training, chosen.narrowed(tables.FAULTY), count
    )
  if len(places) == count:
    return places
  # Those without a fault (or with fewer than none) are nearly all, and have no
  # order but the newest first, for which few need to be read.
  id_ = _ALL if last is None or last[0] > 0 else last[1]
  clean = dataclasses.replace(
    chosen.narrowed(sa.not_(tables.FAULTY)),
    sort="newest",
    after=(float(id_), id_),
  )
  without_faults = _pick(
    connection, project, training, clean, count - len(places)
  )
  return places + [(0.0, id_) for _, id_ in without_faults]


def _pick(
  connection: sa.Connection,
  project: int,
  training: int | None,
  chosen: Selection,
  count: int,
) -> list[tuple[float, int]]:
  """Returns the places of `pick` in one order."""
  owner = tables.training_project
  runs = sa.select(owner.c.training_id).where(owner.c.project_id == project)
  if training is None and chosen.sort == "newest" and chosen.step is None:
    places = _nearest(connection, runs, chosen, count)
    if len(places) == count:
      return places
  places = []
  for source in chosen.sources:
    s = tables.metadata.tables[source]
    own = sa.select(s.c.id).where(_owned(s, project, training))
    if chosen.step is not None:
      own = own.where(s.c.step == chosen.step)
    source_id = _R.c[f"{source}_id"]
    ids = _walked(own, s, chosen)
    listed = (
      sa.select(chosen.key, _R.c.id)
      .select_from(ids.join(_R, source_id == ids.c.id))
      # The index of the source covers only rollouts that have its id.
      .where(source_id.is_not(None), *chosen.conditions, *chosen.beyond())
    )
    if chosen.sort == "reward":
      listed = listed.where(*_within(connection, listed, chosen.up, count))
    places += [
      (float(value), id_)
      for value, id_ in connection.execute(
        listed.order_by(*chosen.order()).limit(count)
      )
    ]
  # Each is in order and as long as the page: so are the first of all.
  sign = 1 if chosen.up else -1
  places.sort(key=lambda one: (sign * one[0], -one[1]))
  return places[:count]


def _walked(own: sa.Select, source: sa.Table, chosen: Selection) -> sa.Subquery:
  """Selects ids of the sources in the best order to read their rollouts.

  Of equal keys the newest is wanted: if it comes last, each one before it takes
  a place of the page in vain. By their index later steps come later.
  """
  by: list[sa.ColumnElement[Any]] = [
    source.c[n] for n in ("training_id", "step") if n in source.c
  ]
  if chosen.sort != "newest" or not chosen.up:
    by = [column.desc() for column in by]
  # Without a limit SQLite would not keep the order.
  return own.order_by(*by).limit(_ALL).subquery()


def _within(
  connection: sa.Connection, listed: sa.Select, up: bool, count: int
) -> list[sa.ColumnElement[bool]]:
  """Returns conditions that keep the first `count` by reward, and few more.

  By this key alone a source's rollouts lie in the index in order, so that few
  of each are read, as are few within these bounds afterwards.
  """
  reward = _R.c.reward
  last = connection.execute(
    listed.with_only_columns(reward)
    .where(reward.is_not(None))
    .order_by(reward.asc() if up else reward.desc())
    .limit(1)
    .offset(count - 1)
  ).scalar()
  if last is None or not abs(last) < _NOTHING:  # Those without come before it.
    return []
  return [reward <= last if up else reward >= last]


def _nearest(
  connection: sa.Connection, runs: sa.Select, chosen: Selection, count: int
) -> list[tuple[float, int]]:
  """Returns the places among the newest, or oldest, rollouts by id."""
  if chosen.up:
    end = chosen.after[1] if chosen.after is not None else 0
    near = sa.and_(_R.c.id > end, _R.c.id <= end + _NEAR)
  else:
    end = connection.execute(sa.select(sa.func.max(_R.c.id))).scalar() or 0
    if chosen.after is not None:
      end = min(end, chosen.after[1] - 1)
    near = sa.and_(_R.c.id <= end, _R.c.id > end - _NEAR)
  own = []
  for source in chosen.sources:
    s = tables.metadata.tables[source]
    own.append(
      # By its own index it would be all of them.
      (_R.c[f"{source}_id"] + 0).in_(
        sa.select(s.c.id).where(s.c.training_id.in_(runs))
      )
    )
  ids = connection.scalars(
    sa.select(_R.c.id)
    .where(near, sa.or_(*own), *chosen.conditions)
    .order_by(_R.c.id.asc() if chosen.up else _R.c.id.desc())
    .limit(count)
  )
  return [(id_, id_) for id_ in ids]


def _described(connection: sa.Connection, ids: Sequence[int]) -> list[Row]:
  """Rollouts in this order, with their tasks, sources and runs."""
  r, t, run = _R, tables.task, tables.training
  s, e, b = tables.step, tables.eval_, tables.baseline
  owner = sa.func.coalesce(s.c.training_id, e.c.training_id, b.c.training_id)
  rows = connection.execute(
      sa.select(
          r.c.id, r.c.source_type, r.c.eval_id, r.c.baseline_id, r.c.status,
          r.c.status_message, r.c.error_message, r.c.task_success, r.c.reward,
          r.c.num_turns, r.c.current_turn, r.c.max_turns, r.c.rollout_time,
          r.c.start_time, r.c.created_at, r.c.task_id,
          *(r.c[name] for name in tables.FAULTS),
          t.c.task_id.label("task_name"), t.c.description, t.c.app_name,
          s.c.step, e.c.step.label("eval_step"),
          run.c.id.label("training_id"), run.c.run_name,
      )
      .join(t, t.c.id == r.c.task_id)
      .outerjoin(s, s.c.id == r.c.step_id)
      .outerjoin(e, e.c.id == r.c.eval_id)
      .outerjoin(b, b.c.id == r.c.baseline_id)
      .join(run, run.c.id == owner)
      .where(r.c.id.in_(ids))
  )  # fmt: skip
  by_id = {}
  for row in rows:
    one = dict(row._mapping)  # pylint: disable=protected-access
    one["faults"] = sum(one[name] or 0 for name in tables.FAULTS)
    by_id[one["id"]] = one
  return [by_id[id_] for id_ in ids]


def _labelled(connection: sa.Connection, label: str) -> sa.ColumnElement[bool]:
  """Whether a rollout has a label: few have, so that they are read first."""
  ids = list(connection.scalars(queries_lib.labelled(label)))
  return (_R.c.id + 0).in_(
    sa.bindparam(None, ids, expanding=True, literal_execute=True)
  )


def _few_turns(
  connection: sa.Connection,
  project: int,
  training: int | None,
  chosen: Selection,
) -> Selection:
  """Narrows a selection to rollouts of few turns for their task."""
  own = {
    source: sa.select(tables.metadata.tables[source].c.id).where(
      _owned(tables.metadata.tables[source], project, training)
    )
    for source in vocabulary.SOURCE_TYPES
  }
  return chosen.narrowed(few_turns.in_runs(connection, own))


def _owned(
  source: sa.Table, project: int, training: int | None
) -> sa.ColumnElement[bool]:
  """Returns whether a source is the run's, or one of the project's runs'."""
  if training is not None:
    return source.c.training_id == training
  owner = tables.training_project
  return source.c.training_id.in_(
    sa.select(owner.c.training_id).where(owner.c.project_id == project)
  )


def _tasks(search: str) -> sa.Select:
  """Returns ids of the tasks that have all words somewhere."""
  t = tables.task
  query = sa.select(t.c.id)
  for word in search.split():
    like = f"%{page_request.escaped(word)}%"
    query = query.where(
      sa.or_(
        *(
          column.ilike(like, escape="\\")
          for column in (t.c.task_id, t.c.app_name, t.c.description)
        )
      )
    )
  return query


def _real(value: float) -> sa.ColumnElement[float]:
  """Returns a number that PostgreSQL does not read as a whole one."""
  return sa.literal(value, sa.Double())
