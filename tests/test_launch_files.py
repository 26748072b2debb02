"""The files under launch/: what they start, without a cluster."""

import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig

from agent_services.rollout_buffer import __main__ as buffer_service
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.commands import collect
from tunix.rl.multi_turn.policy.checkpoints import policy_files
import yaml

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "launch"
TRAIN = ["-m", "tunix.rl.multi_turn.train"]
VM_PYTHON = "tunix-multi-turn/.venv/bin/python"
SLICE = ("--name", "first", "--zone", "us-west4-a", "--type", "v5litepod-16")


def run(*command, seconds=60, **env):
  return subprocess.run(
    list(map(str, command)),
    capture_output=True,
    text=True,
    timeout=seconds,
    env=os.environ | env,
    check=False,
  )


def tpu_vm(*arguments):
  """Commands of tpu_vm.sh, as the words that a shell makes of them."""
  process = run("bash", LAUNCH / "tpu_vm.sh", "--dry-run", *arguments)
  assert process.returncode == 0, process.stderr
  return [shlex.split(line) for line in process.stdout.splitlines()]


def remote(words):
  """The words of a command that gcloud runs on every host."""
  assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "first"]
  assert words[words.index("--worker") + 1] == "all"
  return shlex.split(words[words.index("--command") + 1])


def test_a_slice_is_made_used_and_deleted():
  pack, create, copy, install, train, delete = tpu_vm(
    *SLICE, "--spot", "--", "config.yaml", "mesh.fsdp=16"
  )
  assert create == [
      "gcloud", "compute", "tpus", "tpu-vm", "create", "first", "--zone",
      "us-west4-a", "--accelerator-type", "v5litepod-16", "--version",
      "tpu-ubuntu2204-base", "--spot",
  ]  # fmt: skip
  assert pack[0] == "tar" and copy[4:6] == ["scp", pack[2]]
  assert copy[6].startswith("first:") and "all" in copy
  assert remote(install)[-2:] == [".[tpu,client,serve]", "./packages/*"]
  assert remote(train) == [
    VM_PYTHON,
    *TRAIN,
    "processes.coordinator=auto",
    "config.yaml",
    "mesh.fsdp=16",
  ]
  assert delete[4:6] == ["delete", "first"] and "--quiet" in delete


# A slice of one host, whose home and /tmp are $HOST; create ends with $FAIL.
GCLOUD = r"""#!/bin/bash
echo "$4" >> "$HOST/calls"
case $4 in
  create) exit ${FAIL:-0} ;;
  scp) cp "$5" "$HOST/${6##*/}" ;;
  ssh)
    while [ "$1" != --command ]; do shift; done
    case $2 in *multi_turn.train*) echo "$2" > "$HOST/train"; exit ;; esac
    cd "$HOST" && HOME=$HOST exec bash -c "${2//\/tmp\//$HOST/}" ;;
esac
"""
# apt-get install brings Python 3.11, as on Ubuntu 22.04.
SUDO = r"""#!/bin/sh
echo "$@" >> "$HOST/apt"
case "$*" in
  *install*python3*) ln -sf "$PYTHON_REAL" "$HOST/bin/python3.11" ;;
esac
"""
ONLY = ("ln", "cp", "tar", "gzip", "sh", "bash", "mkdir", "rm", "dirname",
        "sed", "sleep")  # fmt: skip


@pytest.fixture(name="host")
def _host(tmp_path):
  """A machine whose python3 is 3.10; (its directory, the environment)."""
  tools = tmp_path / "bin"
  tools.mkdir()
  for name in ONLY:
    (tools / name).symlink_to(shutil.which(name))
  for name, text in (
    ("gcloud", GCLOUD),
    ("sudo", SUDO),
    # No module is in it, and it is not new enough.
    ("python3", "#!/bin/sh\necho Python 3.10.12; exit 1\n"),
  ):
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)
  base = pathlib.Path(sys.base_prefix, "bin", "python3.11")
  env = {
    "PATH": str(tools),
    "HOST": str(tmp_path),
    "TMPDIR": str(tmp_path),
    "PYTHON_REAL": str(base if base.exists() else sys._base_executable),
    "PYTHON": "",
    "PIP_NO_INDEX": "1",
    "PIP_NO_DEPS": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_NO_COMPILE": "1",
    "PYTHONPATH": sysconfig.get_paths()["purelib"],  # For the build tools.
  }
  return tmp_path, env


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_with_an_old_python_gets_one_and_this_checkout(host):
  directory, env = host
  result = run(
    "bash", LAUNCH / "tpu_vm.sh", *SLICE, "--", "steps=1", seconds=280, **env
  )
  assert result.returncode == 0, result.stderr
  assert (directory / "calls").read_text().split() == [
    "create",
    "scp",
    "ssh",
    "ssh",
    "delete",
  ]
  release = pathlib.Path("/etc/os-release").read_text()
  packages = (directory / "apt").read_text().splitlines()[-1]
  ubuntu = 'VERSION_ID="22.04"' in release
  assert packages.endswith(
    "install python3.11 python3.11-venv" if ubuntu else "install python3-venv"
  )
  # What the command of the run starts, and where it finds the package.
  python, *_ = shlex.split((directory / "train").read_text())
  assert python == VM_PYTHON
  code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
  place = run(directory / python, "-c", code).stdout.strip()
  train = pathlib.Path(place, "tunix/rl/multi_turn/train.py")
  assert train.is_relative_to(directory) and train.exists()
  assert not list(directory.glob("tunix-multi-turn-*"))  # The local archive.


def test_a_slice_that_was_not_made_is_not_deleted(host):
  directory, env = host
  result = run(
    "bash", LAUNCH / "tpu_vm.sh", *SLICE, "--", "x=1", FAIL="3", **env
  )
  assert result.returncode == 3
  assert (directory / "calls").read_text().split() == ["create"]
  assert not list(directory.glob("*.tar.gz"))


@pytest.mark.parametrize("text", ("a b", "it's", '"$HOME"', "x; rm -r /", "*"))
def test_arguments_reach_train_as_they_are(text):
  *_, trained = tpu_vm(*SLICE, "--keep", "--", f"run.name={text}")
  assert remote(trained)[-1] == f"run.name={text}"


@pytest.mark.parametrize(
  "arguments, problem",
  (
    (SLICE[:-2] + ("--", "x=1"), "--type is missing"),
    (SLICE, "no arguments of train"),
    (SLICE + ("mesh.fsdp=16",), "mesh.fsdp=16 is no option"),
    (SLICE[:-1], "--type needs a value"),
    (SLICE + ("--package", "x", "--", "x=1"), "--package is no option"),
  ),
)
def test_a_slip_ends_with_one_line(arguments, problem):
  process = run("bash", LAUNCH / "tpu_vm.sh", "--dry-run", *arguments)
  assert process.returncode == 2 and not process.stdout
  (line,) = process.stderr.splitlines()
  assert problem in line


def test_slurm_starts_train_on_every_task():
  script = LAUNCH / "slurm.sbatch"
  process = run("bash", script, "config.yaml", "run.name=a b", DRY_RUN="1")
  assert process.stdout.splitlines() == [
    "srun",
    "--kill-on-bad-exit=1",
    ".venv/bin/python",
    *TRAIN,
    "processes.coordinator=auto",
    "config.yaml",
    "run.name=a b",
  ]
  directives = [
    line
    for line in script.read_text().splitlines()
    if line.startswith("#SBATCH")
  ]
  assert "#SBATCH --signal=TERM@300" in directives
  assert run("bash", script).returncode == 2


def test_the_jobset_is_one_and_its_command_a_run():
  data = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
  assert data["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert data["kind"] == "JobSet"
  (job,) = data["spec"]["replicatedJobs"]
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
  data = yaml.safe_load((LAUNCH / "fleet_jobset.yaml").read_text())
  assert data["kind"] == "JobSet"
  jobs = {job["name"]: job for job in data["spec"]["replicatedJobs"]}
  assert set(jobs) == {"learner", "collectors"}
  assert data["spec"]["successPolicy"]["targetReplicatedJobs"] == ["learner"]
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
    for a in learner["command"][3:]
    if not a.endswith(".yaml")
  ]
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
  assert command[:4] == ["python", "-m", "tunix_multi_turn", "commands.collect"]
  parser = collect.parser()
  return parser.parse_args(command[4:]).directory


def test_collectors_of_a_deployment_come_and_go():
  data = yaml.safe_load((LAUNCH / "collectors.yaml").read_text())
  assert data["kind"] == "Deployment"
  labels = data["spec"]["selector"]["matchLabels"]
  assert data["spec"]["template"]["metadata"]["labels"] == labels
  pod = data["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  assert collected(container["command"]) == "/runs/first"
  mounts = {mount["name"] for mount in container["volumeMounts"]}
  assert mounts == {volume["name"] for volume in pod["volumes"]}


COLLECTORS = ("--name", "first", "--zone", "us-west4-a")


def tpu_collectors(*arguments):
  return run("bash", LAUNCH / "tpu_vm_collectors.sh", "--dry-run", *arguments)


@pytest.mark.parametrize(
  "host, directory",
  (("0", "/mnt/my runs/r"), ("3", "/mnt/my runs/r/processes/3")),
)
def test_each_host_of_a_slice_collects_for_its_own_process(
  host, directory, tmp_path
):
  process = tpu_collectors(
    *COLLECTORS, "--each", "2", "--", "/mnt/my runs/r/", "gym.options={a: 1}"
  )
  assert process.returncode == 0, process.stderr
  (line,) = process.stdout.splitlines()
  words = shlex.split(line)
  assert words[words.index("--worker") + 1] == "all"
  # The command of a host, where its programs only write what they are given.
  for name, text in (
    ("curl", f"echo {host}"),
    ("sudo", "true"),
    ("systemd-run", 'printf "%s\\0" "$@" >>"$OUT"; printf "\\n" >>"$OUT"'),
  ):
    (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / name).chmod(0o755)
  out = tmp_path / "out"
  command = words[words.index("--command") + 1]
  process = run(
    "bash",
    "-c",
    command,
    PATH=f"{tmp_path}:{os.environ['PATH']}",
    OUT=str(out),
    USER="me",
    HOME="/home/me too",
  )
  assert process.returncode == 0, process.stderr
  started = [line.split("\0")[:-1] for line in out.read_text().splitlines()]
  assert len(started) == 2
  for number, words in enumerate(started, 1):
    assert f"tunix-collector-{number}" in words
    begin = words.index(f"/home/me too/{VM_PYTHON}")
    assert collected(["python", *words[begin + 1 :]]) == directory
    assert words[-1] == "gym.options={a: 1}"


@pytest.mark.parametrize(
  "arguments, problem",
  (
    (COLLECTORS, "no directory of a run"),
    (COLLECTORS[:2] + ("--", "r"), "--zone is missing"),
    (COLLECTORS + ("--each", "0", "--", "r"), "--each 0"),
    (COLLECTORS + ("runs/r",), "runs/r is no option"),
  ),
)
def test_a_slip_of_collectors_ends_with_one_line(arguments, problem):
  process = tpu_collectors(*arguments)
  assert process.returncode == 2 and not process.stdout
  (line,) = process.stderr.splitlines()
  assert problem in line


def test_collectors_of_a_slice_end():
  process = tpu_collectors(*COLLECTORS, "--stop", "--", "/mnt/r")
  (line,) = process.stdout.splitlines()
  assert "systemctl --user stop" in shlex.split(line)[-1]


# --- a rollout buffer ---------------------------------------------------------


@pytest.fixture(name="tasks")
def _tasks(tmp_path):
  path = tmp_path / "tasks of mine.jsonl"
  rows = [
    {"prompt": f"What is {i} + 1?", "label": f"{i + 1}"} for i in range(40)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def rollout_buffer(*arguments, **env):
  return run("bash", LAUNCH / "rollout_buffer.sh", *arguments, **env)


def test_a_rollout_buffer_is_fetched_prepared_served_and_trained_from(tasks):
  process = rollout_buffer(
      "--model", "Qwen/Qwen3-0.6B", "--tasks", tasks, "--dir", "a b",
      "--port", "7", "--dry-run", "--", "environment.name=gsm8k",
  )  # fmt: skip
  assert not process.returncode, process.stderr
  venv, fetched, assigned, served, trained = map(
    shlex.split, process.stdout.splitlines()
  )
  assert venv == ["mkdir", "-p", "a b"]
  assert fetched == [
    "hf",
    "download",
    "Qwen/Qwen3-0.6B",
    "--local-dir",
    "a b/Qwen3-0.6B",
  ]
  assert assigned[2].endswith("agent_rollout.assign_instance_id")
  assert assigned[3:] == [
    "--input_path",
    str(tasks),
    "--task_type",
    "math",
    "--output_path",
    "a b/tasks.jsonl",
  ]
  args = buffer_service.parser().parse_args(served[3:])
  assert (str(args.dir), args.port) == ("a b/buffer", 7)
  assert args.input_roots == "a b,a b/Qwen3-0.6B"
  assert trained[1:3] == TRAIN
  overrides = [w for w in trained[3:] if not w.startswith("policy=")]
  config = config_lib.load_config(overrides)
  assert config.rollout.via == "buffer"
  assert config.buffer.url == "http://127.0.0.1:7"
  assert config.buffer.input_file == "a b/tasks.jsonl"
  assert "policy=a b/Qwen3-0.6B" in trained
  # A directory is not fetched.
  process = rollout_buffer(
    "--model", tasks.parent, "--tasks", tasks, "--dry-run", "--"
  )
  assert "hf" not in process.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_with_a_rollout_buffer_ends_with_its_service(tasks, tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  command = [
      "bash", LAUNCH / "rollout_buffer.sh", "--model",
      policy_files.resolve("qwen3_vl_tiny"), "--tasks", tasks, "--dir",
      tmp_path / "work", "--port", port, "--", *small_runs.SMALL,
      f"run.dir={tmp_path}", "name=b", "environment.name=gsm8k",
      "warm_start.source=none", "buffer.poll_s=0.1", "learner.steps=1",
      "buffer.missing_logprobs=recompute", "sampling.max_new_tokens=4",
  ]  # fmt: skip
  process = run(*command, PYTHON=sys.executable, seconds=300)
  assert not process.returncode, process.stderr
  assert len(small_runs.metrics_of(tmp_path / "b")) == 1
  with pytest.raises(OSError):
    socket.create_connection(("127.0.0.1", port), 1)


@pytest.mark.parametrize(
  "arguments, problem",
  (
    (("--tasks", "x"), "--model is missing"),
    (("--model", "x"), "--tasks is missing"),
    (("--model", "x", "--tasks", "/nowhere"), "/nowhere: no such file"),
    (("--model",), "--model needs a value"),
    (("run.seed=1",), "come after --"),
  ),
)
def test_a_slip_of_a_rollout_buffer_ends_with_one_line(arguments, problem):
  ended = rollout_buffer(*arguments)
  assert ended.returncode == 2 and problem in ended.stderr
  assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck")
@pytest.mark.parametrize("name", (
    "launch/tpu_vm.sh", "launch/slurm.sbatch", "launch/tpu_vm_collectors.sh",
    "launch/rollout_buffer.sh", "scripts/gcloud_in_chroot.sh",
))  # fmt: skip
def test_scripts_pass_shellcheck(name):
  result = run("shellcheck", "-s", "bash", LAUNCH.parent / name)
  assert result.returncode == 0, result.stdout
