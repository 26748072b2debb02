"""Makes arithmetic problems in words, from templates.

Families `words_2`, `words_3` and `words_4` take two, three and four operations
on numbers of two digits. The templates of held-out problems are never those of
training problems; names, things and numbers are drawn for each problem.

Promises: `expression` reads any problem of this module back from its text, so
that an oracle needs the question alone.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Mapping, NamedTuple

from tunix.rl.multi_turn.core import arithmetic


class Problem(NamedTuple):
  question: str
  expression: str
  answer: int


class _Template(NamedTuple):
  """A text with {a} to {e} for numbers, {n}, {m} for names, {t} for a thing."""

  text: str
  expression: str


class _Templates(NamedTuple):
  train: tuple[_Template, ...]
  held_out: tuple[_Template, ...]


_T = _Template
_TEMPLATES: Mapping[str, _Templates] = {
    "words_2": _Templates(
        train=(
            _T("{n} has {a} boxes of {b} {t} and buys {c} more {t}. How many"
               " {t} does {n} have?", "{a} * {b} + {c}"),
            _T("{n} has {a} boxes of {b} {t} and loses {c} {t}. How many {t}"
               " are left?", "{a} * {b} - {c}"),
            _T("{n} finds {a} {t}, {m} finds {b} and they give away {c}. How"
               " many {t} remain?", "{a} + {b} - {c}"),
            _T("A shop gets {a} red and {b} blue {t} on each of {c} days. How"
               " many {t} does it get?", "({a} + {b}) * {c}"),
            _T("Each of {a} rooms has {b} shelves with {c} {t}. How many {t}"
               " is that?", "{a} * {b} * {c}"),
            _T("{n} puts {a} {t} in each of {b} bags and has {c} over. How many"
               " {t} are there?", "{a} * {b} + {c}"),
            _T("There are {a} {t}. {n} takes {b} and {m} adds {c}. How many"
               " {t} are there now?", "{a} - {b} + {c}"),
            _T("{n} has {a} {t} and {m} has {b}. {n} buys {c} more. How many do"
               " they have?", "{a} + {b} + {c}"),
            _T("A day brings {a} {t}, of which {b} break. How many whole {t} do"
               " {c} days bring?", "({a} - {b}) * {c}"),
            _T("{n} makes {a} {t} an hour for {b} hours and sells {c}. How many"
               " {t} does {n} keep?", "{a} * {b} - {c}"),
            _T("{n} pays {a} coins for a bag and {b} for a pen, {c} times. How"
               " many coins does {n} pay?", "({a} + {b}) * {c}"),
            _T("{n} had {a} coins, spent {b} and found {c}. How many coins does"
               " {n} have now?", "{a} - {b} + {c}"),
        ),
        held_out=(
            _T("{m} packs {a} bags with {b} {t} each, and {c} {t} stay on the"
               " table. How many {t} are there?", "{a} * {b} + {c}"),
            _T("Of {a} {t}, {n} uses {b} and then brings {c} new ones. How many"
               " {t} are there now?", "{a} - {b} + {c}"),
            _T("{n} earns {a} coins a day and spends {b} of them. How many"
               " coins does {n} keep in {c} days?", "({a} - {b}) * {c}"),
        ),
    ),
    "words_3": _Templates(
        train=(
            _T("{n} has {a} boxes of {b} {t} and {m} has {c} boxes of {d}. How"
               " many {t} do they have?", "{a} * {b} + {c} * {d}"),
            _T("{n} buys {a} {t} for {b} coins each and {c} for {d} coins each."
               " How many coins is that?", "{a} * {b} + {c} * {d}"),
            _T("A shop gets {a} red and {b} blue {t} on each of {c} days and"
               " sells {d}. How many {t} are left?",
               "({a} + {b}) * {c} - {d}"),
            _T("{n} has {a} {t}, buys {b}, loses {c} and finds {d}. How many"
               " {t} does {n} have?", "{a} + {b} - {c} + {d}"),
            _T("Each of {a} rooms has {b} shelves with {c} {t}. {n} takes {d}"
               " {t} away. How many remain?", "{a} * {b} * {c} - {d}"),
        ),
        held_out=(
            _T("{m} packs {a} bags with {b} {t} each and {c} bags with {d}"
               " each. How many {t} are packed?", "{a} * {b} + {c} * {d}"),
            _T("{n} earns {a} coins a day and spends {b} of them. After {c}"
               " days {n} gets {d} coins more. How many coins does {n} have?",
               "({a} - {b}) * {c} + {d}"),
        ),
    ),
    "words_4": _Templates(
        train=(
            _T("{n} has {a} boxes of {b} {t}, {m} has {c} boxes of {d}, and"
               " they lose {e} {t}. How many {t} are left?",
               "{a} * {b} + {c} * {d} - {e}"),
            _T("{n} has {a} boxes of {b} {t} and {m} has {c} boxes of {d}. They"
               " buy {e} more {t}. How many {t} is that?",
               "{a} * {b} + {c} * {d} + {e}"),
            _T("A shop gets {a} red and {b} blue {t} on each of {c} days, sells"
               " {d} and buys {e}. How many {t} are left?",
               "({a} + {b}) * {c} - {d} + {e}"),
            _T("{n} has {a} {t}, buys {b}, loses {c}, finds {d} and sells {e}."
               " How many {t} does {n} have?",
               "{a} + {b} - {c} + {d} - {e}"),
        ),
        held_out=(
            _T("{m} packs {a} bags with {b} {t} each and {c} bags with {d}"
               " each; {e} {t} stay on the table. How many {t} are there?",
               "{a} * {b} + {c} * {d} + {e}"),
            _T("{n} earns {a} coins a day and {m} earns {b}. After {c} days"
               " they pay {d} for rent and {e} for food. How many coins do they"
               " keep?", "({a} + {b}) * {c} - {d} - {e}"),
        ),
    ),
}  # fmt: skip
FAMILIES = tuple(_TEMPLATES)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
THINGS = ("apples", "books", "cards", "eggs", "pens", "shells", "stamps")
_SMALLEST, _LARGEST = 11, 98


def draw(family: str, held_out: bool, source: random.Random) -> Problem:
  """Returns a problem in which no number ever falls to 0 or below.

  Args:
    family: One of `FAMILIES`.
    held_out: Whether the template is a held-out one.
    source: Source of the template, the words and the numbers.
  """
  templates = _TEMPLATES[family]
  template = source.choice(templates.held_out if held_out else templates.train)
  n, m = source.sample(NAMES, 2)
  words = {"n": n, "m": m, "t": source.choice(THINGS)}
  while True:
    numbers = {k: source.randint(_SMALLEST, _LARGEST) for k in "abcde"}
    expression = template.expression.format(**numbers)
    if min(_results(expression)) > 0:
      question = template.text.format(**words, **numbers)
      answer = int(arithmetic.evaluate(expression))
      return Problem(question, expression, answer)


def _results(expression: str) -> list[float]:
  """Returns the results on the way: a - b + c has a, a - b, a - b + c."""
  results = []
  for end in re.finditer(r" [+-] |\)|$", expression):
    part = expression[: end.start()]
    closed = part + ")" * (part.count("(") - part.count(")"))
    results.append(arithmetic.evaluate(closed))
  return results


def expression(question: str) -> str | None:
  """Returns what has to be computed, or None where no template matches."""
  for pattern, template in _patterns():
    match = pattern.fullmatch(question)
    if match is not None:
      return template.expression.format(**match.groupdict())
  return None


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], _Template], ...]:
  return tuple(
    (re.compile(_pattern(template.text)), template)
    for templates in _TEMPLATES.values()
    for template in templates.train + templates.held_out
  )


def _pattern(text: str) -> str:
  """Returns a regular expression whose groups are the fields of a template."""
  parts = re.split(r"\{(\w)\}", text)  # Literal text and fields by turns.
  pattern = re.escape(parts[0])
  for i in range(1, len(parts), 2):
    field = parts[i]
    first = field not in parts[1:i:2]
    pattern += f"(?P<{field}>[A-Za-z0-9]+)" if first else f"(?P={field})"
    pattern += re.escape(parts[i + 1])
  return pattern
