"""Each family of MiniWoB++ starts, acts and ends, by a scripted policy."""

import asyncio

import browsers
from cua_gyms import miniwob
import miniwob_trials
import pytest

pytestmark = browsers.needed()
DIFFERENT = ("enter-text", "enter-text-dynamic", "chase-circle")
"""Families whose ways differ most."""


def problems(families):
  """Family -> why its first training instance failed, "" if it passed."""

  async def run():
    browser, tasks = miniwob.Browser(), miniwob.MiniWobTasks()
    two = asyncio.Semaphore(2)  # Pages at a time: each waits for its screen.

    async def problem_of(name):
      async with two:
        return await miniwob_trials.problem_of(
          name, tasks.train_task(name, 0, 0), browser
        )

    try:
      return dict(
        zip(families, await asyncio.gather(*map(problem_of, families)))
      )
    finally:
      await browser.close()

  return asyncio.run(run())


def test_families_pass():
  assert problems(DIFFERENT) == dict.fromkeys(DIFFERENT, "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_family_passes():
  families = miniwob.families()
  assert problems(families) == dict.fromkeys(families, "")


def test_what_is_wrong_is_found(monkeypatch):
  real = miniwob.MiniWobGym.start
  count = [0]

  async def drifts(self, task):
    del task
    count[0] += 1
    return await real(
      self, miniwob.MiniWobTasks().task("click-test-2", count[0])
    )

  monkeypatch.setattr(miniwob.MiniWobGym, "start", drifts)
  assert "other" in problems(["click-test"])["click-test"]
