"""Questions about databases: their answers, their tool, demonstrations."""

import asyncio
import re
import sqlite3

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import database_questions
from tunix.rl.multi_turn.environments import word_problems
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.warm_start import conversing
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.run.warm_start import recorded
from tunix.rl.multi_turn.tools import sql_tool

FAMILIES = database_questions.FAMILIES
TURNS = {"database_total": 6, "database_items": 8, "database_difference": 9}
TASKS = database_questions.DatabaseTasks(FAMILIES)


def script_of(task):
  return task.params["tools_kwargs"]["sql"]["create_kwargs"]["script"]


def answer_by_join(task):
  """The answer by one query of ours, from the question's words alone."""
  database = sqlite3.connect(":memory:")
  database.executescript(script_of(task))
  tables = [
    name for (name,) in database.execute("SELECT name FROM sqlite_master")
  ]
  columns = {
    t: [c[1] for c in database.execute(f"PRAGMA table_info({t})")]
    for t in tables
  }
  rows = {t: list(database.execute(f"SELECT * FROM {t}")) for t in tables}
  words = [w.strip(".?,") for w in task.instruction.split()]
  thing = next(w for w in words if w in word_problems.THINGS)
  named = [w for w in words if w in word_problems.NAMES]
  numbers = {
    row[1]: row[0] for t in tables for row in rows[t] if len(columns[t]) == 2
  }
  (records,) = (rows[t] for t in tables if len(columns[t]) == 3)

  def total(name):
    of = (thing, numbers.get(thing))
    return sum(n for p, x, n in records if p == numbers[name] and x in of)

  totals = [total(name) for name in named]
  return totals[0] if len(totals) == 1 else max(totals) - min(totals)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_follows_from_the_database(family):
  for index in range(50):
    for task in (
      TASKS.train_task(family, index),
      TASKS.eval_task(family, index),
    ):
      assert int(task.params["answer"]) == answer_by_join(task), task


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_questions_are_worded_otherwise(family):
  def wording(task):
    words = (
      "_" if w.strip(".?,") in word_problems.NAMES + word_problems.THINGS else w
      for w in task.instruction.split()
    )
    return " ".join(words)

  train = {wording(TASKS.train_task(family, i)) for i in range(200)}
  held_out = {wording(TASKS.eval_task(family, i)) for i in range(200)}
  assert len(train) >= 4 and len(held_out) == 2
  assert not train & held_out
  again = database_questions.DatabaseTasks([family])
  assert again.train_task(family, 7) == TASKS.train_task(family, 7)
  assert again.train_task(family, 7, 1) != TASKS.train_task(family, 7)


def test_names_of_tables_have_to_be_looked_up():
  first = {
    database_questions.solve(
      TASKS.train_task("database_total", i).params, [sql_tool.SQL_SCHEMA]
    )[1]["tool_calls"][0]["function"]["arguments"]["query"]
    for i in range(60)
  }
  assert len(first) == 4


def test_an_unknown_family_is_named():
  with pytest.raises(ValueError, match="database_total"):
    database_questions.DatabaseTasks(["database_totals"])


def test_only_its_own_tasks_are_demonstrated():
  task = TASKS.train_task("database_total", 0)
  with pytest.raises(LookupError, match="'sql' is not offered"):
    database_questions.solve(task.params, [])
  with pytest.raises(LookupError, match="not a question of"):
    database_questions.solve({"question": "?"}, [sql_tool.SQL_SCHEMA])


def _converser(solve=None):
  """Returns a demonstrator of all families, and its source of tasks."""
  config = config_lib.load_config(
    [
      "environment=database",
      f"tasks=[{', '.join(FAMILIES)}]",
      "warm_start.steps=1",
    ]
  )
  config, tasks = run_tasks.resolve(config)
  factory = episodes.EpisodeFactory(config, images_lib.ImageStore())
  source = recorded.for_run(config, tasks, factory.tool_schemas)
  renderer = qwen.QwenRenderer(
    checkpoint.load_tokenizer("tiny_vl"), lambda *_: 0
  )
  converser = conversing.Converser(
    renderer, factory, solve or source.solve, config.environment.max_turns
  )
  return converser, source


def test_demonstrations_solve_tasks_in_the_runs_environment():
  """Every family, in as many turns as it says, rewarded at the end alone."""
  converser, source = _converser()
  pairs = [(next(source.tasks), i) for i in range(9)]
  families = set()
  for episode in asyncio.run(
    demonstrations.play_all(converser.episode, pairs, 4)
  ):
    family = episode.task["task_id"].partition("/")[0]
    families.add(family)
    assert episode.status is trajectory.TrajectoryStatus.SUCCEEDED
    assert len(episode.steps) == TURNS[family]
    assert not any(step.info.get("tool_errors") for step in episode.steps)
    rewards = [step.reward for step in episode.steps]
    assert rewards == [0.0] * (TURNS[family] - 1) + [1.0]
  assert families == set(FAMILIES) and not converser.warned


def test_an_error_of_a_tool_in_demonstrations_is_told_once(caplog):
  def solve(task):
    *_, answer = source.solve(task)
    arguments = {"query": "SELECT missing"}
    call = {"function": {"name": "sql", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}, answer]

  converser, source = _converser(solve)
  for _ in range(2):
    asyncio.run(converser.episode(next(source.tasks), 0))
  (record,) = caplog.records
  assert "answered with an error" in record.getMessage()
  assert converser.warned[0] in record.getMessage()
  assert len(converser.warned) == 2


# --- the tool -----------------------------------------------------------------


def ask(
  *queries, script="CREATE TABLE t (a, b); INSERT INTO t VALUES (1, 'x')"
):
  """Returns the answers of one instance, or the texts of its errors."""

  async def all_of():
    tool = sql_tool.SqlTool()
    instance = await tool.create(script=script)
    answers = []
    for query in queries:
      try:
        text, reward, _ = await tool.execute(instance, {"query": query})
        assert reward == 0.0
      except ValueError as error:
        text = f"ValueError: {error}"
      answers.append(text)
    await tool.release(instance)
    await tool.release(instance)
    with pytest.raises(tools.stateful.UnknownInstanceError):
      await tool.execute(instance, {"query": "SELECT 1"})
    return answers

  return asyncio.run(all_of())


def test_rows_are_lines_and_long_answers_are_cut():
  many = "SELECT a.b FROM t a, t b"
  values = ", ".join(["(1, 'x')"] * 6)
  script = f"CREATE TABLE t (a, b); INSERT INTO t VALUES {values}"
  tables, row, none, cut = ask(
    "SELECT name FROM sqlite_master",
    "SELECT * FROM t LIMIT 1",
    "SELECT * FROM t WHERE a = 2",
    many,
    script=script,
  )
  assert (tables, row, none) == ("t", "1, x", "no rows")
  assert cut == "x\n" * 20 + "(more rows)"


def test_columns_of_a_table_are_listed():
  query = "SELECT name FROM pragma_table_info('t')"
  assert ask(query, query, query.replace("'t'", "'u'")) == [
    "a\nb",
    "a\nb",
    "no rows",
  ]


@pytest.mark.parametrize(
  "query, why",
  [
    ("INSERT INTO t VALUES (2, 'y')", "not authorized"),
    ("DROP TABLE t", "not authorized"),
    ("ATTACH '{file}' AS other", "not authorized"),
    ("PRAGMA journal_mode=off", "not authorized"),
    ("VACUUM INTO '{file}'", "authorization denied"),
    ("SELECT load_extension('{file}')", "not authorized|no such function"),
    (
      "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n)"
      " SELECT COUNT(*) FROM n",
      "not authorized",
    ),
    ("SELECT hex(zeroblob(100000000))", "too big"),
    ("SELECT 1; SELECT 2", "one statement"),
    ("SELECT missing FROM t", "no such column: missing"),
  ],
)
def test_a_call_reads_and_nothing_else(query, why, tmp_path):
  file = tmp_path / "other.db"
  refused, rows = ask(query.format(file=file), "SELECT * FROM t")
  assert refused.startswith("ValueError: ")
  assert re.search(why, refused), refused
  assert rows == "1, x" and not file.exists()


def test_a_query_that_takes_long_is_ended_and_the_next_one_runs():
  values = ", ".join(["(1, 'x')"] * 100)
  script = f"CREATE TABLE t (a, b); INSERT INTO t VALUES {values}"
  slow = "SELECT COUNT(*) FROM t a, t b, t c, t d"
  ended, count = ask(slow, "SELECT COUNT(*) FROM t", script=script)
  assert ended == "ValueError: interrupted"
  assert count == "100"


def test_a_script_opens_no_file(tmp_path):
  for script in (
    f"ATTACH '{tmp_path}/a.db' AS a;",
    f"CREATE TABLE t (a); VACUUM INTO '{tmp_path}/b.db';",
  ):
    with pytest.raises(sqlite3.Error):
      ask("SELECT 1", script=script)
  assert not list(tmp_path.iterdir())
