"""The server keeps to its OpenAPI document, and no body makes it fail."""

import itertools
import os

from agent_services.serving import app
from agent_services.serving import openapi
import httpx
import hypothesis
import pytest
import rollout_server

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi import checks  # pylint: disable=g-import-not-at-top # noqa: E402

pytestmark = pytest.mark.timeout(300)
# Of each operation; a search of an hour is one of some thousands.
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "12"))
CHECKS = [
  schemathesis.checks.not_a_server_error,
  checks.status_code_conformance,
  checks.content_type_conformance,
  checks.response_schema_conformance,
]


def test_every_operation_answers_as_its_document_describes(running):
  """No 5xx, and no status, type or shape beyond the document."""
  schema = schemathesis.openapi.from_url(running.url + "/openapi.json")
  session = rollout_server.start(running)["session_id"]
  tried, numbers = {}, itertools.count()
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
      if next(numbers) % 4:
        if "session" in case.path_parameters:
          case.path_parameters["session"] = session
        if isinstance(case.body, dict):
          if "model" in case.body:
            case.body["model"] = rollout_server.MODEL
          if "session_id" in case.body:
            case.body |= {"session_id": session, "drop": False}
      reply = case.call(base_url=running.url, timeout=60)
      case.validate_response(reply, checks=CHECKS)
      tried.setdefault(case.operation.label, set()).add(reply.status_code)

    try_it()
  documented = {
    f"{method.upper()} {path}"
    for path, methods in openapi.document(app.ENDPOINTS)["paths"].items()
    for method in methods
  }
  # schemathesis leaves out the document's own path.
  assert set(tried) == documented - {"GET /openapi.json"}
  assert len(documented) == 23
  for label in ("GET /v1/models", "GET /metrics", "POST /rl/start_session"):
    assert 200 in tried[label], (label, tried[label])
  assert not any(500 in statuses for statuses in tried.values())


def test_the_document_has_every_field_of_the_bodies(running):
  document = httpx.get(running.url + "/openapi.json").json()
  schemas = document["components"]["schemas"]
  for api in app.ENDPOINTS:
    own = schemas[api.body.__name__]
    assert own["additionalProperties"] is False
    names = {f.alias or name for name, f in api.body.model_fields.items()}
    assert set(own["properties"]) == names >= {"model", "temperature"}
    body = document["paths"][f"/v1/{api.path}"]["post"]["requestBody"]
    (content,) = body["content"].values()
    assert content["schema"]["$ref"].endswith(api.body.__name__)
  kinds = schemas["ChatBody"]["properties"]["messages"]["items"]
  assert kinds["discriminator"] == {"propertyName": "role"}
  assert len(kinds["oneOf"]) == 4
  assert "schema" in schemas["JsonSchema"]["properties"]
