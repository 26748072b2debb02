"""Reads the state that judges a task: files, settings, windows."""

from __future__ import annotations

import configparser
import os
import pathlib

from tunix.rl.multi_turn.core import gui_action

from cua_gyms.sandbox import files as files_lib
from cua_gyms.xdesktop import desktop as desktops
from cua_gyms.xdesktop import display as displays
from cua_gyms.xdesktop import programs

_MAX_ENTRIES = 10_000


class State:
  """A desktop as an episode left it. Changes nothing.

  Attributes:
    answer: the policy's answer, "" for none.
    gave_up: the policy ended the episode as infeasible.
  """

  def __init__(
    self,
    desktop: desktops.Desktop,
    answer: str = "",
    last: gui_action.GuiAction | None = None,
  ):
    self._desktop = desktop
    self.answer = answer
    self.gave_up = (
      last is not None
      and last.kind is gui_action.GuiActionKind.TERMINATE
      and last.success is False
    )

  def text(self, name: str) -> str | None:
    """A file of the home, without the line breaks at its end; or None."""
    missing = "\0"
    contents = files_lib.read_text(self._desktop.room.home, name, missing)
    return None if contents == missing else contents.rstrip("\n")

  def tree(self) -> dict[str, str | None]:
    """Returns every file and directory of the home but hidden ones.

    Returns:
      Its path -> its text as `text` has it, None for a directory, "link" for
      a link, which is not followed.
    """
    home = self._desktop.room.home
    entries: dict[str, str | None] = {}
    for folder, folders, files in os.walk(home):
      folders[:] = sorted(f for f in folders if not f.startswith("."))
      base = pathlib.Path(folder)
      for name in sorted([*folders, *files]):
        if name.startswith(".") or len(entries) >= _MAX_ENTRIES:
          continue
        path = base / name
        key = path.relative_to(home).as_posix()
        if path.is_symlink():
          entries[key] = "link"
        elif name in folders:
          entries[key] = None
        else:
          entries[key] = self.text(key)
    return entries

  def setting(self, name: str, section: str, key: str) -> str | None:
    """Returns a value of an INI file of the home; None when there is none."""
    parser = configparser.ConfigParser(
      interpolation=None, strict=False, allow_no_value=True
    )
    try:
      parser.read_string(self.text(name) or "")
      return parser.get(section, key)
    except configparser.Error:
      return None

  def editor_setting(self, group: str, key: str) -> str | None:
    """Returns a setting of the text editor, e.g. ("view", "word-wrap")."""
    return self.setting(
      ".config/glib-2.0/settings/keyfile",
      f"org/xfce/mousepad/preferences/{group}",
      key,
    )

  def windows(self, app: str) -> list[displays.Window]:
    """Windows of an application, dialogs included."""
    window_class = programs.app(app).window_class
    windows = self._desktop.display.windows()
    return [w for w in windows if w.window_class == window_class]
