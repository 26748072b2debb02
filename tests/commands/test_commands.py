"""The package's commands are listed, and each explains itself."""

import importlib.util
import pathlib

import pretrain
import pytest
import train_tokenizer
from tunix.rl.multi_turn import commands
from tunix.rl.multi_turn.commands import __main__ as list_commands


def test_the_listing_names_each_command_with_its_purpose(capsys):
  list_commands.main([])
  shown = capsys.readouterr().out
  for module, text in commands.COMMANDS.items():
    (line,) = [line for line in shown.splitlines() if f" {module} " in line]
    assert line.startswith("  python -m ") and line.endswith(text)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_listed_command_can_be_run(name):
  spec = importlib.util.find_spec(name)
  if spec.submodule_search_locations:
    spec = importlib.util.find_spec(f"{name}.__main__")
  source = pathlib.Path(spec.origin).read_text()
  assert '__name__ == "__main__"' in source or spec.name.endswith("__main__")


@pytest.mark.parametrize("script", (pretrain, train_tokenizer))
def test_a_maintainers_script_is_marked_in_its_help(script, capsys):
  with pytest.raises(SystemExit) as ended:
    script.main(["--help"])
  assert ended.value.code == 0
  shown = " ".join(capsys.readouterr().out.split())
  assert "maintainer's command" in shown
  assert f"python scripts/pretraining/{script.__name__}.py" in shown


@pytest.mark.parametrize(
  "script, arguments, problem",
  (
    (pretrain, "", "--out"),
    (pretrain, "--out afile", "--out=afile"),
    (pretrain, "--out made --steps 0", "--steps=0"),
    (pretrain, "--out made --seed -1", "--seed=-1"),
    (pretrain, "--out made --save-every 0", "--save-every=0"),
    (pretrain, "--out made --policy huge", "tiny_vl"),
    (train_tokenizer, "--out afile", "--out=afile"),
    (train_tokenizer, "--out made --vocab-size 5", "--vocab-size=5"),
    (train_tokenizer, "--out made --seed -1", "--seed=-1"),
  ),
)
def test_a_script_refuses_a_slip(
  script, arguments, problem, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "afile").write_text("")
  with pytest.raises(SystemExit) as ended:
    script.main(arguments.split())
  assert ended.value.code == 2
  assert problem in capsys.readouterr().err


def test_policy_learner_and_engine_import_no_environment():
  for folder in ("policy", "learner", "engine"):
    root = pathlib.Path(commands.__file__).parents[1] / folder
    for file in root.rglob("*.py"):
      text = file.read_text()
      assert "multi_turn.environments" not in text, file
