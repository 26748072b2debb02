"""The 13 tables of the training database, and the monitor's own beside them.

Columns, constraints, defaults and the 25 indices are the source document's, on
SQLite and PostgreSQL alike. Decisions that the document leaves open:

- Each status, phase and choice is a CHECK; a status may not be NULL.
- Exactly the id that `rollout.source_type` names is set: a CHECK, so that it
  holds against raw SQL too.
- Where an index of the document is over columns that the document has unique,
  the index is the constraint.
- A rollout has at most one environment and may have several validations.
- Nothing that something refers to can be deleted.
- REAL is a double, INTEGER has 64 bits, TIMESTAMP is UTC without a zone.

Tables named `monitor_…` hold what the document has no place for: projects and
their tokens, tags of runs and the run that a project's others are compared
with, clients' ids and original values, and changes for listeners.

Transitions of statuses, their history and `updated_at` are `triggers`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import sqlalchemy as sa

from training_monitor.core import run_tags as tags_lib
from training_monitor.schema import vocabulary

INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
REAL: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL, "sqlite")

metadata = sa.MetaData(
  naming_convention={
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
  }
)


def _id() -> sa.Column:
  return sa.Column("id", INTEGER, primary_key=True, autoincrement=True)


def _text(*names: str) -> list[sa.Column]:
  return [sa.Column(name, sa.Text) for name in names]


def _integers(*names: str) -> list[sa.Column]:
  return [sa.Column(name, INTEGER) for name in names]


def _reals(*names: str) -> list[sa.Column]:
  return [sa.Column(name, REAL) for name in names]


def _times(*names: str) -> list[sa.Column]:
  return [sa.Column(name, sa.TIMESTAMP) for name in names]


def _key(name: str, kind: sa.types.TypeEngine = sa.Text()) -> sa.Column:
  return sa.Column(name, kind, primary_key=True, autoincrement=False)


def _now(name: str, nullable: bool = True) -> sa.Column:
  return sa.Column(
    name,
    sa.TIMESTAMP,
    nullable=nullable,
    server_default=sa.func.current_timestamp(),
  )


def _required(name: str, kind: sa.types.TypeEngine = sa.Text()) -> sa.Column:
  return sa.Column(name, kind, nullable=False)


def _refers(
  name: str, table: str, nullable: bool = False, **options: Any
) -> sa.Column:
  key = sa.ForeignKey(f"{table}.id", ondelete="RESTRICT")
  return sa.Column(name, INTEGER, key, nullable=nullable, **options)


def _flags(*names: str) -> list[sa.Column | sa.CheckConstraint]:
  checks = [sa.CheckConstraint(f"{n} IN (0, 1)", name=n) for n in names]
  return [*_integers(*names), *checks]


def _choice(
  table: str, column: str, **options
) -> list[sa.Column | sa.CheckConstraint]:
  words = ", ".join(f"'{w}'" for w in vocabulary.CHOICES[table, column])
  return [
    sa.Column(column, sa.Text, **options),
    sa.CheckConstraint(f"{column} IN ({words})", name=column),
  ]


def _state(table: str) -> list[sa.Column | sa.CheckConstraint]:
  """Returns `status` and `progress_percent` with their checks."""
  first, *_ = vocabulary.STATUSES[table]
  words = ", ".join(f"'{w}'" for w in vocabulary.STATUSES[table])
  columns: list[sa.Column | sa.CheckConstraint] = [
    sa.Column("status", sa.Text, server_default=first),
    # A CHECK that is NULL holds.
    sa.CheckConstraint(
      f"status IS NOT NULL AND status IN ({words})", name="status"
    ),
  ]
  if table != "environment":
    columns += [
      sa.Column("progress_percent", REAL, server_default=sa.text("0.0")),
      sa.CheckConstraint(
        "progress_percent >= 0 AND progress_percent <= 100",
        name="progress_percent",
      ),
    ]
  return columns


def _table(name: str, *columns) -> sa.Table:
  flat = []
  for column in columns:
    flat += column if isinstance(column, list) else [column]
  return sa.Table(name, metadata, *flat, sqlite_autoincrement=True)


training = _table(
  "training",
  _id(),
  _required("run_name"),
  _required("log_path"),
  _required("model_name"),
  _integers("lora_rank"),
  _reals("learning_rate"),
  _integers("batch_size", "group_size", "groups_per_batch", "max_tokens"),
  _reals("temperature", "kl_penalty_coef"),
  _integers("num_substeps", "max_turns", "seed"),
  _choice("training", "box_type"),
  _text("renderer_name", "wandb_project", "wandb_name"),
  _state("training"),
  _integers("current_step", "total_steps"),
  _choice("training", "current_phase"),
  _text("status_message", "error_message"),
  _times("start_time", "end_time"),
  _now("last_heartbeat"),
  _text("config_json"),
  _now("created_at"),
  _now("updated_at"),
)


def _measurement(name: str, *keys: sa.Column) -> sa.Table:
  return _table(
    name,
    _id(),
    _refers("training_id", "training"),
    *keys,
    _required("model_path"),
    _state(name),
    _integers("current_task_index", "total_tasks", "completed_tasks"),
    _choice(name, "current_phase"),
    _text("status_message", "error_message"),
    _times("start_time", "end_time", "eval_time"),
    _reals("success_rate", "avg_reward", "avg_turns"),
    _integers("successful_tasks"),
    _text("metrics_json"),
    _now("created_at"),
    _now("updated_at"),
  )


baseline = _measurement("baseline")
eval_ = _measurement("eval", _required("step", INTEGER))

task = _table(
  "task",
  _id(),
  _required("task_id"),
  _required("name"),
  _required("description"),
  _choice("task", "difficulty"),
  _choice("task", "category"),
  _integers("max_steps"),
  _choice("task", "validation_type"),
  _text(
    "validation_query",
    "expected_result",
    "tags",
    "prerequisites",
    "app_name",
    "source_type",
  ),
  _now("created_at"),
  _now("updated_at"),
)

validator = _table(
  "validator",
  _id(),
  _refers("task_id", "task"),
  _required("validator_type"),
  _text("validation_query", "validation_method", "config_json"),
  _now("created_at"),
)

step = _table(
  "step",
  _id(),
  _refers("training_id", "training"),
  _required("step", INTEGER),
  _integers("batch"),
  _state("step"),
  _choice("step", "current_phase"),
  _text(
    "rollout_progress", "training_progress", "status_message", "error_message"
  ),
  _times(
    "start_time",
    "end_time",
    "rollout_start_time",
    "rollout_end_time",
    "training_start_time",
    "training_end_time",
  ),
  _reals("learning_rate"),
  _text("model_path", "checkpoint_path"),
  _reals(
    "loss", "kl_divergence", "policy_gradient_norm", "reward_mean", "reward_std"
  ),
  _integers("num_trajectories", "num_tokens"),
  _text("metrics_json"),
  _now("created_at"),
  _now("updated_at"),
)

_ONE_SOURCE = " OR ".join(
  "(source_type = '{0}' AND {1})".format(
    word,
    " AND ".join(
      f"{other}_id IS {'NOT NULL' if other == word else 'NULL'}"
      for other in vocabulary.SOURCE_TYPES
    ),
  )
  for word in vocabulary.SOURCE_TYPES
)

rollout = _table(
  "rollout",
  _id(),
  _choice("rollout", "source_type", nullable=False),
  _refers("step_id", "step", nullable=True),
  _refers("eval_id", "eval", nullable=True),
  _refers("baseline_id", "baseline", nullable=True),
  _required("rollout_id"),
  _integers("batch", "group", "env_index"),
  _refers("task_id", "task"),
  _required("model_path"),
  sa.Column("is_eval", INTEGER, server_default=sa.text("0")),
  sa.CheckConstraint("is_eval IN (0, 1)", name="is_eval"),
  _state("rollout"),
  _choice("rollout", "current_phase"),
  _integers("current_turn"),
  _text("status_message", "error_message"),
  _times(
    "start_time",
    "end_time",
    "env_creation_time",
    "agent_init_time",
    "task_start_time",
    "task_end_time",
    "validation_time",
  ),
  _reals("rollout_time"),
  _flags(
    "task_completed",
    "task_success",
    "agent_reported_success",
    "validation_passed",
  ),
  _integers("num_turns", "max_turns"),
  _reals("reward", "temperature"),
  _integers(
    "num_total_actions",
    "consecutive_repeated_actions",
    "parse_errors",
    "tool_name_errors",
    "tool_arg_errors",
    "runtime_errors",
  ),
  _flags("ran_out_of_turns", "attempted_completion"),
  _integers("turn_first_success", "turn_task_completed"),
  _text("errors", "summary_json", "trajectory_path"),
  _now("created_at"),
  _now("updated_at"),
  sa.CheckConstraint(_ONE_SOURCE, name="one_source"),
)

turn = _table(
  "turn",
  _id(),
  _refers("rollout_id", "rollout"),
  _required("turn", INTEGER),
  _now("start_time", nullable=False),
  _times("end_time"),
  _reals("turn_time", "reward"),
  _flags("episode_done"),
  _text("metrics_json"),
  _now("created_at"),
)

action = _table(
  "action",
  _id(),
  _refers("turn_id", "turn"),
  _text("action_type", "tool_name", "tool_args", "tokens", "logprobs"),
  _integers("num_tokens"),
  _now("created_at"),
)

obs = _table(
  "obs",
  _id(),
  _refers("turn_id", "turn"),
  _choice("obs", "obs_type"),
  _text("screenshot_uri", "text_content", "model_input_json"),
  _now("created_at"),
)

validation = _table(
  "validation",
  _id(),
  _refers("rollout_id", "rollout"),
  _refers("validator_id", "validator", nullable=True),
  _now("validation_time", nullable=False),
  _text("validation_query", "expected_result", "actual_result"),
  _required("success", INTEGER),
  sa.CheckConstraint("success IN (0, 1)", name="success"),
  _reals("execution_time"),
  _text("error_message", "details_json"),
  _now("created_at"),
)

environment = _table(
  "environment",
  _id(),
  _refers("rollout_id", "rollout"),
  _choice("environment", "env_type", nullable=False),
  _state("environment"),
  _text("gbox_id"),
  _choice("environment", "box_type"),
  _times("creation_time", "termination_time"),
  _text("status_message", "error_message", "config_json"),
  _now("created_at"),
  _now("updated_at"),
)

status_history = _table(
  "status_history",
  _id(),
  _required("entity_type"),
  sa.CheckConstraint(
    "entity_type IN ({})".format(
      ", ".join(f"'{name}'" for name in vocabulary.STATEFUL)
    ),
    name="entity_type",
  ),
  _required("entity_id", INTEGER),
  _text("old_status"),
  _required("new_status"),
  _reals("progress_percent"),
  _text("status_message", "metadata_json"),
  _now("changed_at", nullable=False),
  _now("created_at"),
)

TABLES: tuple[sa.Table, ...] = (
    training, baseline, eval_, task, validator, step, rollout, turn, action,
    obs, validation, environment, status_history,
)  # fmt: skip
"""Those of the source document, in its order."""

INDICES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
  ("training", ("run_name",), True),
  ("training", ("status",), False),
  ("training", ("status", "last_heartbeat"), False),
  ("baseline", ("training_id",), False),
  ("baseline", ("status",), False),
  ("eval", ("training_id", "step"), True),
  ("eval", ("status",), False),
  ("task", ("task_id",), True),
  ("validator", ("task_id",), False),
  ("step", ("training_id", "step"), True),
  ("step", ("status",), False),
  ("rollout", ("source_type", "step_id"), False),
  ("rollout", ("source_type", "eval_id"), False),
  ("rollout", ("source_type", "baseline_id"), False),
  ("rollout", ("task_id",), False),
  ("rollout", ("rollout_id",), True),
  ("rollout", ("status",), False),
  ("turn", ("rollout_id", "turn"), True),
  ("action", ("turn_id",), False),
  ("obs", ("turn_id",), False),
  ("validation", ("rollout_id",), False),
  ("environment", ("rollout_id",), True),
  ("environment", ("status",), False),
  ("status_history", ("entity_type", "entity_id"), False),
  ("status_history", ("entity_type", "entity_id", "changed_at"), False),
)
"""The document's 25: table, columns, whether they are unique."""

FAULTS = (
  "parse_errors",
  "tool_name_errors",
  "tool_arg_errors",
  "runtime_errors",
)
"""Columns of a rollout that count faults."""

LISTED = (
    "reward", "task_id", "status", "task_success", "num_turns",
    "rollout_time", *FAULTS, "group", "agent_reported_success",
    "consecutive_repeated_actions",
)  # fmt: skip
"""Columns of a rollout that lists are narrowed and sorted by."""

# A condition is only seen to be an index's own if its numbers are in the text.
# Not a whole number: a sum of bigints could overflow on PostgreSQL.
_ZERO: sa.ColumnClause[float] = sa.literal_column("0.0")
NUM_FAULTS: sa.ColumnElement[float] = functools.reduce(
  operator.add, (sa.func.coalesce(rollout.c[c], _ZERO) for c in FAULTS)
)
FAULTY: sa.ColumnElement[bool] = NUM_FAULTS > _ZERO
"""Of a rollout: whether anything went wrong. The condition of an index."""
UNSOLVED = (
  "failed",
  "max_turns",
  "context_limit",
  "parse_error",
  "timeout",
  "env_error",
  "model_error",
)
"""Words of `status_message`: how a rollout ends that does not succeed."""
# Only these words are in an index: any text could be too long for one.
ENDED: sa.ColumnElement[bool] = rollout.c.status_message.in_(
  [sa.literal_column(f"'{word}'") for word in UNSOLVED]
)
"""Of a rollout: whether it ended so. The condition of an index."""


def index_name(table: str, columns: tuple[str, ...]) -> str:
  return f"idx_{table}_{'_'.join(columns)}"


for _name, _columns, _unique in INDICES:
  sa.Index(
    index_name(_name, _columns),
    *(metadata.tables[_name].c[c] for c in _columns),
    unique=_unique,
  )

# The monitor's own. Lists of rollouts are narrowed and sorted, and histograms
# of rewards are counted, from these indices alone, not from rows of two
# kilobytes: all rollouts of a kind of source, the ones in which something went
# wrong, and the ones that did not succeed, by their end.
LIST_INDICES = [
  sa.Index(
    f"idx_rollout_{source}_{kind}",
    rollout.c[f"{source}_id"],
    *(rollout.c[c] for c in (*first, *LISTED)),
    sqlite_where=rollout.c[f"{source}_id"].is_not(None) & condition,
    postgresql_where=rollout.c[f"{source}_id"].is_not(None) & condition,
  )
  for source in vocabulary.SOURCE_TYPES
  for kind, first, condition in (
    ("listed", (), sa.true()),
    ("faulty", (), FAULTY),
    ("ended", ("status_message",), ENDED),
  )
]
"""Made in this order: of equally good indices SQLite takes the last one."""

# --- the monitor's own ------------------------------------------------------

group = _table(
  "monitor_group",
  _id(),
  _refers("step_id", "step", nullable=True),
  _refers("eval_id", "eval", nullable=True),
  _refers("baseline_id", "baseline", nullable=True),
  _refers("task_id", "task", nullable=True),
  _required("group_num", INTEGER),
  _now("created_at"),
  _now("updated_at"),
  sa.CheckConstraint(
    " + ".join(
      f"CASE WHEN {word}_id IS NULL THEN 0 ELSE 1 END"
      for word in vocabulary.SOURCE_TYPES
    )
    + " = 1",
    name="one_source",
  ),
  *(
    sa.Index(
      f"idx_monitor_group_{word}", f"{word}_id", "group_num", unique=True
    )
    for word in vocabulary.SOURCE_TYPES
  ),
)
"""Groups as the later schema of other monitors has them: the rollouts of a
source whose `group` is `group_num`. Only clients of that schema send them."""

project = _table(
  "monitor_project",
  _id(),
  sa.Column("name", sa.Text, nullable=False, unique=True),
  _now("created_at", nullable=False),
)

access_token = _table(
  "monitor_token",
  _id(),
  _refers("project_id", "monitor_project"),
  _text("note"),
  # SHA-256 of the token: a reader of the database learns no token.
  sa.Column("token_hash", sa.Text, nullable=False, unique=True),
  _required("scopes"),
  _now("created_at", nullable=False),
)

training_project = sa.Table(
  "monitor_training_project",
  metadata,
  _refers("training_id", "training", primary_key=True, autoincrement=False),
  _refers("project_id", "monitor_project"),
  # Unique, so that others can refer to a run of a project.
  sa.Index(
    "idx_monitor_training_project", "project_id", "training_id", unique=True
  ),
)

training_tag = sa.Table(
  "monitor_training_tag",
  metadata,
  _refers("training_id", "training", primary_key=True, autoincrement=False),
  _key("tag"),
  _now("created_at", nullable=False),
  sa.CheckConstraint(
    f"length(tag) BETWEEN 1 AND {tags_lib.LONGEST} AND tag = trim(tag)",
    name="tag",
  ),
  sa.Index("idx_monitor_training_tag", "tag", "training_id"),
)
"""Tags that runs are found by; see `core.run_tags`."""

pinned_baseline = sa.Table(
  "monitor_pinned_baseline",
  metadata,
  _key("project_id", INTEGER),
  _required("training_id", INTEGER),
  _now("pinned_at", nullable=False),
  sa.ForeignKeyConstraint(
    ["project_id", "training_id"],
    [
      "monitor_training_project.project_id",
      "monitor_training_project.training_id",
    ],
    ondelete="RESTRICT",
  ),
)
"""The run that a project's others are compared with: at most one, its own."""

annotation = _table(
  "monitor_annotation",
  _id(),
  _refers("rollout_id", "rollout"),
  _refers("turn_id", "turn", nullable=True),
  _text("label", "note"),
  _now("created_at", nullable=False),
  sa.CheckConstraint(
    "(label IS NULL AND note IS NOT NULL) OR (label IS NOT NULL AND note IS"
    " NULL)",
    name="one_of",
  ),
  sa.CheckConstraint(
    f"length(label) BETWEEN 1 AND {tags_lib.LONGEST} AND label = trim(label)",
    name="label",
  ),
  sa.CheckConstraint(
    f"length(note) BETWEEN 1 AND {vocabulary.LONGEST_NOTE}", name="note"
  ),
  sa.Index("idx_monitor_annotation_rollout", "rollout_id"),
  sa.Index("idx_monitor_annotation_turn", "turn_id"),
  sa.Index("idx_monitor_annotation_label", "label", "rollout_id"),
)
"""Labels and notes of people: of a turn, or (without one) of a rollout."""

client_ids = sa.Table(
  "monitor_client_id",
  metadata,
  _key("project_id", INTEGER),
  _key("kind"),
  _key("client_id"),
  _required("entity_id", INTEGER),
  sqlite_with_rowid=False,
)
"""Client ids of a project's entities."""

delivery = sa.Table(
  "monitor_delivery",
  metadata,
  _key("project_id", INTEGER),
  _key("spool"),
  _required("last_seq", INTEGER),
  sa.Column("health_json", sa.Text),
  _now("updated_at", nullable=False),
)
"""How far each client's spool has been applied, and how that client fares."""

pending_environment = sa.Table(
  "monitor_pending_environment",
  metadata,
  _key("id", INTEGER),
  _required("project_id", INTEGER),
  _required("fields_json"),
  _now("created_at", nullable=False),
)
"""Environments sent before their rollout, under the id that they will have."""

raw_value = sa.Table(
  "monitor_raw_value",
  metadata,
  _key("kind"),
  _key("entity_id", INTEGER),
  _key("field"),
  _required("value"),
)
"""Clients' original values that were normalised or have no column."""

change = _table(
  "monitor_change",
  _id(),
  _required("training_id", INTEGER),
  _required("kind"),
  _required("entity_id", INTEGER),
  _now("changed_at", nullable=False),
)
"""Changes in order, so that a listener continues where it stopped."""

screenshot = sa.Table(
  "monitor_screenshot",
  metadata,
  _key("sha256"),
  _required("media_type"),
  _required("num_bytes", INTEGER),
  _required("width", INTEGER),
  _required("height", INTEGER),
  _now("created_at", nullable=False),
)
"""Screenshots that are there; their bytes are files beside the database."""

meta = sa.Table("monitor_meta", metadata, _key("key"), _required("value"))
