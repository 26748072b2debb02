"""Measures what a fleet costs the learner's process, in CPU seconds.

Real collectors (`commands.collect`, the desktop gym) play groups for a real
`Fleet`, whose engine answers at once with a click: what is left is the server,
its codecs and the lending. Episodes of one turn and of many give the cost of a
turn and that of an episode; groups, beats and the queue's store are measured by
themselves. CPU seconds of the process, so that other work on the machine does
not count.

    python benchmarks/fleet_costs.py                    # a minute or two
    python benchmarks/fleet_costs.py --size 320 240 --json costs.json

`simulate_fleet.py` takes the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.fleet import service
from tunix.rl.multi_turn.run.rollout_hosts import leases
from tunix.rl.multi_turn.run.rollout_hosts import messages
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib
from tunix.rl.queue import group_store

ROOT = pathlib.Path(__file__).resolve().parents[1]
_CLICK = (
  '<tool_call>\n{"name": "computer_use", "arguments": {"action":'
  ' "left_click", "coordinate": [1, 1]}}\n</tool_call>'
)
_CALLS = 300


class Instant:
  """An engine that samples the same tokens at once."""

  healthy = True
  context_length = 1 << 20

  def __init__(self, tokens: list[int], vocabulary: int):
    self._tokens = np.array(tokens, np.int32)
    self.vocabulary = vocabulary
    self.turns = 0

  def open_session(self, session: str) -> None:
    del session

  async def generate(
    self, prompt: Any, sampling: Any, *, session: str, **options: Any
  ) -> policy_client.Completion:
    del prompt, sampling, session, options
    self.turns += 1
    return policy_client.Completion(
      tokens=self._tokens,
      logprobs=np.full(len(self._tokens), -0.5, np.float32),
      versions=np.zeros(len(self._tokens), np.int32),
      finish_reason=policy_client.FinishReason.STOP,
    )

  async def release(self, session: str) -> None:
    del session

  def stats(self) -> dict[str, float]:
    return {}


def _config(folder: str, size: tuple[int, int], turns: int) -> Any:
  return config_lib.load_config([
      f"run.dir={folder}", "name=r", "fleet=join", "fleet.episodes=16",
      "tasks=[click-color]", "collect.group_size=4", "collect.min_valid=2",
      f"gym.width={size[0]}", f"gym.height={size[1]}", f"max_turns={turns}",
      "warm_start.source=none", "agent.max_images=5",
      "engine.context_length=16384", "learner.row_length=16384",
  ])  # fmt: skip


def _measure(
  size: tuple[int, int], turns: int, groups: int, collectors: int
) -> dict[str, Any]:
  """Measures a learner whose episodes have `turns` turns, in CPU seconds."""
  with tempfile.TemporaryDirectory() as folder:
    config = _config(folder, size, turns)
    images = images_lib.ImageStore(pathlib.Path(folder) / "images")
    policy = models.make_policy(config, None, "")
    renderer = policy.renderer
    tokens = [*renderer.encode(_CLICK), renderer.end_of_turn_id]
    engine = Instant(tokens, policy.model.config.vocab_size)
    directory = config.run_dir
    directory.mkdir()
    fleet = service.Fleet(config, policy, engine, images, directory)
    fleet.start()
    started = [
      subprocess.Popen(
        [
          sys.executable,
          "-m",
          "tunix_multi_turn",
          "commands.collect",
          str(directory),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
      )
      for _ in range(collectors)
    ]
    source = run_tasks.make_tasks(config)
    factory = episodes.EpisodeFactory(config, images)
    collector = episodes.make_collector(
      config, factory, None, None, observers=None, connection=fleet
    )

    async def collect(first: int, count: int) -> list[Any]:
      tasks = [
        dataclasses.replace(
          source.train_task("click-color", first + i, 0), max_turns=turns
        )
        for i in range(count)
      ]
      return await asyncio.gather(
        *(
          collector.collect(task, index=first + i)
          for i, task in enumerate(tasks)
        )
      )

    loop = asyncio.new_event_loop()
    loop.run_until_complete(collect(0, 2 * collectors))  # All are warm.
    before, wall, turned = time.process_time(), time.monotonic(), engine.turns
    results = loop.run_until_complete(collect(1000, groups))
    out = {
      "cpu_s": time.process_time() - before,
      "wall_s": time.monotonic() - wall,
      "turns": engine.turns - turned,
      "episodes": sum(len(group) for group in results),
      "groups": groups,
      "errors": sorted({m.error or "" for g in results for m in g}),
    }
    out |= _of_a_group(results[0], images, pathlib.Path(folder))
    out["beat_s"] = loop.run_until_complete(_beats(fleet.address))
    fleet.close(loop.run_until_complete)
    loop.close()
    for process in started:
      process.wait(60)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    out["collectors_cpu_s"] = used.ru_utime + used.ru_stime
    return out


def _of_a_group(
  group: Any, images: images_lib.ImageStore, folder: pathlib.Path
) -> dict[str, Any]:
  """CPU seconds of a group's codec and store, without HTTP."""
  sent = json.dumps(messages.write_group(group, images))
  before = time.process_time()
  for _ in range(5):
    messages.read_group(json.loads(sent), images_lib.ImageStore())
  read_s = (time.process_time() - before) / 5
  store = group_store.SqliteGroupStore(folder / "store.db", images=images)
  before, wall = time.process_time(), time.monotonic()
  for number in range(20):
    store.append(number, group)
  out = {
    "group_bytes": len(sent),
    "group_read_s": read_s,
    "store_cpu_s": (time.process_time() - before) / 20,
    "store_wall_s": (time.monotonic() - wall) / 20,
  }
  store.close()
  return out


async def _beats(address: dict[str, str]) -> float:
  """CPU seconds of the server for a beat; the client's are taken off."""
  client = http.Http()

  async def send(path: str, count: int) -> float:
    before = time.process_time()
    for number in range(count):
      await client.call(
        "POST",
        address["url"] + path,
        30.0,
        headers={"Authorization": f"Bearer {address['token']}"},
        body={"host": f"h{number % 500}", "leases": [1], "stats": {}},
      )
    return (time.process_time() - before) / count

  # Both ends are in this process: a half is the server's, or less.
  total = await send("/beat", _CALLS)
  await client.aclose()
  return total / 2


def _weights_cpu_s(gigabytes: float = 1.0) -> float:
  """Returns CPU seconds in which the learner's process sends 1 GB of weights.

  To a host on the loopback interface, which takes it in eight ranges.
  """
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "1.safetensors"
    size = int(gigabytes * 1e9)
    with file.open("wb") as out:
      out.truncate(size)
    book = leases.LeaseBook(silence_s=30)
    server = server_lib.RolloutServer(
      book, images_lib.ImageStore(), {}, host="127.0.0.1", port=0
    )
    server.start()
    server.publish(1, file)
    step = -(-size // 8)
    token = f"Authorization: Bearer {server.token}"
    calls = [
      ["curl", "-sf", "-o", os.devnull, "-H", token, "-r",
       f"{at}-{at + step - 1}", f"{server.url}/weights/{server.serial}"]
      for at in range(0, size, step)
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF)
    fetching = [subprocess.Popen(call) for call in calls]
    if any(process.wait(600) for process in fetching):
      raise RuntimeError(f"a fetch failed: {calls[0]}")
    after = resource.getrusage(resource.RUSAGE_SELF)
    server.close()
  used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return used / gigabytes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--size", type=int, nargs=2, default=(640, 480))
  parser.add_argument("--turns", type=int, nargs=2, default=(1, 9))
  parser.add_argument("--groups", type=int, default=16)
  parser.add_argument("--collectors", type=int, default=2)
  parser.add_argument("--json", default="")
  args = parser.parse_args()
  few, many = (
    _measure(tuple(args.size), turns, args.groups, args.collectors)
    for turns in args.turns
  )
  for measurement in (few, many):
    print(json.dumps(measurement), file=sys.stderr)
  episode = lambda f: f["cpu_s"] / f["episodes"]
  per_turn = (episode(many) - episode(few)) / (
    many["turns"] / many["episodes"] - few["turns"] / few["episodes"]
  )
  size = many["episodes"] / many["groups"]
  of_turn = many["group_read_s"] - few["group_read_s"]
  of_turn /= size * (args.turns[1] - args.turns[0])
  costs = {
    "size": list(args.size),
    # What an episode's messages and its group cost for each turn.
    "turn_cpu_s": per_turn,
    "turn_group_cpu_s": of_turn,
    "episode_cpu_s": episode(few) - per_turn * few["turns"] / few["episodes"],
    "beat_cpu_s": few["beat_s"],
    "store_cpu_s": many["store_cpu_s"],
    "store_wall_s": many["store_wall_s"],
    "weights_gb_cpu_s": _weights_cpu_s(),
    "turn_bytes": (many["group_bytes"] - few["group_bytes"])
    / (size * (args.turns[1] - args.turns[0])),
  }
  text = json.dumps(costs, indent=2)
  print(text)
  if args.json:
    pathlib.Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
