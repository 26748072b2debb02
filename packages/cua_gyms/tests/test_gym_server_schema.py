"""The server keeps to its OpenAPI document, and nothing makes it fail."""

import itertools
import os

import gym_servers
import httpx
import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi import checks  # pylint: disable=g-import-not-at-top # noqa: E402

# Of each operation; a search of an hour is one of some thousands.
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "12"))
CHECKS = [
  schemathesis.checks.not_a_server_error,
  checks.status_code_conformance,
  checks.content_type_conformance,
  checks.response_schema_conformance,
]


@pytest.fixture(scope="module", name="server")
def _server():
  with gym_servers.serving(lease=30.0, capacity=64) as server:
    yield server


def test_every_operation_answers_as_its_document_says(server):
  """No 5xx, and no status, type or shape that is not written there."""
  url, app = server
  schema = schemathesis.openapi.from_url(url + "/openapi.json")
  tried = {}
  numbers = itertools.count()

  def make_room(least):
    for execution in app.store.live()[least:]:
      httpx.post(f"{url}/api/v1/desktop/executions/{execution.id}/terminate")

  for result in schema.get_all_operations():
    operation = result.ok()

    @hypothesis.settings(
      max_examples=EXAMPLES,
      deadline=None,
      derandomize=True,
      database=None,
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def try_it(case):
      # Most made-up names exist nowhere; real ones reach further.
      if next(numbers) % 3:
        if "gym_id" in case.path_parameters:
          case.path_parameters["gym_id"] = "desktop"
        if "identifier" in case.path_parameters:
          case.path_parameters["identifier"] = "click-button-train-0"
        if "execution_id" in case.path_parameters:
          if not app.store.live():
            httpx.post(f"{url}/api/v1/desktop/tasks/001")
          case.path_parameters["execution_id"] = app.store.live()[0].id
      reply = case.call(base_url=url, timeout=30)
      case.validate_response(reply, checks=CHECKS)
      tried.setdefault(case.operation.label, set()).add(reply.status_code)
      make_room(32)

    try_it()
  assert len(tried) == 13
  for label, statuses in tried.items():
    assert 200 in statuses, (label, statuses)
