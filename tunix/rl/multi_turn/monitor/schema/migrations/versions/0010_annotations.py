"""Labels and notes of turns and rollouts; an index of the words of turns.

`schema.text_index` makes and fills the index when a server opens the database.
"""

from alembic import op
import sqlalchemy as sa
from tunix.rl.multi_turn.monitor.schema import triggers

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
NOW = sa.text("CURRENT_TIMESTAMP")


def upgrade() -> None:
  op.create_table(
      "monitor_annotation",
      sa.Column("id", INTEGER, autoincrement=True, nullable=False),
      sa.Column("rollout_id", INTEGER, nullable=False),
      sa.Column("turn_id", INTEGER, nullable=True),
      sa.Column("label", sa.Text(), nullable=True),
      sa.Column("note", sa.Text(), nullable=True),
      sa.Column(
          "created_at", sa.TIMESTAMP(), server_default=NOW, nullable=False
      ),
      sa.CheckConstraint(
          "(label IS NULL AND note IS NOT NULL) OR (label IS NOT NULL AND note"
          " IS NULL)",
          name=op.f("ck_monitor_annotation_one_of"),
      ),
      sa.CheckConstraint(
          "length(label) BETWEEN 1 AND 50 AND label = trim(label)",
          name=op.f("ck_monitor_annotation_label"),
      ),
      sa.CheckConstraint(
          "length(note) BETWEEN 1 AND 4000",
          name=op.f("ck_monitor_annotation_note"),
      ),
      *(
          sa.ForeignKeyConstraint(
              [f"{kind}_id"], [f"{kind}.id"],
              name=op.f(f"fk_monitor_annotation_{kind}_id"),
              ondelete="RESTRICT",
          )
          for kind in ("rollout", "turn")
      ),
      sa.PrimaryKeyConstraint("id", name=op.f("pk_monitor_annotation")),
      sqlite_autoincrement=True,
  )  # pyformat: disable
  for name, columns in (
      ("rollout", ["rollout_id"]), ("turn", ["turn_id"]),
      ("label", ["label", "rollout_id"]),
  ):  # pyformat: disable
    op.create_index(
        f"idx_monitor_annotation_{name}", "monitor_annotation", columns
    )


def downgrade() -> None:
  # The triggers write into the index; an earlier program makes its own.
  triggers.drop(op.get_bind())
  op.execute(
      "DELETE FROM monitor_meta WHERE key IN ('triggers', 'text_index')"
  )
  op.execute("DROP TABLE IF EXISTS monitor_turn_words")
  op.drop_table("monitor_annotation")
