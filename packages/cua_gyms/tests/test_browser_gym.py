"""The `browser` gym: sites on the loopback interface in a real browser."""

import asyncio
import os
import signal
import socket

import browsers
from cua_gyms import browser
from cua_gyms.chromium import devtools
import documented_code
import numpy as np
import pytest
import pytest_asyncio
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
import web_sites

pytestmark = [
  *browsers.needed(miniwob=False),
  pytest.mark.asyncio(loop_scope="module"),
]
Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
WAIT = Action(Kind.WAIT, duration=0.05)
# Places on the index page of the site.
FIELD, GREET, AWAY, SECOND, FILE, ASK, LOAD, POPUP, CHOOSER, TEXT = (
  {"x": 60, "y": 22 + 40 * i} for i in range(10)
)


def click(place, **more):
  return Action(Kind.CLICK, **place, **more)


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="pool")
async def _pool():
  pool = browser.Browser()
  yield pool
  await pool.close()


@pytest.fixture(scope="module", name="ears")
def _ears():
  ears = web_sites.Ears()
  yield ears
  ears.close()


@pytest.fixture(scope="module", name="site")
def _site(ears):
  site = web_sites.Site(ears.port)
  yield site
  site.close()


@pytest_asyncio.fixture(loop_scope="module", name="make")
async def _make(pool, site):
  gyms = []

  def make(**settings):
    settings = {
      "start_urls": [site.url],
      "evaluator": web_sites.greeted,
      "width": 400,
      "height": 420,
      "browser": pool,
      **settings,
    }
    gyms.append(browser.WebGym(**settings))
    return gyms[-1]

  yield make
  for gym in gyms:
    await gym.close()
  assert pool.lent == 0


def task(site, path="/", seed=7):
  return base.Task(
    f"t{path}", "greet", "Greet.", seed, params={"url": site.url + path}
  )


async def test_an_episode_from_the_start_page_to_the_verdict(make, site):
  gym = make()
  url = f"{site.url}/?seed=7"
  request = base.Task("t", "greet", seed=7, params={"url": url})
  observation = await gym.start(request)
  assert observation.instruction == "Greet seed 7."
  assert observation.screenshot.shape == (420, 400, 3)
  assert observation.screenshot.dtype == np.uint8 and not observation.done
  assert not (await gym.evaluate()).success
  await gym.act(click(FIELD))
  typed = await gym.act(Action(Kind.TYPE, text="7"))
  assert (typed.screenshot != observation.screenshot).any()
  observation = await gym.act(click(GREET))
  assert observation.info["url"].endswith("/greeted?name=7")
  verdict = await gym.evaluate()
  assert verdict.success and verdict.score == 1.0
  assert verdict.details["url"].endswith("name=7")
  observation = await gym.act(Action(Kind.SYSTEM_BUTTON, text="back"))
  assert observation.info["url"].endswith("/?seed=7")
  observation = await gym.act(Action(Kind.SYSTEM_BUTTON, text="back"))
  assert "no page before" in observation.info["ignored"]
  observation = await gym.act(Action(Kind.ANSWER, text="seven"))
  assert observation.done and gym.answer == "seven"
  assert "over" in (await gym.act(WAIT)).info["ignored"]


async def test_nothing_gets_past_the_hosts_of_the_task(make, site, ears):
  gym = make()
  observation = await gym.start(task(site, "/leaky"))
  outcomes = dict(await gym.page.evaluate("window.outcomes"))
  assert outcomes.pop("beacon") == "sent"  # Into nothing.
  assert outcomes.pop("rtc") == "quiet"
  assert outcomes == {
      name: "blocked"
      for name in (
          "fetch", "redirected", "name", "file", "socket", "events", "worker",
          "service", "transport",
      )
  }  # fmt: skip
  observation = await gym.act(WAIT)
  place = f"127.0.0.1:{ears.port}"
  assert observation.info["blocked"][place] > 3
  assert f"localhost:{ears.port}" in observation.info["blocked"]
  assert observation.info["url"] == f"{site.url}/leaky"
  frames = await gym.page.evaluate(
    "[...document.querySelectorAll('iframe')].map(f => {"
    " try { return f.contentDocument.body.innerText } catch (e) { return ''"
    " } }).join('')"
  )
  assert "root:" not in frames
  assert ears.heard() == []
  # The same page may do this where its host is one of the task's.
  assert (await _fetched(make(hosts=[place]), site, ears)) == "tcp"


async def _fetched(gym, site, ears):
  await gym.start(task(site, "/second"))
  await gym.page.evaluate(f"fetch('http://127.0.0.1:{ears.port}/') && 1")
  for _ in range(200):
    if ears.heard():
      break
    await asyncio.sleep(0.02)
  heard = ears.heard()
  ears._tcp.accept()[0].close()  # pylint: disable=protected-access
  return heard[0]


async def test_links_elsewhere_windows_downloads_and_choosers(make, site, ears):
  gym = make()
  await gym.start(task(site))
  for place, note in (
    (AWAY, f"blocked: http://127.0.0.1:{ears.port}/away"),
    (POPUP, "closed: a window with http://127.0.0.1"),
    (FILE, "refused: download of 'file.zip'"),
    (CHOOSER, "closed: a file chooser"),
  ):
    observation = await gym.act(click(place))
    assert note in observation.text, place
    assert observation.info["url"] == f"{site.url}/"
    assert "busy" not in observation.info
  observation = await gym.act(click(SECOND))  # Its window is this tab.
  if not observation.info["url"].endswith("/second"):
    observation = await gym.act(WAIT)
  assert observation.info["url"] == f"{site.url}/second"
  assert await gym.page.evaluate("document.title") == "Second"
  targets = await gym.page.chromium.call("Target.getTargets")
  own = [
    t["targetId"]
    for t in targets["targetInfos"]
    if t.get("browserContextId") == gym.page.context and t["type"] == "page"
  ]
  assert own == [gym.page.target]
  assert ears.heard() == []


async def test_no_address_but_a_sites_is_opened(make, site, ears):
  """Refuses every scheme and every spelling of another host."""
  gym = make()
  await gym.start(task(site, "/second"))
  there = [
      "chrome://version", "chrome://settings", "devtools://devtools/x.html",
      "chrome-extension://x/y", "file:///etc/passwd", "data:text/html,owned",
      f"view-source:{site.url}/", "ftp://127.0.0.1/", "mailto:a@b",
      *(f"http://{host}:{ears.port}/" for host in (
          "2130706433", "0x7f.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]",
          "localhost.", "127.0.0.1.nip.io",
      )),
  ]  # fmt: skip
  for url in there:
    await gym.page.evaluate(
      f"try {{ window.open({url!r}); }} catch (e) {{}}"
      f"try {{ location.href = {url!r}; }} catch (e) {{}} 1"
    )
    observation = await gym.act(WAIT)
    assert observation.info["url"] == f"{site.url}/second", url
  assert ears.heard() == []


async def test_a_site_that_redirects_away_at_the_start(make, site, ears):
  with pytest.raises(browser.PageUnreachable, match="blocked: .*redirected"):
    await make().start(task(site, "/redirect"))
  with pytest.raises(browser.PageUnreachable, match="HTTP status 404"):
    await make().start(task(site, "/nowhere"))
  with socket.create_server(("127.0.0.1", 0)) as free:
    dead = f"http://127.0.0.1:{free.getsockname()[1]}/"
  with pytest.raises(browser.PageUnreachable, match="SOCKS"):
    await make(start_urls=[dead]).start(
      base.Task("t", "greet", params={"url": dead})
    )
  assert ears.heard() == []


@pytest.mark.parametrize("accept, title", [(True, "trueme"), (False, "0")])
async def test_dialogs_are_answered_and_told(make, site, accept, title):
  gym = make(accept_dialogs=accept)
  await gym.start(task(site))
  observation = await gym.act(click(ASK))
  word = "yes" if accept else "no"
  assert observation.text.split("\n") == [
    f"confirm: Sure? (answered {word})",
    f"prompt: Who? (answered {word})",
  ]
  assert await gym.page.evaluate("document.title") == title


async def test_a_dialog_swallows_nothing_of_what_is_typed(make, site):
  gym = make()
  await gym.start(task(site))
  await gym.act(click(TEXT))
  await gym.page.evaluate(
    "text.addEventListener('input', () => {"
    " if (text.value.length % 5 == 3) alert(text.value); })"
  )
  words = "the quick brown fox jumps over the lazy dog"
  for _ in range(5):
    await gym.act(Action(Kind.KEY, keys=("ctrl", "a")))
    observation = await gym.act(Action(Kind.TYPE, text=words))
    assert "alert: the" in observation.text
    assert await gym.page.evaluate("text.value") == words


async def test_what_an_action_loads_is_waited_for(make, site):
  gym = make(settle_s=20)
  await gym.start(task(site))
  before = (await gym.act(WAIT)).screenshot
  observation = await gym.act(click(LOAD))  # The site takes 0.4 s.
  assert await gym.page.evaluate("document.title") == "loaded"
  area = np.s_[262:274, 10:210]
  assert (observation.screenshot[area] != before[area]).any()
  hasty = make(settle_s=0.05)
  await hasty.start(task(site))
  assert (await hasty.act(click(LOAD))).info["busy"]


HOSTILE = (
    "'); fetch('http://evil.test'); ('", "</textarea><script>document.title="
    "'owned'</script>", "\\u0000\\", "\x00\x07\x1b[2J\x7f", "${1+1}`",
    "\ud800 lone", "👩‍👩‍👧 中文 ‮rtl", "a\r\nb\tc", "{\"id\": 1}\0{\"id\": 2}",
)  # fmt: skip


async def test_hostile_typing_is_text_and_nothing_else(make, site):
  gym = make(settle_s=0.3)
  await gym.start(task(site))
  await gym.act(click(TEXT))
  for text in HOSTILE:
    await gym.act(click(TEXT))
    await gym.act(Action(Kind.KEY, keys=("ctrl", "a")))
    await gym.act(Action(Kind.TYPE, text=text))
    value = await gym.page.evaluate("text.value")
    plain = "".join(c for c in text if c.isascii() and c.isprintable())
    expected = "".join(c for c in value if c.isascii() and c.isprintable())
    if "\t" in text:  # A tab leaves the field, as on a keyboard.
      assert value == "a\nb"
    else:
      assert expected == plain, (text, value)
    assert await gym.page.evaluate("document.title") == "Index"
  observation = await gym.act(Action(Kind.TYPE, text="x" * 20_001))
  assert "at most 20000" in observation.info["ignored"]
  for keys in (
      ("ctrl", "w"), ("ctrl", "t"), ("ctrl", "n"), ("ctrl", "o"),
      ("ctrl", "p"), ("ctrl", "s"), ("ctrl", "u"), ("ctrl", "l"), ("f5",),
      ("f11",), ("f12",), ("alt", "f4"), ("ctrl", "shift", "i"),
      ("alt", "left"), ("escape",),
  ):  # fmt: skip
    observation = await gym.act(Action(Kind.KEY, keys=keys))
    assert observation.info["url"].startswith(f"{site.url}/"), keys
  assert not observation.done


async def test_episodes_share_nothing_and_play_side_by_side(make, site):
  one, two = make(), make()
  await asyncio.gather(
    one.start(task(site, "/cookie")), two.start(task(site, "/cookie"))
  )
  await one.page.evaluate("localStorage.x = document.cookie")
  titles = [await gym.page.evaluate("document.title") for gym in (one, two)]
  assert titles == ["None", "None"]
  assert await two.page.evaluate("localStorage.x || ''") == ""
  await one.start(task(site, "/cookie"))
  assert await one.page.evaluate("document.title + localStorage.x") == (
    "Noneundefined"
  )


async def test_a_page_that_hangs_costs_its_episode(make, site):
  stuck = browser.Browser(deadline_s=1.0)
  gym, other = make(browser=stuck, load_s=1.0), make()
  await other.start(task(site))
  with pytest.raises(devtools.DevToolsError):
    await gym.start(task(site, "/hang"))
  assert not (await other.act(WAIT)).done
  await stuck.close()


async def test_a_killed_browser_is_replaced(make, site):
  own = browser.Browser()
  gym = make(browser=own)
  await gym.start(task(site))
  os.kill(own.pid, signal.SIGKILL)
  with pytest.raises(devtools.BrowserDied):
    await gym.act(WAIT)
    await gym.act(WAIT)
  with pytest.raises(RuntimeError, match="call start"):
    await gym.evaluate()
  await gym.start(task(site))
  assert own.launches == 2 and not (await gym.act(WAIT)).done
  await gym.close()
  await own.close()


async def test_evaluators(make, site):
  arguments = {}

  async def deep(page, task, answer):
    arguments[task.family] = await page.evaluate("1 + 1"), answer, page.html[:6]
    return 0.25

  for evaluator, score, success in (
    (deep, 0.25, False),
    (lambda page, task, answer: page.title == "Index", 1.0, True),
    ("web_sites:greeted", 0.0, False),
    ({"greet": lambda *_: base.Evaluation(0.5, True)}, 0.5, True),
  ):
    gym = make(evaluator=evaluator)
    await gym.start(task(site))
    verdict = await gym.evaluate()
    assert (verdict.score, verdict.success) == (score, success)
    await gym.close()
  assert arguments == {"greet": (2, "", "<html>")}
  gym = make(evaluator=lambda *_: "yes")
  await gym.start(task(site))
  with pytest.raises(TypeError, match="got 'yes'"):
    await gym.evaluate()
  gym = make(evaluator={"other": web_sites.greeted})
  with pytest.raises(ValueError, match="no evaluator for family 'greet'"):
    await gym.start(task(site))
  gym = make(end_on_success=True, evaluator=lambda p, *_: p.title == "Second")
  await gym.start(task(site))
  assert not (await gym.act(WAIT)).done
  await gym.act(click(SECOND))
  assert (await gym.act(WAIT)).info.get("turn") in (2, 3)
  assert (await gym.evaluate()).success


async def test_screens_have_a_size_and_a_scale(make, site):
  gym = make(width=800, height=840, scale=2)
  plain = make()
  big = (await gym.start(task(site))).screenshot
  small = (await plain.start(task(site))).screenshot
  assert big.shape == (840, 800, 3) and small.shape == (420, 400, 3)
  # Corners of the first button, inside and outside.
  assert (big[104, 30] == small[52, 15]).all()
  await gym.act(click({"x": 120, "y": 44}))
  await gym.act(Action(Kind.TYPE, text="7"))
  assert await gym.page.evaluate("field.value") == "7"


DRAGGED = """
  document.body.innerHTML = `
    <p draggable=true style="position: absolute; left: 20px; top: 20px">A</p>
    <a href=/second style="position: absolute; left: 20px; top: 80px">B</a>
    <div id=zone style="position: absolute; left: 200px; top: 200px;
      width: 12px; height: 12px; background: blue">`;
  window.dropped = 0;
  zone.ondragover = event => event.preventDefault();
  zone.ondrop = event => { event.preventDefault(); ++dropped };
  window.seen = [];
  for (const kind of ['mousedown', 'mouseup', 'click'])
    addEventListener(kind, e => seen.push(kind, e.clientX, e.clientY), true)
"""


@pytest.mark.parametrize("scale", [1, 2])
async def test_what_is_dragged_is_dropped_where_the_drag_ends(
  make, site, scale
):
  gym = make(width=400 * scale, height=420 * scale, scale=scale)
  await gym.start(task(site))

  async def drag(x, y, x2, y2):
    places = {"x": x, "y": y, "x2": x2, "y2": y2}
    places = {name: scale * place for name, place in places.items()}
    await gym.act(Action(Kind.DRAG, **places))

  await gym.page.evaluate(DRAGGED)
  for number, y in enumerate((45, 90, 45, 90)):
    await drag(24, y, 206, 206)  # A target no larger than the last move.
    assert await gym.page.evaluate("dropped") == number + 1, y
    await drag(24, y, 300, 300)
    assert await gym.page.evaluate("dropped") == number + 1, y
    await gym.page.evaluate("seen.splice(0)")
    await gym.act(click({"x": 300 * scale, "y": 300 * scale}))
    log = await gym.page.evaluate("seen")
    assert log[::3] == ["mousedown", "mouseup", "click"]
    assert set(log[1::3] + log[2::3]) == {300}
  assert gym.page.url.endswith("/")


@pytest.mark.slow
async def test_the_judge_of_the_documentation(make, site):
  judge = documented_code.run("docs/web.md")["judge"]
  gym = make(evaluator=judge)
  await gym.start(task(site, "/?seed=7"))
  await gym.act(click(FIELD))
  await gym.act(Action(Kind.TYPE, text="7"))
  await gym.act(click(GREET))
  assert not (await gym.evaluate()).success  # No answer yet.
  await gym.act(Action(Kind.ANSWER, text="done"))
  assert (await gym.evaluate()).success
