"""Each recipe of examples/ is loaded, planned or trained as it stands.

The commands in their heads are dry runs of test_documented_commands.py; the
runs here are the same with fewer episodes.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

import browsers
import pytest
import small_runs
import trials
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import plan
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.environments.play import __main__ as play
from tunix.rl.multi_turn.policy.models.qwen import qwen_sizes

pytestmark = pytest.mark.timeout(600)
ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
PUBLISHED = {
  "qwen3_vl_lora": ("Qwen3-VL-4B", "v5e:4x4"),
  "ui_tars_lora": ("Qwen2.5-VL-7B", "v5p:2x2x2"),
}
FEW = (
    "steps=2", "collect.group_size=2", "collect.min_valid=2",
    "learner.groups_per_step=2", "eval.episodes_per_task=1",
    "report.progress=none", "learner.rows=2", "engine.slots=4",
    "collect.concurrency=4",
    # Also groups of equal rewards are learned from.
    "algorithm.entropy_coef=0.01", "learner.skip_zero_advantage=false",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_documented(monkeypatch):
  """In the repository's root, where the examples are."""
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(ROOT / "examples")


def test_every_recipe_is_loaded_and_listed():
  listed = (ROOT / "examples" / "README.md").read_text()
  for path in RECIPES:
    assert config_lib.load_config([str(path)]).run.resume == ""
    assert f"(recipes/{path.name})" in listed
    assert f"recipes/{path.name}" in path.read_text(), "no command in its head"
  for file in re.findall(r"\]\(([^)#]+)\)", listed):
    assert (ROOT / "examples" / file).exists(), file
  for file in (ROOT / "examples").glob("*.py"):
    assert file.name in listed


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_full_size_fits_the_slice_that_it_names(name, capsys):
  policy, topology = PUBLISHED[name]
  text = (FOLDER / f"{name}.yaml").read_text()
  assert f"policy={policy} topology={topology}" in text
  config = config_lib.load_config([str(FOLDER / f"{name}.yaml")])
  small = config_lib.load_config([str(FOLDER / f"{name}_cpu.yaml")])
  assert policy in qwen_sizes.SIZES
  # Both train an adapter; the small one is of the same architecture.
  assert config.policy.lora_rank and small.policy.lora_rank
  assert (
    policy.lower()
    .replace("-", "_")
    .replace(".", "_")
    .startswith(small.policy.name.removesuffix("_tiny"))
  )
  status = plan.main(
    [
      str(FOLDER / f"{name}.yaml"),
      f"policy={policy}",
      f"topology={topology}",
      "--analytic",
      "--json",
    ]
  )
  data = json.loads(capsys.readouterr().out)
  assert status == 0, data


def metrics(tmp_path):
  result = small_runs.metrics_of(tmp_path / "r")
  assert [m["step"] for m in result] == [1, 2]
  assert small_runs.summary_of(tmp_path / "r")["status"] == "completed"
  return result


def trained(tmp_path, name, *more):
  words = [str(FOLDER / f"{name}.yaml"), f"run.dir={tmp_path}", "name=r", *FEW]
  config = config_lib.load_config(words[:1])
  if config.warm_start.steps:
    words += [
      "warm_start.steps=1",
      "warm_start.batch_size=2",
      "warm_start.demonstrations=2",
    ]
  assert train.main([*words, *more]) == 0
  return metrics(tmp_path)


def small(name, **needs):
  return pytest.param(name, id=name, **needs)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    small("miniwob", marks=browsers.needed()),
    small("qwen3_vl_lora_cpu"),
    # The same of another family.
    small("ui_tars_lora_cpu", marks=trials.in_full("qwen3_vl_lora_cpu")),
    small("proxy_agent"),
  ],
)
def test_a_recipe_trains(tmp_path, name):
  steps = trained(tmp_path, name)
  assert all(step["logprob_gap_max"] < 1e-3 for step in steps)
  if name == "proxy_agent":  # Nothing is seeded, and still it learns.
    assert all(step["grad_norm"] > 0 for step in steps)
    assert not small_runs.summary_of(tmp_path / "r").get("faults")


@pytest.mark.slow
@pytest.mark.xdesktop
def test_office_tasks_are_trained_on(tmp_path):
  from cua_gyms.xdesktop import programs

  if missing := programs.missing():
    pytest.skip(f"not installed: {missing}")
  trained(tmp_path, "office", "tasks=[window-maximize]")


@pytest.mark.slow
def test_recordings_are_cloned_and_then_improved(tmp_path):
  demos = tmp_path / "demos.jsonl"
  text = " ".join((FOLDER / "recordings.yaml").read_text().split())
  words = re.search(r"environments\.play (.*?) --out", text)[1]
  words = words.replace("\\ # ", "").replace("64", "2").split()
  assert play.main([*words, "--out", str(demos)]) == 0
  trained(tmp_path, "recordings", f"warm_start.recordings={demos}")


@pytest.mark.slow
def test_what_a_run_recorded_is_trained_on(tmp_path):
  assert small_runs.run_train(
      tmp_path, "steps=1", "name=recorded", "report.episodes=4000",
      "eval.on=false",
  ) == 0  # fmt: skip
  trained(tmp_path, "offline", f"offline.path={tmp_path / 'recorded'}")


@contextlib.contextmanager
def buffer_service(directory):
  room = "agent_services.rollout_buffer"
  words = [
      sys.executable, "-m", room, "--dir", str(directory), "--port", "0",
      "--input-roots", str(FOLDER),
  ]  # fmt: skip
  with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
    try:
      yield process.stdout.readline().split(" at ")[1].strip()
    finally:
      process.terminate()


@pytest.mark.slow
def test_a_rollout_buffer_is_trained_from(tmp_path):
  with buffer_service(tmp_path / "buffer") as url:
    trained(
      tmp_path,
      "rollout_buffer",
      f"buffer.url={url}",
      "buffer.poll_s=0.1",
      f"buffer.input_file={FOLDER / 'desktop_tasks.jsonl'}",
    )


@pytest.mark.slow
@trials.in_full("run/test_pod_runs.py")
def test_two_processes_train_one_run(tmp_path):
  import portpicker  # pylint: disable=g-import-not-at-top

  port = portpicker.pick_unused_port()
  words = [
      sys.executable, "-m", "tunix.rl.multi_turn.train",
      "examples/recipes/multi_host.yaml", f"run.dir={tmp_path}", "name=r",
      *FEW, f"processes.coordinator=127.0.0.1:{port}", "processes.count=2",
  ]  # fmt: skip
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  with contextlib.ExitStack() as stack:
    runs = [
      stack.enter_context(
        subprocess.Popen(
          [*words, f"processes.index={i}"],
          env=environment,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
        )
      )
      for i in range(2)
    ]
    for run in runs:
      stack.callback(run.kill)
    output = [run.communicate(timeout=500)[0] for run in runs]
  assert [run.returncode for run in runs] == [0, 0], output
  metrics(tmp_path)
