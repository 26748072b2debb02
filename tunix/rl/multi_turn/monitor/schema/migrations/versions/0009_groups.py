"""Groups, as the later schema of other monitors has them.

The views of that schema are `schema.later_views`.
"""

from alembic import op
import sqlalchemy as sa

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
NOW = sa.text("CURRENT_TIMESTAMP")
SOURCES = ("step", "eval", "baseline")
VIEWS = (
    "group", "validation", "action", "turn", "rollout", "task", "training",
    "baseline", "eval", "step",
)  # pyformat: disable


def upgrade() -> None:
  refers = [
      sa.ForeignKeyConstraint(
          [f"{kind}_id"], [f"{kind}.id"],
          name=op.f(f"fk_monitor_group_{kind}_id"), ondelete="RESTRICT",
      )
      for kind in (*SOURCES, "task")
  ]  # pyformat: disable
  one = " + ".join(
      f"CASE WHEN {kind}_id IS NULL THEN 0 ELSE 1 END" for kind in SOURCES
  )
  op.create_table(
      "monitor_group",
      sa.Column("id", INTEGER, autoincrement=True, nullable=False),
      *(
          sa.Column(f"{kind}_id", INTEGER, nullable=True)
          for kind in (*SOURCES, "task")
      ),
      sa.Column("group_num", INTEGER, nullable=False),
      sa.Column("created_at", sa.TIMESTAMP(), server_default=NOW),
      sa.Column("updated_at", sa.TIMESTAMP(), server_default=NOW),
      sa.CheckConstraint(f"{one} = 1", name=op.f("ck_monitor_group_one_source")),
      *refers,
      sa.PrimaryKeyConstraint("id", name=op.f("pk_monitor_group")),
      sqlite_autoincrement=True,
  )
  for kind in SOURCES:
    op.create_index(
        f"idx_monitor_group_{kind}", "monitor_group",
        [f"{kind}_id", "group_num"], unique=True,
    )  # pyformat: disable


def downgrade() -> None:
  for view in VIEWS:
    op.execute(f"DROP VIEW IF EXISTS monitor_later_{view}")
  op.execute("DELETE FROM monitor_meta WHERE key = 'triggers'")
  op.drop_table("monitor_group")
