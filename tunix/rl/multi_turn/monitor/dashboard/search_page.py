"""Searches thoughts, responses and typed text of a run, the newest turns first.

Promises: a page takes `_BUDGET_S` at most and a chunk more, whatever the size
of the database; it states how far back it has looked, and the following page
goes on from there. All words must be in one turn; the case of ASCII letters
does not count.

Does not: read raw values of other recorders, or keep an index of words.
"""

from __future__ import annotations

import json
import time
from typing import Any, Sequence

import pydantic
import sqlalchemy as sa
from tunix.rl.multi_turn.monitor.dashboard import page_request
from tunix.rl.multi_turn.monitor.dashboard import text
from tunix.rl.multi_turn.monitor.schema import database
from tunix.rl.multi_turn.monitor.schema import tables
from tunix.rl.multi_turn.monitor.server import query as query_lib

_BUDGET_S = 0.5
_CHUNK = 1000
_FOUND = 50
_AROUND = 70
_WHERE = ("thought", "model_response")

Row = dict[str, Any]


class SearchQuery(query_lib.PageQuery):
  """Words, in turns before number `after` of the database.

  Attributes:
    outcome: of the rollouts; "" for any.
  """

  q: query_lib.Search = ""
  outcome: query_lib.one_of(("success", "failure")) | None = None
  after: query_lib.Id | None = None

  _labels = pydantic.field_validator("outcome", mode="before")(
      query_lib.outcome_key
  )


class SearchPages:
  """See the module docstring."""

  def __init__(self, engine: sa.Engine, head: Any):
    self._engine = engine
    self._head = head

  def search(self, request: page_request.PageRequest) -> page_request.Page:
    run = self._head(request.project, request.id())
    asks = request.read(SearchQuery)
    words = asks.q.split()
    found: list[Row] = []
    reached: Row | None = None
    if words:
      with database.reading(self._engine) as connection:
        found, reached = _found(
            connection, run["id"], words, asks.outcome, asks.after
        )
    return page_request.Page("search.html", {
        "run": run, "tab": "search", "q": asks.q, "found": found,
        "outcome": asks.outcome or "", "reached": reached,
    })  # pyformat: disable


def _found(
    connection: sa.Connection, training: int, words: Sequence[str],
    outcome: str | None, after: int | None,
) -> tuple[list[Row], Row | None]:  # pyformat: disable
  """(turns, {turn, when} that the search stopped at, or None at the end)."""
  t = tables.turn
  until = time.perf_counter() + _BUDGET_S
  end = after
  if end is None:
    end = (connection.execute(sa.select(sa.func.max(t.c.id))).scalar() or 0) + 1
  found: list[Row] = []
  while end > 1:
    start = max(1, end - _CHUNK)
    rows = connection.execute(_query(words, outcome), {
        "training": training, "start": start, "end": end,
        **{f"w{n}": _like(word) for n, word in enumerate(words)},
    })  # pyformat: disable
    for row in rows:
      one = _matched(row, words)
      if one is not None:
        found.append(one)
        if len(found) == _FOUND:
          return found, _reached(connection, row.id)
    end = start
    if time.perf_counter() > until and end > 1:
      return found, _reached(connection, end)
  return found, None


def _query(words: Sequence[str], outcome: str | None) -> sa.Select:
  t, r, a = tables.turn, tables.rollout, tables.action
  s, e, b = tables.step, tables.eval_, tables.baseline
  typed = (
      sa.select(sa.func.aggregate_strings(a.c.tool_args, "\n"))
      .where(a.c.turn_id == t.c.id, a.c.action_type == "type")
      .correlate(t)
      .scalar_subquery()
  )
  query = (
      sa.select(
          t.c.id, t.c.turn, t.c.rollout_id, t.c.metrics_json,
          typed.label("typed"), r.c.task_success, r.c.status,
          r.c.status_message, r.c.reward, s.c.step, e.c.step.label("eval_step"),
      )
      .join(r, r.c.id == t.c.rollout_id)
      .outerjoin(s, s.c.id == r.c.step_id)
      .outerjoin(e, e.c.id == r.c.eval_id)
      .outerjoin(b, b.c.id == r.c.baseline_id)
      .where(
          t.c.id >= sa.bindparam("start"), t.c.id < sa.bindparam("end"),
          sa.func.coalesce(s.c.training_id, e.c.training_id, b.c.training_id)
          == sa.bindparam("training"),
      )
      .order_by(t.c.id.desc())
  )  # pyformat: disable
  if outcome is not None:
    query = query.where(
        r.c.status == "completed",
        r.c.task_success == (1 if outcome == "success" else 0),
    )
  for number in range(len(words)):
    word = sa.bindparam(f"w{number}")
    query = query.where(sa.or_(
        t.c.metrics_json.ilike(word, escape="\\"),
        typed.ilike(word, escape="\\"),
    ))  # pyformat: disable
  return query


def _like(word: str) -> str:
  """A pattern that finds the word as JSON holds it."""
  held = json.dumps(word, ensure_ascii=False)[1:-1]
  return f"%{page_request.escaped(held)}%"


def _matched(row: Any, words: Sequence[str]) -> Row | None:
  """The turn, if its texts have all words: JSON has more than texts."""
  metrics = text.read_object(row.metrics_json)
  texts = {name: str(metrics.get(name) or "") for name in _WHERE}
  lines = (row.typed or "").split("\n")  # JSON of an action has no such break.
  typed = [text.read_object(line).get("text") for line in lines]
  texts["typed"] = "\n".join(one for one in typed if isinstance(one, str))
  every = "\n".join(texts.values()).casefold()
  if not all(word.casefold() in every for word in words):
    return None
  for name, content in texts.items():
    at = content.casefold().find(words[0].casefold())
    # Folding may change lengths; then the place is a little off.
    if at >= 0:
      stop = at + len(words[0])
      return {
          **row._mapping,  # pylint: disable=protected-access
          "where": name.replace("model_", ""),
          "before": content[max(0, at - _AROUND) : at],
          "match": content[at:stop],
          "behind": content[stop : stop + _AROUND],
      }
  return None


def _reached(connection: sa.Connection, turn: int) -> Row:
  when = connection.execute(
      sa.select(tables.turn.c.start_time)
      .where(tables.turn.c.id >= turn)
      .order_by(tables.turn.c.id)
      .limit(1)
  ).scalar()
  return {"turn": turn, "when": when}
