"""Every command that the documentation tells a person to type is accepted.

Commands run in the process, through their own `main`, in a directory that has
the files and modules the pages speak of. Servers end as soon as they would
serve. The settings of a run are read; one of each form, and in `make docs-test`
each, is a dry run too.
"""

import ast
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.parse

import documented_code
import documented_commands
import pytest
import trials
from tunix.rl.multi_turn import commands as command_list
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.config import documentation
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.environments.gyms import gym_registry
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.planning import chips
from tunix.rl.multi_turn.planning import compiled_update

import tunix_multi_turn

HERE, LIGHT = "tunix.rl.multi_turn", "tunix_multi_turn"
COMMANDS = [
  *documented_commands.everywhere(),
  *documented_commands.of_arguments("docs/quickstart.md"),
  *documented_commands.of_text(
    documentation.FIRST_SCREEN.replace("usage: ", ""), "--help"
  ),
]

FILES = {
  "config.yaml": "learner: {steps: 1}\n",
  "my.yaml": "learner: {steps: 1}\n",
  "tasks.jsonl": '{"task_id": "a", "instruction": "Do it."}\n',
  "chats.jsonl": '[{"role": "user", "content": "Hi."}]\n',
  "words.jsonl": "".join(
    f'{{"task_id": "w{i}", "word": "lamp"}}\n' for i in range(10)
  ),
  "pages.yaml": "greet: {url: 'http://127.0.0.1:8000/?seed={seed}'}\n",
  "gyms.yaml": "- gym: desktop\n  gym_id: big-desktop\n",
  "my_lamps.py": (
    "from tunix.rl.multi_turn.environments import gyms\n"
    "from tunix.rl.multi_turn.environments.gyms import base\n"
    "from tunix.rl.multi_turn.environments.gyms import desktop\n"
    "class Lamps:\n"
    "  def __init__(self, families=None): pass\n"
    "  def families(self): return ('lamps',)\n"
    "  def train_task(self, family, index, seed=0):\n"
    "    return base.Task(task_id=f'{index}', family=family)\n"
    "  eval_task = train_task\n"
    "GYM = gyms.GymSpec(make=desktop.DesktopGym, tasks=Lamps,"
    " lists_tasks=True)\n"
    "if 'lamps' not in gyms.gym_registry.GYMS:\n"
    "  gyms.register('lamps', GYM)\n"
  ),
  "my_agents.py": (
    "from tunix.rl.multi_turn.agents import tool_agent\n"
    "class Polite(tool_agent.ToolAgent): pass\n"
  ),
  "my_policies.py": (
    "from tunix.rl.multi_turn.policy.checkpoints import checkpoint\n"
    "def make(seed=0, screen=None, **changes):\n"
    "  return checkpoint.create_policy('nano', seed, **changes)\n"
  ),
  "my_policy.py": (
    "from tunix.rl.multi_turn.policy.checkpoints import checkpoint\n"
    "def create(seed=0, screen=None, width=32, **changes):\n"
    "  return checkpoint.create_policy('nano', seed, **changes)\n"
  ),
  "my_rewards.py": "def brevity(task, action): return 0.0\n",
  "my_algorithms.py": (
    "from tunix.rl.multi_turn.learner.algorithms import advantages\n"
    "advantages.ESTIMATORS.register('rank', advantages.grpo,"
    " replace=True)\n"
  ),
  "my_envs.py": (
    "from tunix.rl.multi_turn import environments\n"
    "class Echo(environments.BaseEnv):\n"
    "  def __init__(self, word, times: int = 1): pass\n"
    "  def reset(self): return {}, {}\n"
    "  def step(self, action): return {}, 0.0, True, {}\n"
  ),
  "my_site.py": "def judge(page, task, answer): return True\n",
  "my_vms.py": "def revert(url): return None\n",
}

OUTSIDE = (
    "gym=genv", "gym=gbox", "gym=openenv", "gym=osworld", "gym=android_world",
    "gym=computer", "gym=gymnasium", "gym=xdesktop", "gym=miniwob",
    "gym=browser", "/models/policy", "-Instruct", "UI-TARS", "resume=",
    "recordings=", "tasks=[]", "configs/mcp.yaml", "processes.",
    "environment=verifiers", "rollout.via=hosts", "rollout.via=offline",
    "rollout.via=buffer", "recipes/miniwob", "recipes/office",
    "lora.yaml", "recipes/rollout_buffer", "recipes/offline",
    "recipes/recordings", "smollm2",
)  # fmt: skip
"""A run with one of these needs a server, a program or files that are not
here: its settings are read and checked, but nothing is built."""


@pytest.fixture(autouse=True)
def _sandbox(tmp_path, monkeypatch):
  for name, text in FILES.items():
    (tmp_path / name).write_text(text)
  (tmp_path / "examples").symlink_to(documented_commands.ROOT / "examples")
  run = tmp_path / "runs" / "mine"
  run.mkdir(parents=True)
  (run / "config.yaml").write_text("learner: {steps: 1}\n")
  (run / "summary.json").write_text('{"status": "completed"}\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.syspath_prepend(documented_commands.ROOT / "examples")
  for variable in ("TUNIX_MONITOR_TOKEN", "TUNIX_ROLLOUT_TOKEN"):
    monkeypatch.delenv(variable, raising=False)
  before, gyms = set(sys.modules), set(gym_registry.GYMS)
  ranks = set(advantages.ESTIMATORS)
  yield
  for name in set(sys.modules) - before:
    if name.startswith("my_"):
      del sys.modules[name]
  for name in set(gym_registry.GYMS) - gyms:
    gym_registry.GYMS.unregister(name)
  for name in set(advantages.ESTIMATORS) - ranks:
    advantages.ESTIMATORS.unregister(name)


@pytest.fixture(autouse=True)
def _servers_end_at_once(monkeypatch):
  import uvicorn

  served = []

  def run(self, sockets=None):
    served.extend(sockets or ())
    for one in sockets or ():
      one.close()

  listen = http_server.listen
  monkeypatch.setattr(uvicorn.Server, "run", run)
  # It closes handlers that others made, and with them pytest's stderr.
  monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
  monkeypatch.setattr(
    http_server,
    "listen",
    # The documented port may be taken here.
    lambda host, port, backlog=None: listen("127.0.0.1", 0, backlog),
  )
  monkeypatch.setattr(engine_lib.RolloutEngine, "warm_up", lambda *a: 0.0)
  # Compiled only for its size, which is not what is tested here.
  monkeypatch.setattr(compiled_update, "activations", lambda *a, **k: None)
  return served


def _main(module):
  spec = importlib.util.find_spec(f"{HERE}.{module}")
  if spec.submodule_search_locations is not None:  # Of a moved room, [].
    module += ".__main__"
  return importlib.import_module(f"{HERE}.{module}")


def _train(words, dry):
  if "--help" in words:
    with pytest.raises(SystemExit) as ended:
      train.main(words)
    assert ended.value.code == 0
  elif not dry or any(part in word for part in OUTSIDE for word in words):
    config_lib.load_config([w for w in words if w != "--dry-run"])
  else:
    assert train.main([*words, "--dry-run"]) == 0


def _make(words, dry):
  target, *result = words
  makefile = (documented_commands.ROOT / "Makefile").read_text()
  assert re.search(rf"^{re.escape(target)}:", makefile, re.M), target
  arguments = dict(word.split("=", 1) for word in result)
  if target == "train":
    _train(shlex.split(arguments.get("ARGS", "")), dry)


def _accepted(module, words, capsys, dry=False):
  """Runs a command's `main`; argparse or a problem fails the test."""
  program = _main(module)
  if module == "train":
    _train(words, dry)
  elif module == "evaluate":
    try:
      config_lib.load_evaluation(words)
    except SystemExit as ended:  # Of --help.
      assert ended.code == 0
    except config_lib.ConfigError as error:
      # Runs that the pages speak of are not here.
      assert all("directory" in problem for problem in error.problems), error
  elif module in ("commands.rollout", "commands.collect"):
    # The learner of a run that the pages speak of is not here.
    assert program.main([*words, "--patience", "0"]) == 1
  elif module == "plan" and "--help" not in words:
    topology, *_ = program.split(words)
    assert chips.Topology.of(topology).devices
    if dry:  # To compile takes minutes.
      assert program.main([*words, "--analytic"]) in (0, 1)
  elif module == "doctor" and "--help" not in words:
    # Its checks are of this machine.
    config_lib.load_config(program.read(words)[0])
  elif module in ("config", "reporting.metrics"):
    assert not words
  elif module == "commands.publish":  # Its words are read; no run is here.
    assert program.main(words) == 2
    stderr = capsys.readouterr().err
    assert "is not a run directory" in stderr or "no token" in stderr, stderr
  elif module in ("environments.play", "commands.inspect_policy") or (
    module.endswith("miniwob")
  ):
    # Plays, or takes a minute: its arguments are parsed.
    args = program.parser().parse_args(words)
    if (
      module == "environments.play"
      and args.by == "oracle"
      and (args.gym == "desktop")
    ):
      assert program.main(words) == 0
  elif module == "monitor":
    from training_monitor import serve

    if not words:  # Its name alone, in a text.
      return
    status = serve.main(words)
    result = capsys.readouterr().err
    # Runs and files that the pages speak of are not here; doctor says so by 1.
    missing = "there is no" in result or "no run" in result
    assert status == 0 or missing or words[0] == "doctor", result
  elif module == "clients.vllm":
    status = program.main(words)
    result = capsys.readouterr().err
    # Checkpoints that the pages speak of are not here.
    directory = words[words.index("--model") + 1]
    assert status == 0 or directory in result, result
  elif module == "environments.gym_server" and "xdesktop" in words:
    program.specs(program.parser().parse_args(words))
  else:
    assert not program.main(words), capsys.readouterr().err


def _options_exist(file, words):
  """A benchmark takes minutes, and a script root: neither is started."""
  source = file.read_text()
  doc = ast.get_docstring(ast.parse(source), clean=False)
  code = source.replace(doc, "")
  for word in words:
    if option := re.match("--([a-z-]+)", word):
      name = option[1].replace("-", "[-_]")
      if not re.search(rf'["\s-]{name}["\s:]', code):
        assert "argparse" in code, word
        shown = subprocess.run(  # Its options are computed.
          [sys.executable, file, "--help"],
          capture_output=True,
          text=True,
          timeout=100,
          check=True,
        ).stdout
        assert option[0] in shown.replace(doc.strip(), ""), word


def _form(command):
  """Returns the start of a run or a plan, slow to build; else None."""
  words = command.words()
  text = " ".join(words)
  match = re.match(
    rf"((?:\w+=\S+ )*(?:make|tunix-mt|python -m (?:{HERE}\.|{LIGHT} )))\s*"
    r"(train|plan)\b",
    text,
  )
  if match is None or "--help" in words:
    return None
  if match[2] == "train" and any(part in text for part in OUTSIDE):
    return None
  return re.sub("=[^ ]*", "", match[0])


def _built():
  """Each once, however many pages have it: the first of each form, others.

  The others set the same settings to other values, which all are accepted
  above: they are a sample but for `make test-all`.
  """
  distinct = {
    tuple(one.words()): one
    for one in COMMANDS
    # test_example_recipes.py plans the sizes of these.
    if _form(one) and not re.search(r"plan examples/recipes/", one.text)
  }
  first = {}
  for one in distinct.values():
    first.setdefault(_form(one), one)
  further = [one for one in distinct.values() if one not in first.values()]
  slow = [pytest.param(o, marks=pytest.mark.slow) for o in trials.some(further)]
  dear = lambda one: re.search(r"\bplan\b.*policy=Qwen", one.text)
  return [
    *(
      # Each of a published size's layers is traced.
      pytest.param(one, marks=pytest.mark.slow) if dear(one) else one
      for one in first.values()
    ),
    *slow,
  ]


@pytest.mark.parametrize(
  "command", COMMANDS, ids=lambda one: f"{one.where}: {one.text}"[:90]
)
def test_a_documented_command_is_accepted(command, capsys, monkeypatch):
  _type(command, capsys, monkeypatch, dry=False)


@pytest.mark.parametrize(
  "command", _built(), ids=lambda one: f"{one.where}: {one.text}"[:90]
)
def test_a_documented_run_can_be_built(command, capsys, monkeypatch):
  _type(command, capsys, monkeypatch, dry=True)


def _type(command, capsys, monkeypatch, dry):
  words = command.words()
  while "=" in words[0]:
    name, _, value = words.pop(0).partition("=")
    monkeypatch.setenv(name, value)
  if words[0] == "sudo":
    words.pop(0)
  if words[0] == "make":
    _make(words[1:], dry)
  elif words[0] == "tunix-mt":
    module, _ = tunix_multi_turn.COMMANDS[words[1]]
    if importlib.util.find_spec(f"{HERE}.{module}") is None:
      pytest.skip(f"no {module} in this clone")
    _accepted(module, words[2:], capsys, dry)
  elif words[0] in documented_commands.SCRIPTS:
    _accepted(documented_commands.SCRIPTS[words[0]], words[1:], capsys)
  elif words[1:3] == ["-m", LIGHT]:  # Starts the same without google-tunix.
    _accepted(words[3], words[4:], capsys, dry)
  elif words[1] == "-m":
    assert words[2].startswith(HERE), words[2]
    module = words[2].removeprefix(f"{HERE}.")
    _accepted(module, words[3:], capsys, dry)
  elif not words[1].startswith("examples/"):
    _options_exist(documented_commands.ROOT / words[1], words[2:])
  else:
    file = documented_commands.ROOT / words[1]
    program = importlib.import_module(file.stem)
    # There is no server: the arguments were read when it is asked.
    with pytest.raises(SystemExit) as ended:
      program.main(["--help"])
    assert ended.value.code == 0
    help_text = capsys.readouterr().out
    for word in words[2:]:
      assert not word.startswith("--") or word in help_text


def test_documented_commands_are_found():
  texts = {one.text for one in COMMANDS}
  assert len(texts) > 70
  for module in command_list.COMMANDS:
    short = module.removeprefix("tunix.rl.multi_turn.")
    assert any(
      module in text or f"tunix_multi_turn {short}" in text for text in texts
    ), module
  assert any("serving tiny_vl --port 8000" in text for text in texts)


# --- the other lines of a shell ----------------------------------------------

ROOT = documented_commands.ROOT
OTHERS = [
  line
  for page in documented_code.pages()
  for line in documented_commands.shell_lines(page)
  if not documented_commands.is_ours(line.text)
]


def _names_files(words):
  for word in words:
    if re.match(r"(docker|scripts|launch)/\S+$", word):
      if not word.endswith(".env"):  # It is copied there.
        assert (ROOT / word).is_file(), word


def _curl(words):
  """Its call is one of docs/http_api.md, as are the fields that it sends."""
  url = urllib.parse.urlsplit(words[-1])
  assert url.hostname == "127.0.0.1", words[-1]
  fields = json.loads(words[words.index("-d") + 1]) if "-d" in words else {}
  calls = re.findall(
    r"^\| `([A-Z]+) (/\S*)` \| (.*)",
    (ROOT / "docs/http_api.md").read_text(),
    re.M,
  )
  takes = [
    row
    for method, path, row in calls
    if method == ("POST" if "-d" in words else "GET")
    and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), url.path)
  ]
  assert takes, f"no server has {url.path}"
  assert all(f"`{name}`" in takes[0] for name in fields), (fields, takes[0])


def _docker(words, capsys):
  _names_files(words)
  if words[1] == "build":
    recipe = (ROOT / words[words.index("-f") + 1]).read_text()
    for flag, value in zip(words, words[1:]):
      if flag == "--build-arg":
        name = value.partition("=")[0]
        assert re.search(rf"^ARG {name}\b", recipe, re.M), name
    assert words[-1] == "."
  elif words[1] == "run":
    (image,) = (i for i, w in enumerate(words) if w.startswith("tunix-mt:"))
    module, _ = tunix_multi_turn.COMMANDS[words[image + 1]]
    _accepted(module, words[image + 2 :], capsys)
  else:
    assert words[1] == "compose" and words.count("-f") >= 1


def _tpu_notebook(words):
  home = pathlib.Path.cwd()
  (home / "tunix").mkdir()
  script = subprocess.run(
      ["bash", ROOT / words[0], "--dry-run",
       *(w.replace("~", str(home)) for w in words[1:] if w != "--dry-run")],
      capture_output=True, text=True, timeout=60, check=False,
  )  # fmt: skip
  assert script.returncode == 0 and "docker run" in script.stdout, script.stderr


def _pip(words):
  if words[-1].startswith(("./packages/", "packages/")):
    folder, _, extra = words[-1].removesuffix("]").partition("[")
    package = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    extras = package["project"]["optional-dependencies"]
    assert not extra or extra in extras, extra
    if "-c" in words:
      assert (ROOT / words[words.index("-c") + 1]).is_file()
    return
  assert (ROOT / words[words.index("-c") + 1]).is_file()
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  for extra in re.findall(r"[a-z]+", re.search(r"\[(.*)\]", words[-1])[1]):
    assert extra in project["optional-dependencies"], extra


@pytest.mark.parametrize(
  "line", OTHERS, ids=lambda one: f"{one.page}: {one.text}"[:80]
)
def test_another_line_of_a_shell_is_right_or_marked(line, capsys):
  if line.marker is not None:
    assert line.marker[0] in documented_code.KINDS
    return
  words = shlex.split(line.text, comments=True)
  match words[0]:
    case "docker":
      _docker(words, capsys)
    case "docker/tpu_notebook.sh":
      _tpu_notebook(words)
    case "pip":
      _pip(words)
    case "cp":
      _names_files(words)
    case "python":  # workflow/test_areal_executor.py runs it.
      assert words[1:4] == ["-m", "examples.cua_agent.train", "--config"]
      assert (ROOT / words[4]).is_file()
    case "curl":
      _curl(words)
    case ".ci/run":
      assert os.access(ROOT / words[0], os.X_OK)
    case ".":
      assert words[1] == ".venv/bin/activate"
    case "jq":  # Its file is made by a line before.
      assert words[-1] == "mine.jsonl"
    case "sqlite3":
      assert words[2].startswith("VACUUM INTO")
    case "pg_dump":
      assert words[1].startswith("postgresql://")
    case _:  # Settings, of a command that the text names.
      settings = [w for w in words if w != "…"]
      assert all("=" in w for w in settings), f"nothing checks {line.text!r}"
      config_lib.load_config(settings)


def test_a_line_that_nothing_checks_is_found(tmp_path, monkeypatch):
  page = tmp_path / "page.md"
  page.write_text(
    "Text:\n\n    make train\n    rm -rf all \\\n        --of it\n\n"
    "- A list's\n\n      own text\n\n```text\nnothing\n```\n\n"
    "<!-- not run: network, far away -->\n\n    ssh there\n"
  )
  monkeypatch.setattr(documented_commands, "ROOT", tmp_path)
  lines = documented_commands.shell_lines("page.md")
  assert [one.text for one in lines] == [
    "make train",
    "rm -rf all --of it",
    "ssh there",
  ]
  assert [one.marker for one in lines] == [None, None, ("network", "far away")]


# --- hints ------------------------------------------------------------------


def test_a_hint_names_the_interpreter_as_a_shell_finds_it(
  tmp_path, monkeypatch
):
  monkeypatch.delenv(shell_hints.MAKE_VARIABLE, raising=False)
  binary = tmp_path / "env" / "bin"
  binary.mkdir(parents=True)
  (binary / "python").symlink_to(sys.executable)
  monkeypatch.setattr(sys, "executable", str(binary / "python"))
  monkeypatch.setenv("PATH", "/nowhere")
  monkeypatch.chdir(tmp_path)
  resume = shell_hints.command("train", "resume=runs/it's me")
  assert resume == (
    "./env/bin/python -m tunix.rl.multi_turn.train 'resume=runs/it'\"'\"'s me'"
  )
  monkeypatch.chdir("/")
  assert shell_hints.python() == str(binary / "python")
  monkeypatch.setenv("PATH", str(binary))
  assert shell_hints.python() == "python"


def test_a_hint_of_make_train_is_make_train(monkeypatch, tmp_path):
  makefile = (documented_commands.ROOT / "Makefile").read_text()
  assert re.search(
    rf"^train: export {shell_hints.MAKE_VARIABLE} = train$", makefile, re.M
  )
  monkeypatch.setenv(shell_hints.MAKE_VARIABLE, "train")
  for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # Of the make that tests.
    monkeypatch.delenv(name, raising=False)
  odd = "resume=runs/it's $me"
  hint = shell_hints.command("train", odd, "steps=3")
  # As make's recipe receives it.
  (tmp_path / "Makefile").write_text("train:\n\t@printf '%s\\n' $(ARGS)\n")
  process = subprocess.run(
    hint,
    shell=True,
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=30,
    check=True,
  ).stdout
  assert process.splitlines()[-2:] == [odd, "steps=3"]
  assert shell_hints.command("monitor", "serve").endswith("monitor serve")


@pytest.mark.slow  # It imports google-tunix.
@pytest.mark.timeout(120)
def test_a_printed_hint_runs_with_no_environment_activated(monkeypatch):
  """PATH has no python of this environment; the hint is typed in a shell."""
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("VIRTUAL_ENV", "PATH", shell_hints.MAKE_VARIABLE)
  }
  environment["PATH"] = "/usr/bin:/bin"
  monkeypatch.setenv("PATH", environment["PATH"])
  monkeypatch.delenv(shell_hints.MAKE_VARIABLE, raising=False)
  monkeypatch.chdir(documented_commands.ROOT)
  hint = shell_hints.command("commands")
  shown = subprocess.run(
    hint,
    shell=True,
    env=environment,
    capture_output=True,
    text=True,
    timeout=60,
    cwd=documented_commands.ROOT,
  )
  assert shown.returncode == 0, shown.stderr
  assert f"{HERE}.train" in shown.stdout
