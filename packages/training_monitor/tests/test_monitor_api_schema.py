"""The server keeps to its OpenAPI document, and nothing makes it fail."""

import documented_answers
import monitor_server

MUST_ANSWER = (
  "GET /api/v1/trainings",
  "GET /api/v1/rollouts",
  "GET /api/v1/tasks",
  "GET /api/v1/rollouts/{name}",
  "GET /api/v1/rollouts/{name}/turns",
  "GET /api/v1/trainings/{id}/steps",
  "GET /api/v1/steps/{id}/history",
  "GET /api/timeline/step/{id}",
  "GET /api/v1/screenshots/{sha256}",
  "GET /health",
)


def test_every_operation_answers_as_its_document_says(lite):
  """No 5xx, and no status or shape that is not written there."""
  sha, image = monitor_server.screenshot()
  lite.http.put(f"/api/v1/screenshots/{sha}", content=image)
  lite.post(
    monitor_server.joined(
      monitor_server.base(), monitor_server.episode("r1", status="completed")
    )
  )
  real = {"id": 1, "turn": 1, "obs": 1, "name": "r1", "sha256": sha}

  def make_real(case):
    for name in set(case.path_parameters or ()) & set(real):
      case.path_parameters[name] = real[name]
    if case.method == "GET" and case.query:
      case.query.pop("after", None)

  tried = documented_answers.statuses(
    lite.url,
    make_real,
    "/api/v1/openapi.json",
    examples=4,
    leave_out="/events",  # A stream, which does not end.
    checks=documented_answers.ANY_TYPE,
  )
  for label in MUST_ANSWER:
    assert 200 in tried[label], (label, tried[label])
  assert not lite.app.writer.failures
