"""Folders in a directory that runs share: whose they are, and until when."""

import json
import os
import subprocess
import sys

import pytest
from tunix.rl.multi_turn.clients import locked_dir

CHILD = """
import importlib.util, pathlib, sys
# The file by itself: the packages around it import JAX.
spec = importlib.util.spec_from_file_location("locked_dir", sys.argv[2])
locked_dir = sys.modules["locked_dir"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(locked_dir)
folder = locked_dir.LockedDir(pathlib.Path(sys.argv[1]))
(folder.make() / "w").write_text("theirs")
print(folder.name, flush=True)
sys.stdin.read()
"""


def made(directory, text="x"):
  folder = locked_dir.LockedDir(directory)
  (folder.make() / "version").mkdir()
  (folder.path / "version" / "w").write_text(text)
  return folder


def test_only_folders_of_ended_runs_are_deleted(tmp_path):
  living, ended, own = (made(tmp_path) for _ in range(3))
  assert own.delete_ended() == []
  ended.release()
  ended.release()
  (tmp_path / "20260101-000000-1-abcdef").mkdir()  # It has no owner file.
  (tmp_path / "mine.txt").write_text("x")
  assert own.delete_ended() == [ended.name]
  names = {p.name for p in tmp_path.iterdir() if p.name[0] != "."}
  assert names == {
    living.name,
    own.name,
    "20260101-000000-1-abcdef",
    "mine.txt",
  }
  assert own.delete_ended() == []
  assert (own.make() / "version" / "w").read_text() == "x"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine": "elsewhere"}'])
def test_what_is_another_machines_or_says_nothing_stays(tmp_path, text):
  other, own = made(tmp_path), made(tmp_path)
  other.release()
  (tmp_path / f".{other.name}.owner").write_text(text)
  assert own.delete_ended() == []
  assert (other.path / "version" / "w").exists()


def test_a_link_is_not_followed(tmp_path):
  other, own = made(tmp_path), made(tmp_path)
  other.release()
  owner = tmp_path / f".{other.name}.owner"
  target = tmp_path / "kept"
  owner.rename(target)
  owner.symlink_to(target)
  assert own.delete_ended() == []
  assert "machine" in json.loads(target.read_text())


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
  folder = locked_dir.LockedDir(tmp_path / "new")
  folder.make().rmdir()
  folder.release()
  assert not list((tmp_path / "new").iterdir())


def test_a_process_that_was_killed_owns_nothing_any_more(tmp_path):
  child = subprocess.Popen(
    [sys.executable, "-c", CHILD, str(tmp_path), locked_dir.__file__],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  try:
    name = child.stdout.readline().strip()
    own = made(tmp_path)
    assert own.delete_ended() == [] and (tmp_path / name / "w").exists()
  finally:
    child.kill()
    child.wait(30)
  assert own.delete_ended() == [name]
  assert not (tmp_path / name).exists()
