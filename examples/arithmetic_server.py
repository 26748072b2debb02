"""An MCP server with three tools: `python examples/arithmetic_server.py`.

It speaks over its pipes, as `environment.options.tools=[{mcp: {command: …}}]`
starts it; examples/configs/mcp.yaml trains a policy that calls it.
"""

from mcp.server import fastmcp

app = fastmcp.FastMCP("arithmetic", log_level="ERROR")


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
