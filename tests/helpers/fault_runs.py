"""Training runs that are killed, starved, damaged and started twice.

Runs as a program, as it loads `system_faults.c` before everything else and
forks a warm interpreter for each run; prints what it found as JSON lines:

    python fault_runs.py <folder> [--kills 50] [--disks 20] [...]

Each scenario ends with a resumed run that is compared with an undisturbed one:

* a synchronous run has the same weights, metrics, evaluations and counts, to
  the bit; an asynchronous one the same number of steps;
* no group is trained on twice in the steps that count;
* what was acknowledged before the fault is there after it: the newest
  checkpoint is resumed from, evaluations stay, groups in the queue's store are
  trained on or dropped for their age;
* nothing prints a traceback, and a process that fails prints one line that
  begins with `error:`.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

LIBRARY = "FAULT_RUNS_LIBRARY"
STAGES = ("cloning", "evaluating", "training", "saving")
DISTURBED_S = 300.0
SAVED_S = 60.0
"""Deadline of a save under a clock that jumps."""
NUMBERS = {
  "kills": 50,
  "signals": 40,
  "twice": 5,
  "clocks": 10,
  "disks": 20,
  "damages": 90,
}
"""How often, by default; kills are of each stage and each staleness."""
STEPS = 4
# Others are measured in seconds, or count what one process did.
EQUAL = (
    "step", "version", "groups", "episodes", "reward_mean", "reward_std",
    "success_rate", "turns_mean", "episode_tokens_mean", "advantage_mean",
    "completion_tokens", "entropy", "importance_weight", "logprob",
    "policy_loss", "ratio_mean", "ratio_max", "ratio_min", "sampler_kl",
    "logprob_gap_max", "loss", "grad_norm", "learning_rate", "sequences",
    "tokens", "sampled_tokens", "optimizer_steps", "skipped_steps",
    "empty_updates", "dropped_sequences",
)  # fmt: skip


def arguments(folder: pathlib.Path, staleness: int) -> list[str]:
  """Of the smallest run that clones, evaluates, trains and saves."""
  import small_runs  # pylint: disable=g-import-not-at-top

  return [
      f"run.dir={folder}", *small_runs.SMALL, small_runs.ONE_LAYER, "name=r",
      "warm_start.source=none", "warm_start.steps=3",
      "warm_start.batch_size=4", f"steps={STEPS}", "checkpoint.every=1",
      "eval.every=2", "eval.episodes_per_task=1", "eval.modes=[sampled]",
      f"queue.max_staleness={staleness}", f"queue.path={folder / 'queue.db'}",
      "collect.group_size=2", "engine.slots=4", "collect.concurrency=4",
      # Nothing succeeds yet, so it is the entropy that is learned from.
      "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
  ]  # fmt: skip


# --- one process --------------------------------------------------------------


class Ledger:
  """Appends what a run does to a file, a system call a line.

  The file is outside the run directory, and ahead of it when a kill comes.
  """

  def __init__(self, path: pathlib.Path, about: dict):
    self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    self._about = about

  def write(self, **entry) -> None:
    entry |= {"clock": time.monotonic(), **self._about}
    os.write(self._file, json.dumps(entry).encode() + b"\n")

  def on_event(self, event) -> None:
    from tunix.rl.multi_turn.core import events  # pylint: disable=g-import-not-at-top

    if isinstance(event, events.StepFinished):
      self.write(step=event.step, groups=[g.group_id for g in event.groups])
    elif isinstance(event, events.EvalStarted):
      self.write(stage="evaluating")
    elif isinstance(event, events.EvalFinished):
      self.write(evaluated=event.name, stage="training")
    elif isinstance(event, events.GroupFinished):
      self.write(group=event.group.group_id, outcome=event.outcome)
    elif isinstance(event, events.Progress) and "cloning" in event.stage:
      self.write(stage="cloning", done=event.done)


def _attach(ledger: Ledger) -> None:
  """Lets runs of this process write to the ledger, also when they save."""
  from tunix.rl.multi_turn.learner import checkpoint  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import models  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import run as run_lib  # pylint: disable=g-import-not-at-top

  attach = run_lib.Run.attach_observers

  def attach_both(run, resume_step):
    attach(run, resume_step)
    run.observers.add(ledger)

  def announced(call):
    def wrapped(*args, **kwargs):
      ledger.write(stage="saving")
      try:
        return call(*args, **kwargs)
      finally:
        ledger.write(stage="training")

    return wrapped

  run_lib.Run.attach_observers = attach_both
  learner = checkpoint.LearnerCheckpoints
  learner.save, learner.wait = announced(learner.save), announced(learner.wait)
  models.save_policy = announced(models.save_policy)


class Process:
  """A fork of this interpreter that runs the training command."""

  def __init__(
    self, folder: pathlib.Path, argv, before=None, main=None, **about
  ):
    """Forks.

    Args:
      folder: Folder of what it prints and of its ledger.
      argv: Arguments of the command.
      before: Called in the fork.
      main: Command in place of `train`.
      **about: More fields of each line of the ledger.
    """
    self.folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.err")))
    self.out, self.err = folder / f"{number}.out", folder / f"{number}.err"
    self.ledger = folder / "ledger.jsonl"
    self.err.touch()
    self.begun = self.ledger.stat().st_size if self.ledger.exists() else 0
    self.pid = os.fork()
    if not self.pid:
      code = 70
      try:
        for path, handle in ((self.out, 1), (self.err, 2)):
          flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
          os.dup2(os.open(path, flags, 0o644), handle)
        code = _train(argv, Ledger(self.ledger, about), before, main)
      finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    self.status: int | None = None

  def poll(self) -> bool:
    """Whether it has ended."""
    if self.status is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      if pid:
        self.status = os.waitstatus_to_exitcode(status)
    return self.status is not None

  def wait(self, seconds: float = DISTURBED_S) -> int:
    """Its exit status; what outlives the time is killed, and a failure."""
    deadline = time.monotonic() + seconds
    while not self.poll():
      if time.monotonic() > deadline:
        os.kill(self.pid, signal.SIGUSR2)  # Each thread writes where it is.
        time.sleep(1.0)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"hangs: {self.said()[-20_000:]}")
      time.sleep(0.01)
    return self.status

  def wait_for(self, stage: str, number: int = 1) -> bool:
    """Whether it came to a stage for the n-th time, before its end."""
    size = 0
    while not self.poll():
      before = size
      size = self.ledger.stat().st_size if self.ledger.exists() else 0
      if size > before:
        entries = entries_of(self.ledger, self.begun)
        if sum(e.get("stage") == stage for e in entries) >= number:
          return True
      time.sleep(0.002)
    return False

  def kill(self) -> None:
    if not self.poll():
      os.kill(self.pid, signal.SIGKILL)
      self.wait()

  def said(self) -> str:
    return self.err.read_text(errors="replace")

  def errors(self) -> list[str]:
    return [l for l in self.said().splitlines() if l.startswith("error: ")]

  def check_words(self) -> None:
    """One error line if it failed, and no traceback ever."""
    assert "Traceback" not in self.said(), self.said()[-3000:]
    if self.status in (1, 2):
      assert len(self.errors()) == 1, self.said()
    elif self.status in (0, 130):
      assert not self.errors(), self.said()


def _train(argv, ledger: Ledger, before, main) -> int:
  from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
  faulthandler.register(signal.SIGUSR2, all_threads=True)
  if before is not None:
    before()
  _attach(ledger)
  return (main or train.main)(list(argv))


def entries_of(path: pathlib.Path, begun: int = 0) -> list[dict]:
  """The whole lines of a ledger."""
  if not path.exists():
    return []
  with path.open("rb") as file:
    file.seek(begun)
    lines = file.read().split(b"\n")[:-1]
  return [json.loads(line) for line in lines]


# --- what is left -------------------------------------------------------------


def digest(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()


def result_of(run: pathlib.Path) -> dict:
  """The figures that a disturbed synchronous run shares with another."""
  lines = (run / "metrics.jsonl").read_text().splitlines()
  summary = json.loads((run / "summary.json").read_text())
  return {
    "metrics": [
      # A wrong bit in a name leaves that reading out.
      {key: json.loads(line).get(key) for key in EQUAL}
      for line in lines
    ],
    "policy": digest(run / "policy" / "model.safetensors"),
    "warm_start": digest(run / "warm_start" / "model.safetensors"),
    "eval": without_times(summary["eval"]),
    **{
      k: summary[k]
      for k in ("status", "step", "version", "episodes", "groups", "faults")
    },
  }


def without_times(evaluations: dict) -> dict:
  """Results of evaluations, without how long they took."""
  return {
    name: {k: v for k, v in of.items() if not k.startswith("seconds")}
    for name, of in evaluations.items()
  }


def acknowledged(folder: pathlib.Path) -> dict:
  """The groups that must not be lost after this point."""
  run, found = folder / "r", {"checkpoint": 0, "eval": {}, "stored": []}
  steps = [
    int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit()
  ]
  found["checkpoint"] = max(steps, default=0)
  found["cloned"] = (run / "warm_start" / "config.json").exists()
  if (run / "summary.json").exists():
    summary = json.loads((run / "summary.json").read_text())
    found["eval"] = without_times(summary["eval"])
  if (folder / "queue.db").exists():
    # A copy, as to read it would change the original.
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for part in folder.glob("queue.db*"):
      shutil.copy(part, copy)
    with sqlite3.connect(copy / "queue.db") as database:
      try:
        rows = database.execute("SELECT group_id FROM groups WHERE done = 0")
        found["stored"] = [row[0] for row in rows]
      except sqlite3.OperationalError:
        pass  # Killed before it had its table.
    database.close()
    shutil.rmtree(copy)
  return found


def check_resumed(folder: pathlib.Path, before: dict, begun: int) -> None:
  """What was acknowledged is there after a run was resumed to its end."""
  entries = entries_of(folder / "ledger.jsonl", begun)
  steps = [e["step"] for e in entries if "step" in e]
  first = before["checkpoint"] + 1
  assert steps[:1] in ([], [first]), (before["checkpoint"], steps)
  if before["cloned"]:
    assert not any(e.get("stage") == "cloning" for e in entries)
  summary = json.loads((folder / "r" / "summary.json").read_text())
  evaluated = without_times(summary["eval"])
  for name, results in before["eval"].items():
    again = any(e.get("evaluated") == name for e in entries)
    late = name == "final" or (
      name.startswith("step_") and int(name[5:]) >= first
    )
    assert late or not again, f"{name} was evaluated again"
    assert again or evaluated[name] == results, name
  ended = {g for e in entries if "step" in e for g in e["groups"]}
  ended |= {e["group"] for e in entries if e.get("outcome") == "dropped"}
  # Of a step that the checkpoint holds; the store hears of it a moment later.
  held = {
    e["step"]: e["groups"]
    for e in entries_of(folder / "ledger.jsonl")
    if "step" in e
  }
  ended |= {g for n in range(1, first) for g in held.get(n, ())}
  if steps and steps[-1] == STEPS and len(steps) > 1:
    consumed = len(steps) * 2
    lost = [g for g in before["stored"][:consumed] if g not in ended]
    assert not lost, f"stored and never trained on: {lost}"


def check_whole(folder: pathlib.Path, want: dict | None) -> None:
  """The finished run is the undisturbed one; no group went into two steps."""
  counted: dict[int, list[str]] = {}
  for entry in entries_of(folder / "ledger.jsonl"):
    if "step" in entry:
      counted[entry["step"]] = entry["groups"]  # The last is what counts.
  trained = [g for step in sorted(counted) for g in counted[step]]
  assert sorted(counted) == list(range(1, STEPS + 1)), sorted(counted)
  assert len(set(trained)) == len(trained) == 2 * STEPS, trained
  found = result_of(folder / "r")
  assert found["status"] == "completed" and found["step"] == STEPS
  assert [m["step"] for m in found["metrics"]] == list(range(1, STEPS + 1))
  if want is not None:
    for key, value in want.items():
      assert found[key] == value, _difference(key, found[key], value)
  else:
    assert found["groups"]["accepted"] >= 2 * STEPS
    evaluated = sum(
      v for k, v in found["episodes"].items() if k.startswith("eval/")
    )
    # The final evaluation is that of the last update.
    assert evaluated == 2 * (len(found["eval"]) - 1), found["episodes"]


def _difference(key: str, found, want) -> str:
  if isinstance(want, list):
    for one, other in zip(found, want):
      for name in other:
        if one[name] != other[name]:
          return f"{key}: {name} is {one[name]}, undisturbed {other[name]}"
  return f"{key} is {found}, undisturbed {want}"


# --- scenarios ----------------------------------------------------------------


class Scenarios:
  """Runs in subfolders of `folder`; the first one is undisturbed."""

  def __init__(self, folder: pathlib.Path, seed: int):
    self.folder = folder
    self.rng = random.Random(seed)
    self.count = 0
    # Nothing is expected of asynchronous runs but their number of steps.
    self.want: dict[int, dict | None] = {2: None}
    self.seconds: dict[str, float] = {}
    started = time.monotonic()
    folder = self._new()
    process = Process(folder, arguments(folder, 0))
    assert process.wait() == 0, process.said()
    process.check_words()
    self.want[0] = result_of(folder / "r")
    check_whole(folder, self.want[0])
    self.size = sum(
      p.stat().st_size for p in self._sync.rglob("*") if p.is_file()
    )
    self._measure(entries_of(self._sync / "ledger.jsonl"))
    self.run_s = time.monotonic() - started

  @property
  def _sync(self) -> pathlib.Path:
    return self.folder / "0000"

  def _new(self) -> pathlib.Path:
    folder = self.folder / f"{self.count:04d}"
    self.count += 1
    return folder

  def logs(self, folder: pathlib.Path | None = None) -> dict[str, str]:
    """The ends of what a scenario's processes wrote; by default the last's."""
    folder = folder or self.folder / f"{self.count - 1:04d}"
    files = [
      p
      for of in (folder, folder / "logs")
      for p in sorted(of.glob("*.*"))
      if p.suffix in (".out", ".err", ".jsonl")
    ]
    files += [folder / "r" / "summary.json", folder / "r" / "traceback.txt"]
    return {
      str(p.relative_to(folder)): p.read_text(errors="replace")[-4000:]
      for p in files
      if p.exists()
    }

  def _measure(self, entries) -> None:
    for stage in STAGES:
      times = [
        after["clock"] - entry["clock"]
        for entry, after in zip(entries, entries[1:])
        if entry.get("stage") == stage
      ]
      self.seconds[stage] = max(times)

  def _resume(self, folder: pathlib.Path, before=None) -> Process:
    return Process(folder, [f"resume={folder / 'r'}"], before)

  def _start(
    self, folder: pathlib.Path, staleness: int, before=None, more=()
  ) -> Process:
    """A first start, or a resumption where there is a run to resume."""
    if (folder / "r" / "config.yaml").exists():
      return self._resume(folder, before)
    shutil.rmtree(folder / "r", ignore_errors=True)
    return Process(folder, [*arguments(folder, staleness), *more], before)

  def _to_the_end(self, folder: pathlib.Path, staleness: int) -> None:
    kept = acknowledged(folder)
    process = self._start(folder, staleness)
    assert process.wait() == 0, process.said()
    process.check_words()
    check_resumed(folder, kept, process.begun)
    check_whole(folder, self.want[staleness])

  def kill(self, stage: str, staleness: int) -> dict:
    """SIGKILL at a random moment of a stage, perhaps a second time."""
    folder = self._new()
    kills = 0
    for _ in range(self.rng.choice((1, 1, 2))):
      process = self._start(folder, staleness)
      # Of an evaluation or a save, any; of cloning or training, any update.
      if process.wait_for(stage, self.rng.randint(1, 3)):
        time.sleep(self.rng.uniform(0, self.seconds[stage]))
        kills += not process.poll()
      process.kill()
      process.check_words()
    self._to_the_end(folder, staleness)
    shutil.rmtree(folder)
    return {"kills": kills}

  def interrupt(self, number: int, times: int, staleness: int) -> dict:
    """SIGTERM or Ctrl-C, once and twice."""
    folder = self._new()
    process = self._start(folder, staleness)
    if process.wait_for(self.rng.choice(STAGES), self.rng.randint(1, 2)):
      time.sleep(self.rng.uniform(0, 0.2))
      for i in range(times):
        if not process.poll():
          os.kill(process.pid, number)
          time.sleep(0.05 * (i + 1))
    status = process.wait()
    process.check_words()
    assert status in (0, 130), (status, process.said())
    if status:
      assert "resume=" in process.out.read_text() + process.said()
    self._to_the_end(folder, staleness)
    shutil.rmtree(folder)
    return {"status": status}

  def twice(self) -> dict:
    """Two resumptions at once: one goes on, the other names it."""
    folder = self._new()
    process = self._start(folder, 0)
    process.wait_for("saving", 5)
    process.kill()
    kept = acknowledged(folder)
    both = [self._resume(folder), self._resume(folder)]
    statuses = sorted(p.wait() for p in both)
    assert statuses == [0, 2], (statuses, [p.said() for p in both])
    for one, other in (both, both[::-1]):
      one.check_words()
      if one.status == 2:
        assert f"in use by process {other.pid} on " in one.said()
    check_resumed(folder, kept, both[0].begun)
    check_whole(folder, self.want[0])
    shutil.rmtree(folder)
    return {}

  def clock(self) -> dict:
    """The wall clock jumps by a day or a year, forth and back, and a kill.

    TensorStore's workers end after 20 s without work, and it starts another one
    only when the wall clock is past the start of the last: a save behind a
    clock that was set back hangs until its deadline. The run is resumed then.
    """
    folder, hangs = self._new(), 0
    more = [f"checkpoint.deadline_s={SAVED_S:g}"]
    jumps = [
      self.rng.choice((-1, 1)) * self.rng.choice((86400, 31536000))
      for _ in range(200)
    ]

    def jump():
      import threading  # pylint: disable=g-import-not-at-top

      faults = ctypes.CDLL(os.environ[LIBRARY])
      faults.fault_clock.argtypes = [ctypes.c_longlong]

      def turn():
        for seconds in jumps:
          faults.fault_clock(seconds)
          time.sleep(0.2)

      threading.Thread(target=turn, daemon=True).start()

    process = self._start(folder, 0, jump, more)
    if process.wait_for("saving", self.rng.randint(1, 8)):
      time.sleep(self.rng.uniform(0, 0.2))
    process.kill()
    process.check_words()
    while True:
      before = acknowledged(folder)
      process = self._start(folder, 0, jump, more)
      status = process.wait()
      process.check_words()
      if not status:
        break
      hangs += 1
      errors = process.errors() or [""]
      assert hangs < 3 and more[0] in errors[0], process.said()
    check_resumed(folder, before, process.begun)
    check_whole(folder, self.want[0])
    shutil.rmtree(folder)
    return {"hangs": hangs}

  def disk(self, share: float) -> dict:
    """A disk of a share of what the run writes; then there is room."""
    folder = self._new()
    size = max(8192, int(share * self.size))
    found = folder.with_suffix(".json")
    child = os.fork()
    if not child:
      code = 70
      try:
        found.write_text(json.dumps(self._on_disk(folder, size)))
        code = 0
      except BaseException as error:  # pylint: disable=broad-except
        found.write_text(json.dumps({"failed": f"{error!r:.3000}"}))
      finally:
        os._exit(code)
    os.waitpid(child, 0)
    said = json.loads(found.read_text())
    assert "failed" not in said, said["failed"]
    return {"bytes": size, **said}

  def _on_disk(self, folder: pathlib.Path, size: int) -> dict:
    """In a process with mounts of its own."""
    disk, logs = folder / "disk", folder / "logs"
    disk.mkdir(parents=True)
    _mount(disk, size)
    process = Process(logs, arguments(disk, 0))
    status = process.wait()
    process.check_words()
    said = process.said()
    # The run's own two lines, one record of an observer, and the error.
    lines = [l for l in said.splitlines() if not l.startswith("note: ")]
    assert len(lines) <= 3, said
    if status:
      assert "no space left on the disk" in process.errors()[0], said
    _mount(disk, 16 * self.size, again=True)
    (logs / "r").symlink_to(disk / "r")
    (logs / "queue.db").symlink_to(disk / "queue.db")
    if not (disk / "r" / "config.yaml").exists():
      shutil.rmtree(disk / "r", ignore_errors=True)
      process = Process(logs, arguments(disk, 0))
    else:
      process = Process(logs, [f"resume={disk / 'r'}"])
    assert process.wait() == 0, process.said()
    process.check_words()
    check_whole(logs, self.want[0])
    return {"status": status}

  # --- damage ----------------------------------------------------------------

  def stopped(self) -> pathlib.Path:
    """A run that was killed in the midst of training."""
    folder = self._new()
    process = self._start(folder, 0)
    assert process.wait_for("saving", 10)
    process.kill()
    # The file of its queue is part of its settings: it is damaged in place.
    shutil.copytree(folder, folder.with_name("whole"))
    return folder

  def damage(self, stopped: pathlib.Path, name: str, kind: str) -> dict:
    """A file that the resumption reads is cut, emptied, or has a wrong bit.

    The run ends as the undisturbed one, or with one line that names the file
    or the checkpoint; put back, it ends as the undisturbed one.
    """
    folder = stopped
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("whole"), folder)
    file = folder / name
    whole = file.read_bytes()
    middle = self.rng.randrange(len(whole)) if whole else 0
    file.write_bytes(
      {
        "cut": whole[:middle],
        "empty": b"",
        "bit": whole[:middle]
        + bytes([b ^ 1 << self.rng.randrange(8) for b in whole[middle:][:1]])
        + whole[middle + 1 :],
      }[kind]
    )
    process = self._resume(folder)
    status = process.wait()
    process.check_words()
    assert status in (0, 1, 2)
    if status:
      said = process.said()
      # Of a checkpoint, all of it is named.
      named = "/".join(name.split("/")[:3]) if "checkpoints" in name else name
      assert str(folder / named) in said, (name, said)
      file.write_bytes(whole)
      process = self._resume(folder)
      assert process.wait() == 0, process.said()
      check_whole(folder, self.want[0])
    else:
      found = result_of(folder / "r")
      same = all(found[k] == self.want[0][k] for k in ("policy", "warm_start"))
      assert same, name
    return {"status": status}


def _mount(path: pathlib.Path, size: int, again: bool = False) -> None:
  """A disk of `size` bytes, in a mount namespace of this process's own."""
  libc = ctypes.CDLL(None, use_errno=True)
  new_namespace, new_user, remount, private = 0x20000, 0x10000000, 32, 0x44000
  if not again:
    if libc.unshare(new_namespace) and libc.unshare(new_namespace | new_user):
      raise OSError(ctypes.get_errno(), "unshare")
    libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None)
  done = libc.mount(
    b"tmpfs",
    os.fsencode(path),
    b"tmpfs",
    ctypes.c_ulong(remount if again else 0),
    f"size={size}".encode(),
  )
  if done:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(path))


def can_mount() -> bool:
  """Whether a process here may have disks of its own."""
  return not subprocess.run(
    ["unshare", "-m", "true"], check=False, capture_output=True
  ).returncode


FILES = (
  "r/config.yaml",
  "r/summary.json",
  "r/metrics.jsonl",
  "r/trajectories.jsonl",
  "r/warm_start/model.safetensors",
  "r/warm_start/config.json",
  "r/warm_start/tokenizer.json",
  "r/warm_start/SHA256SUMS",
  "queue.db",
)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("folder", type=pathlib.Path)
  for name, default in NUMBERS.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--most", type=int, help="of all kinds together")
  given = parser.parse_args()
  # Imports that a fork needs and that take time.
  from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.environments.gyms import gym_registry  # pylint: disable=g-import-not-at-top

  del train
  gym_registry.get("desktop")
  # Forks need not look for garbage in what was there before them.
  gc.freeze()
  gc.set_threshold(50_000, 20, 100)
  found = Scenarios(given.folder, given.seed)
  print(json.dumps({"what": "undisturbed", "seconds": found.run_s}), flush=True)
  plan = []
  for staleness in (0, 2):
    for stage in STAGES:
      plan += [("kill", stage, staleness)] * given.kills
  plan += [
    ("interrupt", number, times, staleness)
    for _ in range(-(-given.signals // 8))
    for number in (signal.SIGTERM, signal.SIGINT)
    for times in (1, 2)
    for staleness in (0, 2)
  ][: given.signals]
  plan += [("twice",)] * given.twice
  plan += [("clock",)] * (given.clocks if LIBRARY in os.environ else 0)
  if can_mount():
    plan += [("disk", (i + 0.5) / given.disks) for i in range(given.disks)]
  if given.damages:
    stopped = found.stopped()
    files = list(FILES)
    newest = max(
      int(p.name)
      for p in (stopped / "r" / "checkpoints").iterdir()
      if p.name.isdigit()
    )
    inside = (stopped / "r" / "checkpoints" / str(newest)).rglob("*")
    files += sorted(
      str(p.relative_to(stopped))
      for p in inside
      if p.is_file() and p.stat().st_size
    )
    kinds = [(f, kind) for f in files for kind in ("cut", "empty", "bit")]
    found.rng.shuffle(kinds)
    plan += [("damage", stopped, *one) for one in kinds[: given.damages]]
  found.rng.shuffle(plan)  # So that a part of it is a sample of all.
  one_each = {step[0]: place for place, step in enumerate(plan)}.values()
  repeated = [place for place in range(len(plan)) if place not in one_each]
  plan = [plan[place] for place in (*one_each, *repeated)][: given.most]
  for what, *how in plan:
    started = time.monotonic()
    entry = {"what": what, "how": [str(h) for h in how]}
    try:
      entry |= getattr(found, what)(*how)
    except Exception as error:  # pylint: disable=broad-except
      entry["failed"] = f"{type(error).__name__}: {error}"
      entry["logs"] = found.logs(how[0] if what == "damage" else None)
    entry["seconds"] = round(time.monotonic() - started, 2)
    print(json.dumps(entry), flush=True)


if __name__ == "__main__":
  main()
