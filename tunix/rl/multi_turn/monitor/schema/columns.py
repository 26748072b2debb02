"""Columns that the database's tables are made of, on SQLite and PostgreSQL."""

from __future__ import annotations

import sqlalchemy as sa
from tunix.rl.multi_turn.monitor.schema import vocabulary

INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
REAL = sa.Double().with_variant(sa.REAL, "sqlite")

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def identity() -> sa.Column:
  return sa.Column("id", INTEGER, primary_key=True, autoincrement=True)


def text(*names: str) -> list[sa.Column]:
  return [sa.Column(name, sa.Text) for name in names]


def integers(*names: str) -> list[sa.Column]:
  return [sa.Column(name, INTEGER) for name in names]


def reals(*names: str) -> list[sa.Column]:
  return [sa.Column(name, REAL) for name in names]


def times(*names: str) -> list[sa.Column]:
  return [sa.Column(name, sa.TIMESTAMP) for name in names]


def now(name: str, nullable: bool = True) -> sa.Column:
  return sa.Column(
      name,
      sa.TIMESTAMP,
      nullable=nullable,
      server_default=sa.func.current_timestamp(),
  )


def required(name: str, kind: sa.types.TypeEngine = sa.Text()) -> sa.Column:
  return sa.Column(name, kind, nullable=False)


def refers(name: str, table: str, nullable: bool = False) -> sa.Column:
  return sa.Column(
      name,
      INTEGER,
      sa.ForeignKey(f"{table}.id", ondelete="RESTRICT"),
      nullable=nullable,
  )


def flags(*names: str) -> list[sa.Column | sa.CheckConstraint]:
  found: list[sa.Column | sa.CheckConstraint] = integers(*names)
  found += [
      sa.CheckConstraint(f"{name} IN (0, 1)", name=name) for name in names
  ]
  return found


def choice(
    table: str, column: str, **options
) -> list[sa.Column | sa.CheckConstraint]:
  words = ", ".join(f"'{w}'" for w in vocabulary.CHOICES[table, column])
  return [
      sa.Column(column, sa.Text, **options),
      sa.CheckConstraint(f"{column} IN ({words})", name=column),
  ]


def state(table: str) -> list[sa.Column | sa.CheckConstraint]:
  """`status` and `progress_percent`."""
  first, *_ = vocabulary.STATUSES[table]
  words = ", ".join(f"'{w}'" for w in vocabulary.STATUSES[table])
  found: list[sa.Column | sa.CheckConstraint] = [
      sa.Column("status", sa.Text, server_default=first),
      # A CHECK that is NULL holds.
      sa.CheckConstraint(
          f"status IS NOT NULL AND status IN ({words})", name="status"
      ),
  ]
  if table != "environment":
    found += [
        sa.Column("progress_percent", REAL, server_default=sa.text("0.0")),
        sa.CheckConstraint(
            "progress_percent >= 0 AND progress_percent <= 100",
            name="progress_percent",
        ),
    ]
  return found


def table(name: str, *columns) -> sa.Table:
  flat = []
  for column in columns:
    flat += column if isinstance(column, list) else [column]
  return sa.Table(name, metadata, *flat, sqlite_autoincrement=True)
