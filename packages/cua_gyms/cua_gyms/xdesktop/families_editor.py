"""Defines task families of the text editor."""

from __future__ import annotations

import random

from cua_gyms.xdesktop import families
from cua_gyms.xdesktop import scripted_actions as hand_lib

Hand = hand_lib.Hand
Instance = families.Instance
_SAVE = "ctrl+s"
# From the corner of its window: the View menu, and its entries.
_VIEW = (164, 36)
_VIEW_ENTRIES = {
  "line numbers": (214, 112, "view", "show-line-numbers"),
  "toolbar": (214, 163, "window", "toolbar-visible"),
  "statusbar": (214, 188, "window", "statusbar-visible"),
}
# From the corner of the dialog to find and replace.
_REPLACE_FIELD = (257, 86)
_REPLACE_ALL = (20, 239)
_REPLACE_BUTTON = (299, 280)


def _open_file(rng: random.Random, count: int) -> tuple[str, list[str]]:
  return f"{rng.choice(families.WORDS)}.txt", families.lines(rng, count)


def _text(rows: list[str]) -> str:
  return "".join(line + "\n" for line in rows)


@families.family("editor-append-line", 10)
def _append(rng: random.Random) -> Instance:
  name, rows = _open_file(rng, 4)
  *rows, new = rows

  def script(hand: Hand):
    yield hand.click(200, 200)
    yield hand.key("ctrl+end")
    yield hand.type(new)
    yield hand.key(_SAVE)

  return Instance(
    f'Add the line "{new}" at the end of {name}, which is open in the text'
    " editor, and save the file.",
    lambda state: families.expect_tree(state, {name: _text([*rows, new])}),
    script,
    {name: _text(rows)},
    (("editor", name),),
  )


@families.family("editor-replace-word", 24)
def _replace(rng: random.Random) -> Instance:
  name, rows = _open_file(rng, 4)
  old, new = rows[0].split()[0], "copper"
  rows = [f"{old} {line}" for line in rows]

  def script(hand: Hand):
    yield from hand.switch(hand.key("ctrl+r"))
    yield hand.type(old)
    yield hand.click(*_REPLACE_FIELD)
    yield hand.type(new)
    yield hand.click(*_REPLACE_ALL)
    yield from hand.change(hand.click(*_REPLACE_BUTTON))
    yield from hand.switch(hand.key("escape"))
    yield hand.key(_SAVE)

  changed = [line.replace(old, new) for line in rows]
  return Instance(
    f'Replace every "{old}" by "{new}" in {name}, which is open in the text'
    " editor, and save the file.",
    lambda state: families.expect_tree(state, {name: _text(changed)}),
    script,
    {name: _text(rows)},
    (("editor", name),),
  )


@families.family("editor-save-as", 24)
def _save_as(rng: random.Random) -> Instance:
  name, rows = _open_file(rng, 3)
  folder, copy = "Documents", f"{rng.choice(families.WORDS)}-copy.txt"

  def script(hand: Hand):
    yield from hand.switch(hand.key("ctrl+shift+s"))
    yield hand.key("ctrl+a")
    yield hand.type(f"~/{folder}/{copy}")
    yield from hand.insist(hand.key("enter"))

  files = {name: _text(rows), folder: None}
  return Instance(
    f"Save a copy of {name}, which is open in the text editor, as {copy} in"
    f" the folder {folder}. Keep the original.",
    lambda state: families.expect_tree(
      state, {**files, f"{folder}/{copy}": _text(rows)}
    ),
    script,
    files,
    (("editor", name),),
  )


@families.family("editor-view-setting", 6)
def _view_setting(rng: random.Random) -> Instance:
  name, rows = _open_file(rng, 3)
  what = rng.choice(sorted(_VIEW_ENTRIES))
  dx, dy, group, key = _VIEW_ENTRIES[what]

  def script(hand: Hand):
    yield from hand.change(hand.click(*_VIEW))
    yield from hand.change(hand.click(dx, dy))

  def check(state) -> str:
    if state.editor_setting(group, key) != "true":
      return f"the text editor does not show its {what}"
    return families.expect_tree(state, {name: _text(rows)})

  return Instance(
    f"Make the text editor show its {what}.",
    check,
    script,
    {name: _text(rows)},
    (("editor", name),),
  )
