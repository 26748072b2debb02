"""The settings of a run that are not their defaults, with the defaults."""

from alembic import op
import sqlalchemy as sa

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
  op.add_column("training", sa.Column("changed_json", sa.Text()))


def downgrade() -> None:
  op.drop_column("training", "changed_json")
