"""Serves the page on which a person plays: the screenshot, to be clicked.

It is served on the loopback interface, to clients with the key in the page's
address; requests that other sites make a browser send are refused.

Does not carry out two actions at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
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

_PAGE = pathlib.Path(__file__).with_name("page.html")
_MAX_BODY = 1 << 16


class Page:
  """The ASGI application around a `Session`.

  Attributes:
    key: that the address carries.
  """

  def __init__(
      self,
      session: session_lib.Session,
      next_task: Callable[[int], base.Task],
  ):
    """`next_task(n)` is the n-th task, from 0."""
    self._session = session
    self._next_task = next_task
    self._number = -1
    self._busy = asyncio.Lock()
    self.key = secrets.token_urlsafe(16)
    post = ["POST"]
    self.asgi = applications.Starlette(routes=[
        routing.Route("/", self._page, methods=["GET"]),
        routing.Route("/state", self._guarded(self._state), methods=post),
        routing.Route("/act", self._guarded(self._act), methods=post),
        routing.Route("/help", self._guarded(self._help), methods=post),
        routing.Route("/finish", self._guarded(self._finish), methods=post),
        routing.Route("/next", self._guarded(self._next), methods=post),
    ])

  async def _page(self, request: starlette_requests.Request) -> Any:
    del request  # The page itself holds nothing; the key is in its address.
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
      # A header of one's own cannot be sent by another site's form.
      given = request.headers.get("x-play-key", "")
      if not hmac.compare_digest(given.encode(), self.key.encode()):
        return _said(401, "open the address that was printed")
      try:
        body = b""
        async for part in request.stream():
          body += part
          if len(body) > _MAX_BODY:
            return _said(413, f"a request may have {_MAX_BODY} bytes")
        data = json.loads(body or b"{}")
        async with self._busy:
          if self._number < 0:
            await self._next({})
          await work(data)
          return responses.JSONResponse(self._describe())
      except wire.WireError as error:
        return _said(422, str(error))
      except (ValueError, RuntimeError, LookupError) as error:
        return _said(409, f"{type(error).__name__}: {error}")

    return run

  def _describe(self) -> dict[str, Any]:
    session = self._session
    verdict = session.evaluation
    return {
        "number": self._number,
        "task_id": session.task.task_id,
        "instruction": session.task.instruction,
        "text": session.seen.text,
        "screenshot": wire.screenshot_to_json(session.seen.screenshot),
        "actions": [a.to_json() for a in session.actions],
        "max_turns": session.task.max_turns,
        "recorded": session.recorded,
        "evaluation": None if verdict is None else {
            "score": float(verdict.score), "success": bool(verdict.success),
        },
    }  # pyformat: disable

  async def _state(self, data: Any) -> None:
    del data

  async def _next(self, data: Any) -> None:
    del data
    self._number += 1
    await self._session.start(self._next_task(self._number))

  async def _act(self, data: Any) -> None:
    height, width = self._session.seen.screenshot.shape[:2]
    await self._session.act(wire.action_from_json(data, width, height))

  async def _help(self, data: Any) -> None:
    """The oracle makes a move."""
    del data
    action = await self._session.next_right()
    if action is not None:
      await self._session.act(action)

  async def _finish(self, data: Any) -> None:
    del data
    await self._session.finish()


def _said(status: int, detail: str) -> responses.JSONResponse:
  return responses.JSONResponse({"detail": detail}, status)
