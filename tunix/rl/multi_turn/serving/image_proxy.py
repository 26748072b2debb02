"""A proxy in front of a model's server that sends screenshots along.

    python -m tunix.rl.multi_turn.serving.image_proxy \
        --upstream http://127.0.0.1:8000 --allow-host tos.example.com

Agents send screenshots as addresses; a model's server may be unable to reach
them, or must not. The proxy fetches each from the hosts that it is given,
replaces its address by a data URL, and passes the request on, to this package's
server, vLLM or SGLang (chat, Responses, Anthropic's messages, `/generate`).

Promises: a host that is not listed is never called, nor one at a private
address unless it is listed as private (see `media`); a request without such
addresses is passed on byte for byte; the answer is passed on as it comes,
streams included; an image is fetched once while it is kept, so that later turns
of a conversation show the same pixels, also after its address has expired; a
request that cannot be rewritten, or has the address of a video or a sound,
which the server would fetch, is refused with its place and reason; tools'
schemas and calls are left as they are.

With a run's sampling (`--sampling`), a request that leaves its fields out is
sampled so. One of another distribution is refused, or passed on, counted and
marked: each choice of its answer carries the reason in `untrained`, which a
run's readers honour, and the header `x-untrained` has it, in streams alone.

Does not retry, cache answers, or look into pictures beyond their first bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import hmac
import json
import logging
import os
import pathlib
import sys
from typing import Any, AsyncIterator, Iterator, Sequence

import httpx
from starlette import applications
from starlette import background
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses
from starlette import routing
from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import http as http_lib
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_models
from tunix.rl.multi_turn.core import request_bodies
from tunix.rl.multi_turn.core import sampling_rule
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import media

_LOG = logging.getLogger(__name__)
TOKEN_VARIABLE = "TUNIX_IMAGE_PROXY_TOKEN"
UPSTREAM_VARIABLE = "TUNIX_IMAGE_PROXY_UPSTREAM_TOKEN"
_MAX_BODY = 256 << 20
_AT_ONCE = 8  # Fetches of one request.
# What these hold is not read: schemas and arguments may have such names, too.
_UNREAD = frozenset({
    "tools", "tool_calls", "functions", "function_call", "metadata",
    "response_format", "text", "extra_body", "chat_template_kwargs",
})  # pyformat: disable
_OTHER_MEDIA = frozenset({
    "video_url", "audio_url", "video_data", "audio_data",
})  # pyformat: disable
_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
)  # pyformat: disable
_DROPPED = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length",
    "accept-encoding", "x-forwarded-for",
})  # pyformat: disable

# Paths of requests that sample, with the fields that they may leave out, and
# whether these are in `sampling_params`.
_ALL_FIELDS = sampling_rule.FIELDS
_SAMPLING_PATHS = {
    "/chat/completions": (_ALL_FIELDS, False),
    "/completions": (_ALL_FIELDS, False),
    "/responses": (("temperature", "top_p"), False),
    "/messages": (("temperature", "top_p", "top_k"), False),
    "/generate": (_ALL_FIELDS, True),
}

Request = starlette_requests.Request
Response = starlette_responses.Response


class ImageProxy:
  """The proxy's ASGI application, in the attribute `asgi`.

  Attributes:
    untrained_requests: Number of requests of another distribution than the
      rule's.
  """

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
      rule: sampling_rule.SamplingRule | None = None,
  ):
    """Args:

      upstream: URL of the model's server, without /v1.
      limits: which images are fetched.
      token: that clients must present as bearer token; "" passes their own on.
      upstream_token: sent to the upstream instead of the clients'.
      max_images: of one request.
      keep_bytes: fetched images that are kept, encoded.
      timeout_s: of the upstream, between two parts of its answer.
      loader: instead of one with `limits`.
      rule: Distribution of the run that trains on the answers; None passes any
        on.

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
    self._rule = rule
    self.untrained_requests = 0
    self._reasons: set[str] = set()
    self._max_images = max_images
    self._keep_bytes = keep_bytes
    self._loader = loader or media.MediaLoader(images_lib.ImageStore(), limits)
    self._kept: collections.OrderedDict[str, str] = collections.OrderedDict()
    self._size = 0
    self._fetching: dict[str, asyncio.Task[str]] = {}
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
  async def _lifespan(self, app: Any) -> AsyncIterator[None]:
    del app
    try:
      yield
    finally:
      await self._client.aclose()
      await self._loader.aclose()

  async def _answer(self, request: Request) -> Response:
    try:
      self._authorize(request)
      body = await request_bodies.read(request, _MAX_BODY)
      untrained = ""
      if request.method == "POST" and body:
        body, untrained = await self._rewritten(request.url.path, body)
      return await self._passed_on(request, body, untrained)
    except request_bodies.BodyRefused as refused:
      error = errors.ApiError(
          refused.status,
          refused.message,
          code=refused.code,
          retry_after_s=refused.retry_after_s,
      )
    except errors.ApiError as api_error:
      error = api_error
    return starlette_responses.JSONResponse(
        error.body(), error.status, headers=error.headers()
    )

  def _authorize(self, request: Request) -> None:
    headers = request.headers
    if "origin" in headers:
      raise errors.ApiError(
          403, "a request of a web page is not passed on", code="cross_site"
      )
    if not self._token:
      if not http_server.names_loopback(headers.get("host", "")):
        raise errors.ApiError(
            403,
            "without a token this proxy answers on localhost only; start it"
            " with a token, or ask 127.0.0.1",
            code="wrong_host",
        )
      return
    presented = headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(
        presented.strip().encode("latin-1", "replace"), self._token.encode()
    ):
      raise errors.ApiError(
          401, "give the proxy's token as Authorization: Bearer",
          code="invalid_api_key",
      )  # pyformat: disable

  async def _passed_on(
      self, request: Request, body: bytes, untrained: str
  ) -> Response:
    headers = [
        (name, value)
        for name, value in request.headers.items()
        if name not in _DROPPED
        and not (name == "authorization" and self._token)
    ]
    if self._upstream_token:
      headers = [h for h in headers if h[0] != "authorization"]
      headers.append(("authorization", f"Bearer {self._upstream_token}"))
    headers.append(("accept-encoding", "identity"))
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope.get("query_string", b"")
    url = self._upstream + path.decode("ascii")
    if query:
      url += "?" + query.decode("ascii")
    try:
      answer = await self._client.send(
          self._client.build_request(
              request.method, url, headers=headers, content=body
          ),
          stream=True,
      )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
      raise errors.ApiError(
          502,
          f"{self._upstream} does not answer: {type(error).__name__}: {error}",
          code="upstream_failed",
          retry_after_s=1.0,
      ) from None
    passed = {k: v for k, v in answer.headers.items() if k not in _DROPPED}
    if untrained:
      passed["x-untrained"] = untrained.encode("ascii", "replace").decode()
      if passed.get("content-type", "").startswith("application/json"):
        try:
          content = await answer.aread()
        except httpx.HTTPError as error:
          raise errors.ApiError(
              502,
              f"{self._upstream} broke off: {type(error).__name__}: {error}",
              code="upstream_failed",
              retry_after_s=1.0,
          ) from None
        finally:
          await answer.aclose()
        return starlette_responses.Response(
            _marked(content, untrained), answer.status_code, passed
        )
    return starlette_responses.StreamingResponse(
        answer.aiter_raw(),
        answer.status_code,
        passed,
        background=background.BackgroundTask(answer.aclose),
    )

  # --- requests ---------------------------------------------------------------

  async def _rewritten(self, path: str, body: bytes) -> tuple[bytes, str]:
    """(the body with data URLs and the run's sampling, reason against it).

    The same bytes if it names no image elsewhere, and does not sample for a
    run.

    Raises:
      ApiError: naming the image's place, or the field of another distribution.
    """
    ends = (end for end in _SAMPLING_PATHS if path.endswith(end))
    # The longest: completions end as those of chats do.
    end = max(ends, key=len, default="") if self._rule is not None else ""
    if not end and b"http" not in body.lower():
      return body, ""
    try:
      value = await http_lib.read(
          lambda: json_models.parse(body), len(body), 30.0, "a request"
      )
    except ValueError:
      return body, ""  # The upstream words its own refusal.
    places = list(_places(value, ""))
    untrained = ""
    if end and isinstance(value, dict):
      untrained = self._sample_as_the_run(value, *_SAMPLING_PATHS[end])
    elif not places:
      return body, ""
    if len(places) > self._max_images:
      raise errors.invalid(
          places[self._max_images][2],
          f"{len(places)} images are to be fetched, at most {self._max_images}"
          " are; send fewer",
          "too_many_images",
      )
    gate = asyncio.Semaphore(_AT_ONCE)

    async def fill(holder: Any, key: Any, where: str) -> None:
      async with gate:
        try:
          holder[key] = await self._data_url(holder[key])
        except media.MediaError as error:
          raise errors.ApiError(
              502 if error.retryable else 400,
              f"{where}: {error}",
              code=error.code,
              param=where,
              retry_after_s=1.0 if error.retryable else None,
          ) from None

    try:
      async with asyncio.TaskGroup() as group:
        for place in places:
          group.create_task(fill(*place))
    except* errors.ApiError as failed:
      raise failed.exceptions[0] from None
    written = await concurrency.acall(
        lambda: json.dumps(value).encode(), what="writing a request"
    )
    return written, untrained

  def _sample_as_the_run(
      self, request: dict[str, Any], fields: Sequence[str], nested: bool
  ) -> str:
    """Fills in what the request leaves out; returns the reason against it.

    Raises:
      ApiError: it has another distribution, and the rule refuses it.
    """
    assert self._rule is not None
    holders: Any = [request]
    if nested:
      params = request.get("sampling_params")
      if params is None:
        params = request["sampling_params"] = {}
      holders = params if isinstance(params, list) else [params]
    reason = ""
    try:
      for holder in holders:
        if isinstance(holder, dict):
          reason = reason or self._rule.reason_against(holder)
    except sampling_rule.OtherSampling as error:
      field = str(error).partition("=")[0].partition(" ")[0]
      raise errors.invalid(
          field, str(error), "unsupported_parameter"
      ) from None
    for holder in holders:
      if isinstance(holder, dict):
        for name in fields:
          if holder.get(name) is None:
            _fill(holder, name, getattr(self._rule, name))
    if reason:
      self.untrained_requests += 1
      if reason not in self._reasons:
        self._reasons.add(reason)
        _LOG.warning("answers are marked as untrained: %s", reason)
    return reason

  async def _data_url(self, url: str) -> str:
    """The image as a data URL, fetched once for all who ask meanwhile."""
    if url in self._kept:
      self._kept.move_to_end(url)
      return self._kept[url]
    task = self._fetching.get(url)
    if task is None:
      task = asyncio.create_task(self._fetch(url))
      self._fetching[url] = task
      task.add_done_callback(lambda _: self._fetching.pop(url, None))
    return await asyncio.shield(task)

  async def _fetch(self, url: str) -> str:
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
    found = f"data:image/{kind};base64,{data}"
    self._kept[url] = found
    self._size += len(found)
    while self._size > self._keep_bytes:
      self._size -= len(self._kept.popitem(last=False)[1])
    return found


def _fill(holder: dict[str, Any], name: str, value: float) -> None:
  """Sets a field, in the values that vLLM and SGLang share."""
  if name == "top_k":
    holder[name] = value or -1  # Theirs for no truncation.
  elif name != "min_p" or value:
    holder[name] = value


def _marked(content: bytes, untrained: str) -> bytes:
  """The JSON answer with the reason in each choice, or at its top."""
  try:
    answer = json_models.parse(content)
  except ValueError:
    return content
  listed = answer.get("choices") if isinstance(answer, dict) else answer
  for choice in listed if isinstance(listed, list) else [answer]:
    if isinstance(choice, dict):
      choice["untrained"] = untrained
  return json.dumps(answer).encode()


def _places(value: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
  """(holder, key, path) of each image's address elsewhere.

  OpenAI's chat and Responses (`image_url`, a text or an object with `url`),
  Anthropic's messages (`source` of type url), vLLM's `/inference/v1/generate`
  (`content_parts`: `url` beside the type) and SGLang's `/generate`
  (`image_data`: one of those forms, or lists of them).

  Raises:
    ApiError: the address of another medium.
  """
  if isinstance(value, list):
    for index, item in enumerate(value):
      yield from _places(item, f"{where}[{index}]")
    return
  if not isinstance(value, dict):
    return
  for key, item in value.items():
    path = f"{where}.{key}" if where else key
    if key in _UNREAD or (key == "input" and value.get("type") == "tool_use"):
      continue
    if key in _OTHER_MEDIA and any(_addresses({"": item}, "", path)):
      raise _not_supported(path)
    if key == "content_parts" and isinstance(item, list):
      yield from _flat_parts(item, path)
    if key == "image_data":
      yield from _addresses(value, key, path)
    elif key == "image_url" and _is_elsewhere(item):
      yield value, key, path
    elif key in ("image_url", "source") and isinstance(item, dict):
      if _is_elsewhere(item.get("url")):
        yield item, "url", f"{path}.url"
    else:
      yield from _places(item, path)


def _flat_parts(
    parts: list[Any], where: str
) -> Iterator[tuple[Any, Any, str]]:
  """As `_places`, of vLLM's parts, which have their address beside the type."""
  for index, part in enumerate(parts):
    if isinstance(part, dict) and _is_elsewhere(part.get("url")):
      path = f"{where}[{index}].url"
      if part.get("type") != "image_url":
        raise _not_supported(path)
      yield part, "url", path


def _not_supported(path: str) -> errors.ApiError:
  return errors.invalid(
      path,
      f"{path}: only images are fetched; send this one as a data URL",
      "media_not_supported",
  )


def _addresses(
    holder: Any, key: Any, where: str
) -> Iterator[tuple[Any, Any, str]]:
  """As `_places`, of an address, an object with `url`, or lists of those."""
  value = holder[key]
  if _is_elsewhere(value):
    yield holder, key, where
  elif isinstance(value, list):
    for index in range(len(value)):
      yield from _addresses(value, index, f"{where}[{index}]")
  elif isinstance(value, dict) and "url" in value:
    yield from _addresses(value, "url", f"{where}.url")


def _is_elsewhere(url: Any) -> bool:
  return isinstance(url, str) and url[:8].lower().startswith(
      ("http://", "https://")
  )


# --- the command --------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
      prog="python -m tunix.rl.multi_turn.serving.image_proxy",
      description="Send screenshots along to a model's server.",
      formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add("--upstream", required=True, metavar="URL",
      help="the model's server, without /v1")
  add("--allow-host", action="append", default=[], metavar="HOST[:PORT]",
      help="exact host that images are fetched from; may be repeated")
  add("--private-host", action="append", default=[], metavar="HOST[:PORT]",
      help="such a host that may be at a private address")
  add("--allow-http", action="store_true", help="fetch http: addresses, too")
  add("--host", default="127.0.0.1", help="address to bind")
  add("--port", type=int, default=8200, help="0: any free one")
  add("--token-file", type=pathlib.Path,
      help=f"holds the token of clients; or set {TOKEN_VARIABLE}; the"
      f" upstream's own is ${UPSTREAM_VARIABLE}")
  add("--max-images", type=int, default=64, metavar="N", help="of a request")
  add("--sampling", metavar="JSON",
      help="the run's temperature, top_p, top_k and min_p, e.g."
      " '{\"temperature\": 0.7}'; without, any request is passed on")
  add("--other-sampling", choices=("mask", "refuse", "train"), default="mask",
      help="for requests of another distribution than --sampling")
  add("--timeout", type=float, default=600.0, metavar="S",
      help="of the upstream")
  http_server.add_options(out)
  return out  # pyformat: disable


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""


  from tunix.rl.multi_turn.core import connections  # pylint: disable=g-import-not-at-top
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = parser().parse_args(argv)
  connections.raise_open_files()
  try:
    connection_limits = http_server.limits_of(args)
    token = http_server.token(args.token_file, args.host, TOKEN_VARIABLE)
    rule = None
    if args.sampling:
      rule = sampling_rule.of_text(args.sampling, args.other_sampling)
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
        rule=rule,
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
