"""A real MCP server for tests: `python mcp_server.py [http PORT]`."""

import base64
import io
import os
import sys
import time

import mcp.server
from mcp.types import ImageContent
from mcp.types import TextContent
from PIL import Image

if hasattr(mcp, "MCPError"):  # Version 2.
  from mcp.server.mcpserver import exceptions

  app = mcp.server.MCPServer("tests", log_level="ERROR")
else:
  from mcp.server import fastmcp
  from mcp.server.fastmcp import exceptions

  app = fastmcp.FastMCP("tests", log_level="ERROR")
state = {"count": 0}


@app.tool()
def add(a: int, b: int) -> str:
  """Adds two numbers."""
  return str(a + b)


@app.tool()
def count() -> str:
  """Counts the calls of this server."""
  state["count"] += 1
  return str(state["count"])


@app.tool()
def fail(why: str) -> str:
  """Fails."""
  raise exceptions.ToolError(why)


@app.tool()
def die() -> str:
  """Ends the server."""
  os._exit(1)


@app.tool()
def hang(seconds: float) -> str:
  """Answers late."""
  time.sleep(seconds)
  return "late"


@app.tool()
def picture(good: bool = True) -> list[TextContent | ImageContent]:
  """Returns a red square."""
  file = io.BytesIO()
  Image.new("RGB", (8, 6), (255, 0, 0)).save(file, "PNG")
  data = base64.b64encode(file.getvalue() if good else b"none").decode()
  return [
    TextContent(type="text", text="a square"),
    ImageContent.model_validate(
      {"type": "image", "data": data, "mimeType": "image/png"}
    ),
  ]


if __name__ == "__main__":
  if sys.argv[1:2] == ["http"]:
    if hasattr(mcp, "MCPError"):
      app.run("streamable-http", port=int(sys.argv[2]))
    else:
      app.settings.port = int(sys.argv[2])
      app.run("streamable-http")
  else:
    app.run()
