"""The package's commands are listed, and each explains itself."""

import importlib
import importlib.util
import pathlib

import pytest
from tunix.rl.multi_turn import commands
from tunix.rl.multi_turn.commands import __main__ as list_commands


def test_the_listing_names_each_command_with_its_purpose(capsys):
  list_commands.main([])
  shown = capsys.readouterr().out
  for group in (commands.COMMANDS, commands.MAINTAINERS):
    for module, text in group.items():
      (line,) = [line for line in shown.splitlines() if f" {module} " in line]
      assert line.startswith("  python -m ") and line.endswith(text)


@pytest.mark.parametrize("name", [*commands.COMMANDS, *commands.MAINTAINERS])
def test_a_listed_command_can_be_run(name):
  spec = importlib.util.find_spec(name)
  if spec.submodule_search_locations:
    spec = importlib.util.find_spec(f"{name}.__main__")
  source = pathlib.Path(spec.origin).read_text()
  assert '__name__ == "__main__"' in source or spec.name.endswith("__main__")


@pytest.mark.parametrize("name", commands.MAINTAINERS)
def test_a_maintainers_command_is_marked_in_its_help(name, capsys):
  with pytest.raises(SystemExit) as ended:
    importlib.import_module(name).main(["--help"])
  assert ended.value.code == 0
  shown = " ".join(capsys.readouterr().out.split())
  assert commands.MAINTAINERS[name] in shown
  assert "maintainer's command" in shown
  assert f"python -m {name}" in shown


def test_policy_learner_and_engine_import_no_environment():
  for folder in ("policy", "learner", "engine"):
    root = pathlib.Path(commands.__file__).parents[1] / folder
    for file in root.rglob("*.py"):
      text = file.read_text()
      assert "multi_turn.environments" not in text, file
