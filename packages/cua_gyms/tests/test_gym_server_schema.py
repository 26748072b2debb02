"""The server keeps to its OpenAPI document, and nothing makes it fail."""

import documented_answers
import gym_servers
import httpx


def test_every_operation_answers_as_its_document_says():
  """No 5xx, and no status, type or shape that is not written there."""

  def make_real(case):
    if "gym_id" in case.path_parameters:
      case.path_parameters["gym_id"] = "desktop"
    if "identifier" in case.path_parameters:
      case.path_parameters["identifier"] = "click-button-train-0"
    if "execution_id" in case.path_parameters:
      if not app.store.live():
        httpx.post(f"{url}/api/v1/desktop/tasks/001")
      case.path_parameters["execution_id"] = app.store.live()[0].id

  def make_room():
    for execution in app.store.live()[32:]:
      httpx.post(f"{url}/api/v1/desktop/executions/{execution.id}/terminate")

  with gym_servers.serving(lease=30.0, capacity=64) as (url, app):
    tried = documented_answers.statuses(url, make_real, after=make_room)
  assert len(tried) == 13
  for label, statuses in tried.items():
    assert 200 in statuses, (label, statuses)
