"""Registers agents by name, and builds one for each episode.

`agent.name` is a registered name or "package.module:Class"; the class gets
those settings of the section `agent` that its constructor takes, under the
names that it uses, and `agent.options`. A registered `AgentSpec` also brings
settings that are defaults where it is chosen: the agents of published models
in `presets` are `ToolAgent` with theirs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.agents import agent_settings
from tunix.rl.multi_turn.agents import presets
from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.tools import screenshot

_TOOL_AGENT = "tunix.rl.multi_turn.agents.tool_agent:ToolAgent"


@dataclasses.dataclass(frozen=True)
class AgentSpec:
  """One kind of agent.

  Attributes:
    make: class or function, or the path "package.module:Class" of one.
    preset: settings that are defaults where it is chosen, by dotted key.
  """

  make: Callable[..., Any] | str
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def factory(self) -> Callable[..., Any]:
    """The class or function, imported."""
    if isinstance(self.make, str):
      return registry.import_path(self.make)
    return self.make

  @property
  def reads_calls(self) -> bool:
    """Whether it is `ToolAgent`, whose actions are calls of its grammar."""
    return self.make == _TOOL_AGENT


AGENTS: registry.Registry[AgentSpec | Callable[..., Any]] = registry.Registry(
  "agent"
)
AGENTS.register("tool", AgentSpec(_TOOL_AGENT))
for _name, _preset in presets.PRESETS.items():
  AGENTS.register(_name, AgentSpec(_TOOL_AGENT, _preset))


def get(name: str) -> AgentSpec:
  """The spec of a registered name, or of the object at an operator's path.

  Raises:
    ValueError: unknown; the message names the nearest one.
    ImportError: no such module or attribute.
  """
  spec = AGENTS.get(name, "operator")
  return spec if isinstance(spec, AgentSpec) else AgentSpec(spec)


_PARAMETERS = {
  "system_prompt": ("system_prompt",),
  "parser": ("parser_name", "tool_parser_name", "parser"),
  "show_tools": ("show_tools",),
  "max_images": ("max_images",),
  "image_stride": ("image_stride",),
  "list_dropped_turns": ("list_dropped_turns", "summary"),
  "older_scale": ("older_scale",),
  "history": ("summary_at",),
  **{name: (name,) for name in agent_settings.OF_SUMMARIES[1:]},
  "on_parse_error": ("on_parse_error",),
}
"""Settings of the section `agent` -> parameters that take them."""

_OWN = (*agent_settings.OF_WINDOWS, "show_tools", "history")
"""Settings that an agent without the parameter cannot have."""


class Builder:
  """Builds the agents of a run's episodes."""

  def __init__(
    self,
    config: agent_settings.AgentConfig,
    *,
    system_prompt: str,
    tools: Mapping[str, Any] | None = None,
    screen: tuple[int, int] | None = None,
    observation: str = "screenshot",
    image_store: Any = None,
    context_length: int = 0,
  ):
    """Args:

      config: names the agent and its options.
      system_prompt: the text that `config.system_prompt` names.
      tools: name -> tool, shown to the policy; None for the parser's own.
      screen: (width, height) of the screenshots; None without any.
      observation: What the policy sees of a gym's screen.
      image_store: Store that holds the screenshots.
      context_length: Tokens of the policy's context, for summaries.

    Raises:
      ValueError: lists the settings that the agent does not take, a line
        each.
    """
    self.make = get(config.name).factory
    takes = arguments.takes(self.make)
    values: dict[str, Any] = {
      "system_prompt": system_prompt,
      "parser": config.parser,
      "show_tools": config.show_tools,
      "max_images": config.max_images or None,
      "image_stride": config.image_stride,
      "list_dropped_turns": config.list_dropped_turns,
      "older_scale": config.older_scale,
      "on_parse_error": config.on_parse_error,
      "history": config.summary_bound(context_length),
      **{
        name: getattr(config, name) for name in agent_settings.OF_SUMMARIES[1:]
      },
    }
    default = agent_settings.AgentConfig()
    problems = [
      f"agent.options.{text}"
      for _, text in takes.wrong(config.options, f"agent.name={config.name}")
    ]
    self._values: dict[str, Any] = {}
    for field, names in _PARAMETERS.items():
      name = next((n for n in names if n in takes.options), None)
      if name is not None:
        self._values[name] = values[field]
      elif field in _OWN and getattr(config, field) != getattr(default, field):
        problems.append(
          f"agent.{field}={getattr(config, field)}: agent.name={config.name}"
          f" takes no {names[0]}; leave it out"
        )
    if tools is not None and "tool_map" in takes.options:
      self._values["tool_map"] = tools
    if screen is not None and "screen" in takes.options:
      self._values["screen"] = screen
    if "observation" in takes.options:
      self._values["observation"] = observation
    if image_store is not None and "image_store" in takes.options:
      self._values["image_store"] = image_store
    if problems:
      raise ValueError("\n".join(problems))
    self._values |= config.options

  def __call__(self) -> Any:
    """An agent for one episode."""
    return self.make(**self._values)


def screenshot_options(config: agent_settings.AgentConfig) -> dict[str, Any]:
  """Arguments of `ScreenshotTool` for the sizes that the agent wants.

  Raises:
    ValueError: `resize=grammar`, and the grammar has no rule.
  """
  if config.resize == "none":
    return {}
  parser = tool_parser.get_tool_parser(config.parser, "operator")
  rule = parser.resizing
  if rule is None:
    raise ValueError(
      f"agent.resize=grammar: no resizing of agent.parser={config.parser} is"
      " published; set agent.resize=none"
    )
  smallest = config.min_pixels or rule.min_pixels
  largest = config.max_pixels or rule.max_pixels
  if smallest > largest:
    raise ValueError(
      f"agent.min_pixels={smallest} is more than agent.max_pixels={largest}"
      f" (0 = those of agent.parser={config.parser}); set both"
    )
  return {"factor": rule.factor, "min_pixels": smallest, "max_pixels": largest}


def screenshot_size(
  config: agent_settings.AgentConfig, width: int, height: int
) -> tuple[int, int]:
  """(width, height) of the screenshots of a screen of width x height.

  Raises:
    ValueError: see `screenshot_options`.
  """
  options = screenshot_options(config)
  if not options:
    return width, height
  return screenshot.fit_size(width, height, **options)
