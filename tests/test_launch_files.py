"""The files under launch/: what they start, without a cluster."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.commands import collect
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


def test_a_fleet_is_a_learner_and_collectors_of_its_run():
  found = yaml.safe_load((LAUNCH / "fleet_jobset.yaml").read_text())
  assert found["kind"] == "JobSet"
  jobs = {job["name"]: job for job in found["spec"]["replicatedJobs"]}
  assert set(jobs) == {"learner", "collectors"}
  assert found["spec"]["successPolicy"]["targetReplicatedJobs"] == ["learner"]
  pods = {
      name: job["template"]["spec"]["template"]["spec"]
      for name, job in jobs.items()
  }
  (learner,) = pods["learner"]["containers"]
  assert learner["command"][:3] == ["python", *TRAIN]
  # Kubernetes puts the pod's address in place of the variable.
  assert {e["name"] for e in learner["env"]} == {"POD_IP"}
  settings = [
      a.replace("$(POD_IP)", "10.0.0.7")
      for a in learner["command"][3:] if not a.endswith(".yaml")
  ]  # pyformat: disable
  config = config_lib.load_config(settings)
  assert config.fleet.via == "join" and config.rollout.host == "10.0.0.7"
  (port,) = learner["ports"]
  assert port["containerPort"] == config.rollout.port
  shape = pods["learner"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  chips = eval(shape.replace("x", "*"))  # pylint: disable=eval-used
  assert learner["resources"]["limits"]["google.com/tpu"] == chips
  assert config.mesh.devices == chips
  collectors = jobs["collectors"]["template"]["spec"]
  (collector,) = pods["collectors"]["containers"]
  assert collectors["parallelism"] == collectors["completions"]
  assert collectors["backoffLimit"] > 1000
  assert pods["collectors"]["restartPolicy"] == "OnFailure"
  assert "google.com/tpu" not in str(collector["resources"])
  # As many episodes as the learner has places for.
  places = collectors["parallelism"] * config.fleet.episodes
  assert places == config.collect.concurrency
  assert collected(collector["command"]) == str(config.run_dir)
  for pod in pods.values():
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def collected(command):
  """The directory of a collector's command, whose arguments are ones."""
  assert command[:4] == [
      "python", "-m", "tunix_multi_turn", "commands.collect"
  ]  # pyformat: disable
  parser = collect.parser()
  return parser.parse_args(command[4:]).directory


def test_collectors_of_a_deployment_come_and_go():
  found = yaml.safe_load((LAUNCH / "collectors.yaml").read_text())
  assert found["kind"] == "Deployment"
  labels = found["spec"]["selector"]["matchLabels"]
  assert found["spec"]["template"]["metadata"]["labels"] == labels
  pod = found["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  assert collected(container["command"]) == "/runs/first"
  mounts = {mount["name"] for mount in container["volumeMounts"]}
  assert mounts == {volume["name"] for volume in pod["volumes"]}


COLLECTORS = ("--name", "first", "--zone", "us-west4-a")


def tpu_collectors(*arguments):
  return run(
      "bash", LAUNCH / "tpu_vm_collectors.sh", "--dry-run", *arguments
  )


@pytest.mark.parametrize("host, directory", (
    ("0", "/mnt/my runs/r"), ("3", "/mnt/my runs/r/processes/3"),
))  # pyformat: disable
def test_each_host_of_a_slice_collects_for_its_own_process(
    host, directory, tmp_path
):
  done = tpu_collectors(
      *COLLECTORS, "--each", "2", "--", "/mnt/my runs/r/", "gym.options={a: 1}"
  )
  assert done.returncode == 0, done.stderr
  (line,) = done.stdout.splitlines()
  words = shlex.split(line)
  assert words[words.index("--worker") + 1] == "all"
  # The command of a host, where its programs only write what they are given.
  for name, text in (
      ("curl", f"echo {host}"), ("sudo", "true"),
      ("systemd-run", 'printf "%s\\0" "$@" >>"$OUT"; printf "\\n" >>"$OUT"'),
  ):  # pyformat: disable
    (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / name).chmod(0o755)
  out = tmp_path / "out"
  command = words[words.index("--command") + 1]
  done = run(
      "bash", "-c", command, PATH=f"{tmp_path}:{os.environ['PATH']}",
      OUT=str(out), USER="me",
  )  # pyformat: disable
  assert done.returncode == 0, done.stderr
  started = [line.split("\0")[:-1] for line in out.read_text().splitlines()]
  assert len(started) == 2
  for number, words in enumerate(started, 1):
    assert f"tunix-collector-{number}" in words
    begin = words.index("python3")
    assert collected(["python", *words[begin + 1:]]) == directory
    assert words[-1] == "gym.options={a: 1}"


@pytest.mark.parametrize("arguments, problem", (
    (COLLECTORS, "no directory of a run"),
    (COLLECTORS[:2] + ("--", "r"), "--zone is missing"),
    (COLLECTORS + ("--each", "0", "--", "r"), "--each 0"),
    (COLLECTORS + ("runs/r",), "runs/r is no option"),
))  # pyformat: disable
def test_a_slip_of_collectors_ends_with_one_line(arguments, problem):
  done = tpu_collectors(*arguments)
  assert done.returncode == 2 and not done.stdout
  (line,) = done.stderr.splitlines()
  assert problem in line


def test_collectors_of_a_slice_end():
  done = tpu_collectors(*COLLECTORS, "--stop", "--", "/mnt/r")
  (line,) = done.stdout.splitlines()
  assert "systemctl --user stop" in shlex.split(line)[-1]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck")
@pytest.mark.parametrize("name", (
    "tpu_vm.sh", "slurm.sbatch", "tpu_vm_collectors.sh"
))  # pyformat: disable
def test_scripts_pass_shellcheck(name):
  done = run("shellcheck", "-s", "bash", LAUNCH / name)
  assert done.returncode == 0, done.stdout
