"""Defines task families of the file manager."""

from __future__ import annotations

import random

from cua_gyms.xdesktop import families
from cua_gyms.xdesktop import scripted_actions as hand_lib

Hand = hand_lib.Hand
Instance = families.Instance
# Icons lie in rows of five, folders first, from the corner of the window.
_FIRST, _STEP, _COLUMNS = (208, 116), (94, 73), 5
_EMPTY = (420, 400)
_OPENS = (("files", ""),)


def _point(index: int) -> tuple[int, int]:
  row, column = divmod(index, _COLUMNS)
  return _FIRST[0] + _STEP[0] * column, _FIRST[1] + _STEP[1] * row


def _home(
  rng: random.Random, folders: int, count: int
) -> tuple[dict[str, str | None], list[str]]:
  """(the files of a home, its entries in the order of their icons)."""
  words = rng.sample(families.WORDS, folders + count)
  parts = sorted(w.capitalize() for w in words[:folders])
  texts = sorted(f"{w}.txt" for w in words[folders:])
  files: dict[str, str | None] = {name: None for name in parts}
  files |= {n: families.lines(rng, 1)[0] + "\n" for n in texts}
  return files, [*parts, *texts]


@families.family("files-rename", 10)
def _rename(rng: random.Random) -> Instance:
  files, shown = _home(rng, 1, 4)
  old, new = rng.choice(shown[1:]), "renamed-" + rng.choice("abcdefgh") + ".txt"

  def script(hand: Hand):
    yield hand.click(*_point(shown.index(old)))
    yield from hand.switch(hand.key("f2"))
    yield hand.key("ctrl+a")
    yield hand.type(new)
    yield from hand.switch(hand.key("enter"))

  expected = {new if n == old else n: text for n, text in files.items()}
  return Instance(
    f"Rename the file {old} in the file manager to {new}.",
    lambda state: families.expect_tree(state, expected),
    script,
    files,
    _OPENS,
  )


@families.family("files-move", 12)
def _move(rng: random.Random) -> Instance:
  files, shown = _home(rng, 2, 3)
  name, folder = rng.choice(shown[2:]), rng.choice(shown[:2])

  def script(hand: Hand):
    yield hand.click(*_point(shown.index(name)))
    yield hand.key("ctrl+x")
    yield from hand.change(hand.click(*_point(shown.index(folder)), count=2))
    yield hand.click(*_EMPTY)
    yield from hand.change(hand.key("ctrl+v"))
    yield hand.wait(0.5)

  expected = {n: text for n, text in files.items() if n != name}
  expected[f"{folder}/{name}"] = files[name]
  return Instance(
    f"Move the file {name} into the folder {folder}.",
    lambda state: families.expect_tree(state, expected),
    script,
    files,
    _OPENS,
  )


@families.family("files-show-hidden", 4)
def _show_hidden(rng: random.Random) -> Instance:
  files, _ = _home(rng, 1, 2)

  def script(hand: Hand):
    yield hand.click(*_EMPTY)
    yield from hand.change(hand.key("ctrl+h"))

  def check(state) -> str:
    config = ".config/pcmanfm/default/pcmanfm.conf"
    if state.setting(config, "ui", "show_hidden") != "1":
      return "the file manager does not show hidden files"
    return families.expect_tree(state, files)

  return Instance(
    "Make the file manager show hidden files.", check, script, files, _OPENS
  )


@families.family("files-answer", 6)
def _answer(rng: random.Random) -> Instance:
  people = [w.capitalize() for w in rng.sample(families.WORDS, 4)]
  numbers = [f"555-{rng.randrange(1000, 10000)}" for _ in people]
  person = rng.randrange(4)
  text = "".join(f"{p}: {n}\n" for p, n in zip(people, numbers))

  def script(hand: Hand):
    yield hand_lib.Action(hand_lib.Kind.ANSWER, text=numbers[person])

  return Instance(
    f"What is {people[person]}'s number in contacts.txt? Answer with the"
    " number alone.",
    lambda state: (
      ""
      if state.answer.strip() == numbers[person]
      else "the answer is not the number"
    ),
    script,
    {"contacts.txt": text},
    (("editor", "contacts.txt"),),
  )
