"""The settings of a run's monitor, and the parameters of its server's URLs."""

import dataclasses

import fresh_interpreter
import pytest
from starlette import datastructures
from training_monitor.core import monitor_settings as settings_lib
from training_monitor.core import settings
from training_monitor.dashboard import rollout_list
from training_monitor.dashboard.views import run_pages
from training_monitor.server import errors
from training_monitor.server import openapi
from training_monitor.server import query as query_lib

Config = settings_lib.MonitorConfig


def test_every_setting_is_documented_and_every_number_has_a_range():
  for field in settings.fields(Config):
    assert field.doc.endswith((".", ".db", "none.")), field.name
    if field.type in (int, float):
      assert field.range, field.name


def test_contradictions_are_named_all_at_once():
  with pytest.raises(ValueError) as caught:
    Config(url="localhost:80", database="x.db", tags=("a" * 51,))
  for part in ("http://host:port", "monitor.embedded=true", "monitor.tags"):
    assert part in str(caught.value)
  with pytest.raises(ValueError, match="give one of them"):
    Config(url="http://x", embedded=True)
  with pytest.raises(ValueError, match="heartbeat_s"):
    Config(heartbeat_s=90.0)  # The dashboard would call the run silent.


def test_a_section_survives_the_way_to_the_uploader():
  config = Config(url="http://x", tags=("a",), spool_mb=0.5, max_pending=9)
  plain = dataclasses.asdict(config)
  plain["tags"] = list(plain["tags"])  # As MessagePack has it.
  assert Config(**plain) == config and config.spool_bytes == 1 << 19


def test_the_settings_load_neither_a_database_nor_jax():
  program = (
    "import sys\n"
    "from training_monitor.client import uploader\n"
    "bad = {'sqlalchemy', 'starlette'} & set(sys.modules); assert not bad,"
    " bad"
  )
  result = fresh_interpreter.run(program)
  assert result.returncode == 0, result.stderr


# --- parameters of URLs -------------------------------------------------------


def refused(model, text):
  with pytest.raises(errors.ApiError) as caught:
    model.read(datastructures.QueryParams(text))
  assert caught.value.status == 400
  faults = {f["field"]: f for f in caught.value.faults}
  assert caught.value.message.startswith(next(iter(faults)))
  return faults


def test_every_wrong_parameter_is_named_with_its_value_and_the_fix():
  faults = refused(query_lib.RolloutsQuery, "limit=0&status=odd&step_id=1x")
  assert faults.keys() == {"limit", "status", "step_id"}
  assert faults["limit"]["value"] == 0
  assert faults["limit"]["message"] == "give 1 to 500"
  assert faults["status"]["value"] == "odd"
  assert "completed" in faults["status"]["message"]
  most = query_lib.MAX_ID
  assert faults["step_id"]["message"] == f"give a number in [0, {most}]"


@pytest.mark.parametrize(
  "model, text, field, says",
  [
    (rollout_list.RolloutListQuery, "from=nan", "from", "a number"),
    (rollout_list.RolloutListQuery, "order=left", "order", "up or down"),
    (rollout_list.RolloutListQuery, "after=1", "after", "the next page"),
    (run_pages.CompareQuery, "run=1", "run", "2 to 10 runs"),
    (run_pages.CompareQuery, "run=1&run=1", "run", "not 1"),
    (run_pages.RunsQuery, f"tag={'x' * 51}", "tag", "1 to 50"),
    (query_lib.EventsQuery, f"after={10**30}", "after", "a number"),
    (query_lib.TrainingsQuery, "after=%21", "after", "`next`"),
  ],
)
def test_a_wrong_parameter_is_refused(model, text, field, says):
  assert says in refused(model, text)[field]["message"]


def test_an_empty_field_of_a_form_is_no_value_and_of_the_api_is_a_wrong_one():
  text = datastructures.QueryParams("status=&from=&sort=&other=1")
  page = rollout_list.RolloutListQuery.read(text)
  assert page == rollout_list.RolloutListQuery()
  assert "status" in refused(query_lib.RolloutsQuery, "status=")


def test_the_document_has_the_bounds_of_the_models():
  operation = openapi.Operation(
    "GET", "/x", "x", "X.", query=query_lib.RolloutsQuery
  )
  document = openapi.document([operation], {"": 1})
  parameters = {
    p["name"]: p["schema"] for p in document["paths"]["/x"]["get"]["parameters"]
  }
  assert parameters["limit"] == {
    "type": "integer",
    "minimum": 1,
    "maximum": 500,
    "default": 50,
  }
  assert parameters["success"] == {"type": "integer", "enum": [0, 1]}
  assert parameters["after"] == {"type": "string", "maxLength": 16384}
  assert "completed" in parameters["status"]["enum"]
  assert parameters["task_id"]["maximum"] == query_lib.MAX_ID
