"""The command as a user runs it: real gym, real policy, real learner, small."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from importlib import metadata
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

from cua_gyms.miniwob import miniwob_gym
import numpy as np
import pytest
from safetensors import safe_open
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.policy.checkpoints import (
  checkpoint as policy_checkpoint,
)
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.reporting import time_metrics
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.warm_start import stage

# Each run compiles its own programs, on two cores perhaps shared with others.
pytestmark = pytest.mark.timeout(400)


def test_python_m_starts_beside_google_tunix(tmp_path):
  """As a user's shell does; other tests skip google-tunix's own import."""
  try:
    metadata.distribution("google-tunix")
  except metadata.PackageNotFoundError:
    pytest.skip("google-tunix is not installed")
  paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  paths = [path for path in paths if not path.endswith("light_start")]
  process = subprocess.run(
      [sys.executable, "-X", "importtime", "-m", "tunix.rl.multi_turn.train",
       *small_runs.directory_of(tmp_path, ()), *small_runs.SMALL,
       small_runs.NANO, "warm_start.source=none", "name=d", "--dry-run"],
      capture_output=True, text=True, timeout=300, check=False,
      env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-2000:]
  assert "group_size: 4" in process.stdout
  assert "in all, this machine" in process.stdout
  imported = {
    line.split("|")[-1].strip() for line in process.stderr.split("\n")
  }
  assert {"tunix.rl.grpo.grpo_learner", "tunix.rl.multi_turn"} <= imported
  assert not list(tmp_path.iterdir())


FROM_NOTHING = (
  small_runs.ONE_LAYER,
  "name=a",
  "warm_start.source=none",
  "warm_start.steps=2",
  "warm_start.batch_size=4",
  "steps=2",
)


@pytest.fixture(scope="module")
def from_nothing(tmp_path_factory):
  """Directory and output of a run of two steps, which one test resumes."""
  folder = tmp_path_factory.mktemp("runs")
  with contextlib.redirect_stdout(io.StringIO()) as output:
    assert small_runs.run_train(folder, *FROM_NOTHING) == 0
  return folder / "a", output.getvalue()


def test_a_run_from_nothing_writes_everything(from_nothing):
  """Random weights, cloning, GRPO, evaluation, report."""
  directory, output = from_nothing
  assert [m["step"] for m in small_runs.metrics_of(directory)] == [1, 2]
  summary = small_runs.summary_of(directory)
  assert summary["status"] == "completed"
  for name in ("initial", "warm_start", "final"):
    figures = summary["eval"][name]
    assert figures["episodes"] == 4
    assert set(figures["by_task"]) == {"click-color", "enter-text"}
    assert 0 <= figures["success_rate"] <= 1
  for path in (
    "config.yaml",
    "trajectories.jsonl",
    "report.html",
    "checkpoints",
    "policy/model.safetensors",
    "policy/config.json",
    "warm_start/model.safetensors",
  ):
    assert (directory / path).exists(), path
  assert list((directory / "images").glob("*.png"))
  assert "initial" in output


def test_resume_goes_on_where_it_stopped(from_nothing, capsys):
  directory, _ = from_nothing
  assert train.main([f"resume={directory}", "steps=4"]) == 0
  metrics = small_runs.metrics_of(directory)
  assert [m["step"] for m in metrics] == [1, 2, 3, 4]
  assert [m["version"] for m in metrics] == [1, 2, 3, 4]
  summary = small_runs.summary_of(directory)
  assert set(summary["eval"]) == {"initial", "warm_start", "final"}
  # Its file repeats the run instead of going on with it.
  again = config_lib.load_config([str(directory / "config.yaml"), "name=new"])
  assert again.run_dir == directory.parent / "new" and again.learner.steps == 4
  # The name is taken now.
  assert small_runs.run_train(directory.parent, *FROM_NOTHING) == 2
  assert "resume=" in capsys.readouterr().err


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_directory_starts_from_its_weights_and_rolls_out_in_int8(tmp_path):
  model, _, _ = policy_checkpoint.create_policy("qwen3_vl_tiny", seed=7)
  policy_checkpoint.save_policy(tmp_path / "mine", model)
  status = small_runs.run_train(
      tmp_path, "name=d", f"policy={tmp_path / 'mine'}", "steps=1",
      "engine.weights=int8", "algorithm.importance=tis",
      "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
      "eval.modes=[sampled]", "eval.episodes_per_task=1",
  )  # fmt: skip
  assert status == 0
  # No evaluation of random weights: there never are any.
  evaluations = small_runs.summary_of(tmp_path / "d")["eval"]
  assert set(evaluations) == {"warm_start", "final"}
  (metrics,) = small_runs.metrics_of(tmp_path / "d")
  # The sampler is another policy, and a near one.
  assert 1e-4 < metrics["logprob_gap_max"] < 0.5


@pytest.mark.slow
def test_equal_seeds_give_equal_runs(tmp_path):
  """C9: rewards to the bit, losses within 1e-6; another seed differs.

  Evaluations are compared in test_train_evaluations.py.
  """
  for name, seed, steps in (("a", 5, 2), ("b", 5, 2), ("c", 6, 1)):
    assert small_runs.run_train(
        tmp_path, f"name={name}", f"seed={seed}", f"steps={steps}",
        "tasks=[enter-text, open-icon]", "learner.groups_per_step=4",
        "eval.on=false",
    ) == 0  # fmt: skip
  a, b, c = (small_runs.metrics_of(tmp_path / name) for name in "abc")
  assert len(a) == len(b) == 2
  for one, other in zip(a, b):
    assert one["reward_mean"] == other["reward_mean"]
    assert one["completion_tokens"] == other["completion_tokens"]
    assert one.keys() == other.keys()
    assert one["engine_compiles"] == 0
  learned = [(x, y) for x, y in zip(a, b) if "loss" in x]
  assert learned, "no group was informative; choose another seed"
  for one, other in learned:
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], abs=1e-5)
    # The learner scores what was sampled as the sampler did.
    assert one["logprob_gap_max"] < 1e-4
  assert a[0]["completion_tokens"] != c[0]["completion_tokens"] or (
    a[0].get("logprob") != c[0].get("logprob")
  )
  trajectories = [
    sorted(
      json.dumps(step["model_response"])
      for line in (tmp_path / n / "trajectories.jsonl").open()
      for step in json.loads(line)["steps"]
    )
    for n in "ab"
  ]
  assert trajectories[0] == trajectories[1]


@pytest.mark.slow
def test_a_fifth_of_the_episodes_breaks_and_training_finishes(
  tmp_path, monkeypatch
):
  """C6, C7: every stage raises, hangs or returns garbage."""
  before = set(threading.enumerate())
  tasks_left = []

  class CountingLoop(loop_thread.LoopThread):
    def close(self, *args):
      async def remaining():
        return [
          str(t.get_coro())
          for t in asyncio.all_tasks() - {asyncio.current_task()}
        ]

      tasks_left.append(self.submit(remaining()).result(10))
      super().close(*args)

  monkeypatch.setattr(loop_thread, "LoopThread", CountingLoop)
  status = small_runs.run_train(
    tmp_path,
    "name=f",
    "run.imports=[faulty_gym]",
    "gym=faulty-desktop",
    "steps=8",
    "collect.deadlines.reset=0.3",
    "collect.deadlines.step=0.3",
    "collect.deadlines.evaluate=0.3",
    "collect.deadlines.close=0.3",
    "environment.max_turns=2",
    "eval.modes=[sampled]",
  )
  assert status == 0
  import faulty_gym  # pylint: disable=g-import-not-at-top

  assert set(faulty_gym.injected) == set(faulty_gym.FAULTS)
  assert tasks_left == [[]]
  summary = small_runs.summary_of(tmp_path / "f")
  assert summary["status"] == "completed"
  assert len(small_runs.metrics_of(tmp_path / "f")) == 8
  assert sum(summary["faults"].values()) >= 9
  assert summary["episodes"].get("train/env_error", 0) >= 3
  deadline = time.monotonic() + 10
  while time.monotonic() < deadline:
    remaining = [
      t
      for t in set(threading.enumerate()) - before
      # Daemons of libraries, one a process.
      if not t.name.startswith(("tunix-collector-worker", "orbax", "tqdm"))
    ]
    if not remaining:
      break
    time.sleep(0.1)
  assert not remaining, remaining


def start(tmp_path: pathlib.Path, *overrides: str, **env: str):
  return subprocess.Popen(
      [
          sys.executable, "-m", "tunix.rl.multi_turn.train",
          *small_runs.directory_of(tmp_path, overrides), *small_runs.SMALL,
          small_runs.ONE_LAYER,
          "warm_start.source=none", *overrides,
      ],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
  )  # fmt: skip


def wait_for_steps(process, directory: pathlib.Path, steps: int) -> None:
  metrics = directory / "metrics.jsonl"
  deadline = time.monotonic() + 200
  while time.monotonic() < deadline and process.poll() is None:
    if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
      return
    time.sleep(0.1)
  process.kill()
  pytest.fail(f"no {steps} steps: {process.communicate()[0]}")


@pytest.mark.slow
def test_asynchronous_is_the_same_code(tmp_path):
  """Groups in parts, stale tokens trimmed; every second accounted for."""
  status = small_runs.run_train(
      tmp_path, small_runs.NANO, "name=s", "warm_start.source=none", "steps=4",
      "queue.max_staleness=2", "learner.publish_every=2",
      "queue.stale_policy=trim", "queue.admission=recent",
      "collect.part_size=2", "checkpoint.every=2", "eval.every=2",
  )  # fmt: skip
  assert status == 0
  steps = small_runs.metrics_of(tmp_path / "s")
  assert len(steps) == 4
  for step in steps:
    assert step["staleness_max"] <= 2
    assert step["groups"] == 4  # Two groups an update, each in two parts.
    assert step["episodes"] >= 7
  for before, step in zip(steps, steps[1:]):
    passed = step["time"] - before["time"]
    assert step["time/step"] == pytest.approx(passed, rel=0.02, abs=0.1)
  # Of the run, as a call of the engine is counted when it ends.
  wall = sum(step["time/step"] for step in steps)
  assert sum(step["time/other"] for step in steps) < 0.02 * wall + 0.1
  for who, parts in time_metrics.ACCOUNTS.items():
    account = sum(step[f"time/{part}"] for step in steps for part in parts)
    assert account == pytest.approx(wall, rel=0.02, abs=0.1), who
  evaluated = [s["time/evaluate"] > 0 for s in steps]
  assert evaluated == [False, False, True, False]
  page = (tmp_path / "s" / "report.html").read_text()
  assert "<h2>Time</h2>" in page and "<th>Engine</th>" in page


@pytest.mark.slow
def test_a_policy_of_the_users_trains_and_is_loaded_by_its_name(tmp_path):
  policy = ["policy=their_policy:create", "policy.config.layers=1"]
  more = ("name=a", "steps=1", "eval.on=false")
  assert small_runs.run_train(tmp_path, *policy, *more) == 0
  saved = tmp_path / "a" / "policy"
  assert small_runs.metrics_of(tmp_path / "a")[-1]["step"] == 1
  again = [*policy, "warm_start.source=path", f"warm_start.path={saved}"]
  with small_runs.make_run(tmp_path / "b", *again, "name=b") as run:
    run.apply_warm_start()
    parameters = policy_files.named_parameters(run.policy.model)
  with safe_open(saved / "model.safetensors", "numpy") as file:
    assert set(file.keys()) == set(parameters)
    for name, value in parameters.items():
      np.testing.assert_array_equal(value, file.get_tensor(name))


@pytest.mark.parametrize(
  "arguments, words",
  [
    (
      ["policy=qwen3_text_tiny"],
      ["qwen3_text_tiny reads text only", "vision-language"],
    ),
    (
      ["gym.observation=axtree"],
      ["gym.observation=axtree", "gym.name=desktop", "miniwob, browser"],
    ),
    (
      ["gym=miniwob", "tasks=[click-test]", "gym.observation=tree"],
      ["gym.observation", "tree", "axtree"],
    ),
    (
      [
        "gym=miniwob",
        "tasks=[click-test]",
        "gym.observation=axtree",
        "agent.parser=computer_use",
      ],
      ["agent.parser=computer_use", "browsergym"],
    ),
    (
      ["gym=miniwob", "tasks=[click-test]", "gym.options.observation=axtree"],
      ["gym.options.observation", "set gym.observation instead"],
    ),
    (
      [
        "gym=miniwob",
        "tasks=[click-color]",
        "gym.observation=axtree",
        "warm_start.steps=1",
      ],
      ["task_source.families=['click-color']", "click-button"],
    ),
    (["policy=no_such:create"], ["policy.name", "no_such:create"]),
    (
      ["policy=their_policy:create", "policy.config.layer=1"],
      ["their_policy:create", "'layer'", "'layers'"],
    ),
    (
      ["policy=their_policy:create", "policy.trajectory_pixels=9"],
      ["trajectory_pixels=9", "their_policy:create"],
    ),
    (["tasks=[click-buton]"], ["click-buton", "click-button"]),
    (["learner.stepz=3"], ["stepz", "steps"]),
    (["collect.group_size=1"], ["group_size"]),
    (["warm_start.source=path"], ["warm_start.path"]),
    (["policy=./nowhere", "warm_start.source=none"], ["nowhere"]),
    (["gym.options={colour: 3}"], ["colour"]),
    (["agent.parser=qwen"], ["agent.parser"]),
    (["policy.lora_rank=8"], ["policy.lora_rank=8", "tiny_vl"]),
    (["policy.trajectory_pixels=9"], ["trajectory_pixels=9", "tiny_vl"]),
    (["engine.weights=int8"], ["engine.weights", "importance=tis"]),
    (
      ["engine.weights=int8", "algorithm.importance=tis"],
      ["engine", "int8", "TinyVL"],
    ),
    (["policy.config.image_budget=9"], ["policy.trajectory_pixels"]),
    (["mesh.sequence=3"], ["learner.row_length", "mesh.sequence=3"]),
    (["policy=qwen3_vl_tiny", "policy.config.layers=6"], ["layers", "remat"]),
    (["mesh.data=64", "learner.rows=64"], ["mesh.data", "devices"]),
    (["run.imports=[no_such_module_here]"], ["no_such_module_here"]),
    (["resume=/nonexistent"], ["resume"]),
    (["resume=runs/x", "name=y"], ["run.name", "run.resume"]),
    (["warm_start.source=path", "warm_start.path=./nowhere"], ["./nowhere"]),
    (["policy.config.layers=6"], ["blocks.4", "warm_start.source=none"]),
    (
      [
        "run.imports=[faulty_gym]",
        "gym=faulty-desktop",
        "tasks=[click-color]",
        "warm_start.steps=2",
      ],
      ["oracle", "warm_start.steps=0"],
    ),
    (
      ["gym=miniwob", "tasks=[tic-tac-toe]", "warm_start.steps=2"],
      ["tic-tac-toe", "click-dialog", "warm_start.steps=0"],
    ),
  ],
)
def test_wrong_input_is_one_clear_error(arguments, words, tmp_path, capsys):
  arguments = [*small_runs.directory_of(tmp_path, arguments), *arguments]
  assert train.main(arguments) == 2
  stderr = capsys.readouterr().err
  assert stderr.startswith("error")
  for word in words:
    assert word in stderr, stderr
  assert "Traceback" not in stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_interrupt_saves_and_says_how_to_resume(tmp_path):
  process = start(tmp_path, "name=i", "steps=100000")
  wait_for_steps(process, tmp_path / "i", 2)
  try:
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
  finally:
    process.kill()
  assert process.returncode == 130, output
  assert f"resume={tmp_path / 'i'}" in output
  assert list((tmp_path / "i" / "checkpoints").iterdir())
  assert small_runs.summary_of(tmp_path / "i")["status"] == "interrupted"


@pytest.mark.slow
def test_a_stop_just_after_an_evaluation_is_an_interrupt(tmp_path):
  """Its last update is evaluated, and yet it is not complete."""
  run = small_runs.make_run(
      tmp_path, small_runs.ONE_LAYER, "name=s", "steps=3", "eval.every=1",
      "eval.modes=[sampled]", "eval.episodes_per_task=1",
      "warm_start.source=none", "warm_start.steps=0",
      "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
  )  # fmt: skip

  class Stopper:
    def on_event(self, event):
      if isinstance(event, events.EvalFinished) and event.name == "step_1":
        run.stop.set()

  with run:
    run.observers.add(Stopper())
    assert train.execute(run) == ("interrupted", None)
  summary = small_runs.summary_of(tmp_path / "s")
  assert (summary["status"], summary["step"]) == ("interrupted", 1)


@pytest.mark.slow
def test_a_run_stopped_before_its_first_checkpoint_can_go_on(tmp_path, capsys):
  run = small_runs.make_run(
    tmp_path, small_runs.NANO, "warm_start.source=none", "name=e", "steps=1"
  )
  run.stop.set()
  assert train.run_to_end(run) == 130
  directory = tmp_path / "e"
  assert f"resume={directory}" in capsys.readouterr().out
  before = (directory / "config.yaml").read_text()
  for change, word in (
    ("seed=5", "run.seed=5"),
    ("tasks=[click-button]", "task_source.families=['click-button']"),
    ("learner.grad_clip=0", "learner.grad_clip=0"),
  ):
    assert train.main([f"resume={directory}", change]) == 2
    stderr = capsys.readouterr().err
    assert word in stderr and "cannot change" in stderr
  assert (directory / "config.yaml").read_text() == before
  assert train.main([f"resume={directory}", "learner.grad_clip=2"]) == 0
  assert [m["step"] for m in small_runs.metrics_of(directory)] == [1]
  assert list(small_runs.summary_of(directory)["eval"]) == [
    "warm_start",
    "final",
  ]


@pytest.mark.slow
def test_a_failed_run_says_so_and_goes_on_from_its_warm_start(
  tmp_path, capsys, monkeypatch
):
  directory = tmp_path / "f"
  directory.mkdir()
  (directory / "checkpoints").write_text("in the way")
  assert small_runs.run_train(
      tmp_path, small_runs.NANO, "name=f", "warm_start.source=none",
      "warm_start.steps=2", "warm_start.batch_size=4", "steps=1",
  ) == 1  # fmt: skip
  printed = capsys.readouterr()
  assert printed.err.count("error: ") == 1 and "checkpoints" in printed.err
  assert "Traceback" not in printed.err
  assert f"resume={directory}" in printed.out
  assert "Traceback" in (directory / "traceback.txt").read_text()
  assert (directory / "report.html").exists()
  summary = small_runs.summary_of(directory)
  assert summary["status"] == "failed"
  assert set(summary["eval"]) == {"initial", "warm_start"}
  # The process can end: nothing waits for the checkpoint that failed.
  threads = [t.name for t in threading.enumerate() if not t.daemon]
  assert threads == ["MainThread"]

  def not_again(*args, **kwargs):
    raise AssertionError("cloned before")

  monkeypatch.setattr(stage, "clone", not_again)
  (directory / "checkpoints").unlink()
  (directory / "cloning" / "2").mkdir(parents=True)  # No time to remove it.
  status = train.main(
    [
      f"resume={directory}",
      "algorithm.kl_coef=0.1",
      "learner.skip_zero_advantage=false",
    ]
  )
  assert status == 0
  assert not (directory / "traceback.txt").exists()
  assert not (directory / "cloning").exists()
  (step,) = small_runs.metrics_of(directory)
  # Before its first update the policy is the one it is held to.
  assert step["kl"] == pytest.approx(0.0, abs=1e-6)
  evaluations = small_runs.summary_of(directory)["eval"]
  assert evaluations["warm_start"] == summary["eval"]["warm_start"]


@pytest.mark.slow
def test_a_queue_file_is_of_one_run(tmp_path, capsys):
  common = (small_runs.NANO, "warm_start.source=none", "steps=1")
  used = f"queue.path={tmp_path / 'q.db'}"
  assert small_runs.run_train(tmp_path, *common, "name=a", used) == 0
  for path in (used, f"queue.path={tmp_path}"):
    assert small_runs.run_train(tmp_path, *common, "name=b", path) == 2
    assert f"error: {path} " in capsys.readouterr().err
    assert not (tmp_path / "b" / "metrics.jsonl").exists()
  assert train.main([f"resume={tmp_path / 'a'}", "queue.path="]) == 2
  assert "queue.path" in capsys.readouterr().err


@pytest.mark.slow
def test_a_warm_start_must_be_of_the_policys_architecture(tmp_path, capsys):
  saved = str(tmp_path / "nano")
  model, _, _ = policy_checkpoint.create_policy("nano")
  policy_checkpoint.save_policy(saved, model)
  path = ("warm_start.source=path", f"warm_start.path={saved}")
  assert small_runs.run_train(tmp_path, *path, "--dry-run") == 2
  assert "width is 32 there, 160 here" in capsys.readouterr().err
  nano = (*path, small_runs.NANO, "--dry-run")
  assert small_runs.run_train(tmp_path, *nano) == 0
  own = (f"policy={saved}", "warm_start.source=none")
  assert small_runs.run_train(tmp_path, *own, "--dry-run") == 0
  (tmp_path / "nano" / "model.safetensors").write_bytes(b"torn")
  capsys.readouterr()
  assert small_runs.run_train(tmp_path, *own, "--dry-run") == 2
  assert saved in capsys.readouterr().err


def test_cloning_keeps_what_the_policy_knows_already(tmp_path):
  saved = str(tmp_path / "nano")
  model, _, _ = policy_checkpoint.create_policy("nano")
  policy_checkpoint.save_policy(saved, model)
  own, new = f"policy={saved}", small_runs.NANO
  for source, optimizer in ((own, "adamw"), (new, "muon")):
    run = small_runs.make_run(
      tmp_path,
      source,
      "warm_start.source=none",
      "warm_start.steps=2",
      "algorithm.entropy_coef=0.1",
      "learner.skip_zero_advantage=false",
    )
    learner = models.make_cloning_learner(
      run.config, run.policy, run.images, None
    )
    assert learner.config.optimizer == optimizer
    assert learner.algorithm.config.entropy_coef == 0
    run.engine.close()


def test_an_interrupt_waits_for_the_browser(tmp_path, monkeypatch):
  closed = []

  class SlowBrowser:
    async def close(self):
      asyncio.get_running_loop()  # As the real one, which is a loop's.
      await asyncio.sleep(0.5)
      closed.append(True)
      raise RuntimeError("it is gone")

  monkeypatch.setattr(miniwob_gym, "shared_browser", SlowBrowser())
  run = small_runs.make_run(
    tmp_path,
    small_runs.NANO,
    "gym=miniwob",
    "tasks=[click-test-2]",
    "name=w",
    "warm_start.source=none",
  )
  with run:
    run.stop.set()
    episodes = run._loop._thread
  assert closed == [True]
  assert not episodes.is_alive()


def test_work_that_ends_just_after_a_look_has_its_result():
  class JustLate(concurrent.futures.Future):
    def result(self, timeout=None):
      if self.done():
        return super().result(timeout)
      self.set_result(7)
      raise concurrent.futures.TimeoutError()

  async def work():
    raise AssertionError("submitted below")

  def submit(coroutine):
    coroutine.close()
    return JustLate()

  loop = types.SimpleNamespace(submit=submit)
  assert loop_thread.LoopThread.wait(loop, work(), threading.Event()) == 7
