"""The server keeps to its OpenAPI document, and nothing makes it fail."""

import itertools

import hypothesis
import monitor_server
import pytest

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi import checks  # pylint: disable=g-import-not-at-top # noqa: E402

CHECKS = [
  schemathesis.checks.not_a_server_error,
  checks.status_code_conformance,
  checks.response_schema_conformance,
]
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


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory):
  folder = tmp_path_factory.mktemp("server")
  with monitor_server.sqlite_server(folder) as running:
    yield running


def test_every_operation_answers_as_its_document_says(server):
  """No 5xx, and no status or shape that is not written there."""
  sha, image = monitor_server.screenshot()
  server.http.put(f"/api/v1/screenshots/{sha}", content=image)
  server.post(
    monitor_server.joined(
      monitor_server.base(), monitor_server.episode("r1", status="completed")
    )
  )
  schema = schemathesis.openapi.from_url(server.url + "/api/v1/openapi.json")
  tried = {}
  numbers = itertools.count()
  real = {"id": 1, "turn": 1, "obs": 1, "name": "r1", "sha256": sha}
  for result in schema.get_all_operations():
    operation = result.ok()
    if operation.path.endswith("/events"):
      continue  # A stream, which does not end.

    @hypothesis.settings(
      max_examples=4,
      deadline=None,
      derandomize=True,
      database=None,
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def try_it(case):
      # Most made-up names exist nowhere; real ones reach further.
      if next(numbers) % 3:
        for name in set(case.path_parameters or ()) & set(real):
          case.path_parameters[name] = real[name]
        if case.method == "GET" and case.query:
          case.query.pop("after", None)
      reply = case.call(base_url=server.url, timeout=30)
      case.validate_response(reply, checks=CHECKS)
      tried.setdefault(case.operation.label, set()).add(reply.status_code)

    try_it()
  for label in MUST_ANSWER:
    assert 200 in tried[label], (label, tried[label])
  assert not server.app.writer.failures
