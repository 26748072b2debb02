"""The trainer that `bench_monitor_overhead.py` measures, in its own process.

Makes a step of a training for each line that it reads, and says what it took in
a line of JSON after the word "bench". At the end it compares the database that
a last line names with the events of its run.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import threading
import time
from typing import Any, Sequence

import numpy as np
from training_monitor.client import ingest_client
from training_monitor.schema import database as database_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events

ROOT = pathlib.Path(__file__).resolve().parents[1]
for folder in ("packages/training_monitor/tests/helpers", "tests/helpers"):
  sys.path.insert(0, str(ROOT / folder))
import monitor_server  # noqa: E402
import told_run  # noqa: E402

_DRAIN_S = 120.0


def play(
  folder: pathlib.Path,
  url: str,
  overrides: Sequence[str],
  silent: int,
  block: int,
) -> int:
  """Trains a step for each line read, says its times, delivers, compares.

  Args:
    folder: Directory of the run and its spool.
    url: URL of the server; "" for no monitor.
    overrides: Overrides of the training's configuration.
    silent: Parity (0 or 1) of the blocks whose events the monitor does not get;
      -1: it gets all events.
    block: Steps of a block.

  Returns:
    The training's exit status.
  """

  class Witness(told_run.Log):
    since = (0.0, 0.0, 0.0, 0)
    episodes = 0
    telling = True

    def so_far(self):
      return (
        time.perf_counter(),
        time.process_time(),
        _own_cpu(),
        self.episodes,
      )

    def on_event(self, event):
      self.episodes += isinstance(event, events.EpisodeFinished)
      if self.telling:
        super().on_event(event)
        for one in monitor:
          one.on_event(event)
      if isinstance(event, events.StepFinished):
        wall, cpu, own, episodes = np.subtract(self.so_far(), self.since)
        say(
          step=event.step,
          wall=wall,
          cpu=cpu,
          own=own,
          episodes=episodes,
          loss=event.metrics.get("loss"),
          reward=event.metrics.get("reward_mean"),
        )
        if silent >= 0 and event.step % block == 0:
          for one in monitor:
            one.drain(2)
          self.telling = event.step // block % 2 != silent
        sys.stdin.readline()  # Others' turn.
        self.since = self.so_far()

  log, monitor = Witness(), []
  attach = train.Run.attach_observers

  def attach_both(self, resume_step):
    attach(self, resume_step)
    # The witness passes on the events that the monitor is to get.
    observers = self.observers._observers  # pylint: disable=protected-access
    monitor.extend(one for one in observers if type(one).__name__ == "EventLog")
    observers[:] = [one for one in observers if one not in monitor]
    self.observers.add(log)

  train.Run.attach_observers = attach_both
  monitor_options = [f"monitor.url={url}"] if url else []
  status = train.main(
    [f"run.dir={folder / 'runs'}", "name=a", *overrides, *monitor_options]
  )
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
  """Returns how the database differs from the events; "" if it does not.

  Waits until all events are delivered.
  """
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


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--url", required=True)
  parser.add_argument("--silent", type=int, required=True)
  parser.add_argument("--block", type=int, required=True)
  parser.add_argument("overrides", nargs="*")
  args = parser.parse_args()
  return play(args.folder, args.url, args.overrides, args.silent, args.block)


if __name__ == "__main__":
  sys.exit(main())
