"""The framework finds the package's gyms, by name and by former names."""

import importlib
from importlib import metadata
import pathlib
import subprocess
import sys

import cua_gyms
import pytest
from tunix.rl.multi_turn import moved_rooms
from tunix.rl.multi_turn.environments import gyms

FOLDER = pathlib.Path(cua_gyms.__file__).parent
GROUP = "tunix.rl.multi_turn.gyms"
ROOM = "tunix.rl.multi_turn.environments"
# Loads every module but programs and what needs an extra.
ALL = """
import importlib, pkgutil, sys
import cua_gyms
for module in pkgutil.walk_packages(cua_gyms.__path__, "cua_gyms."):
  if not module.name.endswith("__main__"):
    importlib.import_module(module.name)
heavy = {"jax", "jaxlib", "flax", "torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
ABSENT = """
import sys
sys.modules["cua_gyms"] = None
from importlib import metadata
points = metadata.entry_points
metadata.entry_points = lambda **query: (
    [] if query.get("group") == "tunix.rl.multi_turn.gyms" else points(**query)
)
import tunix_multi_turn
tunix_multi_turn.light()
"""


def python(code, *words):
  return subprocess.run(
    [sys.executable, "-c", code, *words],
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )


def test_every_folder_with_a_gym_is_an_entry_point():
  declared = {
    path.parent.name
    for path in FOLDER.glob("*/__init__.py")
    if "\nGYM = " in path.read_text()
  }
  points = {
    point.name: point.value
    for point in metadata.entry_points(group=GROUP)
    if point.value.startswith("cua_gyms.")
  }
  assert points == {name: f"cua_gyms.{name}:GYM" for name in declared}
  assert len(declared) == 11 and declared < set(gyms.names())
  for name in declared:
    assert gyms.get(name).name == name


@pytest.mark.parametrize(
  "name", [n for n in moved_rooms.ROOMS if n.startswith("environments.")]
)
def test_a_gym_by_its_former_name_is_the_same_module(name):
  former = importlib.import_module(f"tunix.rl.multi_turn.{name}")
  own = importlib.import_module(moved_rooms.ROOMS[name])
  assert former is own and own.__name__ == moved_rooms.ROOMS[name]
  with pytest.raises(ImportError):
    importlib.import_module(f"tunix.rl.multi_turn.{name}.missing")


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    f"{ROOM}.gym_server",
    "cua_gyms.gym_server",
    f"{ROOM}.gyms.miniwob",
    "cua_gyms.miniwob",
  ],
)
def test_both_names_run_as_programs(name):
  process = subprocess.run(
    [sys.executable, "-m", name, "--help"],
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert process.returncode == 0, process.stderr[-2000:]
  assert process.stdout.startswith("usage: ")


def test_every_module_is_imported_without_jax():
  pytest.importorskip("xcffib", reason="needs the extra `xdesktop`")
  process = python(ALL)
  assert process.returncode == 0, process.stderr[-3000:]


def test_without_the_package_settings_of_a_run_say_what_to_install():
  process = python(
    f"{ABSENT}\nfrom tunix.rl.multi_turn import config\n"
    "try:\n"
    "  config.load_config(sys.argv[1:])\n"
    "except config.ConfigError as error:\n"
    "  sys.exit(str(error))",
    "gym=miniwob",
  )
  assert process.stderr.splitlines()[-1].endswith(
    "gym 'miniwob' needs the package cua_gyms; pip install -e packages/cua_gyms"
  ), process.stderr[-2000:]


def test_without_the_package_names_and_commands_say_what_to_install():
  names = python(
    f"{ABSENT}\nfrom tunix.rl.multi_turn.environments import gyms\n"
    "assert gyms.names() == ('desktop',), gyms.names()\n"
    "gyms.get('desktop')\n"
    f"import {ROOM}.gym_server"
  )
  assert "ModuleNotFoundError" in names.stderr
  assert "pip install -e packages/cua_gyms" in names.stderr
  command = python(
    f"{ABSENT}\nsys.exit(tunix_multi_turn.main(['gym', 'desktop']))"
  )
  assert command.returncode == 2
  assert command.stderr.count("\n") == 1 and command.stderr.endswith(
    "needs the package cua_gyms; pip install -e packages/cua_gyms\n"
  )


def test_a_request_imports_no_path(tmp_path, monkeypatch):
  """Names of installed packages are the operator's; paths stay refused."""
  (tmp_path / "never_imported.py").write_text("raise SystemExit\n")
  monkeypatch.syspath_prepend(tmp_path)
  for name in ("never_imported:GYM", "cua_gyms.miniwob:GYM"):
    with pytest.raises(ValueError, match="path to code"):
      gyms.get(name)
  assert "never_imported" not in sys.modules
