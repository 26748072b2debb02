"""Serves the page on which a person plays: a screenshot to click and type on.

Promises: only requests with the key of the page's address are answered, so
another site's page cannot act; actions run one at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import pathlib
import secrets
from typing import Any, Awaitable, Callable

from starlette import applications
from starlette import requests as starlette_requests
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.play import session as session_lib
from tunix.rl.multi_turn.net import json_answers
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.net import request_bodies

_PAGE = pathlib.Path(__file__).with_name("page.html")
_MAX_BODY = 1 << 16


class Page:
  """The application around a `Session`.

  Attributes:
    asgi: the ASGI application.
    key: secret part of the page's address.
  """

  def __init__(
    self, session: session_lib.Session, next_task: Callable[[int], base.Task]
  ):
    """`next_task(n)` is the n-th task, from 0."""
    self._session = session
    self._next_task = next_task
    self._number = -1
    self._busy = asyncio.Lock()
    self.key = secrets.token_urlsafe(16)
    post = ["POST"]
    self.asgi = applications.Starlette(
      routes=[
        routing.Route("/", self._page, methods=["GET"]),
        routing.Route("/state", self._guarded(self._state), methods=post),
        routing.Route("/act", self._guarded(self._act), methods=post),
        routing.Route("/help", self._guarded(self._help), methods=post),
        routing.Route("/finish", self._guarded(self._finish), methods=post),
        routing.Route("/next", self._guarded(self._next), methods=post),
      ]
    )

  async def _page(self, request: starlette_requests.Request) -> Any:
    del request  # The page holds no secret; the key is in its address.
    return responses.HTMLResponse(
      _PAGE.read_text(encoding="utf-8"),
      headers={
        "content-security-policy": (
          "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
          " script-src 'unsafe-inline'; connect-src 'self'"
        ),
        "referrer-policy": "no-referrer",
      },
    )

  def _guarded(self, work: Callable[[Any], Awaitable[None]]) -> Any:

    async def run(request: starlette_requests.Request) -> Any:
      # Another site's form cannot send a custom header.
      key = request.headers.get("x-play-key", "")
      if not hmac.compare_digest(key.encode(), self.key.encode()):
        return _error(401, "open the address that the command printed")
      try:
        body = await request_bodies.read(request, _MAX_BODY)
        data = json_models.parse(body or b"{}")
        async with self._busy:
          if self._number < 0:
            await self._next({})
          await work(data)
          return json_answers.Json(self._describe())
      except request_bodies.BodyRefused as error:
        return _error(error.status, error.message)
      except wire.WireError as error:
        return _error(422, str(error))
      except (ValueError, RuntimeError, LookupError) as error:
        return _error(409, f"{type(error).__name__}: {error}")

    return run

  def _describe(self) -> dict[str, Any]:
    session = self._session
    verdict = session.evaluation
    return {
      "number": self._number,
      "task_id": session.task.task_id,
      "instruction": session.task.instruction,
      "text": session.seen.text,
      "screenshot": wire.screenshot_to_json(session.seen.pixels),
      "actions": [a.to_json() for a in session.actions],
      "max_turns": session.task.max_turns,
      "recorded": session.recorded,
      "evaluation": None
      if verdict is None
      else {"score": float(verdict.score), "success": bool(verdict.success)},
    }

  async def _state(self, data: object) -> None:
    del data

  async def _next(self, data: object) -> None:
    del data
    self._number += 1
    await self._session.start(self._next_task(self._number))

  async def _act(self, data: object) -> None:
    width, height = self._session.seen.size
    await self._session.act(wire.action_from_json(data, width, height))

  async def _help(self, data: object) -> None:
    """Carries out the oracle's next action."""
    del data
    action = await self._session.next_right()
    if action is not None:
      await self._session.act(action)

  async def _finish(self, data: object) -> None:
    del data
    await self._session.finish()


def _error(status: int, detail: str) -> json_answers.Json:
  return json_answers.Json({"detail": detail}, status)
