"""Collects one group a task, without a queue."""

import asyncio


async def groups(collector, tasks, **options):
  """The tasks' groups, in their order; all are begun at once."""
  return await asyncio.gather(
    *(
      collector.collect(task, index=index, **options)
      for index, task in enumerate(tasks)
    )
  )
