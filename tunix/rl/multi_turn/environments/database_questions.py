"""Makes questions about a database that has to be explored with `sql`.

Each task has a database of its own, whose tables and columns have names drawn
from lists: a policy lists the tables, looks at their columns, queries them one
by one and answers with a number. A call a turn, an episode takes

    database_total       6 turns: what one person got of one thing
    database_items       8 turns: the same, where things have a table too
    database_difference  9 turns: how much more one person got than another

Held-out questions have wordings of their own. `solve` demonstrates a task by
the queries that its maker wrote down, which no policy sees.
"""

from __future__ import annotations

import random
from typing import Any, Mapping, NamedTuple, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import word_problems
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

_SUM = (
  (
    "How many {t} did {n} get in all?",
    "What is the sum of the {t} that {n} got?",
    "Count all the {t} that went to {n}.",
    "{n} got {t} on several days. How many were there?",
    "Find the number of {t} that {n} received.",
  ),
  ("In total, how many {t} belong to {n}?", "Add up what {n} got of the {t}."),
)
_MORE = (
  (
    "How many more {t} did {n} get than {m}?",
    "{n} got more {t} than {m}. By how many?",
    "What is the difference between the {t} of {n} and those of {m}?",
    "By how many {t} is {n} ahead of {m}?",
  ),
  (
    "How many {t} does {m} lack to have as many as {n}?",
    "Subtract the {t} of {m} from those of {n}.",
  ),
)
_WORDINGS = {
  "database_total": _SUM,
  "database_items": _SUM,
  "database_difference": _MORE,
}
"""Family -> wordings of training questions, and of held-out ones."""
FAMILIES = tuple(_WORDINGS)
TOOL = "sql"
_TABLES = "SELECT name FROM sqlite_master"


class _Names(NamedTuple):
  """Tables and columns of a database; alternatives are drawn from."""

  people: str = "people clients members guests"
  name: str = "name who label"
  records: str = "orders deliveries entries records"
  person: str = "person owner client"
  thing: str = "thing article item"
  amount: str = "amount units number"
  things: str = "things goods wares"
  other: str = "notes rooms prices"


class DatabaseTasks(seeds.SplitTasks):
  """A `gyms.base.TaskSet` without end; see the module docstring."""

  def __init__(self, families: Sequence[str] | None = None):
    """`families`: Families to offer, None or empty for `database_total`.

    Raises:
      ValueError: an unknown family, naming the nearest one.
    """
    for family in families or ():
      if family not in FAMILIES:
        raise ValueError(registry.unknown_name("task family", family, FAMILIES))
    self._families = tuple(families or FAMILIES[:1])

  def _task(self, family: str, split: str, index: int, seed: int) -> base.Task:
    draw = random.Random(f"{family}/{split}/{index}/{seed}")
    names = _Names(*(draw.choice(field.split()) for field in _Names()))
    people = _numbered(word_problems.NAMES, 4, draw)
    things = _numbered(word_problems.THINGS, 3, draw)
    apart = family == "database_items"
    records = [
      (person, thing, draw.randint(2, 40))
      for person in people
      for thing in things
      for _ in range(draw.randint(1, 3))
    ]
    draw.shuffle(records)
    t = draw.choice(list(things))
    totals = {
      person: sum(n for who, what, n in records if (who, what) == (person, t))
      for person in people
    }
    n, m = sorted(draw.sample(list(people), 2), key=totals.__getitem__)[::-1]
    # `sql` calls that find out, in the order of a person who explores.
    columns = "SELECT name FROM pragma_table_info('{}')".format
    number = "SELECT id FROM {} WHERE {} = '{}'".format
    key = str(things[t]) if apart else f"'{t}'"
    total = (
      f"SELECT SUM({names.amount}) FROM {names.records} WHERE"
      f" {names.person} = {{}} AND {names.thing} = {key}"
    ).format
    queries = [_TABLES, columns(names.people), columns(names.records)]
    queries += [columns(names.things)] if apart else []
    people_of = (n, m) if family == "database_difference" else (n,)
    queries += [number(names.people, names.name, who) for who in people_of]
    queries += [number(names.things, names.name, t)] if apart else []
    queries += [total(people[who]) for who in people_of]
    answer = totals[n]
    if len(people_of) == 2:
      queries.append(f"SELECT {totals[n]} - {totals[m]}")
      answer -= totals[m]
    script = [
      _table(names.people, ("id", names.name), _rows(people)),
      _table(
        names.records,
        (names.person, names.thing, names.amount),
        [(people[p], things[x] if apart else x, k) for p, x, k in records],
      ),
      _table(names.other, ("id", "text"), [(1, "none")]),
    ]
    if apart:
      script.append(_table(names.things, ("id", names.name), _rows(things)))
    draw.shuffle(script)
    wording = draw.choice(_WORDINGS[family][split == "eval"])
    return base.Task(
      task_id=f"{family}/{split}/{index}/{seed}",
      family=family,
      instruction=wording.format(t=t, n=n, m=m),
      seed=seed,
      params={
        "question": wording.format(t=t, n=n, m=m),
        "answer": str(answer),
        "queries": queries,
        "tools_kwargs": {TOOL: {"create_kwargs": {"script": "".join(script)}}},
      },
    )


def _numbered(
  words: Sequence[str], count: int, draw: random.Random
) -> dict[str, int]:
  """Word -> its number in the database."""
  return dict(zip(draw.sample(words, count), draw.sample(range(1, 30), count)))


def _rows(numbered: Mapping[str, int]) -> list[tuple[Any, ...]]:
  return [(number, word) for word, number in numbered.items()]


def _table(
  name: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> str:
  values = ", ".join(map(repr, rows))
  return (
    f"CREATE TABLE {name} ({', '.join(columns)});\n"
    f"INSERT INTO {name} VALUES {values};\n"
  )


def solve(
  fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Returns the turns that solve a task of this module.

  Args:
    fields: Fields of the task.
    tools: OpenAI schemas, `sql` among them.

  Returns:
    Assistant messages in OpenAI's form.

  Raises:
    LookupError: another task, or no tool `sql`.
  """
  offered = {tool.get("function", tool).get("name") for tool in tools}
  if "queries" not in fields or TOOL not in offered:
    raise LookupError(
      f"{fields.get('question')!r:.80} is not a question of"
      f" environment.name=database, or the tool {TOOL!r} is not offered"
    )
  calls = [
    {"type": "function", "function": {"name": TOOL, "arguments": {"query": q}}}
    for q in fields["queries"]
  ]
  turns = [{"role": "assistant", "tool_calls": [call]} for call in calls]
  return [*turns, {"role": "assistant", "content": fields["answer"]}]
