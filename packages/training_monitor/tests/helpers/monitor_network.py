"""A network that loses, repeats and reorders what is sent over it."""

import asyncio
import contextlib
import http.client
import http.server
import pathlib
import random
import threading
import time

import monitor_faults
import monitor_server
from training_monitor.client import ingest_client
from training_monitor.net import http_server


class Troubled:
  """An application behind such a network.

  Attributes:
    seen: trouble -> how often: the request arrives and its reply is `lost`;
      it arrives `twice`; a copy of it arrives `late`, after others that were
      sent after it; it is `refused`; the reply is `cut` off.
  """

  def __init__(self, app, seed, share=0.4):
    """Args:

    app: ASGI application.
    seed: Seed of the trouble.
    share: Share of the requests with trouble.
    """
    self._app = app
    self._chance = random.Random(seed)
    self._share = share
    self._late = set()
    self.seen = dict.fromkeys(("lost", "twice", "late", "refused", "cut"), 0)

  async def __call__(self, scope, receive, send):
    if scope["type"] != "http" or scope["method"] == "GET":
      return await self._app(scope, receive, send)
    body = b""
    more = True
    while more:
      message = await receive()
      body += message.get("body", b"")
      more = message.get("more_body", False)

    async def again():
      return {"type": "http.request", "body": body, "more_body": False}

    async def nowhere(message):
      del message

    what = "well"
    if self._chance.random() < self._share:
      what = self._chance.choice(list(self.seen))
      self.seen[what] += 1
    if what == "late":

      async def later():
        await asyncio.sleep(self._chance.uniform(0.05, 0.5))
        await self._app(scope, again, nowhere)

      self._late.add(task := asyncio.ensure_future(later()))
      task.add_done_callback(self._late.discard)
    if what == "refused":
      await send(
        {
          "type": "http.response.start",
          "status": 503,
          "headers": [(b"retry-after", b"0")],
        }
      )
      return await send({"type": "http.response.body", "body": b"busy"})
    if what in ("lost", "twice"):
      await self._app(scope, again, nowhere)
    if what == "lost":
      raise ConnectionResetError("the reply is lost")
    if what == "cut":
      await self._app(scope, again, nowhere)
      await send(
        {
          "type": "http.response.start",
          "status": 200,
          "headers": [(b"content-length", b"100")],
        }
      )
      await send(
        {"type": "http.response.body", "body": b'{"tr', "more_body": True}
      )
      raise ConnectionResetError("in the middle")
    await self._app(scope, again, send)


class SlowFront:
  """Passes requests on to a server and each reply back `delay_s` later.

  Time counts while `running` is set.
  """

  def __init__(self, port: int):
    front = self
    self.delay_s = 1.0
    self.running = threading.Event()
    self.running.set()

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def _pass(self):
        size = int(self.headers.get("content-length", 0))
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        line.request(
          self.command,
          self.path,
          self.rfile.read(size),
          {k: v for k, v in self.headers.items() if k.lower() != "host"},
        )
        reply = line.getresponse()
        body = reply.read()
        line.close()
        front.wait()
        self.send_response(reply.status)
        for name in ("content-type", "retry-after"):
          if reply.headers[name]:
            self.send_header(name, reply.headers[name])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # It may have ended.
          self.wfile.write(body)

      do_GET = do_POST = do_PUT = _pass

      def log_message(self, *args):
        del args

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.daemon_threads = True
    self.port = self._server.server_address[1]
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def wait(self) -> None:
    """`delay_s` of the time in which the trainer is not stopped."""
    waited = 0.0
    while waited < self.delay_s:
      self.running.wait()
      time.sleep(0.02)
      waited += 0.02

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()


def soak(folder, episodes, share, seed=0) -> dict:
  """A client that tells these episodes over such a network."""
  folder = pathlib.Path(folder)
  names = [f"r{n}" for n in range(episodes)]
  with monitor_server.sqlite_server(folder / "server") as server:
    troubled = Troubled(server.app.asgi, seed, share)

    async def no_lifespan(scope, receive, send):
      if scope["type"] != "lifespan":  # The server's own is under way.
        await troubled(scope, receive, send)

    with http_server.LoopbackServer(no_lifespan) as front:
      with ingest_client.IngestClient(
        front.url, spool_dir=folder / "spool", timeout_seconds=10
      ) as client:
        client.sender.put(monitor_server.base())
        for name in names:
          while not client.sender.put(
            monitor_server.episode(name, status="completed")
          ):
            time.sleep(0.01)
          # One item at a time, which makes many requests.
          client.flush()
          time.sleep(0.01)
        wrong = [] if client.drain(120) else ["not everything arrived"]
        if client.sender.counters["dead_letters"]:
          wrong.append("something was refused")
    time.sleep(0.6)  # For what comes late.
  wrong += monitor_faults.check(folder / "server" / "m.db", names)
  return {"wrong": wrong, "episodes": episodes, **troubled.seen}
