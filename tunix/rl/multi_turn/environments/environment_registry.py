"""Maps names to environment classes. Gyms have a registry of their own."""

from __future__ import annotations

from typing import Any, Callable

from tunix.rl.multi_turn.core import registry

_ENVS: registry.Registry[Any] = registry.Registry("environment")
_HERE = "tunix.rl.multi_turn.environments"
for _name, _path in {
  "tool": "tool_environment:ToolEnvironment",
  "cua": "cua_env:CUAEnv",
  "gsm8k": "gsm8k_env:Gsm8kEnvironment",
}.items():
  _ENVS.register(_name, f"{_HERE}.{_path}")


def register_env(name: str, env: Any = None) -> Callable[..., Any]:
  """Adds an environment class, or the dotted path of one."""
  return _ENVS.register(name, env)


def unregister_env(name: str) -> bool:
  """Removes an environment; False when there was none of that name."""
  return _ENVS.unregister(name)


def get_env(name: str) -> Any:
  """Returns the environment class of that name.

  Raises:
    ValueError: unknown; the message names the nearest one.
  """
  return _ENVS.get(name)


def env_names() -> tuple[str, ...]:
  return _ENVS.names()
