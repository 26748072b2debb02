"""Serves a `Service` over HTTP: routes, authorization, streams, metrics.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
                                         a request of its own
    /v1/responses/{id}                   a response that is still kept
    /sessions/{id}/v1/…                  the same as a turn of a trajectory
    /v1/models, /v1/models/{id}, /health, /metrics, /openapi.json
    /rl/start_session, /sessions/{id}/rl/…, /export_trajectories,
    /grant_capacity                      sessions, with AReaL's calls

A request names its session by the path, or by the session's key in place of the
token (`Authorization: Bearer <key>`, or `x-api-key: <key>`) or of the session's
id (`/sessions/<key>/v1/…`), whichever the client can be configured with.

Promises: every answer has an `x-request-id`, the client's own if it sent one;
`x-ignored-fields` lists the fields that were accepted and change no sample;
every failure is answered in OpenAI's shape; a client that disconnects
ends its sampling; `/health` is 503 once the engine cannot sample any more;
a web page's request is refused, and without a token every request to another
host name than the loopback interface's, so that a page in a browser of this
machine cannot send any.

Does not sample (see `service`), or know the endpoints' bodies (see `chat`,
`completions` and `responses`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import Any, Callable

from cua_gyms import applications
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import request_bodies

from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import openapi
from agent_services.serving import requests
from agent_services.serving import service as service_lib
from agent_services.serving.endpoints import chat
from agent_services.serving.endpoints import completions
from agent_services.serving.endpoints import counting
from agent_services.serving.endpoints import messages
from agent_services.serving.endpoints import responses
from agent_services.serving.endpoints import session_routes
from agent_services.serving.endpoints import streams
from agent_services.serving.sessions import session_store

_LOG = logging.getLogger(__name__)
_INLINE = 1 << 16
"""Larger bodies are read in a thread."""

Request = applications.Request
Response = applications.Response
Handler = applications.Handler

ENDPOINTS = (
  chat.ENDPOINT,
  completions.ENDPOINT,
  responses.ENDPOINT,
  messages.ENDPOINT,
)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class OpenAIApp(applications.Application):
  """The ASGI application of a `Service`, in the attribute `asgi`.

  Attributes:
    service: Service that answers the requests.
  """

  def __init__(
    self,
    service: service_lib.Service,
    *,
    token: str = "",
    stats: Callable[[], dict[str, float]] | None = None,
    export_arrays: str = "lists",
  ):
    """Args:

    service: Service that answers requests.
    token: Token that clients must present; "" requires none.
    stats: Returns gauges for `/metrics`.
    export_arrays: One of `session_routes.ARRAYS`.
    """
    self.service = self._service = service
    self._limits = service.limits
    self._token = token
    self._stats = stats or (lambda: {})
    self._metrics = applications.Metrics(
      "rollout", (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
    )
    self._sessions = session_routes.SessionRoutes(
      service, self._object, self._check_own, export_arrays
    )
    post, get = applications.POST, applications.GET
    endpoints: list[applications.Route] = [
      *((api.path, self._answering(api), post) for api in ENDPOINTS),
      *((c.path, self._counting(c), post) for c in counting.ENDPOINTS),
      ("models", self._models, get),
      ("models/{model:path}", self._one_model, get),
      ("responses/{response}", self._kept_response, get),
    ]
    routes = [(f"/v1/{path}", run, how) for path, run, how in endpoints]
    routes += [
      ("/health", self._health, get),
      ("/metrics", self._show_metrics, get),
      ("/openapi.json", self._openapi, get),
      ("/rl/start_session", self._sessions.start, post),
      ("/export_trajectories", self._sessions.export, post),
      ("/grant_capacity", self._sessions.grant_capacity, post),
      # AReaL's clients name a session by its key alone, and no version.
      ("/rl/set_reward", self._sessions.set_reward, post),
      ("/rl/end_session", self._sessions.end, post),
      *((f"/{api[0]}", *api[1:]) for api in endpoints if api[2] is post),
    ]
    for prefix in ("/sessions/{session}", "/{session}"):
      for path, run, how in endpoints:
        routes += [
          (f"{prefix}/v1/{path}", run, how),
          (f"{prefix}/{path}", run, how),
        ]
      routes += [
        (f"{prefix}/rl/set_reward", self._sessions.set_reward, post),
        (f"{prefix}/rl/end_session", self._sessions.end, post),
      ]
    self._serve(routes)

  # --- around every request ---------------------------------------------------

  async def _close(self) -> None:
    self._sessions.close()

  async def _sweep(self) -> None:
    for session in self._service.store.sweep():
      try:
        await self._service.forget(session)
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("session %s was not freed", session)

  def _failed(self, route: str, error: Exception) -> Response:
    """Answers failures in OpenAI's shape."""
    if isinstance(error, starlette_requests.ClientDisconnect):
      error = _gone()
    return _error(_as_api(error, route))

  def _done(
    self, route: str, request: Request, response: Response, seconds: float
  ) -> None:
    client_id = request.headers.get("x-request-id", "")
    is_valid = _REQUEST_ID.fullmatch(client_id)
    response.headers["x-request-id"] = (
      client_id if is_valid else f"req_{secrets.token_hex(12)}"
    )
    self._metrics.count(route, response, seconds)

  def _authorize(self, request: Request, route: str) -> None:
    """Finds the session that the request belongs to, if it names one."""
    request.state.session = None
    problem = http_server.cross_site(request.headers, bool(self._token))
    if problem:
      raise errors.ApiError(403, problem, code="cross_site")
    presented = http_server.bearer_of(request.headers)
    presented = presented or request.headers.get("x-api-key", "")
    named = request.path_params.get("session")
    in_path = named is not None and named.startswith(session_store.KEY_PREFIX)
    if in_path:  # Of a client that can be given an address, but no key.
      presented = str(named)
    by_key = self._service.by_key(presented) if presented else None
    trusted = not self._token or http_server.is_token(presented, self._token)
    if by_key is None and presented.startswith(session_store.KEY_PREFIX):
      # Without its session, the request would be lost to training.
      if not self._token or presented != self._token:
        raise errors.ApiError(
          401,
          "no session has this key any more; start another one",
          code="unknown_session",
        )
    # The route, not the URL, which contains the client's Host header.
    if not trusted and by_key is None and route != "/health":
      raise errors.ApiError(
        401,
        "give the server's token, or a session's key, as Authorization: Bearer",
        code="invalid_api_key",
      )
    # A key opens its own session and nothing else.
    request.state.only = None if by_key is None else by_key.id
    if named is not None and not in_path:
      self._check_own(request, named)
      request.state.session = self._service.session(named)
    else:
      request.state.session = by_key

  def _check_own(self, request: Request, session: str | None) -> None:
    """Refuses a session's key for another session, or for none."""
    if request.state.only not in (None, session):
      raise errors.ApiError(
        403,
        "a session's key opens that session only; use the server's token",
        code="wrong_session",
      )

  async def _not_served(self, request: Request, error: Any) -> Response:
    return _error(
      errors.ApiError(
        error.status_code,
        f"{request.method} {request.url.path} is not served here",
        code="not_found",
      )
    )

  # --- completions ------------------------------------------------------------

  async def _checked(self, read: Callable[..., Any], body: bytes) -> Any:
    """Returns what an endpoint's `read` makes of a body.

    A large one may hold thousands of parts. It is read in a thread, so that
    other requests are answered meanwhile.
    """

    def checked() -> Any:
      fields = bodies.read_json(
        body, self._limits.body_bytes, self._limits.values
      )
      return read(fields, self._limits)

    if len(body) <= _INLINE:
      return checked()
    return await asyncio.to_thread(checked)

  def _answering(self, api: streams.Endpoint) -> Handler:
    """Returns the handler of an endpoint that samples."""

    async def run(request: Request) -> Response:
      self._service.check_room(request.state.session)
      body = await request_bodies.read(request, self._limits.body_bytes)
      sampling_request = await self._checked(api.read, body)
      key = ""
      if request.state.session is not None:
        # The same body asks another endpoint for something else.
        key = await service_lib.key_of(api.prefix, body)
      del body
      if sampling_request.stream:
        return await self._stream(request, api, sampling_request, key)
      answer = await http_server.unless_gone(
        request,
        self._service.complete(
          sampling_request,
          session=request.state.session,
          key=key,
          answer_id=service_lib.new_id(api.prefix),
        ),
      )
      return _json(
        api.to_json(sampling_request, answer, self._service.policy.decoder),
        headers=self._ignored(sampling_request),
      )

    return run

  def _counting(self, api: counting.Endpoint) -> Handler:
    """Returns the handler of an endpoint that renders and samples nothing."""

    async def run(request: Request) -> Response:
      session = request.state.session
      self._service.check_room(session)
      body = await request_bodies.read(request, self._limits.body_bytes)
      fields = await self._checked(api.read, body or b"{}")
      prompt = await self._service.render(fields, session)
      context = self._service.policy.context_length
      return _json(api.to_json(prompt, context), headers=self._ignored(fields))

    return run

  async def _stream(
    self,
    request: Request,
    api: streams.Endpoint,
    sampling_request: requests.SamplingRequest,
    key: str,
  ) -> Response:
    """Answers in server-sent events: text while it is sampled, tool calls last.

    A refused request gets an HTTP status: the stream begins with the first
    token, or with the first keep-alive.
    """
    news: streams.News = asyncio.Queue()
    session = request.state.session
    id_ = service_lib.new_id(api.prefix)
    task = asyncio.ensure_future(
      self._service.complete(
        sampling_request,
        session=session,
        key=key,
        on_tokens=lambda i, tokens: news.put_nowait((i, tokens)),
        answer_id=id_,
      )
    )
    task.add_done_callback(lambda _: news.put_nowait(None))
    try:
      first = await http_server.unless_gone(
        request, asyncio.wait_for(news.get(), streams.KEEP_ALIVE_S)
      )
    except asyncio.TimeoutError:
      first = streams.NOTHING
    except BaseException:
      task.cancel()
      raise
    if first is None:
      task.result()  # Or raises the client's error.
    # Only now: one of two equal requests may repeat the other.
    id_ = self._service.known_id(session, key) or id_
    writer = api.stream(
      sampling_request, id_, int(time.time()), self._service.policy.decoder
    )
    return starlette_responses.StreamingResponse(
      streams.write(
        writer, task, news, first, lambda error: _as_api(error, "a stream")
      ),
      media_type="text/event-stream",
      headers={"cache-control": "no-cache", **self._ignored(sampling_request)},
    )

  def _ignored(self, request: requests.SamplingRequest) -> dict[str, str]:
    """Returns the header that names fields which change nothing."""
    if not request.ignored:
      return {}
    return {"x-ignored-fields": ", ".join(request.ignored)}

  # --- about the server -------------------------------------------------------

  def _model(self) -> dict[str, Any]:
    policy = self._service.policy
    return {
      "id": policy.name,
      "object": "model",
      "created": 0,
      "owned_by": "tunix",
      "max_model_len": policy.context_length,
    }

  async def _models(self, request: Request) -> Response:
    del request
    return _json({"object": "list", "data": [self._model()]})

  async def _one_model(self, request: Request) -> Response:
    self._service.check_model(request.path_params["model"])
    return _json(self._model())

  async def _kept_response(self, request: Request) -> Response:
    session = request.state.session
    sampling_request, answer = self._service.conversations.answer(
      request.path_params["response"], session.id if session else None
    )
    return _json(
      responses.whole(sampling_request, answer, self._service.policy.decoder)
    )

  async def _openapi(self, request: Request) -> Response:
    del request
    return _json(openapi.document(ENDPOINTS, self._limits))

  async def _health(self, request: Request) -> Response:
    del request
    healthy = self._service.policy.healthy()
    return starlette_responses.JSONResponse(
      {"status": "ok" if healthy else "the rollout engine has failed"},
      200 if healthy else 503,
    )

  async def _show_metrics(self, request: Request) -> Response:
    del request
    lines = [
      "# HELP rollout_tokens Tokens of prompts and completions.\n"
      "# TYPE rollout_tokens counter\n"
    ]
    for kind, count in self._service.tokens.items():
      lines.append(f'rollout_tokens_total{{kind="{kind}"}} {count}\n')
    for name, value in sorted(self._stats().items()):
      lines.append(
        f"# TYPE rollout_engine_{name} gauge\nrollout_engine_{name} {value}\n"
      )
    lines.append(
      f"# TYPE rollout_running gauge\nrollout_running {self._service.running}\n"
    )
    return self._metrics.page(lines)

  async def _object(self, request: Request) -> dict[str, Any]:
    body = await request_bodies.read(request, self._limits.body_bytes)
    return bodies.read_json(
      body or b"{}", self._limits.body_bytes, self._limits.values
    )


# --- pieces -------------------------------------------------------------------


def _gone() -> errors.ApiError:
  return errors.ApiError(499, "the client went away", code="cancelled")


def _as_api(error: Exception, where: str) -> errors.ApiError:
  """Returns the client's error for any failure."""
  if isinstance(error, errors.ApiError):
    return error
  if isinstance(error, request_bodies.BodyRefused):
    return errors.ApiError(
      error.status,
      error.message,
      code="request_too_large" if error.status == 413 else error.code,
      retry_after_s=error.retry_after_s,
    )
  _LOG.error("%s failed", where, exc_info=error)
  return errors.ApiError(
    500,
    f"the server failed: {type(error).__name__}: {error}",
    code="internal_error",
  )


def _error(error: errors.ApiError) -> Response:
  return _json(error.body(), error.status, error.headers())


def _json(
  content: dict[str, Any],
  status: int = 200,
  headers: dict[str, str] | None = None,
) -> Response:
  return Response(
    bodies.write_json(content), status, headers, media_type="application/json"
  )
