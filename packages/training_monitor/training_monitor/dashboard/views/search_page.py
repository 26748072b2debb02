"""Searches thoughts, responses, typed text and task descriptions of a run, the
newest turns first, and the turns of a label.

Promises: all words must be in one turn; a word is found whole, or by its
beginning if it ends in an asterisk. A task's description belongs to the first
turn of each rollout. The case of letters does not count. A page takes about
`_BUDGET_S`, and the following one begins where it stopped.
"""

from __future__ import annotations

import time
from typing import Any, Literal, Sequence

import pydantic
import sqlalchemy as sa

from training_monitor.dashboard import annotations as annotations_lib
from training_monitor.dashboard import page_request
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import text_index
from training_monitor.server import query as query_lib

_BUDGET_S = 0.5
_CHUNK = 1000
_FOUND = 50
_AROUND = 70

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
    terms = text_index.terms_of(asks.q)
    turns: list[Row] = []
    reached: Row | None = None
    with database.reading(self._engine) as connection:
      if terms or asks.label:
        turns, reached = _found(connection, run["id"], terms, asks)
      labels = annotations_lib.every_label(
        connection, request.project, run["id"]
      )
      annotations_lib.add(connection, turns, "id")
    return page_request.Page("search.html", {
        "run": run, "tab": "search", "q": asks.q, "found": turns,
        "outcome": asks.outcome or "", "label": asks.label or "",
        "labels": labels, "reached": reached,
    })  # fmt: skip


def _found(
  connection: sa.Connection,
  training: int,
  terms: Sequence[str],
  asks: SearchQuery,
) -> tuple[list[Row], Row | None]:
  """Returns (turns, {turn, when} of the place reached, or None at the end)."""
  until = time.perf_counter() + _BUDGET_S
  query = _query(training, asks)
  turns: list[Row] = []
  before, count = asks.after, 2 * _FOUND
  while True:
    ids = _candidates(connection, training, terms, asks, before, count)
    for row in connection.execute(query.where(tables.turn.c.id.in_(ids))):
      one = _matched(row, terms)
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


def _candidates(
  connection: sa.Connection,
  training: int,
  terms: Sequence[str],
  asks: SearchQuery,
  before: int | None,
  count: int,
) -> list[int]:
  """Returns turns that may be found, the newest first."""
  if asks.label is None:
    try:
      with connection.begin_nested():
        return text_index.find(connection, training, terms, before, count)
    except sa.exc.DBAPIError:
      return []  # Letters that are newer than the index's program.
  n = tables.annotation
  query = sa.select(n.c.turn_id).where(n.c.label == asks.label)
  if before is not None:
    query = query.where(n.c.turn_id < before)
  order = n.c.turn_id.desc()
  return list(
    connection.scalars(
      query.where(n.c.turn_id.is_not(None)).order_by(order).limit(count)
    )
  )


def _query(training: int, asks: SearchQuery) -> sa.Select:
  """Returns turns of a run that fulfil all but the words, the newest first."""
  r, s, e = tables.rollout, tables.step, tables.eval_
  query = (
      text_index.turns(
          tables.turn.c.rollout_id, r.c.task_success, r.c.status,
          r.c.status_message, r.c.reward, s.c.step,
          e.c.step.label("eval_step"),
      )
      .where(text_index.RUN_OF_TURN == training)
      .order_by(tables.turn.c.id.desc())
  )  # fmt: skip
  if asks.outcome is not None:
    query = query.where(
      # Not the bare column: its index has nearly all rollouts.
      sa.func.coalesce(r.c.status, "") == "completed",
      r.c.task_success == (1 if asks.outcome == "success" else 0),
    )
  return query


def _matched(row: Any, terms: Sequence[str]) -> Row | None:
  """Returns the turn if its texts have all terms; the index may have more."""
  texts = text_index.texts(row)
  every = "\n".join(texts.values())
  if any(text_index.place(term, every) < 0 for term in terms):
    return None
  shown = {"where": "", "before": "", "match": "", "behind": ""}
  first = terms[0] if terms else ""
  for name, content in texts.items():
    at = text_index.place(first, content) if first else 0 if content else -1
    if at >= 0:
      stop = at + len(first.rstrip("*"))
      shown = {
        "where": name.replace("model_", ""),
        "before": "…" * (at > _AROUND) + content[max(0, at - _AROUND) : at],
        "match": content[at:stop],
        "behind": content[stop : stop + _AROUND]
        + "…" * (stop + _AROUND < len(content)),
      }
      break
  return {**row._mapping, **shown}  # pylint: disable=protected-access


def _reached(connection: sa.Connection, turn: int) -> Row:
  when = connection.execute(
    sa.select(tables.turn.c.start_time)
    .where(tables.turn.c.id >= turn)
    .order_by(tables.turn.c.id)
    .limit(1)
  ).scalar()
  return {"turn": turn, "when": when}
