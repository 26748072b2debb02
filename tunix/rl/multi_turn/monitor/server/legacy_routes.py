"""Routes that the pages of other monitors read, `/api/…`."""

from __future__ import annotations

from typing import Any, Callable

from tunix.rl.multi_turn.monitor.schema import vocabulary
from tunix.rl.multi_turn.monitor.server import http_io
from tunix.rl.multi_turn.monitor.server import queries as queries_lib
from tunix.rl.multi_turn.monitor.server import query as query_lib


def add_routes(
    q: queries_lib.Queries,
    get: Callable[..., None],
    add: Callable[..., None],
    observed: Any,
    video: Any,
) -> None:
  """Adds them.

  Args:
    q: the queries.
    get: adds a GET route.
    add: adds any route.
    observed: handler of an observation's screenshot.
    video: handler of a video.
  """
  get(
      "/api/trainings", "trainings_0", "Trainings, newest first.",
      lambda p, r, selection: _listed(q.trainings(p, selection)),
      query=query_lib.TrainingsQuery,
  )  # pyformat: disable
  get(
      "/api/trainings/{id:int}", "training_0", "One training.",
      lambda p, r: {"training": q.one(p, "training", http_io.id_of(r))},
  )  # pyformat: disable
  get(
      "/api/trainings/{id:int}/timeline", "training_timeline",
      "A training's baselines, evaluations and steps, in order.",
      lambda p, r: {
          "timeline": [_named(o) for o in q.timeline(p, http_io.id_of(r))]
      },
  )  # pyformat: disable
  for kind in vocabulary.SOURCE_TYPES:
    get(
        f"/api/timeline/{kind}/{{id:int}}", f"{kind}_timeline",
        f"One {kind} with its rollouts.",
        lambda p, r, kind=kind: _item(
            kind, q.entity_timeline(p, kind, http_io.id_of(r))
        ),
    )  # pyformat: disable
  one = "/api/rollouts/{name}"
  get(
      one, "rollout_0", "A rollout with its task, verdict and turns.",
      lambda p, r: _whole(
          q.rollout(p, http_io.name_of(r)), q.turns(p, http_io.name_of(r))
      ),
  )  # pyformat: disable
  get(
      f"{one}/model-input/{{turn:int}}", "rollout_model_input",
      "The model's input in a turn.",
      lambda p, r: _model_input(
          q.turn(p, http_io.name_of(r), http_io.id_of(r, "turn"))
      ),
  )  # pyformat: disable
  get(
      f"{one}/validation-override", "rollout_validation",
      "A rollout's validations; the last one counts.",
      lambda p, r: _validations(q.rollout(p, http_io.name_of(r))),
  )  # pyformat: disable
  add(
      "GET", f"{one}/screenshot/{{obs:int}}", "rollout_screenshot",
      "The screenshot of an observation.", observed, answer="image",
  )  # pyformat: disable
  add(
      "GET", "/api/videos", "video", "A video of the server's folder.",
      video, answer="image", query=query_lib.VideoQuery,
  )  # pyformat: disable


def _listed(page: dict[str, Any]) -> dict[str, Any]:
  return {"trainings": page["items"], "next": page["next"]}


def _named(one: dict[str, Any]) -> dict[str, Any]:
  """A step, evaluation or baseline with its type and a name for people."""
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
      "task": rollout.pop("task"), "environment": rollout.pop("environment"),
      "validation": validations[-1] if validations else None,
      "validations": validations, "rollout": rollout, "turns": turns["items"],
  }  # pyformat: disable


def _model_input(turn: dict[str, Any]) -> dict[str, Any]:
  inputs = [o["model_input_json"] for o in turn["observations"]]
  return {"model_input": [i for i in inputs if i is not None]}


def _validations(rollout: dict[str, Any]) -> dict[str, Any]:
  validations = rollout["validations"]
  final = validations[-1] if validations else None
  return {"validations": validations, "final": final}
