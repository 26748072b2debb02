"""The server keeps to its OpenAPI document, and no body makes it fail."""

from agent_services.serving import app
from agent_services.serving import openapi
import documented_answers
import httpx
import pytest
import rollout_server

pytestmark = pytest.mark.timeout(300)


def test_every_operation_answers_as_its_document_describes(running):
  """No 5xx, and no status, type or shape beyond the document."""
  session = rollout_server.start(running)["session_id"]

  def make_real(case):
    if "session" in case.path_parameters:
      case.path_parameters["session"] = session
    if isinstance(case.body, dict):
      if "model" in case.body:
        case.body["model"] = rollout_server.MODEL
      if "session_id" in case.body:
        case.body |= {"session_id": session, "drop": False}

  tried = documented_answers.statuses(running.url, make_real, every=4)
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
