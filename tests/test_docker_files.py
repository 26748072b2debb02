"""docker/ and the editor's files: what they start, without an engine.

`docker` on PATH is a recorder here: it is the border of the script.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tomllib

from agent_services.run_service import __main__ as run_service
from agent_services.serving import arguments as serving
from cua_gyms.gym_server import __main__ as gym_server
import pytest
from training_monitor import serve as monitor
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.net import http_server
import yaml

import tunix_multi_turn

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
IMAGE = "us-docker.pkg.dev/colab-images/public/runtime"
TPU = ["-v", "/dev:/dev", "-v", "/run:/run",
       "-v", "/var/lib/cloud:/var/lib/cloud", "-e", "TPU_NAME=local",
       ]  # fmt: skip
RECORDER = r"""#!/bin/sh
{ for word; do printf '%s\0' "$word"; done; printf '\n'; } >> "$CALLS"
case $1 in
  stop) echo "Error response from daemon: No such container" >&2; exit 1;;
  container) exit ${INSPECT:-1};;
esac
"""


@pytest.fixture(name="project")
def _project(tmp_path):
  folder = tmp_path / "a project of mine"
  folder.mkdir()
  return folder


def script(*arguments, **env):
  return subprocess.run(
    ["bash", DOCKER / "tpu_notebook.sh", *map(str, arguments)],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
    env={"PATH": os.environ["PATH"], **env},
  )


def shown(*arguments):
  """(the two commands of a dry run, what is said beside them)."""
  process = script("--dry-run", "--ssh-host", "my-tpu", *arguments)
  assert process.returncode == 0, process.stderr
  stop, run = (shlex.split(line) for line in process.stdout.splitlines())
  return stop, run, process.stderr


@pytest.mark.parametrize(
  "path", ["docker/tpu_notebook.sh", "launch/tpu_vm.sh", "scripts/venv.sh"]
)
def test_shellcheck_finds_nothing(path):
  if shutil.which("shellcheck") is None:
    pytest.skip("no shellcheck; apt-get install shellcheck")
  process = subprocess.run(
    ["shellcheck", ROOT / path],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert process.returncode == 0, process.stdout


# --- the notebook's container -------------------------------------------------


def test_the_container_of_the_first_design(project):
  """Its document's command, and a path with spaces."""
  stop, run, note = shown(project)
  assert stop == ["docker", "stop", "colab"]
  assert run == [
      "docker", "run", "--rm", "--privileged", "--net=host", *TPU,
      "-v", f"{project}:/workspace/tunix", "--name", "colab",
      "-w", "/workspace", IMAGE,
  ]  # fmt: skip
  assert "http://127.0.0.1:8080/?token=TOKEN" in note
  assert "ssh -N -L 8080:127.0.0.1:8080 my-tpu" in note
  assert "%load_ext autoreload" in note and "%autoreload 2" in note


@pytest.mark.parametrize(
  "arguments, workdir",
  [
    (["--workdir", "/workspace/tunix"], ["-w", "/workspace/tunix"]),
    ([], ["-w", "/workspace"]),
    (["--workdir", "image"], []),
  ],
)
def test_where_the_container_starts(project, arguments, workdir):
  _, run, _ = shown(*arguments, project)
  assert run[-1 - len(workdir) : -1] == workdir
  assert run.count("-w") == bool(workdir)


@pytest.mark.parametrize(
  "arguments, mapped, port",
  [
    ([], None, 8080),
    (["--no-host-network"], "127.0.0.1:9000:8080", 9000),
    (["--no-host-network", "--port", "9123"], "127.0.0.1:9123:8080", 9123),
    (["--port", "9123"], None, 8080),
  ],
)
def test_ports_are_mapped_without_the_hosts_network_only(
  project, arguments, mapped, port
):
  _, run, note = shown(*arguments, project)
  assert ("--net=host" in run) == (mapped is None)
  assert ("-p" in run) == (mapped is not None)
  if mapped:
    assert run[run.index("-p") + 1] == mapped
  assert f"http://127.0.0.1:{port}/?token=TOKEN" in note
  assert f"-L {port}:127.0.0.1:{port} my-tpu" in note
  assert ("--port=9123 is ignored" in note) == (arguments[:1] == ["--port"])


@pytest.mark.parametrize(
  "option, more", [("--cpu", []), ("--gpu", ["--gpus=all"])]
)
def test_a_machine_without_a_tpu(project, option, more):
  _, run, _ = shown(
    option, "--mount", "/my data:/data", "--env", "A=b c", project
  )
  assert run == [
      "docker", "run", "--rm", *more, "--net=host",
      "-v", f"{project}:/workspace/tunix", "-v", "/my data:/data",
      "-e", "A=b c", "--name", "colab", "-w", "/workspace", IMAGE,
  ]  # fmt: skip


@pytest.mark.parametrize(
  "options, extras",
  [
    ((), "tpu,client,serve"),
    (("--gpu",), "gpu,client,serve"),
    (("--cpu",), "client,serve"),
  ],
)
def test_the_cell_that_installs_this_package_is_shown(options, extras, project):
  *_, stderr = shown(*options, ROOT)
  line = f"%pip install -q -e '/workspace/tunix[{extras}]'"
  assert f"{line} /workspace/tunix/packages/*" in stderr
  packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert {*extras.split(",")} <= set(packages["optional-dependencies"])
  *_, stderr = shown(*options, project)  # Another project.
  assert "pip install" not in stderr


def recorded(tmp_path, project, *arguments, **env):
  """(the finished script, the calls of docker)."""
  tools = tmp_path / "tools"
  tools.mkdir()
  (tools / "docker").write_text(RECORDER)
  (tools / "docker").chmod(0o755)
  (tools / "sleep").write_text("#!/bin/sh\n")
  (tools / "sleep").chmod(0o755)
  calls = tmp_path / "calls"
  process = script(
    *arguments,
    project,
    CALLS=str(calls),
    PATH=f"{tools}:{os.environ['PATH']}",
    **env,
  )
  return process, [
    line.split("\0")[:-1] for line in calls.read_text().splitlines()
  ]


def test_no_old_container_is_no_error_and_says_nothing(tmp_path, project):
  process, calls = recorded(tmp_path, project, "--name", "mine")
  assert process.returncode == 0 and "No such container" not in process.stderr
  assert calls[:2] == [["stop", "mine"], ["container", "inspect", "mine"]]
  assert calls[2:] == [[
      "run", "--rm", "--privileged", "--net=host", *TPU,
      "-v", f"{project}:/workspace/tunix", "--name", "mine",
      "-w", "/workspace", IMAGE,
  ]]  # fmt: skip


def test_a_container_that_keeps_its_name_is_not_removed(tmp_path, project):
  process, calls = recorded(tmp_path, project, INSPECT="0")
  assert process.returncode == 2
  assert "docker rm colab, or choose another --name" in process.stderr
  assert {call[0] for call in calls} == {"stop", "container"}


def test_the_host_s_edit_is_seen_at_once_where_it_is_mounted(project):
  if shutil.which("bwrap") is None:
    pytest.skip("no bwrap to mount with")
  _, run, _ = shown(project)
  source, _, target = run[run.index(TPU[-1]) + 2].rpartition(":")
  file = project / "reward.py"
  file.write_text("old\n")
  with subprocess.Popen(
      ["bwrap", "--ro-bind", "/usr", "/usr", "--ro-bind", "/bin", "/bin",
       "--ro-bind-try", "/lib", "/lib", "--ro-bind-try", "/lib64", "/lib64",
       "--bind", source, target,
       "sh", "-c", f"read _; cat {target}/reward.py"],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True,
  ) as process:  # fmt: skip
    file.write_text("new\n")
    out, err = process.communicate("\n", timeout=30)
  if process.returncode and "Operation not permitted" in err:
    pytest.skip("no mounts here")
  assert out == "new\n", err


@pytest.mark.parametrize(
  "arguments, wrong",
  [
    ([], "no project"),
    (["/no/such/folder"], "/no/such/folder is no directory"),
    (["--port", "70000", "."], "--port=70000"),
    (["--port"], "--port needs a value"),
    (["--workdir", "here", "."], "--workdir=here"),
    (["--name", "a b", "."], "--name=a b"),
    (["--mount", "here", "."], "--mount=here"),
    (["--env", "A", "."], "--env=A"),
    (["--what", "."], "--what is no option"),
    ([".", "."], "two projects"),
  ],
)
def test_a_wrong_argument_is_named(arguments, wrong):
  process = script("--dry-run", *arguments)
  assert process.returncode == 2 and not process.stdout
  (line,) = process.stderr.splitlines()
  assert line.startswith("error: ") and wrong in line


def test_without_docker_the_fix_is_named(tmp_path, project):
  for name in ("bash", "hostname", "dirname"):
    (tmp_path / name).symlink_to(shutil.which(name))
  process = script(project, PATH=str(tmp_path))
  assert process.returncode == 2 and "no docker on PATH" in process.stderr


PAGE = (ROOT / "docs" / "docker.md").read_text()


def _documented(start):
  return [
    shlex.split(line.strip())
    for line in PAGE.splitlines()
    if line.startswith(f"    {start}")
  ]


def test_documented_notebook_commands_are_accepted(project):
  lines = _documented("docker/tpu_notebook.sh")
  assert len(lines) >= 4
  for _, *words in lines:
    process = script("--dry-run", *words[:-1], project)
    assert process.returncode == 0, (words, process.stderr)


def test_documented_builds_and_runs_are_those_of_the_image():
  arguments = {text.partition("=")[0] for text in _texts("ARG")}
  tags = set()
  for words in _documented("docker build"):
    assert (ROOT / words[words.index("-f") + 1]).is_file()
    tags.add(words[words.index("-t") + 1])
    if "--build-arg" in words:
      argument = words[words.index("--build-arg") + 1]
      assert argument.partition("=")[0] in arguments
  for words in _documented("docker run"):
    (image,) = (word for word in words if word in tags)
    command = words[words.index(image) + 1]
    assert command in tunix_multi_turn.COMMANDS
  for words in _documented("docker compose"):
    files = [after for word, after in zip(words, words[1:]) if word == "-f"]
    assert files and all((ROOT / file).is_file() for file in files)
  for name in arguments - {""}:
    assert f"| `{name}` |" in PAGE


# --- the image ----------------------------------------------------------------


def _texts(word):
  """Returns the arguments of each such instruction of the Dockerfile."""
  text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
  return re.findall(rf"^{word} +(.*)$", text, re.MULTILINE)


def test_what_the_image_copies_is_there_and_in_the_context():
  ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
  for text in _texts("COPY"):
    for source in text.split()[:-1]:
      assert (ROOT / source).exists(), source
      assert f"!{source}" in ignored, source


def test_the_image_takes_extras_and_targets_that_exist():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  arguments = dict(text.partition("=")[::2] for text in _texts("ARG"))
  extras = arguments["EXTRAS"].split(",")
  assert {*extras, "tpu", "gpu"} <= set(project["optional-dependencies"])
  makefile = (ROOT / "Makefile").read_text()
  for target in ("browser", "desktop"):
    assert f"\n{target}:" in makefile
  assert json.loads(*_texts("ENTRYPOINT"))[0] in project["scripts"]


@pytest.mark.parametrize(
  "device, extras, installs",
  [
    ("cpu", "serve", ".[serve]"),
    ("tpu", "serve", ".[tpu,serve]"),
    ("gpu", "", ".[gpu]"),
    ("cpu", "", "."),
  ],
)
def test_the_device_chooses_the_extra(tmp_path, device, extras, installs):
  """The instruction itself, with a pip and a python that record."""
  (pip,) = (text for text in _texts("RUN") if "pip install" in text)
  for name in ("python3", "pip"):
    (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> calls\n')
    (tmp_path / name).chmod(0o755)
  pip = pip.replace("/opt/venv/bin/pip", "pip")
  subprocess.run(
      ["sh", "-c", pip], cwd=tmp_path, check=True, timeout=30,
      env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "DEVICE": device,
           "EXTRAS": extras},
  )  # fmt: skip
  calls = (tmp_path / "calls").read_text().splitlines()
  assert calls == [
    "python3 -m venv /opt/venv",
    f"pip install -q -c constraints.txt {installs} ./packages/*",
  ]


def test_an_unknown_device_ends_the_build():
  check = next(text for text in _texts("RUN") if "DEVICE" in text)
  for device, status in (("cpu", 0), ("gpu", 0), ("npu", 2)):
    process = subprocess.run(
      ["sh", "-c", check],
      env={"DEVICE": device},
      capture_output=True,
      text=True,
      timeout=30,
      check=False,
    )
    assert process.returncode == status
  assert "DEVICE=npu" in process.stderr


# --- the servers --------------------------------------------------------------

COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
PORTS = {
  "gym": 5010,
  "policy": 8000,
  "monitor": 8765,
  "buffer": 8889,
  "runs": 3000,
}
TOKENS = {
  "gym": gym_server.TOKEN_VARIABLE,
  "policy": serving.TOKEN_VARIABLE,
  "monitor": monitor.TOKEN_VARIABLE,
  "buffer": "TUNIX_BUFFER_TOKEN",
  "runs": run_service.TOKEN_VARIABLE,
}


def _words(service):
  """Its command, with the defaults of its variables."""
  return [
    re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)
    for word in SERVICES[service]["command"]
  ]


def test_the_services_are_the_servers_of_a_training():
  assert SERVICES.keys() == PORTS.keys()
  build = {"context": "..", "dockerfile": "docker/Dockerfile"}
  for service in SERVICES.values():
    assert build.items() <= service["build"].items()
    assert service["command"][0] in tunix_multi_turn.COMMANDS


def buffer_service():
  room = "agent_services.rollout_buffer"
  return pytest.importorskip(f"{room}.__main__")


def _parsed(service, monkeypatch):
  """The namespace that the service's own parser makes of its command."""
  name, *words = _words(service)
  if name == "serve":
    return serving.parser().parse_args(words)
  if name == "gym":
    return gym_server.parser().parse_args(words)
  if name == "run-service":
    return run_service.parser().parse_args(words)
  if name == "buffer":
    return buffer_service().parser().parse_args(words)
  seen_args = []
  serve = lambda args: seen_args.append(args) or 0
  monkeypatch.setattr(monitor, "_serve", serve)
  assert monitor.main(words) == 0
  return seen_args[0]


@pytest.mark.parametrize("service", PORTS)
def test_a_service_takes_its_command_and_needs_its_token(service, monkeypatch):
  monkeypatch.delenv(TOKENS[service], raising=False)
  args = _parsed(service, monkeypatch)
  assert args.port == PORTS[service] and args.host == "0.0.0.0"
  if service != "monitor":
    with pytest.raises(ValueError, match=TOKENS[service]):
      http_server.token(args.token_file, args.host, TOKENS[service])


def test_the_buffer_calls_itself_by_the_name_that_trainers_use(monkeypatch):
  """Trainers send the address that they reach it at as remote_buffer_url."""
  args = _parsed("buffer", monkeypatch)
  allowed = buffer_service().rights.Rights()
  for host in ("buffer", "127.0.0.1"):
    payload = {"remote_buffer_url": f"http://{host}:{PORTS['buffer']}"}
    allowed.check(payload, tuple(payload), args.public_url)


@pytest.mark.parametrize("service", PORTS)
def test_a_service_is_published_to_this_machine_and_watched(service):
  definition, port = SERVICES[service], PORTS[service]
  assert definition["ports"] == [f"127.0.0.1:{port}:{port}"]
  variable = TOKENS[service]
  assert definition["environment"][variable].startswith(f"${{{variable}:?")
  kind, python, _, program = definition["healthcheck"]["test"]
  assert (kind, python) == ("CMD", "python")
  compile(program, service, "exec")
  assert f"http://127.0.0.1:{port}/" in program and "timeout=" in program
  assert definition["healthcheck"]["start_period"]
  example = (DOCKER / "env.example").read_text()
  assert f"\n{variable}=\n" in example


def test_the_services_build_with_every_argument_of_the_image():
  result = {
    name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
    for name, value in SERVICES["gym"]["build"]["args"].items()
  }
  arguments = dict(text.partition("=")[::2] for text in _texts("ARG"))
  assert result == {
    name: value.strip('"')
    for name, value in arguments.items()
    if name != "BASE"
  }


def test_the_gpu_variant_reserves_gpus_for_the_policy_alone():
  over = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]
  assert over.keys() == {"policy"}
  assert over["policy"]["build"]["args"] == {"DEVICE": "gpu"}
  # Another image than that of the services that are built for a CPU.
  assert over["policy"]["image"] != SERVICES["gym"]["image"]
  (device,) = over["policy"]["deploy"]["resources"]["reservations"]["devices"]
  assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
  assert device["count"] == "${TUNIX_GPUS:-all}"


def test_variables_of_the_servers_have_an_example():
  text = "".join(path.read_text() for path in DOCKER.glob("compose*.yaml"))
  used = set(re.findall(r"\$\{(\w+)", text))
  example = (DOCKER / "env.example").read_text()
  named = set(re.findall(r"^#? ?(\w+)=", example, re.M))
  assert used <= named


# --- the editor ---------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_an_editors_container_is_built_from_the_image(device):
  file = ROOT / ".devcontainer" / device / "devcontainer.json"
  data = json.loads(file.read_text())
  build = data["build"]
  assert (file.parent / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
  assert (file.parent / build["context"]).resolve() == ROOT
  arguments = {text.partition("=")[0] for text in _texts("ARG")}
  assert build["args"].keys() <= arguments and build["args"]["DEVICE"] == device
  folder = data["workspaceFolder"]
  assert f"target={folder}," in data["workspaceMount"]
  settings = data["customizations"]["vscode"]["settings"]
  assert settings["python.defaultInterpreterPath"].startswith(folder)
  assert "make install-dev" in data["postCreateCommand"]
  if device == "tpu":
    assert data["privileged"] and data["runArgs"] == ["--net=host"]
    assert data["containerEnv"]["TPU_NAME"] == "local"
    mounted = {re.search("source=([^,]+)", m)[1] for m in data["mounts"]}
    assert mounted == {"/dev", "/run", "/var/lib/cloud"}


def test_launch_configurations_name_programs_and_arguments_that_exist():
  launch = json.loads((ROOT / ".vscode" / "launch.json").read_text())
  for one in launch["configurations"]:
    words = one.get("args", [])
    match one["module"].rpartition(".")[2]:
      case "train":
        config_lib.load_config(words)
      case "evaluate":
        config_lib.load_evaluation(words)
      case "gym_server":
        gym_server.parser().parse_args(words)
      case "serving":
        serving.parser().parse_args(words)
      case "pytest":
        assert "${file}" in words
      case name:
        assert name in tunix_multi_turn.COMMANDS and not words
  tasks = json.loads((ROOT / ".vscode" / "tasks.json").read_text())["tasks"]
  makefile = (ROOT / "Makefile").read_text()
  for task in tasks:
    assert f"\n{task['command'].removeprefix('make ')}:" in makefile
