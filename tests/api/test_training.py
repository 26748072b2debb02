"""Runs made and read from Python: in a script, and in a real Jupyter kernel."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import textwrap
import threading

import pytest
import small_runs
import tunix.rl.multi_turn as mt
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.api import cell
from tunix.rl.multi_turn.api import training
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(400)


def settings_of(*overrides: str) -> dict:
  """The overrides of the command as keywords."""
  pairs = (o.partition("=")[::2] for o in overrides)
  return {key: yaml.safe_load(value) for key, value in pairs}


SMALL = settings_of(
  *small_runs.SMALL,
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "warm_start.steps=2",
  "warm_start.batch_size=4",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  directory = tmp_path_factory.mktemp("runs")
  run = mt.train(
    steps=2,
    name="a",
    gym="desktop",
    run={"dir": directory},
    wait=False,
    **SMALL,
  )
  run.drawn_at_once = run._repr_html_()
  return run.wait()


def test_a_run_is_drawn_as_what_it_is(run):
  assert "running" in run.drawn_at_once
  assert "unfinished" not in run.drawn_at_once
  assert "completed" in run._repr_html_()


def test_a_call_trains_and_returns_the_run(run):
  assert isinstance(run, mt.TrainingRun) and run.done
  assert run.status == "completed" and run.error is None
  assert run.config["learner"]["steps"] == 2
  assert list(run.metrics.index) == [1, 2]
  assert set(run.evaluations) == {"initial", "warm_start", "final"}
  assert (run.policy / "model.safetensors").exists()
  assert "step 2/2" in repr(run)


@pytest.mark.slow
def test_a_run_is_read_again_and_resumed(run):
  read = mt.load(run.directory)
  assert read.metrics.equals(run.metrics)
  more = read.resume(steps=3)
  assert more.directory == run.directory and more.step == 3
  assert more.status == "completed"
  with pytest.raises(mt.ConfigError, match="has made 3 updates.*steps=5"):
    read.resume(steps=2)  # Two more were meant.


def test_of_two_runs_that_start_at_once_one_is_refused(tmp_path, monkeypatch):
  """The first is still being built when the second begins."""
  building, go = threading.Event(), threading.Event()

  def build(config):
    building.set()
    assert go.wait(60)
    raise mt.ConfigError([f"{config.run.name} cannot be built"])

  monkeypatch.setattr(training.train_lib, "build", build)
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    first = thread.submit(
      mt.train, steps=1, gym="desktop", run={"dir": tmp_path}
    )
    assert building.wait(60)
    for call in (mt.train, mt.evaluate):
      with pytest.raises(mt.BusyError, match="a run is being built") as refused:
        call(gym="desktop")
      assert "\n" not in str(refused.value)
      assert len(refused.value._render_traceback_()) == 1
    go.set()
    with pytest.raises(mt.ConfigError, match="cannot be built"):
      first.result(60)
  cell.take("the process is free again").release()
  assert not list(tmp_path.iterdir())


def test_a_dry_run_is_refused_before_anything_is_built(monkeypatch):
  def build(config):
    raise AssertionError(f"{config.run.name} was built")

  monkeypatch.setattr(training.train_lib, "build", build)
  with pytest.raises(mt.ConfigError, match="leave it out"):
    mt.train(steps=1, gym="desktop", run={"dry_run": True})


def test_a_run_that_is_not_handed_over_closes_its_engine(tmp_path, monkeypatch):
  built = []

  def refuse(run, place):
    built.append(run)
    raise KeyboardInterrupt

  monkeypatch.setattr(training, "TrainingRun", refuse)
  with pytest.raises(KeyboardInterrupt):
    mt.train(steps=1, gym="desktop", run={"dir": tmp_path}, **SMALL)
  assert not built[0].engine.healthy
  cell.take("the process is free again").release()


@pytest.mark.slow
def test_the_trained_policy_is_evaluated_and_plays(run, tmp_path):
  evaluation = mt.evaluate(
    run,
    "enter-text",
    modes=["greedy"],
    dir=tmp_path,
    **{"eval.episodes_per_task": 2},
  )
  again = mt.play(run, "enter-text", mode="greedy", index=1)
  (same,) = [e for e in evaluation.episodes if e.task_id == again.task_id]
  assert again.status is same.status and again.turns == same.turns
  one, two = (e.trajectory.sequences for e in (again, same))
  assert [s.tokens.tolist() for s in one] == [s.tokens.tolist() for s in two]


def reward_of_a_module(trajectory):
  del trajectory
  return 1.0


def test_settings_are_those_of_the_command(tmp_path):
  argv = training.arguments(
    {"learner": {"rows": 4}},
    {
      "steps": 3,
      "reward": reward_of_a_module,
      "name": "007",
      "run": {"dir": tmp_path},
      "tasks": ("click-color",),
      "queue.path": None,
    },
  )
  config = config_lib.load_config([*argv, "gym=desktop"])
  assert config.learner.rows == 4 and config.learner.steps == 3
  assert config.run.name == "007" and config.run.dir == str(tmp_path)
  assert config.environment.reward == f"{__name__}:reward_of_a_module"


@pytest.mark.parametrize(
  "config, settings, problem",
  [
    (None, {"stepz": 3}, "unknown key 'stepz'"),
    (None, {"steps": "many"}, "learner.steps='many' must be"),
    (None, {"steps": float("nan")}, "steps=nan"),
    (None, {"reward": lambda t: 1.0}, "define it at the top"),
    (None, {"reward": object()}, "an? object cannot be written"),
    ("steps=3", {}, "settings are keywords"),
    (None, {"run": {"dry_run": True}, "steps": 1}, "leave it out"),
  ],
)
def test_a_mistake_is_one_clear_error(config, settings, problem, tmp_path):
  settings.setdefault("run", {})["dir"] = str(tmp_path)
  with pytest.raises(mt.ConfigError, match=problem):
    mt.train(config, **{**SMALL, **settings})


def test_a_function_that_was_defined_anew_is_refused():
  old = type(reward_of_a_module)(
    reward_of_a_module.__code__, globals(), "reward_of_a_module"
  )
  with pytest.raises(ValueError, match="not this object any more"):
    training.importable_name(old)


def test_the_command_takes_one_text(capsys):
  from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top

  assert train.main("stepz=2 gym=desktop") == 2
  assert capsys.readouterr().err.count("unknown key") == 1


def test_reading_a_run_imports_no_jax(run):
  program = f"""
    import sys
    import tunix_multi_turn
    tunix_multi_turn.light()
    import tunix.rl.multi_turn as mt
    run = mt.load({str(run.directory)!r})
    assert len(run.metrics) >= 2 and run.episodes[-1].trajectory.steps
    assert run._repr_html_() and run.plot("reward_mean").html
    print("jax" in sys.modules)
  """
  process = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert process.stdout.strip() == "False", process.stderr


@pytest.mark.slow
def test_a_wrong_name_is_refused_without_jax():
  program = """
    import sys
    import tunix_multi_turn
    tunix_multi_turn.light()
    import tunix.rl.multi_turn as mt
    for call in (mt.train, mt.evaluate):
      try:
        call(gym="desktpo")
      except mt.ConfigError as error:
        assert "did you mean 'desktop'?" in str(error)
      else:
        raise AssertionError("not refused")
    assert "Trains a" in mt.train.__doc__ and not hasattr(mt.train, "__path__")
    print("jax" in sys.modules)
    from tunix.rl.multi_turn import train
    import tunix.rl.multi_turn.evaluate
    assert train is mt.train is sys.modules[train.__name__]
    assert not hasattr(train, "x") and callable(train.main)
    assert callable(mt.evaluate) and callable(mt.evaluate.main)
    print("jax" in sys.modules, mt.train.Run.__module__)
  """
  process = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  room = "tunix.rl.multi_turn.run.run"
  assert process.stdout.split() == ["False", "True", room], process.stderr


CELLS = [
  """
    import pathlib, sys
    sys.path.insert(0, {here!r})
    %load_ext autoreload
    %autoreload 2
    import tunix.rl.multi_turn as mt
    import my_rewards
    """,
  "run = mt.train({config!r}, steps=500, reward=my_rewards.score)\nrun",
  """
    import time
    while run.step < 2 and not run.done:
      time.sleep(.1)
    print(run.error)
    print("while it trains:", run.status, len(run.metrics) >= 2)
    """,
  "run.plot()",
  "run.stop(); run.wait(120); print(run.status)",
  "steps = run.step\nprint(set(run.metrics['reward_mean']))",
  """
    pathlib.Path(my_rewards.__file__).write_text(
        "def score(*_, **__):\\n  return 0.25\\n"
    )
    """,
  """
    again = mt.train(
        {config!r}, steps=2, name="again", reward=my_rewards.score, wait=True
    )
    print(set(again.metrics['reward_mean']))
    """,
  "more = run.resume(steps=steps + 1); more.wait(200); print(more.step)",
  "run.watch(-1)",
  "mt.train(stepz=3)",
]


@pytest.fixture
def this_kernel(tmp_path, monkeypatch) -> str:
  """The name of a kernel that runs this interpreter."""
  directory = tmp_path / "jupyter" / "kernels" / "this"
  directory.mkdir(parents=True)
  argv = [sys.executable, "-m", "ipykernel_launcher", "-f"]
  (directory / "kernel.json").write_text(
    json.dumps(
      {
        "argv": [*argv, "{connection_file}"],
        "display_name": "this",
        "language": "python",
      }
    )
  )
  monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  return "this"


@pytest.mark.slow
def test_a_notebook_trains_stops_edits_a_reward_and_resumes(
  tmp_path, this_kernel
):
  import nbclient  # pylint: disable=g-import-not-at-top
  import nbformat  # pylint: disable=g-import-not-at-top

  (tmp_path / "my_rewards.py").write_text(
    "def score(*_, **__):\n  return 0.75\n"
  )
  config = tmp_path / "small.yaml"
  config.write_text(
    yaml.safe_dump(
      {
        **SMALL,
        "gym": "desktop",
        "run.dir": str(tmp_path / "runs"),
        "warm_start.steps": 0,
        "eval.episodes_per_task": 1,
      }
    )
  )
  notebook = nbformat.v4.new_notebook(
    cells=[
      nbformat.v4.new_code_cell(
        textwrap.dedent(
          cell.format(config=str(config), here=str(tmp_path))
          if "{" in cell
          else cell
        ).strip()
      )
      for cell in CELLS
    ]
  )
  client = nbclient.NotebookClient(
    notebook,
    timeout=300,
    allow_errors=True,
    kernel_name=this_kernel,
    resources={"metadata": {"path": str(tmp_path)}},
  )
  client.execute()
  text = ["".join(o.get("text", "") for o in c.outputs) for c in notebook.cells]
  failed = [
    "\n".join(o["traceback"])
    for c in notebook.cells[:-1]
    for o in c.outputs
    if o.output_type == "error"
  ]
  assert not failed, failed[0]
  assert "while it trains: running True" in text[2], text
  assert "interrupted" in text[4]
  assert text[5].strip() == "{0.75}"
  assert text[7].splitlines()[-1] == "{0.25}"  # Edited under autoreload.
  steps = int(text[8].splitlines()[-1])
  assert steps >= 3
  shown = [
    o["data"]["text/html"]
    for o in notebook.cells[1].outputs
    if "data" in o and "text/html" in o["data"]
  ]
  assert any("<progress" in html for html in shown)
  assert len(json.dumps(notebook.cells[1].outputs)) < 100_000
  for place in (3, 9):
    assert (
      "<iframe srcdoc" in notebook.cells[place].outputs[-1]["data"]["text/html"]
    )
  error = notebook.cells[-1].outputs[-1]
  assert error["ename"] == "ConfigError"
  assert len(error["traceback"]) == 1  # No frames: the problem alone.
