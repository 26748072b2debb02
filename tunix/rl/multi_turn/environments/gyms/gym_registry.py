"""Maps names to gyms: each is declared once, by a `GymSpec`.

`GYMS` maps a name to a spec, or to the "module:GYM" path of one, which is
imported on first use. Installed packages add theirs by the entry points
`tunix.rl.multi_turn.gyms`. An operator's name may be a "module:attribute" path:
it holds a spec, or a plain class or function that makes a gym.

Promises: naming a gym imports its declaration and nothing else of it.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn import moved_rooms
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import spec as spec_lib

GymSpec = spec_lib.GymSpec


def _absent(name: str) -> str:
  """Tells which package of this repository has the gym; "" for none."""
  room = moved_rooms.own_name(f"{__package__}.{name}") or ""
  package = room.partition(".")[0]
  if not package or importlib.util.find_spec(package) is not None:
    return ""
  return moved_rooms.where(f"gym {name!r}", package)


GYMS: registry.Registry[Any] = registry.Registry(
  "gym", group="tunix.rl.multi_turn.gyms", absent=_absent
)
GYMS.register(
  "desktop", "tunix.rl.multi_turn.environments.gyms.desktop:GYM", replace=True
)


def register(
  name: str, gym: GymSpec | Callable[..., base.Gym] | str | None = None
) -> Any:
  """Adds a gym; without one, a decorator of a gym class.

  Args:
    name: Name to register.
    gym: A spec, a class or function that makes the gym, or the
      "module:attribute" path of a spec, class or function.

  Raises:
    ValueError: the name is taken.
    TypeError: `gym` is neither a spec nor callable.
  """
  if gym is not None and not isinstance(gym, str):
    spec_lib.as_spec(gym, name)
  return GYMS.register(name, gym)


def unregister(name: str) -> bool:
  """Removes a gym; False when there was none of that name."""
  return GYMS.unregister(name)


def names() -> tuple[str, ...]:
  """Registered names, sorted."""
  return GYMS.names()


def get(name: str, source: registry.Source = "request") -> GymSpec:
  """Returns the declaration of a gym.

  Args:
    name: Registered, or of an operator a "module:attribute" path.
    source: Who chose the name.

  Raises:
    ValueError: unknown, the message names the nearest one, or the package that
      has it; or a path that a request names.
    ImportError: no such module or attribute.
    TypeError: the path holds no gym.
  """
  spec = spec_lib.as_spec(GYMS.get(name, source), name)
  if name in GYMS:  # Its signatures are read once.
    GYMS.register(name, spec, replace=True)
  return spec


def make(name: str, **options: Any) -> base.Gym:
  """Builds a registered gym.

  Raises:
    ValueError: an unknown gym, or an unknown, missing or wrong option.
    ImportError: the gym's package is missing.
  """
  return get(name).make_gym(options)


def from_config(
  config: str | Mapping[str, Any], source: registry.Source = "request"
) -> base.Gym:
  """Builds a gym from its name, or from {"name": …, and its options}.

  Args:
    config: Name, or name and options.
    source: Who chose the name.

  Raises:
    ValueError: no name; and as `make`.
  """
  options = {"name": config} if isinstance(config, str) else dict(config)
  if "name" not in options:
    raise ValueError(f"the gym config needs 'name': {options!r}")
  return get(options.pop("name"), source).make_gym(options)
