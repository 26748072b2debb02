"""Files and directories that are whole or absent."""

import os
import pathlib
import signal
import subprocess

import pytest
from tunix.rl.multi_turn.core import durable


def content(directory):
  return {
    p.relative_to(directory).as_posix(): p.read_bytes()
    for p in directory.rglob("*")
    if p.is_file() and p.name != durable.SUMS
  }


def fill(path, text):
  with durable.new_directory(path) as fresh:
    (fresh / "sub").mkdir()
    (fresh / "a").write_text(text)
    (fresh / "sub" / "b").write_text(text * 2)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_directory_is_replaced_with_all_that_it_held(
  tmp_path, monkeypatch, exchange
):
  if not exchange:
    monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
  path = tmp_path / "x"
  fill(path, "old")
  (path / "more").write_text("of a user")
  fill(path, "new")
  assert content(path) == {"a": b"new", "sub/b": b"newnew"}
  assert [p.name for p in tmp_path.iterdir()] == ["x"]
  durable.check(path)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_killed_before_any_call_it_is_the_old_one_or_the_new_one(
  tmp_path, exchange
):
  """Dies before each system call that the module makes, in a fork."""
  outcomes = set()
  for fatal in range(40):
    path = tmp_path / f"{fatal}" / "x"
    fill(path, "old")
    child = os.fork()
    if not child:
      if not exchange:
        durable._exchange = lambda one, other: False
      remaining = fatal

      def counted(call):
        def wrapped(*args, **kwargs):
          nonlocal remaining
          if not remaining:
            os.kill(os.getpid(), signal.SIGKILL)
          remaining -= 1
          return call(*args, **kwargs)

        return wrapped

      for owner, name in (
        (durable, "_exchange"),
        (durable, "sync"),
        (durable.os, "rename"),
        (durable.shutil, "rmtree"),
        (pathlib.Path, "rename"),
        (pathlib.Path, "mkdir"),
        (durable.os, "fsync"),
      ):
        setattr(owner, name, counted(getattr(owner, name)))
      fill(path, "new")
      os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    durable.recover(path)
    durable.check(path)
    outcomes.add(content(path)["a"])
    assert [p.name for p in path.parent.iterdir()] == ["x"]
    if status == 7:
      break
    assert status == -signal.SIGKILL
  else:
    pytest.fail("it never came to its end")
  assert outcomes == {b"old", b"new"}


def test_an_error_leaves_the_old_one(tmp_path):
  path = tmp_path / "x"
  fill(path, "old")
  with pytest.raises(ZeroDivisionError):
    with durable.new_directory(path) as fresh:
      (fresh / "a").write_text("half")
      _ = 1 / 0
  assert content(path)["a"] == b"old"
  assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_any_wrong_bit_of_the_list_names_the_list(tmp_path):
  path = tmp_path / "x"
  fill(path, "text")
  sums = (path / durable.SUMS).read_bytes()
  for place in range(8 * len(sums)):
    damaged = bytearray(sums)
    damaged[place // 8] ^= 1 << place % 8
    (path / durable.SUMS).write_bytes(damaged)
    if damaged.decode(errors="replace").splitlines() == (
      sums.decode().splitlines()
    ):
      durable.check(path)  # Another sign that ends a line.
      continue
    with pytest.raises((ValueError, OSError), match=durable.SUMS):
      durable.check(path)


def test_damage_is_named(tmp_path):
  path = tmp_path / "x"
  fill(path, "text")
  (path / ".hidden").write_text("does not matter")
  durable.check(path)
  process = subprocess.run(
    ["sha256sum", "-c", durable.SUMS],
    cwd=path,
    capture_output=True,
    check=False,
  )
  assert process.returncode == 0
  sums = (path / durable.SUMS).read_text()
  for cut in ("", sums[: sums.index("\n") + 1]):
    (path / durable.SUMS).write_text(cut)
    with pytest.raises(ValueError, match="is not listed"):
      durable.check(path)
  (path / durable.SUMS).write_text(sums)
  (path / "sub" / "b").write_text("texttexu")
  with pytest.raises(ValueError, match="sub/b or .* has changed"):
    durable.check(path)
  (path / "sub" / "b").unlink()
  with pytest.raises(FileNotFoundError, match="sub/b is missing"):
    durable.check(path)
  (path / durable.SUMS).write_bytes(b"\xff\xfe")
  with pytest.raises(ValueError, match="none of sha256sum"):
    durable.check(path)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
  path = tmp_path / "f"
  durable.write_text(path, "old")

  def full(handle):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patched:
    patched.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
      durable.write_text(path, "new")
  assert path.read_text() == "old"
  assert [p.name for p in tmp_path.iterdir()] == ["f"]
  durable.write_text(path, "new")
  assert path.read_text() == "new"
