"""The `miniwob` gym against real pages in a real browser."""

import asyncio
import base64
import contextlib
import io
import math
import re

import browsers
from cua_gyms import miniwob
from cua_gyms.miniwob import catalogue
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import gui_action

pytestmark = browsers.needed()
Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
WAIT = Action(Kind.WAIT, duration=1.0)


@contextlib.asynccontextmanager
async def gyms_on(browser: miniwob.Browser, count: int, **settings):
  gyms = [miniwob.MiniWobGym(browser=browser, **settings) for _ in range(count)]
  try:
    yield gyms
  finally:
    for gym in gyms:
      await gym.close()
    await browser.close()


async def centre(gym: miniwob.MiniWobGym, selector: str) -> dict[str, float]:
  x, y = await gym.page.evaluate(
    "(r => [r.left + r.width / 2, r.top + r.height / 2])"
    f"(document.querySelector({selector!r}).getBoundingClientRect())"
  )
  return {"x": x, "y": y}


async def solve(gym: miniwob.MiniWobGym, task):
  """Plays the oracle; returns the evaluation and the turns it took."""
  observation = await gym.start(task)
  turns = 0
  while not observation.done and turns < task.max_turns:
    observation = await gym.act(await miniwob.oracle_action(gym))
    turns += 1
  assert observation.done and await miniwob.oracle_action(gym) is None
  return await gym.evaluate()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_oracles_solve_their_families_on_eight_pages_at_once():
  tasks = miniwob.MiniWobTasks()
  queue = [
    tasks.eval_task(family, index)
    for family in miniwob.ORACLE_FAMILIES
    for index in range(3)
  ]
  results = {}

  async def work(gym):
    while queue:
      task = queue.pop()
      results[task.task_id] = await solve(gym, task)

  browser = miniwob.Browser(max_pages=8)
  async with gyms_on(browser, 8) as gyms:
    await asyncio.gather(*map(work, gyms))
    assert browser.launches == 1
  assert len(results) == 3 * len(miniwob.ORACLE_FAMILIES)
  for task_id, evaluation in results.items():
    assert evaluation.success and evaluation.score == 1.0, task_id


@pytest.mark.asyncio
async def test_a_sliver_of_a_button_is_found_and_a_hidden_one_is_said_to_be():
  cover = (
    "(top => { const one = document.querySelector('#subbtn');"
    " const r = one.getBoundingClientRect();"
    " const lid = document.createElement('div');"
    " lid.style = 'position:fixed;background:red;z-index:9;left:' + r.left"
    " + 'px;width:' + r.width + 'px;top:' + (r.top + top) + 'px;height:'"
    " + r.height + 'px'; document.body.append(lid); })"
  )
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    task = miniwob.MiniWobTasks().eval_task("click-test-2", 0)
    await gym.start(task)
    await gym.page.evaluate(f"{cover}(2)")
    await gym.act(await miniwob.oracle_action(gym))
    assert (await gym.evaluate()).success
    await gym.start(task)
    await gym.page.evaluate(f"{cover}(0)")
    with pytest.raises(LookupError, match="can be clicked"):
      await miniwob.oracle_action(gym)


@pytest.mark.asyncio
async def test_things_are_called_what_a_person_would_call_them():
  tasks = miniwob.MiniWobTasks()
  expected = {
    "click-test-2": r"the ONE button",
    "click-button": r"the .+ button",
    "click-dialog": r"the close box of the dialog",
    "focus-text": r"the text field",
  }
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    with pytest.raises(RuntimeError, match="call start"):
      await miniwob.describe(gym, 1, 1)
    for family, name in expected.items():
      for index in range(3):
        await gym.start(tasks.eval_task(family, index))
        action = await miniwob.oracle_action(gym)
        phrase = await miniwob.describe(gym, action.x, action.y)
        assert re.fullmatch(name, phrase), (family, phrase)
        assert await miniwob.describe(gym, 159, 1) is None


@pytest.mark.asyncio
async def test_what_a_page_asks_and_shows():
  tasks = miniwob.MiniWobTasks()
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    first = await gym.start(tasks.task("click-button", 1))
    assert first.instruction.startswith('Click on the "')
    assert first.screenshot.shape == (210, 160, 3)
    assert first.screenshot.dtype == np.uint8
    assert not first.done
    # The yellow box of the goal, to its very edges, and nothing beside it.
    assert (first.screenshot[:50, [0, -1]] == (255, 255, 0)).all()
    assert (first.screenshot[51:, -1] == 255).all()
    other = await gym.start(tasks.task("click-button", 2))
    assert (other.screenshot != first.screenshot).any()
    # A goal that the page keeps as an object with fields.
    mail = await gym.start(tasks.task("email-inbox-nl-turk", 1))
    assert mail.instruction and mail.instruction[0].isupper()


@pytest.mark.asyncio
async def test_screenshots_agree_with_the_browsers_own():
  """Reference: `Page.captureScreenshot`, which waits for the page to settle."""
  tasks = miniwob.MiniWobTasks()
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    for family in ("click-dialog", "enter-text", "click-menu", "choose-list"):
      observation = await gym.start(tasks.task(family, 5))
      for turn in range(3):
        captured = await gym.page.chromium.call(
          "Page.captureScreenshot", {"format": "png"}, gym.page.session
        )
        picture = Image.open(io.BytesIO(base64.b64decode(captured["data"])))
        expected = np.asarray(picture.convert("RGB"))[:210, :160]
        assert (observation.screenshot == expected).all(), (family, turn)
        if not observation.done:
          click = Action(Kind.CLICK, x=60, y=70 + 20 * turn)
          observation = await gym.act(click)


@pytest.mark.asyncio
async def test_nothing_of_an_episode_is_pasted_or_undone_in_the_next():
  tasks = miniwob.MiniWobTasks()

  def press(*names):
    return [Action(Kind.KEY, keys=("ctrl", name)) for name in names]

  async def play(gym, seed, actions):
    await gym.start(tasks.task("enter-text", seed))
    await gym.page.evaluate("document.querySelector('#tt').focus()")
    values = []
    for action in actions:
      await gym.act(action)
      values.append(
        await gym.page.evaluate("document.querySelector('#tt').value")
      )
    return values

  secret = [Action(Kind.TYPE, text="secret"), *press("a", "c", "x")]
  probe = [*press("v"), Action(Kind.TYPE, text="ab"), *press(*"zzyy")]
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    expected = await play(gym, 1, probe)
    await play(gym, 2, secret)
    assert await play(gym, 1, probe) == expected
    assert expected == ["", "ab", "", "", "ab", "ab"]


# Pages with timers, animations, dates, a blinking caret and scrolling.
_SCRIPTS = {
  "chase-circle": [WAIT, Action(Kind.CLICK, x=80, y=120), WAIT],
  "book-flight": [Action(Kind.CLICK, x=60, y=169), WAIT],
  "enter-text": [
    Action(Kind.KEY, keys=("tab",)),
    Action(Kind.TYPE, text="Ab"),
    WAIT,
  ],
  "click-collapsible-2": [Action(Kind.CLICK, x=60, y=64)],
  "scroll-text-2": [Action(Kind.SCROLL, x=70, y=100, dy=80)],
  "moving-items": [WAIT, Action(Kind.CLICK, x=40, y=120)],
}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_equal_actions_give_equal_pixels_whenever_they_come():
  tasks = miniwob.MiniWobTasks()

  async def play(gym, family, pause_s):
    observation = await gym.start(tasks.task(family, 11))
    pictures = [observation.screenshot]
    for action in _SCRIPTS[family]:
      await asyncio.sleep(pause_s)  # A policy that thinks.
      observation = await gym.act(action)
      pictures.append(observation.screenshot)
    return observation.done, pictures

  async with gyms_on(miniwob.Browser(), len(_SCRIPTS)) as quick:
    async with gyms_on(miniwob.Browser(), len(_SCRIPTS)) as slow:
      for gym in slow:  # Not fresh: it has shown something else.
        await gym.start(tasks.task("click-button", 3))
        await gym.act(Action(Kind.CLICK, x=80, y=100))
      runs = await asyncio.gather(
        *(play(g, f, 0.0) for g, f in zip(quick, _SCRIPTS)),
        *(play(g, f, 0.7) for g, f in zip(slow, _SCRIPTS)),
      )
  for family, one, two in zip(_SCRIPTS, runs, runs[len(_SCRIPTS) :]):
    assert one[0] == two[0], family
    for turn, (a, b) in enumerate(zip(one[1], two[1], strict=True)):
      assert (a == b).all(), (family, turn)
    assert (one[1][0] != one[1][-1]).any(), family  # The actions did something.


@pytest.mark.asyncio
async def test_doing_nothing_scores_nothing_and_the_limit_ends_it():
  task = miniwob.MiniWobTasks().task("click-test", 3)
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    await gym.start(task)
    for _ in range(30):  # Three times the page's own limit.
      observation = await gym.act(WAIT)
    assert not observation.done
    evaluation = await gym.evaluate()
    assert (evaluation.score, evaluation.success) == (0.0, False)
    assert evaluation.details["decided"] is False

    limited = miniwob.MiniWobGym(
      browser=gym._browser, time_limit=True, reward="timed"
    )
    await limited.start(task)
    turns = 0
    while not (await limited.act(WAIT)).done:  # 1 s, and 0.5 s for each turn.
      turns += 1
      assert turns < 8
    evaluation = await limited.evaluate()
    assert evaluation.score == -1.0 and not evaluation.success
    assert evaluation.details["reason"] == "timed out"
    assert turns + 1 == math.ceil(10 / 1.5)

    await limited.start(task)
    await limited.act(WAIT)
    await limited.act(await miniwob.oracle_action(limited))
    evaluation = await limited.evaluate()
    # 1.5 s of the limit's 10 s had passed at the click, and 16 ms at the start.
    assert evaluation.score == pytest.approx(1 - 1.516 / 10, abs=1e-6)
    assert evaluation.details["raw_reward"] == 1.0
    await limited.close()


@pytest.mark.asyncio
async def test_wrong_actions_are_answered_not_raised():
  tasks = miniwob.MiniWobTasks()
  async with gyms_on(miniwob.Browser(), 1) as (gym,):
    with pytest.raises(RuntimeError, match="call start"):
      await gym.act(WAIT)
    with pytest.raises(RuntimeError, match="call start"):
      await gym.evaluate()
    with pytest.raises(ValueError, match="did you mean 'click-test'"):
      await gym.start(
        tasks.task("click-test", 0).__class__("x", "click-tesd", seed=0)
      )
    first = await gym.start(tasks.task("enter-text", 4))
    for action, word in (
      (Action(Kind.KEY, keys=("hyper",)), "no key 'hyper'"),
      (Action(Kind.OPEN_APP, text="Mail"), "no open_app 'Mail'"),
      (Action(Kind.SYSTEM_BUTTON, text="home"), "no system_button 'home'"),
      (Action(Kind.CLICK, x=float("nan"), y=1), "is nan"),
    ):
      observation = await gym.act(action)
      assert word in observation.info["ignored"]
      assert (observation.screenshot == first.screenshot).all()
    observation = await gym.act(Action(Kind.CLICK, x=1000, y=-5))
    assert observation.info["clamped"] and not observation.done
    observation = await gym.act(Action(Kind.TERMINATE, success=True))
    assert observation.done
    assert not (await gym.evaluate()).success  # Its own claim counts nothing.
    observation = await gym.act(WAIT)
    assert observation.info["ignored"] == "the episode is over"


@pytest.mark.asyncio
async def test_mouse_and_keyboard_do_what_people_do_with_them():
  tasks = miniwob.MiniWobTasks()
  submit = "#subbtn"
  async with gyms_on(miniwob.Browser(), 1) as (gym,):

    async def score_after_submit():
      await gym.act(Action(Kind.CLICK, **await centre(gym, submit)))
      return (await gym.evaluate()).score

    # Keys and selections.
    await gym.start(tasks.task("copy-paste", 3))
    await gym.act(Action(Kind.CLICK, **await centre(gym, "textarea")))
    await gym.act(Action(Kind.KEY, keys=("ctrl", "a")))
    await gym.act(Action(Kind.KEY, keys=("ctrl", "c")))
    await gym.act(Action(Kind.CLICK, **await centre(gym, "input")))
    await gym.act(Action(Kind.KEY, keys=("ctrl", "v")))
    assert await score_after_submit() == 1.0

    # A drop-down list opens inside the screenshot and is chosen from there.
    before = (await gym.start(tasks.task("choose-list", 3))).screenshot
    opened = await gym.act(Action(Kind.CLICK, **await centre(gym, "select")))
    assert (opened.screenshot != before).any(-1).sum() > 1000
    spot = await centre(gym, "option:nth-of-type(3)")
    target = await gym.page.evaluate(
      "document.querySelector('option:nth-of-type(3)').value"
    )
    await gym.act(Action(Kind.CLICK, **spot))
    value = await gym.page.evaluate("document.querySelector('select').value")
    assert value == target

    # Dragging marks text.
    await gym.start(tasks.task("highlight-text", 3))
    x0, y0, x1, y1 = await gym.page.evaluate(
      "(r => [r.left, r.top, r.right, r.bottom])"
      "(document.querySelector('#randomText').getBoundingClientRect())"
    )
    await gym.act(Action(Kind.DRAG, x=x0, y=y0 + 3, x2=x1 - 1, y2=y1 - 2))
    assert await score_after_submit() == 1.0

    # The wheel scrolls the element under it, and the page gets the event.
    await gym.start(tasks.task("scroll-text-2", 3))
    _, target = await gym.page.evaluate(
      "[core.getUtterance(), core.getUtterance().includes('bottom')]"
    )
    spot = await centre(gym, "textarea")
    for _ in range(4):
      await gym.act(Action(Kind.SCROLL, **spot, dy=500 if target else -500))
    assert await score_after_submit() == 1.0

    # Held modifiers and other buttons open no windows.
    await gym.start(tasks.task("click-link", 3))
    link = await centre(gym, ".alink")
    await gym.act(Action(Kind.CLICK, **link, button="middle"))
    await gym.page.evaluate("window.open('about:blank') && 1")
    browser = gym._browser
    for _ in range(100):
      targets = await gym.page.chromium.call("Target.getTargets")
      own = [
        t
        for t in targets["targetInfos"]
        if t.get("browserContextId") == gym.page.context
      ]
      if len(own) == 1:
        break
      await asyncio.sleep(0.02)
    assert [t["targetId"] for t in own] == [gym.page.target]
    assert not (await gym.act(WAIT)).done and browser.lent == 1


@pytest.mark.asyncio
async def test_clipboards_are_not_shared():
  tasks = miniwob.MiniWobTasks()
  async with gyms_on(miniwob.Browser(), 2) as (one, two):
    for gym in (one, two):
      await gym.start(tasks.task("enter-text", 1))
      await gym.act(Action(Kind.CLICK, **await centre(gym, "#tt")))
    await one.act(Action(Kind.TYPE, text="secret"))
    await one.act(Action(Kind.KEY, keys=("ctrl", "a")))
    await one.act(Action(Kind.KEY, keys=("ctrl", "x")))
    await two.act(Action(Kind.KEY, keys=("ctrl", "v")))
    await one.act(Action(Kind.KEY, keys=("ctrl", "v")))
    field = "document.querySelector('#tt').value"
    assert await one.page.evaluate(field) == "secret"
    assert await two.page.evaluate(field) == ""


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_quick_restart_shows_what_a_fresh_page_shows():
  tasks = miniwob.MiniWobTasks()
  async with gyms_on(miniwob.Browser(), 1) as (quick,):
    fresh_browser = miniwob.Browser()
    async with gyms_on(fresh_browser, 1, quick_restart=False) as (fresh,):
      for family in ("click-test", "click-dialog", "login-user", "enter-text"):
        assert family in catalogue.QUICK_FAMILIES
        await quick.start(tasks.task(family, 90))
        await quick.page.evaluate("window.same_document = 1")
        for seed in range(3):
          a = await quick.start(tasks.task(family, seed))
          assert await quick.page.evaluate("window.same_document") == 1
          b = await fresh.start(tasks.task(family, seed))
          assert a.instruction == b.instruction
          assert (a.screenshot == b.screenshot).all(), (family, seed)
          await quick.act(Action(Kind.CLICK, x=70, y=90))
          await quick.act(Action(Kind.TYPE, text="ab"))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_larger_view_shows_the_same_area_and_what_is_around_it():
  tasks = miniwob.MiniWobTasks()
  browser = miniwob.Browser()
  async with gyms_on(browser, 1) as (small,):
    large = miniwob.MiniWobGym(browser=browser, width=640, height=480)
    twice = miniwob.MiniWobGym(browser=browser, width=640, height=480, scale=2)
    for family in ("click-button", "click-dialog", "use-slider"):
      task = tasks.task(family, 5)
      area = (await small.start(task)).screenshot
      shown = (await large.start(task)).screenshot
      zoomed = (await twice.start(task)).screenshot
      assert shown.shape == zoomed.shape == (480, 640, 3)
      assert (shown[:210, :160] == area).all(), family
      # What lies around it has the page's own grey.
      assert (shown[:, 161:] == 85).all() and (shown[211:] == 85).all()
      # The yellow box of the goal, 160 x 50, is twice as large.
      assert (zoomed[2:100, [1, 318]] == (255, 255, 0)).all()
      assert (zoomed[:, 321:] == 85).all()
    for gym in (large, twice):
      assert await small.start(tasks.task("click-button", 6))
      await gym.start(tasks.task("click-button", 6))
      action = await miniwob.oracle_action(gym)
      name = await miniwob.describe(gym, action.x, action.y)
      assert name.endswith("button")
      captured = await gym.page.chromium.call(
        "Page.captureScreenshot", {"format": "png"}, gym.page.session
      )
      picture = Image.open(io.BytesIO(base64.b64decode(captured["data"])))
      own = np.asarray(picture.convert("RGB"))[:480, :640]
      observation = await gym.act(Action(Kind.MOVE, x=600, y=400))
      assert (observation.screenshot == own).all()
      assert (await gym.act(action)).done
      assert (await gym.evaluate()).success
      # Outside the small one's screenshot, inside these.
      await gym.start(tasks.task("click-button", 6))
      aside = Action(Kind.CLICK, x=600, y=400)
      assert not (await gym.act(aside)).info.get("clamped")
      await gym.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("scale", [0.5, 1.5, 3])
async def test_input_lands_where_it_was_meant_at_any_scale(scale):
  """Also just after a screenshot by the other way, which once moved it."""
  note = (
    "window.seen = []; addEventListener('mousedown',"
    " e => seen.push(e.clientX, e.clientY), true)"
  )
  task = miniwob.MiniWobTasks().task("scroll-text-2", 3)
  scrolled = "document.querySelector('#text-area').scrollTop"
  browser = miniwob.Browser()
  gym = miniwob.MiniWobGym(
    browser=browser,
    width=round(640 * scale),
    height=round(480 * scale),
    scale=scale,
  )
  try:
    await gym.start(task)
    await gym.page.evaluate(note)
    for x, y in ((300, 3), (620, 470), (303, 202)):
      await gym.page.post("Page.captureScreenshot", {"format": "png"})
      await gym.act(Action(Kind.CLICK, x=x * scale, y=y * scale))
      assert await gym.page.evaluate("seen.splice(0)") == [x, y]
    top = await gym.page.evaluate(scrolled)
    for dy in (-30, 20):
      await gym.act(
        Action(Kind.SCROLL, x=60 * scale, y=100 * scale, dx=0, dy=dy * scale)
      )
      top += dy
      assert await gym.page.evaluate(scrolled) == top
  finally:
    await gym.close()
    await browser.close()


@pytest.mark.asyncio
async def test_the_final_screenshot_may_be_spared():
  task = miniwob.MiniWobTasks().task("click-test", 0)
  async with gyms_on(miniwob.Browser(), 1, final_screenshot=False) as (gym,):
    first = await gym.start(task)
    moved = await gym.act(Action(Kind.MOVE, x=1, y=1))
    last = await gym.act(await miniwob.oracle_action(gym))
    assert last.done and (await gym.evaluate()).score == 1.0
    assert last.screenshot is moved.screenshot is not first.screenshot
