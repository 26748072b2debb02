"""Processes that are killed and started again, quickly; who outlives them."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

_MOTHER = """
import os, signal, sys
sys.path[:0] = {helpers!r}
{program}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The dead need no wait.
for line in sys.stdin:
  if os.fork():
    continue
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  print("pid", os.getpid(), flush=True)
  run(line[:-1].split("|"))
  os._exit(0)
"""


class Nursery:
  """Processes of one program, each a fork of one that has imported it all.

  So a soak kills work and not imports. One lives at a time; each is a process
  like any other, and dies alone.
  """

  def __init__(self, program: str):
    """`program` defines run(arguments), which prints whole lines."""
    self._mother = subprocess.Popen(
      [
        sys.executable,
        "-c",
        _MOTHER.format(
          helpers=[p for p in sys.path if p.endswith("helpers")],
          program=program,
        ),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._pid = 0

  def start(self, *arguments) -> tuple[list[str], str]:
    """Starts one.

    Returns:
      (What the one before it had still said, the first line of this one.)
    """
    self._mother.stdin.write("|".join(map(str, arguments)) + "\n")
    self._mother.stdin.flush()
    lines = []
    while not (line := self._line()).startswith("pid "):
      lines.append(line)
    self._pid = int(line.split()[1])
    return lines, self._line()

  def _line(self) -> str:
    line = self._mother.stdout.readline()
    assert line, "the program has failed; its stderr says how"
    return line.strip()

  @property
  def pid(self) -> int:
    return self._pid

  @property
  def alive(self) -> bool:
    try:
      os.kill(self._pid, 0)
    except ProcessLookupError:
      return False
    return True

  def end(self, number=signal.SIGKILL, seconds=60.0) -> None:
    """Sends the signal and waits for the end."""
    os.kill(self._pid, number)
    deadline = time.monotonic() + seconds
    while self.alive:
      assert time.monotonic() < deadline, f"it outlives signal {number}"
      time.sleep(0.002)

  def rest(self) -> list[str]:
    """Ends the program; returns the lines of the last process, dead now."""
    self._mother.stdin.close()
    return self._mother.stdout.read().split("\n")[:-1]

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    if self._pid and self.alive:
      self.end()
    self._mother.stdin.close()
    self._mother.kill()  # It has nothing to put in order.
    self._mother.wait(60)
    self._mother.stdout.close()


def free_port():
  with socket.socket() as bound:
    bound.bind(("127.0.0.1", 0))
    return bound.getsockname()[1]


def kills(default=5):
  """The number of kills of a test: TUNIX_TEST_KILLS, else few."""
  return int(os.environ.get("TUNIX_TEST_KILLS", default))


def descendants(pid):
  """The processes that a process has started, and theirs."""
  parents = {}
  for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdecimal():
      try:
        text = (folder / "stat").read_text()
      except OSError:
        continue  # It has ended.
      parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
  family = {pid}
  while more := {c for c, p in parents.items() if p in family} - family:
    family |= more
  return family - {pid}


def running(pid):
  """Whether a process exists and is no corpse."""
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return text.rpartition(")")[2].split()[0] != "Z"


def outliving(pids, seconds=20.0):
  """Waits for the ends of processes; returns the ones that still run."""
  due = time.monotonic() + seconds
  while (alive := [p for p in pids if running(p)]) and time.monotonic() < due:
    time.sleep(0.05)
  return alive
