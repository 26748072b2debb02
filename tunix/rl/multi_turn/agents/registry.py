"""Registers agents by name, and builds one for each episode.

`agent.name` is a registered name or "package.module:Class"; the class gets
those settings of the section `agent` that its constructor takes, under the
names that it uses, and `agent.options`.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.agents import settings
from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import registry

AGENTS: registry.Registry[Callable[..., Any]] = registry.Registry("agent")
AGENTS.register("tool", "tunix.rl.multi_turn.agents.tool_agent:ToolAgent")

_PARAMETERS = {
    "system_prompt": ("system_prompt",),
    "parser": ("parser_name", "tool_parser_name", "parser"),
    "max_images": ("max_images",),
    "image_stride": ("image_stride",),
    "on_parse_error": ("on_parse_error",),
}
"""Settings of the section `agent` -> parameters that take them."""


class Builder:
  """Builds the agents of a run's episodes."""

  def __init__(
      self,
      config: settings.AgentConfig,
      *,
      system_prompt: str,
      tools: Mapping[str, Any] | None = None,
  ):
    """Args:

      config: names the agent and its options.
      system_prompt: the text that `config.system_prompt` names.
      tools: name -> tool, shown to the policy; None for the parser's own.

    Raises:
      ValueError: lists the settings that the agent does not take, a line
        each.
    """
    self.make = AGENTS.get(config.name)
    known = arguments.takes(self.make)
    values: dict[str, Any] = {
        "system_prompt": system_prompt,
        "parser": config.parser,
        "max_images": config.max_images or None,
        "image_stride": config.image_stride,
        "on_parse_error": config.on_parse_error,
    }
    default = settings.AgentConfig()
    found = [
        f"agent.options.{text}"
        for _, text in known.wrong(config.options, f"agent.name={config.name}")
    ]
    self._values: dict[str, Any] = {}
    for field, names in _PARAMETERS.items():
      name = next((n for n in names if n in known.options), None)
      if name is not None:
        self._values[name] = values[field]
      elif field in ("max_images", "image_stride") and (
          getattr(config, field) != getattr(default, field)
      ):
        found.append(
            f"agent.{field}={getattr(config, field)}: agent.name={config.name}"
            f" takes no {names[0]}; leave it out"
        )
    if tools is not None and "tool_map" in known.options:
      self._values["tool_map"] = tools
    if found:
      raise ValueError("\n".join(found))
    self._values |= config.options

  def __call__(self) -> Any:
    """An agent for one episode."""
    return self.make(**self._values)
