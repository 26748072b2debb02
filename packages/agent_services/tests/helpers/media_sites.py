"""Loaders, the real servers that they fetch from, and what is refused.

The servers are on loopback; names lead there by an injected resolver, so that
a second resolution would fail.
"""

import asyncio
import base64
import io
import ssl
import struct
import subprocess
import threading
import zlib

from agent_services.serving import media
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import images

URL, HOST = "invalid_image_url", "image_host_not_allowed"
LARGE, BAD, FETCH = "image_too_large", "invalid_image", "image_fetch_failed"
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def encoded(image, kind="PNG", **options):
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def data_url(data, kind="png"):
  return f"data:image/{kind};base64," + base64.b64encode(data).decode()


PNG = encoded(PIXELS)


def png_header(width, height):
  """A PNG that promises pixels it does not have."""

  def chunk(name, body):
    crc = struct.pack(">I", zlib.crc32(name + body))
    return struct.pack(">I", len(body)) + name + body + crc

  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
  return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


async def refused(loader, url, code, match=None, retryable=False):
  with pytest.raises(media.MediaError, match=match) as caught:
    await loader.load(url)
  assert (caught.value.code, caught.value.retryable) == (code, retryable)
  return str(caught.value)


class SlowStore(images.ImageStore):
  """`put` waits until it may go on."""

  def __init__(self, **options):
    super().__init__(**options)
    self.entered, self.go_on = threading.Event(), threading.Event()
    self.puts = 0

  def put(self, pixels):
    self.puts += 1
    self.entered.set()
    assert self.go_on.wait(20), "the event loop does not run"
    return super().put(pixels)


async def until(condition):
  while not condition():
    await asyncio.sleep(0.001)


def at(*addresses):
  """A resolver that leads every name to `addresses`."""

  async def resolve(host, port):
    resolve.asked.append((host, port))
    return addresses

  resolve.asked = []
  return resolve


@pytest.fixture(name="make")
async def make_fixture():
  """Builds a loader; its names lead to loopback unless it is `strict`."""
  loaders = []

  def build(*hosts, store=None, https=False, strict=False, **options):
    limits = {"timeout_s": 20.0, "allow_http": not https}
    for name in [n for n in options if n[0] != "_"]:
      limits[name] = options.pop(name)
    if not strict:
      options.setdefault("_is_allowed_address", lambda a: a == "127.0.0.1")
      options.setdefault("_resolve", at("127.0.0.1"))
    if not https:  # Reading the public authorities takes a while.
      context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
      options.setdefault("_ssl_context", context)
    limits = media.MediaLimits(hosts, **limits)
    store = images.ImageStore() if store is None else store
    loaders.append(media.MediaLoader(store, limits, **options))
    return loaders[-1]

  yield build
  for loader in loaders:
    await loader.aclose()


class Site:
  """A server that answers a path with bytes or a coroutine's doing."""

  def __init__(self):
    self.routes, self.requests, self.sent = {}, [], 0
    self.connections, self.hung_up = 0, asyncio.Event()
    self.tasks = set()

  async def start(self, context=None):
    self._server = await asyncio.start_server(
      self._serve, "127.0.0.1", 0, ssl=context
    )
    self.port = self._server.sockets[0].getsockname()[1]
    scheme = "https" if context else "http"
    self.name = f"good.test:{self.port}"
    self.url = f"{scheme}://{self.name}"
    return self

  def answer(self, path, body=b"", status="200 OK", *headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    self.routes[path] = "\r\n".join([*lines, "", ""]).encode() + body

  def redirect(self, path, to):
    self.answer(path, b"", "302 Found", f"Location: {to}")

  async def _serve(self, reader, writer):
    self.connections += 1
    self.tasks.add(asyncio.current_task())
    try:
      while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        route = self.routes[head.split()[1]]
        if callable(route):
          await route(reader, writer)
        else:
          writer.write(route)
          await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
      self.hung_up.set()
    finally:
      writer.close()

  async def stop(self):
    self._server.close()
    for task in self.tasks:
      task.cancel()


@pytest.fixture(name="site")
async def site_fixture():
  site = await Site().start()
  site.answer("/i.png", PNG)
  yield site
  await site.stop()


@pytest.fixture(scope="module", name="authority")
def authority_fixture(tmp_path_factory):
  """A certificate for good.test, and the contexts of both sides."""
  path = tmp_path_factory.mktemp("tls")
  subprocess.run(
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    " -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=good.test"
    " -addext subjectAltName=DNS:good.test".split(),
    cwd=path,
    check=True,
    capture_output=True,
  )
  server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  server.load_cert_chain(path / "cert.pem", path / "key.pem")
  return server, ssl.create_default_context(cafile=path / "cert.pem")


@pytest.fixture(name="tls_site")
async def tls_site_fixture(authority):
  site = await Site().start(authority[0])
  site.answer("/i.png", PNG)
  yield site
  await site.stop()
