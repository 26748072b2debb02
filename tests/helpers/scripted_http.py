"""Applications whose answers a test writes, and what a policy's server says."""

import asyncio
import contextlib
import json

from tunix.rl.multi_turn.net import http_server


class Scripted:
  """An ASGI application whose answers are a function of (method, path)."""

  def __init__(self, answer):
    self.answer = answer
    self.requests = []

  async def __call__(self, scope, receive, send):
    if scope["type"] == "lifespan":
      while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
          return
    body = b""
    while True:
      message = await receive()
      body += message.get("body", b"")
      if not message.get("more_body"):
        break
    path = scope["path"]
    headers = {
      k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]
    }
    query = scope["query_string"].decode()
    self.requests.append((scope["method"], path, query, headers, body))
    found = self.answer(scope["method"], path, body)
    if asyncio.iscoroutine(found):
      found = await found
    status, content = found
    if not isinstance(content, bytes):
      content = json.dumps(content).encode()
    await send(
      {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json")],
      }
    )
    await send({"type": "http.response.body", "body": content})


@contextlib.contextmanager
def scripted(answer):
  """(url, application) of such a server."""
  app = Scripted(answer)
  with http_server.LoopbackServer(app) as server:
    yield server.url, app


class Logged:
  """In front of an application: notes the requests that reach it."""

  def __init__(self, app, name, log):
    self.app, self.name, self.log = app, name, log

  async def __call__(self, scope, receive, send):
    if scope["type"] == "http":
      self.log.append((self.name, scope["method"], scope["path"]))
    await self.app(scope, receive, send)


def call(**arguments):
  """A policy's text with one call of Qwen's computer_use."""
  body = json.dumps({"name": "computer_use", "arguments": arguments})
  return f"<tool_call>{body}</tool_call>"


def completion(text="done", ids=(5, 6), logprobs=(-0.5, -0.25), prompt=(1, 2)):
  """A chat completion with its tokens."""
  choice = {
    "index": 0,
    "message": {"role": "assistant", "content": text},
    "finish_reason": "stop",
  }
  if ids is not None:
    choice["token_ids"] = list(ids)
  if logprobs is not None:
    choice["logprobs"] = {
      "content": [{"token": "x", "logprob": p} for p in logprobs]
    }
  reply = {"id": "chatcmpl-1", "model": "m", "choices": [choice]}
  if prompt is not None:
    reply["prompt_token_ids"] = list(prompt)
  return reply
