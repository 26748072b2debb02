"""What the Training Monitor costs a training run, whatever state it is in.

The same seeded synchronous training on the embedded desktop is run as a user
runs it, each time in a process of its own. `--size quickstart` is what `make
train` runs (128 episodes a step); `--size small`, of a policy of some thousand
parameters and 8 episodes a step, shows what the monitor's own work amounts to
where there is next to no training:

  off     without a monitor
  again   without a monitor: what two equal runs differ by, here and now
  on      with a server
  slow    with one whose every reply takes a second
  dead    with none at the address
  dying   with one that is killed half-way (SIGKILL)

A round is all of them; the next round begins with another one. A step is
compared with the same step of the same round without a monitor: of both the
wall time and the CPU time of the trainer's process, all its threads, the
monitor's own among them. Figures are medians of these ratios with 95 %
intervals (bootstrap over rounds and their steps). The target is a ratio of wall
time of 1.01 at most; where `again` strays further than that, the machine is
too busy to tell, and the CPU time says more.

Then the server is there again, what waits is delivered, and the database is
compared with the events that the run emitted, row by row and token by token;
and every run with the first: the same losses and rewards. Exits with 1 unless
all of that is equal and no interval lies above 1.01.

    python benchmarks/bench_monitor_overhead.py [--rounds 3] [--steps 20]
        [--size small] [--arms off,on]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "helpers")
)

ARMS = ("off", "on", "slow", "dead", "dying", "again")
SILENT = ("off", "again")
WARM = 3
"""Steps that are not compared: they compile."""
QUICKSTART = (
    "report.progress=none", "eval.every=0", "eval.episodes_per_task=1",
    "seed=7", "monitor.close_timeout_s=2",
)  # pyformat: disable
SMALL = (
    *QUICKSTART,
    "policy.config={width: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16,"
    " vision_heads: 2, mlp: 64, vision_mlp: 64, stem: [8, 8, 16]}",
    "tasks=[click-color, enter-text]", "warm_start.source=none",
    "collect.group_size=4", "collect.min_valid=2",
    "learner.groups_per_step=2", "rollout.slots=8", "rollout.concurrency=8",
    "rollout.context_length=384", "learner.row_length=384",
)  # pyformat: disable
SIZES = {"small": SMALL, "quickstart": QUICKSTART}
_RUN_S = 600.0
_DRAIN_S = 120.0


# --- the trainer's process ----------------------------------------------------


def play(folder: pathlib.Path, url: str, steps: int, size: str) -> int:
  """Trains, says each step's times, delivers, compares; JSON lines."""
  import told_run  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn import events  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn import train  # pylint: disable=g-import-not-at-top

  class Witness(told_run.Log):

    def on_event(self, event):
      super().on_event(event)
      if isinstance(event, events.StepFinished):
        say(
            step=event.step, wall=time.perf_counter(), cpu=time.process_time(),
            own=_own_cpu(), episodes=len(self.of(events.EpisodeFinished)),
            loss=event.metrics.get("loss"),
            reward=event.metrics.get("reward_mean"),
        )  # pyformat: disable

  log = Witness()
  attach = train.Run.attach_observers

  def attach_both(self, resume_step):
    attach(self, resume_step)
    self.observers.add(log)

  train.Run.attach_observers = attach_both
  told = [f"monitor.url={url}"] if url else []
  status = train.main([
      f"run.dir={folder / 'runs'}", "name=a", f"steps={steps}",
      *SIZES[size], *told,
  ])  # pyformat: disable
  say(status=status)
  # The parent has brought the server back when it answers with the database.
  database = sys.stdin.readline().strip()
  if database:
    say(wrong=_compare(folder, url, database, log))
  return status


def say(**fields: Any) -> None:
  print(f"bench {json.dumps(fields)}", flush=True)


def _own_cpu() -> float:
  """CPU seconds of the monitor's threads in this process, so far."""
  total = 0.0
  for thread in threading.enumerate():
    if thread.name.startswith("monitor-"):
      stat = pathlib.Path(f"/proc/self/task/{thread.native_id}/stat")
      fields = stat.read_text().rpartition(")")[2].split()
      total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
  return total


def _compare(folder: pathlib.Path, url: str, database: str, log: Any) -> str:
  """What the database lacks of the events once all is delivered; "" if
  nothing."""
  import monitor_server  # pylint: disable=g-import-not-at-top
  import told_run  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.monitor.client import ingest_client  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.monitor.schema import database as database_lib  # pylint: disable=g-import-not-at-top

  spools = folder / "runs" / "monitor_spool"
  deadline = time.monotonic() + _DRAIN_S
  with ingest_client.IngestClient(url, spool_dir=spools) as client:
    while time.monotonic() < deadline:
      client.drain(5)
      if len(list(spools.glob("*.spool"))) == 1:  # Its own.
        break
      time.sleep(0.05)
    else:
      return f"not delivered within {_DRAIN_S:g} s"
  engine = database_lib.connect(database)
  try:
    told_run.compare(monitor_server.Stored(engine), log)
  except AssertionError as error:
    return f"the database differs: {error!r}"
  finally:
    engine.dispose()
  return ""


# --- servers ------------------------------------------------------------------


class SlowFront:
  """Passes requests on to a server and each reply back `delay_s` later."""

  def __init__(self, port: int):
    front = self
    self.delay_s = 1.0

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def _pass(self):
        size = int(self.headers.get("content-length", 0))
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        line.request(
            self.command, self.path, self.rfile.read(size),
            {k: v for k, v in self.headers.items() if k.lower() != "host"},
        )  # pyformat: disable
        reply = line.getresponse()
        body = reply.read()
        line.close()
        time.sleep(front.delay_s)
        self.send_response(reply.status)
        for name in ("content-type", "retry-after"):
          if reply.headers[name]:
            self.send_header(name, reply.headers[name])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # It may have ended.
          self.wfile.write(body)

      do_GET = do_POST = do_PUT = _pass

      def log_message(self, *args):
        del args

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.daemon_threads = True
    self.port = self._server.server_address[1]
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()


def free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


# --- one run ------------------------------------------------------------------


def run(arm: str, nursery: Any, steps: int, size: str) -> dict[str, Any]:
  """One training.

  Args:
    arm: of ARMS.
    nursery: starts the servers.
    steps: of it.
    size: of SIZES.

  Returns:
    {wall_S, cpu_S: seconds of each step but the first; own_s, episodes: CPU
    seconds of the monitor's threads and episodes in those compared; losses,
    rewards: of each step; wrong: what is}.

  Raises:
    RuntimeError: it failed.
  """
  with tempfile.TemporaryDirectory() as name:
    folder, port = pathlib.Path(name), free_port()
    serve = (folder / "m.db", folder / "files", port)
    front = SlowFront(port) if arm == "slow" else None
    told_port = front.port if front else port
    url = "" if arm in SILENT else f"http://127.0.0.1:{told_port}"
    if arm in ("on", "slow", "dying"):
      nursery.start(*serve)
    with open(folder / "stderr", "w+", encoding="utf-8") as stderr:
      trainer = subprocess.Popen(
          [sys.executable, __file__, "--play", name, "--url", url, "--steps",
           str(steps), "--size", size],
          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
          text=True,
      )  # pyformat: disable
      late = threading.Timer(_RUN_S, trainer.kill)
      late.start()
      found = []
      try:
        for line in trainer.stdout:
          if not line.startswith("bench "):
            continue
          found.append(json.loads(line[6:]))
          if found[-1].get("step") == steps // 2 and arm == "dying":
            nursery.end(signal.SIGKILL)
          if "status" in found[-1]:
            if arm in ("dead", "dying"):
              nursery.start(*serve)
            if front:
              front.delay_s = 0.0
            trainer.stdin.write(f"{folder / 'm.db'}\n" if url else "\n")
            trainer.stdin.flush()
        status = trainer.wait(30)
      finally:
        late.cancel()
        trainer.kill()
        trainer.wait(30)
        trainer.stdin.close()
        trainer.stdout.close()
      if status:
        stderr.seek(0)
        raise RuntimeError(f"{arm}: status {status}: {stderr.read()[-2000:]}")
    if url:
      nursery.end(signal.SIGTERM)
    if front:
      front.close()
  told = [f for f in found if "step" in f]
  wall_S, cpu_S = (np.diff([f[k] for f in told]) for k in ("wall", "cpu"))
  return {
      "wall_S": wall_S, "cpu_S": cpu_S,
      "own_s": told[-1]["own"] - told[WARM - 1]["own"],
      "episodes": told[-1]["episodes"] - told[WARM - 1]["episodes"],
      "losses": [f["loss"] for f in told],
      "rewards": [f["reward"] for f in told],
      "wrong": "".join(f.get("wrong", "") for f in found),
  }  # pyformat: disable


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


def show(results: dict[str, list[dict[str, Any]]]) -> bool:
  """Prints the table; whether all is as it should be."""
  late, equal = [], True
  print(f"\n{len(results['off'])} rounds")
  first = results["off"][0]
  skip = WARM - 1  # `wall_S` begins with the second step.
  of = lambda arm, key: np.array([r[key][skip:] for r in results[arm]])
  print(
      f"{'arm':6} {'step ms':>7}     {'wall / off':20}     {'CPU / off':20}"
      "   its threads"
  )
  for arm in results:
    line = f"{arm:6} {1e3 * np.median(of(arm, 'wall_S')):7.1f}"
    for key in ("wall_S", "cpu_S"):
      if arm == "off":
        continue
      middle, low, high = interval(of(arm, key) / of("off", key))
      line += f"     {middle:.3f} [{low:.3f}, {high:.3f}]"
      if key == "wall_S" and arm not in SILENT:
        late += [arm] if low > 1.01 else []
    if arm not in SILENT:
      share = np.median(
          [r["own_s"] / r["cpu_S"][skip:].sum() for r in results[arm]]
      )
      each = np.median([r["own_s"] / r["episodes"] for r in results[arm]])
      line += f"   {100 * share:.2f} % of it, {1e3 * each:.1f} ms an episode"
    print(line)
  for arm, runs in results.items():
    for number, one in enumerate(runs, 1):
      if one["wrong"]:
        equal = False
        print(f"{arm}, round {number}: {one['wrong']}")
      same = all(one[k] == first[k] for k in ("losses", "rewards"))
      if not same:
        equal = False
        print(f"{arm}, round {number}: other losses or rewards than the first")
  told = sum(len(runs) for a, runs in results.items() if a not in SILENT)
  if equal:
    print(f"{told} databases equal their event logs; all runs learned the same")
  if late:
    print(f"later than 1.01 by the whole interval: {', '.join(late)}")
  return equal and not late


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--size", choices=tuple(SIZES), default="quickstart")
  parser.add_argument("--arms", default=",".join(ARMS), help="(%(default)s)")
  parser.add_argument("--play", help=argparse.SUPPRESS)
  parser.add_argument("--url", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.rounds < 1 or args.steps < WARM + 2:
    parser.error(f"--rounds: 1 or more; --steps: {WARM + 2} or more")
  arms = args.arms.split(",")
  if "off" not in arms or set(arms) - set(ARMS):
    parser.error(f"--arms={args.arms}: give off and some of {', '.join(ARMS)}")
  if args.play:
    return play(pathlib.Path(args.play), args.url, args.steps, args.size)
  import monitor_kills  # pylint: disable=g-import-not-at-top

  results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
  with monitor_kills.Nursery(monitor_kills.SERVER) as nursery:
    began = time.monotonic()
    for turn in range(args.rounds):
      for place in range(len(arms)):
        arm = arms[(place + turn) % len(arms)]
        results[arm].append(run(arm, nursery, args.steps, args.size))
        print(
            f"round {turn + 1}, {arm}: {time.monotonic() - began:.0f} s",
            file=sys.stderr, flush=True,
        )  # pyformat: disable
      # Of each round: what is ended before the last one has said something.
      well = show(results)
      sys.stdout.flush()
  return 0 if well else 1


if __name__ == "__main__":
  sys.exit(main())
