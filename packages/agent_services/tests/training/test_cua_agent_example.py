"""examples/cua_agent: the former trainer's names, over this package's parts."""

import dataclasses
import importlib
import os
import pathlib
import re
import sys

import gym_servers
import monitor_server
import pytest
import run_services

ROOT = pathlib.Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples" / "cua_agent"
PARTS = (
    "genv_execution", "genv_http_client", "mini_agent_runner",
    "rollout_logger", "gbox_mini_agent_client", "task_loader",
    "gym_task_source", "demo_tasks", "ingest_client", "monitor_context",
    "monitor_training_hooks", "http_rollout_recorder", "event_tools",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  for name in (
    "GBOX_MINI_AGENT_BASE_URL",
    "TUNIX_MONITOR_URL",
    "TUNIX_MONITOR_TOKEN",
  ):
    monkeypatch.delenv(name, raising=False)


def load(name):
  return importlib.import_module(f"cua_agent.{name}")


def test_each_part_is_there_and_none_needs_tinker(monkeypatch):
  monkeypatch.setitem(sys.modules, "tinker", None)
  monkeypatch.setitem(sys.modules, "tinker_cookbook", None)
  for name in ("train", "trainer", "configs", "cua_workflow", "dataset"):
    load(name)
  for name in PARTS:
    module = load(f"cua_rl.{name}")
    for public in getattr(module, "__all__", ()):
      assert hasattr(module, public)
  for path in [
    *EXAMPLE.rglob("*.py"),
    *(ROOT / "tunix").rglob("*.py"),
    *ROOT.glob("packages/*/*/**/*.py"),
  ]:
    assert not re.search(
      r"^\s*(import|from) tinker", path.read_text(encoding="utf-8"), re.M
    ), path


def test_settings_are_checked_and_also_read_from_the_environment(monkeypatch):
  configs = load("configs")
  with pytest.raises(ValueError, match="rollout_backend='own'"):
    configs.CUAFields(rollout_backend="own")
  with pytest.raises(ValueError, match="split_type='test'"):
    configs.CUAFields(split_type="test")
  monkeypatch.setenv("TUNIX_MONITOR_URL", "http://m:1")
  monkeypatch.setenv("TUNIX_MONITOR_TOKEN", "secret")
  fields = configs.CUAFields()
  assert fields.monitor_base_url == "http://m:1"
  assert "secret" not in repr(fields) + str(dataclasses.asdict(fields))
  fields = configs.CUAFields(project_token="another")
  assert os.environ["TUNIX_MONITOR_TOKEN"] == "another"
  assert "another" not in repr(fields) + str(dataclasses.asdict(fields))
  assert fields.max_concurrent_rollouts == 8

  @dataclasses.dataclass
  class Served:
    model: str = ""
    max_model_len: int | None = 32768

  @dataclasses.dataclass
  class Theirs:
    experiment_name: str = "e"
    total_train_epochs: int = 1
    tokenizer_path: str = "/m"
    vllm: Served = dataclasses.field(default_factory=Served)

  both = configs.config_class(Theirs)(experiment_name="x", max_turns=5)
  assert both.experiment_name == "x" and both.max_turns == 5
  arguments = both.workflow_arguments()
  assert arguments["max_turns"] == 5
  assert arguments["tokenizer"] == arguments["processor"] == "/m"
  assert "secret" not in str(arguments)
  # What a rollout of screenshots needs of vLLM is among its arguments.
  monkeypatch.setenv("CUA_MEDIA_DOMAINS", "a.example,b.example")
  served = configs.config_class(Theirs)().vllm
  assert dataclasses.asdict(served) == {
    "model": "",
    "max_model_len": 262144,
    "limit_mm_per_prompt": '{"image": 64}',
    "allowed_media_domains": ["a.example", "b.example"],
  }


def test_the_entry_script_builds_all_but_areal_s_trainer(capsys, monkeypatch):
  train, configs = load("train"), load("configs")
  with gym_servers.serving() as (url, _):
    fields = dataclasses.fields(configs.CUAFields)
    place = next(f for f in fields if f.name == "gym_base_url")
    assert place.default == "http://127.0.0.1:5010"
    result = configs.CUAFields
    monkeypatch.setattr(configs, "CUAFields", lambda: result(gym_base_url=url))
    assert train.main(["--dry-run"]) == 0
    assert re.search(
      r"\d+ tasks to train on, \d+ held out", capsys.readouterr().out
    )
    rows = [
      load("dataset").rows(result(gym_base_url=url), s)
      for s in ("train", "eval")
    ]
  ids = [{r["task_id"] for r in part} for part in rows]
  assert ids[0] and ids[1] and not ids[0] & ids[1]
  assert {"task_id", "description", "name", "gym_id", "gym_base_url"} <= set(
    rows[0][0]
  )
  monkeypatch.setitem(sys.modules, "areal", None)
  monkeypatch.setitem(sys.modules, "areal.api", None)
  assert train.main(["--config", "x.yaml"]) == 2
  assert "areal" in capsys.readouterr().err
  with pytest.raises(SystemExit):
    train.main([])
  assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("failure", [None, RuntimeError("the actor died")])
def test_the_monitor_has_the_run_and_how_it_ended(
  tmp_path, monkeypatch, failure
):
  train, configs = load("train"), load("configs")
  context = load("cua_rl.monitor_context")
  monkeypatch.setenv("TUNIX_MONITOR_SPOOL", str(tmp_path / "spool"))
  rows = [{"task_id": "t", "name": "t", "description": "Do it."}]
  with monitor_server.sqlite_server(tmp_path / "monitor") as monitor:
    config = configs.CUAFields(monitor_base_url=monitor.url)
    client = train.start_monitor(config, rows)
    assert context.get_training_id() and context.get_ingest_client() is client
    train.end_monitor(client, failure)
    assert context.get_training_id() is None
    assert context.get_ingest_client() is None
    (training,) = monitor.rows("training")
    assert len(monitor.rows("task")) == 1
  if failure is None:
    assert training["status"] == "completed"
  else:
    assert training["status"] == "failed"
    assert "the actor died" in training["error_message"]
  # Another process of AReaL's launcher records nothing.
  monkeypatch.setenv("RANK", "1")
  assert train.start_monitor(config, rows) is None


async def test_a_run_is_played_summed_up_and_written_without_pixels(tmp_path):
  runner = load("cua_rl.mini_agent_runner")
  client_lib = load("cua_rl.gbox_mini_agent_client")
  text = run_services.call(action="answer", text="42")
  task = {"task_id": "t", "family": "click-button"}
  with (
    run_services.scripted(lambda *_: (200, run_services.completion(text))) as (
      model,
      _,
    ),
    run_services.serving() as (url, _),
  ):
    client = client_lib.RunServiceClient(url, poll_s=0.02)
    result, events = await runner.run_mini_agent_rollout(client, {
        "task": "What is it?", "maxSteps": 3, "images": "base64",
        "model": {"baseUrl": model, "name": "m"},
        "env": {"type": "gym", "gym": "desktop", "task": task, "width": 128,
                "height": 96},
    })  # fmt: skip
    assert result == {
      "task_success": True,
      "task_completed": True,
      "num_turns": 1,
      "max_turns": 3,
      "errors": [],
      "result_message": "finished",
      "answer": "42",
    }
    failed, _ = await runner.run_mini_agent_rollout(client, {"task": ""})
    assert not failed["task_completed"] and "422" in failed["errors"][0]
    await client.aclose()
  log = load("cua_rl.rollout_logger").RolloutLogger(tmp_path, "run")
  log.write(events)
  written = log.path.read_text(encoding="utf-8")
  assert len(written.splitlines()) == len(events)
  assert "base64" not in written.replace('"images": "base64"', "")
