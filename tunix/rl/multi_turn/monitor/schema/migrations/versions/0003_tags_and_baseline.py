"""Tags of runs, and the run that a project's others are compared with."""

from alembic import op
import sqlalchemy as sa

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
NOW = sa.text("CURRENT_TIMESTAMP")


def upgrade() -> None:
  op.drop_index("idx_monitor_training_project", "monitor_training_project")
  op.create_index(
      "idx_monitor_training_project",
      "monitor_training_project",
      ["project_id", "training_id"],
      unique=True,
  )
  op.create_table(
      "monitor_training_tag",
      sa.Column("training_id", INTEGER, autoincrement=False, nullable=False),
      sa.Column("tag", sa.Text(), nullable=False),
      sa.Column(
          "created_at", sa.TIMESTAMP(), server_default=NOW, nullable=False
      ),
      sa.CheckConstraint(
          "length(tag) BETWEEN 1 AND 50 AND tag = trim(tag)",
          name=op.f("ck_monitor_training_tag_tag"),
      ),
      sa.ForeignKeyConstraint(
          ["training_id"],
          ["training.id"],
          name=op.f("fk_monitor_training_tag_training_id"),
          ondelete="RESTRICT",
      ),
      sa.PrimaryKeyConstraint(
          "training_id", "tag", name=op.f("pk_monitor_training_tag")
      ),
  )
  op.create_index(
      "idx_monitor_training_tag", "monitor_training_tag", ["tag", "training_id"]
  )
  op.create_table(
      "monitor_pinned_baseline",
      sa.Column("project_id", INTEGER, autoincrement=False, nullable=False),
      sa.Column("training_id", INTEGER, nullable=False),
      sa.Column(
          "pinned_at", sa.TIMESTAMP(), server_default=NOW, nullable=False
      ),
      sa.ForeignKeyConstraint(
          ["project_id", "training_id"],
          [
              "monitor_training_project.project_id",
              "monitor_training_project.training_id",
          ],
          name=op.f("fk_monitor_pinned_baseline_project_id"),
          ondelete="RESTRICT",
      ),
      sa.PrimaryKeyConstraint(
          "project_id", name=op.f("pk_monitor_pinned_baseline")
      ),
  )


def downgrade() -> None:
  op.drop_table("monitor_pinned_baseline")
  op.drop_table("monitor_training_tag")
  op.drop_index("idx_monitor_training_project", "monitor_training_project")
  op.create_index(
      "idx_monitor_training_project",
      "monitor_training_project",
      ["project_id", "training_id"],
  )
