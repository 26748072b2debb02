"""Defines task families: the setup of a desktop, and its check.

A family is a function of a random generator that gives an `Instance`: the same
seed, the same instance. It checks state (files, settings, windows), never
pixels, and all of it: an episode that does the task and damages another file
has not solved it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
from typing import Callable, Iterator, Mapping

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry

from cua_gyms.xdesktop import desktop as desktops
from cua_gyms.xdesktop import scripted_actions as hand_lib
from cua_gyms.xdesktop import state as state_lib

Script = Callable[[hand_lib.Hand], Iterator[gui_action.GuiAction]]


@dataclasses.dataclass(frozen=True)
class Instance:
  """One task on one desktop.

  Attributes:
    instruction: the task, for the policy.
    check: names the first unmet condition; "" when the task is solved.
    script: the right actions, one after the other.
    files: path in the home -> text, None for a directory.
    opens: (application, file in the home, …) that are open at the start.
  """

  instruction: str
  check: Callable[[state_lib.State], str]
  script: Script
  files: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
  opens: tuple[tuple[str, ...], ...] = ()

  def oracle(
    self, look: Callable[[], np.ndarray], zoom: int
  ) -> Iterator[gui_action.GuiAction]:
    """Runs `script` on the screenshots of `look` (`scripted_actions.Hand`)."""
    return self.script(hand_lib.Hand(look, zoom))


@dataclasses.dataclass(frozen=True)
class Family:
  """Attributes:

  make: a random generator -> an instance.
  max_turns: about twice what the script needs on a machine at rest.
  """

  name: str
  make: Callable[[random.Random], Instance]
  max_turns: int


FAMILIES: dict[str, Family] = {}


def family(name: str, max_turns: int):
  """Registers a function as a family."""

  def add(make: Callable[[random.Random], Instance]):
    if name in FAMILIES:
      raise ValueError(f"there are two families {name!r}")
    FAMILIES[name] = Family(name, make, max_turns)
    return make

  return add


def get(name: str) -> Family:
  """Looks a family up. Raises ValueError with the nearest name."""
  if name not in FAMILIES:
    raise ValueError(
      registry.unknown_name("xdesktop task family", name, tuple(FAMILIES))
    )
  return FAMILIES[name]


def names() -> tuple[str, ...]:
  """Names of all families, sorted."""
  return tuple(sorted(FAMILIES))


@functools.lru_cache(maxsize=1024)
def instance(name: str, seed: int) -> Instance:
  """Returns the instance of a family that a seed stands for.

  Raises:
    ValueError: no such family, or a negative seed.
  """
  if seed < 0:
    raise ValueError(f"seed must be >= 0, got {seed}")
  return get(name).make(random.Random(f"{name}/{seed}"))


def furnish(desktop: desktops.Desktop, task: Instance) -> None:
  """Puts the files of a task in the home and opens its applications."""
  room = desktop.room
  for name, text in task.files.items():
    path = room.home / name
    if text is None:
      path.mkdir(parents=True, exist_ok=True)
    else:
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text, encoding="utf-8")
  for app, *files in task.opens:
    paths = [str(pathlib.PurePosixPath(room.inside_home, f)) for f in files]
    desktop.open(app, *paths)


# -- what checks are made of ---------------------------------------------------


def tree_of(files: Mapping[str, str | None]) -> dict[str, str | None]:
  """`State.tree` of a home that holds just these files."""
  tree: dict[str, str | None] = {}
  for name, text in files.items():
    for parent in pathlib.PurePosixPath(name).parents:
      if str(parent) != ".":
        tree[str(parent)] = None
    tree[name] = text if text is None else text.rstrip("\n")
  return tree


def expect_tree(
  state: state_lib.State, expected: Mapping[str, str | None]
) -> str:
  """Returns the first difference of the home's files, "" for none."""
  expected = tree_of(expected)
  actual = state.tree()
  for name in sorted({*expected, *actual}):
    if name not in actual:
      return f"there is no {name}"
    if name not in expected:
      return f"there is {name}, which should not be"
    if actual[name] != expected[name]:
      return f"{name} does not hold what it should"
  return ""


WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "falcon", "garnet", "harbor",
    "indigo", "juniper", "kestrel", "lagoon", "meadow", "nectar", "orchid",
    "pepper", "quartz", "raven", "saffron", "timber", "umber", "velvet",
    "willow", "yarrow", "zephyr",
)  # fmt: skip


def lines(rng: random.Random, count: int) -> list[str]:
  """Distinct lines of two words each."""
  words = rng.sample(WORDS, 2 * count)
  return [f"{a} {b}" for a, b in zip(words[::2], words[1::2])]
