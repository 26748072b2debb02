"""Collects one group per task, without a queue."""

import asyncio


async def groups(collector, tasks, **options):
  """Returns the tasks' groups in order; collects all of them at once."""
  return await asyncio.gather(
    *(
      collector.collect(task, index=index, **options)
      for index, task in enumerate(tasks)
    )
  )
