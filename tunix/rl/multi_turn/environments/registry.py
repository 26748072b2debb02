"""Environments and gyms by name.

A gym's entry is a factory `(**kwargs) -> Gym`, or the dotted path of one, which
is imported when the gym is first made: naming `miniwob` needs no browser.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.core import registry

_GYMS: registry.Registry[Callable[..., Any]] = registry.Registry("gym")
_ENVS: registry.Registry[Any] = registry.Registry("environment")
_HERE = "tunix.rl.multi_turn.environments"
for _name, _path in {
    "desktop": "gyms.desktop:DesktopGym",
    "gymnasium": "gyms.gymnasium.gym:GymnasiumGym",
    "miniwob": "gyms.miniwob:MiniWobGym",
    "browser": "gyms.browser:WebGym",
    "xdesktop": "gyms.xdesktop:XDesktopGym",
    "genv": "gyms.genv:GenvGym",
    "openenv": "gyms.openenv.gym:OpenEnvGym",
    "osworld": "gyms.osworld.gym:OSWorldGym",
    "android_world": "gyms.android_world.gym:AndroidWorldGym",
    "gbox": "gyms.gbox.gym:GboxGym",
    "computer": "gyms.computer.gym:ComputerGym",
}.items():
  _GYMS.register(_name, f"{_HERE}.{_path}")
_TASK_SETS: registry.Registry[Callable[..., Any]] = registry.Registry(
    "task set"
)
for _name, _path in {
    "desktop": "gyms.desktop:DesktopTasks",
    "gymnasium": "gyms.gymnasium.gym:FamilyTasks",
    "miniwob": "gyms.miniwob:MiniWobTasks",
    "browser": "gyms.browser:WebTasks",
    "xdesktop": "gyms.xdesktop:XDesktopTasks",
}.items():
  _TASK_SETS.register(_name, f"{_HERE}.{_path}")
for _name, _path in {
    "tool": "tool_environment:ToolEnvironment",
    "cua": "cua_env:CUAEnv",
    "gsm8k": "gsm8k_env:Gsm8kEnvironment",
}.items():
  _ENVS.register(_name, f"{_HERE}.{_path}")


def register_gym(
    name: str, factory: Callable[..., Any] | str | None = None
) -> Callable[..., Any]:
  """Adds a gym factory or the dotted path of one; usable as a decorator.

  Raises:
    ValueError: the name is taken.
  """
  return _GYMS.register(name, factory)


def unregister_gym(name: str) -> bool:
  """Removes a gym; False when there was none of that name."""
  return _GYMS.unregister(name)


def make_gym(name: str, **kwargs: Any) -> Any:
  """Builds a gym.

  Raises:
    ValueError: unknown; the message names the nearest one.
    ImportError: the gym's package is missing.
  """
  return _GYMS.get(name)(**kwargs)


def gym_from_config(config: str | Mapping[str, Any]) -> Any:
  """Builds a gym from its name, or from {"name": …, and its settings}.

  A factory with a `from_dict` gets the settings through it.

  Raises:
    ValueError: no name, or an unknown one.
  """
  if isinstance(config, str):
    config = {"name": config}
  settings = dict(config)
  if "name" not in settings:
    raise ValueError(f"the gym config needs 'name': {settings!r}")
  factory = _GYMS.get(settings.pop("name"))
  from_dict = getattr(factory, "from_dict", None)
  return from_dict(settings) if from_dict else factory(**settings)


def gym_names() -> tuple[str, ...]:
  return _GYMS.names()


def register_task_set(
    name: str, factory: Callable[..., Any] | str | None = None
) -> Callable[..., Any]:
  """Adds the tasks of the gym of that name; usable as a decorator.

  Args:
    name: the gym's.
    factory: `(families, **settings) -> gyms.base.TaskSet`, families being None
      for all; the set's `families()` tells which those are.

  Raises:
    ValueError: the name is taken.
  """
  return _TASK_SETS.register(name, factory)


def unregister_task_set(name: str) -> bool:
  """Removes a gym's tasks; False when there were none."""
  return _TASK_SETS.unregister(name)


def has_task_set(name: str) -> bool:
  return name in _TASK_SETS


def make_task_set(name: str, families: Any = None, **settings: Any) -> Any:
  """Builds the tasks of a gym.

  Args:
    name: the gym's.
    families: those to offer; none or empty for all.
    **settings: of the task set, e.g. difficulty.

  Raises:
    ValueError: a gym without tasks, an unknown family or a wrong setting.
    ImportError: the gym's package is missing.
  """
  factory = _TASK_SETS.get(name)
  try:
    return factory(tuple(families) if families else None, **settings)
  except TypeError as error:
    raise ValueError(f"tasks of gym {name!r}: {error}") from None


def register_env(name: str, env: Any = None) -> Callable[..., Any]:
  """Adds an environment class, or the dotted path of one."""
  return _ENVS.register(name, env)


def unregister_env(name: str) -> bool:
  """Removes an environment; False when there was none of that name."""
  return _ENVS.unregister(name)


def get_env(name: str) -> Any:
  """The environment class of that name.

  Raises:
    ValueError: unknown; the message names the nearest one.
  """
  return _ENVS.get(name)


def env_names() -> tuple[str, ...]:
  return _ENVS.names()
