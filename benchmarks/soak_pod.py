"""Kills, preempts and joins processes of a pod's run; nothing may be lost.

Two runs, each of four processes with a CPU device each. Every `--every` seconds
one of these events happens to one of them, in random order:

* `hosts`: two processes learn and two roll out, staleness 1. A host is killed
  and another joins; one leaves by SIGTERM; a third joins for a while; a learner
  is killed or preempted.
* `mesh`: four processes learn and roll out, staleness 0. One is killed, and the
  others must end and say why; or it is preempted by SIGTERM or SIGUSR1, and all
  must save and end.

A run that ended is resumed, often with another number of learners. Checked:
each group is trained on once, and each admitted one trained on or dropped for a
reason; updates and versions rise by one in metrics.jsonl, summary.json and the
monitor's database; a preemption loses no update and a death none that was
saved; nothing prints a traceback; memory, processes and files of the exchange
do not pile up; without staleness the curve is that of an undisturbed run of one
process. The order of sums depends on the number of processes: once in thousands
of tokens that samples another one, and the curves part from there on, which
this check reports as a failure.

  python benchmarks/soak_pod.py --folder soak                 # an hour
  python benchmarks/soak_pod.py --updates 20 --every 15

Prints a table; exits with 1 if a check failed. The same command goes on in a
folder where it was stopped.
"""

import argparse
import collections
import gc
import json
import os
import pathlib
import random
import re
import signal
import sqlite3
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import fault_runs  # noqa: E402
import forced_devices  # noqa: E402
import pods  # noqa: E402

SETTINGS = (
  *pods.ARGUMENTS, "warm_start.steps=0", "eval.every=0", "checkpoint.every=5",
  "eval.episodes_per_task=1", "collect.concurrency=4", "engine.slots=4",
  "monitor.embedded=true",
  "watchdog.on=false",  # It warns once in each start.
)  # fmt: skip
MODES = {
  "hosts": (
    "rollout.via=hosts", "rollout.silence_s=5", "queue.max_staleness=1",
    "mesh.data=1",
  ),
  "mesh": (),
}  # fmt: skip
HEARTBEAT_S, START_S = 10, 240.0
IN_STEP = 4  # Groups.
PAGE = os.sysconf("SC_PAGE_SIZE")


class Soak:
  """One run, from its start to its end."""

  def __init__(self, folder: pathlib.Path, mode: str, options):
    self.folder, self.mode = folder / mode, mode
    self.run = self.folder / "r"
    self.steps, self.every = options.steps[mode], options.every
    self.rng = random.Random(f"{options.seed}{mode}{time.time_ns()}")
    self.table = collections.Counter()
    self.failed: list[str] = []
    self.learners: list[fault_runs.Process] = []
    self.hosts: list[fault_runs.Process] = []
    self.trains = False  # The learners of this start have made an update.
    self.memory: dict[int, list[int]] = {}

  # --- processes --------------------------------------------------------------

  def fork(self, name: str, devices: int, argv, main=None, **about):
    def before():
      flag = "--xla_force_host_platform_device_count="
      flags = re.sub(rf"{flag}\d+", "", os.environ.get("XLA_FLAGS", ""))
      os.environ["XLA_FLAGS"] = f"{flags} {flag}{devices}"

    return fault_runs.Process(self.folder / name, argv, before, main, **about)

  def start(self, count: int) -> None:
    """Starts learners, and as many hosts as there are to be."""
    while self.mode == "hosts" and len(self.hosts) < 2:
      self.join()
    devices = 4 if self.mode == "mesh" else 2
    address = forced_devices.free_address()
    first = not (self.run / "config.yaml").exists()
    session, self.trains = time.time(), False
    settings = [*SETTINGS, *MODES[self.mode], f"steps={self.steps}"]
    settings.append(f"run.dir={self.folder}")
    for i in range(count):
      pod = [
        f"processes.coordinator={address}", f"processes.count={count}",
        f"processes.index={i}", f"processes.heartbeat_s={HEARTBEAT_S}",
        f"processes.join_s={START_S:g}",
      ]  # fmt: skip
      argv = settings if first else [f"resume={self.run}"]
      argv = [*argv, *(pod if count > 1 else ())]
      self.learners.append(
        self.fork(
          f"learner{i}", devices // count, argv, process=i, session=session
        )
      )

  def join(self) -> None:
    """Starts a rollout host."""
    from tunix.rl.multi_turn.commands import rollout  # pylint: disable=g-import-not-at-top

    number = len(list(self.folder.glob("host*")))
    argv = [str(self.run), f"--patience={START_S:g}"]
    self.hosts.append(self.fork(f"host{number}", 1, argv, rollout.main))

  def watch(self, seconds: float) -> bool:
    """Waits; returns whether the learners still run."""
    due = time.monotonic() + seconds
    while time.monotonic() < due:
      for process in (*self.learners, *self.hosts):
        if process.poll():
          return False
        if self.trains:
          with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
          self.memory.setdefault(process.pid, []).append(pages)
      time.sleep(1.0)
    return True

  # --- what happened ----------------------------------------------------------

  def entries(self) -> list[dict]:
    """Returns the lines of all ledgers, in the order of time."""
    values = []
    for ledger in self.folder.glob("learner*/ledger.jsonl"):
      values += fault_runs.entries_of(ledger)
    return sorted(values, key=lambda entry: entry["clock"])

  def step(self) -> int:
    return max((e["step"] for e in self.entries() if "step" in e), default=0)

  def saved(self) -> int:
    return fault_runs.acknowledged(self.folder)["checkpoint"]

  def say(self, what: str, **more) -> None:
    self.table[what] += 1
    entry = {"time": time.time(), "event": what, "step": self.step(), **more}
    with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
      file.write(json.dumps(entry) + "\n")
    print(self.mode, json.dumps(entry), flush=True)

  def check(self, what: str, good: object, why: object = "") -> None:
    self.table[f"checked: {what}"] += 1
    if not good:
      self.failed.append(f"{what}: {why}")
      print(f"FAILED {self.mode}: {what}: {why!s:.3000}", flush=True)

  # --- events -----------------------------------------------------------------

  def end_of_learners(self, seconds: float) -> list[int]:
    """Waits for all; their exit statuses."""
    statuses, due = [], time.monotonic() + seconds
    for process in self.learners:
      statuses.append(process.wait(max(1.0, due - time.monotonic())))
      self.words(process)
    return statuses

  def words(self, process: fault_runs.Process) -> None:
    try:
      process.check_words()
    except AssertionError as error:
      self.check("words", False, f"{process.folder}: {error}")

  def end_of_hosts(self) -> None:
    """Waits until every host has ended, as it does when its run ends."""
    for host in self.hosts:
      status = host.wait(60)
      self.check("hosts end with it", status == 0, host.said()[-2000:])
      self.words(host)
    self.hosts = []

  def resume(self) -> None:
    """Checks that the run goes on from what was saved."""
    saved, since = self.saved(), time.monotonic()
    before = len(self.learners)
    self.learners = []
    choices = (4, 4, 2, 1) if self.mode == "mesh" else (2, 2, 1)
    count = self.rng.choice(choices)
    self.table["another number of learners"] += count != before
    self.start(count)
    while self.watch(0.5) and time.monotonic() - since < START_S:
      new = [e for e in self.entries() if e["clock"] > since and "step" in e]
      if new:
        self.trains = True
        break
    else:
      new = []
    want = min(saved + 1, self.steps + 1)
    self.check(
      "resumes from the newest checkpoint",
      new[0]["step"] == want if new else saved == self.steps,
      (saved, new[:1], self.said()),
    )
    self.say("resumed", learners=count, seconds=time.monotonic() - since)

  def said(self) -> str:
    return "\n".join(p.said()[-2000:] for p in self.learners)

  def kill_learner(self) -> None:
    victim = self.rng.choice(self.learners)
    self.say("learner killed", index=self.learners.index(victim))
    since, saved = time.monotonic(), self.saved()
    victim.kill()
    self.end_of_learners(HEARTBEAT_S + 60)
    seconds = time.monotonic() - since
    survivors = [p for p in self.learners if p is not victim]
    for other in survivors:
      self.check(
        "others end after a death and say why",
        other.status and ("task died" in other.said() or other.errors()),
        (other.status, other.said()[-2000:]),
      )
    self.table["longest end, s"] = max(
      self.table["longest end, s"], round(seconds)
    )
    self.check("a death loses nothing saved", self.saved() >= saved)
    self.resume()

  def preempt(self) -> None:
    number = self.rng.choice((signal.SIGTERM, signal.SIGUSR1))
    victim = self.rng.choice(self.learners)
    self.say(
      "learner preempted", by=number.name, index=self.learners.index(victim)
    )
    os.kill(victim.pid, number)
    statuses = self.end_of_learners(120)
    ended = set(statuses) in ({130}, {0})
    self.check("all end after a notice", ended, (statuses, self.said()))
    step, saved = self.step(), self.saved()
    self.check("a preemption loses no update", step == saved, (step, saved))
    self.end_of_hosts()
    self.resume()

  def drop(self, number: int) -> None:
    """A host ends; another joins."""
    host = self.hosts.pop(self.rng.randrange(len(self.hosts)))
    os.kill(host.pid, number)
    status = host.wait(60)
    if number == signal.SIGTERM:
      self.check("a host leaves", status in (0, 130), (status, host.said()))
    self.words(host)

  def kill_host(self) -> None:
    self.say("host killed")
    self.drop(signal.SIGKILL)
    self.join()

  def leave(self) -> None:
    self.say("host left")
    self.drop(signal.SIGTERM)
    self.join()

  def further(self) -> None:
    self.say("a third host joined for a while")
    self.join()
    if self.watch(self.every / 2):
      self.drop(signal.SIGTERM)

  def play(self) -> None:
    events = [self.kill_learner, self.preempt]
    if self.mode == "hosts":
      events += [self.kill_host, self.leave, self.further]
    started = time.monotonic()
    self.folder.mkdir(parents=True, exist_ok=True)
    self.start(4 if self.mode == "mesh" else 2)
    try:
      pile: list = []
      while True:
        if not self.watch(self.every):
          break
        if not 0 < self.step() < self.steps - 5:
          continue  # It compiles, or ends soon.
        self.trains = True
        # Each once, in a random order, then again.
        pile = pile or self.rng.sample(events, len(events))
        pile.pop()()
      statuses = self.end_of_learners(120)
      self.check("the run ends", not any(statuses), (statuses, self.said()))
      self.end_of_hosts()
    finally:
      for process in (*self.learners, *self.hosts):
        process.kill()
    self.table["seconds"] = round(time.monotonic() - started)
    self.check_whole()

  # --- at the end -------------------------------------------------------------

  def check_whole(self) -> None:
    metrics = pods.metrics_of(self.run)
    upwards = list(range(1, self.steps + 1))
    for name in ("step", "version"):
      values = [m[name] for m in metrics]
      self.check(f"metrics: {name} rises by one", values == upwards, values)
    summary = json.loads((self.run / "summary.json").read_text())
    self.check(
      "summary",
      (summary["status"], summary["step"]) == ("completed", self.steps),
      summary["status"],
    )
    with sqlite3.connect(self.folder / "monitor.db") as database:
      rows = database.execute(
        "SELECT step, COUNT(*) FROM step GROUP BY step ORDER BY step"
      ).fetchall()
    self.check("monitor: each update once", rows == [(n, 1) for n in upwards])
    self.check_groups()
    self.check_memory()
    files = [
      str(p.relative_to(self.run))
      for p in self.run.rglob("*")
      if p.name in ("rollout.json", "notes")
      or p.suffix == ".new"
      or p.parent.name == "weights"
    ]
    self.check("no file of the exchange stays", not files, files)
    alive = []
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
      try:
        if str(self.folder).encode() in process.read_bytes():
          alive.append(process.parent.name)
      except OSError:
        pass
    self.check("no process stays", not alive, alive)

  def check_memory(self) -> None:
    """No process that made updates for a minute grows without a bound.

    Its caches of patched images, 256 MiB each for learner and engine, fill in
    the first thousand updates.
    """
    for pid, pages in self.memory.items():
      third = len(pages) // 3
      if third < 20:
        continue
      grown = (max(pages[-third:]) - max(pages[:third])) * PAGE >> 20
      self.table["memory grown at most, MiB"] = max(
        self.table["memory grown at most, MiB"], grown
      )
      self.check("memory is bounded", grown < 512, (pid, grown))

  def check_groups(self) -> None:
    """Each admitted group was trained on once, or dropped with a reason."""
    entries = self.entries()
    last: dict[int, dict[str, list]] = {}
    at: dict[int, int] = {}
    dropped = set()
    for entry in entries:
      if "step" in entry:
        # 1. A death takes updates back: of an update that was made again, the
        #    later one counts, with the groups of all processes.
        step = entry["step"]
        if entry["session"] != at.get(step):
          at[step], last[step] = entry["session"], {}
        last[step][entry["process"]] = entry["groups"]
      elif entry.get("outcome") == "dropped":
        dropped.add(entry["group"])
    trained = [g for n in sorted(last) for of in last[n].values() for g in of]
    self.check("updates noted", sorted(last) == list(range(1, self.steps + 1)))
    counts = collections.Counter(trained)
    twice = [name for name, count in counts.items() if count > 1]
    self.check("no group twice", not twice, twice)
    # 2. A number is one task instance; a retry of it has a suffix.
    index = lambda name: int(name.split("-")[1])
    numbers = collections.Counter(map(index, trained))
    twice = [number for number, count in numbers.items() if count > 1]
    self.check("no task instance twice", not twice, twice)
    self.check("groups", len(trained) == IN_STEP * self.steps, len(trained))
    # 3. The newest may still wait, as far as the bound on staleness admits.
    newest = max(numbers) - (8 * IN_STEP if self.mode == "hosts" else 0)
    dropped_numbers = set(map(index, dropped))
    lost = [
      n
      for n in range(newest + 1)
      if n not in numbers and n not in dropped_numbers
    ]
    self.check("none lost", not lost, lost)
    self.table |= collections.Counter(
      {
        "groups trained on": len(trained),
        "groups dropped": len(dropped_numbers),
      }
    )


def undisturbed(soak: Soak) -> None:
  """Compares a run without staleness with that of one process."""
  folder = soak.folder / "one"
  argv = [*SETTINGS, f"steps={soak.steps}", f"run.dir={folder}"]
  if not (folder / "r" / "policy" / "SHA256SUMS").exists():
    process = soak.fork("one", 4, argv)
    soak.learners, soak.memory = [process], {}
    soak.trains = process.wait_for("training", 1)
    while soak.watch(60.0):
      pass
    status = process.wait()
    soak.check_memory()
    soak.check("the undisturbed run ends", not status, process.said()[-2000:])
  try:
    pods.check_equal(soak.run, folder / "r")
    why = ""
  except AssertionError as error:
    why = f"{error}"
  soak.check("the curve is that of an undisturbed run", not why, why)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--updates", type=int, default=500)
  parser.add_argument("--every", type=float, default=60.0, metavar="S")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", type=pathlib.Path, default=None)
  options = parser.parse_args()
  folder = options.folder or pathlib.Path(tempfile.mkdtemp("-soak"))
  folder = folder.resolve()
  mesh = options.updates * 2 // 5
  options.steps = {"hosts": options.updates - mesh, "mesh": mesh}
  # Before JAX is imported.
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.environments.gyms import gym_registry  # pylint: disable=g-import-not-at-top

  del train
  gym_registry.get("desktop")
  gc.freeze()
  failed = 0
  for mode in MODES:
    soak = Soak(folder, mode, options)
    result = folder / f"{mode}.json"
    if not result.exists():
      try:
        soak.play()
        if mode == "mesh":
          undisturbed(soak)
      except Exception as error:  # pylint: disable=broad-except
        soak.failed.append(f"{type(error).__name__}: {error}")
      result.write_text(json.dumps([soak.table, soak.failed]))
    table, failures = json.loads(result.read_text())
    failed += len(failures)
    print(f"\n{mode}, {options.steps[mode]} updates")
    for what, number in table.items():
      print(f"  {what:52} {number:7}")
    for why in failures:
      print(f"  FAILED {why:.2000}")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
