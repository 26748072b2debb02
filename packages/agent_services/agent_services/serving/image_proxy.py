"""A proxy in front of a model's server that sends screenshots along.

    python -m tunix.rl.multi_turn.serving.image_proxy \
        --upstream http://127.0.0.1:8000 --allow-host tos.example.com

Agents send screenshots as addresses; a model's server may be unable to reach
them, or must not. The proxy fetches each from the hosts that it is given,
replaces its address by a data URL, and passes the request on, to this package's
server, vLLM or SGLang (chat, Responses, Anthropic's messages, `/generate`).

Promises: a host that is not listed is never called, nor one at a private
address unless it is listed as private (see `media`); a body is parsed, and what
is passed on is written from the parsed value, so that the server behind reads
what was examined here; a body that is no JSON is refused, in any content type
or encoding, and so is an address in a place that is neither an image's nor
text (see `image_addresses`); the answer is passed on as it comes, streams
included; an image is fetched once while it is kept, so that later turns of a
conversation show the same pixels, also after its address has expired; a request
that cannot be rewritten, or has the address of a video or a sound, is refused
with its place and reason; tools' schemas and calls are not changed.

Does not retry, cache answers, or look into pictures beyond their first bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import sys
from typing import AsyncIterator, Sequence
from urllib import parse

import httpx
from starlette import applications
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses
from starlette import routing
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http as http_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import request_bodies

from agent_services.serving import errors
from agent_services.serving import image_addresses
from agent_services.serving import media

_LOG = logging.getLogger(__name__)
TOKEN_VARIABLE = "TUNIX_IMAGE_PROXY_TOKEN"
UPSTREAM_VARIABLE = "TUNIX_IMAGE_PROXY_UPSTREAM_TOKEN"
_MAX_BODY = 256 << 20
"""Bytes of a body, and of what is passed on in its place."""
_AT_ONCE = 8  # Fetches of one request.
_ALL_AT_ONCE = 64  # Of all requests.
_KINDS = (
  (b"\x89PNG\r\n\x1a\n", "png"),
  (b"\xff\xd8\xff", "jpeg"),
  (b"GIF8", "gif"),
)
_HOP_BY_HOP = frozenset({
    "connection", "content-length", "keep-alive", "proxy-authenticate", "te",
    "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_DROPPED = _HOP_BY_HOP | {
  "accept-encoding",
  "content-encoding",
  "content-type",
  "expect",
  "host",
  "proxy-authorization",
  "x-forwarded-for",
}
_JSON = re.compile(r"|application/([\w.-]+\+)?json")
_TARGET = re.compile(rb"[!-\"$-~]+")  # No `#`: httpx leaves out what follows.
# What a client or server on the way may resolve to another path.
_UNSAFE = re.compile(r"//|\\|/\.\.?(/|$)")

Request = starlette_requests.Request
Response = starlette_responses.Response


class ImageProxy:
  """The proxy's ASGI application, in the attribute `asgi`."""

  def __init__(
    self,
    upstream: str,
    limits: media.MediaLimits,
    *,
    token: str = "",
    upstream_token: str = "",
    max_images: int = 64,
    keep_bytes: int = 512 << 20,
    timeout_s: float = 600.0,
    loader: media.MediaLoader | None = None,
  ):
    """Args:

      upstream: URL of the model's server, without /v1.
      limits: Limits of the images that are fetched.
      token: Bearer token that clients must present; "" passes their own on.
      upstream_token: Token that the upstream gets instead of the clients'.
      max_images: Largest number of images of one request.
      keep_bytes: Bytes of fetched images that stay in memory, encoded.
      timeout_s: Deadline of the upstream between two parts of its answer, in
        seconds.
      loader: Loader in place of one with `limits`.

    Raises:
      ValueError: naming the argument.
    """
    base = http_lib.address(upstream, "upstream", "http://127.0.0.1:8000")
    self._upstream = base.removesuffix("/v1")
    if max_images < 1 or keep_bytes < 1 or not timeout_s > 0:
      raise ValueError(
        "max_images, keep_bytes and timeout_s must be > 0, got"
        f" {max_images}, {keep_bytes} and {timeout_s}"
      )
    self._token = token
    self._upstream_token = upstream_token
    self._max_images = max_images
    self._keep_bytes = keep_bytes
    self._loader = loader or media.MediaLoader(images_lib.ImageStore(), limits)
    self._kept: collections.OrderedDict[str, str] = collections.OrderedDict()
    self._size = 0
    self._fetching: dict[str, asyncio.Task[str]] = {}
    self._gate = asyncio.Semaphore(_ALL_AT_ONCE)
    self._client = httpx.AsyncClient(
      timeout=httpx.Timeout(timeout_s, connect=30.0),
      limits=httpx.Limits(max_connections=None),
      trust_env=False,
      follow_redirects=False,
    )
    methods = ["GET", "POST", "DELETE"]
    self.asgi = applications.Starlette(
      routes=[routing.Route("/{path:path}", self._answer, methods=methods)],
      lifespan=self._lifespan,
    )

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: object) -> AsyncIterator[None]:
    del app
    try:
      yield
    finally:
      await self._client.aclose()
      await self._loader.aclose()

  async def _answer(self, request: Request) -> Response:
    try:
      self._authorize(request)
      url = self._url(request)
      _check_kind(request)
      body = await request_bodies.read(request, _MAX_BODY)
      if body:
        body = await self._rewritten(request, body)
      return await self._passed_on(request, url, body)
    except request_bodies.BodyRefused as refused:
      error = errors.ApiError(
        refused.status,
        refused.message,
        code=refused.code,
        retry_after_s=refused.retry_after_s,
      )
    except starlette_requests.ClientDisconnect:
      error = errors.ApiError(499, "the client went away", code="cancelled")
    except concurrency.DeadlineExceeded as late:
      error = errors.ApiError(
        503, f"{late}; send it again later", code="busy", retry_after_s=1.0
      )
    except errors.ApiError as api_error:
      error = api_error
    return starlette_responses.JSONResponse(
      error.body(), error.status, headers=error.headers()
    )

  def _authorize(self, request: Request) -> None:
    headers = request.headers
    if problem := http_server.cross_site(headers, bool(self._token)):
      raise errors.ApiError(403, problem, code="cross_site")
    if not self._token:
      return
    if request.method == "GET" and request.scope["path"] == "/health":
      return
    if not http_server.is_token(http_server.bearer_of(headers), self._token):
      raise errors.ApiError(
        401,
        "give the proxy's token as Authorization: Bearer",
        code="invalid_api_key",
      )

  def _url(self, request: Request) -> str:
    """Returns the address at the upstream, its path as the client wrote it."""
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope.get("query_string", b"")
    url = self._upstream.encode() + path + (b"?" + query if query else b"")
    if not path.startswith(b"/") or not _TARGET.fullmatch(url):
      raise errors.ApiError(
        400,
        "the address has a character that must be percent-encoded",
        code="invalid_address",
      )
    # Decoded twice: a server behind the upstream may do so, too.
    if _UNSAFE.search(parse.unquote(request.scope["path"])):
      raise errors.ApiError(
        400,
        "the path has a segment . or .., an empty one or a backslash;"
        " send the path that these lead to",
        code="invalid_address",
      )
    return url.decode("ascii")

  async def _passed_on(
    self, request: Request, url: str, body: bytes
  ) -> Response:
    own = request.headers.get("connection", "").lower().split(",")
    dropped = _DROPPED.union(name.strip() for name in own)
    headers = [
      (name, value)
      for name, value in request.headers.raw
      if name.decode("latin-1") not in dropped
      and not (name == b"authorization" and self._token)
    ]
    if self._upstream_token:
      headers = [h for h in headers if h[0] != b"authorization"]
      bearer = f"Bearer {self._upstream_token}".encode()
      headers.append((b"authorization", bearer))
    headers.append((b"accept-encoding", b"identity"))
    if body:
      headers.append((b"content-type", b"application/json"))
    try:
      answer = await http_server.unless_gone(
        request,
        http_lib.send(
          self._client,
          self._client.build_request(
            request.method, url, headers=headers, content=body
          ),
        ),
      )
    except httpx.LocalProtocolError as error:
      raise errors.invalid(
        None, f"the request cannot be passed on: {error}", "invalid_request"
      ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
      raise errors.ApiError(
        502,
        f"{self._upstream} does not answer: {type(error).__name__}: {error}",
        code="upstream_failed",
        retry_after_s=1.0,
      ) from None
    passed = {k: v for k, v in answer.headers.items() if k not in _HOP_BY_HOP}
    return starlette_responses.StreamingResponse(
      _parts(answer), answer.status_code, passed
    )

  # --- requests ---------------------------------------------------------------

  async def _rewritten(self, request: Request, body: bytes) -> bytes:
    """Returns the JSON of the parsed body, with data URLs.

    Raises:
      ApiError: naming the image's place.
      BodyRefused: its images find no memory.
    """
    path, size = request.scope["path"], len(body)
    value, places = await http_lib.read(
      lambda: image_addresses.examine(body, path), len(body), 30.0, "a request"
    )
    if len(places) > self._max_images:
      raise errors.invalid(
        places[self._max_images].where,
        f"{len(places)} images are to be fetched, at most {self._max_images}"
        " are; send fewer",
        "too_many_images",
      )
    gate = asyncio.Semaphore(_AT_ONCE)

    async def fill(place: image_addresses.Place) -> None:
      nonlocal size
      async with gate:
        try:
          data_url = await self._data_url(place.holder[place.key])
        except media.MediaError as error:
          raise errors.ApiError(
            502 if error.retryable else 400,
            f"{place.where}: {error}",
            code=error.code,
            param=place.where,
            retry_after_s=1.0 if error.retryable else None,
          ) from None
      size += len(data_url)
      if size > _MAX_BODY:
        raise errors.ApiError(
          413,
          f"{place.where}: with this image the request takes more than"
          f" {_MAX_BODY >> 20} MiB; send fewer or smaller images",
          code="request_too_large",
          param=place.where,
        )
      await request_bodies.hold(request, len(data_url))
      place.holder[place.key] = data_url

    try:
      async with asyncio.TaskGroup() as group:
        for place in places:
          group.create_task(fill(place))
    except* (errors.ApiError, request_bodies.BodyRefused) as failed:
      raise failed.exceptions[0] from None
    return await http_lib.read(lambda: _written(value), size, 30.0, "a request")

  async def _data_url(self, url: str) -> str:
    """Returns the image as a data URL, fetched once for all who ask
    meanwhile."""
    if url in self._kept:
      self._kept.move_to_end(url)
      return self._kept[url]
    task = self._fetching.get(url)
    if task is None:
      task = asyncio.create_task(self._fetch(url))
      self._fetching[url] = task
      task.add_done_callback(functools.partial(self._fetched, url))
    return await asyncio.shield(task)

  def _fetched(self, url: str, task: asyncio.Task[str]) -> None:
    del self._fetching[url]
    if not task.cancelled():
      task.exception()  # Retrieved, though all who waited may have left.

  async def _fetch(self, url: str) -> str:
    async with self._gate:
      content = await self._loader.fetch(url)
    kind = next((k for head, k in _KINDS if content.startswith(head)), "")
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
      kind = "webp"
    if not kind:
      raise media.MediaError(
        "invalid_image", "its server sent no PNG, JPEG, WebP or GIF"
      )
    data = await concurrency.acall(
      lambda: base64.b64encode(content).decode(), what="encoding an image"
    )
    data_url = f"data:image/{kind};base64,{data}"
    self._kept[url] = data_url
    self._size += len(data_url)
    while self._size > self._keep_bytes:
      self._size -= len(self._kept.popitem(last=False)[1])
    return data_url


def _check_kind(request: Request) -> None:
  """Refuses every kind of body but JSON, before any of it is read.

  Raises:
    ApiError: 415.
  """
  kinds = request.headers.getlist("content-type")
  names = [kind.partition(";")[0].strip().lower() for kind in kinds]
  if not all(_JSON.fullmatch(name) for name in names):
    raise errors.ApiError(
      415,
      f"content-type {names[0][:60]!r} is not passed on; send JSON as"
      " application/json",
      code="unsupported_content_type",
    )
  for encoding in request.headers.getlist("content-encoding"):
    if encoding.strip().lower() not in ("", "identity"):
      raise errors.ApiError(
        415,
        f"content-encoding {encoding[:60]!r} is not passed on; send the body"
        " uncompressed",
        code="unsupported_content_encoding",
      )


def _written(value: object) -> bytes:
  """JSON in ASCII, which every charset reads alike.

  Raises:
    ApiError: a number has no JSON.
  """
  try:
    return json.dumps(value, allow_nan=False).encode("ascii")
  except ValueError as error:
    raise errors.invalid(
      None,
      f"the body has a number that JSON cannot hold: {error}",
      "invalid_json",
    ) from None


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
  try:
    async for part in answer.aiter_raw():
      yield part
  finally:
    await answer.aclose()


# --- the command --------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.serving.image_proxy",
    description="Send screenshots along to a model's server.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add(
    "--upstream",
    required=True,
    metavar="URL",
    help="the model's server, without /v1",
  )
  add(
    "--allow-host",
    action="append",
    default=[],
    metavar="HOST[:PORT]",
    help="exact host that images are fetched from; may be repeated",
  )
  add(
    "--private-host",
    action="append",
    default=[],
    metavar="HOST[:PORT]",
    help="such a host that may be at a private address",
  )
  add("--allow-http", action="store_true", help="fetch http: addresses, too")
  add("--host", default="127.0.0.1", help="address to bind")
  add("--port", type=int, default=8200, help="0: any free one")
  add(
    "--token-file",
    type=pathlib.Path,
    help=f"holds the token of clients; or set {TOKEN_VARIABLE}; the"
    f" upstream's own is ${UPSTREAM_VARIABLE}",
  )
  add("--max-images", type=int, default=64, metavar="N", help="of a request")
  add(
    "--timeout", type=float, default=600.0, metavar="S", help="of the upstream"
  )
  http_server.add_options(out)
  return out


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""

  from tunix.rl.multi_turn.net import connections  # pylint: disable=g-import-not-at-top
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = parser().parse_args(argv)
  connections.raise_open_files()
  try:
    connection_limits = http_server.limits_of(args)
    token = http_server.token(args.token_file, args.host, TOKEN_VARIABLE)
    proxy = ImageProxy(
      args.upstream,
      media.MediaLimits(
        allowed_hosts=(*args.allow_host, *args.private_host),
        private_hosts=tuple(args.private_host),
        allow_http=args.allow_http,
      ),
      token=token,
      upstream_token=os.environ.get(UPSTREAM_VARIABLE, ""),
      max_images=args.max_images,
      timeout_s=args.timeout,
    )
    listening = http_server.listen(args.host, args.port, 1024)
  except (OSError, ValueError, ImportError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  url = http_server.url_of(args.host, listening)
  print(f"passing on to {args.upstream} at {url}", flush=True)
  config = http_server.config(proxy.asgi, connection_limits, backlog=1024)
  uvicorn.Server(config).run(sockets=[listening])
  return 0


if __name__ == "__main__":
  sys.exit(main())
