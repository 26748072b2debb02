"""Offers the tools of an MCP server to the policy (the extra `mcp`).

`environment.options.tools=[{mcp: {command: [python, server.py]}}]` starts the
server as a process and speaks over its pipes; `{mcp: {url: http://…/mcp}}`
speaks streamable HTTP. Each tool that the server lists becomes one for the
policy, with the server's description and schema. A session is a run's
(`per: run`) or an episode's own (`per: episode`), made at its first call.

Promises: a call ends within `call_s`, a start within `start_s`, a close within
`close_s`; a failing or hanging call is a tool error that the policy reads. A
session that ended is made anew at the next call. Sessions are closed, and
processes ended, with the episode, or with the last use of the run's tools.

Does not: answer a server's requests for sampling or for a user's input, or
restrict what a server does; it runs with this user's rights.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
import os
import sys
from typing import Any, Literal, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.tools import mcp_sessions
from tunix.rl.multi_turn.tools import stateful
from tunix.rl.multi_turn.tools import tool_base

_MAX_PIXELS = 64 << 20


def _with_interpreter(command: Sequence[Any]) -> tuple[str, ...]:
  """Returns the command, with this process's interpreter for the program
  `python`.

  Where no environment is activated, a shell's `python` is another one.
  """
  words = tuple(map(str, command))
  return (sys.executable, *words[1:]) if words[:1] == ("python",) else words


class McpTools:
  """The tools of one server, as the tool registry builds them.

  Attributes:
    tools: name that the policy sees -> tool.
  """

  is_toolbox = True

  def __init__(
    self,
    *,
    command: list[str] | str | None = None,
    url: str = "",
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    token_env: str = "",
    per: Literal["run", "episode"] = "run",
    only: list[str] | None = None,
    prefix: str = "",
    start_s: float = 20.0,
    call_s: float = 30.0,
    close_s: float = 5.0,
    max_chars: int = 20000,
  ):
    """Connects once, and reads the server's list of tools.

    Args:
      command: Program and arguments of a server that is started here; the
        program `python` is this process's interpreter.
      url: Address of a server that runs; give this or a command.
      env, cwd: Environment and working directory of the program, which
        otherwise gets the few variables that the package `mcp` passes on.
      token_env: Environment variable with a token that is sent to `url`.
      per: Owner of the session; a server that keeps state needs "episode".
      only: Names of the tools to offer; all by default.
      prefix: Text before the tools' names.
      start_s, call_s, close_s: Deadlines in seconds.
      max_chars: Largest number of characters of a call's result; the rest is
        cut off.

    Raises:
      ValueError: naming the option; the package is not installed; or the server
        does not come up, lists no tool, or not those of `only`.
    """
    if importlib.util.find_spec("mcp") is None:
      raise ValueError(
        "MCP tools need the package mcp; pip install 'tunix-multi-turn[mcp]'"
      )
    if bool(command) == bool(url):
      raise ValueError("mcp takes a command or a url, one of the two")
    if isinstance(command, str):
      raise ValueError(
        f"mcp.command={command!r} must be a list, such as [python, server.py]"
      )
    for name, value in (
      ("start_s", start_s),
      ("call_s", call_s),
      ("close_s", close_s),
    ):
      if not value > 0:
        raise ValueError(f"mcp.{name}={value} must be > 0 seconds")
    if max_chars < 1:
      raise ValueError(f"mcp.max_chars={max_chars} must be >= 1")
    headers = {}
    if token_env:
      token = os.environ.get(token_env, "")
      if not token:
        raise ValueError(
          f"mcp.token_env={token_env}: that environment variable is not set"
        )
      headers["Authorization"] = f"Bearer {token}"
    if url:
      url = http.address(url, "mcp.url", "http://tools:8000/mcp")
    self.server = mcp_sessions.Server(
      command=_with_interpreter(command or ()),
      env=env,
      cwd=cwd,
      url=url,
      headers=headers,
      start_s=start_s,
      call_s=call_s,
      close_s=close_s,
    )
    first = mcp_sessions.Session(self.server)
    try:
      listed = first.list_tools()
    except mcp_sessions.SessionError as error:
      first.close()
      raise ValueError(str(error)) from None
    names = [tool["name"] for tool in listed]
    missing = [name for name in only or () if name not in names]
    if missing or not names:
      first.close()
      raise ValueError(
        f"{self.server} has no tool"
        f" {', '.join(missing)}; it lists {', '.join(names) or 'none'}"
      )
    shared = first if per == "run" else None
    if shared is None:
      first.close()
    self.tools: dict[str, McpTool] = {
      prefix + tool["name"]: McpTool(
        self.server, tool, prefix + tool["name"], shared, max_chars
      )
      for tool in listed
      if only is None or tool["name"] in only
    }

  def close(self) -> None:
    """Ends the run's session. Idempotent."""
    for tool in self.tools.values():
      if tool.session is not None:
        tool.session.close()


class McpTool(stateful.EpisodeTool):
  """One tool of a server.

  Attributes:
    session: Session that its calls go to; None until the episode's is made.
  """

  def __init__(
    self,
    server: mcp_sessions.Server,
    listed: Mapping[str, Any],
    name: str,
    session: mcp_sessions.Session | None,
    max_chars: int,
  ):
    text = listed.get("description") or listed.get("title") or ""
    super().__init__(name, text)
    self._server = server
    self._tool = listed["name"]
    self._schema = dict(listed.get("inputSchema") or {})
    self._max_chars = max_chars
    self._of_run = session is not None
    self.session = session

  @property
  def json(self) -> dict[str, Any]:
    return {
      "type": "function",
      "function": {
        "name": self.name,
        "description": self.description,
        "parameters": self._schema,
      },
    }

  def fresh(self, shared: dict[Any, Any]) -> McpTool:
    if self._of_run:
      return self
    other = object.__new__(McpTool)
    other.__dict__ |= self.__dict__
    # The tools of one server have one session in an episode.
    if self._server not in shared:
      shared[self._server] = mcp_sessions.Session(self._server)
    other.session = shared[self._server]
    return other

  async def release(self) -> None:
    if not self._of_run and self.session is not None:
      await self.session.aclose()

  async def async_forward(self, **arguments: Any) -> tool_base.ToolOutput:
    if self.session is None:
      raise RuntimeError(f"tool {self.name!r} belongs to no episode")
    try:
      result = await self.session.call(self._tool, arguments)
    except mcp_sessions.SessionError as error:
      return tool_base.ToolOutput(self.name, error=str(error))
    text, images = await concurrency.acall(_read, result, self._max_chars)
    if result.get("isError"):
      return tool_base.ToolOutput(self.name, error=text or "the tool failed")
    return tool_base.ToolOutput(
      self.name, text, metadata={"images": images} if images else {}
    )


def _read(
  result: Mapping[str, Any], max_chars: int
) -> tuple[str, list[np.ndarray]]:
  """Returns (text, images as uint8[H, W, 3]) of a call's result."""
  texts, images = [], []
  for part in result["content"]:
    if part["type"] == "text":
      texts.append(part["text"])
    elif part["type"] == "image":
      try:
        images.append(_pixels(part["data"]))
      except ValueError as error:
        texts.append(f"(an image that cannot be read: {error})")
    elif part["type"] == "resource" and part["resource"].get("text"):
      texts.append(part["resource"]["text"])
    else:
      texts.append(f"({part['type']}, which is not shown here)")
  text = "\n".join(texts)
  if len(text) > max_chars:
    text = f"{text[:max_chars]}\n(cut off: {len(text)} characters)"
  return text, images


def _pixels(data: str) -> np.ndarray:
  """Returns a base64 image as uint8[H, W, 3]; ValueError where it is none."""
  from PIL import Image  # pylint: disable=g-import-not-at-top

  try:
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
      if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels are too many")
      return np.asarray(image.convert("RGB"))
  except (OSError, SyntaxError, binascii.Error) as error:
    raise ValueError(str(error)[:200]) from None
