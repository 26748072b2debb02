"""Measures what the server costs beside the engine, and whether it holds out.

The server runs in a process of its own. First one request at a time: of 4 KB,
and with five screenshots of 1280x720, 1.4 MB in all, of which the server has
seen all (a turn that sends its history again), four (a turn with a new one) or
none. A request's overhead is what the client waited less what `generate` took
for it; beside it stands the difference of medians to as many calls of
`engine.generate` without HTTP.

Then the soak: `sessions` agents at a time play episode after episode, half of
their turns streamed, new weights every few seconds, and compare the tokens of
their answers with the exported ones. No error, and memory that stays flat.

    python benchmarks/bench_server.py --json server.json
    python benchmarks/bench_server.py --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import http.client
import io
import json
import pathlib
import random
import re
import subprocess
import sys
import time
from typing import Any, Callable

from agent_services.serving import bodies as bodies_lib
from agent_services.serving import media
from agent_services.serving import requests as requests_lib
from agent_services.serving import server as server_lib
from agent_services.serving.endpoints import chat
import httpx
import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

MODEL = "qwen"
LARGE, SMALL = (1280, 720), (96, 64)
PIXELS = 224 * 160  # What the policy sees of a large one.
IMAGES = 5
TARGETS_MS = {
  "4 KB": 1.5,
  "5 screenshots, all seen": 6.0,
  "5 screenshots, one new": 6.0,
}
FLAT = 1.05  # Memory of the last quarter over that of the second.


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--requests", type=int, default=200)
  parser.add_argument("--sessions", type=int, default=256)
  parser.add_argument("--seconds", type=float, default=60.0, help="of the soak")
  parser.add_argument("--minutes", type=float, default=None)
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
    "qwen3_vl_tiny", screen=LARGE, max_pixels=PIXELS
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
    image_sizes=(LARGE, SMALL),
    banned_token_ids=model.config.banned_token_ids,
  )
  timed = Timed(engine)
  app = server_lib.make_app(MODEL, timed, policy, store)
  with engine:
    engine.warm_up()
    with http_server.LoopbackServer(app.asgi) as server:
      print(json.dumps({"port": server.port}), flush=True)
      version = 0
      for line in sys.stdin:
        what, *arguments = line.split()
        if what == "direct":
          seconds = asyncio.run(_direct(timed, int(arguments[0])))
          print(json.dumps(seconds), flush=True)
        elif what == "update":
          version += 1
          engine.update_weights(version, model).result(60)
          print(json.dumps({"version": version}), flush=True)


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

  def megabytes(self) -> float:
    """Resident memory."""
    status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

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
    self._urls = [screenshot(self._rng, LARGE) for _ in range(IMAGES)]
    words = "The quick brown fox jumps over the lazy dog again and again. "
    self._text = (words * 80)[:3900]

  def body(self, i: int) -> bytes:
    if self.kind == "4 KB":
      messages = [{"role": "user", "content": self._text}]
    else:
      new = {"all seen": 0, "one new": 1, "all new": IMAGES}
      new = new[self.kind.split(", ")[1]]
      for at in range(IMAGES - new, IMAGES):
        self._urls[at] = screenshot(self._rng, LARGE)
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


def where(server: Server, kind: str, count: int = 40) -> dict[str, float]:
  """Milliseconds of the parts of a request's way, each by itself."""
  policy = checkpoint.create_policy(
    "qwen3_vl_tiny", screen=LARGE, max_pixels=PIXELS
  )
  renderer = qwen.QwenRenderer(policy[2], policy[1].num_image_tokens)
  limits = requests_lib.RequestLimits()
  source = Requests(kind)
  bodies = [source.body(i) for i in range(count)]
  loader = media.MediaLoader(images_lib.ImageStore(), media.MediaLimits())

  def timed(call: Callable[[Any], Any], args) -> tuple[float, list[Any]]:
    durations, out = [], []
    for one in args:
      started = time.perf_counter()
      out.append(call(one))
      durations.append(time.perf_counter() - started)
    return round(1e3 * float(np.median(durations[5:])), 3), out

  async def load_all(messages) -> list[Any]:
    shown = []
    for message in messages:
      content = message["content"]
      if isinstance(content, list):
        content = [
          {"type": "image", "image": await loader.load(part["url"])}
          if part["type"] == "image_url"
          else part
          for part in content
        ]
      shown.append({**message, "content": content})
    return shown

  connection = http.client.HTTPConnection("127.0.0.1", server.port)
  nothing, _ = timed(lambda _: ask(connection, "/health"), range(count))

  def refused(body: bytes) -> None:
    """Read and parsed, but of another model."""
    body = body.replace(b'"qwen"', b'"none"', 1)
    connection.request("POST", "/v1/chat/completions", body)
    connection.getresponse().read()

  read, _ = timed(refused, bodies)
  connection.close()
  parse, requests = timed(
    lambda b: chat.read(bodies_lib.read_json(b, limits.body_bytes), limits),
    bodies,
  )
  with asyncio.Runner() as runner:
    load, shown = timed(
      lambda request: runner.run(load_all(request.messages)), requests
    )
    runner.run(loader.aclose())
  render, _ = timed(renderer.render, shown)
  return {
    "a request that does nothing": nothing,
    "body over HTTP, parsed, refused": read,
    "  of which parsing and checking": parse,
    "images": load,
    "rendering to tokens": render,
  }


# --- many --------------------------------------------------------------------


class Soak:
  """Agents that play until the time is over."""

  def __init__(self, server: Server, sessions: int, seconds: float):
    self._server, self._sessions, self._seconds = server, sessions, seconds
    self.errors: collections.Counter[str] = collections.Counter()
    self.turns = self.episodes = self.tokens = self.most = 0
    self.versions: set[int] = set()
    self._running = 0
    self._urls = [
      screenshot(np.random.default_rng(i), SMALL) for i in range(512)
    ]
    self.memory: list[tuple[float, float]] = []

  async def run(self) -> None:
    end = time.monotonic() + self._seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
      base_url=f"http://127.0.0.1:{self._server.port}",
      timeout=300,
      limits=limits,
      verify=False,
    ) as client:
      watching = asyncio.create_task(self._watch())
      updating = asyncio.create_task(self._update())
      await asyncio.gather(
        *(self._agent(client, i, end) for i in range(self._sessions))
      )
      for task in (watching, updating):
        task.cancel()
      await asyncio.gather(watching, updating, return_exceptions=True)

  async def _watch(self) -> None:
    started = time.monotonic()
    while True:
      self.memory.append((time.monotonic() - started, self._server.megabytes()))
      await asyncio.sleep(min(5.0, self._seconds / 60))

  async def _update(self) -> None:
    while True:
      await asyncio.sleep(2.0)
      await asyncio.to_thread(self._server.tell, "update")

  async def _agent(self, client, number: int, end: float) -> None:
    rng = random.Random(number)
    while time.monotonic() < end:
      try:
        await self._episode(client, rng)
        self.episodes += 1
      except Exception as error:  # pylint: disable=broad-except
        self.errors[f"{type(error).__name__}: {error}"[:200]] += 1

  async def _episode(self, client, rng) -> None:
    opened = await _post(client, "/rl/start_session", {"task_id": "soak"})
    name = opened["session_id"]
    sampled = collections.Counter()
    messages: list[dict[str, Any]] = []
    for turn in range(rng.randint(2, 4)):
      messages.append(
        {
          "role": "user",
          "content": [
            {"type": "text", "text": f"turn {turn}"},
            {"type": "image_url", "image_url": {"url": rng.choice(self._urls)}},
          ],
        }
      )
      self._running += 1
      self.most = max(self.most, self._running)
      try:
        text, ids, versions = await _turn(
          client, name, messages, stream=rng.random() < 0.5
        )
      finally:
        self._running -= 1
      messages.append({"role": "assistant", "content": text})
      sampled.update(ids)
      self.versions.update(v for _, v in versions)
      self.turns += 1
      self.tokens += len(ids)
    await _post(client, f"/sessions/{name}/rl/set_reward", {"reward": 1.0})
    await _post(client, f"/sessions/{name}/rl/end_session", {})
    export = await _post(
      client,
      "/export_trajectories",
      {"session_id": name, "style": "concat", "drop": True},
    )
    trained: collections.Counter[int] = collections.Counter()
    for one in export["interactions"].values():
      tensors = one["tensor_dict"]
      trained.update(
        token
        for token, mask in zip(tensors["input_ids"][0], tensors["loss_mask"][0])
        if mask
      )
    if trained != sampled:
      raise AssertionError(
        f"{sampled.total()} tokens were sampled, {trained.total()} exported"
      )


async def _post(client, path: str, body) -> dict[str, Any]:
  answer = await client.post(path, json=body)
  if answer.status_code != 200:
    raise RuntimeError(f"{path.split('/')[-1]}: {answer.text[:150]}")
  return answer.json()


async def _turn(client, name, messages, stream):
  """(text, token ids, version spans) of an answer."""
  path = f"/sessions/{name}/v1/chat/completions"
  body = {
    "model": MODEL,
    "messages": messages,
    "max_tokens": 24,
    "return_token_ids": True,
    "stream": stream,
  }
  if not stream:
    (choice,) = (await _post(client, path, body))["choices"]
    return (
      choice["message"]["content"],
      choice["token_ids"],
      choice["policy_versions"],
    )
  text, last = [], None
  async with client.stream("POST", path, json=body) as answer:
    if answer.status_code != 200:
      raise RuntimeError(f"stream: {(await answer.aread())[:150]!r}")
    async for line in answer.aiter_lines():
      if not line.startswith("data: ") or line == "data: [DONE]":
        continue
      event = json.loads(line[6:])
      if "error" in event:
        raise RuntimeError(f"stream: {event['error']['message'][:150]}")
      (choice,) = event["choices"]
      text.append(choice["delta"].get("content") or "")
      if choice.get("finish_reason"):
        last = choice
  if last is None:
    raise RuntimeError("stream: cut")
  return "".join(text), last["token_ids"], last["policy_versions"]


def soak(server: Server, sessions: int, seconds: float) -> dict[str, Any]:
  soaking = Soak(server, sessions, seconds)
  started = time.monotonic()
  asyncio.run(soaking.run())
  took = time.monotonic() - started
  times, sizes = map(np.array, zip(*soaking.memory))
  quarter = lambda i: sizes[
    (times >= i * seconds / 4) & (times < (i + 1) * seconds / 4)
  ]
  growth = float(np.median(quarter(3)) / np.median(quarter(1)))
  connection = http.client.HTTPConnection("127.0.0.1", server.port)
  metrics = ask(connection, "/metrics").decode()
  gauge = lambda name: float(
    re.search(rf"^rollout_{name} (\S+)", metrics, re.M)[1]
  )
  return {
    "sessions": sessions,
    "seconds": round(took, 1),
    "episodes": soaking.episodes,
    "turns": soaking.turns,
    "sampled_tokens": soaking.tokens,
    "turns_per_second": round(soaking.turns / took, 1),
    "most_requests_at_a_time": soaking.most,
    "versions": len(soaking.versions),
    "errors": dict(soaking.errors),
    "megabytes": {
      f"quarter {i + 1}": round(float(np.median(quarter(i))), 1)
      for i in range(4)
    },
    "growth": round(growth, 4),
    "left": {
      name: gauge(name)
      for name in (
        "running",
        "engine_active",
        "engine_waiting",
        "engine_sessions",
        "engine_compiles_after_warm_up",
      )
    },
    "held": not soaking.errors and growth <= FLAT,
  }


def main() -> None:
  args = parse_args()
  if args.serve:
    serve_forever()
    return
  server = Server()
  report: dict[str, Any] = {"latency": {}, "where_ms": {}}
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
      parts = where(server, kind)
      report["where_ms"][kind] = parts
      print("  " + ", ".join(f"{k.strip()} {v}" for k, v in parts.items()))
    seconds = args.seconds if args.minutes is None else 60 * args.minutes
    if seconds > 0:
      report["soak"] = soak(server, args.sessions, seconds)
      print(json.dumps(report["soak"], indent=2))
  finally:
    server.close()
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
