"""Routes of the read API, `/api/v1/…`."""

from __future__ import annotations

from typing import Callable

from tunix.rl.multi_turn.monitor.schema import vocabulary
from tunix.rl.multi_turn.monitor.server import http_io
from tunix.rl.multi_turn.monitor.server import queries as queries_lib
from tunix.rl.multi_turn.monitor.server import query as query_lib

# Short, as every route uses them.
_id, _name = http_io.id_of, http_io.name_of
_List = query_lib.ListQuery


def add_routes(q: queries_lib.Queries, get: Callable[..., None]) -> None:
  """Adds them.

  Args:
    q: the queries.
    get: adds a route, `get(path, name, summary, answer, ...)`; see
      `app.App`.
  """
  v1 = "/api/v1"
  get(
      f"{v1}/trainings", "trainings", "Trainings, newest first.",
      lambda p, r, chosen: q.trainings(p, chosen),
      query=query_lib.TrainingsQuery, answer="page:training",
  )  # pyformat: disable
  get(
      f"{v1}/tags", "tags", "Tags of trainings, with how many have them.",
      lambda p, r: q.tags(p),
  )  # pyformat: disable
  for kind, plural in (
      ("step", "steps"), ("eval", "evals"), ("baseline", "baselines"),
  ):  # pyformat: disable
    get(
        f"{v1}/trainings/{{id:int}}/{plural}", f"training_{plural}",
        f"A training's {plural}.",
        lambda p, r, chosen, kind=kind: q.of_training(p, kind, _id(r), chosen),
        query=_List, answer=f"page:{kind}",
    )  # pyformat: disable
  for kind, plural in (
      ("training", "trainings"), ("step", "steps"), ("eval", "evals"),
      ("baseline", "baselines"), ("task", "tasks"),
  ):  # pyformat: disable
    get(
        f"{v1}/{plural}/{{id:int}}", kind, f"One {kind}.",
        lambda p, r, kind=kind: q.one(p, kind, _id(r)), answer=kind,
    )  # pyformat: disable
  get(
      f"{v1}/groups/{{id:int}}", "group", "One group that a client sent.",
      lambda p, r: q.one(p, "monitor_group", _id(r)), answer="monitor_group",
  )  # pyformat: disable
  for kind in vocabulary.STATEFUL:
    get(
        f"{v1}/{kind}s/{{id:int}}/history", f"{kind}_history",
        f"Every status of one {kind}.",
        lambda p, r, chosen, kind=kind: q.history(p, kind, _id(r), chosen),
        query=_List, answer="page:status_history",
    )  # pyformat: disable
  get(
      f"{v1}/tasks", "tasks", "Tasks.", lambda p, r, chosen: q.tasks(p, chosen),
      query=_List, answer="page:task",
  )  # pyformat: disable
  get(
      f"{v1}/rollouts", "rollouts", "Rollouts, newest first.",
      lambda p, r, chosen: q.rollouts(p, chosen),
      query=query_lib.RolloutsQuery, answer="page:rollout",
  )  # pyformat: disable
  for base, suffix in ((v1, ""), ("/api", "_0")):
    one = f"{base}/rollouts/{{name}}"
    if base == v1:  # The other one has its own envelope: legacy_routes.
      get(
          one, "rollout", "A rollout, by its id or its own name.",
          lambda p, r: q.rollout(p, _name(r)), answer="rollout",
      )  # pyformat: disable
    get(
        f"{one}/turns/{{turn:int}}", f"rollout_turn{suffix}",
        "A turn with its actions and observations.",
        lambda p, r: q.turn(p, _name(r), _id(r, "turn")), answer="turn",
    )  # pyformat: disable
  get(
      f"{v1}/rollouts/{{name}}/turns", "rollout_turns",
      "All turns with their actions and observations.",
      lambda p, r: q.turns(p, _name(r)),
  )  # pyformat: disable
  get(
      f"{v1}/clients", "clients",
      "State of the clients: spools, drops, dead letters.",
      lambda p, r: q.clients(p),
  )  # pyformat: disable
