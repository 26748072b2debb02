"""Measures the rollout buffer service: writes a second, and a full buffer.

A service in a process of its own takes items of 45 kB from many connections;
every answer means that the item is on the disk. First one item a request, then
eight, then until `--items` are buffered; with them, what a read of one group,
`/buffer/stats` and a start of the service cost. Target: 2,000 items a second on
two cores, clients included.

    python benchmarks/bench_buffer.py [--items 100000] [--connections 64]
        [--seconds 15] [--bytes 45000]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
GROUP = 8
_BYTES = 45_000


def body_of(uid: str, instance: str, text: str, reward: float) -> bytes:
  """An item; nothing is computed a token."""
  return (
    '{"uid":"%s","instance_id":"%s","messages":[{"role":"user","content":'
    '"%s"},{"role":"assistant","content":"4"}],"reward":%s,"extra_info":'
    '{"timestamp":"1"}}' % (uid, instance, text, reward)
  ).encode()


class Load:
  """Connections that write one request after another."""

  def __init__(self, port: int, batch: int, prefix: str, size: int = _BYTES):
    self.port, self.batch, self.prefix = port, batch, prefix
    self.number = self.done = self.refused = 0
    rng = random.Random(0)
    words = ["click", "the", "button", "at", "x=", "17", "screen"]
    text = " ".join(rng.choice(words) for _ in range(size // 3))
    self.text = text[: max(1, size - 200)]

  def next_body(self) -> bytes:
    lines = []
    for _ in range(self.batch):
      n = self.number
      self.number += 1
      lines.append(
        body_of(
          f"{self.prefix}{n}",
          f"{self.prefix}{n // GROUP}",
          self.text,
          float(n % 2),
        )
      )
    return b"\n".join(lines)

  async def connection(self, until: float, most: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
    while time.monotonic() < until and self.number < most:
      body = self.next_body()
      writer.write(
        b"POST /buffer/write HTTP/1.1\r\nHost: 127.0.0.1\r\nPrefer:"
        b" return=minimal\r\nContent-Length: %d\r\n\r\n" % len(body)
      )
      writer.write(body)
      head = await reader.readuntil(b"\r\n\r\n")
      length = int(head.lower().split(b"content-length:")[1].split(b"\r")[0])
      answer = await reader.readexactly(length)
      if b" 200 " in head[:15]:
        self.done += json.loads(answer)["new"]
      else:
        self.refused += 1
    writer.close()

  async def run(self, connections: int, seconds: float, most: int) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    await asyncio.gather(
      *(self.connection(began + seconds, most) for _ in range(connections))
    )
    return time.monotonic() - began


def cpu_of(pid: int) -> float:
  """Seconds of a process's CPU time."""
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
  user, system = fields.split()[11:13]
  return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
  pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def started(folder: str, port: int) -> tuple[subprocess.Popen, float]:
  """(the service, seconds until it answered)."""
  began = time.monotonic()
  process = subprocess.Popen(
      [
          sys.executable, "-m", "tunix_multi_turn",
          "trajectory_collector.buffer_service", "--dir", folder,
          "--port", str(port), "--group-size", str(GROUP),
      ],
      cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  while True:
    try:
      call(port, "GET", "/health")
      return process, time.monotonic() - began
    except OSError:
      if time.monotonic() - began > 120 or process.poll() is not None:
        raise
      time.sleep(0.05)


def call(port: int, method: str, path: str, body: bytes = b"{}") -> bytes:
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
  try:
    connection.request(method, path, body)
    return connection.getresponse().read()
  finally:
    connection.close()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--items", type=int, default=100_000)
  parser.add_argument("--connections", type=int, default=64)
  parser.add_argument("--seconds", type=float, default=15.0)
  parser.add_argument("--bytes", type=int, default=_BYTES, help="of an item")
  parser.add_argument("--dir", help="on the disk to be measured")
  args = parser.parse_args()
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  load = " ".join(f"{n:.1f}" for n in os.getloadavg())
  print(f"{os.cpu_count()} cores, load {load}; items of {args.bytes} B")
  with tempfile.TemporaryDirectory(dir=args.dir) as folder:
    process, _ = started(folder, port)
    try:
      buffered = 0
      for batch in (1, 8):
        one = Load(port, batch, f"b{batch}-", args.bytes)
        cpu = cpu_of(process.pid)
        took = asyncio.run(one.run(args.connections, args.seconds, args.items))
        cpu = cpu_of(process.pid) - cpu
        print(
          f"{batch} an answer: {one.done / took:.0f} items/s,"
          f" {one.done / cpu:.0f} a CPU second of the service;"
          f" {one.refused} refused"
        )
        buffered += one.done
      filler = Load(port, 8, "rest-", args.bytes)
      asyncio.run(
        filler.run(args.connections, 600.0, max(0, args.items - buffered))
      )
      print(f"buffered: {resident_mib(process.pid):.0f} MiB resident")
      began = time.monotonic()
      stats = json.loads(call(port, "GET", "/buffer/stats"))["data"]["data"][0]
      print(
        f"{stats['items']} items, {stats['bytes'] / 2**30:.1f} GiB;"
        f" /buffer/stats {1000 * (time.monotonic() - began):.0f} ms"
      )
      took = []
      for _ in range(10):
        began = time.monotonic()
        call(port, "POST", "/get_rollout_data", b'{"batch_size": 8}')
        took.append(time.monotonic() - began)
      took.sort()
      print(f"a read of one group: {1000 * took[5]:.0f} ms (median)")
      began = time.monotonic()
      count = json.loads(call(port, "POST", "/get_rollout_data"))
      count = len(count["data"]["data"])
      print(f"a read of {count} items: {time.monotonic() - began:.2f} s")
      process.terminate()
      process.wait(60)
      process, seconds = started(folder, port)
      print(f"start with them: {seconds:.1f} s")
    finally:
      process.terminate()
      process.wait(60)


if __name__ == "__main__":
  main()
