"""The pages of everything that a client may read, `/api/v1/…`."""

from __future__ import annotations

from typing import Callable

from tunix.rl.multi_turn.monitor.schema import vocabulary
from tunix.rl.multi_turn.monitor.server import http_io
from tunix.rl.multi_turn.monitor.server import legacy_routes
from tunix.rl.multi_turn.monitor.server import queries as queries_lib

_PAGE = legacy_routes.PAGE
# Short, as every route uses them.
_id, _name = http_io.id_of, http_io.name_of
_page, _status, _filters = http_io.page, http_io.status, http_io.filters


def add_routes(q: queries_lib.Queries, get: Callable[..., None]) -> None:
  """Adds them.

  Args:
    q: answers.
    get: adds a question, `get(path, name, summary, ask, ...)`.
  """
  v1 = "/api/v1"
  get(
      f"{v1}/trainings", "trainings", "Trainings, newest first.",
      lambda p, r: q.trainings(
          p, _status(r, "training"), *_page(r), http_io.tags(r)
      ),
      query=(("status", "string"), ("tag", "string"), *_PAGE),
      answer="page:training",
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
        lambda p, r, kind=kind: q.of_training(p, kind, _id(r), *_page(r)),
        query=_PAGE, answer=f"page:{kind}",
    )  # pyformat: disable
  for kind, plural in (
      ("training", "trainings"), ("step", "steps"), ("eval", "evals"),
      ("baseline", "baselines"), ("task", "tasks"),
  ):  # pyformat: disable
    get(
        f"{v1}/{plural}/{{id:int}}", kind, f"One {kind}.",
        lambda p, r, kind=kind: q.one(p, kind, _id(r)), answer=kind,
    )  # pyformat: disable
  for kind in vocabulary.STATEFUL:
    get(
        f"{v1}/{kind}s/{{id:int}}/history", f"{kind}_history",
        f"Every status of one {kind}.",
        lambda p, r, kind=kind: q.history(p, kind, _id(r), *_page(r)),
        query=_PAGE, answer="page:status_history",
    )  # pyformat: disable
  get(
      f"{v1}/tasks", "tasks", "Tasks.", lambda p, r: q.tasks(p, *_page(r)),
      query=_PAGE, answer="page:task",
  )  # pyformat: disable
  ids = ("training_id", "step_id", "eval_id", "baseline_id", "task_id",
         "batch", "group")  # pyformat: disable
  get(
      f"{v1}/rollouts", "rollouts", "Rollouts, newest first.",
      lambda p, r: q.rollouts(p, _filters(r, ids), *_page(r)),
      query=(
          *((i, "integer") for i in ids), ("status", "string"),
          ("success", "flag"), *_PAGE,
      ),
      answer="page:rollout",
  )  # pyformat: disable
  for base, suffix in ((v1, ""), ("/api", "_0")):
    one = f"{base}/rollouts/{{name}}"
    get(
        one, f"rollout{suffix}", "A rollout, by its id or its own name.",
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
      f"{v1}/clients", "clients", "How those that send fare.",
      lambda p, r: q.clients(p),
  )  # pyformat: disable
