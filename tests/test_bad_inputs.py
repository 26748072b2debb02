"""Every command answers a bad input with one clear line, at once.

The commands run in the process, through their own `main`; the table is
`bad_inputs.COMMANDS`, with the wrong settings of `bad_inputs.SETTINGS`.
"""

import importlib
import importlib.util
import shlex
import sys

import bad_inputs
import pytest

# An answer that takes longer is as good as none.
pytestmark = pytest.mark.timeout(60)

TABLE = [
  *bad_inputs.COMMANDS,
  *(
    ("train", shlex.quote(argument), *words)
    for argument, *words in bad_inputs.SETTINGS
  ),
]
STATUS = {"reporting.report nowhere": 1, "reporting.report mydir": 1}
"""Documented exit statuses other than 2."""


@pytest.fixture(autouse=True)
def _sandbox(tmp_path, monkeypatch):
  for name, data in {**bad_inputs.FILES, **bad_inputs.TREE}.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  for variable in (
    "TUNIX_MONITOR_TOKEN",
    "TUNIX_ROLLOUT_TOKEN",
    "TUNIX_GYM_TOKEN",
  ):
    monkeypatch.delenv(variable, raising=False)
  yield
  for name in [name for name in sys.modules if name.startswith("bad_")]:
    if name != "bad_inputs":
      del sys.modules[name]


@pytest.fixture(autouse=True)
def _nothing_is_served_or_trained(monkeypatch):
  from tunix.rl.multi_turn import train
  import uvicorn

  def served(*args, **kwargs):
    raise AssertionError("the bad input was accepted")

  monkeypatch.setattr(uvicorn.Server, "run", served)
  monkeypatch.setattr(uvicorn.Server, "serve", served)
  monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
  monkeypatch.setattr(train, "execute", served)


def main_of(command):
  module = f"tunix.rl.multi_turn.{command}"
  if command == "monitor":
    module += ".serve"
  elif importlib.util.find_spec(module).submodule_search_locations:
    module += ".__main__"
  return importlib.import_module(module).main


@pytest.mark.parametrize(
  "command, arguments, words",
  [
    pytest.param(command, line, words, id=f"{command} {line}"[:70])
    for command, line, *words in TABLE
  ],
)
def test_a_bad_input_is_answered_with_field_value_and_fix(
  command, arguments, words, capsys
):
  try:
    status = main_of(command)(shlex.split(arguments))
  except SystemExit as ended:  # argparse.
    status = ended.code
  shown = capsys.readouterr()
  text = shown.err or shown.out
  assert status == STATUS.get(f"{command} {arguments}", 2), text
  assert "Traceback" not in text and "hunter2x" not in text
  for word in words:
    assert word in text, text


def test_the_table_covers_all_commands():
  assert len(TABLE) >= 200
  commands = {command for command, *_ in TABLE}
  assert len(commands) >= 11
