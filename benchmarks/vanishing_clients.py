"""Clients of all services at once that vanish at every stage.

    python benchmarks/fuzz_services.py --vanish 30 [--services ...]

A client connects and is gone: after half a head, half a body, a whole request,
the first bytes of an answer or of a stream; with an execution, a run, a session
or a lease begun and never ended; with a WebSocket half open, or open. It
closes, resets, or stays silent until the server's deadline.

Each service's descriptors, threads, processes and memory are sampled, with its
children's. Findings: the median of the run's last fifth beyond that of its
second, `GROWTH` aside; descriptors or processes that do not return to their
values at the start once the deadlines have passed; what the fuzzer counts, too:
a process that ended, a traceback in a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import sys
import time
from typing import Any, Awaitable, Callable

sys.path.insert(
  0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "helpers")
)
import fuzz_services  # noqa: E402
import hostile_requests  # noqa: E402

SHORT = ["--head-timeout", "4", "--body-timeout", "4", "--stall-timeout", "4",
         "--idle-timeout", "8"]  # fmt: skip
OPTIONS = {
    "gym": ["--capacity", "64", "--lease", "8"],
    "runs": ["--max-runs", "16", "--max-kept", "32", "--keep-s", "8",
             "--image-memory", "32"],
    "buffer": ["--max-wait", "4"],
    "policy": ["--max-sessions", "64", "--session-timeout", "8",
               "--image-memory", "32"],
    "proxy": [],
    "monitor": [],
}  # fmt: skip
SETTLED_S = 40.0
"""Past every deadline above, and a run's own of 20 s."""
CLIENTS = 8
FIELDS = ("descriptors", "threads", "processes", "MiB")
GROWTH = {"descriptors": 16, "threads": 8, "processes": 2, "MiB": 32}

Stage = Callable[["Client"], Awaitable[None]]


class Client:
  """One client after another of a service, each of which vanishes."""

  def __init__(self, service: Any, ports: dict[str, int], rng: random.Random):
    self.service, self.ports, self.rng = service, ports, rng
    self.reader: asyncio.StreamReader
    self.writer: asyncio.StreamWriter

  async def once(self, stage: Stage) -> None:
    try:
      self.reader, self.writer = await asyncio.wait_for(
        asyncio.open_connection("127.0.0.1", self.service.port), 10
      )
    except (OSError, TimeoutError):
      await asyncio.sleep(0.2)
      return
    try:
      with contextlib.suppress(OSError, TimeoutError, EOFError):
        await asyncio.wait_for(stage(self), 10)
    finally:
      how = self.rng.random()
      if how < 0.05:  # Silent, until the server gives it up.
        await asyncio.sleep(self.rng.uniform(1, 12))
      if how < 0.5:
        self.writer.transport.abort()
      else:
        self.writer.close()

  def request(self, method: str, path: str, body: Any = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = [
      f"{method} {path} HTTP/1.1",
      "Host: localhost",
      f"Content-Length: {len(content)}",
      "Content-Type: application/json",
    ]
    return "\r\n".join([*head, "", ""]).encode() + content

  async def send(self, data: bytes, pause: float = 0.05) -> None:
    self.writer.write(data)
    await self.writer.drain()
    await asyncio.sleep(self.rng.uniform(0, pause))

  def main_request(self) -> bytes:
    """A request of this service that costs something."""
    method, path, body = MAIN[self.service.name](self)
    return self.request(method, path, body)


def _chat(client: Client) -> tuple[str, str, Any]:
  body = hostile_requests.valid_body(
    client.rng, "policy", "/v1/chat/completions", {}, {}
  )
  length = client.rng.choice((2, 64))
  stream = client.rng.random() < 0.7
  return (
    "POST",
    "/v1/chat/completions",
    {**body, "max_tokens": length, "stream": stream},
  )


MAIN: dict[str, Callable[[Client], tuple[str, str, Any]]] = {
  "gym": lambda c: ("POST", "/api/v1/desktop/tasks/001", {}),
  "policy": _chat,
  "proxy": _chat,
  "monitor": lambda c: (
    "POST",
    "/api/v1/ingest/batch",
    hostile_requests.monitor_batch(),
  ),
  "runs": lambda c: (
    "POST",
    "/runs",
    hostile_requests.run_body(c.ports.get("policy", 9)),
  ),
  "buffer": lambda c: ("POST", "/buffer/write", hostile_requests.item(c.rng)),
}
MORE: dict[str, list[tuple[str, str, Any]]] = {
  "gym": [
    ("POST", "/openenv/desktop/reset", {}),
    ("GET", "/api/v1/desktop/tasks?full=1", None),
  ],
  "policy": [("POST", "/rl/start_session", {"task_id": "t"})],
  "proxy": [("POST", "/rl/start_session", {"task_id": "t"})],
  "monitor": [("GET", "/api/v1/events", None), ("GET", "/", None)],
  "runs": [],
  "buffer": [
    ("POST", "/buffer/read", {"batch_size": 9999, "timeout": 3}),
    ("POST", "/buffer/read", {"batch_size": 1, "lease_s": 2, "timeout": 1}),
    ("POST", "/start_rollout", {"task_type": "none"}),
  ],
}


async def nothing(client: Client) -> None:
  await asyncio.sleep(client.rng.uniform(0, 0.5))


async def half_head(client: Client) -> None:
  data = client.main_request().partition(b"\r\n\r\n")[0]
  await client.send(data[: client.rng.randrange(1, len(data))], 0.5)


async def half_body(client: Client) -> None:
  head, _, body = client.main_request().partition(b"\r\n\r\n")
  cut = client.rng.randrange(0, max(1, len(body)))
  await client.send(head + b"\r\n\r\n" + body[:cut], 0.5)


async def half_chunk(client: Client) -> None:
  head, _, body = client.main_request().partition(b"\r\n\r\n")
  lines = [l for l in head.split(b"\r\n") if b"Content-Length" not in l]
  head = b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b""])
  await client.send(head + b"%x\r\n" % len(body) + body[:9], 0.5)


async def no_answer(client: Client) -> None:
  await client.send(client.main_request(), 0.3)


async def first_bytes(client: Client) -> None:
  await client.send(client.main_request())
  await client.reader.read(client.rng.choice((1, 100, 4000)))


async def answered(client: Client) -> None:
  """Vanishes in the next head, with what the request began still open."""
  await client.send(client.main_request())
  await client.reader.readuntil(b"\r\n\r\n")
  await client.send(b"GET /health HT", 0.3)


async def others(client: Client) -> None:
  requests = MORE[client.service.name] or [("GET", "/health", None)]
  await client.send(client.request(*client.rng.choice(requests)))
  if client.rng.random() < 0.6:
    await client.reader.read(2000)


async def a_step(client: Client) -> None:
  """Vanishes during a step of a gym, or while a run's events are read."""
  await client.send(client.main_request())
  head = await client.reader.readuntil(b"\r\n\r\n")
  length = int(head.lower().partition(b"content-length: ")[2].split()[0])
  created = json.loads(await client.reader.readexactly(length))
  if client.service.name == "gym" and "execution_id" in created:
    path = f"/api/v1/desktop/executions/{created['execution_id']}/step"
    body = {"action": {"kind": "wait", "seconds": 2.0}}
    await client.send(client.request("POST", path, body), 0.5)
  elif client.service.name == "runs" and "runId" in created:
    path = f"/runs/{created['runId']}/events"
    await client.send(client.request("GET", path), 0.5)


async def web_socket(client: Client) -> None:
  start = (
    hostile_requests.web_socket(
      random.Random(1), "/openenv/desktop/ws"
    ).partition(b"\r\n\r\n")[0]
    + b"\r\n\r\n"
  )
  if client.rng.random() < 0.3:
    await client.send(start[: client.rng.randrange(20, len(start))], 0.5)
    return
  await client.send(start)
  await client.reader.readuntil(b"\r\n\r\n")
  reset = hostile_requests.frame(
    client.rng, b'{"type": "reset", "data": {}}', 1
  )
  kind = client.rng.random()
  await client.send(reset[:9] if kind < 0.3 else reset, 0.3)
  if kind > 0.6:
    await client.reader.read(100)


STAGES: list[Stage] = [
    nothing, half_head, half_body, half_chunk, no_answer, first_bytes, answered,
    others,
]  # fmt: skip
OWN: dict[str, list[Stage]] = {"gym": [a_step, web_socket], "runs": [a_step]}


def sample(pid: int) -> tuple[int, int, int, int]:
  """Returns (descriptors, threads, processes, MiB) of a process tree."""
  files = threads = 0
  pids = fuzz_services.tree(pid)
  for one in pids:
    with contextlib.suppress(OSError):
      files += sum(1 for _ in pathlib.Path(f"/proc/{one}/fd").iterdir())
      threads += sum(1 for _ in pathlib.Path(f"/proc/{one}/task").iterdir())
  return files, threads, len(pids), fuzz_services.memory_mib(pid)


async def _vanish(
  fleet: dict[str, Any], until: float, report: Any
) -> dict[str, list[tuple[int, int, int, int]]]:
  ports = {name: service.port for name, service in fleet.items()}
  samples: dict[str, list[tuple[int, int, int, int]]] = {n: [] for n in fleet}

  async def again(name: str, number: int) -> None:
    rng = random.Random(f"{name} {number}")
    client = Client(fleet[name], ports, rng)
    while time.monotonic() < until:
      stage = rng.choice(STAGES + OWN.get(name, []))
      report.answer(name, stage.__name__, "vanished")
      await client.once(stage)
      await asyncio.sleep(rng.uniform(0, 0.2))

  clients = [
    asyncio.create_task(again(name, number))
    for name in fleet
    for number in range(CLIENTS)
  ]
  while time.monotonic() < until:
    for name, service in fleet.items():
      samples[name].append(sample(service.process.pid))
    await asyncio.sleep(1.0)
  await asyncio.gather(*clients)
  return samples


def run(
  names: list[str], minutes: float, folder: pathlib.Path, report: Any
) -> None:
  options = {name: OPTIONS[name] + SHORT for name in names}
  with fuzz_services.started(names, folder, "", options) as fleet:
    for service in fleet.values():
      service.refresh(fleet)
    time.sleep(SETTLED_S)
    start = {n: sample(s.process.pid) for n, s in fleet.items()}
    until = time.monotonic() + 60 * minutes
    samples = asyncio.run(_vanish(fleet, until, report))
    time.sleep(SETTLED_S)
    print(
      f"{'service':8} {'':12} {'start':>7} {'2nd 5th':>8} {'last 5th':>8}"
      f" {'peak':>6} {'after':>6}"
    )
    for name, service in fleet.items():
      if service.process.poll() is not None:
        report.finding("process ended", service=name)
        continue
      after = sample(service.process.pid)
      rows, fifth = samples[name], max(1, len(samples[name]) // 5)
      for place, field in enumerate(FIELDS):
        column = [row[place] for row in rows]
        second = statistics.median(column[fifth : 2 * fifth])
        last = statistics.median(column[-fifth:])
        print(
          f"{name:8} {field:12} {start[name][place]:7d} {second:8g}"
          f" {last:8g} {max(column):6d} {after[place]:6d}"
        )
        details = dict(
          service=name,
          field=field,
          start=start[name][place],
          second_fifth=second,
          last_fifth=last,
          after=after[place],
        )
        if last > 1.1 * second + GROWTH[field]:
          report.finding("growth", **details)
        if field in ("descriptors", "processes") and (
          after[place] > start[name][place] + GROWTH[field]
        ):
          report.finding("not returned", **details)
  fuzz_services.check_logs(folder, report)
