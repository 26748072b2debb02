"""Measures what the Training Monitor costs a run, whatever state it is in.

The same seeded synchronous training on the embedded desktop is run as a user
runs it, each time in a process of its own. `--size quickstart` is what `make
train` runs (128 episodes a step), some 2.5 seconds each; `--size browser` the
same with three families of MiniWoB++ pages; `--size larger`, of a policy of 20
million parameters and 32 episodes a step, is a training that the model decides;
`--size small`, of a policy of some thousand parameters and 8 episodes a step,
shows what the monitor's own work amounts to where there is next to no training:

  off     without a monitor
  again   without a monitor: what two equal runs differ by, here and now
  on      with a server
  slow    with one whose every reply takes a second
  dead    with none at the address
  dying   with one that is killed half-way (SIGKILL)

All of them make the same step one after the other, each stopped (SIGSTOP, with
its uploader and its server) while another one makes it, in an order that turns:
so that a step is compared with the same step without a monitor, made seconds
before or after it, whatever else the machine does in an hour. Servers have the
niceness of the one that a run starts for itself. Of a step both the wall time
and the CPU time of the trainer's process are compared, all its threads
including the monitor's own. Figures are medians of the ratios with 95 %
intervals (bootstrap over rounds and their steps). The target is a ratio of
wall time of 1.01 at most; `again` says how far from 1 the machine itself puts
it.

Equal processes differ, too, for as long as they live (`again` may stray from 1
by some percent). `--crossover on`, or another arm, does without that: two equal
runs, each with a monitor in every other block of steps, the one where the other
one has none. Half of what lies between the blocks in the logarithm of the ratio
of their times is what a monitor costs, whatever the processes are and whatever
the steps are. A block with a monitor is delivered before the next begins, in
time that counts for neither run: some tenth of a second's work of a block.

`--apart` gives the trainer one core, and its uploader and server another one:
what is left of the cost on a machine that has a core to spare.

`--crossover busy` has no monitor, but a process of a server's niceness that
only counts, for `--busy` of the time: what as much work of anybody's costs a
training on this machine, whose cores share more than memory.

Then the servers start again, pending events are delivered, and each database is
compared with the events that its run emitted, row by row and token by token;
and every run with the first: the same losses and rewards. Exits with 1 unless
all of that is equal and no interval lies above 1.01.

    python benchmarks/bench_monitor_overhead.py [--rounds 1] [--steps 40]
        [--size small|larger|browser] [--arms off,on | --crossover on]
        [--apart] [--busy 0.2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

import numpy as np
from rich import console as rich_console
from rich import progress as rich_progress

HERE = pathlib.Path(__file__).resolve().parent
for folder in ("packages/training_monitor/tests/helpers", "tests/helpers"):
  sys.path.insert(0, str(HERE.parent / folder))
TRAINER = HERE / "overhead_trainer.py"

ARMS = ("off", "on", "slow", "dead", "dying", "again")
SILENT = ("off", "again", "busy")
BLOCK = 4
"""Steps of a crossover's block."""
WARM = 4
"""Steps that are not compared: they compile."""
QUICKSTART = (
  "report.progress=none",
  "eval.every=0",
  "eval.episodes_per_task=1",
  "seed=7",
  "monitor.close_timeout_s=2",
)
SMALL = (
  *QUICKSTART,
  "policy.config={width: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16,"
  " vision_heads: 2, mlp: 64, vision_mlp: 64, stem: [8, 8, 16]}",
  "tasks=[click-color, enter-text]",
  "warm_start.source=none",
  "collect.group_size=4",
  "collect.min_valid=2",
  "learner.groups_per_step=2",
  "engine.slots=8",
  "collect.concurrency=8",
  "engine.context_length=384",
  "learner.row_length=384",
)
BROWSER = (
  *QUICKSTART,
  "gym=miniwob",
  "tasks=[click-test-2,click-dialog,focus-text]",
)
LARGER = (
  *QUICKSTART,
  "policy.config={width: 512, layers: 8, heads: 8, mlp: 1536}",
  "warm_start.source=none",
  "learner.groups_per_step=4",
)
SIZES = {
  "small": SMALL,
  "quickstart": QUICKSTART,
  "larger": LARGER,
  "browser": BROWSER,
}
SERVER = """
import logging, os
logging.disable()  # It is all trouble, and meant.
from training_monitor import serve
from tunix.rl.multi_turn.core import monitor_settings as settings
def run(given):
  os.nice(settings.SERVER_NICENESS)
  if given[3] == "True":
    os.sched_setaffinity(0, {1})
  serve.main(["serve", "--database", given[0], "--files", given[1], "--port",
              given[2]])
"""
COUNTER = """
import os, sys, time
from tunix.rl.multi_turn.core import monitor_settings as settings
os.nice(settings.SERVER_NICENESS)
while True:
  end = time.thread_time() + 0.01
  while time.thread_time() < end:
    sum(range(1000))
  time.sleep(0.01 * (1 / float(sys.argv[1]) - 1))
"""
_STEP_S = 300.0
_DRAIN_S = 120.0


# --- processes ----------------------------------------------------------------


def _cpu(pid: int) -> float:
  stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  fields = stat.rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


# --- one run ------------------------------------------------------------------


class Training:
  """One training, stopped but while it makes a step. Close it.

  Attributes:
    reports: One report a step. `wall` is the step's wall time; `cpu`, `own`,
      `uploader` and `server` are CPU seconds of the trainer's process, of the
      monitor's threads in it, of its uploaders and of its server; `episodes`,
      `loss` and `reward` are the step's.
    wrong: Difference between the database and the events; "" if none.
  """

  apart = False
  """Whether trainers have the first core and their monitors the second."""
  busy = 0.2
  """Share of a core that the counting process takes."""

  def __init__(self, arm: str, steps: int, size: str, silent: int = -1):
    """`arm` of ARMS, `size` of SIZES, `silent` as the trainer's."""
    import monitor_network  # pylint: disable=g-import-not-at-top
    import nursery  # pylint: disable=g-import-not-at-top

    self.arm, self._steps, self._silent = arm, steps, silent
    self.reports: list[dict[str, Any]] = []
    self.wrong = ""
    self._folder = tempfile.TemporaryDirectory()
    folder, port = pathlib.Path(self._folder.name), free_port()
    self._serve = (folder / "m.db", folder / "files", port, self.apart)
    self._nursery = nursery.Nursery(SERVER)
    self._serving = False
    self._front = monitor_network.SlowFront(port) if arm == "slow" else None
    self._counter: subprocess.Popen[bytes] | None = None
    if arm == "busy":
      self._counter = subprocess.Popen(
        [sys.executable, "-c", COUNTER, str(self.busy)]
      )
      self._counter.send_signal(signal.SIGSTOP)
    monitor_port = self._front.port if self._front else port
    self._monitored = arm not in SILENT
    url = f"http://127.0.0.1:{monitor_port}" if self._monitored else ""
    if arm in ("on", "slow", "dying"):
      self._start_server()
    with open(folder / "stderr", "wb") as stderr:
      self._trainer = subprocess.Popen(
          [sys.executable, str(TRAINER), "--url", url, "--silent", str(silent),
           "--block", str(BLOCK), str(folder), f"steps={steps}", *SIZES[size]],
          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
          text=True,
      )  # fmt: skip
    if self.apart:
      os.sched_setaffinity(self._trainer.pid, {0})
    self._stopped = False
    self._counting = True

  def _start_server(self) -> None:
    self._nursery.start(*self._serve)
    self._serving = True

  def step(self) -> None:
    """Makes the next step.

    Raises:
      RuntimeError: it failed.
    """
    before = self._others_cpu()
    if self._stopped:
      self._go(signal.SIGCONT)
      self._write("")
    report = self._read("step")
    self._go(signal.SIGSTOP)
    uploader, server = self._others_cpu() - before
    self.reports.append(report | {"uploader": uploader, "server": server})
    if report["step"] % BLOCK == 0 and self._silent >= 0:
      self._counting = report["step"] // BLOCK % 2 != self._silent
    if report["step"] == self._steps // 2 and self.arm == "dying":
      self._nursery.end(signal.SIGKILL)
      self._serving = False

  def finish(self) -> None:
    """Lets it end, delivers what waits, and compares.

    Raises:
      RuntimeError: it failed.
    """
    self._go(signal.SIGCONT)
    self._write("")
    self._read("status")
    if self._monitored and not self._serving:
      self._start_server()
    if self._front:
      self._front.delay_s = 0.0
    compared = self._monitored and self._silent < 0
    self._write(str(self._serve[0]) if compared else "")
    if compared:
      self.wrong = self._read("wrong")["wrong"]
    if status := self._trainer.wait(_DRAIN_S):
      raise self._failed(f"status {status}")

  def _go(self, number: int) -> None:
    self._stopped = number == signal.SIGSTOP
    uploaders = self._uploaders()
    for pid in (self._trainer.pid, *uploaders):
      os.kill(pid, number)
    if self.apart:
      for pid in uploaders:  # Each began where its trainer is.
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
          os.sched_setaffinity(int(task.name), {1})
    if self._serving:
      os.kill(self._nursery.pid, number)
    if self._counter and (self._counting or self._stopped):
      self._counter.send_signal(number)
    if self._front:
      running = self._front.running
      (running.clear if self._stopped else running.set)()

  def _uploaders(self) -> list[int]:
    """Returns the trainer's uploaders; a browser is a child of it, too."""
    tasks = pathlib.Path(f"/proc/{self._trainer.pid}/task")
    children = [(task / "children").read_text() for task in tasks.iterdir()]
    uploaders = []
    for pid in " ".join(children).split():
      with contextlib.suppress(OSError):  # One that has just ended.
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"\0uploader\0" in command:
          uploaders.append(int(pid))
    return uploaders

  def _others_cpu(self) -> np.ndarray:
    """CPU seconds of (its uploaders, its server) so far."""
    return np.array(
      [
        sum(map(_cpu, self._uploaders())),
        _cpu(self._nursery.pid) if self._serving else 0.0,
      ]
    )

  def _write(self, line: str) -> None:
    self._trainer.stdin.write(f"{line}\n")
    self._trainer.stdin.flush()

  def _read(self, key: str) -> dict[str, Any]:
    late = threading.Timer(_STEP_S, self._trainer.kill)
    late.start()
    try:
      for line in self._trainer.stdout:
        if line.startswith("bench "):
          report = json.loads(line[6:])
          if key in report:
            return report
    finally:
      late.cancel()
    raise self._failed(f"it ended, or took over {_STEP_S:g} s, before {key}")

  def _failed(self, what: str) -> RuntimeError:
    stderr = (pathlib.Path(self._folder.name) / "stderr").read_text()
    return RuntimeError(f"{self.arm}: {what}: {stderr[-2000:]}")

  def close(self) -> None:
    self._trainer.kill()
    self._trainer.wait(30)
    self._trainer.stdin.close()
    self._trainer.stdout.close()
    self._nursery.__exit__()
    if self._counter:
      self._counter.kill()
      self._counter.wait(30)
    if self._front:
      self._front.close()
    self._folder.cleanup()


def side_by_side(
  runs: dict[str, tuple[str, int]], steps: int, size: str, turn: int = 0
) -> dict[str, Training]:
  """Runs trainings, a step of each at a time.

  Args:
    runs: Name -> (arm, silent) of each training; see `Training`.
    steps: Steps of each training.
    size: Key of SIZES.
    turn: Index of the training that begins.

  Returns:
    Name -> training, each ended.
  """
  names = list(runs)
  trainings: dict[str, Training] = {}
  with contextlib.ExitStack() as stack:
    with rich_progress.Progress(
      "[progress.description]{task.description}",
      rich_progress.MofNCompleteColumn(),
      rich_progress.TimeRemainingColumn(),
      console=rich_console.Console(stderr=True),
    ) as bar:
      for step in bar.track(range(steps), description="steps"):
        for place in range(len(names)):
          name = names[(place + step + turn) % len(names)]
          if name not in trainings:
            arm, silent = runs[name]
            trainings[name] = Training(arm, steps, size, silent)
            stack.callback(trainings[name].close)
          trainings[name].step()
      for training in bar.track(trainings.values(), description="deliveries"):
        training.finish()
  return trainings


# --- figures ------------------------------------------------------------------


def interval(ratios_RS: np.ndarray) -> tuple[float, float, float]:
  """(median, low, high): 95 %, over rounds and the steps within them."""
  rng = np.random.default_rng(0)
  rounds, steps = ratios_RS.shape
  medians = [
    np.median(
      ratios_RS[
        rng.integers(rounds, size=(rounds, 1)),
        rng.integers(steps, size=(rounds, steps)),
      ]
    )
    for _ in range(4000)
  ]
  low, high = np.percentile(medians, (2.5, 97.5))
  return float(np.median(ratios_RS)), float(low), float(high)


def show(results: dict[str, list[Training]]) -> bool:
  """Prints the table; whether all is as it should be."""
  late, equal = [], True
  print(f"\nrounds: {len(results['off'])}")
  of = lambda arm, key: np.array(
    [[report[key] for report in t.reports[WARM:]] for t in results[arm]]
  )
  print(
    f"{'arm':6} {'step ms':>7}     {'wall / off':20}     {'CPU / off':20}"
    "  CPU of an episode: threads, uploader, server"
  )
  for arm, trainings in results.items():
    line = f"{arm:6} {1e3 * np.median(of(arm, 'wall')):7.1f}"
    for key in ("wall", "cpu"):
      if arm == "off":
        continue
      middle, low, high = interval(of(arm, key) / of("off", key))
      line += f"     {middle:.3f} [{low:.3f}, {high:.3f}]"
      if key == "wall" and arm not in SILENT:
        late += [arm] if low > 1.01 else []
    if arm not in SILENT:
      episodes = of(arm, "episodes").sum()
      for key in ("own", "uploader", "server"):
        line += f"  {1e3 * of(arm, key).sum() / episodes:.2f} ms"
    print(line)
    for number, one in enumerate(trainings, 1):
      if one.wrong:
        equal = False
        print(f"{arm}, round {number}: {one.wrong}")
      first = results["off"][0].reports
      if any(
        report[k] != reference[k]
        for report, reference in zip(one.reports, first, strict=True)
        for k in ("loss", "reward")
      ):
        equal = False
        print(f"{arm}, round {number}: other losses or rewards than the first")
  databases = sum(len(runs) for a, runs in results.items() if a not in SILENT)
  if equal:
    print(
      f"{databases} databases equal their event logs; all runs learned the same"
    )
  if late:
    print(f"later than 1.01 by the whole interval: {', '.join(late)}")
  return equal and not late


def crossover(arm: str, steps: int, size: str) -> int:
  """Measures an arm by two runs, each with a monitor in every other block.

  Returns:
    The exit status.
  """
  runs = {"odd": (arm, 0), "even": (arm, 1)}
  odd, even = side_by_side(runs, steps, size).values()
  blocks = range(1, steps // BLOCK)  # The first one is warming up.
  blocks = blocks[: len(blocks) // 2 * 2]
  late = False
  for key in ("wall", "cpu"):
    ratio = [
      np.log(a[key] / b[key])
      for a, b in zip(odd.reports, even.reports, strict=True)
    ]
    # [pair of blocks, which of them, step]; the odd one comes first.
    ratio_PBS = np.reshape(
      ratio[BLOCK : BLOCK * (1 + len(blocks))], (-1, 2, BLOCK)
    )
    cost = lambda r: np.exp((np.median(r[:, 0]) - np.median(r[:, 1])) / 2)
    rng = np.random.default_rng(0)
    pairs = len(ratio_PBS)
    low, high = np.percentile(
      [cost(ratio_PBS[rng.integers(pairs, size=pairs)]) for _ in range(4000)],
      (2.5, 97.5),
    )
    late |= key == "wall" and low > 1.01
    print(
      f"{arm} / off, {key}: {cost(ratio_PBS):.4f} [{low:.4f}, {high:.4f}],"
      f" {pairs} pairs of blocks of {BLOCK} steps"
    )
  wall = np.median([report["wall"] for report in odd.reports[WARM:]])
  print(f"a step: {1e3 * wall:.0f} ms")
  same = all(
    a[k] == b[k]
    for a, b in zip(odd.reports, even.reports, strict=True)
    for k in ("loss", "reward")
  )
  if not same:
    print("the two runs have other losses or rewards")
  return 0 if same and not late else 1


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=1)
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--size", choices=tuple(SIZES), default="quickstart")
  parser.add_argument("--arms", default=",".join(ARMS), help="(%(default)s)")
  parser.add_argument(
    "--crossover",
    choices=("on", "slow", "dead", "busy"),
    help="this arm alone, in every other block of steps",
  )
  parser.add_argument(
    "--apart",
    action="store_true",
    help="trainers and monitors have a core each",
  )
  parser.add_argument(
    "--busy",
    type=float,
    default=0.2,
    help="share of a core that is counted away (%(default)s)",
  )
  args = parser.parse_args()
  if not 0 < args.busy <= 1:
    parser.error(f"--busy={args.busy:g}: give a share above 0, at most 1")
  if args.rounds < 1 or args.steps < WARM + 2:
    parser.error(f"--rounds: 1 or more; --steps: {WARM + 2} or more")
  arms = args.arms.split(",")
  if "off" not in arms or set(arms) - set(ARMS):
    parser.error(f"--arms={args.arms}: give off and some of {', '.join(ARMS)}")
  results: dict[str, list[Training]] = {arm: [] for arm in arms}
  Training.apart, Training.busy = args.apart, args.busy
  if args.crossover:
    return crossover(args.crossover, args.steps, args.size)
  for turn in range(args.rounds):
    runs = {arm: (arm, -1) for arm in arms}
    for arm, one in side_by_side(runs, args.steps, args.size, turn).items():
      results[arm].append(one)
    # Of each round: what is ended before the last one has said something.
    well = show(results)
    sys.stdout.flush()
  return 0 if well else 1


if __name__ == "__main__":
  sys.exit(main())
