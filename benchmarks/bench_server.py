"""Measures what the server costs beside the engine.

The server runs in a process of its own. One request at a time: of 4 KB, and
with five screenshots of 1280x720, 1.4 MB in all, of which the server has
seen all (a turn that sends its history again), four (a turn with a new one) or
none. A request's overhead is what the client waited less what `generate` took
for it; beside it stands the difference of medians to as many calls of
`engine.generate` without HTTP.

    python benchmarks/bench_server.py --json server.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import io
import json
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from agent_services.serving import server as server_lib
import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

MODEL = "qwen"
SCREEN = (1280, 720)
PIXELS = 224 * 160  # What the policy sees of a large one.
IMAGES = 5
TARGETS_MS = {
  "4 KB": 1.5,
  "5 screenshots, all seen": 6.0,
  "5 screenshots, one new": 6.0,
}


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--requests", type=int, default=200)
  parser.add_argument("--json", type=pathlib.Path, default=None)
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
  return parser.parse_args()


# --- the server's process ----------------------------------------------------


class Timed:
  """The engine, and how long its last completion took."""

  def __init__(self, engine: engine_lib.RolloutEngine):
    self._engine = engine
    self.seconds = 0.0
    self.asked: tuple[Any, Any] | None = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  async def generate(self, prompt, sampling, **options):
    self.asked = prompt, sampling
    started = time.perf_counter()
    try:
      return await self._engine.generate(prompt, sampling, **options)
    finally:
      self.seconds = time.perf_counter() - started

  def stats(self) -> dict[str, float]:
    return self._engine.stats() | {"generate_seconds": self.seconds}


def serve_forever() -> None:
  """Serves until its standard input ends; obeys lines that come there."""
  host_memory.tune()
  policy = checkpoint.create_policy(
    "qwen3_vl_tiny", screen=SCREEN, max_pixels=PIXELS
  )
  model, processor, _ = policy
  store = images_lib.ImageStore()
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=32,
      context_length=2560,
      window_buckets=(320, 1280),
      decode_rows=(2, 16),  # One at a time, and many.
      prefill_rows=(2, 8),
    ),
    image_sizes=(SCREEN,),
    banned_token_ids=model.config.banned_token_ids,
  )
  timed = Timed(engine)
  app = server_lib.make_app(MODEL, timed, policy, store)
  with engine:
    engine.warm_up()
    with http_server.LoopbackServer(app.asgi) as server:
      print(json.dumps({"port": server.port}), flush=True)
      for line in sys.stdin:
        what, *arguments = line.split()
        if what == "direct":
          seconds = asyncio.run(_direct(timed, int(arguments[0])))
          print(json.dumps(seconds), flush=True)


async def _direct(timed: Timed, count: int) -> list[float]:
  """Seconds of the last request's work, asked of the engine itself."""
  prompt, sampling = timed.asked
  engine, durations = timed._engine, []  # pylint: disable=protected-access
  for i in range(count):
    started = time.perf_counter()
    await engine.generate(prompt, sampling, session=f"direct{i}")
    durations.append(time.perf_counter() - started)
    await engine.release(f"direct{i}")
  return durations


class Server:
  """The process, its port, and lines to it."""

  def __init__(self):
    self._process = subprocess.Popen(
      [sys.executable, __file__, "--serve"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError("the server's process did not start")
    self.port = json.loads(line)["port"]

  def tell(self, line: str) -> Any:
    self._process.stdin.write(line + "\n")
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(60)


# --- one at a time -----------------------------------------------------------


def screenshot(rng: np.random.Generator, size: tuple[int, int]) -> str:
  """A data URL; a large one takes some 280 KB, as of a busy desktop."""
  width, height = size
  pixels = np.full((height, width, 3), 235, np.uint8)
  for _ in range(40):
    x, y = rng.integers(0, width), rng.integers(0, height)
    w, h = rng.integers(4, width // 3), rng.integers(4, height // 6)
    pixels[y : y + h, x : x + w] = rng.integers(0, 255, 3)
  side = round((width * height * 0.075) ** 0.5)  # A photo in it.
  pixels[:side, :side] = rng.integers(0, 255, (side, side, 3))
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "PNG", compress_level=6)
  return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def body_of(messages, **options) -> bytes:
  body = {"model": MODEL, "messages": messages, "max_tokens": 8}
  return json.dumps(body | options).encode()


def with_images(urls) -> list[dict[str, Any]]:
  messages = []
  for i, url in enumerate(urls):
    if i:
      messages.append({"role": "assistant", "content": "click 1 2"})
    messages.append(
      {
        "role": "user",
        "content": [
          {"type": "text", "text": "What now?"},
          {"type": "image_url", "image_url": {"url": url}},
        ],
      }
    )
  return messages


class Requests:
  """Bodies of one kind; each has a seed of its own, hence is sampled."""

  def __init__(self, kind: str):
    self.kind = kind
    self._rng = np.random.default_rng(len(kind))
    self._urls = [screenshot(self._rng, SCREEN) for _ in range(IMAGES)]
    words = "The quick brown fox jumps over the lazy dog again and again. "
    self._text = (words * 80)[:3900]

  def body(self, i: int) -> bytes:
    if self.kind == "4 KB":
      messages = [{"role": "user", "content": self._text}]
    else:
      new = {"all seen": 0, "one new": 1, "all new": IMAGES}
      new = new[self.kind.split(", ")[1]]
      for at in range(IMAGES - new, IMAGES):
        self._urls[at] = screenshot(self._rng, SCREEN)
      messages = with_images(self._urls)
    return body_of(messages, seed=i)


def ask(connection, path: str, body: bytes | None = None) -> bytes:
  method = "GET" if body is None else "POST"
  headers = {} if body is None else {"Content-Type": "application/json"}
  connection.request(method, path, body, headers)
  answer = connection.getresponse()
  data = answer.read()
  if answer.status != 200:
    raise RuntimeError(f"{answer.status}: {data[:300]!r}")
  return data


def generate_seconds(connection) -> float:
  text = ask(connection, "/metrics").decode()
  name = r"^rollout_engine_generate_seconds (\S+)"
  return float(re.search(name, text, re.M)[1])


def percentiles(seconds) -> dict[str, float]:
  p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99))
  return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}


def latency(server: Server, kind: str, count: int) -> dict[str, Any]:
  """Requests of a kind, one after the other."""
  source = Requests(kind)
  connection = http.client.HTTPConnection("127.0.0.1", server.port)
  waited, overhead, size = [], [], 0
  for i in range(count + 10):
    body = source.body(i)
    started = time.perf_counter()
    ask(connection, "/v1/chat/completions", body)
    seconds = time.perf_counter() - started
    if i >= 10:  # The first ones meet everything for the first time.
      waited.append(seconds)
      overhead.append(seconds - generate_seconds(connection))
      size = len(body)
  connection.close()
  report = {
    "bytes": size,
    "waited": percentiles(waited),
    "overhead": percentiles(overhead),
  }
  if "new" not in kind:  # The engine would not have to encode it again.
    direct = server.tell(f"direct {count}")
    difference = float(np.median(waited) - np.median(direct))
    report["engine"] = percentiles(direct)
    report["difference_of_medians_ms"] = round(1e3 * difference, 2)
  return report


def main() -> None:
  args = parse_args()
  if args.serve:
    serve_forever()
    return
  server = Server()
  report: dict[str, Any] = {"latency": {}}
  try:
    for kind in (
      "4 KB",
      "5 screenshots, all seen",
      "5 screenshots, one new",
      "5 screenshots, all new",
    ):
      got = latency(server, kind, args.requests)
      report["latency"][kind] = got
      target = TARGETS_MS.get(kind)
      line = (
        f"{kind} ({got['bytes'] / 1e3:.0f} kB): overhead p50"
        f" {got['overhead']['p50_ms']} ms, p99"
        f" {got['overhead']['p99_ms']} ms"
      )
      if target:
        line += f", target p50 <= {target:g} ms"
      if "engine" in got:
        line += (
          f"; by the difference of medians"
          f" {got['difference_of_medians_ms']} ms, engine p50"
          f" {got['engine']['p50_ms']} ms"
        )
      print(line, flush=True)
  finally:
    server.close()
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
