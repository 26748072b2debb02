"""What the pages of other monitors read."""

from __future__ import annotations

from typing import Any, Callable

from tunix.rl.multi_turn.monitor.schema import vocabulary
from tunix.rl.multi_turn.monitor.server import http_io
from tunix.rl.multi_turn.monitor.server import queries as queries_lib

PAGE = (("limit", "limit"), ("after", "string"))


def add_routes(
    q: queries_lib.Queries,
    get: Callable[..., None],
    add: Callable[..., None],
    observed: Any,
    video: Any,
) -> None:
  """Adds them.

  Args:
    q: answers.
    get: adds a question.
    add: adds any operation.
    observed: handler of an observation's screenshot.
    video: handler of a video.
  """
  get(
      "/api/trainings", "trainings_0", "Trainings, newest first.",
      lambda p, r: q.trainings(
          p, http_io.status(r, "training"), *http_io.page(r)
      ),
      query=(("status", "string"), *PAGE), answer="page:training",
  )  # pyformat: disable
  get(
      "/api/trainings/{id:int}", "training_0", "One training.",
      lambda p, r: q.one(p, "training", http_io.id_of(r)), answer="training",
  )  # pyformat: disable
  get(
      "/api/trainings/{id:int}/timeline", "training_timeline",
      "What a training did, in order.",
      lambda p, r: {"timeline": q.timeline(p, http_io.id_of(r))},
  )  # pyformat: disable
  for kind in vocabulary.SOURCE_TYPES:
    get(
        f"/api/timeline/{kind}/{{id:int}}", f"{kind}_timeline",
        f"One {kind} with its rollouts.",
        lambda p, r, kind=kind: q.entity_timeline(p, kind, http_io.id_of(r)),
    )  # pyformat: disable
  one = "/api/rollouts/{name}"
  get(
      f"{one}/model-input/{{turn:int}}", "rollout_model_input",
      "What the model was given in a turn.",
      lambda p, r: _model_input(
          q.turn(p, http_io.name_of(r), http_io.id_of(r, "turn"))
      ),
  )  # pyformat: disable
  get(
      f"{one}/validation-override", "rollout_validation",
      "What was validated, the last of it being what counts.",
      lambda p, r: _validations(q.rollout(p, http_io.name_of(r))),
  )  # pyformat: disable
  add(
      "GET", f"{one}/screenshot/{{obs:int}}", "rollout_screenshot",
      "The screenshot of an observation.", observed, answer="image",
  )  # pyformat: disable
  add(
      "GET", "/api/videos", "video", "A video of the server's folder.",
      video, answer="image", query=(("path", "string"),),
  )  # pyformat: disable


def _model_input(turn: dict[str, Any]) -> dict[str, Any]:
  told = [o["model_input_json"] for o in turn["observations"]]
  return {"model_input": [t for t in told if t is not None]}


def _validations(rollout: dict[str, Any]) -> dict[str, Any]:
  found = rollout["validations"]
  return {"validations": found, "final": found[-1] if found else None}
