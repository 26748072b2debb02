"""Figures of measurements are of their sampled attempts, not of all.

Greedy attempts count where a measurement has no others, as they do for new
rows; see `server.side_rows.update_figures`.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
  for kind in ("eval", "baseline"):
    own = (
        f"FROM rollout WHERE source_type = '{kind}' AND {kind}_id ="
        f' "{kind}".id AND status = \'completed\' AND'
        " coalesce(temperature, 1.0) <> 0"
    )
    mixed = (
        f"EXISTS (SELECT 1 FROM rollout WHERE source_type = '{kind}' AND"
        f' {kind}_id = "{kind}".id AND temperature = 0) AND EXISTS (SELECT 1'
        f" {own})"
    )
    op.execute(
        f'UPDATE "{kind}" SET success_rate = (SELECT avg(CASE WHEN'
        f" task_success = 1 THEN 1.0 ELSE 0.0 END) {own}), successful_tasks ="
        f" (SELECT count(CASE WHEN task_success = 1 THEN 1 END) {own}),"
        f" avg_reward = (SELECT avg(reward) {own}), avg_turns = (SELECT"
        f" avg(num_turns) {own}) WHERE {mixed}"
    )


def downgrade() -> None:
  """The figures of all attempts come back with the next one."""
