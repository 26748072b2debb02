"""Registers tools by name, and builds the tools of one episode.

`environment.options.tools` lists names, or maps a name that the policy sees to
a registered name or "package.module:Class". An entry `{name: {option: value}}`
gives a tool options: of a plain tool, keyword arguments of its constructor;
of a stateful one, its `config`. A class with a true `is_toolbox` makes several
tools, its `tools` (name -> tool), such as those of an MCP server.

A stateful tool becomes a plain one through `StatefulToolAdapter`, with the
keyword arguments that the task's row gives it under `tools_kwargs` (or
`extra_info.tools_kwargs`).

Installed packages add tools by the entry points `tunix.rl.multi_turn.tools`.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Iterator, Mapping, Sequence

from tunix.rl.multi_turn import moved_rooms
from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.tools import stateful
from tunix.rl.multi_turn.tools import tool_base

_LOG = logging.getLogger(__name__)
_HERE = "tunix.rl.multi_turn.tools"
_FIELD = "environment.options.tools"


def _absent(name: str) -> str:
  """Tells which package of this repository has the tool; "" for none."""
  if name != "python" or importlib.util.find_spec("cua_gyms") is not None:
    return ""
  return moved_rooms.where("tool 'python'", "cua_gyms")


TOOLS: registry.Registry[type] = registry.Registry(
  "tool", group="tunix.rl.multi_turn.tools", absent=_absent
)
TOOLS.register("calculator", f"{_HERE}.calculator:CalculatorTool")
TOOLS.register("submit_answer", f"{_HERE}.gsm8k_tool:Gsm8kTool")
TOOLS.register("sql", f"{_HERE}.sql_tool:SqlTool")
TOOLS.register("mcp", f"{_HERE}.mcp_tools:McpTools")

ToolNames = Sequence[str | Mapping[str, Any]] | Mapping[str, Any]


class ToolSet:
  """The tools that a run's tasks may use."""

  def __init__(self, names: ToolNames):
    """`names`: see the module docstring.

    Raises:
      ValueError: an unknown name, naming the nearest one; or no names.
      ImportError: nothing at a path.
    """
    self.classes: dict[str, Any] = {}
    self._stateful: dict[str, stateful.BaseTool] = {}
    for name, path, options in _entries(names):
      self._add(name, path, options)

  def _add(self, name: str, path: str, options: Mapping[str, Any]) -> None:
    try:
      make = TOOLS.get(path, "operator")
    except (ImportError, ValueError) as error:
      raise type(error)(f"{_FIELD}: {error}") from None
    tools: Mapping[str, Any] = {name: make}
    if isinstance(make, type) and issubclass(make, stateful.BaseTool):
      self._stateful[name] = make(dict(options)) if options else make()
    elif getattr(make, "is_toolbox", False):
      tools = _make(name, make, options).tools
    elif options:
      tools = {name: _make(name, make, options)}
    for key, tool in tools.items():
      if key in self.classes:
        raise ValueError(
          f"environment.options.tools has two tools {key!r}; give one of them"
          " another name, or a server's a prefix"
        )
      self.classes[key] = tool

  def for_task(self, row: Mapping[str, Any]) -> dict[str, Any]:
    """name -> tool class, or a stateful tool with the task's arguments.

    Raises:
      ValueError: `tools_kwargs` of a tool that is not there.
    """
    extra = row.get("extra_info") or {}
    kwargs = row.get("tools_kwargs") or extra.get("tools_kwargs") or {}
    if extra.get("need_tools_kwargs") and not kwargs:
      _LOG.warning(
        "task %s needs tools_kwargs and has none", row.get("task_id")
      )
    for name in kwargs:
      if name not in self.classes:
        raise ValueError(
          f"task {row.get('task_id')}: "
          + registry.unknown_name("tool in tools_kwargs", name, self.classes)
        )
    return {
      name: stateful.StatefulToolAdapter(
        self._stateful[name], kwargs.get(name), name=name
      )
      if name in self._stateful
      else make
      for name, make in self.classes.items()
    }


def _entries(names: ToolNames) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
  """Yields (name that the policy sees, registered name or path, options) of
  each."""
  if isinstance(names, str):
    names = [name.strip() for name in names.split(",") if name.strip()]
  if isinstance(names, Mapping):
    names = [{name: value} for name, value in names.items()]
  if not isinstance(names, Sequence):
    raise ValueError(
      f"{_FIELD}={names!r:.80} must be a list of names, e.g. [calculator]"
    )
  for item in names:
    if isinstance(item, str):
      yield item.rpartition(":")[2], item, {}
      continue
    if not isinstance(item, Mapping) or len(item) != 1:
      raise ValueError(
        f"environment.options.tools: {item!r:.80} must be a name, or"
        " {name: {option: value}}"
      )
    ((name, value),) = item.items()
    if isinstance(value, str):
      yield name, value, {}
    elif value is None or isinstance(value, Mapping):
      # `tool` names another one than the key, so that one can come twice.
      options = dict(value or {})
      path = str(options.pop("tool", name))
      yield name.rpartition(":")[2], path, options
    else:
      raise ValueError(
        f"environment.options.tools.{name}={value!r:.80} must be a registered"
        " name, or a mapping of options"
      )


def _make(name: str, make: object, options: Mapping[str, Any]) -> Any:
  """Returns a tool with its options.

  Raises:
    ValueError: an option that it does not take, or will not.
  """
  where = f"environment.options.tools.{name}"
  if isinstance(make, tool_base.BaseTool):
    return make
  if not callable(make):
    raise ValueError(f"{where} must be a tool's class, got {make!r:.80}")
  takes = arguments.takes(make)
  wrong = [f"{where}.{text}" for _, text in takes.wrong(options, name)]
  if wrong:
    raise ValueError("\n".join(wrong))
  settings = dict(options)
  if isinstance(make, type) and issubclass(make, tool_base.BaseTool):
    settings.setdefault("name", name)
  try:
    return make(**settings)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{where}: {error}") from None
