"""Serves the dashboard's pages.

Promises: a page is rendered from one or a few indexed queries, in a thread;
it carries a policy under which a browser runs and styles nothing but this
package's files; a missing or forbidden page is a page that names the reason and
the fix. Without a valid token there is the login page and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import time
from typing import Any, Awaitable, Callable, Mapping
from urllib import parse

import jinja2
import sqlalchemy as sa
from starlette import concurrency
from starlette import requests as starlette_requests
from starlette import responses
from starlette import routing

from training_monitor.dashboard import pages as pages_lib
from training_monitor.dashboard import pictures
from training_monitor.dashboard import text
from training_monitor.server import access as access_lib
from training_monitor.server import annotations as annotations_lib
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server import query as query_lib
from training_monitor.server import tags_and_baseline as tags_lib

_LOG = logging.getLogger(__name__)
_HERE = pathlib.Path(__file__).parent
_TYPES = {
  ".js": "text/javascript",
  ".css": "text/css",
  ".svg": "image/svg+xml",
  ".txt": "text/plain",
}
_MAX_FORM = 64 << 10
_COOKIE_S = 30 * 24 * 3600
_BOTH = ("GET", "POST")
_STYLES = ("site.css", "vendor/uplot.css")

CONTENT_SECURITY_POLICY = "; ".join(
  (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "form-action 'self'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
    # Only `live.js` may make elements of text, and only of our own pages.
    "require-trusted-types-for 'script'",
    "trusted-types monitor-page",
  )
)
"""No inline script or style, nothing from elsewhere, no frames."""

Request = starlette_requests.Request
Response = responses.Response


class Site:
  """See the module docstring; `routes` go into the application."""

  def __init__(
    self,
    access: access_lib.Access,
    pages: pages_lib.Pages,
    timings: Any,
    tags_and_baseline: tags_lib.TagsAndBaseline,
    annotations: annotations_lib.Annotations,
  ):
    """Args:

    access: checks tokens.
    pages: makes the pages.
    timings: records the seconds of each page.
    tags_and_baseline: changed by forms.
    annotations: changed by forms.
    """
    self._access = access
    self._tags_and_baseline = tags_and_baseline
    self._annotations = annotations
    self._pages = pages
    self._timings = timings
    self._files = _static_files()
    self._version = hashlib.sha256(
      b"".join(data for data, _ in self._files.values())
    ).hexdigest()[:12]
    self._templates = _environment()
    self._templates.globals["asset"] = lambda name: (
      f"/static/{self._version}/{name}"
    )
    self._templates.globals["styles"] = _STYLES

  def routes(self) -> list[routing.Route]:
    every_route = [
      routing.Route("/static/{version}/{name:path}", self._static),
      routing.Route("/login", self._login, methods=_BOTH),
      routing.Route("/logout", self._logout, methods=["POST"]),
      routing.Route("/favicon.ico", self._icon),
      # The address that other monitors give a run, with `project_id`.
      routing.Route("/{id:int}", self._run_of_id),
      routing.Route(
        "/runs/{id:int}/tags", self._form_of(self._tag), methods=_BOTH
      ),
      routing.Route(
        "/runs/{id:int}/pin", self._form_of(self._pin), methods=_BOTH
      ),
      routing.Route(
        "/rollouts/{id:int}/annotations",
        self._form_of(self._annotate, "/rollouts"),
        methods=_BOTH,
      ),
    ]
    for path, name in pages_lib.PATHS:
      every_route.append(routing.Route(path, self._page(name)))
    return every_route

  async def _run_of_id(self, request: Request) -> Response:
    return responses.RedirectResponse(f"/runs/{request.path_params['id']}", 303)

  # --- pages ----------------------------------------------------------------

  def _page(self, name: str) -> Callable[[Request], Awaitable[Response]]:
    make = getattr(self._pages, name)

    async def run(request: Request) -> Response:
      started = time.perf_counter()
      try:
        who = await self._access.checked(request.headers, "read")
        response = await concurrency.run_in_threadpool(
          self._made, make, who, request
        )
      except errors.ApiError as error:
        if error.status == 401:
          address = request.url.path
          if request.url.query:
            address += f"?{request.url.query}"
          return responses.RedirectResponse(
            f"/login?next={parse.quote(address)}", 303
          )
        response = self._failed(request, error.status, error.message)
      except sa.exc.SQLAlchemyError as error:
        _LOG.error("page %s failed: %s", name, error)
        response = self._failed(
          request, 503, "the database cannot be read now; try again soon"
        )
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("page %s failed", name)
        response = self._failed(request, 500, "the server failed; read its log")
      self._timings.note(f"page {name}", time.perf_counter() - started)
      return response

    return run

  def _made(
    self, make: Callable[..., Any], who: access_lib.Principal, request: Request
  ) -> Response:
    page_request = pages_lib.PageRequest(
      who.project,
      dict(request.path_params),
      request.query_params,
      request.url.path,
      "ingest" in who.scopes,
    )
    answer = make(page_request)
    if isinstance(answer, pages_lib.File):
      return Response(
        answer.data,
        media_type=answer.media_type,
        headers={
          "content-disposition": f'attachment; filename="{answer.name}"',
          **http_io.PRIVATE,
        },
      )
    if isinstance(answer, pages_lib.Redirect):
      return responses.RedirectResponse(answer.to, 303)
    return self._render(
      request, answer.template, answer.values, page_request=page_request
    )

  def _render(
    self,
    request: Request,
    template: str,
    values: Mapping[str, Any],
    status: int = 200,
    page_request: pages_lib.PageRequest | None = None,
  ) -> Response:
    theme = request.cookies.get("theme", "")
    html = self._templates.get_template(template).render(
      asks_for_tokens=self._access.asks_for_tokens,
      theme=theme if theme in ("dark", "light") else "",
      path=request.url.path,
      query=dict(request.query_params),
      link=pages_lib.Link(request.url.path, request.query_params),
      request=page_request,
      **values,
    )
    return responses.HTMLResponse(
      html,
      status_code=status,
      headers={
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
      },
    )

  def _failed(self, request: Request, status: int, message: str) -> Response:
    return self._render(
      request, "error.html", {"status": status, "message": message}, status
    )

  # --- forms ----------------------------------------------------------------

  def _form_of(
    self, change: Callable[..., Awaitable[None]], of: str = "/runs"
  ) -> Callable[[Request], Awaitable[Response]]:
    """Returns a form's handler, which redirects to the page in the form."""

    async def run(request: Request) -> Response:
      if request.method != "POST":
        return responses.RedirectResponse(
          f"{of}/{request.path_params['id']}", 303
        )
      try:
        who = await concurrency.run_in_threadpool(
          self._access.check, request.headers, "ingest", form=True
        )
        form = await _form(request)
        await change(who.project, http_io.id_of(request), form)
        target = _local(form.get("next", "/"))
        return responses.RedirectResponse(target, 303)
      except errors.ApiError as error:
        if error.status == 401:
          return responses.RedirectResponse("/login", 303)
        return self._failed(request, error.status, error.message)
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("the form %s failed", request.url.path)
        return self._failed(request, 500, "the server failed; read its log")

    return run

  async def _tag(
    self, project: int, training: int, form: Mapping[str, str]
  ) -> None:
    add = form.get("add", "").split(",")
    await self._tags_and_baseline.tag(
      project,
      training,
      [tag for tag in add if tag.strip()],
      [form["remove"]] if form.get("remove") else [],
    )

  async def _pin(
    self, project: int, training: int, form: Mapping[str, str]
  ) -> None:
    if form.get("pinned") not in ("0", "1"):
      raise errors.ApiError(400, "pinned: give 1 or 0")
    await self._tags_and_baseline.pin(project, training, form["pinned"] == "1")

  async def _annotate(
    self, project: int, rollout: int, form: Mapping[str, str]
  ) -> None:
    remove = form.get("remove")
    if remove:
      if not query_lib.is_id(remove):
        raise errors.ApiError(400, f"remove={remove[:30]!r}: give its id")
      await self._annotations.remove(project, rollout, int(remove))
      return
    body: dict[str, Any] = {
      name: form[name]
      for name in ("label", "note")
      if form.get(name, "").strip()
    }
    turn = form.get("turn", "")
    if turn:
      if not query_lib.is_id(turn):
        raise errors.ApiError(400, f"turn={turn[:30]!r}: give its number")
      body["turn"] = int(turn)
    await self._annotations.add(project, rollout, body)

  # --- login ----------------------------------------------------------------

  async def _login(self, request: Request) -> Response:
    target = _local(request.query_params.get("next", "/"))
    if not self._access.asks_for_tokens:
      return responses.RedirectResponse(target, 303)
    values = {"message": "", "target": target}
    if request.method != "POST":
      return self._render(request, "login.html", values)
    try:
      access_lib.check_same_site(request.headers)
      form = await _form(request)
      token = form.get("token", "").strip()
      if (
        not token
        or len(token) > 500
        or not token.isascii()
        or (set(token) & set(' ";,\\') or not token.isprintable())
      ):
        raise errors.ApiError(
          401, "give a token, as tunix-monitor token prints it"
        )
      await concurrency.run_in_threadpool(
        self._access.check, {"authorization": f"Bearer {token}"}, "read"
      )
    except errors.ApiError as error:
      values["message"] = error.message
      return self._render(request, "login.html", values, error.status)
    response = responses.RedirectResponse(target, 303)
    response.set_cookie(
      access_lib.COOKIE,
      token,
      max_age=_COOKIE_S,
      path="/",
      httponly=True,
      samesite="strict",
      secure=request.url.scheme == "https",
    )
    return response

  async def _logout(self, request: Request) -> Response:
    try:
      access_lib.check_same_site(request.headers)
    except errors.ApiError as error:
      return self._failed(request, error.status, error.message)
    response = responses.RedirectResponse("/login", 303)
    response.delete_cookie(
      access_lib.COOKIE, path="/", httponly=True, samesite="strict"
    )
    return response

  # --- files ----------------------------------------------------------------

  async def _static(self, request: Request) -> Response:
    file = self._files.get(request.path_params["name"])
    if file is None:
      return Response(status_code=404)
    data, media_type = file
    return Response(
      data,
      media_type=media_type,
      headers={
        # The address names the content.
        "cache-control": "public, max-age=31536000, immutable",
        "x-content-type-options": "nosniff",
      },
    )

  async def _icon(self, request: Request) -> Response:
    del request
    data, media_type = self._files["icon.svg"]
    return Response(data, media_type=media_type)


def _environment() -> jinja2.Environment:
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters.update(
      visible=text.visible, plain=text.plain, number=text.number,
      percent=text.percent, size=text.size, seconds=text.seconds,
      clock=text.clock, ago=text.ago, dump=text.dump,
  )  # fmt: skip
  environment.globals.update(
    plot=pictures.plot,
    sparkline=pictures.sparkline,
    interval=pictures.interval,
    signed_bar=pictures.signed_bar,
    overlay=pictures.overlay,
  )
  return environment


def _static_files() -> dict[str, tuple[bytes, str]]:
  folder = _HERE / "static"
  return {
    path.relative_to(folder).as_posix(): (
      path.read_bytes(),
      _TYPES[path.suffix],
    )
    for path in sorted(folder.rglob("*"))
    if path.suffix in _TYPES
  }


def _local(target: str) -> str:
  """Returns the path if it is on this server, else "/"."""
  if not target.startswith("/") or target.startswith(("//", "/\\")):
    return "/"
  if not target.isprintable() or not target.isascii():
    return "/"
  return target


async def _form(request: Request) -> dict[str, str]:
  """Returns the fields of a form.

  Raises:
    ApiError: 408, 413, 415; 400, more fields than any form has.
  """
  body = await http_io.read_body(request, _MAX_FORM)
  try:
    return dict(
      parse.parse_qsl(
        body.decode("utf-8", "replace"),
        keep_blank_values=True,
        max_num_fields=20,
      )
    )
  except ValueError:
    raise errors.ApiError(400, "a form has at most 20 fields") from None
