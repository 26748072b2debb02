"""What Alembic runs migrations with: the connection that it is handed."""

from alembic import context
from tunix.rl.multi_turn.monitor.schema import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.metadata,
    render_as_batch=True,
    # The whole upgrade is the caller's transaction.
    transactional_ddl=False,
)
context.run_migrations()
