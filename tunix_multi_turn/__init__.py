"""Starts programs of tunix.rl.multi_turn without running google-tunix first.

    tunix-mt train steps=40
    tunix-mt gym desktop --port 5010
    tunix-gym-server desktop --port 5010
    tunix-mt monitor serve
    tunix-play desktop
    tunix-rollout-buffer
    tunix-run-service --gyms desktop
    python -m tunix_multi_turn environments.gym_server desktop

A client in a program of one's own, such as a parser of model text:

    import tunix_multi_turn
    tunix_multi_turn.light()
    from tunix.rl.multi_turn.parser import tool_parser

The desktop as gymnasium environments: see `envs`, which is imported by itself.

`tunix` and `tunix.rl` are google-tunix's packages, and importing their names
imports all of it: JAX, Flax, Orbax, some seconds and 400 MB. `light` puts
packages in their place that run google-tunix's code once something asks for a
name in it.

Promises: modules of `tunix.rl.multi_turn` are the same with and without;
google-tunix's own stay importable.

Does not change anything once `tunix` has been imported.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from typing import Any, Mapping, Sequence

_ROOM = "tunix.rl.multi_turn"
_PACKAGES = ("tunix", "tunix.rl")

COMMANDS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
  {
    "train": ("train", "train a policy"),
    "plan": ("plan", "plan a run on TPUs that are not here"),
    "evaluate": ("evaluate", "measure a policy, or a server's model"),
    "serve": ("serving", "serve a policy to OpenAI clients"),
    "gym": ("environments.gym_server", "serve gyms over HTTP"),
    "monitor": ("monitor", "store and show runs: the Training Monitor"),
    "buffer": (
      "trajectory_collector.buffer_service",
      "keep rollouts between collectors and trainers",
    ),
    "run-service": (
      "agents.run_service",
      "play whole episodes for programs that ask over HTTP",
    ),
    "publish": (
      "commands.publish",
      "put a policy or episodes on the Hugging Face Hub",
    ),
    "doctor": ("doctor", "check this machine for a run, and what to mend"),
  }
)
"""Word after `tunix-mt` -> (module of tunix.rl.multi_turn, its purpose)."""


class _Deferred(types.ModuleType):
  """A package whose own code runs when a name of it is asked for."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):  # Of the import system, debuggers, pickle.
      raise AttributeError(f"module {self.__name__!r} has no {name!r}")
    self.__class__ = types.ModuleType  # type: ignore[assignment]
    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
    return getattr(self, name)


def light() -> None:
  """Makes `tunix.rl.multi_turn` importable without running google-tunix.

  Raises:
    ImportError: it is not installed.
  """
  if "tunix" in sys.modules:
    return
  for name in _PACKAGES:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
      raise ImportError(f"there is no package {name!r}; pip install -e . first")
    module = importlib.util.module_from_spec(spec)
    if spec.origin is not None:  # No code of its own otherwise.
      module.__class__ = _Deferred
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
      setattr(sys.modules[parent], child, module)


def is_light() -> bool:
  """Whether google-tunix's own code has not run in this process."""
  return isinstance(sys.modules.get("tunix"), _Deferred)


def run(module: str) -> None:
  """Runs a module of `tunix.rl.multi_turn` as `python -m` does.

  A user's modules are found in the current directory.
  """
  if not sys.flags.safe_path and os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  light()
  runpy.run_module(f"{_ROOM}.{module}", run_name="__main__", alter_sys=True)


def usage() -> str:
  """The text of `tunix-mt --help`."""
  return "\n".join(
    [
      "usage: tunix-mt COMMAND [arguments]",
      "",
      *(f"  {name:11} {text}" for name, (_, text) in COMMANDS.items()),
      "",
      "tunix-mt COMMAND --help explains each; python -m"
      f" {_ROOM}.commands lists more",
    ]
  )


def main(argv: Sequence[str] | None = None) -> int:
  """`tunix-mt`, `python -m tunix_multi_turn`: runs a command.

  Args:
    argv: A name of `COMMANDS`, or a module of `tunix.rl.multi_turn`, and
      arguments; None for the program's.

  Returns:
    2 where no command was started; a command ends the program itself.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  name = argv[0] if argv else ""
  if name in ("-h", "--help"):
    print(usage())
    return 0
  if not name:
    print(f"error: no command\n{usage()}", file=sys.stderr)
    return 2
  module = COMMANDS[name][0] if name in COMMANDS else name
  light()
  problem = (
    f"this installation has no {_ROOM}.{module}; install a newer"
    " tunix-multi-turn"
  )
  try:
    spec = importlib.util.find_spec(f"{_ROOM}.{module}")
    if spec and spec.submodule_search_locations:
      spec = importlib.util.find_spec(f"{_ROOM}.{module}.__main__")
  except ImportError as error:
    spec, problem = None, str(error)
  if spec is None:
    if name not in COMMANDS:
      from tunix.rl.multi_turn.core import registry  # pylint: disable=g-import-not-at-top

      hint = registry.did_you_mean(name, COMMANDS)
      hint = hint or f"; take {', '.join(COMMANDS)}"
      problem = f"tunix-mt has no command {name!r}{hint}"
    print(f"error: {problem}", file=sys.stderr)
    return 2
  sys.argv[1:] = argv[1:]
  run(module)
  return 0


def gym_server() -> int:
  return main(["gym", *sys.argv[1:]])


def run_service() -> int:
  return main(["run-service", *sys.argv[1:]])


def rollout_buffer() -> int:
  return main(["buffer", *sys.argv[1:]])


def play() -> None:
  run("environments.play")


# Of the package verifiers 0.4, which looks for its classes here.
__all__ = ("TunixHarness", "TunixTaskset")


def __getattr__(name: str) -> Any:
  """Imports our gyms as a taskset of verifiers: `verifiers_taskset`."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from tunix_multi_turn import verifiers_taskset  # pylint: disable=g-import-not-at-top

  return getattr(verifiers_taskset, name)


def load_environment(*args: Any, **options: Any) -> Any:
  """Our gyms as an environment of the package verifiers: `verifiers_env`."""
  from tunix_multi_turn import verifiers_env  # pylint: disable=g-import-not-at-top

  return verifiers_env.load_environment(*args, **options)
