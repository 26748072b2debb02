"""Searches thoughts, responses, typed text and task descriptions of a run, the
newest turns first, and the turns of a label.

Promises: all words must be in one turn; the index (`schema.text_index`) finds
whole words, and by their beginning those that end in an asterisk. A task's
description belongs to the first turn of each rollout. Without an index, or for
a query that it cannot answer (no word, or one of a script without spaces),
turns are read, a page for `_BUDGET_S` at most and a chunk more: the page states
why and how far back it has looked, and the following one goes on from there.
The case of letters does not count.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, Callable, Literal, Sequence

import pydantic
import sqlalchemy as sa

from training_monitor.dashboard import annotations as annotations_lib
from training_monitor.dashboard import page_request
from training_monitor.dashboard import text
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import text_index
from training_monitor.server import query as query_lib

_BUDGET_S = 0.5
_CHUNK = 1000
_FOUND = 50
_AROUND = 70
_WHERE = ("thought", "model_response")

Row = dict[str, Any]


class SearchQuery(query_lib.PageQuery):
  """Words, in turns before number `after` of the database.

  Attributes:
    outcome: Outcome of the rollouts; None for any.
    label: Label that a person gave the turn; None for any.
  """

  q: query_lib.Search = ""
  outcome: Literal["success", "failure"] | None = None
  label: query_lib.Label | None = None
  after: query_lib.Id | None = None

  _labels = pydantic.field_validator("outcome", mode="before")(
    query_lib.outcome_key
  )


class SearchPages(page_request.RunTab):
  """See the module docstring."""

  def search(self, request: page_request.PageRequest) -> page_request.Page:
    run = self._head(request.project, request.id())
    asks = request.read(SearchQuery)
    turns: list[Row] = []
    reached: Row | None = None
    why = ""
    with database.reading(self._engine) as connection:
      if asks.label:
        words = text_index.words_of(asks.q) or asks.q.split()
        turns, reached = _labelled(connection, run["id"], words, asks)
      elif asks.q:
        turns, reached, why = _found(connection, run["id"], asks)
      labels = annotations_lib.every_label(
        connection, request.project, run["id"]
      )
      annotations_lib.add(connection, turns, "id")
    return page_request.Page("search.html", {
        "run": run, "tab": "search", "q": asks.q, "found": turns,
        "outcome": asks.outcome or "", "label": asks.label or "",
        "labels": labels, "reached": reached, "why": why,
    })  # fmt: skip


def _found(
  connection: sa.Connection, training: int, asks: SearchQuery
) -> tuple[list[Row], Row | None, str]:
  """Returns (turns, place reached, why turns were read; "" by the index)."""
  words = text_index.words_of(asks.q)
  why = "the index has no words of this kind"
  if not text_index.ready(connection):
    why = (
      "there is no index, as this server's SQLite has no FTS5"
      if connection.dialect.name == "sqlite"
      else "there is no index"
    )
  elif words is not None:
    try:
      with connection.begin_nested():
        return (*_by_index(connection, training, words, asks), "")
    except sa.exc.DBAPIError:
      pass  # Letters that are newer than the index's program.
  return (*_by_reading(connection, training, asks.q.split(), asks), why)


def _by_index(
  connection: sa.Connection,
  training: int,
  words: Sequence[str],
  asks: SearchQuery,
) -> tuple[list[Row], Row | None]:
  """Returns (turns, {turn, when} of the place reached, or None at the end)."""
  until = time.perf_counter() + _BUDGET_S
  turns: list[Row] = []
  before, count = asks.after, 2 * _FOUND
  if asks.outcome is None:
    count = _FOUND + 10  # Nearly every turn of the index is shown.
  while True:
    ids = text_index.find(connection, training, words, before, count)
    rows = connection.execute(
      _base(asks).where(tables.turn.c.id.in_(ids)), {"training": training}
    )
    for row in rows:
      one = _matched(row, words, _begins)
      if one is None:
        continue
      turns.append(one)
      if len(turns) == _FOUND:
        return turns, _reached(connection, row.id)
    if len(ids) < count:
      return turns, None
    before, count = ids[-1], min(2 * count, _CHUNK)
    if time.perf_counter() > until:
      return turns, _reached(connection, before)


def _labelled(
  connection: sa.Connection,
  training: int,
  words: Sequence[str],
  asks: SearchQuery,
) -> tuple[list[Row], Row | None]:
  """Searches the turns of a label, which are few, so that all are read."""
  query = _base(asks)
  if asks.after is not None:
    query = query.where(tables.turn.c.id < asks.after)
  place = _holds if text_index.words_of(asks.q) is None else _begins
  turns: list[Row] = []
  for row in connection.execute(query, {"training": training}):
    if len(turns) == _FOUND:
      return turns, _reached(connection, turns[-1]["id"])
    one = _matched(row, words, place)
    if one is not None:
      turns.append(one)
  return turns, None


def _by_reading(
  connection: sa.Connection,
  training: int,
  words: Sequence[str],
  asks: SearchQuery,
) -> tuple[list[Row], Row | None]:
  """Returns the same without an index, a chunk of turns at a time."""
  t = tables.turn
  until = time.perf_counter() + _BUDGET_S
  end = asks.after
  if end is None:
    end = (connection.execute(sa.select(sa.func.max(t.c.id))).scalar() or 0) + 1
  query = _reading(words, asks)
  turns: list[Row] = []
  while end > 1:
    start = max(1, end - _CHUNK)
    rows = connection.execute(
      query,
      {
        "training": training,
        "start": start,
        "end": end,
        **{f"w{n}": _like(word) for n, word in enumerate(words)},
      },
    )
    for row in rows:
      one = _matched(row, words, _holds)
      if one is not None:
        turns.append(one)
        if len(turns) == _FOUND:
          return turns, _reached(connection, row.id)
    end = start
    if time.perf_counter() > until and end > 1:
      return turns, _reached(connection, end)
  return turns, None


def _typed() -> sa.ScalarSelect:
  a = tables.action
  return (
    sa.select(sa.func.aggregate_strings(a.c.tool_args, "\n"))
    .where(a.c.turn_id == tables.turn.c.id, a.c.action_type == "type")
    .correlate(tables.turn)
    .scalar_subquery()
  )


def _raw_values() -> sa.ScalarSelect:
  v = tables.raw_value
  return (
    sa.select(sa.func.aggregate_strings(v.c.value, "\n"))
    .where(
      v.c.kind == "turn",
      v.c.entity_id == tables.turn.c.id,
      v.c.field.in_(text_index.RAW_FIELDS),
    )
    .correlate(tables.turn)
    .scalar_subquery()
  )


def _base(asks: SearchQuery) -> sa.Select:
  """Returns turns of a run that fulfil all but the words, the newest first."""
  t, r, k = tables.turn, tables.rollout, tables.task
  s, e, b = tables.step, tables.eval_, tables.baseline
  query = (
      sa.select(
          t.c.id, t.c.turn, t.c.rollout_id, t.c.metrics_json,
          _typed().label("typed"), _raw_values().label("raw"),
          k.c.description, r.c.task_success, r.c.status, r.c.status_message,
          r.c.reward, s.c.step, e.c.step.label("eval_step"),
      )
      .join(r, r.c.id == t.c.rollout_id)
      .join(k, k.c.id == r.c.task_id)
      .outerjoin(s, s.c.id == r.c.step_id)
      .outerjoin(e, e.c.id == r.c.eval_id)
      .outerjoin(b, b.c.id == r.c.baseline_id)
      .where(
          sa.func.coalesce(s.c.training_id, e.c.training_id, b.c.training_id)
          == sa.bindparam("training"),
      )
      .order_by(t.c.id.desc())
  )  # fmt: skip
  if asks.outcome is not None:
    query = query.where(
      # Not the bare column: its index has nearly all rollouts.
      sa.func.coalesce(r.c.status, "") == "completed",
      r.c.task_success == (1 if asks.outcome == "success" else 0),
    )
  if asks.label is not None:
    n = tables.annotation
    query = query.where(
      t.c.id.in_(sa.select(n.c.turn_id).where(n.c.label == asks.label))
    )
  return query


def _reading(words: Sequence[str], asks: SearchQuery) -> sa.Select:
  t = tables.turn
  query = _base(asks).where(
    t.c.id >= sa.bindparam("start"), t.c.id < sa.bindparam("end")
  )
  for number in range(len(words)):
    word: sa.BindParameter[str] = sa.bindparam(f"w{number}")
    query = query.where(
      sa.or_(
        t.c.metrics_json.ilike(word, escape="\\"),
        _typed().ilike(word, escape="\\"),
        _raw_values().ilike(word, escape="\\"),
        sa.and_(
          t.c.turn <= 1, tables.task.c.description.ilike(word, escape="\\")
        ),
      )
    )
  return query


def _like(word: str) -> str:
  """Returns a pattern that finds the word as JSON holds it."""
  quoted = json.dumps(word, ensure_ascii=False)[1:-1]
  return f"%{page_request.escaped(quoted)}%"


def _holds(word: str, content: str) -> int:
  """Returns the position of a word, even inside another one; -1: nowhere."""
  return content.casefold().find(word.casefold())


def _begins(word: str, content: str) -> int:
  """Returns the position of a whole word, or of its prefix; -1: nowhere."""
  end = "" if word[-1] == "*" else r"(?![^\W_])"
  match = re.search(
    rf"(?<![^\W_]){re.escape(word.rstrip('*'))}{end}", content, re.IGNORECASE
  )
  return -1 if match is None else match.start()


def _matched(
  row: Any, words: Sequence[str], place: Callable[[str, str], int]
) -> Row | None:
  """The turn, if its texts have all words: JSON has more than texts, and the
  index may have more than the turn."""
  metrics = text.read_object(row.metrics_json)
  texts = {name: str(metrics.get(name) or "") for name in _WHERE}
  lines = (row.typed or "").split("\n")  # JSON of an action has no such break.
  typed = [text.read_object(line).get("text") for line in lines]
  texts["typed"] = "\n".join(one for one in typed if isinstance(one, str))
  texts["recorded"] = row.raw or ""
  if row.turn <= 1:
    texts["task"] = row.description
  every = "\n".join(texts.values())
  if any(place(word, every) < 0 for word in words):
    return None
  first = words[0] if words else ""
  length = len(first.rstrip("*") if place is _begins else first)
  for name, content in texts.items():
    at = place(first, content) if first else 0 if content else -1
    # Folding may change lengths; then the place is a little off.
    if at >= 0:
      stop = at + length
      return {
        **row._mapping,  # pylint: disable=protected-access
        "where": name.replace("model_", ""),
        "before": "…" * (at > _AROUND) + content[max(0, at - _AROUND) : at],
        "match": content[at:stop],
        "behind": content[stop : stop + _AROUND]
        + "…" * (stop + _AROUND < len(content)),
      }
  return {
    **row._mapping,  # pylint: disable=protected-access
    "where": "",
    "before": "",
    "match": "",
    "behind": "",
  }


def _reached(connection: sa.Connection, turn: int) -> Row:
  when = connection.execute(
    sa.select(tables.turn.c.start_time)
    .where(tables.turn.c.id >= turn)
    .order_by(tables.turn.c.id)
    .limit(1)
  ).scalar()
  return {"turn": turn, "when": when}
