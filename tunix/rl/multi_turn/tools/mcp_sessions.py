"""Sessions with MCP servers, for `mcp_tools`; of the package `mcp`, 1 or 2.

Promises: see `mcp_tools`. Nothing of the package is imported before the first
session. What servers answer is returned as the JSON of the protocol, which both
versions of the package name alike.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import importlib
import logging
import os
import threading
from typing import (
  Any,
  AsyncIterator,
  Callable,
  cast,
  Coroutine,
  Iterator,
  Mapping,
  TextIO,
)
import weakref

_LOG = logging.getLogger(__name__)
_MAX_TOOLS = 512
_MAX_WORDS = 500  # Bytes of a program's stderr that an error quotes.


@dataclasses.dataclass(frozen=True, eq=False)
class Server:
  """Address or command of an MCP server, and its deadlines in seconds.

  Attributes:
    command: Program and arguments, empty with a `url`.
    env, cwd: Environment and working directory of the program.
    url: Address of a server that runs elsewhere.
    headers: Headers of each request to it.
    start_s, call_s, close_s: see the module docstring.
  """

  command: tuple[str, ...] = ()
  env: Mapping[str, str] | None = None
  cwd: str | None = None
  url: str = ""
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  start_s: float = 20.0
  call_s: float = 30.0
  close_s: float = 5.0

  def __str__(self) -> str:
    return f"the MCP server {self.url or ' '.join(self.command)!r:.120}"


class SessionError(RuntimeError):
  """A session did not start, or a call of it has no result."""


class Session:
  """A session with a server, open from the first use to `close`.

  Thread-safe; of any event loop. All sessions live on one loop of their own:
  the package `mcp` wants a session ended by the task that began it.
  """

  def __init__(self, server: Server):
    self._server = server
    self._lock = threading.Lock()
    self._link: _Link | None = None
    _SESSIONS.add(self)

  def list_tools(self) -> list[dict[str, Any]]:
    """Returns the server's tools, in JSON.

    Raises:
      SessionError: no list within `start_s`.
    """

    async def ask(link: _Link) -> list[dict[str, Any]]:
      from mcp import types  # pylint: disable=g-import-not-at-top

      tools, cursor = [], None
      while True:
        params = types.PaginatedRequestParams(cursor=cursor)
        page = _json(await link.session.list_tools(params=params))
        tools += page["tools"]
        cursor = page.get("nextCursor")
        if not cursor or len(tools) > _MAX_TOOLS:
          return tools[:_MAX_TOOLS]

    seconds = self._server.start_s
    return _on_loop(self._with_link(ask, seconds, "list of tools")).result()

  async def call(
    self, tool: str, arguments: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns the `CallToolResult` of a call, in JSON.

    Raises:
      SessionError: none within `call_s`, or the session broke.
    """

    async def ask(link: _Link) -> Any:
      return _json(await link.session.call_tool(tool, dict(arguments)))

    seconds = self._server.call_s
    return await asyncio.wrap_future(
      _on_loop(self._with_link(ask, seconds, f"result of {tool!r}"))
    )

  async def aclose(self) -> None:
    """Ends the session, within its deadline. Idempotent."""
    with self._lock:
      link, self._link = self._link, None
    if link is not None:
      await asyncio.wrap_future(_on_loop(link.close()))

  def close(self) -> None:
    """`aclose` outside of event loops."""
    with self._lock:
      link, self._link = self._link, None
    if link is not None:
      _on_loop(link.close()).result(self._server.close_s + 5.0)

  async def _with_link(
    self, ask: Callable[..., Any], seconds: float, what: str
  ) -> Any:
    """`ask(link)` under its deadline; runs on the loop of sessions."""
    with self._lock:
      link = self._link
      if link is None or link.over:
        link = self._link = _Link(self._server)
        # For sessions that are dropped, such as a run's when it is over.
        weakref.finalize(self, _give_up, link)
    try:
      await asyncio.wait_for(asyncio.shield(link.ready), self._server.start_s)
    except Exception as error:  # pylint: disable=broad-except
      await self._drop(link)
      why = _reason(error, self._server.start_s) + link.last_words()
      raise SessionError(f"{self._server} did not start: {why}") from None
    request = asyncio.ensure_future(ask(link))
    finished, _ = await asyncio.wait(
      (request, link.task), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
    )
    if request not in finished:
      request.cancel()
      await asyncio.wait((request,), timeout=1.0)
      if link.task in finished:
        raise SessionError(
          f"{self._server} ended before the {what}{link.last_words()}"
        )
      raise SessionError(f"{self._server} gave no {what} in {seconds:g} s")
    broken = request.exception()
    if broken is not None:
      if _ends_session(broken):
        link.give_up()
      raise SessionError(
        f"{self._server} gave no {what}: {_reason(broken, seconds)}"
      )
    return request.result()

  async def _drop(self, link: _Link) -> None:
    with self._lock:
      if self._link is link:
        self._link = None
    await link.close()


class _Link:
  """One connection; begun and ended by one task. Of the loop of sessions."""

  def __init__(self, server: Server):
    loop = asyncio.get_running_loop()
    self._server = server
    self._words = b""
    self.session: Any = None
    self.ready: asyncio.Future[None] = loop.create_future()
    # Its exception is retrieved although no caller waits for it any more.
    self.ready.add_done_callback(lambda f: f.cancelled() or f.exception())
    self._stop, self._gone = asyncio.Event(), asyncio.Event()
    self.task = loop.create_task(self._run())

  async def _run(self) -> None:
    import mcp  # pylint: disable=g-import-not-at-top

    try:
      async with _streams(self._server, self._heard) as (read, write):
        read = cast(Any, _Watched(read, self._gone))
        async with mcp.ClientSession(read, write) as session:
          await session.initialize()
          self.session = session
          if not self.ready.done():
            self.ready.set_result(None)
          waits = [
            asyncio.ensure_future(self._stop.wait()),
            asyncio.ensure_future(self._gone.wait()),
          ]
          try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
          finally:
            for wait in waits:
              wait.cancel()
    except Exception as error:  # pylint: disable=broad-except
      _LOG.debug("%s: %r", self._server, error)
      if not self.ready.done():
        self.ready.set_exception(error)
    finally:
      if not self.ready.done():
        self.ready.cancel()

  def _heard(self, part: bytes) -> None:
    self._words = (self._words + part)[-_MAX_WORDS:]

  def last_words(self) -> str:
    """Returns the end of what the program wrote to stderr, for error
    messages."""
    text = self._words.decode("utf-8", "replace").strip()
    return f"; it wrote: {text}" if text else ""

  @property
  def over(self) -> bool:
    """Whether no call can be made any more."""
    stopped = self._gone.is_set() or self._stop.is_set()
    return stopped or self.task.done()

  def give_up(self) -> None:
    """Lets it end; does not wait."""
    self._stop.set()

  async def close(self) -> None:
    self._stop.set()
    if self.session is None:
      self.task.cancel()  # It waits for a server that does not answer.
    await asyncio.wait((self.task,), timeout=self._server.close_s)
    if not self.task.done():
      self.task.cancel()
      await asyncio.wait((self.task,), timeout=2.0)


class _Watched:
  """A stream of messages that notes its end: the server's."""

  def __init__(self, stream: Any, disconnected: asyncio.Event):
    self._stream, self._gone = stream, disconnected

  async def __aenter__(self) -> _Watched:
    await self._stream.__aenter__()
    return self

  async def __aexit__(self, *error: Any) -> Any:
    return await self._stream.__aexit__(*error)

  async def __aiter__(self) -> AsyncIterator[Any]:
    async for message in self._stream:
      yield message
    self._gone.set()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.asynccontextmanager
async def _streams(
  server: Server, heard: Callable[[bytes], None]
) -> AsyncIterator[tuple[Any, Any]]:
  """Streams of messages (from, to) a server; `heard` gets its stderr."""
  if server.command:
    from mcp.client import stdio  # pylint: disable=g-import-not-at-top

    parameters = stdio.StdioServerParameters(
      command=server.command[0],
      args=list(server.command[1:]),
      env=None if server.env is None else dict(server.env),
      cwd=server.cwd,
    )
    with _listening(heard) as errors:
      async with stdio.stdio_client(parameters, errors) as streams:
        yield streams
    return
  import mcp  # pylint: disable=g-import-not-at-top
  from mcp.client import streamable_http  # pylint: disable=g-import-not-at-top

  is_second = hasattr(mcp, "MCPError")
  httpx = importlib.import_module("httpx2" if is_second else "httpx")
  timeout = httpx.Timeout(server.start_s, read=server.call_s + server.start_s)
  async with httpx.AsyncClient(
    headers=dict(server.headers), timeout=timeout, trust_env=False
  ) as client:
    async with streamable_http.streamable_http_client(
      server.url, http_client=client
    ) as streams:
      yield streams[0], streams[1]  # Of three in version 1.


def _json(answer: Any) -> dict[str, Any]:
  """Returns an answer as it came; attributes differ between versions."""
  return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def _ends_session(error: BaseException) -> bool:
  """Whether no further call can succeed: all but a refusal of this one."""
  import mcp  # pylint: disable=g-import-not-at-top

  refusal = getattr(mcp, "MCPError", None) or mcp.McpError
  # Closed (-32000), or a session that is unknown to the server.
  return not isinstance(error, refusal) or error.error.code in (
    -32000,
    32600,
    -32600,
  )


@contextlib.contextmanager
def _listening(heard: Callable[[bytes], None]) -> Iterator[TextIO]:
  """Yields a file to write to; `heard` gets what is written, on this loop."""
  loop = asyncio.get_running_loop()
  reading_end, writing_end = os.pipe()
  os.set_blocking(reading_end, False)

  def read() -> bool:
    try:
      part = os.read(reading_end, 65536)
    except BlockingIOError:
      return False
    if part:
      heard(part)
    else:
      loop.remove_reader(reading_end)
    return bool(part)

  loop.add_reader(reading_end, read)
  try:
    with open(writing_end, "w", encoding="utf-8") as file:
      yield file
  finally:
    while read():
      pass
    loop.remove_reader(reading_end)
    os.close(reading_end)


def _reason(error: BaseException, seconds: float) -> str:
  """Returns the first cause in a group of exceptions, in words."""
  first = error
  while isinstance(first, BaseExceptionGroup):
    first = first.exceptions[0]
  if isinstance(first, TimeoutError):
    return f"no answer in {seconds:g} s"
  return f"{type(first).__name__}: {str(first)[:300] or 'it ended'}"


# -- their loop ---------------------------------------------------------------

_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()
_LOOP: asyncio.AbstractEventLoop | None = None
_LOOP_PID = 0
_LOOP_LOCK = threading.Lock()


def _on_loop(work: Coroutine[Any, Any, Any]) -> Any:
  """Runs `work` on the loop of sessions; its concurrent future."""
  global _LOOP, _LOOP_PID
  with _LOOP_LOCK:
    if _LOOP is None or _LOOP_PID != os.getpid():
      _LOOP, _LOOP_PID = asyncio.new_event_loop(), os.getpid()
      threading.Thread(
        target=_LOOP.run_forever, name="mcp-sessions", daemon=True
      ).start()
    loop = _LOOP
  return asyncio.run_coroutine_threadsafe(work, loop)


def _give_up(link: _Link) -> None:
  if _LOOP is not None and _LOOP_PID == os.getpid():
    _LOOP.call_soon_threadsafe(link.give_up)


@atexit.register
def _close_all() -> None:
  for session in list(_SESSIONS):
    try:
      session.close()
    except Exception:  # pylint: disable=broad-except
      _LOG.exception("an MCP session did not end")
