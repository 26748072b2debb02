"""The server's HTTP side: routes, authorization, streams, metrics.

    /v1/chat/completions                 a request of its own
    /sessions/{id}/v1/chat/completions   a turn of a trajectory
    /v1/models, /health, /metrics
    /rl/start_session, /sessions/{id}/rl/…, /export_trajectories
                                         sessions, as AReaL calls them

A session is named by its path, or by its key in place of the token
(`Authorization: Bearer <key>`), whichever a client can be told.

Promises: errors have OpenAI's shape, whatever failed; a client that goes away
ends its sampling; `/health` is 503 when nothing can be sampled any more.

Does not decide what is sampled (see `service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from typing import Any, AsyncIterator, Awaitable, Callable

import numpy as np
import prometheus_client
from starlette import applications
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses
from starlette import routing
from tunix.rl.multi_turn.rollout import interactions
from tunix.rl.multi_turn.rollout.server import errors
from tunix.rl.multi_turn.rollout.server import requests
from tunix.rl.multi_turn.rollout.server import responses
from tunix.rl.multi_turn.rollout.server import service as service_lib

_LOG = logging.getLogger(__name__)
_KEEP_ALIVE_S = 10.0
_SWEEP_S = 5.0

Request = starlette_requests.Request
Response = starlette_responses.Response
Handler = Callable[[Request], Awaitable[Response]]


class App:
  """The ASGI application of a `Service`; `asgi` is what a server runs."""

  def __init__(
      self,
      service: service_lib.Service,
      *,
      limits: requests.Limits = requests.Limits(),
      token: str = "",
      stats: Callable[[], dict[str, float]] | None = None,
  ):
    """Args:

      service: answers.
      limits: of a request.
      token: what clients must present; "" asks for none.
      stats: gauges for `/metrics`.
    """
    self._service = service
    self._limits = limits
    self._token = token
    self._stats = stats or (lambda: {})
    self._metrics = prometheus_client.CollectorRegistry()
    self._requests = prometheus_client.Counter(
        "rollout_requests", "Answered requests.", ("route", "status"),
        registry=self._metrics,
    )  # pyformat: disable
    self._seconds = prometheus_client.Histogram(
        "rollout_request_seconds", "From request to answer.", ("route",),
        registry=self._metrics,
        buckets=(.01, .03, .1, .3, 1, 3, 10, 30, 100, 300),
    )  # pyformat: disable
    self._tokens = prometheus_client.Counter(
        "rollout_tokens", "Tokens of prompts and completions.", ("kind",),
        registry=self._metrics,
    )  # pyformat: disable
    post, get = ["POST"], ["GET"]
    routes = [
        ("/v1/chat/completions", self._chat, post),
        ("/v1/models", self._models, get),
        ("/health", self._health, get),
        ("/metrics", self._show_metrics, get),
        ("/rl/start_session", self._start_session, post),
        ("/export_trajectories", self._export, post),
    ]
    for prefix in ("/sessions/{session}", "/{session}"):
      routes += [
          (f"{prefix}/v1/chat/completions", self._chat, post),
          (f"{prefix}/chat/completions", self._chat, post),
          (f"{prefix}/v1/models", self._models, get),
          (f"{prefix}/rl/set_reward", self._set_reward, post),
          (f"{prefix}/rl/end_session", self._end_session, post),
      ]
    self.asgi = applications.Starlette(
        routes=[
            routing.Route(path, self._guarded(path, handler), methods=methods)
            for path, handler, methods in routes
        ],
        exception_handlers={
            404: self._not_found,
            405: self._not_found,
        },
        lifespan=self._lifespan,
    )

  # --- around every request ---------------------------------------------------

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: Any) -> AsyncIterator[None]:
    del app
    sweeping = asyncio.create_task(self._sweep())
    try:
      yield
    finally:
      sweeping.cancel()
      await asyncio.gather(sweeping, return_exceptions=True)

  async def _sweep(self) -> None:
    while True:
      await asyncio.sleep(_SWEEP_S)
      for session in self._service.store.sweep():
        try:
          await self._service.forget(session)
        except Exception:  # pylint: disable=broad-except
          _LOG.exception("session %s was not freed", session)

  def _guarded(self, route: str, handler: Handler) -> Handler:
    """Authorizes, counts, and gives every failure OpenAI's shape."""

    async def run(request: Request) -> Response:
      started = time.monotonic()
      try:
        self._authorize(request, route)
        response = await handler(request)
      except errors.ApiError as error:
        response = _error(error)
      except asyncio.CancelledError:
        raise
      except starlette_requests.ClientDisconnect:
        response = _error(_gone())
      except Exception as error:  # pylint: disable=broad-except
        response = _error(_as_api(error, route))
      self._requests.labels(route, response.status_code).inc()
      self._seconds.labels(route).observe(time.monotonic() - started)
      return response

    return run

  def _authorize(self, request: Request, route: str) -> None:
    """Finds the session that the request belongs to, if it names one."""
    request.state.session = None
    presented = request.headers.get("authorization", "")
    presented = presented.removeprefix("Bearer ").strip()
    by_key = self._service.by_key(presented) if presented else None
    trusted = not self._token or hmac.compare_digest(
        presented.encode("latin-1", "replace"), self._token.encode()
    )
    if by_key is None and presented.startswith(interactions.KEY_PREFIX):
      # Answered without its session, the request would be lost to training.
      if not self._token or presented != self._token:
        raise errors.ApiError(
            401, "no session has this key any more", code="unknown_session"
        )
    # The route, not the URL: that is made of what the client says of itself.
    if not trusted and by_key is None and route != "/health":
      raise errors.ApiError(
          401,
          "give the server's token, or a session's key, as Authorization:"
          " Bearer",
          code="invalid_api_key",
      )
    # A key opens its own session and nothing else.
    request.state.only = None if by_key is None else by_key.id
    named = request.path_params.get("session")
    if named is not None:
      self._check_own(request, named)
      request.state.session = self._service.session(named)
    else:
      request.state.session = by_key

  def _check_own(self, request: Request, session: str | None) -> None:
    """Refuses a session's key where another session is meant, or none is."""
    if request.state.only not in (None, session):
      raise errors.ApiError(
          403,
          "a session's key is for that session alone; use the server's token",
          code="wrong_session",
      )

  async def _not_found(self, request: Request, error: Any) -> Response:
    return _error(
        errors.ApiError(
            error.status_code,
            f"{request.method} {request.url.path} is not served here",
            code="not_found",
        )
    )

  # --- completions ------------------------------------------------------------

  async def _chat(self, request: Request) -> Response:
    body = await _body(request, self._limits)
    asked = requests.chat(requests.read_json(body, self._limits), self._limits)
    if asked.stream:
      return await self._stream(request, asked, body)
    answer = await _unless_gone(
        request,
        self._service.complete(
            asked, session=request.state.session, body=body
        ),
    )
    self._count(answer)
    return starlette_responses.JSONResponse(
        responses.whole(
            answer,
            self._service.policy.renderer.decode,
            logprobs=asked.logprobs,
            token_ids=asked.return_token_ids,
        )
    )

  async def _stream(
      self, request: Request, asked: requests.ChatRequest, body: bytes
  ) -> Response:
    """Server-sent events; text comes as it is sampled, tool calls at the end.

    A request that is refused is refused with a status: the stream begins with
    the first token, or with the end of it all.
    """
    decode = self._service.policy.renderer.decode
    news: asyncio.Queue[tuple[int, np.ndarray] | None] = asyncio.Queue()
    id_ = service_lib.new_id()
    task = asyncio.ensure_future(
        self._service.complete(
            asked,
            session=request.state.session,
            body=body,
            on_tokens=lambda i, tokens: news.put_nowait((i, tokens)),
            answer_id=id_,
        )
    )
    task.add_done_callback(lambda _: news.put_nowait(None))
    try:
      first = await _unless_gone(request, news.get())
    except BaseException:
      task.cancel()
      raise
    if first is None:
      id_ = task.result().id  # Or raises what the client is to be told.

    async def events() -> AsyncIterator[bytes]:
      created = int(time.time())
      model = asked.model
      # Which text is a call's is known when all of it is there.
      texts = [responses.TextStream(decode) for _ in range(asked.n)]
      item = first
      try:
        for i in range(asked.n):
          yield _event(
              responses.chunk(
                  id_, created, model, i, {"role": "assistant", "content": ""}
              )
          )
        while item is not None:
          i, tokens = item
          if not asked.parse_tools and (new := texts[i].feed(tokens)):
            yield _event(
                responses.chunk(id_, created, model, i, {"content": new})
            )
          try:
            item = await asyncio.wait_for(news.get(), _KEEP_ALIVE_S)
          except asyncio.TimeoutError:
            yield b": still sampling\n\n"
            item = (0, np.zeros(0, np.int32))
        try:
          answer = task.result()
        except Exception as error:  # pylint: disable=broad-except
          yield _event(_as_api(error, "a stream").body())
          return
        self._count(answer)
        for i, choice in enumerate(answer.choices):
          for delta in responses.last_deltas(choice, texts[i]):
            yield _event(responses.chunk(id_, created, model, i, delta))
          extra: dict[str, Any] = {
              "policy_versions": responses.version_spans(
                  choice.completion.versions
              ),
              "interaction_id": responses.interaction_id(answer.id, i),
          }
          if asked.logprobs:
            extra["logprobs"] = responses.logprobs_of(choice.completion, decode)
          if asked.return_token_ids:
            extra["token_ids"] = choice.completion.tokens.tolist()
          event = responses.chunk(
              id_, created, model, i, {}, choice.finish_reason, **extra
          )
          if asked.return_token_ids:
            event["prompt_token_ids"] = answer.prompt_tokens.tolist()
          yield _event(event)
        if asked.include_usage:
          last = responses.chunk(id_, created, model, 0, {})
          yield _event(
              last | {"choices": [], "usage": responses.usage(answer)}
          )
        yield b"data: [DONE]\n\n"
      finally:
        task.cancel()  # A client that has gone; else it is done.

    return starlette_responses.StreamingResponse(
        events(),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache"},
    )

  def _count(self, answer: responses.Answer) -> None:
    self._tokens.labels("prompt").inc(len(answer.prompt_tokens))
    self._tokens.labels("reused").inc(answer.reused_tokens)
    self._tokens.labels("sampled").inc(
        sum(len(c.completion.tokens) for c in answer.choices)
    )

  # --- about the server -------------------------------------------------------

  async def _models(self, request: Request) -> Response:
    del request
    policy = self._service.policy
    return starlette_responses.JSONResponse({
        "object": "list",
        "data": [{
            "id": policy.name,
            "object": "model",
            "created": 0,
            "owned_by": "tunix",
            "max_model_len": policy.context_length,
        }],
    })

  async def _health(self, request: Request) -> Response:
    del request
    healthy = self._service.policy.healthy()
    return starlette_responses.JSONResponse(
        {"status": "ok" if healthy else "the rollout engine has failed"},
        200 if healthy else 503,
    )

  async def _show_metrics(self, request: Request) -> Response:
    del request
    lines = [prometheus_client.generate_latest(self._metrics).decode()]
    for name, value in sorted(self._stats().items()):
      lines.append(
          f"# TYPE rollout_engine_{name} gauge\nrollout_engine_{name} {value}\n"
      )
    lines.append(
        "# TYPE rollout_running gauge\n"
        f"rollout_running {self._service.running}\n"
    )
    return Response(
        "".join(lines), media_type=prometheus_client.CONTENT_TYPE_LATEST
    )

  # --- sessions ---------------------------------------------------------------

  async def _start_session(self, request: Request) -> Response:
    self._check_own(request, None)
    body = await self._object(request)
    session = self._service.start(str(body.get("task_id") or ""))
    base = str(request.base_url).rstrip("/")
    return starlette_responses.JSONResponse({
        "session_id": session.id,
        "api_key": session.key,
        "base_url": f"{base}/sessions/{session.id}/v1",
    })

  async def _set_reward(self, request: Request) -> Response:
    body = await self._object(request)
    reward = body.get("reward")
    if not isinstance(reward, (int, float)) or isinstance(reward, bool) or (
        not abs(reward) < 1e30
    ):
      raise errors.invalid("reward", f"reward must be a number, got {reward!r}")
    name = body.get("interaction_id")
    if name is not None and not isinstance(name, str):
      raise errors.invalid("interaction_id", "interaction_id must be a string")
    with _told():
      request.state.session.set_reward(name, float(reward))
    return starlette_responses.JSONResponse({"message": "success"})

  async def _end_session(self, request: Request) -> Response:
    session = request.state.session
    with _told():
      session.end()
    await self._service.forget(session.id)
    return starlette_responses.JSONResponse({"message": "success"})

  async def _export(self, request: Request) -> Response:
    body = await self._object(request)
    name = body.get("session_id")
    if not isinstance(name, str):
      raise errors.invalid("session_id", "session_id must be a string")
    self._check_own(request, name)
    session = self._service.session(name)
    style = body.get("style", "individual")
    if style not in ("individual", "concat"):
      raise errors.invalid(
          "style", f"style must be individual or concat, got {style!r}"
      )
    discount = body.get("discount", 1.0)
    if not isinstance(discount, (int, float)) or not 0 <= discount <= 1:
      raise errors.invalid(
          "discount", f"discount must be a number in [0, 1], got {discount!r}"
      )
    with _told():
      found = session.export(style, discount=float(discount))
    answer = starlette_responses.JSONResponse({
        "interactions": {
            one.id: {
                "interaction_id": one.id,
                "reward": one.reward,
                "tensor_dict": _tensors(one),
                "turn_ids": one.sequence.turn_ids.tolist(),
                "images": [
                    {
                        "sha256": span.image.sha256,
                        "width": span.image.width,
                        "height": span.image.height,
                        "offset": span.offset,
                        "num_tokens": span.num_tokens,
                    }
                    for span in one.sequence.images
                ],
            }
            for one in found
        }
    })
    if body.get("drop") is True:
      await self._service.drop(name)
    return answer

  async def _object(self, request: Request) -> dict[str, Any]:
    body = await _body(request, self._limits)
    return requests.read_json(body or b"{}", self._limits)


# --- pieces -------------------------------------------------------------------


@contextlib.contextmanager
def _told():
  """A session's refusal becomes the answer."""
  try:
    yield
  except interactions.InteractionError as error:
    raise service_lib.of_interaction(error) from None


def _tensors(found: interactions.Exported) -> dict[str, Any]:
  """AReaL's arrays as lists; images are told by reference, beside them."""
  row = interactions.to_tensor_dict(found, lambda spans: {})
  return {k: v.tolist() for k, v in row.items() if isinstance(v, np.ndarray)}


async def _body(request: Request, limits: requests.Limits) -> bytes:
  """The body, cut off where it grows too large."""
  parts, size = [], 0
  async for part in request.stream():
    parts.append(part)
    size += len(part)
    if size > limits.body_bytes:
      break  # What there is says enough.
  return b"".join(parts)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
  """`work`, cancelled when the client goes away."""
  task = asyncio.ensure_future(work)

  async def gone() -> None:
    # The body was read: what comes now is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
      pass

  watch = asyncio.ensure_future(gone())
  try:
    await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise _gone()
    return task.result()
  finally:
    for pending in (task, watch):
      pending.cancel()
    await asyncio.gather(task, watch, return_exceptions=True)


def _gone() -> errors.ApiError:
  return errors.ApiError(499, "the client went away", code="cancelled")


def _as_api(error: Exception, where: str) -> errors.ApiError:
  """What the client is told of any failure."""
  if isinstance(error, errors.ApiError):
    return error
  _LOG.error("%s failed", where, exc_info=error)
  return errors.ApiError(
      500,
      f"the server failed: {type(error).__name__}: {error}",
      code="internal_error",
  )


def _error(error: errors.ApiError) -> Response:
  return starlette_responses.JSONResponse(
      error.body(), error.status, headers=error.headers()
  )


def _event(data: dict[str, Any]) -> bytes:
  return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
