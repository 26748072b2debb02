"""Indices that hold all that lists of rollouts are narrowed and sorted by.

That of the rewards of a step begins one of them, and goes.
"""

from alembic import op
import sqlalchemy as sa

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

LISTED = [
    "reward", "task_id", "status", "task_success", "num_turns",
    "rollout_time", "parse_errors", "tool_name_errors", "tool_arg_errors",
    "runtime_errors",
]  # pyformat: disable


def upgrade() -> None:
  for source in ("step", "eval", "baseline"):
    own = sa.text(f"{source}_id IS NOT NULL")
    op.create_index(
        f"idx_rollout_{source}_listed",
        "rollout",
        [f"{source}_id", *LISTED],
        sqlite_where=own,
        postgresql_where=own,
    )
  op.drop_index("idx_rollout_step_id_reward", "rollout")


def downgrade() -> None:
  op.create_index(
      "idx_rollout_step_id_reward", "rollout", ["step_id", "reward"]
  )
  for source in ("step", "eval", "baseline"):
    op.drop_index(f"idx_rollout_{source}_listed", "rollout")
