"""Defines tools with an instance a request: create, execute, release.

The second family of tools. A stateful tool does part of an environment's work:
it keeps state for each request (the answer so far, a session) and rewards it.
The first family (`tool_base.BaseTool`) is a plain function;
`StatefulToolAdapter` makes a plain tool of a stateful one.

Promises: instances never share state; `release` may be called twice.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import copy
import logging
import threading
from typing import Any, Awaitable, Callable, Iterable, Mapping
import uuid

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.tools import tool_base as plain


class _Fields(dict[str, Any]):
  """A dict whose keys are attributes as well, those of nested dicts, too."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    for key, value in self.items():
      if isinstance(value, Mapping) and not isinstance(value, _Fields):
        self[key] = _Fields(value)

  def __getattr__(self, name: str) -> Any:
    try:
      return self[name]
    except KeyError:
      raise AttributeError(
        f"{name!r} is none of {', '.join(self) or 'no keys'}"
      ) from None


class OpenAIFunctionToolSchema(_Fields):
  """A tool in OpenAI's form; any mapping of this form serves as well.

  `schema.function.name` and `schema["function"]["name"]` are the same.

  Attributes:
    type: "function".
    function: `{"name": …, "description": …, "parameters": JSON Schema}`.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    """Takes a dict, or its keys as keywords.

    Raises:
      ValueError: The function or its name is missing.
    """
    super().__init__({"type": "function"}, **dict(*args, **kwargs))
    function = self.get("function")
    if not isinstance(function, Mapping) or not function.get("name"):
      raise ValueError(
        "a tool schema needs function={'name': …, …}, got"
        f" function={function!r}"
      )


# For one release where a tool's methods have no deadline of their own.
RELEASE_SECONDS = 30.0

_LOG = logging.getLogger(__name__)


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
    tool_schema: Mapping[str, Any] | None = None,
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

  def get_openai_tool_schema(self) -> Mapping[str, Any] | None:
    """Returns the schema given at construction."""
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
    """Returns the instance's reward; 0 unless the tool defines one."""
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
    tool_schema: Mapping[str, Any] | None = None,
  ):
    super().__init__(config, tool_schema)
    self._instances: dict[str, dict[str, Any]] = {}

  def state(self, instance_id: str) -> dict[str, Any]:
    """Returns the instance's dict.

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


class EpisodeTool(plain.BaseTool):
  """A plain tool with a part that belongs to one episode.

  The environment that owns it calls these, on a copy of its own (`fresh`).
  """

  @abc.abstractmethod
  def fresh(self, shared: dict[Any, Any]) -> EpisodeTool:
    """Returns a copy without an episode's state.

    Args:
      shared: State that the copies of one environment's tools have in common.
    """

  async def calc_reward(self) -> float:
    """Returns the episode's reward; 0 unless the tool defines one."""
    return 0.0

  @abc.abstractmethod
  async def release(self) -> None:
    """Ends the episode's part; idempotent."""


class StatefulToolAdapter(EpisodeTool):
  """A stateful tool's one instance, as a plain tool of one environment.

  The instance is created at the first call, once however many calls come
  together.
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
    self._clear()

  def _clear(self) -> None:
    # Calls may come from several event loops at once (`ToolManager.outputs`
    # gives each a thread), so nothing here belongs to one.
    self._lock = threading.Lock()
    self._creation: concurrent.futures.Future[str] | None = None
    self._open: list[str] = []  # Every id that may have an instance.

  def fresh(self, shared: dict[Any, Any] | None = None) -> StatefulToolAdapter:
    del shared
    other = copy.copy(self)
    other._clear()  # pylint: disable=protected-access
    return other

  @property
  def json(self) -> dict[str, Any]:
    return plain.renamed(self.tool.get_openai_tool_schema() or {}, self.name)

  async def async_forward(self, **kwargs: Any) -> plain.ToolOutput:
    text, reward, metrics = await self.tool.execute(
      await self._instance(), kwargs, **self._kwargs["execute_kwargs"]
    )
    return plain.ToolOutput(
      self.name, text, metadata={"reward": reward, "metrics": metrics}
    )

  async def calc_reward(self) -> float:
    """Returns the instance's reward; 0 when there is none."""
    creation = self._creation
    if creation is None:
      return 0.0
    return await self.tool.calc_reward(
      await asyncio.wrap_future(creation), **self._kwargs["calc_reward_kwargs"]
    )

  async def release(self) -> None:
    """Releases the instance; idempotent."""
    with self._lock:
      ids, self._open, self._creation = self._open, [], None
    for instance_id in ids:
      await self.tool.release(instance_id, **self._kwargs["release_kwargs"])

  async def _instance(self) -> str:
    """Returns the instance's id; the first caller creates it, the others
    wait."""
    kwargs, instance_id = with_instance_id(self._kwargs["create_kwargs"])
    with self._lock:
      creation = self._creation
      first = creation is None
      if creation is None:
        creation = self._creation = concurrent.futures.Future()
        creation.set_running_or_notify_cancel()  # No waiter can cancel it.
        self._open.append(instance_id)
    if not first:
      return await asyncio.wrap_future(creation)
    try:
      created_id = await self.tool.create(**kwargs)
    except BaseException as error:
      with self._lock:
        if self._creation is creation:
          self._creation = None
        # Cut short, it may have made its instance: `release` sees to it.
        if isinstance(error, Exception) and instance_id in self._open:
          self._open.remove(instance_id)
      if not isinstance(error, Exception):
        error = RuntimeError(f"creating {self.name!r} was cut short")
      creation.set_exception(error)
      raise
    with self._lock:
      released = self._creation is not creation
      if not released:
        self._open[self._open.index(instance_id)] = created_id
    creation.set_result(created_id)
    if released:
      await self.tool.release(created_id, **self._kwargs["release_kwargs"])
    return created_id


async def release_all(
  releases: Iterable[tuple[str, Callable[[], Awaitable[None]]]],
  seconds: float | None,
) -> None:
  """Releases the instances of several tools at once.

  Failures are logged, none is raised. A cancellation waits for the releases,
  and is raised after them.

  Args:
    releases: (name, function that releases).
    seconds: Deadline of each release; None for `RELEASE_SECONDS`.
  """

  async def one(name: str, release: Callable[[], Awaitable[None]]) -> None:
    try:
      await concurrency.with_deadline(
        release(),
        RELEASE_SECONDS if seconds is None else seconds,
        f"{name}.release",
      )
    except (Exception, asyncio.CancelledError) as error:  # pylint: disable=broad-except
      _LOG.warning("releasing %s failed: %r", name, error)

  tasks = [asyncio.ensure_future(one(*release)) for release in releases]
  cancelled: asyncio.CancelledError | None = None
  while waiting := [task for task in tasks if not task.done()]:
    try:
      await asyncio.wait(waiting)
    except asyncio.CancelledError as error:
      cancelled = error
  if cancelled is not None:
    raise cancelled


def with_instance_id(
  create_kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], str]:
  """Arguments of `create` with an id of ours, unless they have one; the id.

  With it even a creation that never returns can be released.
  """
  kwargs = dict(create_kwargs)
  if kwargs.get("instance_id") is None:
    kwargs["instance_id"] = str(uuid.uuid4())
  return kwargs, kwargs["instance_id"]


KWARGS_KINDS = (
  "create_kwargs",
  "execute_kwargs",
  "calc_reward_kwargs",
  "release_kwargs",
)


def check_tool_kwargs(
  name: str, kwargs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
  """Returns all four kinds of keyword arguments of a tool, absent ones empty.

  Raises:
    ValueError: an unknown kind, or one that is not a mapping.
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
