"""Common part of the HTTP applications of this package and agent_services.

`Application` makes an ASGI application of routes. `ServiceError` is a refused
request, which becomes the answer `{"detail", "code"}`. `Metrics` counts and
times the answers.

Promises: every request is answered, whatever its handler raises; the first
check of a request is its authorization.

Does not read bodies, or know the routes of an application.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, AsyncIterator, Awaitable, Callable, Iterable, Mapping

import prometheus_client
from starlette import applications
from starlette import requests
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_answers
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.net import request_bodies

_LOG = logging.getLogger(__name__)

Request = requests.Request
Response = responses.Response
Handler = Callable[[Request], Awaitable[Response]]
Route = tuple[str, Handler, list[str]]
"""Path, handler and methods."""
POST, GET = ["POST"], ["GET"]


class ServiceError(Exception):
  """A refused request.

  Attributes:
    status: HTTP status of the answer.
    detail: The fault, and the fix.
    code: Short, stable code for programs.
    retry_s: Seconds until the request may succeed; None: never.
  """

  def __init__(
    self, status: int, detail: str, code: str, retry_s: float | None = None
  ):
    super().__init__(detail)
    self.status = status
    self.detail = detail
    self.code = code
    self.retry_s = retry_s

  def response(self) -> Response:
    return json_answers.Json(self.body(), self.status, self.headers())

  def body(self) -> dict[str, str]:
    return {"detail": self.detail, "code": self.code}

  def headers(self) -> dict[str, str]:
    headers = {}
    if self.retry_s is not None:
      # The header holds whole seconds; 0 would make clients spin.
      headers["retry-after"] = str(max(1, round(self.retry_s)))
    if self.status in (408, 413) or self.code == "no_memory":
      headers["connection"] = "close"  # The rest of the body stays unread.
    return headers


def invalid(detail: str) -> ServiceError:
  """Returns a 422: the request violates the protocol."""
  return ServiceError(422, detail, "invalid_request")


class Application:
  """An ASGI application, in the attribute `asgi` once `_serve` was called."""

  _wrong_method = "method_not_allowed"
  """Code of the answer to a method that the path does not have."""
  _sweep_s = 5.0
  """Seconds between two sweeps."""

  def _serve(self, routes: Iterable[Route], *more: routing.BaseRoute) -> None:
    self.asgi = applications.Starlette(
      routes=[
        *(
          routing.Route(path, self._guarded(path, handler), methods=methods)
          for path, handler, methods in routes
        ),
        *more,
      ],
      exception_handlers={404: self._not_served, 405: self._not_served},
      lifespan=self._lifespan,
    )

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: object) -> AsyncIterator[None]:
    del app
    sweeping = asyncio.create_task(self._keep_sweeping())
    try:
      yield
    finally:
      sweeping.cancel()
      await asyncio.gather(sweeping, return_exceptions=True)
      await self._close()

  async def _keep_sweeping(self) -> None:
    while True:
      await asyncio.sleep(self._sweep_s)
      await self._sweep()

  def _guarded(self, route: str, handler: Handler) -> Handler:
    async def run(request: Request) -> Response:
      self._authorize(request, route)
      return await handler(request)

    return http_server.guarded(
      run,
      lambda error: self._failed(route, error),
      lambda *answer: self._done(route, *answer),
    )

  def _failed(self, route: str, error: Exception) -> Response:
    """Answers a request whose handler raised an error."""
    refused = self._refusal(error)
    if refused is None:
      _LOG.error("%s failed", route, exc_info=error)
      refused = ServiceError(
        500, f"the service failed: {self._description(error)}", "internal_error"
      )
    return refused.response()

  async def _not_served(self, request: Request, error: Any) -> Response:
    response = ServiceError(
      error.status_code,
      self._why_not_served(request),
      self._wrong_method if error.status_code == 405 else "not_found",
    ).response()
    response.headers.update(error.headers or {})
    return response

  def _why_not_served(self, request: Request) -> str:
    return f"{request.method} {request.url.path} is not served here"

  # --- for the applications ---------------------------------------------------

  async def _sweep(self) -> None:
    """Does what is due every few seconds. Must not raise."""

  async def _close(self) -> None:
    """Frees what the application holds."""

  def _authorize(self, request: Request, route: str) -> None:
    """Raises an error if a request may not reach its handler."""
    raise NotImplementedError

  def _done(
    self, route: str, request: Request, response: Response, seconds: float
  ) -> None:
    """Receives each answer, with its seconds."""

  def _refusal(self, error: Exception) -> ServiceError | None:
    """Returns the client's error; None if the service itself failed."""
    if isinstance(error, ServiceError):
      return error
    if isinstance(error, request_bodies.BodyRefused):
      return ServiceError(
        error.status, error.message, error.code, error.retry_after_s
      )
    if isinstance(error, requests.ClientDisconnect):
      return ServiceError(499, "the client went away", "gone")
    return None

  def _description(self, error: Exception) -> str:
    return concurrency.describe(error)


def authorize(
  headers: Mapping[str, str],
  presented: str,
  token: str,
  *,
  public: bool,
  any_host: bool = False,
) -> None:
  """Checks that a request comes from a client of this server.

  Args:
    headers: Headers of the request.
    presented: Token that the client presents.
    token: Token of the server; "" requires none.
    public: Whether the route needs no token.
    any_host: Whether the route is served at any host name without a token.

  Raises:
    ServiceError: 401 or 403.
  """
  if problem := http_server.cross_site(headers, bool(token) or any_host):
    raise ServiceError(403, problem, "cross_site")
  if token and not public and not http_server.is_token(presented, token):
    raise ServiceError(
      401, "give the token as Authorization: Bearer …", "unauthorized"
    )


def parse_json(raw: bytes) -> Any:
  """Parses a body. Raises ServiceError 400 unless it is JSON."""
  try:
    return json_models.parse(raw)
  except ValueError as error:
    raise ServiceError(
      400, f"the body is not JSON: {error}", "invalid_json"
    ) from None


def check_object(value: object) -> dict[str, Any]:
  """Returns the value of a body. Raises ServiceError 422 unless an object."""
  if not isinstance(value, dict):
    raise ServiceError(
      422,
      f"the body must be an object, got a {type(value).__name__}",
      "invalid_request",
    )
  return value


class Metrics:
  """Counts and times of an application's answers, for Prometheus.

  Attributes:
    registry: Registry of the metrics, where an application adds its own.
  """

  def __init__(self, prefix: str, buckets: Iterable[float]):
    """Args:

    prefix: First word of the metrics' names.
    buckets: Upper bounds of the histogram of seconds.
    """
    self.registry = prometheus_client.CollectorRegistry()
    self._requests = prometheus_client.Counter(
      f"{prefix}_requests",
      "Answered requests.",
      ("route", "status"),
      registry=self.registry,
    )
    self._seconds = prometheus_client.Histogram(
      f"{prefix}_request_seconds",
      "From request to answer.",
      ("route",),
      registry=self.registry,
      buckets=tuple(buckets),
    )

  def count(self, route: str, response: Response, seconds: float) -> None:
    self._requests.labels(route, response.status_code).inc()
    self._seconds.labels(route).observe(seconds)

  def page(self, lines: Iterable[str]) -> Response:
    """Returns the answer with all metrics, and an application's lines."""
    counts = prometheus_client.generate_latest(self.registry).decode()
    return Response(
      "".join((counts, *lines)),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )
