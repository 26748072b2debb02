"""Defines task families of windows, terminal, calculator and settings."""

from __future__ import annotations

import random

from cua_gyms.xdesktop import families
from cua_gyms.xdesktop import scripted_actions as hand_lib

Hand = hand_lib.Hand
Instance = families.Instance
# The calculator's window is so wide; the buttons of a title bar are at its end.
_CALCULATOR_WIDTH = 333
_EDITOR_WIDTH = 562
_IN_EDITOR = (200, 400)
_CLOSE, _MAXIMIZE, _MINIMIZE = 12, 31, 50
_BUTTON_Y = 12
# Its keys, row by row, from the corner of its window.
_KEYS = ("789/", "456*", "123-", "0.±+")
_KEY_FIRST, _KEY_STEP, _EQUALS = (35, 223), (65, 40), (295, 322)


def _note(rng: random.Random) -> dict[str, str]:
  return {f"{rng.choice(families.WORDS)}.txt": families.lines(rng, 1)[0] + "\n"}


# -- windows -------------------------------------------------------------------


@families.family("window-close", 4)
def _close(rng: random.Random) -> Instance:
  files = _note(rng)
  (name,) = files

  def script(hand: Hand):
    yield from hand.switch(hand.click(_CALCULATOR_WIDTH - _CLOSE, _BUTTON_Y))

  def check(state) -> str:
    if state.windows("calculator"):
      return "the calculator is still open"
    return "" if state.windows("editor") else "the text editor was closed too"

  return Instance(
    "Close the calculator. Leave the text editor open.",
    check,
    script,
    files,
    (("editor", name), ("calculator",)),
  )


@families.family("window-maximize", 4)
def _maximize(rng: random.Random) -> Instance:
  files = _note(rng)
  (name,) = files

  def script(hand: Hand):
    yield from hand.switch(hand.click(_EDITOR_WIDTH - _MAXIMIZE, _BUTTON_Y))

  return Instance(
    "Maximize the window of the text editor.",
    lambda state: (
      ""
      if any(w.maximized for w in state.windows("editor"))
      else "the text editor is not maximized"
    ),
    script,
    files,
    (("editor", name),),
  )


@families.family("window-minimize", 4)
def _minimize(rng: random.Random) -> Instance:
  files = _note(rng)
  (name,) = files

  def script(hand: Hand):
    yield from hand.switch(hand.click(_CALCULATOR_WIDTH - _MINIMIZE, _BUTTON_Y))

  def check(state) -> str:
    windows = state.windows("calculator")
    if not windows:
      return "the calculator was closed"
    if not windows[0].minimized:
      return "the calculator is not minimized"
    hidden = any(w.minimized for w in state.windows("editor"))
    return "the text editor is minimized too" if hidden else ""

  return Instance(
    "Minimize the calculator. Leave the text editor as it is.",
    check,
    script,
    files,
    (("editor", name), ("calculator",)),
  )


# -- terminal ------------------------------------------------------------------


def _in_terminal(command: str):
  def script(hand: Hand):
    yield hand.click(200, 200)
    yield hand.type(command + "\n")
    yield hand.wait(0.5)

  return script


@families.family("terminal-make-folders", 6)
def _make_folders(rng: random.Random) -> Instance:
  top, *inner = rng.sample(families.WORDS, 3)
  paths = [f"{top}/{name}" for name in inner]
  return Instance(
    f"In the terminal, make the folder {top} in the home folder, and in it"
    f" the folders {inner[0]} and {inner[1]}.",
    lambda state: families.expect_tree(state, {p: None for p in paths}),
    _in_terminal("mkdir -p " + " ".join(paths)),
    {},
    (("terminal",),),
  )


@families.family("terminal-count-lines", 6)
def _count_lines(rng: random.Random) -> Instance:
  word = rng.choice(families.WORDS)
  rows = [
    f"{i} {word if rng.random() < 0.4 else 'other'}" for i in range(1, 31)
  ]
  rows[0] = f"1 {word}"
  count = sum(word in row for row in rows)
  files = {"events.log": "\n".join(rows) + "\n"}
  return Instance(
    f'Count the lines of events.log that hold "{word}", and write the number'
    " into count.txt in the home folder. A terminal is open.",
    lambda state: families.expect_tree(
      state, {**files, "count.txt": str(count)}
    ),
    _in_terminal(f"grep -c {word} events.log > count.txt"),
    files,
    (("terminal",),),
  )


# -- calculator ----------------------------------------------------------------


def _press(hand: Hand, keys: str):
  """Clicks keys of the calculator, then the one with the equals sign."""
  for key in keys:
    row = next(i for i, keys_of_row in enumerate(_KEYS) if key in keys_of_row)
    column = _KEYS[row].index(key)
    x, y = _KEY_FIRST
    yield hand.click(x + _KEY_STEP[0] * column, y + _KEY_STEP[1] * row)
  yield hand.click(*_EQUALS)


@families.family("calculator-to-file", 40)
def _calculate_to_file(rng: random.Random) -> Instance:
  a, b = rng.randrange(100, 999), rng.randrange(12, 99)

  def script(hand: Hand):
    yield from _press(hand, f"{a}*{b}")
    yield hand.key("ctrl+c")
    yield from hand.switch(hand.click_desktop(*_IN_EDITOR))
    yield hand.key("ctrl+v")
    yield from hand.switch(hand.key("ctrl+s"))
    yield hand.key("ctrl+a")
    yield hand.type("~/result.txt")
    yield from hand.insist(hand.key("enter"))

  return Instance(
    f"Compute {a} times {b} with the calculator and save the result, alone,"
    " as result.txt in the home folder with the text editor.",
    lambda state: families.expect_tree(state, {"result.txt": str(a * b)}),
    script,
    {},
    (("editor",), ("calculator",)),
  )


# -- what cannot be done -------------------------------------------------------


@families.family("infeasible", 4)
def _infeasible(rng: random.Random) -> Instance:
  files = _note(rng)
  (name,) = files
  absent = rng.choice(("holiday.mp4", "song.mp3", "slides.odp", "budget.ods"))

  def script(hand: Hand):
    yield hand_lib.Action(hand_lib.Kind.TERMINATE, success=False)

  def check(state) -> str:
    if not state.gave_up:
      return "the policy did not end the episode as infeasible"
    return families.expect_tree(state, files)

  return Instance(
    f"Rename the file {absent} in the home folder to final-{absent}. If that"
    " cannot be done, end the task as failed.",
    check,
    script,
    files,
    (("files", ""),),
  )
