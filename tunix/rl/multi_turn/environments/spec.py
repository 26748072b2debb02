"""Registers environments by name, and builds one for each episode.

An environment of a run is named by `environment.name`: a registered name, or
"package.module:Class". `EnvironmentSpec` adds facts that a run needs beside the
class; a bare class is wrapped in one, with its `action_grammar` attribute if
it has one.

`Builder` fills a constructor's parameters by their names: first
`environment.options`, then values of the run (the task, `max_steps`,
`reward_fn`, the gym, ...), then the fields of the task itself. A class whose
constructor takes no task and not the task's fields is built by its `from_dict`.

Promises: a class that cannot be built is refused before the first episode; the
error names the parameter and the setting or task field that would fill it.

Does not: build agents, or import an environment that is not asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterable, Literal, Mapping, Protocol

from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.environments import environment_settings
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.tools import tool_registry

_FROM_DICT = base_env.BaseEnv.from_dict.__func__  # type: ignore[attr-defined]

_HERE = "tunix.rl.multi_turn.environments"
Grammar = Literal["gui", "tool", "any"]

TASK_NAMES = ("task", "single_example", "sample", "example")
"""Parameters that get the whole task, as environments call them."""
REWARD_NAMES = ("reward_fn", "reward")
TURN_NAMES = ("max_steps", "max_turns")
# Of an environment that takes a `tool_map`; a `ToolSet` checks the value.
_TOOLS = arguments.Option("tools", "", Any, None)


class Env(Protocol):
  """An environment as the collector drives it; methods sync or async."""

  def reset(self) -> Any: ...

  def step(self, action: object) -> Any: ...


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
  """One kind of environment.

  Attributes:
    make: class or function, or the path "package.module:Class" of one.
    grammar: calls that its actions are made of. "gui": of a GuiActionParser.
      "tool": of any other tool parser. "any": text or calls.
    tasks: path of a factory `(families) -> TaskSet` of the tasks that it makes
      by itself; "" for none, so that they must come from a list.
    gym: whether it acts on the gym of the section `gym`, whose tasks it plays.
    preset: settings that are defaults where it is chosen.
    oracle: path of a function that solves its own tasks, for cloning: `(fields
      of a task, schemas of the tools) -> turns`, the assistant messages in
      OpenAI's form, each with `content`, `tool_calls` or both; LookupError: it
      cannot solve this one with these tools. "": none. An environment with a
      gym has the gym's.
  """

  make: Callable[..., Any] | str
  grammar: Grammar = "any"
  tasks: str = ""
  gym: bool = False
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  oracle: str = ""

  @property
  def factory(self) -> Callable[..., Any]:
    """The class or function, imported."""
    if isinstance(self.make, str):
      return registry.import_path(self.make)
    return self.make


_TEXT_PRESET = {
  "agent.parser": "qwen",
  "agent.on_parse_error": "answer",
  "agent.system_prompt": "tool",
}

ENVIRONMENTS: registry.Registry[EnvironmentSpec] = registry.Registry(
  "environment"
)
for _name, _spec in {
  "cua": EnvironmentSpec(f"{_HERE}.cua_env:CUAEnv", "gui", gym=True),
  "tool": EnvironmentSpec(
    f"{_HERE}.tool_environment:ToolEnvironment",
    "tool",
    tasks=f"{_HERE}.arithmetic:ArithmeticTasks",
    preset={**_TEXT_PRESET, "environment.reward": "numeric_match"},
    oracle=f"{_HERE}.arithmetic:solve",
  ),
  "database": EnvironmentSpec(
    f"{_HERE}.tool_environment:ToolEnvironment",
    "tool",
    tasks=f"{_HERE}.database_questions:DatabaseTasks",
    preset={
      **_TEXT_PRESET,
      "environment.reward": "numeric_match",
      "environment.options": {"tools": ["sql"]},
      "environment.max_turns": 12,
    },
    oracle=f"{_HERE}.database_questions:solve",
  ),
  "tool_request": EnvironmentSpec(
    f"{_HERE}.tool_request_env:ToolRequestEnvironment",
    "tool",
    preset=_TEXT_PRESET,
  ),
  "gsm8k": EnvironmentSpec(
    f"{_HERE}.gsm8k_env:Gsm8kEnvironment",
    "any",
    tasks=f"{_HERE}.arithmetic:ArithmeticTasks",
    preset={**_TEXT_PRESET, "agent.system_prompt": ""},
    oracle=f"{_HERE}.arithmetic:solve",
  ),
  "verifiers": EnvironmentSpec(
    f"{_HERE}.verifiers.environment:VerifiersEnvironment",
    "any",
    tasks=f"{_HERE}.verifiers.environment:VerifiersTasks",
    preset={
      **_TEXT_PRESET,
      "agent.system_prompt": "",
      "rollout.via": "proxy",
      "rollout.agent": "tunix.rl.multi_turn.clients.verifiers_agent:play",
      # A step is an episode; the first reset imports the package.
      "collect.deadlines.reset": 150.0,
      "collect.deadlines.step": 300.0,
      "collect.deadlines.turn": 330.0,
    },
  ),
}.items():
  ENVIRONMENTS.register(_name, _spec)


register_env: Callable[..., Any] = ENVIRONMENTS.register
"""Adds an environment by name: a spec, or a class."""


def get(name: str, source: registry.Source = "operator") -> EnvironmentSpec:
  """The spec of a registered name, or of the object at an operator's path.

  Args:
    name: Registered, or of an operator "module:attribute".
    source: Who chose the name.

  Raises:
    ValueError: unknown; the message names the nearest one.
    ImportError: no such module or attribute.
  """
  entry = ENVIRONMENTS.get(name, source)
  if isinstance(entry, EnvironmentSpec):
    return entry
  return EnvironmentSpec(entry, getattr(entry, "action_grammar", "any"))


class Builder:
  """Builds the environments of a run's episodes."""

  def __init__(
    self, config: environment_settings.EnvironmentConfig, *, reward: object
  ):
    """Args:

      config: Names the environment and its options. The option `tools` names
        the tools of an environment that takes a `tool_map`.
      reward: a function; or "score" or "success", which an environment with a
        gym knows itself.

    Raises:
      ValueError: listing the options that it does not take, a line each.
    """
    self._config = config
    self.spec = get(config.name)
    self._make = self.spec.factory
    self._takes = arguments.takes(self._make)
    self._options = dict(config.options)
    self.tools: tool_registry.ToolSet | None = None
    takes = self._takes
    if "tool_map" in takes.options:
      takes = dataclasses.replace(
        takes, options={"tools": _TOOLS, **takes.options}
      )
      if "tools" in self._options:
        self.tools = tool_registry.ToolSet(self._options.pop("tools"))
    name = f"environment.name={config.name}"
    problems = [
      f"environment.options.{text}"
      for _, text in takes.wrong(self._options, name)
    ]
    if reward != "score" and not self._takes_any(REWARD_NAMES):
      problems.append(
        f"environment.reward={config.reward}: environment.name={config.name}"
        " takes no reward function and rewards by itself; leave it at score"
      )
    if problems:
      raise ValueError("\n".join(problems))
    self._provided: dict[str, Any] = {}
    if reward != "score" or self.spec.gym:
      self._provided |= {name: reward for name in REWARD_NAMES}

  def _takes_any(self, names: Iterable[str]) -> bool:
    return any(name in self._takes.options for name in names)

  def __call__(self, task: gym_base.Task, **provided: Any) -> Env:
    """An environment for one episode of `task`.

    Args:
      task: its `params` are the fields of a task without a gym.
      **provided: Further arguments by name of the parameter.

    Raises:
      ValueError: a required parameter that nothing fills.
    """
    row: Any = task if self.spec.gym else fields_of(task)
    turns = task.max_turns or self._config.max_turns
    offered = {
      **{name: row for name in TASK_NAMES},
      **{name: turns for name in TURN_NAMES},
      **self._provided,
      **provided,
    }
    if self.tools is not None:
      offered["tool_map"] = self.tools.for_task(row)
    if isinstance(row, Mapping) and not self._takes_any(TASK_NAMES):
      from_dict = getattr(self._make, "from_dict", None)
      is_own = getattr(from_dict, "__func__", None) is not _FROM_DICT
      if from_dict and is_own and not self._takes_any(row):
        return from_dict({**row, **self._options})
      offered = {**row, **offered}
    values = {
      name: offered[name] for name in self._takes.options if name in offered
    } | self._options
    missing = [name for name in self._takes.required if name not in values]
    if missing:
      raise ValueError(
        f"environment.name={self._config.name} needs {missing[0]!r}, which"
        f" task {task.task_id} does not have; give"
        f" environment.options.{missing[0]}, or tasks with that field"
      )
    return self._make(**values)


def fields_of(task: gym_base.Task) -> dict[str, Any]:
  """A task without a gym as the flat mapping that its environment reads."""
  fields = dict(task.params)
  if task.instruction and "question" not in fields:
    fields["question"] = task.instruction
  return {"task_id": task.task_id, **fields}
