"""The monitor's server on the loopback interface, and what clients send it."""

import contextlib
import io
import pathlib
import time

import httpx
import monitor_databases
import numpy as np
from PIL import Image
from training_monitor import app as app_lib
from training_monitor.client import ingest_client
from training_monitor.core import images as images_lib
from training_monitor.net import http_server
from training_monitor.net import request_bodies
from training_monitor.schema import database
from training_monitor.server import access


class Stored:
  """A monitor's database; `engine` is of it."""

  def __init__(self, engine):
    self.engine = engine

  def rows(self, table, columns="*", order="id", where="1 = 1"):
    with self.engine.connect() as connection:
      result = connection.exec_driver_sql(
        f'SELECT {columns} FROM "{table}" WHERE {where} ORDER BY {order}'
      )
      return [dict(row._mapping) for row in result]


class MonitorServer(Stored):
  """A real server; `http` speaks to it."""

  def __init__(
    self,
    target,
    files,
    *,
    token="",
    limits=app_lib.IngestLimits(),
    connections=request_bodies.ConnectionLimits(),
  ):
    super().__init__(database.connect(target))
    database.upgrade(self.engine)
    self.token = token
    self.app = app_lib.MonitorApp(
      self.engine,
      files,
      access.Access(self.engine, token, open_to_all=not token),
      limits,
    )
    self.server = http_server.LoopbackServer(self.app.asgi, limits=connections)
    self.url = self.server.url

  def __enter__(self):
    self.server.start()
    headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
    self.http = httpx.Client(
      base_url=self.url,
      headers=headers,
      timeout=30,
      verify=False,  # Plain HTTP; reading certificates takes long.
    )
    return self

  def __exit__(self, *exc_info):
    self.http.close()
    self.app.stop_streams()
    self.server.close()
    self.app.writer.close()
    self.engine.dispose()

  def post(self, body, status=200, **options):
    reply = self.http.post("/api/ingest/batch", json=body, **options)
    assert reply.status_code == status, reply.text
    return reply.json()

  def get(self, path, status=200, **params):
    reply = self.http.get(path, params=params or None)
    assert reply.status_code == status, reply.text
    return reply.json()


def base(**training):
  """A training with a step, an evaluation, a baseline and a task."""
  return {
    "training": {"client_id": "T", "run_name": "run", **training},
    "tasks": [{"task_id": "open-door", "description": "Open the door."}],
    "steps": [{"client_id": "S", "step": 1}],
    "evals": [{"client_id": "E", "step": 0, "total_tasks": 4}],
    "baselines": [{"client_id": "B", "model_path": "m"}],
  }


def episode(name, turns=2, **rollout):
  """An episode as the protocol's arrays."""
  source = {} if {"eval_id", "baseline_id"} & set(rollout) else {"step_id": "S"}
  return {
      "rollouts": [{
          "rollout_id": name, "task_id": "open-door", "model_path": "m",
          **source, **rollout,
      }],
      "environments": [{
          "client_id": f"{name}:env", "rollout_id": name, "env_type": "linux",
      }],
      "turns": [
          {"client_id": f"{name}:turn:{n}", "rollout_id": name, "turn": n,
           "metrics_json": {"thought": "hm"}}
          for n in range(1, turns + 1)
      ],
      "actions": [
          {"client_id": f"{name}:action:{n}", "turn_id": f"{name}:turn:{n}",
           "action_type": "click", "tool_args": {"x": 1, "y": 2},
           "tokens": [5, 6, 7], "logprobs": [-0.5, -0.25, -0.125]}
          for n in range(1, turns + 1)
      ],
      "observations": [
          {"client_id": f"{name}:obs:{n}", "turn_id": f"{name}:turn:{n}",
           "obs_type": "screenshot_before", "text_content": "a door"}
          for n in range(1, turns + 1)
      ],
      "validations": [
          {"client_id": f"{name}:validation", "rollout_id": name,
           "success": True}
      ],
  }  # fmt: skip


def joined(*bodies):
  """One body of several."""
  whole_body = {}
  for body in bodies:
    for key, value in body.items():
      if isinstance(value, list):
        whole_body.setdefault(key, []).extend(value)
      else:
        whole_body[key] = value
  return whole_body


def screenshot(seed=0, size=(16, 12)):
  """(sha256 of its pixels, PNG)."""
  rng = np.random.default_rng(seed)
  pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "PNG")
  return images_lib.hash_pixels(pixels), file.getvalue()


@contextlib.contextmanager
def sqlite_server(folder, **options):
  path = pathlib.Path(folder) / "m.db"
  if not path.exists():
    monitor_databases.new_sqlite(path)
  with MonitorServer(path, path.with_name("files"), **options) as server:
    yield server


def client_of(url, folder, **options):
  return ingest_client.IngestClient(
    url, timeout_seconds=10, spool_dir=folder, **options
  )


def wait_for(holds, seconds=60):
  """Waits until `holds()` is true; fails after `seconds`."""
  deadline = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.02)
