"""Plays nothing: programs elsewhere write the buffer's items.

A rollout of this type gives a buffer its rules, and empties it.
"""

TASK_TYPE = "external"
READS = ()


def run_rollout(data):
  del data
