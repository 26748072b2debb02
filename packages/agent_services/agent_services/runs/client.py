"""Calls a run service: starts runs, and follows them to their end.

Any service of the protocol will do, whichever of its wrapped and bare forms it
answers in. `follow` yields a run's events, each once, until the run has ended.

Promises: every call has a deadline, and so has the whole of `follow`, also
where a poll hangs or an answer drips; a start is sent once, a poll again after
a failure that may pass; 404 for events or steps means none yet; an answer that
is none of the protocol's raises `RunServiceError` with its beginning.

A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from typing import Any, AsyncIterator, Mapping
import urllib.parse

import tenacity
from tunix.rl.multi_turn.net import http

_LOG = logging.getLogger(__name__)
DEFAULT_BASE_URL = "http://127.0.0.1:3000"
TERMINAL = ("completed", "failed")
_MAX_ANSWER = 64 << 20
_LATE_S = 1.0  # In which a run's last events may come after its end.
_CANCEL_S = 5.0


class RunServiceError(http.CallError):
  """The service cannot be reached, or answers with none of the protocol."""


class RunTimeout(RunServiceError):
  """The run did not end within its deadline."""


def _passes(error: BaseException) -> bool:
  """Whether the same poll may succeed later."""
  return isinstance(error, RunServiceError) and (
    error.answer is None or error.status >= 500
  )


_POLLS = http.RetryPolicy(
  5, tenacity.wait_fixed(0.5), tenacity.retry_if_exception(_passes)
)
_STARTS = http.RetryPolicy(wait=tenacity.wait_fixed(1.0), jitter=0.5)


class RunServiceClient:
  """A client of one run service; `aclose` when done."""

  def __init__(
    self,
    base_url: str = DEFAULT_BASE_URL,
    *,
    token: str = "",
    timeout_s: float = 30.0,
    poll_s: float = 3.0,
    connections: int = 256,
  ):
    """Args:

      base_url: Address of the service.
      token: Token that the service asks for, "" for none.
      timeout_s: Deadline of a call, its retries included.
      poll_s: Seconds between two polls of a run.
      connections: Most connections open at a time.

    Raises:
      ValueError: naming the argument.
    """
    self.base_url = http.address(base_url, "base_url", DEFAULT_BASE_URL)
    for name, value in (("timeout_s", timeout_s), ("poll_s", poll_s)):
      if not value > 0:
        raise ValueError(f"{name} must be > 0 seconds, got {value}")
    self._timeout_s = timeout_s
    self._poll_s = poll_s
    self._http = http.Http(
      RunServiceError,
      headers={"authorization": f"Bearer {token}"} if token else {},
      connections=connections,
    )

  async def start(self, body: Mapping[str, Any], wait_s: float = 0.0) -> str:
    """Starts a run; returns its id.

    Args:
      body: Body of `POST /runs`.
      wait_s: Seconds for which a full service (429) is asked again.

    Raises:
      RunServiceError: refused, still full, or an answer without a run's id.
    """

    async def ask() -> dict[str, Any]:
      return await self._http.ask(
        "POST", f"{self.base_url}/runs", self._timeout_s, body=dict(body)
      )

    due = asyncio.get_running_loop().time() + wait_s
    reply = await _STARTS.run(ask, due=due)
    run_id = reply.get("runId")
    if not isinstance(run_id, str) or not run_id:
      raise RunServiceError(
        f"{self.base_url} started a run without a runId: {str(reply)[:80]!r}"
      )
    return run_id

  async def status(self, run_id: str) -> tuple[str, str]:
    """(status, reason) of a run.

    Raises:
      RunServiceError: there is no answer, or one without a status.
    """
    reply = await self._poll(run_id, "")
    inner = reply.get("run") if isinstance(reply, Mapping) else None
    reply = inner if isinstance(inner, Mapping) else reply
    name = reply.get("status") if isinstance(reply, Mapping) else None
    if not isinstance(name, str):
      raise RunServiceError(
        f"{self.base_url} names no status of run {run_id}: {str(reply)[:80]!r}"
      )
    return name, str(reply.get("reason") or "")

  async def events(
    self, run_id: str, first: object = None, last: object = None
  ) -> list[dict[str, Any]]:
    """Events from `first` (inclusive) to `last` (exclusive).

    Args:
      run_id: Id of the run.
      first, last: times as the service writes them; None for no bound.

    Raises:
      RunServiceError: there is no answer, or one without events.
    """
    params = {"from": first, "to": last}
    return await self._list(
      run_id, "events", {k: str(v) for k, v in params.items() if v is not None}
    )

  async def trajectory(self, run_id: str) -> list[dict[str, Any]]:
    """Returns the run's trajectory; [] where the service has none."""
    return await self._list(run_id, "trajectory")

  async def tokens(self, run_id: str) -> list[dict[str, Any]]:
    """Returns the run's tokens; [] where the service has none."""
    return await self._list(run_id, "tokens")

  async def steps(self, run_id: str) -> list[dict[str, Any]]:
    """Returns the run's steps; [] where the service has none."""
    return await self._list(run_id, "steps")

  async def step(self, run_id: str, index: int) -> dict[str, Any] | None:
    """Returns a step, counted from 0; None where the service has none."""
    try:
      reply = await self._poll(run_id, f"/steps/{index}")
    except RunServiceError as error:
      if error.status == 404:
        return None
      raise
    if isinstance(reply, Mapping):
      inner = reply.get("step")
      return dict(inner if isinstance(inner, Mapping) else reply)
    raise RunServiceError(f"a step must be an object, got {str(reply)[:80]!r}")

  async def follow(
    self, run_id: str, seconds: float
  ) -> AsyncIterator[dict[str, Any]]:
    """Yields the run's events in order, each once, until it has ended.

    One that ends without a `run_end` is asked for late events once more.

    Args:
      run_id: Id of the run.
      seconds: deadline of all of it; time in which the caller works on an event
        counts.

    Raises:
      RunTimeout: the run has not ended by then.
      RunServiceError: the service does not answer, or with none of the
        protocol.
    """
    keys: set[tuple[Any, ...]] = set()
    newest: Any = None
    complete = late = False
    due = asyncio.get_running_loop().time() + seconds
    while True:
      try:
        async with asyncio.timeout_at(due):
          # Read first: once a run has ended, its events are complete.
          status, _ = await self.status(run_id)
          events = await self.events(run_id, first=newest)
      except TimeoutError:
        raise RunTimeout(
          f"run {run_id} of {self.base_url} did not end within {seconds:g} s"
        ) from None
      for event in events:
        key = event_key(event)
        if key in keys:
          continue
        keys.add(key)
        newest = event.get("ts", newest)
        complete = complete or event.get("type") == "run_end"
        yield event
      if status in TERMINAL:
        if complete or late:
          return
        late = True
      pause = min(
        min(self._poll_s, _LATE_S) if late else self._poll_s,
        max(0.0, due - asyncio.get_running_loop().time()),
      )
      await asyncio.sleep(pause)

  async def cancel(self, run_id: str) -> None:
    """Ends a run, if the service can. Never raises `RunServiceError`."""
    try:
      await self._http.call(
        "POST", f"{self._url(run_id)}/cancel", _CANCEL_S, limit=1 << 20
      )
    except RunServiceError as error:
      if error.status not in (404, 405):
        _LOG.warning("run %s was not cancelled: %s", run_id, error)

  def owns(self, url: str) -> bool:
    """Whether an address is of the service."""
    return url.startswith(f"{self.base_url}/")

  async def fetch(self, url: str) -> bytes:
    """Returns the bytes of a screenshot that an event names.

    Raises:
      RunServiceError: the screenshot cannot be read, or is at another server,
        which is not called: addresses in events are the service's word.
    """
    if not self.owns(url):
      raise RunServiceError(
        f"a screenshot's address {url[:60]!r} is not of the service at"
        f" {self.base_url}; let it send base64"
      )
    return await self._http.call("GET", url, self._timeout_s, limit=_MAX_ANSWER)

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    await self._http.aclose()

  def _url(self, run_id: str) -> str:
    return f"{self.base_url}/runs/{urllib.parse.quote(run_id, safe='')}"

  async def _poll(
    self, run_id: str, path: str, params: Mapping[str, str] | None = None
  ) -> Any:
    return await self._http.json(
      "GET",
      self._url(run_id) + path,
      self._timeout_s,
      params=params,
      retry=_POLLS,
      limit=_MAX_ANSWER,
    )

  async def _list(
    self, run_id: str, name: str, params: Mapping[str, str] | None = None
  ) -> list[dict[str, Any]]:
    try:
      reply = await self._poll(run_id, f"/{name}", params)
    except RunServiceError as error:
      if error.status == 404:
        return []
      raise
    if isinstance(reply, Mapping):
      reply = reply.get(name)
    if not isinstance(reply, list) or not all(
      isinstance(item, dict) for item in reply
    ):
      raise RunServiceError(
        f"{self.base_url} answers {name} of run {run_id} with no list of"
        f" objects: {str(reply)[:80]!r}"
      )
    return reply


async def model_name(base_url: str, seconds: float, token: str = "") -> str:
  """Returns the first model that an OpenAI-compatible server lists.

  Raises:
    RunServiceError: the server lists no model.
    ValueError: no address.
  """
  base = http.address(base_url, "model.baseUrl", "http://127.0.0.1:8000/v1")
  base = base if base.endswith("/v1") else f"{base}/v1"
  client = http.Http(
    RunServiceError,
    headers={"authorization": f"Bearer {token}"} if token else {},
  )
  try:
    reply = await client.ask("GET", f"{base}/models", seconds)
  finally:
    await client.aclose()
  try:
    name = reply["data"][0]["id"]
  except (KeyError, IndexError, TypeError):
    name = None
  if not isinstance(name, str) or not name:
    raise RunServiceError(f"{base}/models lists no model: {str(reply)[:80]!r}")
  return name


def event_key(event: Mapping[str, Any]) -> tuple[Any, ...]:
  """Equal for two copies of one event."""
  parts = (event.get(k) for k in ("type", "ts", "step", "actionIndex"))
  return tuple(str(part) for part in parts)


def milliseconds(ts: object) -> int | None:
  """Reads an event's time, ISO-8601 or a number, as ms since the epoch."""
  if isinstance(ts, (int, float)) and not isinstance(ts, bool):
    return int(ts)
  try:
    at = datetime.datetime.fromisoformat(str(ts))
  except ValueError:
    return None
  if at.tzinfo is None:
    at = at.replace(tzinfo=datetime.UTC)
  return round(at.timestamp() * 1000)
