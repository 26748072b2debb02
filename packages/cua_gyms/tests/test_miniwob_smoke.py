"""The command that tries tasks, on those whose ways differ most."""

import asyncio
import json

import browsers
from cua_gyms import miniwob
from cua_gyms.miniwob import __main__ as command
from cua_gyms.miniwob import smoke

pytestmark = browsers.needed()


def test_tasks_pass_and_are_listed(capsys):
  assert command.main(["smoke", "enter-text", "--json"]) == 0
  lines = map(json.loads, capsys.readouterr().out.splitlines())
  rows = {row["family"]: row for row in lines}
  assert set(rows) == {"enter-text", "enter-text-2", "enter-text-dynamic"}
  assert not any(row["problem"] for row in rows.values())
  assert rows["enter-text"]["score"] > 0 and rows["enter-text"]["decided"]
  assert command.main(["smoke", "chase-circle"]) == 0
  assert "1 of 1 passed" in capsys.readouterr().out


def test_what_is_wrong_is_found(monkeypatch):
  async def run(**broken):
    browser = miniwob.Browser()
    for name, value in broken.items():
      monkeypatch.setattr(miniwob.MiniWobGym, name, value)
    task = miniwob.MiniWobTasks().task("click-test", 3)
    try:
      return await smoke.try_family("click-test", task, browser)
    finally:
      monkeypatch.undo()
      await browser.close()

  assert not asyncio.run(run()).problem
  real = miniwob.MiniWobGym.start
  count = [0]

  async def drifts(self, task):
    count[0] += 1
    return await real(
      self, miniwob.MiniWobTasks().task("click-test-2", count[0])
    )

  assert "other" in asyncio.run(run(start=drifts)).problem
