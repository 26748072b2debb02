"""Environments of the package verifiers, for tests/environments/test_verifiers.

Imported in the environment that `make verifiers` makes.
"""

import asyncio
import os
import time

import datasets
import verifiers as vf

SYSTEM = "Count."


def _rows(count, start=0):
  return datasets.Dataset.from_list(
    [
      {"question": f"count to {i}", "answer": str(i)}
      for i in range(start, start + count)
    ]
  )


def add(a: int, b: int) -> str:
  """Adds two numbers.

  Args:
    a: the first.
    b: the second.
  """
  return f"sum {a + b}"


def has_sum(completion, **kwargs) -> float:
  del kwargs
  found = [m for m in completion if m["role"] == "tool"]
  return float(bool(found) and "sum" in found[-1]["content"])


def length(completion, **kwargs) -> float:
  del kwargs
  return len(completion[-1]["content"] or "") / 100


class Talk(vf.MultiTurnEnv):
  """Asks twice, and shows a picture the second time."""

  async def env_response(self, messages, state, **kwargs):
    del messages, state, kwargs
    return [{"role": "user", "content": "once more"}]


def load_environment(kind="single", seconds=0.0):
  """`kind`: of environment, or of fault; of several, one an episode."""
  print("an environment may print")
  common = dict(dataset=_rows(10), system_prompt=SYSTEM)
  rubric = vf.Rubric(funcs=[length], weights=[1.0])
  if kind == "tool":
    return vf.ToolEnv(
      tools=[add], max_turns=3, rubric=vf.Rubric(funcs=[has_sum]), **common
    )
  if kind == "talk":
    return Talk(
      max_turns=2, rubric=rubric, eval_dataset=_rows(3, 100), **common
    )
  if kind == "group":

    def best(completions, **kwargs):
      del kwargs
      return [1.0 for _ in completions]

    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[best]), **common)

  faults = iter(kind.split(","))

  async def faulty(completion, **kwargs):
    del completion, kwargs
    fault = next(faults)
    if fault == "raises":
      raise ValueError("no such answer")
    if fault == "dies":
      os.write(2, b"the last words\n")
      os._exit(3)
    if fault == "blocks":
      time.sleep(seconds)
    if fault == "waits":
      await asyncio.sleep(seconds)
    return float("nan")

  if kind != "single":
    rubric = vf.Rubric(funcs=[faulty])
  return vf.SingleTurnEnv(rubric=rubric, **common)
