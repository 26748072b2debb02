"""Two network namespaces joined by a path that delays, loses or cuts packets.

A relay takes IP packets from one TUN device, holds each for a delay, drops
some, and writes the others to the second device; so TCP sees a real path.
Needs root, `ip` (iproute2) and /dev/net/tun.
"""

import contextlib
import dataclasses
import fcntl
import heapq
import itertools
import os
import pathlib
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENDS = ("10.77.0.1", "10.77.0.2")
"""Addresses of the two ends."""
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001


def available() -> bool:
  """Returns whether this process can make such a link."""
  return (
    os.geteuid() == 0
    and shutil.which("ip") is not None
    and os.access("/dev/net/tun", os.W_OK)
  )


@dataclasses.dataclass(frozen=True)
class NetworkPath:
  """Delay in seconds and share of lost packets, each way; TCP's control."""

  delay_s: float = 0.0
  loss: float = 0.0
  congestion: str = "cubic"  # Linux's default.


class Link:
  """Two network namespaces and the relay between them; a context manager.

  Attributes:
    bytes: Bytes that have passed from the first end, and from the second.
  """

  def __init__(self, path: NetworkPath):
    self.path = path
    self.bytes = [0, 0]
    self._cut_until = 0.0
    self._stop = threading.Event()
    self._spaces = [f"tunix-{end}-{os.getpid()}" for end in (0, 1)]

  def __enter__(self) -> "Link":
    with contextlib.ExitStack() as opened:
      self._files = []
      for index, space in enumerate(self._spaces):
        name = f"tun{index}-{os.getpid()}"[:15]
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        opened.callback(os.close, device)
        fcntl.ioctl(
          device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_NO_PI)
        )
        self._files.append(device)
        own, other = ENDS[index], ENDS[1 - index]
        _ip("netns", "add", space)
        opened.callback(_ip, "netns", "del", space)
        _ip("link", "set", name, "netns", space)
        inside = ("-n", space)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", own, "peer", other, "dev", name)
        _ip(*inside, "link", "set", name, "txqueuelen", "10000", "up")
        route = ("route", "replace", other, "dev", name)
        _ip(*inside, *route, "congctl", self.path.congestion)
      self._thread = threading.Thread(target=self._relay, daemon=True)
      self._thread.start()
      opened.callback(self._thread.join)
      opened.callback(self._stop.set)
      self._opened = opened.pop_all()
    return self

  def __exit__(self, *exc_info) -> None:
    self._opened.close()

  def start(self, end: int, *arguments, log: pathlib.Path) -> subprocess.Popen:
    """Starts Python with `arguments` at the first (0) or second (1) end."""
    with log.open("w") as output:
      return subprocess.Popen(
        ["ip", "netns", "exec", self._spaces[end], sys.executable, *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
      )

  def cut(self, seconds: float) -> None:
    """Drops every packet for this time."""
    self._cut_until = time.monotonic() + seconds

  def _relay(self) -> None:
    waiting: list = []  # (time due, order, device index, packet)
    order = itertools.count()
    draw = random.Random(0).random
    while not self._stop.is_set():
      now = time.monotonic()
      pause = waiting[0][0] - now if waiting else 0.05
      ready, _, _ = select.select(
        self._files, [], [], max(0.0, min(pause, 0.05))
      )
      now = time.monotonic()
      for device in ready:
        index = self._files.index(device)
        for _ in range(256):
          try:
            packet = os.read(device, 65536)
          except BlockingIOError:
            break
          if now < self._cut_until or draw() < self.path.loss:
            continue
          self.bytes[index] += len(packet)
          due = now + self.path.delay_s
          heapq.heappush(waiting, (due, next(order), 1 - index, packet))
      while waiting and waiting[0][0] <= time.monotonic():
        _, _, index, packet = heapq.heappop(waiting)
        try:
          os.write(self._files[index], packet)
        except BlockingIOError:
          pass  # The receiver's queue is full: one more loss.


def _ip(*arguments: str) -> None:
  ended = subprocess.run(
    ["ip", *arguments], capture_output=True, text=True, timeout=20
  )
  if ended.returncode:
    raise OSError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")
