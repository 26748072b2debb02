"""Training runs that end in eight ways; what each leaves behind.

    python process_deaths.py <folder>

Forks a warm interpreter for each run, which serves its policy (a port), plays
web pages (Chromium) and has a monitor of its own (two processes). Prints a JSON
line a way: its exit status, and the processes and ports that are left ten
seconds after the end. A run's descendants are found by a mark in their
environment, by its folder in their command lines, or by the session of one that
was found so: also where another process has adopted them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time

MARK = "TUNIX_PROCESS_DEATHS"
WAYS = ("normal", "reward", "SIGINT", "SIGINT twice", "SIGTERM", "SIGHUP",
        "SIGKILL", "leader")  # fmt: skip
START_S, END_S, LEFT_S = 240.0, 60.0, 10.0


_CALLS = []


def reward(*args, **kwargs):
  """A user's reward that passes a run's trial and breaks in its episodes."""
  _CALLS.append(None)
  if len(_CALLS) > 1:
    raise RuntimeError("the user's reward is broken")
  return 0.0


def arguments(folder: pathlib.Path, way: str, port: int) -> list[str]:
  import small_runs  # pylint: disable=g-import-not-at-top

  return [
      f"run.dir={folder}", *small_runs.SMALL, small_runs.ONE_LAYER, "name=r",
      "warm_start.source=none", "warm_start.steps=0", "eval.on=false",
      "gym=miniwob", "tasks=[click-test]", "environment.max_turns=1",
      "collect.group_size=2", "engine.slots=4", "collect.concurrency=4",
      "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
      "rollout.via=proxy", f"rollout.port={port}",
      "monitor.embedded=true", "collect.max_requeues=0",
      f"steps={1 if way in ('normal', 'reward') else 100000}",
      *["environment.reward=process_deaths:reward"] * (way == "reward"),
  ]  # fmt: skip


class Descendants:
  """Processes that a run has started.

  Attributes:
    names: Command lines of all processes so far, by process id.
  """

  def __init__(self, folder: pathlib.Path, way: str):
    self._mark = f"{MARK}={way}".encode()
    self._folder = str(folder).encode()
    self._sessions: set[str] = set()
    self.names: dict[int, str] = {}

  def alive(self, run: int) -> dict[int, str]:
    """Command lines of the living ones by id, without `run`."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
      if not entry.name.isdigit() or int(entry.name) in (run, os.getpid()):
        continue
      try:
        state, *_, session = (
          (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
        )
        line = (entry / "cmdline").read_bytes()
        own = self._folder in line or self._mark in (
          (entry / "environ").read_bytes().split(b"\0")
        )
      except OSError:
        continue  # It has ended.
      if state == "Z":
        continue
      if own and int(session) not in (os.getsid(0), run):
        self._sessions.add(session)
      if own or session in self._sessions:
        found[int(entry.name)] = line.replace(b"\0", b" ").decode()[:120]
    self.names |= found
    return found


def is_free(port: int) -> bool:
  with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(("127.0.0.1", port))
    except OSError:
      return False
  return True


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def fork_run(folder: pathlib.Path, way: str, port: int) -> int:
  """A run in a process group of its own; its process id."""
  folder.mkdir(parents=True)
  pid = os.fork()
  if pid:
    return pid
  code = 70
  try:
    os.setpgid(0, 0)
    os.environ[MARK] = way
    tempfile.tempdir = str(folder)  # Where browsers have their profiles.
    with open(folder / "log", "wb") as log:
      os.dup2(log.fileno(), 1)
      os.dup2(log.fileno(), 2)
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, signal.default_int_handler)
    from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top

    code = train.main(arguments(folder, way, port))
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(pid: int, seconds: float) -> int | None:
  due = time.monotonic() + seconds
  while time.monotonic() < due:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.05)
  return None


def kill(pid: int, way: str) -> None:
  if way == "leader":
    os.killpg(pid, signal.SIGKILL)
  elif way.startswith("SIG"):
    number = signal.Signals[way.split()[0]]
    os.kill(pid, number)
    if way.endswith("twice"):
      time.sleep(0.2)
      os.kill(pid, number)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--ways", default=",".join(WAYS))
  args = parser.parse_args()
  from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.environments.gyms import gym_registry  # pylint: disable=g-import-not-at-top

  del train
  gym_registry.get("miniwob")
  for way in args.ways.split(","):
    started = time.monotonic()
    folder, port = args.folder / way.replace(" ", "_"), free_port()
    pid = fork_run(folder, way, port)
    descendants = Descendants(folder, way)
    status, due = None, started + START_S
    by_itself = way in ("normal", "reward")
    while status is None and time.monotonic() < due:
      names = " ".join(descendants.alive(pid).values())
      if "chrom" in names and " uploader " in names and not by_itself:
        kill(pid, way)
        break
      status = ended(pid, 0.1)
    if status is None:
      status = ended(pid, END_S)
    due = time.monotonic() + LEFT_S
    while (left := descendants.alive(pid)) and time.monotonic() < due:
      time.sleep(0.1)
    entry = {
      "way": way,
      "status": status,
      "left": left,
      "seen": sorted(descendants.names.values()),
      "port_is_free": is_free(port),
    }
    for other in left:
      os.kill(other, signal.SIGKILL)
    if status is None:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
    entry["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(entry), flush=True)


if __name__ == "__main__":
  sys.path.insert(0, str(pathlib.Path(__file__).parent))
  main()
