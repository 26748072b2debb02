"""Rooms that are packages of their own now, by their former names.

`tunix.rl.multi_turn.monitor.client.ingest_client` is the same object as the
module `training_monitor.client.ingest_client`, and so is every other module of
a room in `ROOMS`; `python -m` takes either name.

Promises: nothing is imported in advance. Without the package the import of a
former name raises ModuleNotFoundError, which says how to install the package.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any, cast

_HERE = __name__.rpartition(".")[0]

ROOMS = {
  "monitor": "training_monitor",
  "environments.gym_server": "cua_gyms.gym_server",
  **{
    f"environments.gyms.{name}": f"cua_gyms.{name}"
    for name in (
      "android_world",
      "browser",
      "chromium",
      "computer",
      "gbox",
      "genv",
      "grounding",
      "gymnasium",
      "miniwob",
      "openenv",
      "osworld",
      "xdesktop",
    )
  },
  **{
    f"parser.tool_parser.grammars.{name}": f"cua_gyms.grammars.{name}"
    for name in (
      "android_world",
      "anthropic_computer",
      "gemini",
      "glm_v",
      "mai_ui",
      "openai_computer",
      "opencua",
      "ui_tars",
    )
  },
  "agents.runs.settings": "tunix.rl.multi_turn.agents.agent_settings",
  "environments.workers": "cua_gyms.workers",
  "environments.gyms.machines": "cua_gyms.machines",
  "environments.python_tool": "cua_gyms.sandbox.python_tool",
  "tools.sandbox": "cua_gyms.sandbox",
  **{
    f"environments.gyms.xdesktop.{former}": f"cua_gyms.sandbox.{now}"
    for former, now in (
      ("errors", "sandbox_errors"),
      ("files", "files"),
      ("processes", "processes"),
      ("sandbox", "rooms"),
    )
  },
  "agents.run_agent": "agent_services.runs.run_agent",
  "agents.run_service": "agent_services.run_service",
  "agents.runs": "agent_services.runs",
  "clients.cua_workflow": "agent_services.cua_workflow",
  "clients.run_episodes": "agent_services.runs.run_episodes",
  "serving": "agent_services.serving",
  "trajectory_collector.buffer_service": "agent_services.rollout_buffer",
}
"""Former names below `tunix.rl.multi_turn`, and what they are now."""

NEEDS = {"agent_services": ("cua_gyms",)}
"""Package -> packages of this repository that it requires. No index has them,
so pip must be given them too."""


class _SameModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports a module of a former room from its package."""

  def __init__(self) -> None:
    self._specs: dict[str, Any] = {}
    """Specs that the modules have by their own names."""

  def find_spec(self, fullname, path=None, target=None):
    del path, target
    own = own_name(fullname)
    if own is None:
      return None
    package = own.partition(".")[0]
    if importlib.util.find_spec(package) is None:
      raise ModuleNotFoundError(where(fullname, package), name=package)
    spec = importlib.util.find_spec(own)
    if spec is None:
      return None
    alias = importlib.machinery.ModuleSpec(
      fullname,
      self,
      origin=spec.origin,  # `python -m` makes it sys.argv[0].
    )
    alias.submodule_search_locations = spec.submodule_search_locations
    return alias

  def get_code(self, fullname):
    """Returns the module's code, for `python -m`."""
    name = cast(str, own_name(fullname))
    spec: Any = importlib.util.find_spec(name)
    return spec.loader.get_code(name)

  def create_module(self, spec):
    module = importlib.import_module(cast(str, own_name(spec.name)))
    self._specs[spec.name] = module.__spec__
    return module

  def exec_module(self, module):
    # The import system has set the other name's.
    module.__spec__ = self._specs.pop(module.__spec__.name)


def where(name: str, package: str) -> str:
  """Tells which package of this repository has something, and its fix."""
  folders = " ".join(
    f"-e packages/{one}" for one in (*NEEDS.get(package, ()), package)
  )
  return f"{name} needs the package {package}; pip install {folders}"


def own_name(fullname: str) -> str | None:
  """Returns the name that a module has in its package; None for others."""
  below = fullname.removeprefix(f"{_HERE}.")
  if below == fullname:
    return None
  room = below
  while room and room not in ROOMS:
    room = room.rpartition(".")[0]
  return ROOMS[room] + below.removeprefix(room) if room else None


def install() -> None:
  """Makes former names importable; a second call changes nothing."""
  # By name, because `%autoreload` makes the class anew.
  if not any(type(f).__module__ == __name__ for f in sys.meta_path):
    sys.meta_path.insert(0, _SameModules())
