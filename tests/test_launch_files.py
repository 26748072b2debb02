"""The files under launch/: what they start, without a cluster."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest
from tunix.rl.multi_turn import config as config_lib
import yaml

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "launch"
TRAIN = ["-m", "tunix.rl.multi_turn.train"]
SLICE = ("--name", "first", "--zone", "us-west4-a", "--type", "v5litepod-16")


def run(*command, **env):
  return subprocess.run(
      list(map(str, command)), capture_output=True, text=True, timeout=60,
      env=os.environ | env, check=False,
  )  # pyformat: disable


def tpu_vm(*arguments):
  """Commands of tpu_vm.sh, as the words that a shell makes of them."""
  done = run("bash", LAUNCH / "tpu_vm.sh", "--dry-run", *arguments)
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines()]


def remote(words):
  """The words of a command that gcloud runs on every host."""
  assert words[:6] == [
      "gcloud", "compute", "tpus", "tpu-vm", "ssh", "first"
  ]  # pyformat: disable
  assert words[words.index("--worker") + 1] == "all"
  return shlex.split(words[words.index("--command") + 1])


def test_a_slice_is_made_used_and_deleted():
  made, installed, trained, deleted = tpu_vm(
      *SLICE, "--spot", "--", "config.yaml", "mesh.fsdp=16"
  )
  assert made == [
      "gcloud", "compute", "tpus", "tpu-vm", "create", "first", "--zone",
      "us-west4-a", "--accelerator-type", "v5litepod-16", "--version",
      "tpu-ubuntu2204-base", "--spot",
  ]  # pyformat: disable
  assert remote(installed)[-1] == "tunix-multi-turn[tpu]"
  assert remote(trained) == [
      "python3", *TRAIN, "processes.coordinator=auto", "config.yaml",
      "mesh.fsdp=16",
  ]  # pyformat: disable
  assert deleted[4:6] == ["delete", "first"] and "--quiet" in deleted


@pytest.mark.parametrize("text", ("a b", "it's", '"$HOME"', "x; rm -r /", "*"))
def test_arguments_reach_train_as_they_are(text):
  *_, trained = tpu_vm(*SLICE, "--keep", "--", f"run.name={text}")
  assert remote(trained)[-1] == f"run.name={text}"


def test_a_wheel_of_a_bucket_is_installed():
  _, installed, *_ = tpu_vm(*SLICE, "--package", "gs://b/d/t.whl", "--", "x=1")
  words = remote(installed)
  assert words[:4] == ["gcloud", "storage", "cp", "gs://b/d/t.whl"]
  assert words[-1] == "/tmp/t.whl[tpu]"


@pytest.mark.parametrize("arguments, problem", (
    (SLICE[:-2] + ("--", "x=1"), "--type is missing"),
    (SLICE, "no arguments of train"),
    (SLICE + ("mesh.fsdp=16",), "mesh.fsdp=16 is no option"),
    (SLICE[:-1], "--type needs a value"),
))  # pyformat: disable
def test_a_slip_ends_with_one_line(arguments, problem):
  done = run("bash", LAUNCH / "tpu_vm.sh", "--dry-run", *arguments)
  assert done.returncode == 2 and not done.stdout
  (line,) = done.stderr.splitlines()
  assert problem in line


def test_slurm_starts_train_on_every_task():
  script = LAUNCH / "slurm.sbatch"
  done = run("bash", script, "config.yaml", "run.name=a b", DRY_RUN="1")
  assert done.stdout.splitlines() == [
      "srun", "--kill-on-bad-exit=1", ".venv/bin/python", *TRAIN,
      "processes.coordinator=auto", "config.yaml", "run.name=a b",
  ]  # pyformat: disable
  directives = [
      line for line in script.read_text().splitlines()
      if line.startswith("#SBATCH")
  ]  # pyformat: disable
  assert "#SBATCH --signal=TERM@300" in directives
  assert run("bash", script).returncode == 2


def test_the_jobset_is_one_and_its_command_a_run():
  found = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
  assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert found["kind"] == "JobSet"
  (job,) = found["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  chips = eval(shape.replace("x", "*"))  # pylint: disable=eval-used
  hosts = spec["completions"]
  assert spec["completionMode"] == "Indexed" and spec["parallelism"] == hosts
  assert hosts * container["resources"]["limits"]["google.com/tpu"] == chips
  assert container["command"][:3] == ["python", *TRAIN]
  mounts = {mount["name"] for mount in container["volumeMounts"]}
  assert mounts == {volume["name"] for volume in pod["volumes"]}
  # The settings are ones, and go together with the slice.
  settings = [a for a in container["command"][3:] if not a.endswith(".yaml")]
  config = config_lib.load_config(settings)
  assert config.mesh.devices == chips
  assert config.processes.coordinator == "auto"
  assert pod["restartPolicy"] == "Never"


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck")
@pytest.mark.parametrize("name", ("tpu_vm.sh", "slurm.sbatch"))
def test_scripts_pass_shellcheck(name):
  done = run("shellcheck", "-s", "bash", LAUNCH / name)
  assert done.returncode == 0, done.stdout
