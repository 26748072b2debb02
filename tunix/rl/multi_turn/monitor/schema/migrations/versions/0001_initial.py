"""The 13 tables of the source document and the monitor's own.

Written by Alembic from `schema.tables` and frozen: what changes there later is
a migration of its own.
"""

from alembic import op
import sqlalchemy as sa

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
REAL = sa.Double().with_variant(sa.REAL, "sqlite")
NOW = sa.text("CURRENT_TIMESTAMP")


def integer(name, **options):
  return sa.Column(name, INTEGER, **options)


def real(name, **options):
  return sa.Column(name, REAL, **options)


def text(name, **options):
  return sa.Column(name, sa.Text(), **options)


def time(name, **options):
  return sa.Column(name, sa.TIMESTAMP(), **options)


INDICES = (
  (
    "idx_status_history_entity_type_entity_id",
    "status_history",
    ["entity_type", "entity_id"],
    False,
  ),
  (
    "idx_status_history_entity_type_entity_id_changed_at",
    "status_history",
    ["entity_type", "entity_id", "changed_at"],
    False,
  ),
  ("idx_task_task_id", "task", ["task_id"], True),
  ("idx_training_run_name", "training", ["run_name"], True),
  ("idx_training_status", "training", ["status"], False),
  (
    "idx_training_status_last_heartbeat",
    "training",
    ["status", "last_heartbeat"],
    False,
  ),
  ("idx_baseline_status", "baseline", ["status"], False),
  ("idx_baseline_training_id", "baseline", ["training_id"], False),
  ("idx_eval_status", "eval", ["status"], False),
  ("idx_eval_training_id_step", "eval", ["training_id", "step"], True),
  (
    "idx_monitor_training_project",
    "monitor_training_project",
    ["project_id", "training_id"],
    False,
  ),
  ("idx_step_status", "step", ["status"], False),
  ("idx_step_training_id_step", "step", ["training_id", "step"], True),
  ("idx_validator_task_id", "validator", ["task_id"], False),
  ("idx_rollout_rollout_id", "rollout", ["rollout_id"], True),
  (
    "idx_rollout_source_type_baseline_id",
    "rollout",
    ["source_type", "baseline_id"],
    False,
  ),
  (
    "idx_rollout_source_type_eval_id",
    "rollout",
    ["source_type", "eval_id"],
    False,
  ),
  (
    "idx_rollout_source_type_step_id",
    "rollout",
    ["source_type", "step_id"],
    False,
  ),
  ("idx_rollout_status", "rollout", ["status"], False),
  ("idx_rollout_task_id", "rollout", ["task_id"], False),
  ("idx_environment_rollout_id", "environment", ["rollout_id"], True),
  ("idx_environment_status", "environment", ["status"], False),
  ("idx_turn_rollout_id_turn", "turn", ["rollout_id", "turn"], True),
  ("idx_validation_rollout_id", "validation", ["rollout_id"], False),
  ("idx_action_turn_id", "action", ["turn_id"], False),
  ("idx_obs_turn_id", "obs", ["turn_id"], False),
)
"""Name, table, columns, whether they are unique."""


def upgrade() -> None:
  op.create_table(
    "monitor_change",
    integer("id", autoincrement=True, nullable=False),
    integer("training_id", nullable=False),
    text("kind", nullable=False),
    integer("entity_id", nullable=False),
    time("changed_at", server_default=NOW, nullable=False),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_monitor_change")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "monitor_client_id",
    integer("project_id", autoincrement=False, nullable=False),
    text("kind", nullable=False),
    text("client_id", nullable=False),
    integer("entity_id", nullable=False),
    sa.PrimaryKeyConstraint(
      "project_id", "kind", "client_id", name=op.f("pk_monitor_client_id")
    ),
    sqlite_with_rowid=False,
  )
  op.create_table(
    "monitor_delivery",
    integer("project_id", autoincrement=False, nullable=False),
    text("spool", nullable=False),
    integer("last_seq", nullable=False),
    text("health_json"),
    time("updated_at", server_default=NOW, nullable=False),
    sa.PrimaryKeyConstraint(
      "project_id", "spool", name=op.f("pk_monitor_delivery")
    ),
  )
  op.create_table(
    "monitor_meta",
    text("key", nullable=False),
    text("value", nullable=False),
    sa.PrimaryKeyConstraint("key", name=op.f("pk_monitor_meta")),
  )
  op.create_table(
    "monitor_pending_environment",
    integer("id", autoincrement=False, nullable=False),
    integer("project_id", nullable=False),
    text("fields_json", nullable=False),
    time("created_at", server_default=NOW, nullable=False),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_monitor_pending_environment")),
  )
  op.create_table(
    "monitor_project",
    integer("id", autoincrement=True, nullable=False),
    text("name", nullable=False),
    time("created_at", server_default=NOW, nullable=False),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_monitor_project")),
    sa.UniqueConstraint("name", name=op.f("uq_monitor_project_name")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "monitor_raw_value",
    text("kind", nullable=False),
    integer("entity_id", autoincrement=False, nullable=False),
    text("field", nullable=False),
    text("value", nullable=False),
    sa.PrimaryKeyConstraint(
      "kind", "entity_id", "field", name=op.f("pk_monitor_raw_value")
    ),
  )
  op.create_table(
    "monitor_screenshot",
    text("sha256", nullable=False),
    text("media_type", nullable=False),
    integer("num_bytes", nullable=False),
    integer("width", nullable=False),
    integer("height", nullable=False),
    time("created_at", server_default=NOW, nullable=False),
    sa.PrimaryKeyConstraint("sha256", name=op.f("pk_monitor_screenshot")),
  )
  op.create_table(
    "status_history",
    integer("id", autoincrement=True, nullable=False),
    text("entity_type", nullable=False),
    integer("entity_id", nullable=False),
    text("old_status"),
    text("new_status", nullable=False),
    real("progress_percent"),
    text("status_message"),
    text("metadata_json"),
    time("changed_at", server_default=NOW, nullable=False),
    time("created_at", server_default=NOW),
    sa.CheckConstraint(
      "entity_type IN ('training', 'baseline', 'eval', 'step', "
      "'rollout', 'environment')",
      name=op.f("ck_status_history_entity_type"),
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_status_history")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "task",
    integer("id", autoincrement=True, nullable=False),
    text("task_id", nullable=False),
    text("name", nullable=False),
    text("description", nullable=False),
    text("difficulty"),
    text("category"),
    integer("max_steps"),
    text("validation_type"),
    text("validation_query"),
    text("expected_result"),
    text("tags"),
    text("prerequisites"),
    text("app_name"),
    text("source_type"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "category IN ('system', 'navigation', 'settings', 'app', 'input')",
      name=op.f("ck_task_category"),
    ),
    sa.CheckConstraint(
      "difficulty IN ('easy', 'medium', 'hard')",
      name=op.f("ck_task_difficulty"),
    ),
    sa.CheckConstraint(
      "validation_type IN ('state', 'screenshot', 'api')",
      name=op.f("ck_task_validation_type"),
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_task")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "training",
    integer("id", autoincrement=True, nullable=False),
    text("run_name", nullable=False),
    text("log_path", nullable=False),
    text("model_name", nullable=False),
    integer("lora_rank"),
    real("learning_rate"),
    integer("batch_size"),
    integer("group_size"),
    integer("groups_per_batch"),
    integer("max_tokens"),
    real("temperature"),
    real("kl_penalty_coef"),
    integer("num_substeps"),
    integer("max_turns"),
    integer("seed"),
    text("box_type"),
    text("renderer_name"),
    text("wandb_project"),
    text("wandb_name"),
    text("status", server_default="pending"),
    real("progress_percent", server_default=sa.text("(0.0)")),
    integer("current_step"),
    integer("total_steps"),
    text("current_phase"),
    text("status_message"),
    text("error_message"),
    time("start_time"),
    time("end_time"),
    time("last_heartbeat", server_default=NOW),
    text("config_json"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "box_type IN ('android', 'linux')", name=op.f("ck_training_box_type")
    ),
    sa.CheckConstraint(
      "current_phase IN ('initialization', 'rollout', 'training', "
      "'evaluation', 'checkpointing')",
      name=op.f("ck_training_current_phase"),
    ),
    sa.CheckConstraint(
      "status IS NOT NULL AND status IN ('pending', 'initializing', "
      "'running', 'completed', 'failed', 'paused', 'cancelled')",
      name=op.f("ck_training_status"),
    ),
    sa.CheckConstraint(
      "progress_percent >= 0 AND progress_percent <= 100",
      name=op.f("ck_training_progress_percent"),
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_training")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "baseline",
    integer("id", autoincrement=True, nullable=False),
    integer("training_id", nullable=False),
    text("model_path", nullable=False),
    text("status", server_default="pending"),
    real("progress_percent", server_default=sa.text("(0.0)")),
    integer("current_task_index"),
    integer("total_tasks"),
    integer("completed_tasks"),
    text("current_phase"),
    text("status_message"),
    text("error_message"),
    time("start_time"),
    time("end_time"),
    time("eval_time"),
    real("success_rate"),
    real("avg_reward"),
    real("avg_turns"),
    integer("successful_tasks"),
    text("metrics_json"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "current_phase IN ('initialization', 'rollout', 'validation', "
      "'aggregation')",
      name=op.f("ck_baseline_current_phase"),
    ),
    sa.CheckConstraint(
      "status IS NOT NULL AND status IN ('pending', 'running', "
      "'completed', 'failed', 'cancelled')",
      name=op.f("ck_baseline_status"),
    ),
    sa.CheckConstraint(
      "progress_percent >= 0 AND progress_percent <= 100",
      name=op.f("ck_baseline_progress_percent"),
    ),
    sa.ForeignKeyConstraint(
      ["training_id"],
      ["training.id"],
      name=op.f("fk_baseline_training_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_baseline")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "eval",
    integer("id", autoincrement=True, nullable=False),
    integer("training_id", nullable=False),
    integer("step", nullable=False),
    text("model_path", nullable=False),
    text("status", server_default="pending"),
    real("progress_percent", server_default=sa.text("(0.0)")),
    integer("current_task_index"),
    integer("total_tasks"),
    integer("completed_tasks"),
    text("current_phase"),
    text("status_message"),
    text("error_message"),
    time("start_time"),
    time("end_time"),
    time("eval_time"),
    real("success_rate"),
    real("avg_reward"),
    real("avg_turns"),
    integer("successful_tasks"),
    text("metrics_json"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "current_phase IN ('initialization', 'rollout', 'validation', "
      "'aggregation')",
      name=op.f("ck_eval_current_phase"),
    ),
    sa.CheckConstraint(
      "status IS NOT NULL AND status IN ('pending', 'running', "
      "'completed', 'failed', 'cancelled')",
      name=op.f("ck_eval_status"),
    ),
    sa.CheckConstraint(
      "progress_percent >= 0 AND progress_percent <= 100",
      name=op.f("ck_eval_progress_percent"),
    ),
    sa.ForeignKeyConstraint(
      ["training_id"],
      ["training.id"],
      name=op.f("fk_eval_training_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_eval")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "monitor_token",
    integer("id", autoincrement=True, nullable=False),
    integer("project_id", nullable=False),
    text("note"),
    text("token_hash", nullable=False),
    text("scopes", nullable=False),
    time("created_at", server_default=NOW, nullable=False),
    sa.ForeignKeyConstraint(
      ["project_id"],
      ["monitor_project.id"],
      name=op.f("fk_monitor_token_project_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_monitor_token")),
    sa.UniqueConstraint("token_hash", name=op.f("uq_monitor_token_token_hash")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "monitor_training_project",
    integer("training_id", autoincrement=False, nullable=False),
    integer("project_id", nullable=False),
    sa.ForeignKeyConstraint(
      ["project_id"],
      ["monitor_project.id"],
      name=op.f("fk_monitor_training_project_project_id"),
      ondelete="RESTRICT",
    ),
    sa.ForeignKeyConstraint(
      ["training_id"],
      ["training.id"],
      name=op.f("fk_monitor_training_project_training_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint(
      "training_id", name=op.f("pk_monitor_training_project")
    ),
  )
  op.create_table(
    "step",
    integer("id", autoincrement=True, nullable=False),
    integer("training_id", nullable=False),
    integer("step", nullable=False),
    integer("batch"),
    text("status", server_default="pending"),
    real("progress_percent", server_default=sa.text("(0.0)")),
    text("current_phase"),
    text("rollout_progress"),
    text("training_progress"),
    text("status_message"),
    text("error_message"),
    time("start_time"),
    time("end_time"),
    time("rollout_start_time"),
    time("rollout_end_time"),
    time("training_start_time"),
    time("training_end_time"),
    real("learning_rate"),
    text("model_path"),
    text("checkpoint_path"),
    real("loss"),
    real("kl_divergence"),
    real("policy_gradient_norm"),
    real("reward_mean"),
    real("reward_std"),
    integer("num_trajectories"),
    integer("num_tokens"),
    text("metrics_json"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "current_phase IN ('rollout_collection', 'rollout_execution', "
      "'training', 'checkpointing')",
      name=op.f("ck_step_current_phase"),
    ),
    sa.CheckConstraint(
      "status IS NOT NULL AND status IN ('pending', "
      "'rollout_collecting', 'rollout_running', 'training', "
      "'completed', 'failed')",
      name=op.f("ck_step_status"),
    ),
    sa.CheckConstraint(
      "progress_percent >= 0 AND progress_percent <= 100",
      name=op.f("ck_step_progress_percent"),
    ),
    sa.ForeignKeyConstraint(
      ["training_id"],
      ["training.id"],
      name=op.f("fk_step_training_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_step")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "validator",
    integer("id", autoincrement=True, nullable=False),
    integer("task_id", nullable=False),
    text("validator_type", nullable=False),
    text("validation_query"),
    text("validation_method"),
    text("config_json"),
    time("created_at", server_default=NOW),
    sa.ForeignKeyConstraint(
      ["task_id"],
      ["task.id"],
      name=op.f("fk_validator_task_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_validator")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "rollout",
    integer("id", autoincrement=True, nullable=False),
    text("source_type", nullable=False),
    integer("step_id"),
    integer("eval_id"),
    integer("baseline_id"),
    text("rollout_id", nullable=False),
    integer("batch"),
    integer("group"),
    integer("env_index"),
    integer("task_id", nullable=False),
    text("model_path", nullable=False),
    integer("is_eval", server_default=sa.text("0")),
    text("status", server_default="pending"),
    real("progress_percent", server_default=sa.text("(0.0)")),
    text("current_phase"),
    integer("current_turn"),
    text("status_message"),
    text("error_message"),
    time("start_time"),
    time("end_time"),
    time("env_creation_time"),
    time("agent_init_time"),
    time("task_start_time"),
    time("task_end_time"),
    time("validation_time"),
    real("rollout_time"),
    integer("task_completed"),
    integer("task_success"),
    integer("agent_reported_success"),
    integer("validation_passed"),
    integer("num_turns"),
    integer("max_turns"),
    real("reward"),
    real("temperature"),
    integer("num_total_actions"),
    integer("consecutive_repeated_actions"),
    integer("parse_errors"),
    integer("tool_name_errors"),
    integer("tool_arg_errors"),
    integer("runtime_errors"),
    integer("ran_out_of_turns"),
    integer("attempted_completion"),
    integer("turn_first_success"),
    integer("turn_task_completed"),
    text("errors"),
    text("summary_json"),
    text("trajectory_path"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "(source_type = 'step' AND step_id IS NOT NULL AND eval_id IS "
      "NULL AND baseline_id IS NULL) OR (source_type = 'eval' AND "
      "step_id IS NULL AND eval_id IS NOT NULL AND baseline_id IS NULL)"
      " OR (source_type = 'baseline' AND step_id IS NULL AND eval_id IS"
      " NULL AND baseline_id IS NOT NULL)",
      name=op.f("ck_rollout_one_source"),
    ),
    sa.CheckConstraint(
      "current_phase IN ('env_creation', 'agent_initialization', "
      "'task_execution', 'validation', 'cleanup')",
      name=op.f("ck_rollout_current_phase"),
    ),
    sa.CheckConstraint(
      "source_type IN ('step', 'eval', 'baseline')",
      name=op.f("ck_rollout_source_type"),
    ),
    sa.CheckConstraint(
      "status IS NOT NULL AND status IN ('pending', 'env_creation', "
      "'agent_init', 'running', 'completed', 'failed', 'cancelled')",
      name=op.f("ck_rollout_status"),
    ),
    sa.CheckConstraint(
      "agent_reported_success IN (0, 1)",
      name=op.f("ck_rollout_agent_reported_success"),
    ),
    sa.CheckConstraint(
      "attempted_completion IN (0, 1)",
      name=op.f("ck_rollout_attempted_completion"),
    ),
    sa.CheckConstraint("is_eval IN (0, 1)", name=op.f("ck_rollout_is_eval")),
    sa.CheckConstraint(
      "progress_percent >= 0 AND progress_percent <= 100",
      name=op.f("ck_rollout_progress_percent"),
    ),
    sa.CheckConstraint(
      "ran_out_of_turns IN (0, 1)", name=op.f("ck_rollout_ran_out_of_turns")
    ),
    sa.CheckConstraint(
      "task_completed IN (0, 1)", name=op.f("ck_rollout_task_completed")
    ),
    sa.CheckConstraint(
      "task_success IN (0, 1)", name=op.f("ck_rollout_task_success")
    ),
    sa.CheckConstraint(
      "validation_passed IN (0, 1)", name=op.f("ck_rollout_validation_passed")
    ),
    sa.ForeignKeyConstraint(
      ["baseline_id"],
      ["baseline.id"],
      name=op.f("fk_rollout_baseline_id"),
      ondelete="RESTRICT",
    ),
    sa.ForeignKeyConstraint(
      ["eval_id"],
      ["eval.id"],
      name=op.f("fk_rollout_eval_id"),
      ondelete="RESTRICT",
    ),
    sa.ForeignKeyConstraint(
      ["step_id"],
      ["step.id"],
      name=op.f("fk_rollout_step_id"),
      ondelete="RESTRICT",
    ),
    sa.ForeignKeyConstraint(
      ["task_id"],
      ["task.id"],
      name=op.f("fk_rollout_task_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "environment",
    integer("id", autoincrement=True, nullable=False),
    integer("rollout_id", nullable=False),
    text("env_type", nullable=False),
    text("status", server_default="pending"),
    text("gbox_id"),
    text("box_type"),
    time("creation_time"),
    time("termination_time"),
    text("status_message"),
    text("error_message"),
    text("config_json"),
    time("created_at", server_default=NOW),
    time("updated_at", server_default=NOW),
    sa.CheckConstraint(
      "box_type IN ('android', 'linux')", name=op.f("ck_environment_box_type")
    ),
    sa.CheckConstraint(
      "env_type IN ('android', 'linux')", name=op.f("ck_environment_env_type")
    ),
    sa.CheckConstraint(
      "status IS NOT NULL AND status IN ('pending', 'creating', "
      "'running', 'terminated', 'error')",
      name=op.f("ck_environment_status"),
    ),
    sa.ForeignKeyConstraint(
      ["rollout_id"],
      ["rollout.id"],
      name=op.f("fk_environment_rollout_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_environment")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "turn",
    integer("id", autoincrement=True, nullable=False),
    integer("rollout_id", nullable=False),
    integer("turn", nullable=False),
    time("start_time", server_default=NOW, nullable=False),
    time("end_time"),
    real("turn_time"),
    real("reward"),
    integer("episode_done"),
    text("metrics_json"),
    time("created_at", server_default=NOW),
    sa.CheckConstraint(
      "episode_done IN (0, 1)", name=op.f("ck_turn_episode_done")
    ),
    sa.ForeignKeyConstraint(
      ["rollout_id"],
      ["rollout.id"],
      name=op.f("fk_turn_rollout_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_turn")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "validation",
    integer("id", autoincrement=True, nullable=False),
    integer("rollout_id", nullable=False),
    integer("validator_id"),
    time("validation_time", server_default=NOW, nullable=False),
    text("validation_query"),
    text("expected_result"),
    text("actual_result"),
    integer("success", nullable=False),
    real("execution_time"),
    text("error_message"),
    text("details_json"),
    time("created_at", server_default=NOW),
    sa.CheckConstraint("success IN (0, 1)", name=op.f("ck_validation_success")),
    sa.ForeignKeyConstraint(
      ["rollout_id"],
      ["rollout.id"],
      name=op.f("fk_validation_rollout_id"),
      ondelete="RESTRICT",
    ),
    sa.ForeignKeyConstraint(
      ["validator_id"],
      ["validator.id"],
      name=op.f("fk_validation_validator_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_validation")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "action",
    integer("id", autoincrement=True, nullable=False),
    integer("turn_id", nullable=False),
    text("action_type"),
    text("tool_name"),
    text("tool_args"),
    text("tokens"),
    text("logprobs"),
    integer("num_tokens"),
    time("created_at", server_default=NOW),
    sa.ForeignKeyConstraint(
      ["turn_id"],
      ["turn.id"],
      name=op.f("fk_action_turn_id"),
      ondelete="RESTRICT",
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_action")),
    sqlite_autoincrement=True,
  )
  op.create_table(
    "obs",
    integer("id", autoincrement=True, nullable=False),
    integer("turn_id", nullable=False),
    text("obs_type"),
    text("screenshot_uri"),
    text("text_content"),
    text("model_input_json"),
    time("created_at", server_default=NOW),
    sa.CheckConstraint(
      "obs_type IN ('screenshot', 'text', 'multimodal')",
      name=op.f("ck_obs_obs_type"),
    ),
    sa.ForeignKeyConstraint(
      ["turn_id"], ["turn.id"], name=op.f("fk_obs_turn_id"), ondelete="RESTRICT"
    ),
    sa.PrimaryKeyConstraint("id", name=op.f("pk_obs")),
    sqlite_autoincrement=True,
  )
  for name, table, columns, unique in INDICES:
    op.create_index(name, table, columns, unique=unique)


def downgrade() -> None:
  raise NotImplementedError(
    "there is nothing before the first schema; keep a copy of the database"
    " instead"
  )
