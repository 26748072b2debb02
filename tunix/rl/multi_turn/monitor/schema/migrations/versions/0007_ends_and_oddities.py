"""Indices hold how a rollout ended and what is odd about it."""

from alembic import op
import sqlalchemy as sa

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

OLD = [
    "reward", "task_id", "status", "task_success", "num_turns",
    "rollout_time", "parse_errors", "tool_name_errors", "tool_arg_errors",
    "runtime_errors",
]  # pyformat: disable
LISTED = [
    *OLD, "group", "agent_reported_success", "consecutive_repeated_actions",
]  # pyformat: disable
FAULTY = (
    "coalesce(parse_errors, 0.0) + coalesce(tool_name_errors, 0.0)"
    " + coalesce(tool_arg_errors, 0.0) + coalesce(runtime_errors, 0.0) > 0.0"
)
ENDED = (
    "status_message IN ('failed', 'max_turns', 'context_limit', 'parse_error',"
    " 'timeout', 'env_error', 'model_error')"
)


def upgrade() -> None:
  _make(LISTED)
  for source in ("step", "eval", "baseline"):
    _index(
        f"idx_rollout_{source}_ended",
        [f"{source}_id", "status_message", *LISTED],
        f"{source}_id IS NOT NULL AND {ENDED}",
    )


def downgrade() -> None:
  for source in ("step", "eval", "baseline"):
    op.drop_index(f"idx_rollout_{source}_ended", "rollout")
  _make(OLD)


def _make(columns: list[str]) -> None:
  for source in ("step", "eval", "baseline"):
    own = f"{source}_id IS NOT NULL"
    for kind, held in (("listed", own), ("faulty", f"{own} AND {FAULTY}")):
      name = f"idx_rollout_{source}_{kind}"
      op.drop_index(name, "rollout")
      _index(name, [f"{source}_id", *columns], held)


def _index(name: str, columns: list[str], held: str) -> None:
  op.create_index(
      name, "rollout", columns,
      sqlite_where=sa.text(held), postgresql_where=sa.text(held),
  )  # pyformat: disable
