"""The database as raw SQL sees it, on SQLite and PostgreSQL."""

import itertools
import threading

from alembic import autogenerate
from alembic.runtime import migration
import monitor_databases
import pytest
import sqlalchemy as sa
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import text_index
from training_monitor.schema import vocabulary

# The source document, column by column.
COLUMNS = {
  "training": """id run_name log_path model_name lora_rank learning_rate
        batch_size group_size groups_per_batch max_tokens temperature
        kl_penalty_coef num_substeps max_turns seed box_type renderer_name
        wandb_project wandb_name status progress_percent current_step
        total_steps current_phase status_message error_message start_time
        end_time last_heartbeat config_json created_at updated_at""",
  "baseline": """id training_id model_path status progress_percent
        current_task_index total_tasks completed_tasks current_phase
        status_message error_message start_time end_time eval_time
        success_rate avg_reward avg_turns successful_tasks metrics_json
        created_at updated_at""",
  "eval": """id training_id step model_path status progress_percent
        current_task_index total_tasks completed_tasks current_phase
        status_message error_message start_time end_time eval_time
        success_rate avg_reward avg_turns successful_tasks metrics_json
        created_at updated_at""",
  "task": """id task_id name description difficulty category max_steps
        validation_type validation_query expected_result tags prerequisites
        app_name source_type created_at updated_at""",
  "validator": """id task_id validator_type validation_query
        validation_method config_json created_at""",
  "step": """id training_id step batch status progress_percent current_phase
        rollout_progress training_progress status_message error_message
        start_time end_time rollout_start_time rollout_end_time
        training_start_time training_end_time learning_rate model_path
        checkpoint_path loss kl_divergence policy_gradient_norm reward_mean
        reward_std num_trajectories num_tokens metrics_json created_at
        updated_at""",
  "rollout": """id source_type step_id eval_id baseline_id rollout_id batch
        group env_index task_id model_path is_eval status progress_percent
        current_phase current_turn status_message error_message start_time
        end_time env_creation_time agent_init_time task_start_time
        task_end_time validation_time rollout_time task_completed task_success
        agent_reported_success validation_passed num_turns max_turns reward
        temperature num_total_actions consecutive_repeated_actions parse_errors
        tool_name_errors tool_arg_errors runtime_errors ran_out_of_turns
        attempted_completion turn_first_success turn_task_completed errors
        summary_json trajectory_path created_at updated_at""",
  "turn": """id rollout_id turn start_time end_time turn_time reward
        episode_done metrics_json created_at""",
  "action": """id turn_id action_type tool_name tool_args tokens logprobs
        num_tokens created_at""",
  "obs": """id turn_id obs_type screenshot_uri text_content model_input_json
        created_at""",
  "validation": """id rollout_id validator_id validation_time
        validation_query expected_result actual_result success execution_time
        error_message details_json created_at""",
  "environment": """id rollout_id env_type status gbox_id box_type
        creation_time termination_time status_message error_message
        config_json created_at updated_at""",
  "status_history": """id entity_type entity_id old_status new_status
        progress_percent status_message metadata_json changed_at created_at""",
}
NOT_NULL = {
  "training": {"run_name", "log_path", "model_name"},
  "baseline": {"training_id", "model_path"},
  "eval": {"training_id", "step", "model_path"},
  "task": {"task_id", "name", "description"},
  "validator": {"task_id", "validator_type"},
  "step": {"training_id", "step"},
  "rollout": {"source_type", "rollout_id", "task_id", "model_path"},
  "turn": {"rollout_id", "turn", "start_time"},
  "action": {"turn_id"},
  "obs": {"turn_id"},
  "validation": {"rollout_id", "validation_time", "success"},
  "environment": {"rollout_id", "env_type"},
  "status_history": {"entity_type", "entity_id", "new_status", "changed_at"},
}
REFERS = {
  "baseline": {"training_id": "training"},
  "eval": {"training_id": "training"},
  "validator": {"task_id": "task"},
  "step": {"training_id": "training"},
  "rollout": {
    "step_id": "step",
    "eval_id": "eval",
    "baseline_id": "baseline",
    "task_id": "task",
  },
  "turn": {"rollout_id": "rollout"},
  "action": {"turn_id": "turn"},
  "obs": {"turn_id": "turn"},
  "validation": {"rollout_id": "rollout", "validator_id": "validator"},
  "environment": {"rollout_id": "rollout"},
}
# What a first row of each table needs beyond its defaults.
ROWS = {
  "training": {"run_name": "r", "log_path": "/l", "model_name": "m"},
  "task": {"task_id": "t", "name": "n", "description": "d"},
  "validator": {"task_id": 1, "validator_type": "state"},
  "baseline": {"training_id": 1, "model_path": "p"},
  "eval": {"training_id": 1, "model_path": "p", "step": 1},
  "step": {"training_id": 1, "step": 1},
  "rollout": {
    "source_type": "step",
    "step_id": 1,
    "rollout_id": "x",
    "task_id": 1,
    "model_path": "p",
  },
  "turn": {"rollout_id": 1, "turn": 1},
  "action": {"turn_id": 1},
  "obs": {"turn_id": 1},
  "validation": {"rollout_id": 1, "success": 1},
  "environment": {"rollout_id": 1, "env_type": "linux"},
}
Refused = (sa.exc.IntegrityError, sa.exc.InternalError)


def sql(where, statement, **values):
  """Raw SQL in a transaction of its own; its rows, if it has any.

  On a connection it is a part of the connection's transaction.
  """
  if isinstance(where, sa.Engine):
    with database.writing(where) as connection:
      return sql(connection, statement, **values)
  with where.begin_nested():
    result = where.execute(sa.text(statement), values)
    return result.fetchall() if result.returns_rows else []


def insert(engine, table, **values):
  names = ", ".join(f'"{n}"' for n in values)
  places = ", ".join(f":{n}" for n in values)
  sql(engine, f'INSERT INTO "{table}" ({names}) VALUES ({places})', **values)


def one_of_each(engine):
  for table, values in ROWS.items():
    insert(engine, table, **values)


def value(engine, table, column, id_=1):
  ((content,),) = sql(
    engine, f'SELECT "{column}" FROM "{table}" WHERE id = :id', id=id_
  )
  return content


@pytest.fixture(scope="module")
def filled(shared_target):
  """A database with one row of each table."""
  opened = database.connect(shared_target)
  one_of_each(opened)
  yield opened
  opened.dispose()


@pytest.fixture
def rows(filled):
  """A connection to one row of each table; the test's changes are undone."""
  with filled.connect() as connection:
    connection = connection.execution_options(monitor_writes=True)
    changes = connection.begin()
    yield connection
    changes.rollback()


def of_the_metadata(name, kind, parents):
  """All but the index of words, which each database makes in its own way."""
  del parents
  return kind != "table" or not name.startswith(text_index.TABLE)


# --- what there is ----------------------------------------------------------


def test_an_empty_database_upgraded_is_the_metadata(request, tmp_path):
  targets = [str(tmp_path / "new.db")]
  try:
    url = request.getfixturevalue("postgres")
    targets.append(monitor_databases.empty_database(url))
  except pytest.skip.Exception:
    pass
  for target in targets:
    engine = database.connect(target)
    database.upgrade(engine)
    database.upgrade(engine)  # Again changes nothing.
    with engine.connect() as connection:
      context = migration.MigrationContext.configure(
        connection, opts={"compare_type": True, "include_name": of_the_metadata}
      )
      assert autogenerate.compare_metadata(context, tables.metadata) == []
      inspector = sa.inspect(connection)
      for table in tables.TABLES:
        expected = {
          c.name for c in table.constraints if isinstance(c, sa.CheckConstraint)
        }
        checks = inspector.get_check_constraints(table.name)
        assert {c["name"] for c in checks} == expected, table.name
    engine.dispose()


def test_tables_have_the_documents_columns_and_constraints(engine):
  inspector = sa.inspect(engine)
  assert set(COLUMNS) == {t.name for t in tables.TABLES}
  assert len(COLUMNS["training"].split()) == 32
  for table, columns in COLUMNS.items():
    by_name = {c["name"]: c for c in inspector.get_columns(table)}
    assert list(by_name) == columns.split(), table
    refused = {n for n, c in by_name.items() if not c["nullable"]} - {"id"}
    assert refused == NOT_NULL[table], table
    keys = {
      k["constrained_columns"][0]: k["referred_table"]
      for k in inspector.get_foreign_keys(table)
    }
    assert keys == REFERS.get(table, {}), table


def test_there_are_the_25_indices_and_the_unique_ones_are_unique(engine):
  inspector = sa.inspect(engine)
  indices = {
    i["name"]: (table, tuple(i["column_names"]), bool(i["unique"]))
    for table in COLUMNS
    for i in inspector.get_indexes(table)
  }
  assert len(tables.INDICES) == 25
  expected = {tables.index_name(t, c): (t, c, u) for t, c, u in tables.INDICES}
  for source in vocabulary.SOURCE_TYPES:
    for kind, first in (
      ("listed", ()),
      ("faulty", ()),
      ("ended", ("status_message",)),
    ):
      columns = (f"{source}_id", *first, *tables.LISTED)
      expected[f"idx_rollout_{source}_{kind}"] = ("rollout", columns, False)
  assert indices == expected


def test_queries_use_the_indices(engine):
  if engine.dialect.name != "sqlite":
    pytest.skip("a small table is read whole on PostgreSQL, index or not")
  for table, columns, _ in tables.INDICES:
    where = " AND ".join(f'"{c}" = 1' for c in columns)
    plan = sql(
      engine, f'EXPLAIN QUERY PLAN SELECT * FROM "{table}" WHERE {where}'
    )
    assert "USING INDEX" in plan[0][3], (table, columns, plan)
  for source in vocabulary.SOURCE_TYPES:
    plan = sql(
      engine,
      f"EXPLAIN QUERY PLAN SELECT min(reward), max({source}_id) FROM rollout"
      f" WHERE {source}_id = 1",
    )
    assert f"COVERING INDEX idx_rollout_{source}_listed" in plan[0][3]
    faulty = tables.FAULTY.compile(dialect=engine.dialect)
    plan = sql(
      engine,
      f"EXPLAIN QUERY PLAN SELECT reward FROM rollout WHERE {source}_id = 1"
      f" AND {source}_id IS NOT NULL AND {faulty}",
    )
    assert f"COVERING INDEX idx_rollout_{source}_faulty" in plan[0][3]


def test_a_writer_may_send_booleans_for_flags(rows):
  """As an ORM does whose columns are booleans."""
  sql(
    rows,
    "UPDATE rollout SET task_success = :won, ran_out_of_turns = :out",
    won=True,
    out=False,
  )
  assert value(rows, "rollout", "task_success") == 1
  assert value(rows, "rollout", "ran_out_of_turns") == 0
  sql(
    rows,
    "INSERT INTO turn (rollout_id, turn, episode_done) VALUES (1, 77, :done)",
    done=True,
  )
  assert sql(rows, "SELECT episode_done FROM turn WHERE turn = 77") == [(1,)]


def test_a_message_of_any_length_is_no_entry_of_an_index(rows):
  """PostgreSQL refuses entries of more than 2.7 kB."""
  words = "".join(chr(0x4E00 + n * 7919 % 20000) for n in range(9000))
  sql(rows, "UPDATE rollout SET status_message = :words", words=words)
  assert value(rows, "rollout", "status_message") == words


@pytest.mark.parametrize("revision", ["0010", "0012"])
def test_a_database_of_another_schema_is_refused(engine, revision):
  sql(engine, f"UPDATE alembic_version SET version_num = '{revision}'")
  with pytest.raises(database.DatabaseError, match=f"schema {revision}"):
    database.upgrade(engine)


def test_tags_and_the_baseline_are_what_their_tables_say(engine):
  for id_ in (1, 2, 3):
    insert(engine, "training", run_name=f"r{id_}", log_path="", model_name="")
    if id_ < 3:
      insert(engine, "monitor_project", name=f"p{id_}")
    insert(
      engine,
      "monitor_training_project",
      training_id=id_,
      project_id=min(id_, 2),
    )
  tag = lambda **v: insert(engine, "monitor_training_tag", **v)
  tag(training_id=1, tag="a b"), tag(training_id=2, tag="a b")
  tag(training_id=1, tag="\u00fc" * 50)
  assert all(
    row[0] for row in sql(engine, "SELECT created_at FROM monitor_training_tag")
  )
  for wrong in ("a b", "", " a", "a ", "x" * 51, None):
    with pytest.raises(Refused):
      tag(training_id=1, tag=wrong)
  with pytest.raises(Refused):
    tag(training_id=9, tag="of nothing")
  pin = lambda **v: insert(engine, "monitor_pinned_baseline", **v)
  pin(project_id=1, training_id=1), pin(project_id=2, training_id=3)
  for wrong in ((1, 1), (2, 2)):  # A second one.
    with pytest.raises(Refused):
      pin(project_id=wrong[0], training_id=wrong[1])
  with pytest.raises(Refused):  # Another project's.
    sql(
      engine,
      "UPDATE monitor_pinned_baseline SET training_id = 2 WHERE project_id = 1",
    )
  sql(
    engine,
    "UPDATE monitor_pinned_baseline SET training_id = 2 WHERE project_id = 2",
  )
  for table in ("monitor_training_project", "training"):
    with pytest.raises(Refused):
      sql(
        engine,
        f"DELETE FROM {table} WHERE "
        + ("id = 1" if table == "training" else "training_id = 1"),
      )


def test_defaults(rows):
  for table, words in vocabulary.STATUSES.items():
    assert value(rows, table, "status") == words[0] == "pending"
    if table != "environment":
      assert value(rows, table, "progress_percent") == 0.0
  assert value(rows, "rollout", "is_eval") == 0
  for table, columns in COLUMNS.items():
    for column in columns.split():
      default = column in ("created_at", "updated_at", "last_heartbeat")
      default |= (table, column) in {
        ("turn", "start_time"),
        ("validation", "validation_time"),
        ("status_history", "changed_at"),
      }
      if default:
        ((late,),) = sql(
          rows, f'SELECT count(*) FROM "{table}" WHERE "{column}" IS NULL'
        )
        assert late == 0, (table, column)
      elif column not in ROWS.get(table, {}) and table != "status_history":
        if column in ("id", "status", "progress_percent", "is_eval"):
          continue
        assert value(rows, table, column) is None, (table, column)


def test_what_is_required_is_required(rows):
  for table, columns in NOT_NULL.items():
    for column in columns:
      with pytest.raises(Refused):
        sql(rows, f'UPDATE "{table}" SET "{column}" = NULL')


def test_uniqueness(rows):
  for table in ("training", "eval", "task", "step", "turn", "environment"):
    with pytest.raises(Refused):
      insert(rows, table, **ROWS[table])
  with pytest.raises(Refused):
    insert(rows, "rollout", **ROWS["rollout"])
  insert(rows, "rollout", **{**ROWS["rollout"], "rollout_id": "y"})
  insert(rows, "validation", **ROWS["validation"])  # Any number of them.


def test_references_must_exist_and_stay(rows):
  for table, keys in REFERS.items():
    for column, parent in keys.items():
      if value(rows, table, column) is None:
        continue
      with pytest.raises(Refused):
        sql(rows, f'UPDATE "{table}" SET "{column}" = 999')
      with pytest.raises(Refused):
        sql(rows, f'DELETE FROM "{parent}" WHERE id = 1')


@pytest.mark.parametrize("table, column", sorted(vocabulary.CHOICES))
def test_words_of_no_list_are_refused(rows, table, column):
  with pytest.raises(Refused):
    sql(rows, f'UPDATE "{table}" SET "{column}" = \'nonsense\'')
  if column == "status":
    with pytest.raises(Refused):
      sql(rows, f'UPDATE "{table}" SET status = NULL')


def test_flags_are_0_or_1_and_progress_is_a_percentage(rows):
  for column in (
    "task_completed",
    "task_success",
    "agent_reported_success",
    "validation_passed",
    "ran_out_of_turns",
    "attempted_completion",
  ):
    sql(rows, f"UPDATE rollout SET {column} = 1")
    with pytest.raises(Refused):
      sql(rows, f"UPDATE rollout SET {column} = 2")
  for wrong in (-0.1, 100.1):
    with pytest.raises(Refused):
      sql(rows, "UPDATE step SET progress_percent = :p", p=wrong)


# --- source types -----------------------------------------------------------

PATTERNS = list(
  itertools.product(vocabulary.SOURCE_TYPES, *[[False, True]] * 3)
)


@pytest.mark.parametrize("kind, step, eval_, baseline", PATTERNS)
def test_a_rollout_has_exactly_the_source_that_it_names(
  rows, kind, step, eval_, baseline
):
  sources = {"step": step, "eval": eval_, "baseline": baseline}
  right = all(sources[word] == (word == kind) for word in sources)
  values = {
    **ROWS["rollout"],
    "rollout_id": "y",
    "source_type": kind,
    **{f"{word}_id": 1 if there else None for word, there in sources.items()},
  }
  change = (
    "UPDATE rollout SET source_type = :source_type, step_id = :step_id,"
    " eval_id = :eval_id, baseline_id = :baseline_id WHERE id = 1"
  )
  keys = ("source_type", "step_id", "eval_id", "baseline_id")
  moved = {k: values[k] for k in keys}
  if right:
    insert(rows, "rollout", **values)
    sql(rows, change, **moved)
    assert value(rows, "rollout", "is_eval") == int(kind != "step")
    ((added,),) = sql(rows, "SELECT max(id) FROM rollout")
    assert value(rows, "rollout", "is_eval", added) == int(kind != "step")
  else:
    with pytest.raises(Refused):
      insert(rows, "rollout", **values)
    with pytest.raises(Refused):
      sql(rows, change, **moved)


def test_there_are_24_patterns_of_which_3_are_right():
  assert len(PATTERNS) == 24
  right = [
    p
    for p in PATTERNS
    if sum(p[1:]) == 1 and p[1 + vocabulary.SOURCE_TYPES.index(p[0])]
  ]
  assert len(right) == 3


# --- statuses ---------------------------------------------------------------


@pytest.mark.parametrize("table", vocabulary.STATEFUL)
def test_every_transition_is_allowed_or_refused_as_the_table_says(rows, table):
  row, number = ROWS[table], itertools.count(2)
  words = vocabulary.STATUSES[table]
  for old, new in itertools.product(words, words):
    n = next(number)
    fresh = {**row, "status": old}
    for key in ("run_name", "rollout_id"):
      if key in row and table in ("training", "rollout"):
        fresh[key] = f"{key}{n}"
    if table in ("eval", "step"):
      fresh["step"] = n
    if table == "environment":
      insert(rows, "rollout", **{**ROWS["rollout"], "rollout_id": f"r{n}"})
      ((fresh["rollout_id"],),) = sql(rows, "SELECT max(id) FROM rollout")
    insert(rows, table, **fresh)
    ((id_,),) = sql(rows, f'SELECT max(id) FROM "{table}"')
    change = f'UPDATE "{table}" SET status = :new WHERE id = :id'
    allowed = old == new or new in vocabulary.TRANSITIONS[table][old]
    if allowed:
      sql(rows, change, new=new, id=id_)
    else:
      with pytest.raises(Refused):
        sql(rows, change, new=new, id=id_)
    assert value(rows, table, "status", id_) == (new if allowed else old)
    history = sql(
      rows,
      "SELECT old_status, new_status FROM status_history WHERE entity_type ="
      " :t AND entity_id = :i ORDER BY id",
      t=table,
      i=id_,
    )
    expected = [(None, old)]
    if allowed and old != new:
      expected.append((old, new))
    assert [tuple(h) for h in history] == expected


def test_the_transitions_name_every_status_and_ends_stay():
  for table, words in vocabulary.STATUSES.items():
    graph = vocabulary.TRANSITIONS[table]
    assert set(graph) == set(words)
    assert all(new <= set(words) for new in graph.values())
    for end in vocabulary.FINISHED[table]:
      leaves = graph[end] - vocabulary.FINISHED[table]
      # A run that is taken up again; nothing else comes back.
      assert leaves == (
        {"initializing"}
        if (table == "training" and end != "cancelled")
        else set()
      )


def test_history_holds_what_was_said_and_grows_only_by_changes(rows):
  sql(
    rows,
    "UPDATE rollout SET status = 'running', progress_percent = 25,"
    " status_message = 'turn 5 of 20'",
  )
  sql(rows, "UPDATE rollout SET status = 'running', progress_percent = 30")
  sql(rows, "UPDATE rollout SET reward = 1")
  history = sql(
    rows,
    "SELECT old_status, new_status, progress_percent, status_message FROM"
    " status_history WHERE entity_type = 'rollout' ORDER BY changed_at, id",
  )
  assert [tuple(r) for r in history] == [
    (None, "pending", 0.0, None),
    ("pending", "running", 25.0, "turn 5 of 20"),
  ]


def test_updated_at_moves_by_itself_and_can_be_set(rows):
  for table in COLUMNS:
    if "updated_at" not in COLUMNS[table]:
      continue
    old = "2001-02-03 04:05:06"
    sql(rows, f"UPDATE \"{table}\" SET updated_at = '{old}'")
    assert str(value(rows, table, "updated_at")).startswith(old)
    sql(rows, f'UPDATE "{table}" SET created_at = created_at')
    assert str(value(rows, table, "updated_at")) > "2020"


# --- opening ----------------------------------------------------------------


def test_sqlite_is_in_wal_with_full_synchronisation(tmp_path):
  engine = database.connect(tmp_path / "a" / "b.db")
  with engine.connect() as connection:
    read = lambda name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
    assert read("journal_mode") == "wal"
    assert read("synchronous") == 2
    assert read("foreign_keys") == 1
  engine.dispose()


def test_writers_wait_for_each_other_instead_of_failing(engine):
  insert(engine, "training", **ROWS["training"])
  failures = []

  def count_up():
    try:
      for _ in range(25):
        with database.writing(engine) as connection:
          n = connection.execute(
            sa.text("SELECT seed FROM training FOR UPDATE")
            if engine.dialect.name == "postgresql"
            else sa.text("SELECT seed FROM training")
          ).scalar()
          connection.execute(
            sa.text("UPDATE training SET seed = :n"), {"n": (n or 0) + 1}
          )
    except Exception as error:  # pylint: disable=broad-except
      failures.append(error)

  threads = [threading.Thread(target=count_up) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not failures
  assert value(engine, "training", "seed") == 100


@pytest.mark.parametrize(
  "target, says",
  [
    ("", "give a file"),
    ("mysql://x/y", "SQLite file or on PostgreSQL"),
    ("sqlite://", "SQLite file or on PostgreSQL"),
    ("://", "not a URL"),
  ],
)
def test_targets_that_cannot_be(target, says):
  with pytest.raises(database.DatabaseError, match=says):
    database.connect(target)


def test_a_newer_schema_and_somebody_elses_tables_are_refused(tmp_path):
  engine = database.connect(tmp_path / "newer.db")
  database.upgrade(engine)
  sql(engine, "UPDATE alembic_version SET version_num = '9999'")
  with pytest.raises(
    database.DatabaseError, match="9999.*the version that wrote it"
  ):
    database.upgrade(engine)
  engine.dispose()
  engine = database.connect(tmp_path / "other.db")
  sql(engine, "CREATE TABLE task (id INTEGER)")
  with pytest.raises(database.DatabaseError, match="did not make"):
    database.upgrade(engine)
  engine.dispose()


def test_triggers_are_replaced_when_they_differ(engine):
  sql(engine, "UPDATE monitor_meta SET value = 'old' WHERE key = 'triggers'")
  database.upgrade(engine)
  one_of_each(engine)
  ((count,),) = sql(engine, "SELECT count(*) FROM status_history")
  assert count == len(vocabulary.STATEFUL)
