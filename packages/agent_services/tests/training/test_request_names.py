"""No name in a request becomes code, at any service's door."""

import ast
import contextlib
import importlib
import json
import pathlib
import subprocess
import sys
import time

from agent_services.rollout_buffer import __main__ as buffer_command
from agent_services.rollout_buffer import generating
from agent_services.rollout_buffer import generators_run
from agent_services.rollout_buffer import plugins
from agent_services.rollout_buffer import rights
from agent_services.run_service import schemas as run_schemas
from agent_services.serving import image_proxy
from agent_services.serving import media
import buffer_services
import gym_servers
import httpx
import monitor_server
import poisoned_names
import pytest
import run_services
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser import tool_parser

ROOM = pathlib.Path(registry.__file__).parents[1]
BUFFER = pathlib.Path(buffer_command.__file__).parent
SERVICES = BUFFER.parents[1]
TASK = gyms.get("desktop").make_tasks((), {}).train_task("click-button", 0, 0)


@pytest.fixture(name="touched")
def _touched(tmp_path, monkeypatch):
  return poisoned_names.plant(tmp_path, monkeypatch)


@pytest.fixture(name="recorder")
def _recorder(monkeypatch, touched):
  del touched
  return poisoned_names.Recorder(monkeypatch)


def posting(url, method="POST"):
  client = httpx.Client(timeout=60, trust_env=False, verify=False)

  def send(body):
    return client.request(method, url, json=body).status_code

  return send


# --- run service --------------------------------------------------------------


def run_body(url):
  return {
      "task": "Click the button.", "agent": "tool",
      "agentConfig": {"parser": "computer_use", "systemPrompt": "p"},
      "maxSteps": 1, "standardActionSpace": "pc", "images": "base64",
      "model": {"baseUrl": url, "name": "m", "apiKey": "k"},
      "env": {
          "type": "gym", "gym": "desktop", "task": TASK.to_json(),
          "width": 128, "height": 96, "settings": {"difficulty": 1},
          "gymBaseUrl": url, "gymId": "desktop", "executionId": "e",
      },
  }  # fmt: skip


@contextlib.contextmanager
def run_service():
  """(url, body) of a service, with a model server."""
  answers = lambda *_: (200, run_services.completion("done"))
  with (
    run_services.scripted(answers) as (model, _),
    run_services.serving(client_settings=("difficulty",)) as (url, _),
  ):
    yield f"{url}/runs", run_body(f"{model}/v1")


def walk_run_service(recorder, touched):
  with run_service() as (url, body):
    answer = httpx.post(url, json=body)
    assert answer.status_code == 200, answer.text
    requests = list(
      poisoned_names.bodies(body, run_schemas.CreateBody.model_json_schema())
    )
    genv = {**body, "env": {**body["env"], "type": "genv"}}
    requests += poisoned_names.bodies(genv)
    return poisoned_names.walk(recorder, posting(url), requests, touched)


def test_a_run_names_no_code(recorder, touched):
  faults, lookups = walk_run_service(recorder, touched)
  assert not faults
  assert lookups >= 3  # The grammar's name reaches a registry.


def test_the_walk_reports_a_name_that_is_looked_up_as_the_operators(
  recorder, touched, monkeypatch
):
  make = tool_parser.make_tool_parser
  monkeypatch.setattr(
    run_schemas.tool_parser,
    "make_tool_parser",
    lambda parser, source="request": make(parser, "operator"),
  )
  with pytest.raises(AssertionError, match="parser"):
    faults, _ = walk_run_service(recorder, touched)
    assert not faults


@pytest.mark.parametrize("changes, problem", (
    ({"settings": {"difficulty": 1, "time_decay": 2}},
     "env.settings.time_decay is not a client's to set; choose from"),
    ({"settings": {"args": ["x"]}}, "--client-settings to list it"),
    ({"gym": "miniwob"}, "env.gym='miniwob' is not played here"),
    ({"gym": "gymnasium", "task": {**TASK.to_json(), "family":
                                   f"{poisoned_names.MODULE}:Env-v0"}},
     "is a path to code, which a request may not name"),
))  # fmt: skip
def test_a_run_chooses_among_what_the_operator_lists(touched, changes, problem):
  pytest.importorskip("gymnasium")
  with run_services.serving(
    gyms=("desktop", "gymnasium"), client_settings=("difficulty",)
  ) as (url, _):
    body = run_body(url)
    body["env"] |= changes
    answer = httpx.post(f"{url}/runs", json=body)
    assert answer.status_code == 422 and problem in answer.json()["detail"]
  assert not touched.exists()


def test_a_run_service_lets_no_run_choose_an_option_that_names_code():
  with pytest.raises(ValueError, match="--client-settings='reset' would let"):
    run_services.app_lib.App(gyms=("osworld",), client_settings=("reset",))


# --- gym server ---------------------------------------------------------------


def operations(document):
  """(method, path, schema of the body) of an OpenAPI document."""
  for path, methods in document["paths"].items():
    for method, one in methods.items():
      content = one.get("requestBody", {}).get("content", {})
      schema = content.get("application/json", {}).get("schema")
      if schema is not None:
        yield method.upper(), path, {**document, **schema}


def test_a_client_of_a_gym_server_names_no_code(recorder, touched):
  served = gym_servers.desktop(client_settings=("difficulty",))
  tried = []
  with gym_servers.serving(served, capacity=256) as (url, app):
    document = httpx.get(f"{url}/openapi.json").json()
    for method, path, schema in operations(document):
      created = httpx.post(f"{url}/api/v1/desktop/tasks/001", timeout=30)
      execution = created.json()["execution_id"]
      body = {}
      if path.endswith("/tasks/{identifier}"):
        body = {"options": {"gym": {"difficulty": 1, "name": "desktop"}}}
      place = path.format(
        gym_id="desktop", identifier="001", execution_id=execution
      )
      faults, _ = poisoned_names.walk(
        recorder,
        posting(url + place, method),
        poisoned_names.bodies(body, schema),
        touched,
      )
      assert not faults, path
      tried.append(path)
      for one in app.store.live():
        httpx.post(
          f"{url}/api/v1/desktop/executions/{one.id}/terminate", timeout=30
        )
  assert len(tried) >= 3


def test_names_in_addresses_of_a_gym_server_are_no_code(recorder, touched):
  with gym_servers.serving() as (url, _):
    for name in poisoned_names.NAMES:
      for path in (f"/api/v1/{name}/tasks", f"/api/v1/desktop/tasks/{name}"):
        assert httpx.post(url + path, timeout=30).status_code in (404, 405, 422)
  assert not recorder.imports and not touched.exists()


@pytest.mark.parametrize("option", ("computer", "evaluator", "options"))
def test_a_gym_server_lets_no_client_choose_an_option_that_names_code(option):
  with pytest.raises(ValueError, match=f"client_settings='{option}'"):
    gyms.get("computer").check_client_settings((option,), "client_settings")


# --- policy server ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_request_for_an_answer_names_no_code(recorder, touched):
  import rollout_server  # pylint: disable=g-import-not-at-top

  message = {"role": "user", "content": "x"}
  rights_of = {"model": rollout_server.MODEL}
  bases = {
    "chat/completions": {**rights_of, "messages": [message], "max_tokens": 1},
    "completions": {**rights_of, "prompt": "x", "max_tokens": 1},
    "responses": {**rights_of, "input": "x", "max_output_tokens": 1},
    "messages": {**rights_of, "messages": [message], "max_tokens": 1},
  }
  tried = []
  with rollout_server.Running(features=("details", "grammar")) as running:
    document = httpx.get(f"{running.url}/openapi.json").json()
    for method, path, schema in operations(document):
      if "{session}/v1" in path:
        continue  # As without a session.
      base = bases.get(path.removeprefix("/v1/"), {})
      session = rollout_server.start(running)["session_id"]
      if "session" in path:
        base = {"session_id": session}
      faults, _ = poisoned_names.walk(
        recorder,
        posting(running.url + path.format(session=session), method),
        poisoned_names.bodies(base, schema, poisoned_names.NAMES[:1]),
        touched,
      )
      assert not faults, path
      tried.append(path)
  assert {f"/v1/{name}" for name in bases} < set(tried)


# --- monitor ------------------------------------------------------------------


def test_a_client_of_the_monitor_names_no_code(recorder, touched, tmp_path):
  batch = monitor_server.joined(
    monitor_server.base(), monitor_server.episode("r1", status="completed")
  )
  values = {"id": 1, "turn": 1, "obs": 1, "name": "r1", "sha256": "0" * 64}
  tried = []
  with monitor_server.sqlite_server(tmp_path) as server:
    assert server.post(batch)
    document = httpx.get(f"{server.url}/api/v1/openapi.json").json()
    for method, path, schema in operations(document):
      place = path
      for name, value in values.items():
        place = place.replace(f"{{{name}}}", str(value))
      base = batch if path.endswith("/batch") else {}
      faults, _ = poisoned_names.walk(
        recorder,
        posting(server.url + place, method),
        poisoned_names.bodies(base, schema, poisoned_names.NAMES[:1]),
        touched,
      )
      assert not faults, path
      tried.append(path)
  assert "/api/ingest/batch" in tried


# --- image proxy --------------------------------------------------------------


def test_a_client_of_the_image_proxy_names_no_code(recorder, touched):
  part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
  body = {
      "model": "m", "tools": [{"type": "function", "function": {"name": "f"}}],
      "messages": [{"role": "user", "content": [part]}],
      "input": [{"role": "user", "content": [
          {"type": "input_image", "image_url": "data:image/png;base64,x"}]}],
      "image_data": ["data:image/png;base64,x"],
  }  # fmt: skip
  with run_services.scripted(lambda *_: (200, {})) as (upstream, _):
    proxy = image_proxy.ImageProxy(upstream, media.MediaLimits())
    with http_server.LoopbackServer(proxy.asgi) as server:
      for path in ("/v1/chat/completions", "/v1/responses", "/generate"):
        faults, _ = poisoned_names.walk(
          recorder,
          posting(server.url + path),
          poisoned_names.bodies(body),
          touched,
        )
        assert not faults, path


# --- rollout buffer -----------------------------------------------------------


def start_body(tasks, url, task_type):
  return {
      "task_type": task_type, "num_repeat_per_sample": 1, "num_epoch": 1,
      "num_process": 1, "remote_engine_url": url, "remote_buffer_url": url,
      "input_file": str(tasks), "tokenizer_path": str(tasks.parent),
      "max_tokens": 4, "sampling_params": {"temperature": 1.0},
      "skip_instance_ids": [], "group_rules": "raw", "keep_items": False,
      "group_timeout_seconds": 60, "min_valid_group_size_ratio": 1,
      "min_valid_item_size_ratio": 1, "min_timeout_group_size_ratio": 1,
      "gym": "desktop", "gym_settings": {"difficulty": 1}, "width": 128,
      "height": 96, "max_turns": 1, "agent": "tool",
      "agent_config": {"parser": "computer_use"}, "model": "m",
      "image_token_id": 9, "reward": "numeric_match", "rollout_id": "r",
      "buffer": "b", "remote_engine_key": "k", "allowed_items": 100,
  }  # fmt: skip


def test_the_body_of_a_start_has_every_key_that_a_generator_reads(tmp_path):
  read = set()
  for file in (*plugins.BUILT_IN.glob("*.py"), BUFFER / "generating.py"):
    for node in ast.walk(ast.parse(file.read_text())):
      if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "data":
        read.add(ast.literal_eval(node.slice))
      elif isinstance(node, ast.Call) and ast.unparse(node.func) == "data.get":
        if isinstance(node.args[0], ast.Constant):
          read.add(node.args[0].value)
  assert {"gym", "reward", "input_file"} <= read
  assert read <= set(start_body(tmp_path / "t", "http://x", "desktop"))


def finished(running, name="b"):
  """The generator's state once it has ended, with its log."""
  due = time.monotonic() + 60
  while time.monotonic() < due:
    stats = running.stats(name)["generator"]
    if stats["state"] != "running":
      return stats
    time.sleep(0.05)
  raise AssertionError("the generator did not end")


class RunHere:
  """A generator's run in this process, where the recorder sees its look-ups."""

  running, error = False, ""

  def __init__(self, generator, payload, **options):
    del options
    self.task_type = generator.task_type
    self.state = "finished"
    try:
      plugins.load(generator.path).run_rollout(dict(payload))
    except (ValueError, ExceptionGroup) as error:  # A `GeneratorError`.
      inner = getattr(error, "exceptions", (error,))
      self.state, self.error = "failed", "; ".join(map(str, inner))

  def describe(self):
    return {
      "task_type": self.task_type,
      "state": self.state,
      "error": self.error,
    }

  def stop(self):
    pass


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task_type", ("external", "math", "desktop"))
def test_a_start_names_no_code(
  recorder, touched, tmp_path, task_type, monkeypatch
):
  """Also not to the generator; each runs here, and one as a process."""
  process = generators_run.GeneratorRun
  monkeypatch.setattr(generators_run, "GeneratorRun", RunHere)
  monkeypatch.setattr(generating, "_PAUSE_S", 0.0)
  tasks = tmp_path / "tasks.jsonl"
  tasks.write_text(
      json.dumps({"instance_id": "a", "task": TASK.to_json(), "answer": "4",
                  "prompt": "2 + 2?"}) + "\n"
  )  # fmt: skip
  listed = rights.Rights(
    input_roots=(str(tmp_path),), client_settings=("difficulty",)
  )
  answers = lambda *_: (200, run_services.completion("done"))
  with (
    run_services.scripted(answers) as (model, _),
    buffer_services.Running(tmp_path / "b", rights=listed) as running,
  ):
    body = start_body(tasks, model, task_type)
    body["remote_buffer_url"] = running.url
    assert running.post("/start_rollout", body).status_code == 200
    assert finished(running)["state"] == "finished", finished(running)

    def send(body):
      status = running.post("/start_rollout", body).status_code
      if status == 200:  # The generator may refuse what the service accepts.
        name = body.get("buffer")
        end = finished(running, name if isinstance(name, str) else "b")
        status = 200 if end["state"] == "finished" else 422
      return status

    faults, _ = poisoned_names.walk(
      recorder, send, poisoned_names.bodies(body), touched
    )
    assert not faults
    monkeypatch.setattr(generators_run, "GeneratorRun", process)
    send(
      {
        **body,
        **dict.fromkeys(("agent", "model", "x"), poisoned_names.NAMES[0]),
      }
    )
  assert not touched.exists()


@pytest.mark.parametrize(
  "changes, problem",
  (
    ({"gym": "subprocess:Popen"}, "gym='subprocess:Popen' is not played here"),
    ({"gym": "os:system"}, "--gyms to list it"),
    ({"gym": "miniwob"}, "choose one of desktop"),
    ({"gym_settings": {"args": ["touch"]}}, "gym_settings.args is not a"),
    ({"gym_settings": ["args"]}, "must be an object"),
    ({"input_file": "/etc/passwd"}, "--input-roots to list its folder"),
    ({"input_file": "../../etc/passwd"}, "outside of the folders"),
    ({"input_file": "a\0b"}, "must be the path of a file"),
    ({"tokenizer_path": "/etc"}, "tokenizer_path='/etc' is outside"),
    ({"remote_engine_url": "http://10.0.0.1:80"}, "host '10.0.0.1' is not one"),
    ({"remote_engine_url": "http://a.example@127.0.0.1"}, "must have no user"),
    ({"remote_buffer_url": "http://a.example"}, "--allow-hosts to list it"),
  ),
)
def test_a_start_is_refused_what_the_operator_did_not_list(
  tmp_path, changes, problem
):
  listed = rights.Rights(input_roots=(str(tmp_path),))
  with buffer_services.Running(tmp_path / "b", rights=listed) as running:
    body = {"task_type": "desktop", "num_repeat_per_sample": 1, **changes}
    answer = running.post("/start_rollout", body)
    assert answer.status_code == 422 and problem in answer.json()["detail"]
    # None has begun, and the buffer is as it was.
    assert running.stats()["generator"] is None


def test_the_host_header_of_a_start_lists_no_host(tmp_path):
  with buffer_services.Running(tmp_path / "b", token="t") as running:
    running.service.url = ""  # As in a program that names no address.
    body = {
      "task_type": "desktop",
      "num_repeat_per_sample": 1,
      "remote_buffer_url": "http://a.example",
    }
    headers = {"authorization": "Bearer t", "host": "a.example"}
    answer = running.post("/start_rollout", body, headers=headers)
    assert answer.status_code == 422, answer.text
    assert "--allow-hosts to list it" in answer.json()["detail"]
    assert running.service.url == running.url


def test_the_host_header_of_a_run_decides_no_address():
  with run_services.serving(token="t", client_settings=("difficulty",)) as (
    url,
    app,
  ):
    headers = {"authorization": "Bearer t", "host": "a.example"}
    answer = httpx.post(
      f"{url}/runs", json=run_body("http://127.0.0.1:9"), headers=headers
    )
    assert answer.status_code == 200, answer.text
    assert app.urls.base_url == url


def test_a_link_out_of_a_listed_folder_is_refused(tmp_path):
  inside, outside = tmp_path / "in", tmp_path / "out"
  inside.mkdir()
  outside.mkdir()
  (outside / "t.jsonl").write_text('{"instance_id": "a"}\n')
  (inside / "link").symlink_to(outside)
  (inside / "t.jsonl").write_text('{"instance_id": "a"}\n')
  (inside / "loop").symlink_to(inside / "loop")
  listed = rights.Rights(input_roots=(str(inside),))

  def check(path):
    listed.check({"input_file": str(path)}, ("input_file",), "")

  check(inside / "t.jsonl")
  check(inside / ".." / "in" / "t.jsonl")
  for path in (
    inside / "link" / "t.jsonl",
    inside / ".." / "out",
    inside.parent / "in2",
  ):
    with pytest.raises(ValueError, match="outside of the folders"):
      check(path)
  with pytest.raises(ValueError, match="input_file=.*(outside|resolved)"):
    check(inside / "loop" / "t.jsonl")


@pytest.mark.parametrize("url", (
    "http://gpu-1:30000/v1", "http://any:1", "http://127.0.0.1:1",
    "http://[::1]:8", "http://localhost:7", "http://own:9",
    "http://[fd00::1]:80",
))  # fmt: skip
def test_addresses_of_listed_hosts_are_called(url):
  listed = rights.Rights(allow_hosts=("GPU-1:30000", "any", "[fd00::1]"))
  keys = ("remote_engine_url",)
  listed.check({"remote_engine_url": url}, keys, "http://own:9")
  with pytest.raises(ValueError, match="host 'gpu-1' is not one"):
    listed.check({"remote_engine_url": "http://gpu-1:22"}, keys, "")


def test_a_generator_plays_no_gym_that_its_service_does_not_list(tmp_path):
  """The lists come with the order: a client's key of that name is replaced."""
  rows = tmp_path / "t.jsonl"
  rows.write_text('{"instance_id": "a", "family": "click-button"}\n')
  listed = rights.Rights(gyms=("miniwob",), input_roots=(str(tmp_path),))
  with buffer_services.Running(tmp_path / "b", rights=listed) as running:
    answer = running.post("/start_rollout", {
        "task_type": "desktop", "num_repeat_per_sample": 1, "buffer": "b",
        "input_file": str(rows), "remote_engine_url": "http://127.0.0.1:1",
        "model": "m", rights.ALLOWED: {"gyms": ["desktop"]},
    })  # fmt: skip
    assert answer.status_code == 200, answer.text
    stats = finished(running)
  assert stats["state"] == "failed"
  assert "gym='desktop' is not played here" in stats["error"]


@pytest.mark.parametrize(
  "arguments, problem",
  (
    (("--gyms", "desktopp"), "--gyms: unknown gym 'desktopp'"),
    (("--gyms", "os:system_"), "--gyms: module 'os' has no 'system_'"),
    (
      ("--gyms", "computer", "--client-settings", "computer"),
      "--client-settings='computer' would let a client choose code",
    ),
    (("--input-roots", "/nowhere"), "--input-roots=/nowhere is no folder"),
  ),
)
def test_a_list_of_the_operators_that_cannot_be_ends_the_command(
  tmp_path, capsys, arguments, problem
):
  words = ["--dir", str(tmp_path), "--port", "0", *arguments]
  assert buffer_command.main(words) == 2
  message = capsys.readouterr().err
  assert problem in message and message.count("\n") == 1


# --- the kind -----------------------------------------------------------------

DOORS = (
  "agent_services/run_service",
  "agent_services/serving",
  "agent_services/rollout_buffer",
  "environments/gym_server",
  "reporting",
  "api/runs.py",
  "api/episodes.py",
)
OPERATORS = {
  ("agent_services/run_service/app.py", "__init__"),  # --gyms
  ("environments/gym_server/gym_app.py", "_settings"),  # ServedGym.gym
  ("environments/gym_server/catalog.py", "__init__"),
  ("environments/gym_server/catalog.py", "_check_settings"),
  ("agent_services/run_service/environments.py", "make_environment"),
  ("agent_services/run_service/environments.py", "_gym"),  # In --gyms.
  ("agent_services/serving/__main__.py", "_checked"),  # --tool-parser
  ("agent_services/serving/server.py", "make_app"),
  ("agent_services/rollout_buffer/__main__.py", "_rights"),  # --gyms
  ("agent_services/rollout_buffer/generators/desktop_generator.py", "_tasks"),
}
"""(file, function) of a door that looks a name up as the operator's: each
reads it from the command line, or from a list of it."""


def _place(door):
  """File or folder of a room, which may be a package of its own now."""
  name = door.removesuffix(".py").replace("/", ".")
  if not name.startswith("agent_services"):
    name = f"tunix.rl.multi_turn.{name}"
  module = importlib.import_module(name)
  file = pathlib.Path(module.__file__)
  return file.parent if file.name == "__init__.py" else file


def test_services_look_up_names_as_the_operators_where_that_is_reviewed():
  callers = set()
  for door in DOORS:
    place = _place(door)
    for file in [place] if place.suffix else sorted(place.rglob("*.py")):
      for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
          isinstance(one, ast.Constant) and one.value == "operator"
          for one in ast.walk(node)
        ):
          inside = "" if file == place else f"/{file.relative_to(place)}"
          callers.add((f"{door}{inside}", node.name))
  assert callers == OPERATORS


def test_a_request_is_the_default_of_every_lookup(touched):
  with pytest.raises(ValueError, match="path to code, which only the operator"):
    gyms.get(poisoned_names.NAMES[0])
  for name in poisoned_names.NAMES:
    for call in (gyms.make, gyms.from_config, tool_parser.get_tool_parser):
      with pytest.raises(ValueError, match="choose a registered name"):
        call(name)
  assert not touched.exists()
  assert gyms.get(poisoned_names.NAMES[0], "operator").make is not None
  assert touched.exists()


def test_a_row_of_tasks_names_no_code(touched):
  from tunix.rl.multi_turn.environments import cua_env  # pylint: disable=g-import-not-at-top

  row = {"task": TASK, "gym": "desktop"}
  for changes in (
    {"gym": poisoned_names.NAMES[0]},
    {"gym": {"name": poisoned_names.NAMES[0]}},
    {"action_parser": poisoned_names.NAMES[0]},
    {"action_parser": {"name": poisoned_names.NAMES[0]}},
    {"reward": poisoned_names.NAMES[0]},
  ):
    with pytest.raises(ValueError, match="path to code"):
      cua_env.CUAEnv.from_dict({**row, **changes})
  assert not touched.exists()


def test_a_strangers_run_is_shown_without_its_names(touched, tmp_path):
  """`mt.load` and the report read a run's config.yaml, and import nothing."""
  run = tmp_path / "run"
  run.mkdir()
  name = poisoned_names.NAMES[0]
  (run / "config.yaml").write_text(
    f"run:\n  imports: [{poisoned_names.MODULE}]\n"
    f"gym:\n  name: {name}\nagent:\n  name: {name}\n"
  )
  (run / "metrics.jsonl").write_text('{"step": 1}\n')
  script = (
    "import tunix.rl.multi_turn as mt\n"
    f"run = mt.load({str(run)!r})\n"
    "print(run.config['gym']['name'], run.status, len(run.episodes))\n"
    "repr(run), run._repr_html_()\n"
  )
  process = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert process.returncode == 0, process.stderr
  assert name in process.stdout and not touched.exists()
