"""The distribution beside google-tunix, and the commands of a newcomer."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

from packaging import requirements
import pytest

import tunix_multi_turn

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command, cwd=ROOT, timeout=100, **env):
  """Runs a command without this session's environment leaking into it."""
  clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
  return subprocess.run(
    list(map(str, command)),
    cwd=cwd,
    env=clean | {"JAX_PLATFORMS": "cpu"} | env,
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def sources():
  """Every file of our packages, relative to the root."""
  return {
    p.relative_to(ROOT).as_posix()
    for name in ("tunix", "tunix_multi_turn")
    for p in (ROOT / name).rglob("*")
    if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".part"
  }


FILES = (
    "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CONTRIBUTING.md",
    "Makefile", "conftest.py", "constraints.txt",
)  # fmt: skip
FOLDERS = (
    ".ci", ".devcontainer", ".vscode", "benchmarks", "docker", "docs",
    "examples", "packages", "scripts", "tests", "tunix", "tunix_multi_turn",
)  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """The wheel and the source distribution of a copy of the repository."""
  tree = tmp_path_factory.mktemp("tree")
  for name in FILES:
    shutil.copy(ROOT / name, tree)
  for name in FOLDERS:
    shutil.copytree(
      ROOT / name,
      tree / name,
      ignore=shutil.ignore_patterns("*.part", "*.egg-info", "build"),
    )
  process = run(
    sys.executable,
    "-c",
    "import setuptools.build_meta as b\n"
    "b.build_wheel('out'), b.build_sdist('out')",
    cwd=tree,
  )
  assert process.returncode == 0, process.stderr[-2000:]
  return tree / "out"


@pytest.fixture(scope="module")
def wheel(built):
  (path,) = built.glob("*.whl")
  return path


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(built):
  """Its tests run: with their helpers, conftest.py and the pages they read."""
  (path,) = built.glob("*.tar.gz")
  with tarfile.open(path) as archive:
    names = {
      member.name.partition("/")[2]
      for member in archive.getmembers()
      if member.isfile()
    }
  expected, tree = {*FILES}, built.parent
  for folder in FOLDERS:
    expected |= {
      p.relative_to(tree).as_posix()
      for p in (tree / folder).rglob("*")
      if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".part"
    }
  assert not expected - names, f"not in it: {sorted(expected - names)}"
  more = {n for n in names - expected if ".egg-info/" not in n}
  assert more <= {"PKG-INFO", "setup.cfg", ".gitignore"}, more


def test_the_wheel_holds_all_of_ours_and_data_too(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  missing = sources() - names
  assert not missing, f"not in the wheel: {sorted(missing)}"
  data = "tunix/rl/multi_turn/policy/data/tiny_vl/"
  assert data + "tokenizer.json" in names
  assert data + "chat_template.jinja" in names
  assert any(n.endswith("licenses/LICENSE") for n in names)


def test_the_wheel_installs_commands_that_start_without_google_tunix(wheel):
  with zipfile.ZipFile(wheel) as file:
    (points,) = (n for n in file.namelist() if n.endswith("entry_points.txt"))
    text = file.read(points).decode()
  for name in (
    "gym-server = tunix_multi_turn:gym_server",
    "play = tunix_multi_turn:play",
    "run-service = tunix_multi_turn:run_service",
  ):
    assert f"tunix-{name}" in text
  code = (ROOT / "tunix_multi_turn" / "__init__.py").read_text()
  assert not re.search(r"^(import|from) tunix\b", code, re.MULTILINE)


@pytest.mark.parametrize(
  "name", [n for n in PROJECT["project"]["scripts"] if n != "tunix-mt"]
)
def test_each_command_starts_a_module_that_runs(name, monkeypatch):
  started = []
  monkeypatch.setattr(tunix_multi_turn, "run", started.append)
  module, _, function = PROJECT["project"]["scripts"][name].partition(":")
  assert module == "tunix_multi_turn"
  getattr(tunix_multi_turn, function)()
  result = f"tunix.rl.multi_turn.{started[0]}"
  assert importlib.util.find_spec(f"{result}.__main__") is not None


@pytest.mark.slow
def test_an_installed_wheel_makes_its_environments_in_gymnasium(
  wheel, tmp_path
):
  """By its import, by module and id, and by its entry point; all of them light.

  Gymnasium 1.0 and later look for no entry points.
  """
  installed = tmp_path / "installed"
  with zipfile.ZipFile(wheel) as file:
    file.extractall(
      installed,
      [n for n in file.namelist() if n.startswith("tunix_multi_turn")],
    )
  bare = run(
    sys.executable,
    "-c",
    "import gymnasium; gymnasium.make('TunixDesktop/click-button-v0')",
    cwd=tmp_path,
    PYTHONPATH=str(installed),
  )
  assert "NamespaceNotFound" in bare.stderr  # As docs/gym_server.md has it.
  heavy = "{'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)"
  play = (
    "env.reset(seed=0)\n"
    "assert env.step(env.action_space.sample())[1] >= 0\n"
    "import tunix_multi_turn\n"
    f"assert tunix_multi_turn.__file__.startswith({str(installed)!r})\n"
    f"assert tunix_multi_turn.is_light() and not {heavy}\n"
  )
  ways = (
    "import tunix_multi_turn.envs\n"
    "assert not any(m == 'tunix' or m.startswith('tunix.')\n"
    "    for m in sys.modules)\n"
    "env = gymnasium.make('TunixDesktop/click-button-v0')\n",
    "env = gymnasium.make(\n"
    "    'tunix_multi_turn.envs:TunixDesktopFlat/set-slider-v0')\n",
    "import importlib.metadata as metadata\n"
    "for point in metadata.entry_points(group='gymnasium.envs'):\n"
    "  if point.value.startswith('tunix_multi_turn'):\n"
    "    point.load()()\n"
    "env = gymnasium.make('TunixDesktop/enter-text-v0')\n",
  )
  for way in ways:
    process = run(
      sys.executable,
      "-c",
      "import sys, gymnasium\n" + way + play,
      cwd=tmp_path,
      PYTHONPATH=str(installed),
    )
    assert process.returncode == 0, (way, process.stderr[-2000:])


def test_the_wheel_holds_nothing_but_ours(wheel):
  for name in zipfile.ZipFile(wheel).namelist():
    assert name.startswith(
      (
        "tunix/rl/multi_turn/",
        "tunix/rl/queue/",
        "tunix_multi_turn/",
        "tunix_multi_turn-",
      )
    ), name
  # What fits the quickstart's checkpoint fits a package index.
  assert wheel.stat().st_size < 16 << 20


def test_no_file_of_google_tunix_is_overwritten(wheel):
  other = {str(path) for path in importlib.metadata.files("google-tunix") or ()}
  assert "tunix/__init__.py" in other
  assert not other & set(zipfile.ZipFile(wheel).namelist())
  assert not other & sources()


@pytest.mark.parametrize(
  "path",
  ["tunix/__init__.py", "tunix/rl/__init__.py", "tunix/rl/queue/__init__.py"],
)
def test_files_that_would_hide_google_tunix_or_queue_do_not_exist(path):
  assert not (ROOT / path).exists()


@pytest.mark.slow
def test_modules_run_from_any_directory(tmp_path):
  process = run(
    sys.executable, "-m", "tunix.rl.multi_turn.config", cwd=tmp_path
  )
  assert process.returncode == 0, process.stderr[-2000:]
  assert process.stdout.startswith("# Configuration")


def test_the_ground_floor_does_not_import_jax_of_its_own_accord():
  """Only policy, engine and learner may: a gym server needs no JAX."""
  allowed = (
      "policy", "engine", "learner", "commands", "planning", "run", "clients",
  )  # fmt: skip
  composition = ("train.py", "evaluate.py", "plan.py")
  package = ROOT / "tunix" / "rl" / "multi_turn"
  pattern = re.compile(r"^(import|from) (jax|flax|optax|orbax)\b", re.M)
  for path in package.rglob("*.py"):
    inside = path.relative_to(package).parts
    if inside[0] in allowed or inside[0] in composition:
      continue
    assert not pattern.search(path.read_text()), path


@pytest.mark.slow
def test_a_clone_that_is_not_installed_is_importable_through_conftest(tmp_path):
  program = (
    "import sys, runpy\n"
    # What an editable install adds, taken away.
    "sys.meta_path = [f for f in sys.meta_path\n"
    "    if '__editable__' not in getattr(f, '__module__', '')\n"
    "    and '__editable__' not in repr(f)]\n"
    "sys.path_hooks = [h for h in sys.path_hooks\n"
    "    if '__editable__' not in repr(h)]\n"
    "import importlib.util as u\n"
    "assert u.find_spec('tunix.rl.multi_turn') is None, 'still there'\n"
    f"runpy.run_path({str(ROOT / 'conftest.py')!r})\n"
    "import tunix.rl.multi_turn.config, tunix.rl.queue.group_queue\n"
    "import tunix.rl.queue.data_queue\n"
    "import agent_services.serving, training_monitor.client\n"
    "print(tunix.rl.multi_turn.config.__file__)\n"
  )
  process = run(sys.executable, "-c", program, cwd=tmp_path)
  assert process.returncode == 0, process.stderr[-2000:]
  assert str(ROOT) in process.stdout


# --- requirements -------------------------------------------------------------


def _needs():
  named = list(PROJECT["project"]["dependencies"])
  extras = PROJECT["project"]["optional-dependencies"]
  named += extras["dev"]
  for package in PACKAGES:
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())
    named += project["project"]["dependencies"]
    for extra in project["project"]["optional-dependencies"].values():
      named += extra
  for text in named:
    requirement = requirements.Requirement(text)
    if not requirement.name.startswith("tunix-"):
      yield requirement


def test_constraints_are_plain_pins_of_everything_make_installs():
  pins = {}
  for line in (ROOT / "constraints.txt").read_text().splitlines():
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", line), line
    name, _, version = line.partition("==")
    pins[re.sub(r"[-_.]+", "-", name).lower()] = version
  for requirement in _needs():
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    assert name in pins, f"{name} is not pinned in constraints.txt"
    assert requirement.specifier.contains(pins[name]), (
      f"constraints.txt pins {name}=={pins[name]}, outside {requirement}"
    )


def test_extras_and_the_pins_that_protect_google_tunix():
  extras = PROJECT["project"]["optional-dependencies"]
  assert {
      "tpu", "gpu", "gyms", "browser", "xdesktop", "serve", "grammar",
      "monitor", "ray", "dev",
  } <= set(extras)  # fmt: skip
  base = PROJECT["project"]["dependencies"]
  assert "jax<0.11.1" in base
  assert not any(r.startswith("google-tunix") for r in base)
  assert extras["google-tunix"] == ["google-tunix>=0.1.7,<0.1.8"]
  for name, packages in extras.items():
    torch = [r for r in packages if r.startswith("torch")]
    assert torch == (["torch==2.13.0"] if name == "dev" else [])
  assert not any(r.startswith(("torch", "pytest")) for r in base)


# --- packages -----------------------------------------------------------------

PACKAGES = sorted(
  path.parent.relative_to(ROOT).as_posix()
  for path in ROOT.glob("packages/*/pyproject.toml")
)
MONITOR = "packages/training_monitor"
GYMS = "packages/cua_gyms"
SERVICES = "packages/agent_services"


def wheel_of(built, package):
  """The wheel of a package, from the copy of the repository."""
  tree = built.parent / package
  process = run(
    sys.executable,
    "-c",
    "import setuptools.build_meta as b; b.build_wheel('out')",
    cwd=tree,
  )
  assert process.returncode == 0, process.stderr[-2000:]
  (path,) = (tree / "out").glob("*.whl")
  return path


@pytest.fixture(scope="module")
def monitor_wheel(built):
  return wheel_of(built, MONITOR)


@pytest.mark.parametrize(
  "package, file, entries",
  [
    (
      GYMS,
      "miniwob/prelude.js",
      "[tunix.rl.multi_turn.gyms]|miniwob = cua_gyms.miniwob:GYM",
    ),
    (SERVICES, "serving/openapi.py", "[tunix.rl.multi_turn.services]"),
  ],
)
def test_a_package_s_wheel_is_complete_and_found_by_a_run(
  built, package, file, entries
):
  sources = next((ROOT / package).glob("*/__init__.py")).parent
  with zipfile.ZipFile(wheel_of(built, package)) as archive:
    names = set(archive.namelist())
    (points,) = (n for n in names if n.endswith("/entry_points.txt"))
    text = archive.read(points).decode()
  expected = {
    p.relative_to(sources.parent).as_posix()
    for p in sources.rglob("*")
    if p.is_file() and "__pycache__" not in p.parts
  }
  assert f"{sources.name}/{file}" in expected
  assert not expected - names, f"not in it: {sorted(expected - names)}"
  assert all(
    n.startswith((f"{sources.name}/", f"tunix_{sources.name}-")) for n in names
  )
  assert all(entry in text for entry in entries.split("|"))


def test_the_monitors_wheel_is_complete_without_the_framework(monitor_wheel):
  with zipfile.ZipFile(monitor_wheel) as archive:
    names = set(archive.namelist())
    (metadata,) = (n for n in names if n.endswith("/METADATA"))
    needs = archive.read(metadata).decode()
  sources = ROOT / MONITOR / "training_monitor"
  expected = {
    p.relative_to(sources.parent).as_posix()
    for top in (sources, sources / "core", sources / "net")
    for p in top.rglob("*")
    if p.is_file() and "__pycache__" not in p.parts
  }
  assert "training_monitor/net/http_server.py" in expected
  assert not expected - names, f"not in it: {sorted(expected - names)}"
  assert all(
    n.startswith(("training_monitor/", "tunix_training_monitor-"))
    for n in names
  )
  assert "Requires-Dist: jax" not in needs and "multi-turn @" not in needs


def test_no_address_of_a_clone_is_in_what_is_built(built, wheel):
  for file in (wheel, *(wheel_of(built, package) for package in PACKAGES)):
    with zipfile.ZipFile(file) as archive:
      (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
      text = archive.read(name).decode()
    assert "file:" not in text
    if file == wheel:
      assert 'tunix-training-monitor; extra == "monitor"' in (
        text.replace(" ;", ";")
      )


def test_modules_of_core_import_one_another_relatively():
  """Packages carry the folder by another name."""
  for path in (ROOT / "tunix/rl/multi_turn/core").glob("*.py"):
    assert not re.search(r"^\s*(import|from) tunix\b", path.read_text(), re.M)


def test_the_framework_imports_no_package_of_its_own_accord():
  """They are found by entry points, and by former names."""
  names = "|".join(pathlib.Path(package).name for package in PACKAGES)
  pattern = re.compile(rf"^\s*(import|from) ({names})\b", re.M)
  for path in (ROOT / "tunix").rglob("*.py"):
    assert not pattern.search(path.read_text()), path


# --- commands -----------------------------------------------------------------


def tool(directory, name, text):
  """An executable `name` in `directory` that runs shell `text`."""
  directory.mkdir(exist_ok=True)
  path = directory / name
  path.write_text("#!/bin/sh\n" + text + "\n")
  path.chmod(0o755)
  return path


def test_make_help_names_the_two_commands():
  process = run("make", "help")
  for target in ("train", "test", "browser", "desktop", "lint", "bench"):
    assert re.search(rf"^  {target}\s+\S", process.stdout, re.M), process.stdout


@pytest.mark.parametrize(
  "args, extras, own",
  [
    ("", (".",), True),
    ("steps=3", (".",), True),
    ("gym=miniwob", (".[browser]",), True),
    ("gym=xdesktop", (".", ".[xdesktop]"), True),
    ("monitor.url=http://x", (".",), False),
    ("resume=runs/a", (".",), False),
    ("monitor.embedded=false", (".",), False),
  ],
)
def test_make_train_installs_with_constraints_then_trains(
  tmp_path, args, extras, own
):
  """With a monitor of its own (`own`), unless the run's settings say more."""
  venv = tmp_path / "venv"
  process = run("make", "-n", "train", f"ARGS={args}", VIRTUAL_ENV=str(venv))
  assert process.returncode == 0, process.stderr
  installs = [x for x in process.stdout.splitlines() if "pip install" in x]
  for install, extra in zip(installs, extras, strict=True):
    assert f"{venv}/bin/python -m pip install -qq" in install
    assert f"-c constraints.txt -e '{extra}'" in install
  assert all(f"-e {package}" in process.stdout for package in PACKAGES)
  last = process.stdout.splitlines()[-1].split()
  assert last[1:] == [
    f"{venv}/bin/python",
    "-m",
    "tunix_multi_turn",
    "train",
    *["monitor.embedded=true"] * own,
    *args.split(),
  ]


def test_a_second_make_installs_nothing_and_the_tests_satisfy_training(
  tmp_path,
):
  venv = tmp_path / "venv"
  log = tmp_path / "log"
  tool(tmp_path, "python", f'echo "$@" >> {log}; exit 0')
  (venv / "bin").mkdir(parents=True)
  shutil.copy(tmp_path / "python", venv / "bin" / "python")
  for target in ("test", "test", "train", "lint"):
    process = run("make", target, VIRTUAL_ENV=str(venv))
    assert process.returncode == 0, process.stderr
  calls = log.read_text().splitlines()
  assert sum("pip install" in c for c in calls) == 1
  assert sum("-m pytest" in c for c in calls) == 2
  assert sum("multi_turn train" in c for c in calls) == 1


def test_bytecode_is_made_of_what_is_imported_and_kept(tmp_path):
  """pip writes no bytecode, so imports do, whatever the caller set."""
  venv, log = tmp_path / "venv", tmp_path / "log"
  (venv / "bin").mkdir(parents=True)
  tool(
    venv / "bin",
    "python",
    f'echo "[$PYTHONDONTWRITEBYTECODE]" "$@" >> {log}; exit 0',
  )
  process = run(
    "make", "train", VIRTUAL_ENV=str(venv), PYTHONDONTWRITEBYTECODE="1"
  )
  assert process.returncode == 0, process.stderr
  calls = log.read_text().splitlines()
  installs = [c for c in calls if "pip install" in c]
  assert installs and all("--no-compile" in c for c in installs)
  started = [
    c for c in calls if "tunix.rl.multi_turn" in c or "tunix_multi_turn" in c
  ]
  assert len(started) == 2 and all(c.startswith("[] ") for c in started)


@pytest.mark.slow
def test_a_new_environment_goes_on_with_the_pip_it_has(tmp_path):
  """If no newer pip can be had, installing is slower and does not fail."""
  process = run(
    ROOT / "scripts" / "venv.sh",
    tmp_path / "v",
    PYTHON=sys.executable,
    PIP_NO_INDEX="1",
    PIP_CONFIG_FILE=os.devnull,
  )
  assert process.returncode == 0, process.stderr
  assert "note: pip 26.3 could not be installed; using pip " in process.stdout


@pytest.mark.slow
def test_packages_that_cannot_be_imported_leave_no_stamp(tmp_path):
  venv = tmp_path / "venv"
  (venv / "bin").mkdir(parents=True)
  tool(venv / "bin", "python", 'case "$*" in *run.training*) exit 1;; esac')
  for _ in range(2):
    process = run("make", "install", VIRTUAL_ENV=str(venv))
    assert process.returncode != 0
    assert "error: the packages cannot be imported" in process.stderr


def test_a_failing_pip_leaves_no_stamp_and_says_so(tmp_path):
  venv = tmp_path / "venv"
  (venv / "bin").mkdir(parents=True)
  tool(
    venv / "bin",
    "python",
    'case "$*" in *install*) echo "ERROR: no such thing" >&2; exit 1;; esac',
  )
  for _ in range(2):
    process = run("make", "train", VIRTUAL_ENV=str(venv))
    assert process.returncode != 0
    assert "ERROR: no such thing" in process.stderr
    assert "error: pip failed" in process.stderr


@pytest.mark.parametrize("target", ["browser", "desktop"])
def test_what_needs_root_says_what_to_run_without(tmp_path, target):
  tool(tmp_path / "bin", "id", "echo 1000")
  process = run("make", target, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
  assert process.returncode != 0
  assert f"run: sudo make {target}" in process.stderr


def test_an_old_python_is_named_and_refused(tmp_path):
  tool(tmp_path / "bin", "python3", "[ $1 = -V ] && echo Python 3.9.2; exit 1")
  for name in ("sh", "cat"):
    (tmp_path / "bin" / name).symlink_to(shutil.which(name))
  process = run(
    ROOT / "scripts" / "venv.sh", tmp_path / "v", PATH=str(tmp_path / "bin")
  )
  assert process.returncode == 1
  assert "Python 3.11 or newer is needed, found: Python 3.9.2" in process.stderr
  assert not (tmp_path / "v").exists()


def test_a_python_named_by_the_user_must_exist(tmp_path):
  process = run(ROOT / "scripts" / "venv.sh", tmp_path / "v", PYTHON="nopython")
  assert process.returncode == 1
  assert "PYTHON=nopython is not a command" in process.stderr


def test_a_python_without_venv_gets_the_package_to_install_named(tmp_path):
  """Debian's python3 without python3-venv and without pip."""
  real = sys.executable
  tool(
    tmp_path / "bin",
    "python3",
    f'case "$*" in *ensurepip*|*"-m pip"*) exit 1;; esac\nexec {real} "$@"',
  )
  (tmp_path / "bin" / "sh").symlink_to(shutil.which("sh"))
  process = run(
    ROOT / "scripts" / "venv.sh", tmp_path / "v", PATH=str(tmp_path / "bin")
  )
  assert process.returncode == 1
  version = f"{sys.version_info[0]}.{sys.version_info[1]}"
  assert f"apt-get install python{version}-venv" in process.stderr


@pytest.mark.parametrize(
  "printed, status, closing",
  [
    ("= 3 passed in 1.50s =", 0, "= 3 passed in 1.50s ="),
    ("= 1 failed, 2 passed in 9.00s =", 2, "= 1 failed, 2 passed in 9.00s ="),
  ],
)
def test_ci_ends_with_the_closing_line_and_the_status(
  tmp_path, printed, status, closing
):
  tool(
    tmp_path / "bin",
    "make",
    f'echo "{printed}"; echo "make: *** noise" >&2; exit {status}',
  )
  tool(tmp_path / "bin", "chromium-headless-shell", "exit 0")
  process = run(
    ROOT / ".ci" / "run",
    cwd=tmp_path,
    PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
  )
  assert process.returncode == status
  assert process.stdout.splitlines()[-1] == closing


def test_ci_fails_when_pytest_never_ended(tmp_path):
  tool(tmp_path / "bin", "make", "echo installing; exit 0")
  tool(tmp_path / "bin", "chromium-headless-shell", "exit 0")
  process = run(
    ROOT / ".ci" / "run", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}"
  )
  assert process.returncode == 1
  assert "did not reach its end" in process.stdout
