"""Finds the programs that a desktop needs.

Debian's names; `make desktop` installs them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import shutil
from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.core import registry

from cua_gyms.sandbox import rooms
from cua_gyms.sandbox import sandbox_errors


@dataclasses.dataclass(frozen=True)
class App:
  """An application that a task, or a policy, may open.

  Attributes:
    command: its arguments; a file to open is added.
    window_class: WM_CLASS of its window.
    title: its name in instructions and in the desktop's menu.
  """

  command: tuple[str, ...]
  window_class: str
  title: str


APPS: Mapping[str, App] = {
  "editor": App(("mousepad",), "Mousepad", "Text Editor"),
  "files": App(("pcmanfm", "--no-desktop"), "Pcmanfm", "File Manager"),
  "calculator": App(("galculator",), "Galculator", "Calculator"),
  "terminal": App(("xterm",), "XTerm", "Terminal"),
  "appearance": App(("lxappearance",), "Lxappearance", "Appearance"),
}
_SERVERS = ("Xvfb", "xkbcomp", "openbox", "prlimit")


def app(name: str) -> App:
  """Returns the application of that name, or title, in any case.

  Raises:
    ValueError: there is none; gives the nearest name.
  """
  query = name.strip().lower()
  for key, candidate in APPS.items():
    if query in (key, candidate.title.lower(), candidate.command[0]):
      return candidate
  raise ValueError(registry.unknown_name("application", name, tuple(APPS)))


def missing() -> tuple[str, ...]:
  """Names of the programs and libraries that are not installed."""
  commands = [*_SERVERS, *(program.command[0] for program in APPS.values())]
  absent = [c for c in commands if shutil.which(c, path=rooms.SEARCH) is None]
  try:
    ctypes.CDLL("libxcb.so.1")
  except OSError:
    absent.append("libxcb.so.1")
  return tuple(absent)


def needs(options: Mapping[str, Any]) -> Iterator[str]:
  """`GymSpec.needs`: programs, and the driver of displays."""
  del options
  if absent := missing():
    yield f"{', '.join(absent)} not found; install them: sudo make desktop"
  if importlib.util.find_spec("xcffib") is None:
    yield "no package xcffib; pip install 'tunix-multi-turn[xdesktop]'"


def require() -> None:
  """Raises:

  ProgramsNotFound: names the missing programs and their packages.
  """
  absent = missing()
  if absent:
    raise sandbox_errors.ProgramsNotFound(
      f"a desktop needs {', '.join(absent)}, not found in {rooms.SEARCH};"
      " install them with: sudo make desktop"
    )
