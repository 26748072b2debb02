"""Serves the monitor over HTTP: ingest, the read API and the dashboard.

    POST /api/ingest/batch                a batch of the ingest protocol
    PUT  /api/v1/screenshots/{sha256}     a screenshot, once
    GET  /api/v1/…                        rows of every table
    GET  /api/v1/events                   server-sent events
    GET  /api/…                           routes of other monitors' pages
    GET  /, /runs/…, /rollouts/…          the dashboard's pages
    GET  /api/v1/openapi.json, /health

Promises: an answer 200 to a batch or a screenshot means that it is on the
disk; an error is `{"detail", "errors"}` and names the fix; no request is larger
than its limit; every query of the database runs in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from typing import Any, AsyncIterator, Awaitable, Callable, Mapping

import sqlalchemy as sa
from starlette import applications
from starlette import concurrency
from starlette import middleware
from starlette import requests as starlette_requests
from starlette import responses
from starlette import routing

from training_monitor.dashboard import curves as curves_lib
from training_monitor.dashboard import pages as pages_lib
from training_monitor.dashboard import site as site_lib
from training_monitor.dashboard import token_text
from training_monitor.dashboard.views import health_page
from training_monitor.server import access as access_lib
from training_monitor.server import annotations as annotations_lib
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server import image_files
from training_monitor.server import ingest
from training_monitor.server import live as live_lib
from training_monitor.server import openapi
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib
from training_monitor.server import routes as routes_lib
from training_monitor.server import screenshots
from training_monitor.server import tags_and_baseline
from training_monitor.server import thumbnails as thumbnails_lib
from training_monitor.server import writer as writer_lib

_LOG = logging.getLogger(__name__)
# Short, as every route uses them.
_id = http_io.id_of
_json, _error = http_io.json_answer, http_io.refusal
IngestLimits = ingest.IngestLimits

Request = starlette_requests.Request
Response = responses.Response
Handler = Callable[[Request, access_lib.Principal], Awaitable[Response]]
Operation = openapi.Operation


class MonitorApp:
  """The ASGI application: a server runs `asgi`.

  Attributes:
    asgi: the application.
    writer: stores batches; close it.
    document: describes the routes for programs, OpenAPI 3.1.
  """

  def __init__(
    self,
    engine: sa.Engine,
    files: str | pathlib.Path,
    access: access_lib.Access,
    limits: IngestLimits = IngestLimits(),
    tokenizers: Mapping[str, str | pathlib.Path] | None = None,
  ):
    """Args:

      engine: Engine of the upgraded database.
      files: folder of screenshots and videos.
      access: checks tokens.
      limits: Limits of requests.
      tokenizers: model name -> its tokenizer.json, for tokens as text.

    Raises:
      ValueError: a tokenizer is not there.
    """
    self._files = pathlib.Path(files)
    self._access = access
    self._queries = queries_lib.Queries(engine)
    self._live = live_lib.Live(engine)
    self._screenshots = screenshots.ScreenshotFiles(self._files / "screenshots")
    self.writer = writer_lib.Writer(engine, on_commit=self._live.notify)
    self._curves = curves_lib.Curves(engine)
    self._timings = health_page.Timings()
    self._pages = pages_lib.Pages(
      engine,
      self._queries,
      self._screenshots,
      self._curves,
      token_text.TokenTexts(tokenizers),
      self._timings,
      self.writer,
    )
    self._ingest = ingest.Ingest(
      self.writer, self._queries, self._screenshots, limits
    )
    self._images = image_files.Images(
      self._queries,
      self._screenshots,
      thumbnails_lib.Thumbnails(self._files / thumbnails_lib.FOLDER),
      self._files / "videos",
    )
    site = site_lib.Site(
      access,
      self._pages,
      self._timings,
      tags_and_baseline.TagsAndBaseline(self.writer),
      annotations_lib.Annotations(self.writer),
    )
    table = self._table()
    self.document = openapi.document(
      [operation for operation, _ in table],
      {
        "batch": limits.batch,
        "image": limits.screenshot,
        "images": limits.screenshot,
        "": limits.other,
      },
    )
    self.asgi = applications.Starlette(
      routes=[
        routing.Route(
          operation.path,
          self._guarded(operation, handler),
          methods=[operation.method],
        )
        for operation, handler in table
      ]
      + site.routes(),
      exception_handlers={404: self._not_served, 405: self._not_served},
      middleware=[middleware.Middleware(http_io.ShortPaths)],
      lifespan=self._lifespan,
    )

  def stop_streams(self) -> None:
    """Ends every stream of events, so that the server can stop."""
    self._live.stop()

  def announce_end(self, seconds: float) -> None:
    """Gives open pages up to `seconds` to load the last figures. Blocks."""
    self._live.announce_end()
    deadline = time.monotonic() + seconds
    while self._live.listeners and time.monotonic() < deadline:
      time.sleep(0.02)

  # --- routes ---------------------------------------------------------------

  def _table(self) -> list[tuple[Operation, Handler]]:
    v1, q = "/api/v1", self._queries
    routes: list[tuple[Operation, Handler]] = []

    def add(method, path, name, summary, handler, **more):
      routes.append((Operation(method, path, name, summary, **more), handler))

    def get(path, name, summary, ask, **more):
      handler = self._asking(ask, more.get("query"))
      add("GET", path, name, summary, handler, **more)

    self._ingest.add_routes(add)
    self._images.add_routes(add)
    get(
      f"{v1}/trainings/{{id:int}}/curves",
      "training_curves",
      "Metrics over a training's steps; a name that ends in / is a prefix.",
      self._curve_points,
      query=query_lib.CurvesQuery,
    )
    routes_lib.add_routes(q, get)
    routes_lib.add_legacy_routes(
      q, get, add, self._images.observed, self._images.video
    )
    add(
      "GET",
      f"{v1}/events",
      "events",
      "Changes, as server-sent events; resumes after Last-Event-ID.",
      self._events,
      answer="events",
      query=query_lib.EventsQuery,
    )
    add(
      "GET",
      f"{v1}/openapi.json",
      "openapi",
      "This document.",
      self._openapi,
      scope="",
    )
    add(
      "GET",
      "/health",
      "health",
      "200 while batches can be stored.",
      self._health,
      scope="",
    )
    return routes

  # --- around every request -------------------------------------------------

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: object) -> AsyncIterator[None]:
    del app
    self._live.start()
    try:
      yield
    finally:
      self._live.stop()
      await concurrency.run_in_threadpool(self.writer.close)

  def _guarded(
    self, operation: Operation, handler: Handler
  ) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
      started = time.perf_counter()
      try:
        who = access_lib.Principal(0, frozenset())
        if operation.scope:
          who = await self._access.checked(request.headers, operation.scope)
        else:
          self._access.check_site(request.headers)
        response = await handler(request, who)
      except errors.ApiError as error:
        response = _error(error)
      except starlette_requests.ClientDisconnect:
        response = _error(errors.ApiError(400, "the client went away"))
      except sa.exc.TimeoutError:
        response = _error(
          errors.ApiError(503, "the server is busy", retry_after_s=1)
        )
      except sa.exc.DBAPIError as error:
        _LOG.error("%s failed: %s", operation.name, error)
        response = _error(
          errors.ApiError(
            503, "the database cannot be read now", retry_after_s=2
          )
        )
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("%s failed", operation.name)
        response = _error(
          errors.ApiError(500, "the server failed; read its log")
        )
      for name, value in http_io.PRIVATE.items():
        response.headers.setdefault(name, value)
      self._timings.note(operation.name, time.perf_counter() - started)
      return response

    return run

  def _asking(
    self, ask: Callable[..., Any], model: type[query_lib.Query] | None
  ) -> Handler:
    """Returns a handler that calls `ask` in a thread."""

    async def run(request: Request, who: access_lib.Principal) -> Response:
      arguments: list[Any] = [who.project, request]
      if model is not None:
        arguments.append(model.read(request.query_params))
      return _json(await concurrency.run_in_threadpool(ask, *arguments))

    return run

  async def _not_served(self, request: Request, error: Any) -> Response:
    return _error(
      errors.ApiError(
        error.status_code,
        f"{request.method} {request.url.path} is not served here; see"
        " /api/v1/openapi.json",
      )
    )

  # --- answers --------------------------------------------------------------

  def _curve_points(
    self, project: int, request: Request, selection: query_lib.CurvesQuery
  ) -> dict[str, Any]:
    training = _id(request)
    self._queries.one(project, "training", training)
    names = [name for name in selection.names.split(",") if name]
    chart = curves_lib.chart(
      self._curves.of(training),
      names[:200],
      selection.first,
      selection.last,
      selection.points,
    )
    return {**chart, "evals": self._pages.eval_points(training)}

  async def _events(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    selection = query_lib.EventsQuery.read(request.query_params)
    after = selection.after
    last = request.headers.get("last-event-id", "")
    if last:
      if not query_lib.is_id(last):
        raise errors.ApiError(
          400, f"Last-Event-ID={last[:30]!r}: give an event's id"
        )
      after = int(last)
    stream = await self._live.stream(who.project, selection.training_id, after)
    return responses.StreamingResponse(stream, media_type="text/event-stream")

  async def _openapi(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del request, who
    return _json(self.document)

  async def _health(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del request, who
    started = time.perf_counter()
    await concurrency.run_in_threadpool(self._queries.ready)
    if not self.writer.alive:
      raise errors.ApiError(503, "the writer has stopped; restart the server")
    return _json(
      {
        "status": "ok",
        "read_seconds": time.perf_counter() - started,
        "waiting_bytes": self.writer.waiting_bytes,
        "batches": self.writer.batches,
        "commits": self.writer.commits,
        "failed_commits": self.writer.failures,
      }
    )
