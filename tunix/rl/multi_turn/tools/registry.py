"""Registers tools by name, and builds the tools of one episode.

`environment.options.tools` lists names, or maps a name that the policy sees to
a registered name or "package.module:Class". A stateful tool becomes a plain one
through `StatefulToolAdapter`, with the keyword arguments that the task's row
gives it under `tools_kwargs` (or `extra_info.tools_kwargs`).
"""

from __future__ import annotations

import logging
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.tools import stateful

_LOG = logging.getLogger(__name__)
_HERE = "tunix.rl.multi_turn.tools"
TOOLS: registry.Registry[type] = registry.Registry("tool")
TOOLS.register("calculator", f"{_HERE}.calculator:CalculatorTool")
TOOLS.register("submit_answer", f"{_HERE}.gsm8k_tool:Gsm8kTool")

ToolNames = Sequence[str] | Mapping[str, str]


class ToolSet:
  """The tools that a run's tasks may use."""

  def __init__(self, names: ToolNames):
    """`names`: see the module docstring.

    Raises:
      ValueError: an unknown name, naming the nearest one; or no names at all.
      ImportError: nothing at a path.
    """
    if isinstance(names, str):
      names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, Mapping):
      names = {name.rpartition(":")[2]: name for name in names}
    self.classes = {name: TOOLS.get(path) for name, path in names.items()}
    self._stateful = {
        name: make()
        for name, make in self.classes.items()
        if isinstance(make, type) and issubclass(make, stateful.BaseTool)
    }

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
