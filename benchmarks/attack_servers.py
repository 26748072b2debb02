"""Attacks the six HTTP services, as real processes.

    python benchmarks/attack_servers.py [gym policy monitor runs buffer proxy]
        [--seconds 6]

Each server runs with 256 open files at most, as an unlucky container has it,
and everything stays on the loopback interface. During every attack a client
that is no part of it asks for /health, each time on a new connection.

For each attack: the worst and the median time of an answer of /health, the
largest memory that the server has had so far, and what it answered. Exits with
1 if /health was ever late (1 s) or missing, or memory grew by 1.5 GiB.

Attacks:
  half heads       connections that send half a head and stay
  dripped heads    a byte of the head each 0.2 s
  idle             connections that send nothing, or one request, and stay
  flood            new connections as fast as they open, each half a head
  dripped bodies   a few bytes of a body each 0.2 s, with the head complete
  large bodies     ten times the limit, with Content-Length
  full bodies      as large as the limit allows
  chunked bodies   the same without a length
  fine chunks      one byte a chunk
  pipelined        a hundred requests a packet

Those with bodies are repeated without a token on a server that asks for one.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, AsyncIterator, Awaitable, Callable, Sequence

FILES = 256
_MOST_GROWTH_MIB = 1536  # Bodies of 1 GiB at the policy server, and parsing.
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
_BLOCK = b" " * (64 << 10)
_TOKEN = "secret-of-the-owner"

Attack = Callable[["Target"], Awaitable[None]]


class Target:
  """A server under attack.

  Attributes:
    path: Path that bodies are sent to.
    most: Bytes that a body may have there.
    answers: Status -> how often an attacker read it; "closed" without one.
  """

  def __init__(self, port: int, path: str, most: int, until: float):
    self.port, self.path, self.most, self.until = port, path, most, until
    self.answers: collections.Counter[str] = collections.Counter()

  @property
  def left(self) -> float:
    return self.until - time.monotonic()

  def head(self, *lines: str) -> bytes:
    return "\r\n".join(
      [f"POST {self.path} HTTP/1.1", "Host: localhost", *lines, "", ""]
    ).encode()

  @contextlib.asynccontextmanager
  async def line(self) -> AsyncIterator[Any]:
    """A connection, or None; what the server says to it is counted."""
    try:
      reader, writer = await asyncio.wait_for(
        asyncio.open_connection("127.0.0.1", self.port), 5
      )
    except (OSError, TimeoutError):
      reader = writer = None
    if writer is None:
      self.answers["not connected"] += 1
      await asyncio.sleep(0.05)
      yield None
      return
    hearing = asyncio.create_task(self._hear(reader))
    try:
      yield writer
      await asyncio.wait([hearing], timeout=max(0.0, min(1.0, self.left)))
    except OSError:  # The server hung up.
      await asyncio.wait([hearing], timeout=0.5)
    finally:
      hearing.cancel()
      await asyncio.gather(hearing, return_exceptions=True)
      writer.transport.abort()

  async def _hear(self, reader: asyncio.StreamReader) -> None:
    heard = 0
    tail = b""
    try:
      while data := await reader.read(1 << 16):
        for status in re.findall(rb"HTTP/1\.1 (\d{3})", tail + data):
          self.answers[status.decode()] += 1
          heard += 1
        tail = data[-11:] if b"HTTP/1.1" not in data[-11:] else b""
    except OSError:
      pass
    if not heard:
      self.answers["closed"] += 1


async def _many(target: Target, count: int, one: Attack) -> None:
  """`count` attackers at a time, each again and again."""

  async def again() -> None:
    while target.left > 0:
      with contextlib.suppress(OSError):
        await one(target)

  tasks = [asyncio.create_task(again()) for _ in range(count)]
  await asyncio.wait(tasks, timeout=target.left + 3)
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


async def _stay(target: Target, writer: Any) -> None:
  while target.left > 0 and not writer.transport.is_closing():
    await asyncio.sleep(0.2)


async def half_heads(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(HALF)
      await _stay(target, writer)


async def dripped_heads(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(HALF)
      while target.left > 0 and not writer.transport.is_closing():
        writer.write(b"y")
        await asyncio.sleep(0.2)


async def idle(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      if target.port % 2:
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
      await _stay(target, writer)


async def flood(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(HALF)
      await asyncio.sleep(0.02)
      target.answers["opened"] += 1
      raise OSError  # Leaves at once.


async def dripped_bodies(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(target.head(f"Content-Length: {target.most // 2}"))
      while target.left > 0 and not writer.transport.is_closing():
        writer.write(b"   ")
        await asyncio.sleep(0.2)


async def _pour(target: Target, writer: Any, total: int, chunked: bool) -> None:
  part = b"%x\r\n%s\r\n" % (len(_BLOCK), _BLOCK) if chunked else _BLOCK
  sent = 0
  while sent < total and target.left > 0:
    if writer.transport.is_closing():
      return
    writer.write(part)
    sent += len(_BLOCK)
    await asyncio.wait_for(writer.drain(), max(0.1, target.left))


async def large_bodies(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(target.head(f"Content-Length: {10 * target.most}"))
      with contextlib.suppress(TimeoutError):
        await _pour(target, writer, 10 * target.most, False)


async def full_bodies(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(target.head(f"Content-Length: {target.most}"))
      with contextlib.suppress(TimeoutError):
        await _pour(target, writer, target.most, False)


async def chunked_bodies(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(target.head("Transfer-Encoding: chunked"))
      with contextlib.suppress(TimeoutError):
        await _pour(target, writer, 10 * target.most, True)


async def fine_chunks(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      writer.write(target.head("Transfer-Encoding: chunked"))
      with contextlib.suppress(TimeoutError):
        while target.left > 0 and not writer.transport.is_closing():
          writer.write(b"1\r\n \r\n" * 8192)
          await asyncio.wait_for(writer.drain(), max(0.1, target.left))


async def pipelined(target: Target) -> None:
  async with target.line() as writer:
    if writer:
      request = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
      with contextlib.suppress(TimeoutError):
        while target.left > 0 and not writer.transport.is_closing():
          writer.write(request * 100)
          await asyncio.wait_for(writer.drain(), max(0.1, target.left))


ATTACKS: dict[str, tuple[int, Attack]] = {
  "half heads": (1000, half_heads),
  "dripped heads": (500, dripped_heads),
  "idle": (1000, idle),
  "flood": (200, flood),
  "dripped bodies": (400, dripped_bodies),
  "large bodies": (60, large_bodies),
  "full bodies": (60, full_bodies),
  "chunked bodies": (60, chunked_bodies),
  "fine chunks": (60, fine_chunks),
  "pipelined": (60, pipelined),
}


# --- the servers --------------------------------------------------------------


COMMANDS = {
  "gym": "tunix_multi_turn environments.gym_server desktop",
  "policy": "agent_services.serving tiny_vl --max-model-len 256 --slots 2"
  " --screen 128x96",
  "monitor": "tunix_multi_turn monitor serve --database {folder}/m.db",
  "runs": "tunix_multi_turn agents.run_service",
  "buffer": "tunix_multi_turn trajectory_collector.buffer_service"
  " --dir {folder}/buffer",
  "proxy": "tunix_multi_turn serving.image_proxy --upstream {upstream}",
}
"""Server -> module and arguments, in words."""
SERVERS = {
  # Where a body is sent, and how large it may be.
  "gym": ("/api/v1/desktop/tasks/001", 4 << 20, "TUNIX_GYM_TOKEN"),
  "policy": ("/v1/chat/completions", 64 << 20, "TUNIX_ROLLOUT_TOKEN"),
  "monitor": ("/api/ingest/batch", 16 << 20, "TUNIX_MONITOR_TOKEN"),
  "runs": ("/runs", 4 << 20, "TUNIX_RUN_SERVICE_TOKEN"),
  "buffer": ("/buffer/write", 64 << 20, "TUNIX_BUFFER_TOKEN"),
  "proxy": ("/v1/chat/completions", 256 << 20, "TUNIX_IMAGE_PROXY_TOKEN"),
}
UPSTREAM_VARIABLE = "TUNIX_IMAGE_PROXY_UPSTREAM_TOKEN"


@contextlib.contextmanager
def running(
  name: str,
  folder: pathlib.Path,
  token: str = "",
  upstream: str = "",
  options: Sequence[str] = (),
  files: int = FILES,
  memory: int = resource.RLIM_INFINITY,
):
  """Yields (port, process) of a service.

  Args:
    name: One of `SERVERS`.
    folder: Holds its data, and its log `NAME.log`.
    token: Token of clients; "" asks for none.
    upstream: Address of the policy server behind the image proxy, which asks
      for the same token.
    options: Further arguments of the command.
    files: Limit of open files.
    memory: Limit of the address space, in bytes.
  """

  def limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

  environment = dict(os.environ)
  if token:
    environment |= {SERVERS[name][2]: token, UPSTREAM_VARIABLE: token}
  words = [
    word.format(folder=folder, upstream=upstream)
    for word in COMMANDS[name].split()
  ]
  process = subprocess.Popen(
    [sys.executable, "-m", *words, "--port", "0", *options],
    stdout=subprocess.PIPE,
    stderr=(folder / f"{name}.log").open("a"),
    text=True,
    env=environment,
    cwd=pathlib.Path(__file__).parents[1],
    preexec_fn=limit,
  )
  try:
    assert process.stdout is not None
    for text in process.stdout:
      if match := re.search(r".*http://127\.0\.0\.1:(\d+)", text):
        break
    else:
      raise RuntimeError((folder / f"{name}.log").read_text())
    deadline = time.monotonic() + 60
    while asyncio.run(_ask(int(match[1])))[0] != "200":
      if time.monotonic() > deadline:
        raise RuntimeError(f"{name} does not answer")
      time.sleep(0.1)
    yield int(match[1]), process
  finally:
    process.terminate()
    try:
      process.wait(30)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def _peak_mib(process: subprocess.Popen[str]) -> int:
  status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
  return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10  # type: ignore[index]


async def _ask(port: int) -> tuple[str, float]:
  """(status of /health, seconds) on a connection of its own."""
  began = time.monotonic()
  try:
    async with asyncio.timeout(5):
      reader, writer = await asyncio.open_connection("127.0.0.1", port)
      writer.write(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
      )
      status_line = await reader.readline()
      writer.transport.abort()
      status = status_line.split()[1].decode() if status_line else "closed"
  except (OSError, TimeoutError) as error:
    status = type(error).__name__
  return status, time.monotonic() - began


def watch(port: int, seconds: float) -> list[tuple[str, float]]:
  """Asks for /health until the attack is over."""
  answers = []
  until = time.monotonic() + seconds
  while time.monotonic() < until:
    answers.append(asyncio.run(_ask(port)))
    time.sleep(0.05)
  return answers


def _attack_in_child(
  port: int, path: str, most: int, seconds: float, which: str
) -> subprocess.Popen[str]:
  return subprocess.Popen(
      [sys.executable, __file__, "--attack", which, "--port", str(port),
       "--path", path, "--most", str(most), "--seconds", str(seconds)],
      stdout=subprocess.PIPE, text=True,
  )  # fmt: skip


def _run_attack(args: argparse.Namespace) -> None:
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
  del soft
  until = time.monotonic() + args.seconds
  target = Target(args.port, args.path, args.most, until)
  count, attack = ATTACKS[args.attack]
  asyncio.run(_many(target, count, attack))
  print(", ".join(f"{v} {k}" for k, v in sorted(target.answers.items())))


def attack_server(name: str, seconds: float, token: str = "") -> bool:
  """Runs every attack on a server; returns whether it kept serving."""
  path, most, _ = SERVERS[name]
  good = True
  only = ("half heads", "dripped bodies", "large bodies", "full bodies",
          "chunked bodies") if token else ATTACKS  # fmt: skip
  with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
    folder = pathlib.Path(text)
    upstream = ""
    if name == "proxy":
      port, _ = stack.enter_context(running("policy", folder, token))
      upstream = f"http://127.0.0.1:{port}"
    with running(name, folder, token, upstream) as (port, process):
      label = f"{name}, {'no token given' if token else 'no token asked for'}"
      start = _peak_mib(process)
      print(f"\n{label}: {start} MiB at the start")
      print(
        f"{'attack':15} {'worst s':>8} {'p50 ms':>7} {'asked':>6}"
        f" {'peak MiB':>9}  attackers heard"
      )
      for which in only:
        child = _attack_in_child(port, path, most, seconds, which)
        answers = watch(port, seconds + 1.5)
        report = (child.communicate(timeout=60)[0] or "").strip()
        times = [t for _, t in answers]
        bad = [s for s, _ in answers if s != "200"]
        peak = _peak_mib(process)
        healthy = not bad and max(times) < 1.0 and process.poll() is None
        good = good and healthy and peak - start < _MOST_GROWTH_MIB
        print(
          f"{which:15} {max(times):8.3f}"
          f" {1e3 * statistics.median(times):7.1f} {len(times):6d} {peak:9d}"
          f"  {report}{'' if healthy else f'  FAILED {bad[:5]}'}",
          flush=True,
        )
  return good


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("servers", nargs="*", default=list(SERVERS))
  parser.add_argument("--seconds", type=float, default=6.0)
  for name in ("--attack", "--path"):
    parser.add_argument(name, help=argparse.SUPPRESS)
  for name in ("--port", "--most"):
    parser.add_argument(name, type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.attack:
    _run_attack(args)
    return 0
  good = True
  for name in args.servers:
    good &= attack_server(name, args.seconds)
    good &= attack_server(name, args.seconds, _TOKEN)
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
