"""Pages as accessibility trees, and actions on elements by their ids.

Real pages in a real browser: MiniWoB++'s, and a small site on the loopback.
"""

import asyncio
import http.server
import re
import threading

import browsers
from cua_gyms import browser
from cua_gyms import miniwob
from cua_gyms.miniwob import tree_oracle
import pytest
import pytest_asyncio
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import gym_env
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.tools import screenshot

pytestmark = [*browsers.needed(), pytest.mark.asyncio(loop_scope="module")]
Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
LOOK = Action(Kind.WAIT, duration=0.01)

PAGES = {
  "/form": """<title>Order</title><body style="margin: 0">
<h1>New order</h1>
<label>Name <input id=name required></label>
<textarea id=note>old text</textarea>
<select id=size><option value=s>Small</option><option value=l>Large</option>
</select>
<select id=extras multiple><option>milk</option><option>sugar</option>
<option>ice</option></select>
<label><input type=checkbox id=gift> Gift</label>
<input type=date id=day aria-label=Day>
<input id=fixed readonly aria-label=Fixed value=1>
<div id=edit contenteditable aria-label=Edit role=textbox>here</div>
<button id=send disabled>Send</button>
<p aria-hidden=true>secret</p><div hidden>hidden</div>
<script>
window.heard = [];
for (const e of document.querySelectorAll('input, select, textarea'))
  e.addEventListener('change', () => heard.push(e.id));
document.getElementById('gift').onchange = e =>
  document.getElementById('send').disabled = !e.target.checked;
</script>""",
  "/long": """<title>Long</title><body style="margin: 0">
<button>top</button><div style="height: 3000px"></div>
<button id=end onclick="document.title = 'ended'">bottom</button>
<div style="position: fixed; top: 100px; left: 0"><button>fixed</button></div>
<div style="position: fixed; top: 200px; left: 0; width: 90px; height: 40px;
  overflow: auto"><div style="height: 200px"></div><button>inner</button></div>
<a href="/form" style="position: fixed; left: 800px; top: 5px">aside</a>""",
  "/moving": """<title>Moving</title><body style="margin: 0">
<div id=area><button onclick="again()">more</button></div>
<div id=cover style="position: fixed; left: 0; top: 100px; width: 300px;
  height: 100px; z-index: 9"></div>
<button style="position: fixed; left: 10px; top: 110px">covered</button>
<div style="position: fixed; left: 0; top: 250px"><div id=a draggable=true
  role=button aria-label=thing ondragstart="event.dataTransfer.setData('t', 1)"
  style="width: 40px; height: 20px">x</div><div role=button aria-label=bin
  style="width: 40px; height: 20px" ondragover="event.preventDefault()"
  ondrop="document.title = 'dropped'">y</div></div>
<script>
let n = 0;
function again() {
  area.querySelectorAll('p').forEach(e => e.remove());
  const p = document.createElement('p');
  p.innerHTML = '<button>item ' + ++n + '</button>';
  area.append(p);
}
again();
</script>""",
  "/many": "<title>Many</title>" + "<button>b</button>" * 400,
}


class _Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    body = PAGES.get(self.path, "").encode()
    self.send_response(200 if body else 404)
    self.send_header("Content-Type", "text/html")
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *args):
    del args


@pytest.fixture(scope="module", name="site")
def _site():
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield f"http://127.0.0.1:{server.server_port}"
  server.shutdown()
  thread.join()
  server.server_close()


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="pool")
async def _pool():
  pool = browser.Browser()
  yield pool
  await pool.close()


@pytest_asyncio.fixture(loop_scope="module", name="visit")
async def _visit(pool, site):
  gyms = []

  async def visit(path, **settings):
    settings = {
      "start_urls": [site],
      "evaluator": lambda page, task, answer: False,
      "width": 640,
      "height": 480,
      "browser": pool,
      "observation": "axtree",
      **settings,
    }
    gyms.append(browser.WebGym(**settings))
    task = base.Task("t", "f", "Go.", params={"url": site + path})
    return gyms[-1], await gyms[-1].start(task)

  yield visit
  for gym in gyms:
    await gym.close()


def id_of(tree, words):
  """Id of the line that holds these words."""
  (line,) = [line for line in tree.split("\n") if words in line]
  return re.search(r"\[(\d+)\]", line)[1]


FORM = """\
RootWebArea 'Order', focused
\t[1] heading 'New order'
\t[2] LabelText '', clickable
\t\tStaticText 'Name'
\t\t[3] textbox 'Name', required
\t[4] textbox '' value='old text'
\t[5] combobox '' value='Small', hasPopup='menu', expanded=False
\t\t[6] option 'Small', selected=True
\t\t[7] option 'Large', selected=False
\t[8] listbox '', multiselectable=True, orientation='vertical'
\t\t[9] option 'milk', selected=False
\t\t[10] option 'sugar', selected=False
\t\t[11] option 'ice', selected=False
\t[12] checkbox 'Gift', checked='false'
\t[13] Date 'Day', clickable
\t[14] textbox 'Fixed' value='1'
\t[15] textbox 'Edit' value='here'
\t[16] button 'Send', disabled=True"""


async def test_a_page_is_written_in_browsergym_s_form(visit):
  _, observation = await visit("/form")
  assert observation.axtree == FORM
  assert observation.screenshot is None and observation.text == ""


async def test_both_shows_the_picture_too(visit):
  _, observation = await visit("/form", observation="both")
  assert observation.axtree == FORM
  assert observation.screenshot.shape == (480, 640, 3)


async def test_a_form_is_filled_by_ids_and_the_tree_tells_what_changed(visit):
  gym, _ = await visit("/form")

  async def fill(element, text):
    observation = await gym.act(Action(Kind.FILL, element=element, text=text))
    assert "ignored" not in observation.info, observation.info
    changed = [
      line.strip() for line in observation.axtree.split("\n") if "*" in line
    ]
    return observation, changed

  _, changed = await fill("3", "Anna")
  assert "*[3] textbox 'Name' value='Anna', focused, required" in changed
  _, changed = await fill("3", "Bo")  # Replaces.
  assert any("value='Bo'" in line for line in changed)
  await fill("4", "")
  _, changed = await fill("5", "Large")
  assert "*[7] option 'Large', selected=True" in changed
  await fill("8", "ice\nmilk")
  _, changed = await fill("12", "true")
  assert "*[16] button 'Send'" in changed
  await fill("12", "true")  # Checked already: stays.
  await fill("13", "2026-03-04")
  await fill("15", "there")
  values = await gym.page.evaluate(
    "[document.getElementById('name').value, note.value, size.value,"
    " ...[...extras.selectedOptions].map(o => o.value), gift.checked,"
    " day.value, edit.textContent]"
  )
  assert values == ["Bo", "", "l", "milk", "ice", True, "2026-03-04", "there"]
  heard = await gym.page.evaluate("heard")
  assert {"name", "size", "extras", "gift", "day"} <= set(heard)


@pytest.mark.parametrize(
  "action, words",
  [
    (Action(Kind.CLICK, element="99"), "no element '99'"),
    (Action(Kind.FILL, element="1", text="x"), "no field, list or box"),
    (Action(Kind.FILL, element="5", text="Huge"), 'no option "Huge"'),
    (Action(Kind.FILL, element="12", text="yes"), "checked or unchecked"),
    (Action(Kind.FILL, element="13", text="soon"), 'takes no "soon"'),
    (Action(Kind.FILL, element="14", text="2"), "read-only"),
    (Action(Kind.FILL, element="16", text="2"), "disabled"),
    (Action(Kind.FOCUS, element="1"), "cannot be focused"),
    (Action(Kind.CLICK, element="7"), "not shown"),
  ],
)
async def test_what_cannot_be_done_is_told_to_the_policy(visit, action, words):
  gym, _ = await visit("/form")
  observation = await gym.act(action)
  assert words in observation.info["ignored"]
  assert observation.text == f"Error: {observation.info['ignored']}"
  assert await gym.page.evaluate("heard") == []


async def test_only_the_viewport_is_shown_and_a_scroll_shows_the_rest(visit):
  gym, observation = await visit("/long")
  tree = observation.axtree
  assert tree.split("\n")[0] == "RootWebArea 'Long', focused, more below"
  assert "'top'" in tree and "'fixed'" in tree
  # Below, beside, and scrolled out of a box that clips.
  for name in ("bottom", "aside", "inner"):
    assert name not in tree
  observation = await gym.act(Action(Kind.SCROLL, x=300, y=300, dy=5000))
  tree = observation.axtree
  assert "more above" in tree and "more below" not in tree
  assert "*[3] button 'bottom'" in tree and "'top'" not in tree
  assert "[2] button 'fixed'" in tree and "(no longer shown: [1])" in tree
  await gym.act(Action(Kind.SCROLL, x=300, y=300, dy=-5000))
  # By its id it is scrolled to.
  await gym.act(Action(Kind.CLICK, element="3"))
  assert await gym.page.evaluate("document.title") == "ended"


async def test_an_id_is_never_another_element_s(visit):
  gym, observation = await visit("/moving")
  first = id_of(observation.axtree, "item 1")
  more = Action(Kind.CLICK, element=id_of(observation.axtree, "'more'"))
  observation = await gym.act(more)
  second = id_of(observation.axtree, "item 2")
  assert second != first and int(second) > int(first)
  assert f"[{first}]" in observation.axtree.split("\n")[-1]  # Gone.
  observation = await gym.act(Action(Kind.CLICK, element=first))
  assert "no longer on the page" in observation.text
  assert f"[{first}]" not in observation.axtree
  observation = await gym.act(Action(Kind.CLICK, element=second))
  assert observation.text == ""


async def test_a_covered_element_is_not_clicked_and_things_are_dragged(visit):
  gym, observation = await visit("/moving")
  covered = id_of(observation.axtree, "'covered'")
  observation = await gym.act(Action(Kind.CLICK, element=covered))
  assert "is covered" in observation.text
  thing, bin_ = (id_of(observation.axtree, w) for w in ("'thing'", "'bin'"))
  await gym.act(Action(Kind.DRAG, element=thing, element2=bin_))
  assert await gym.page.evaluate("document.title") == "dropped"


@pytest.mark.parametrize("scale", [0.5, 2.0])
async def test_positions_are_right_at_any_scale(visit, scale):
  gym, observation = await visit("/moving", scale=scale)
  more = id_of(observation.axtree, "'more'")
  observation = await gym.act(Action(Kind.CLICK, element=more))
  assert "item 2" in observation.axtree
  gym, observation = await visit("/long", scale=scale, width=640, height=480)
  assert "'inner'" not in observation.axtree
  assert ("aside" in observation.axtree) == (scale == 0.5)


async def test_a_long_page_is_cut_with_a_count(visit):
  _, observation = await visit("/many", tree_characters=500)
  lines = observation.axtree.split("\n")
  assert len(observation.axtree) < 560
  (left_out,) = map(int, re.findall(r"(\d+) more lines are left", lines[-1]))
  _, complete = await visit("/many", tree_characters=100_000)
  assert len(lines) - 1 + left_out == complete.axtree.count("\n") + 1


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"observation": "tree"}, "observation='tree' must be one of"),
    ({"tree_characters": 10}, r"tree_characters=10 must be in \[200"),
  ],
)
async def test_wrong_settings_name_the_field(settings, words):
  with pytest.raises(ValueError, match=words):
    miniwob.MiniWobGym(**settings)
  with pytest.raises(ValueError, match=words):
    browser.WebGym(
      evaluator=lambda *_: True, start_urls=["http://a.test"], **settings
    )


async def test_what_passes_on_screenshots_refuses_trees():
  spec = gyms.get("miniwob")
  spec.check_screenshots({"observation": "screenshot"})
  with pytest.raises(ValueError, match="gym.observation.*leave it out"):
    gym_env.GymEnv("miniwob", "click-test", options={"observation": "axtree"})


async def test_ids_mean_nothing_where_the_page_is_a_screenshot(visit):
  gym, observation = await visit("/form", observation="screenshot")
  assert observation.axtree == ""
  observation = await gym.act(Action(Kind.CLICK, element="1"))
  assert "the page is a screenshot" in observation.info["ignored"]


# --- MiniWoB++ ----------------------------------------------------------------


async def _play(pool, family, index):
  """Plays an instance by what a text policy reads and writes.

  Through `CUAEnv` and `ToolAgent`: the oracle reads the last user message, and
  its call is parsed from text.
  """
  task = miniwob.MiniWobTasks().eval_task(family, index)
  gym = miniwob.MiniWobGym(observation="axtree", browser=pool)
  agent = agents.ToolAgent("", "browsergym", observation="axtree")
  store = images_lib.ImageStore()
  env = cua_env.CUAEnv(
    gym, screenshot.ScreenshotTool(store), task, action_parser="browsergym"
  )
  try:
    observation, info = await env.reset()
    assert "screenshot" not in observation
    goal = info["task"]["instruction"]
    agent.update_from_env(observation, 0.0, False, info)
    for _ in range(task.max_turns):
      message = agent.chat_completions[-1]
      assert message["role"] == "user" and isinstance(message["content"], str)
      tree = message["content"][message["content"].index("RootWebArea") :]
      action = tree_oracle.solve(family, goal, tree)
      text = agent.tool_parser.format_gui_action(action, *env.size)
      assert re.match(r"(click|fill)\('\d+'", text), text
      step = await env.step(agent.update_from_model(text))
      agent.update_from_env(*step)
      if step[2]:
        return step[3]["success"]
    return False
  finally:
    await env.close()


async def _success(families, count):
  pool = miniwob.Browser(max_pages=4)
  slots = asyncio.Semaphore(4)

  async def play(family, index):
    async with slots:
      return family, await _play(pool, family, index)

  try:
    return await asyncio.gather(
      *(play(f, i) for f in families for i in range(count))
    )
  finally:
    await pool.close()


async def test_families_are_solved_from_the_tree_alone_by_ids():
  families = ("click-checkboxes", "choose-list", "login-user")
  played = await _success(families, 2)
  assert all(solved for _, solved in played), played


@pytest.mark.slow
async def test_thirty_families_are_solved_from_the_tree_alone_by_ids():
  families = tree_oracle.ORACLE.families
  assert len(families) >= 30
  played = await _success(families, 3)
  failures = [family for family, solved in played if not solved]
  assert not failures


@pytest.mark.slow
async def test_every_family_has_a_tree():
  """Each page can be read, in bounds, before and after an action."""
  pool = miniwob.Browser(max_pages=4)
  gym = miniwob.MiniWobGym(observation="axtree", browser=pool)
  tasks = miniwob.MiniWobTasks()
  try:
    for family in tasks.families():
      observation = await gym.start(tasks.train_task(family, 0))
      assert observation.axtree.startswith("RootWebArea '"), family
      assert len(observation.axtree) < 8000, family
      again = await gym.act(LOOK)
      assert again.axtree.startswith("RootWebArea '"), family
  finally:
    await gym.close()
    await pool.close()
