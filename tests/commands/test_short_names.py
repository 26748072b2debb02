"""`tunix-mt` starts each command by a short name; help needs no JAX."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

import tunix_multi_turn

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOM = "tunix.rl.multi_turn"
HEAVY = (
    "jax", "jaxlib", "flax", "optax", "orbax", "torch", "transformers",
    "pandas", "tunix.rl.rl_learner", "tunix.rl.rl_cluster",
)  # fmt: skip
PROGRAM = r"""
import contextlib, io, json, sys
import tunix_multi_turn
found = {}
for name in sys.argv[1:]:
  shown = io.StringIO()
  with contextlib.redirect_stdout(shown):
    try:
      status = tunix_multi_turn.main([name, "--help"])
    except SystemExit as end:
      status = end.code
  found[name] = {"status": status or 0, "shown": shown.getvalue(),
                 "light": tunix_multi_turn.is_light(),
                 "modules": list(sys.modules)}
print(json.dumps(found))
"""


def _there(module):
  return importlib.util.find_spec(f"{ROOM}.{module}") is not None


@pytest.fixture(scope="module")
def helps():
  names = [n for n, (m, _) in tunix_multi_turn.COMMANDS.items() if _there(m)]
  process = subprocess.run(
    [sys.executable, "-c", PROGRAM, *names],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
    env={**os.environ, "TESTS_SEE_TORCH": "1"},
  )
  assert process.returncode == 0, process.stderr[-2000:]
  return json.loads(process.stdout.splitlines()[-1])


def test_the_names_are_those_that_are_documented():
  assert list(tunix_multi_turn.COMMANDS) == [
      "train", "plan", "evaluate", "serve", "gym", "monitor", "buffer",
      "run-service", "publish", "doctor",
  ]  # fmt: skip
  scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert scripts["scripts"]["tunix-mt"] == "tunix_multi_turn:main"


@pytest.mark.parametrize("name", tunix_multi_turn.COMMANDS)
def test_help_loads_no_jax_and_no_google_tunix(name, helps):
  if name not in helps:
    pytest.skip(f"no {tunix_multi_turn.COMMANDS[name][0]} in this clone")
  text = helps[name]
  assert text["status"] == 0 and len(text["shown"]) > 200
  assert text["light"]
  assert not set(HEAVY) & set(text["modules"])
  upstream = [
    module
    for module in text["modules"]
    if module.startswith("tunix.")
    and module not in ("tunix.rl", "tunix.rl.queue")
    and not module.startswith((f"{ROOM}.", "tunix.rl.queue."))
  ]
  assert upstream == [ROOM]


@pytest.mark.parametrize("name", ["train", "evaluate", "serve"])
def test_help_before_the_imports_is_what_main_prints(name, helps, capsys):
  module, _ = tunix_multi_turn.COMMANDS[name]
  if not (ROOT / "tunix/rl/multi_turn" / f"{module}.py").exists():
    module += ".__main__"
  with pytest.raises(SystemExit) as ended:
    importlib.import_module(f"{ROOM}.{module}").main(["--help"])
  assert ended.value.code in (0, None)
  # Widths of a terminal differ, words do not.
  assert capsys.readouterr().out.split() == helps[name]["shown"].split()


@pytest.mark.parametrize("name", ["serve", "serving"])
def test_a_command_gets_its_own_arguments(name, monkeypatch):
  started = []
  monkeypatch.setattr(tunix_multi_turn, "light", lambda: None)
  monkeypatch.setattr(
    tunix_multi_turn, "run", lambda m: started.append((m, sys.argv[1:]))
  )
  monkeypatch.setattr(sys, "argv", ["tunix-mt", name, "tiny_vl", "--port=0"])
  assert tunix_multi_turn.main() == 0
  assert started == [("serving", ["tiny_vl", "--port=0"])]


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
  assert tunix_multi_turn.main(["trian"]) == 2
  assert "did you mean 'train'?" in capsys.readouterr().err
  assert tunix_multi_turn.main(["quux"]) == 2
  assert "take train, plan" in capsys.readouterr().err
  assert tunix_multi_turn.main(["core"]) == 2  # A package that runs nothing.
  assert "no command 'core'" in capsys.readouterr().err
  assert tunix_multi_turn.main([]) == 2
  assert "usage: tunix-mt" in capsys.readouterr().err
  assert tunix_multi_turn.main(["--help"]) == 0
  shown = capsys.readouterr().out
  for name, (_, text) in tunix_multi_turn.COMMANDS.items():
    assert f"  {name} " in shown and text in shown


def test_a_command_that_is_not_installed_is_named(capsys, monkeypatch):
  monkeypatch.setattr(tunix_multi_turn, "light", lambda: None)
  monkeypatch.setattr(
    tunix_multi_turn, "COMMANDS", {"gone": ("no_such_room", "nothing")}
  )
  assert tunix_multi_turn.main(["gone"]) == 2
  assert f"no {ROOM}.no_such_room" in capsys.readouterr().err


@pytest.mark.parametrize(
  "argument, words",
  [
    ("policy=Qwen/Qwen3-VL-4B-Instruct", "hf download"),
    ("tasks=[clik-button]", "'click-button'"),
    # A process each; the same path.
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ("policy=./nowhere", "no such directory"),
        ("run.dir=/proc/x", "cannot be written"),
        ("rollout.agent=no:play", "rollout.agent=no:play"),
        ("gym=webarena", "known: android_world, browser,"),
      )
    ),
  ],
)
def test_a_wrong_setting_is_refused_without_jax(argument, words, tmp_path):
  process = subprocess.run(
    [
      sys.executable,
      "-c",
      "import sys; sys.modules['jax'] = None; import tunix_multi_turn;"
      " tunix_multi_turn.main(['train', *sys.argv[1:]])",
      argument,
      *["rollout.via=proxy"] * argument.startswith("rollout"),
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert process.returncode == 2, process.stderr
  assert words in process.stderr
