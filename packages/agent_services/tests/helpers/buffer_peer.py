"""A rollout buffer service of the protocol's facts, and nothing else.

An independent peer of the trainer side: standard library only, in memory, no
leases. `python buffer_peer.py PORT` serves its arithmetic generator.

A generator is a function (payload, write, stopped) that calls `write(item)`.
"""

import http.server
import json
import math
import sys
import threading
import time
import urllib.request


class BufferPeer:
  """The service in threads; `url` once it is made."""

  def __init__(self, generators=None, port=0, normalise=False, token=""):
    self.generators = generators or {"math": arithmetic}
    self.normalise = normalise
    self.token = token
    self.payloads = []
    self.reads = 0
    self.failing = 0  # Requests that are to be answered with 500.
    self._groups = {}
    self._size = 1
    self._lock = threading.Lock()
    self._stop = threading.Event()
    self._threads = []
    peer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def log_message(self, *args):
        pass

      def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, answer = peer.answer(
          self.path,
          json.loads(body or b"{}"),
          self.headers.get("authorization", ""),
        )
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    self._server.daemon_threads = True
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
    thread = threading.Thread(target=self._server.serve_forever, daemon=True)
    thread.start()

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def close(self):
    self._stop.set()
    self._server.shutdown()
    self._server.server_close()
    for thread in self._threads:
      thread.join(10)

  # --- routes ----------------------------------------------------------------

  def answer(self, path, body, authorization=""):
    if self.failing:
      self.failing -= 1
      return 500, {"detail": "it fails as it was asked to"}
    if self.token and authorization != f"Bearer {self.token}":
      return 401, {"detail": "a token is needed"}
    routes = {
      "/start_rollout": self._start,
      "/buffer/write": self._write,
      "/get_rollout_data": self._read,
    }
    if path not in routes:
      return 404, {"detail": path}
    return routes[path](body)

  def _start(self, payload):
    generator = self.generators.get(payload["task_type"])
    if generator is None:
      return 400, {"detail": f"no generator {payload['task_type']}"}
    with self._lock:
      self.payloads.append(payload)
      self._groups = {}
      self._size = int(payload["num_repeat_per_sample"])
    stop = self._stop
    thread = threading.Thread(
      target=generator, args=(payload, self.write, stop), daemon=True
    )
    self._threads.append(thread)
    thread.start()
    return 200, {"message": "Rollout started"}

  def write(self, item):
    with self._lock:
      self._groups.setdefault(item["instance_id"], []).append(item)

  def _write(self, item):
    self.write(item)
    return 200, {
      "success": True,
      "message": "",
      "data": {"data": [item], "meta_info": {}},
    }

  def _read(self, body):
    with self._lock:
      self.reads += 1
      done = [k for k, g in self._groups.items() if len(g) >= self._size]
      if body.get("batch_size"):
        done = done[: max(1, int(body["batch_size"]) // self._size)]
      groups = [self._groups.pop(k) for k in done]
    if not groups:
      return 200, {
        "success": False,
        "message": "not ready",
        "data": {"data": [], "meta_info": {}},
      }
    items = [item for group in groups for item in group]
    rewards = [item["reward"] for item in items]
    mean = sum(rewards) / len(rewards)
    meta = {
      "total_samples": len(items),
      "num_groups": len(groups),
      "avg_group_size": len(items) / len(groups),
      "avg_reward": mean,
      "reward_std": math.sqrt(
        sum((r - mean) ** 2 for r in rewards) / len(rewards)
      ),
      "reward_min": min(rewards),
      "reward_max": max(rewards),
      "finished_groups": done,
    }
    if self.normalise:
      for group in groups:
        raw = [item["reward"] for item in group]
        middle = sum(raw) / len(raw)
        spread = math.sqrt(sum((r - middle) ** 2 for r in raw) / len(raw))
        for item, reward in zip(group, raw):
          item["raw_reward"] = reward
          item["reward"] = (reward - middle) / (spread + 1e-8)
    return 200, {
      "success": True,
      "message": "",
      "data": {"data": items, "meta_info": meta},
    }


# --- generators ----------------------------------------------------------


def write_tasks(folder, rows):
  """Returns a file `tasks.jsonl` in a folder, a row a line."""
  path = folder / "tasks.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return path


def write_sums(folder, count):
  """Returns a file of instances of the mathematics generators."""
  prompt = lambda i: [{"role": "user", "content": f"{i} + 1 ="}]
  return write_tasks(
    folder,
    [
      {"instance_id": f"math_{i}", "prompt": prompt(i), "label": str(i + 1)}
      for i in range(count)
    ],
  )


def tasks_of(payload):
  """(instance id, row) of the input file, those to skip left out, in passes."""
  skip = set(payload.get("skip_instance_ids") or ())
  with open(payload["input_file"], encoding="utf-8") as file:
    rows = [json.loads(line) for line in file if line.strip()]
  for epoch in range(int(payload["num_epoch"])):
    for row in rows:
      name = row["instance_id"] + (f"+{epoch}" if epoch else "")
      if name not in skip:
        yield name, row


def said(row, reply):
  return [*row["prompt"], {"role": "assistant", "content": reply}]


def arithmetic(payload, write, stop):
  """Items of text alone, without a model: half of each group is right."""
  for name, row in tasks_of(payload):
    for n in range(int(payload["num_repeat_per_sample"])):
      if stop.is_set():
        return
      right = n % 2 == 0
      reply = str(row.get("answer", "2")) if right else "7"
      write(
        {
          "uid": f"{name}-{n}",
          "instance_id": name,
          "messages": said(row, reply),
          "reward": float(right),
          "extra_info": {
            "timestamp": time.time(),
            "round_number": 1,
            "finish_reason": "stop",
          },
        }
      )


def asking(payload, write, stop):
  """Items of text whose replies the trainer's own engine gives."""
  key = payload.get("remote_engine_key") or ""
  for name, row in tasks_of(payload):
    for n in range(int(payload["num_repeat_per_sample"])):
      if stop.is_set():
        return
      body = {
        "model": payload.get("model", "policy"),
        "messages": row["prompt"],
        **payload["sampling_params"],
      }
      request = urllib.request.Request(
        payload["remote_engine_url"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
      )
      try:
        with urllib.request.urlopen(request, timeout=120) as reply:
          answer = json.load(reply)
      except OSError:
        if stop.is_set():
          return
        time.sleep(0.2)
        continue
      choice = answer["choices"][0]
      text = choice["message"].get("content") or ""
      write(
        {
          "uid": f"{name}-{n}",
          "instance_id": name,
          "messages": said(row, text),
          # Something that differs between the members of a group.
          "reward": (sum(map(ord, text)) % 7) / 6.0,
          "extra_info": {
            "timestamp": time.time(),
            "round_number": 1,
            "finish_reason": choice["finish_reason"],
          },
        }
      )


if __name__ == "__main__":
  with BufferPeer(
    {"math": arithmetic, "asking": asking}, int(sys.argv[1])
  ) as served:
    print(served.url, flush=True)
    threading.Event().wait()
