"""A server of a tiny policy in a thread, and the requests of its tests."""

import base64
import io
import time

from agent_services.serving import requests as requests_lib
import httpx
import openai
from PIL import Image
import small_server

MODEL, SIZE = small_server.MODEL, small_server.SIZE


class Running(small_server.SmallServer):
  """A server in a thread of its own."""

  def __init__(self, **options):
    limits = requests_lib.RequestLimits(max_new_tokens=96, n=4, images=3)
    super().__init__(limits=limits, **options)

  def client(self, path="", key="none", **options):
    return openai.OpenAI(
      base_url=f"{self.url}{path}/v1",
      api_key=key,
      timeout=60,
      # Reading certificates would take longer than many a request.
      http_client=openai.DefaultHttpxClient(verify=False),
      **options,
    )

  def post(self, path, body=None, content=None, **headers):
    options = {"content": content} if content else {"json": body or {}}
    return httpx.post(
      self.url + path, headers=headers, timeout=60, verify=False, **options
    )

  def settled(self):
    """The engine's statistics once nothing runs any more."""
    for _ in range(500):
      stats = self.engine.stats()
      if not stats["active"] and not stats["waiting"]:
        return stats
      time.sleep(0.01)
    raise AssertionError(f"still running: {stats}")


def data_url(seed=0):
  out = io.BytesIO()
  Image.fromarray(small_server.pixels(seed)).save(out, "PNG")
  return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def screenshot(seed=0, text="look"):
  return {
    "role": "user",
    "content": [
      {"type": "text", "text": text},
      {"type": "image_url", "image_url": {"url": data_url(seed)}},
    ],
  }


def ask(client, messages, **options):
  options = {"model": MODEL, "max_tokens": 6, "seed": 1} | options
  extra = {"return_token_ids": True} | options.pop("extra_body", {})
  return client.chat.completions.create(
    messages=messages, extra_body=extra, **options
  )


def start(running, **body):
  return running.post("/rl/start_session", {"task_id": "t", **body}).json()


def export(running, session, **options):
  body = {"session_id": session["session_id"], **options}
  return running.post("/export_trajectories", body).json()["interactions"]
