"""PostgreSQL takes booleans for the columns that hold 0 and 1, as SQLite does.

A cast between two types of the system is a superuser's to make: without one
the schema is complete, and writers that send booleans are refused as before.
"""

from alembic import op
import sqlalchemy as sa

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
  if not _may():
    return
  op.execute(
      "CREATE OR REPLACE FUNCTION monitor_fn_flag(boolean) RETURNS bigint"
      " LANGUAGE sql IMMUTABLE STRICT AS"
      " 'SELECT CASE WHEN $1 THEN 1::bigint ELSE 0::bigint END'"
  )
  present = op.get_bind().execute(sa.text(
      "SELECT count(*) FROM pg_cast WHERE castsource = 'boolean'::regtype AND"
      " casttarget = 'bigint'::regtype"
  )).scalar()  # pyformat: disable
  if not present:
    op.execute(
        "CREATE CAST (boolean AS bigint) WITH FUNCTION"
        " monitor_fn_flag(boolean) AS ASSIGNMENT"
    )


def downgrade() -> None:
  if _may():
    op.execute("DROP CAST IF EXISTS (boolean AS bigint)")
    op.execute("DROP FUNCTION IF EXISTS monitor_fn_flag(boolean)")


def _may() -> bool:
  """Whether this is PostgreSQL, as a superuser."""
  connection = op.get_bind()
  if connection.dialect.name != "postgresql":
    return False
  return connection.execute(sa.text(
      "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"
  )).scalar_one()  # pyformat: disable
