"""An index of the rollouts that succeeded, by their task and turns."""

from alembic import op
import sqlalchemy as sa

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

SOLVED = (
    "coalesce(status, '') = 'completed' AND task_success = 1 AND num_turns > 0"
)


def upgrade() -> None:
  op.create_index(
      "idx_rollout_solved", "rollout", ["task_id", "num_turns"],
      sqlite_where=sa.text(SOLVED), postgresql_where=sa.text(SOLVED),
  )  # pyformat: disable


def downgrade() -> None:
  op.drop_index("idx_rollout_solved", "rollout")
