"""Indices of the rollouts in which something went wrong, of few among many."""

from alembic import op
import sqlalchemy as sa

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

LISTED = [
    "reward", "task_id", "status", "task_success", "num_turns",
    "rollout_time", "parse_errors", "tool_name_errors", "tool_arg_errors",
    "runtime_errors",
]  # pyformat: disable
FAULTY = (
    "coalesce(parse_errors, 0.0) + coalesce(tool_name_errors, 0.0)"
    " + coalesce(tool_arg_errors, 0.0) + coalesce(runtime_errors, 0.0) > 0.0"
)


def upgrade() -> None:
  for source in ("step", "eval", "baseline"):
    held = sa.text(f"{source}_id IS NOT NULL AND {FAULTY}")
    op.create_index(
        f"idx_rollout_{source}_faulty",
        "rollout",
        [f"{source}_id", *LISTED],
        sqlite_where=held,
        postgresql_where=held,
    )


def downgrade() -> None:
  for source in ("step", "eval", "baseline"):
    op.drop_index(f"idx_rollout_{source}_faulty", "rollout")
