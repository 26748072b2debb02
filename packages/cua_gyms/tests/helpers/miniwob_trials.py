"""Checks that every task starts, acts and ends, with a scripted policy.

The policy has no knowledge of the task. It clicks on elements, types into
fields, drags and scrolls, drawn by a seed; where there is an oracle, the oracle
plays. The gym is checked: that the instance has an instruction and shows
something, that it is the same when started again, that actions change it
without an error, that its verdict is in [-1, 1], and that the page's own time
limit ends it with -1.
"""

from __future__ import annotations

import random

from cua_gyms.chromium import devtools
from cua_gyms.miniwob import miniwob_gym
from cua_gyms.miniwob import oracle as oracle_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base

_Action = gui_action.GuiAction
_Kind = gui_action.GuiActionKind
MOVING = frozenset({"book-flight", "book-flight-nodelay", "chase-circle"})
"""Families of which a page loaded anew may show other pixels."""

# Middle points of what can be used and is not covered, and whether it takes
# text; the rest of a page is clicked by the look of it.
_USABLE = """[...document.querySelectorAll('#area button, #area input, #area a,'
    + '#area textarea, #area select, #area li, #area td, #area span,'
    + '#area svg *, .ui-dialog button')].map(e => {
  const r = e.getBoundingClientRect();
  const x = r.left + r.width / 2, y = r.top + r.height / 2;
  const hit = x >= 0 && y >= 0 && x < 160 && y < 210 && r.width * r.height
      && document.elementFromPoint(x, y);
  return hit && (hit === e || e.contains(hit))
      ? [x, y, e.matches('textarea, input:not([type=button])')] : null;
}).filter(e => e)"""


class TrialFailed(Exception):
  """The gym failed a check."""


def _check(holds: object, what: str) -> None:
  if not holds:
    raise TrialFailed(what)


async def problem_of(
  family: str, task: base.Task, browser: miniwob_gym.Browser
) -> str:
  """Plays one instance and lets its time run out; returns why it failed."""
  gym = miniwob_gym.MiniWobGym(browser=browser, time_limit=True)
  try:
    await _try(gym, family, task, random.Random(f"0/{family}"))
    return ""
  except (
    devtools.DevToolsError,
    TrialFailed,
    LookupError,
    ValueError,
  ) as error:
    return f"{type(error).__name__}: {error}"
  finally:
    await gym.close()


async def _try(
  gym: miniwob_gym.MiniWobGym, family: str, task: base.Task, rng: random.Random
) -> None:
  first = await gym.start(task)
  _check(first.instruction.strip(), "no instruction")
  shape = first.pixels.shape
  _check(shape == (gym.height, gym.width, 3), f"a screenshot of {shape}")
  _check(len({*map(bytes, first.pixels.reshape(-1, 3))}) > 2, "blank")
  _check(not first.done, "over before it began")

  plays = family in oracle_lib.ORACLE_FAMILIES
  latest = first
  for _ in range(task.max_turns or 0):
    if latest.done:
      break
    action = await oracle_lib.oracle_action(gym) if plays else None
    if action is None:
      action = await _any_action(gym, rng)
    latest = await gym.act(action)
    _check(not latest.info.get("ignored"), str(dict(latest.info)))
  verdict = await gym.evaluate()
  decided = bool(verdict.details["decided"])
  _check(-1 <= verdict.score <= 1, f"score {verdict.score}")
  _check(verdict.score == 0 or decided, "a score of what is not decided")
  _check(verdict.success or not plays, "the oracle did not solve it")

  again = await gym.start(task)
  _check(again.instruction == first.instruction, "another instruction")
  if family not in MOVING:
    differ = int((again.pixels != first.pixels).any(-1).sum())
    _check(differ == 0, f"{differ} other pixels when started again")
  for _ in range(6):  # 60 s of the page's time: twice the longest limit.
    latest = await gym.act(_Action(_Kind.WAIT, duration=10))
    if latest.done:
      break
  timed_out = await gym.evaluate()
  _check(latest.done, "its time limit does not end it")
  # chase-circle pays for the time it took, and ends otherwise.
  if timed_out.details["reason"] == "timed out":
    _check(timed_out.score == -1, f"timed out with {timed_out.score}")


async def _any_action(
  gym: miniwob_gym.MiniWobGym, rng: random.Random
) -> gui_action.GuiAction:
  if gym.page is None:
    raise RuntimeError("no episode is running; call start(task) first")
  usable = await gym.page.evaluate(_USABLE)
  if not usable or rng.random() < 0.15:
    x, y = rng.uniform(2, 158), rng.uniform(52, 208)
    x2, y2 = rng.uniform(2, 158), rng.uniform(52, 208)
    return rng.choice(
      (
        _Action(_Kind.CLICK, x, y),
        _Action(_Kind.DRAG, x, y, x2, y2),
        _Action(_Kind.SCROLL, x, y, dy=rng.choice((-60.0, 60.0))),
        _Action(_Kind.MOVE, x, y),
      )
    )
  x, y, takes_text = rng.choice(usable)
  at_it = (x, y) == gym.page.pointer
  if takes_text and at_it:
    return _Action(_Kind.TYPE, text=rng.choice(("7", "alpha", "3/4", "a b")))
  return _Action(_Kind.CLICK, x=x, y=y)
