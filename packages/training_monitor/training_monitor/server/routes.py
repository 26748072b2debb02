"""Routes of the read API: `/api/v1/…`, and `/api/…` of other monitors."""

from __future__ import annotations

from typing import Any, Callable

from training_monitor.schema import vocabulary
from training_monitor.server import http_io
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib

# Short, as every route uses them.
_id, _name = http_io.id_of, http_io.name_of
_List = query_lib.ListQuery


def add_routes(q: queries_lib.Queries, get: Callable[..., None]) -> None:
  """Adds the routes of `/api/v1/…`.

  Args:
    q: The queries.
    get: adds a route, `get(path, name, summary, answer, ...)`; see
      `app.App`.
  """
  v1 = "/api/v1"
  get(
    f"{v1}/trainings",
    "trainings",
    "Trainings, newest first.",
    lambda p, r, chosen: q.trainings(p, chosen),
    query=query_lib.TrainingsQuery,
    answer="page:training",
  )
  for kind, plural in (
    ("step", "steps"),
    ("eval", "evals"),
    ("baseline", "baselines"),
  ):
    get(
      f"{v1}/trainings/{{id:int}}/{plural}",
      f"training_{plural}",
      f"A training's {plural}.",
      lambda p, r, chosen, kind=kind: q.of_training(p, kind, _id(r), chosen),
      query=_List,
      answer=f"page:{kind}",
    )
  for kind, plural in (
    ("training", "trainings"),
    ("step", "steps"),
    ("eval", "evals"),
    ("baseline", "baselines"),
    ("task", "tasks"),
  ):
    get(
      f"{v1}/{plural}/{{id:int}}",
      kind,
      f"One {kind}.",
      lambda p, r, kind=kind: q.one(p, kind, _id(r)),
      answer=kind,
    )
  get(
    f"{v1}/groups/{{id:int}}",
    "group",
    "One group that a client sent.",
    lambda p, r: q.one(p, "monitor_group", _id(r)),
    answer="monitor_group",
  )
  for kind in vocabulary.STATEFUL:
    get(
      f"{v1}/{kind}s/{{id:int}}/history",
      f"{kind}_history",
      f"Every status of one {kind}.",
      lambda p, r, chosen, kind=kind: q.history(p, kind, _id(r), chosen),
      query=_List,
      answer="page:status_history",
    )
  get(
    f"{v1}/tasks",
    "tasks",
    "Tasks.",
    lambda p, r, chosen: q.tasks(p, chosen),
    query=_List,
    answer="page:task",
  )
  get(
    f"{v1}/rollouts",
    "rollouts",
    "Rollouts, newest first.",
    lambda p, r, chosen: q.rollouts(p, chosen),
    query=query_lib.RolloutsQuery,
    answer="page:rollout",
  )
  for base, suffix in ((v1, ""), ("/api", "_0")):
    one = f"{base}/rollouts/{{name}}"
    if base == v1:  # The other one has its own envelope, below.
      get(
        one,
        "rollout",
        "A rollout, by its id or its own name.",
        lambda p, r: q.rollout(p, _name(r)),
        answer="rollout",
      )
    get(
      f"{one}/turns/{{turn:int}}",
      f"rollout_turn{suffix}",
      "A turn with its actions and observations.",
      lambda p, r: q.turn(p, _name(r), _id(r, "turn")),
      answer="turn",
    )
  get(
    f"{v1}/rollouts/{{name}}/turns",
    "rollout_turns",
    "All turns with their actions and observations.",
    lambda p, r: q.turns(p, _name(r)),
  )
  get(
    f"{v1}/clients",
    "clients",
    "State of the clients: spools, drops, dead letters.",
    lambda p, r: q.clients(p),
  )


def add_legacy_routes(
  q: queries_lib.Queries,
  get: Callable[..., None],
  add: Callable[..., None],
  observed: object,
  video: object,
) -> None:
  """Adds the routes that the pages of other monitors read, `/api/…`.

  Args:
    q: the queries.
    get: adds a GET route.
    add: adds any route.
    observed: handler of an observation's screenshot.
    video: handler of a video.
  """
  get(
    "/api/trainings",
    "trainings_0",
    "Trainings, newest first.",
    lambda p, r, selection: _listed(q.trainings(p, selection)),
    query=query_lib.TrainingsQuery,
  )
  get(
    "/api/trainings/{id:int}",
    "training_0",
    "One training.",
    lambda p, r: {"training": q.one(p, "training", _id(r))},
  )
  get(
    "/api/trainings/{id:int}/timeline",
    "training_timeline",
    "A training's baselines, evaluations and steps, in order.",
    lambda p, r: {"timeline": [_named(o) for o in q.timeline(p, _id(r))]},
  )
  for kind in vocabulary.SOURCE_TYPES:
    get(
      f"/api/timeline/{kind}/{{id:int}}",
      f"{kind}_timeline",
      f"One {kind} with its rollouts.",
      lambda p, r, kind=kind: _item(kind, q.entity_timeline(p, kind, _id(r))),
    )
  one = "/api/rollouts/{name}"
  get(
    one,
    "rollout_0",
    "A rollout with its task, verdict and turns.",
    lambda p, r: _whole(q.rollout(p, _name(r)), q.turns(p, _name(r))),
  )
  get(
    f"{one}/model-input/{{turn:int}}",
    "rollout_model_input",
    "The model's input in a turn.",
    lambda p, r: _model_input(q.turn(p, _name(r), _id(r, "turn"))),
  )
  get(
    f"{one}/validation-override",
    "rollout_validation",
    "A rollout's validations; the last one counts.",
    lambda p, r: _validations(q.rollout(p, _name(r))),
  )
  add(
    "GET",
    f"{one}/screenshot/{{obs:int}}",
    "rollout_screenshot",
    "The screenshot of an observation.",
    observed,
    answer="image",
  )
  add(
    "GET",
    "/api/videos",
    "video",
    "A video of the server's folder.",
    video,
    answer="image",
    query=query_lib.VideoQuery,
  )


def _listed(page: dict[str, Any]) -> dict[str, Any]:
  return {"trainings": page["items"], "next": page["next"]}


def _named(one: dict[str, Any]) -> dict[str, Any]:
  """Returns an entity with its type and a name for people."""
  kind = one["kind"]
  name = one.get("status_message") or "baseline"
  if kind != "baseline":
    words = {"eval": "Evaluation at step", "step": "Step"}
    name = f"{words[kind]} {one['step']}"
  return {**one, "type": kind, "display_name": name}


def _item(kind: str, timeline: dict[str, Any]) -> dict[str, Any]:
  item = _named({"kind": kind, **timeline[kind]})
  return {"item": item, "rollouts": timeline["rollouts"]}


def _whole(rollout: dict[str, Any], turns: dict[str, Any]) -> dict[str, Any]:
  validations = rollout.pop("validations")
  return {
    "task": rollout.pop("task"),
    "environment": rollout.pop("environment"),
    "validation": validations[-1] if validations else None,
    "validations": validations,
    "rollout": rollout,
    "turns": turns["items"],
  }


def _model_input(turn: dict[str, Any]) -> dict[str, Any]:
  inputs = [o["model_input_json"] for o in turn["observations"]]
  return {"model_input": [i for i in inputs if i is not None]}


def _validations(rollout: dict[str, Any]) -> dict[str, Any]:
  validations = rollout["validations"]
  final = validations[-1] if validations else None
  return {"validations": validations, "final": final}
