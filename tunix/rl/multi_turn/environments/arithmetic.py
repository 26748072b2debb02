"""Makes arithmetic problems: the tasks that come with text environments.

Families `add`, `subtract`, `multiply` of numbers below ten, `add_tens` of
numbers below a hundred, `multiply_hundreds` of numbers below a thousand, and
the families of `word_problems`. A problem is a function of family, split, index
and seed; training and held-out problems share no pair of numbers, but have the
same numbers. Problems in words share no template instead.

`solve` demonstrates them with the tools of the run: one that evaluates an
`expression` (calculator), one that runs Python `code`, or one of two numbers
called `add`, `subtract` or `multiply`; without any tool, by answering.
"""

from __future__ import annotations

import random
import re
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import word_problems
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

_FAMILIES = {
  "add": ("+", 10, lambda a, b: a + b),
  "subtract": ("-", 10, lambda a, b: a - b),
  "multiply": ("*", 10, lambda a, b: a * b),
  "add_tens": ("+", 100, lambda a, b: a + b),
  "multiply_hundreds": ("*", 1000, lambda a, b: a * b),
}
_ALL_FAMILIES = (*_FAMILIES, *word_problems.FAMILIES)
_HELD_OUT = 5  # One pair of numbers in five is held out.


class ArithmeticTasks(seeds.SplitTasks):
  """A `gyms.base.TaskSet` without end; see the module docstring."""

  def __init__(self, families: Sequence[str] | None = None):
    """`families`: Families to offer, None or empty for `add` alone.

    Raises:
      ValueError: an unknown family, naming the nearest one.
    """
    for family in families or ():
      if family not in _ALL_FAMILIES:
        raise ValueError(
          registry.unknown_name("task family", family, _ALL_FAMILIES)
        )
    self._families = tuple(families or ("add",))

  def _task(self, family: str, split: str, index: int, seed: int) -> base.Task:
    draw = random.Random(f"{family}/{split}/{index}/{seed}")
    held_out = split == "eval"
    if family in word_problems.FAMILIES:
      question, _, answer = word_problems.draw(family, held_out, draw)
    else:
      question, answer = _two_numbers(family, held_out, draw)
    return base.Task(
      task_id=f"{family}/{split}/{index}/{seed}",
      family=family,
      instruction=question,
      seed=seed,
      params={"question": question, "answer": str(answer)},
    )


def _two_numbers(
  family: str, held_out: bool, draw: random.Random
) -> tuple[str, int]:
  """Returns a question about two numbers, and its answer."""
  sign, limit, result = _FAMILIES[family]
  while True:
    a, b = draw.randrange(limit), draw.randrange(limit)
    if _is_held_out(a, b) == held_out:
      return f"What is {a} {sign} {b}?", result(a, b)


def _is_held_out(a: int, b: int) -> bool:
  """Whether a pair of numbers, in either order, is held out.

  Each number is in pairs of both kinds: a policy that has read it in training
  can be asked for it.
  """
  return (min(a, b) + 2 * max(a, b)) % _HELD_OUT == 0


_PROBLEM = re.compile(r"What is (\d+ [+*-] \d+)\?")
_TWO_NUMBERS = re.compile(r"(\d+) ([+*-]) (\d+)")
_VERBS = {"+": "add", "-": "subtract", "*": "multiply"}


def solve(
  fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Returns the turns that solve a problem of this module.

  Args:
    fields: Fields of the task, with `question` and `answer`.
    tools: OpenAI schemas; the first that can compute the problem is used.

  Returns:
    Assistant messages in OpenAI's form.

  Raises:
    LookupError: another question, or tools of which none can compute it.
  """
  question = str(fields.get("question", ""))
  match = _PROBLEM.fullmatch(question)
  expression = word_problems.expression(question) if match is None else match[1]
  if expression is None:
    raise LookupError(
      f"{fields.get('question')!r:.80} is not an arithmetic problem of"
      " environment.name=tool"
    )
  answer = {"role": "assistant", "content": str(fields["answer"])}
  if not tools:
    return [answer]
  for tool in tools:
    function = tool.get("function", tool)
    arguments = _arguments(function, expression)
    if arguments is not None:
      call = {"name": function["name"], "arguments": arguments}
      calls = [{"type": "function", "function": call}]
      return [{"role": "assistant", "tool_calls": calls}, answer]
  names = ", ".join(str(t.get("function", t).get("name")) for t in tools)
  raise LookupError(
    f"none of the tools {names} can compute {question!r}; offer one"
    " with a parameter `expression` or `code`, or of two numbers called"
    f" {', '.join(_VERBS.values())}"
  )


def _arguments(
  function: Mapping[str, Any], expression: str
) -> dict[str, Any] | None:
  """Arguments with which this tool computes it; None: it cannot."""
  parameters = function.get("parameters") or {}
  names = list(parameters.get("properties") or {})
  if "expression" in names:
    return {"expression": expression}
  if "code" in names:
    return {"code": f"print({expression})"}
  two_numbers = _TWO_NUMBERS.fullmatch(expression)
  if two_numbers is None or len(names) != 2:
    return None
  a, sign, b = two_numbers.groups()
  if function.get("name") == _VERBS[sign]:
    return dict(zip(names, (int(a), int(b))))
  return None
