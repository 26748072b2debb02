"""An MCP server with three tools, which it offers over its pipes.

The run of examples/configs/mcp.yaml starts it and trains a policy to call it.
"""

try:
  from mcp.server import MCPServer
except ImportError:  # Version 1 of the package.
  from mcp.server.fastmcp import FastMCP as MCPServer

app = MCPServer("arithmetic", log_level="ERROR")


@app.tool()
def add(a: int, b: int) -> str:
  """The sum of two numbers."""
  return str(a + b)


@app.tool()
def subtract(a: int, b: int) -> str:
  """The first number less the second."""
  return str(a - b)


@app.tool()
def multiply(a: int, b: int) -> str:
  """The product of two numbers."""
  return str(a * b)


if __name__ == "__main__":
  app.run()
