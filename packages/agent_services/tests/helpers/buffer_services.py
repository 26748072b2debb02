"""Rollout buffer services on the loopback interface, and items for them."""

import json

from agent_services.rollout_buffer import buffer_app
from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import rights
from agent_services.rollout_buffer import service as service_lib
import httpx
from tunix.rl.multi_turn.net import http_server

RIGHTS = rights.Rights(input_roots=("/",))
"""Of services whose starts may name every file."""


class Clock:
  """Seconds that only move when told to."""

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


def item(uid, instance_id="i", reward=0.5, **more):
  return {
    "uid": uid,
    "instance_id": instance_id,
    "messages": [
      {"role": "user", "content": "2 + 2?"},
      {"role": "assistant", "content": "4"},
    ],
    "reward": reward,
    "extra_info": {"timestamp": "1", "finish_reason": "stop"},
    **more,
  }


def group(name, rewards=(0.0, 1.0, 0.0, 1.0)):
  return [item(f"{name}-{i}", name, r) for i, r in enumerate(rewards)]


class Running:
  """A service in a thread.

  Attributes:
    service, app, url: of it.
    clock: Clock of groups' ages and leases.
  """

  def __init__(self, folder, *, token="", limits=None, **options):
    self.clock = options.pop("clock", None) or Clock()
    self.server = http_server.LoopbackServer(self._serve)
    self.url = self.server.url
    self.service = service_lib.Service(
      folder,
      url=self.url,
      limits=limits or buffer_settings.BufferLimits(),
      token=token,
      clock=self.clock,
      **{"rights": RIGHTS, **options},
    )
    self.app = buffer_app.App(self.service, token=token)
    self.client = httpx.Client(
      base_url=self.url, timeout=30, trust_env=False, verify=False
    )

  async def _serve(self, *args):
    await self.app.asgi(*args)

  def __enter__(self):
    self.server.start()
    return self

  def __exit__(self, *exc_info):
    self.client.close()
    self.server.close()
    self.service.close()

  def post(self, path, body=None, **options):
    if isinstance(body, (bytes, str)):
      return self.client.post(path, content=body, **options)
    return self.client.post(path, json={} if body is None else body, **options)

  def write(self, *items, path="/buffer/write"):
    for one in items:
      answer = self.post(path, one)
      assert answer.status_code == 200, answer.text

  def put(self, *written):
    """Stores items as a service would that checks nothing but their keys."""
    buffer = self.service.buffer("default")
    for one in written:
      body = json.dumps(one).encode()
      made = items.Item(
        "default",
        one["uid"],
        one["instance_id"],
        one["reward"],
        body,
        items.crc32(body),
      )
      future = self.service.store.put(buffer.id, [made], buffer.stored)
      assert None not in future.result(20)

  def read(self, **body):
    answer = self.post("/get_rollout_data", body)
    assert answer.status_code == 200, answer.text
    return answer.json()

  def stats(self, name="default"):
    return self.client.get(f"/b/{name}/buffer/stats").json()["data"]["data"][0]

  def start(self, **payload):
    return self.post(
      "/start_rollout",
      {"task_type": "external", "num_repeat_per_sample": "4", **payload},
    )
