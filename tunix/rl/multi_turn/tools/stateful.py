"""Tools with an instance a request: create, execute, calc_reward, release.

The second family of tools. Here a tool carries part of what an environment
does: it keeps state for each request (the answer so far, a session) and says
what it was worth. The first family (`base.BaseTool`) is a plain function; the
adapter at the end makes a stateful tool one of those.

Promises: instances never share state; `release` may be called twice.
"""

from __future__ import annotations

import abc
from typing import Any, Mapping
import uuid

from tunix.rl.multi_turn import registry
from tunix.rl.multi_turn.tools import base as plain

OpenAIFunctionToolSchema = Mapping[str, Any]


class UnknownInstanceError(KeyError):
  """The instance was never created, or has been released."""

  def __str__(self) -> str:
    return self.args[0]


class BaseTool(abc.ABC):
  """A tool with instances.

  Attributes:
    config: settings, as given.
    tool_schema: OpenAI schema, as given.
  """

  def __init__(
      self,
      config: Mapping[str, Any] | None = None,
      tool_schema: OpenAIFunctionToolSchema | None = None,
  ):
    self.config = config if config is not None else {}
    self.tool_schema = tool_schema

  @property
  def name(self) -> str:
    """The function name in the schema."""
    schema = self.tool_schema or {}
    name = schema.get("function", schema).get("name")
    if not name:
      raise ValueError(f"{type(self).__name__} has no name in its schema")
    return name

  def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
    """The schema given at construction."""
    return self.tool_schema

  @abc.abstractmethod
  async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
    """Makes an instance and returns its id, a fresh one when none is given."""

  @abc.abstractmethod
  async def execute(
      self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
  ) -> tuple[str, float, dict[str, Any]]:
    """Runs the tool: (text for the policy, reward of this call, metrics).

    Raises:
      UnknownInstanceError: no such instance.
    """

  async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
    """What the instance was worth; 0 unless the tool says otherwise."""
    del instance_id, kwargs
    return 0.0

  @abc.abstractmethod
  async def release(self, instance_id: str, **kwargs: Any) -> None:
    """Forgets the instance. Unknown ids are fine."""


StatefulTool = BaseTool


class InstanceTool(BaseTool):
  """A stateful tool whose state is a dict an instance.

  `create` fills the dict with its keyword arguments, a `history` list and a
  `reward` of 0; `execute` finds it with `state`; `calc_reward` returns its
  `reward`.
  """

  def __init__(
      self,
      config: Mapping[str, Any] | None = None,
      tool_schema: OpenAIFunctionToolSchema | None = None,
  ):
    super().__init__(config, tool_schema)
    self._instances: dict[str, dict[str, Any]] = {}

  def state(self, instance_id: str) -> dict[str, Any]:
    """The instance's dict.

    Raises:
      UnknownInstanceError: no such instance.
    """
    try:
      return self._instances[instance_id]
    except KeyError:
      raise UnknownInstanceError(
          f"tool {type(self).__name__} has no instance {instance_id!r}; create"
          " it first, and do not use it after release"
      ) from None

  async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
    if instance_id is None:
      instance_id = str(uuid.uuid4())
    if instance_id in self._instances:
      raise ValueError(f"instance {instance_id!r} exists already")
    self._instances[instance_id] = {"history": [], "reward": 0.0, **kwargs}
    return instance_id

  async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
    return float(self.state(instance_id)["reward"])

  async def release(self, instance_id: str, **kwargs: Any) -> None:
    self._instances.pop(instance_id, None)


class StatefulToolAdapter(plain.BaseTool):
  """A stateful tool's one instance, as a plain tool of one environment.

  The instance is created at the first call. `calc_reward` and `release` are
  for the environment that owns the adapter.
  """

  def __init__(
      self,
      tool: BaseTool,
      tool_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
      name: str | None = None,
  ):
    """Args:

      tool: the stateful tool.
      tool_kwargs: `{"create_kwargs": {…}, "execute_kwargs": {…}, …}`.
      name: the schema's by default.
    """
    schema = tool.get_openai_tool_schema() or {}
    function = schema.get("function", schema)
    super().__init__(name or tool.name, function.get("description", ""))
    self.tool = tool
    self._kwargs = check_tool_kwargs(self.name, tool_kwargs or {})
    self._instance_id: str | None = None

  @property
  def json(self) -> dict[str, Any]:
    schema = dict(self.tool.get_openai_tool_schema())
    if "function" not in schema:
      schema = {"type": "function", "function": schema}
    return schema

  async def async_forward(self, **kwargs: Any) -> plain.ToolOutput:
    if self._instance_id is None:
      self._instance_id = await self.tool.create(
          **self._kwargs["create_kwargs"]
      )
    text, reward, metrics = await self.tool.execute(
        self._instance_id, kwargs, **self._kwargs["execute_kwargs"]
    )
    return plain.ToolOutput(
        self.name, text, metadata={"reward": reward, "metrics": metrics}
    )

  async def calc_reward(self) -> float:
    """The instance's reward; 0 when the tool was never called."""
    if self._instance_id is None:
      return 0.0
    return await self.tool.calc_reward(
        self._instance_id, **self._kwargs["calc_reward_kwargs"]
    )

  async def release(self) -> None:
    """Releases the instance; idempotent."""
    instance_id, self._instance_id = self._instance_id, None
    if instance_id is not None:
      await self.tool.release(instance_id, **self._kwargs["release_kwargs"])


KWARGS_KINDS = (
    "create_kwargs",
    "execute_kwargs",
    "calc_reward_kwargs",
    "release_kwargs",
)


def check_tool_kwargs(
    name: str, kwargs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
  """All four kinds of keyword arguments of a tool, absent ones empty.

  Raises:
    ValueError: an unknown kind, or one that is no mapping.
  """
  for kind, value in kwargs.items():
    if kind not in KWARGS_KINDS:
      raise ValueError(
          f"tools_kwargs[{name!r}]: "
          + registry.unknown_name("kind", kind, KWARGS_KINDS)
      )
    if not isinstance(value, Mapping):
      raise ValueError(
          f"tools_kwargs[{name!r}][{kind!r}] must be a mapping, got"
          f" {type(value).__name__}"
      )
  return {kind: dict(kwargs.get(kind, {})) for kind in KWARGS_KINDS}


