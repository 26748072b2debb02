"""Promises of the shared browser when things break, with real breakage."""

import asyncio
import contextlib
import http.server
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import browsers
from cua_gyms import miniwob
from cua_gyms.chromium import devtools
from cua_gyms.chromium import pool
from cua_gyms.miniwob import page as page_lib
import pytest
from tunix.rl.multi_turn.core import gui_action

pytestmark = browsers.needed()
Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
WAIT = Action(Kind.WAIT, duration=0.1)
TASK = "click-test"


def group_members(leader: int) -> list[int]:
  """Living processes of a process group."""
  pids = []
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    try:
      fields = pathlib.Path("/proc", name, "stat").read_text().rsplit(")", 1)
    except OSError:
      continue
    state, _, group = fields[1].split()[:3]
    if int(group) == leader and state != "Z":
      pids.append(int(name))
  return pids


def descriptors() -> set[tuple[str, str]]:
  """Returns (number, target) of each open descriptor of this process."""
  open_files = set()
  for number in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # The one that lists them, say.
      name = os.readlink(f"/proc/self/fd/{number}")
      open_files.add((number, name.removesuffix(" (deleted)")))
  return open_files


async def gone(leader: int, seconds: float = 20.0) -> bool:
  end = time.monotonic() + seconds
  while group_members(leader) and time.monotonic() < end:
    await asyncio.sleep(0.05)
  return not group_members(leader)


async def started(browser, count: int = 1, family: str = TASK):
  gyms = [miniwob.MiniWobGym(browser=browser) for _ in range(count)]
  task = miniwob.MiniWobTasks().task(family, 1)
  await asyncio.gather(*(gym.start(task) for gym in gyms))
  return gyms


@pytest.mark.asyncio
async def test_a_page_crash_ends_one_episode_only():
  browser = miniwob.Browser()
  one, two = await started(browser, 2)
  pid = browser.pid
  acting = asyncio.create_task(one.act(WAIT))
  one.page.chromium.send("Page.crash", session=one.page.session)
  with pytest.raises(devtools.PageCrashed, match="click-test.html"):
    await acting
    await one.act(WAIT)  # The first may have been quicker than the crash.
    await asyncio.sleep(1)
    await one.act(WAIT)
  assert not (await two.act(WAIT)).done
  with pytest.raises(RuntimeError, match="call start"):
    await one.act(WAIT)
  observation = await one.start(miniwob.MiniWobTasks().task(TASK, 2))
  assert observation.instruction == "Click the button."
  assert browser.pid == pid and browser.launches == 1 and browser.lent == 2
  await browser.close()


async def renderer_of(gym) -> int:
  """The process that draws the gym's page: the one its script keeps busy."""

  def cpu(pid: int) -> int:
    try:
      text = pathlib.Path("/proc", str(pid), "stat").read_text()
    except OSError:
      return 0
    return int(text.rsplit(")", 1)[1].split()[11])

  members = [
    pid
    for pid in group_members(gym._browser.pid)
    if b"--type=renderer"
    in pathlib.Path("/proc", str(pid), "cmdline").read_bytes()
  ]
  before = {pid: cpu(pid) for pid in members}
  await gym.page.evaluate(
    "(() => { let s = 0; for (let i = 0; i < 4e8; ++i) s += i; return s })()"
  )
  return max(members, key=lambda pid: cpu(pid) - before[pid])


@pytest.mark.asyncio
async def test_kill_9_of_a_renderer_ends_its_episode_and_no_other():
  browser = miniwob.Browser()
  gyms = await started(browser, 3)
  pid = browser.pid
  os.kill(await renderer_of(gyms[1]), signal.SIGKILL)
  with pytest.raises(devtools.PageCrashed, match="renderer crashed"):
    await gyms[1].page.evaluate("new Promise(() => {})")
  with pytest.raises(devtools.PageCrashed, match="click-test.html"):
    await gyms[1].act(WAIT)
  for gym in (gyms[0], gyms[2]):  # In the middle of their episodes.
    assert (await gym.act(await miniwob.oracle_action(gym))).done
    assert (await gym.evaluate()).success
  await gyms[1].start(miniwob.MiniWobTasks().task(TASK, 2))
  assert (await gyms[1].act(await miniwob.oracle_action(gyms[1]))).done
  assert browser.pid == pid and browser.launches == 1
  assert browser.crashes == 1 and browser.lent == 3
  await browser.close()


@pytest.mark.asyncio
async def test_a_load_that_was_aborted_is_tried_again_in_another_tab():
  browser = miniwob.Browser()
  (gym,) = await started(browser, family="click-tab")
  page, aborted = gym.page, []

  def abort(params):
    aborted.append(params["request"]["url"])
    page.send(
      "Fetch.failRequest",
      {"requestId": params["requestId"], "errorReason": "Aborted"},
    )

  page.listen("Fetch.requestPaused", abort)
  await page.post("Fetch.enable")
  await gym.start(miniwob.MiniWobTasks().task("click-tab", 2))
  assert len(aborted) == 1 and gym.page is not page
  assert (await gym.act(await miniwob.oracle_action(gym))).done
  assert browser.launches == 1 and browser.lent == 1
  await browser.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_killed_browser_fails_all_episodes_and_is_replaced():
  browser = miniwob.Browser()
  gyms = await started(browser, 3)
  pid, profile = browser.pid, gyms[0].page.chromium.profile
  waiting = [
    asyncio.create_task(g.page.evaluate("new Promise(() => {})")) for g in gyms
  ]
  await asyncio.sleep(0.1)
  os.kill(pid, signal.SIGKILL)
  for result in await asyncio.gather(*waiting, return_exceptions=True):
    assert isinstance(result, devtools.BrowserDied)
    assert "SIGKILL" in str(result)
  for gym in gyms:
    with pytest.raises(devtools.BrowserDied):
      await gym.act(WAIT)
  assert await gone(pid) and not profile.exists()
  task = miniwob.MiniWobTasks().task(TASK, 2)
  await asyncio.gather(*(gym.start(task) for gym in gyms))
  assert browser.pid not in (None, pid) and browser.launches == 2
  assert (await gyms[0].act(await miniwob.oracle_action(gyms[0]))).done
  await browser.close()


@pytest.mark.asyncio
async def test_a_browser_that_died_between_episodes_costs_none():
  browser = miniwob.Browser()
  (gym,) = await started(browser)
  pid = browser.pid
  os.killpg(pid, signal.SIGKILL)
  while group_members(pid):
    time.sleep(0.005)  # Blocks the loop: not noticed before the next start.
  observation = await gym.start(miniwob.MiniWobTasks().task(TASK, 2))
  assert not observation.done and browser.launches == 2
  await browser.close()


@pytest.mark.asyncio
async def test_nothing_is_left_after_close():
  browser = miniwob.Browser()
  before = descriptors()
  gyms = await started(browser, 2)
  pid, profile = browser.pid, gyms[0].page.chromium.profile
  assert len(group_members(pid)) > 2 and profile.exists()
  own = {
    (number, name)
    for number, name in descriptors() - before
    if name.startswith(("pipe:", f"{profile}/"))
  }
  assert len(own) == 3  # Its two pipes and the profile's lock.
  await browser.close()
  await browser.close()
  assert await gone(pid) and not profile.exists()
  assert browser.pid is None
  # How many there are says nothing: others open and close theirs meanwhile.
  assert not own & descriptors()
  for gym in gyms:
    with pytest.raises(devtools.BrowserDied, match="closed"):
      await gym.act(WAIT)
    await gym.close()
    await gym.close()
  assert browser.lent == 0


@pytest.mark.asyncio
async def test_a_browser_outlives_neither_its_use_nor_its_loop():
  browser = miniwob.Browser(idle_s=0.05)
  (gym,) = await started(browser)
  pid = browser.pid
  await gym.close()
  assert await gone(pid)

  browsers = {}

  def another_loop():
    async def use():
      gym = miniwob.MiniWobGym()
      await gym.start(miniwob.MiniWobTasks().task(TASK, 1))
      browsers["pid"] = miniwob.shared_browser().pid

    asyncio.run(use())  # Closes nothing.

  thread = threading.Thread(target=another_loop)
  thread.start()
  await asyncio.to_thread(thread.join)
  assert group_members(browsers["pid"])
  miniwob.shared_browser()  # The next user cleans up after closed loops.
  assert await gone(browsers["pid"])


_CHILD = """
import asyncio, sys
from cua_gyms.chromium import devtools
async def main():
  browser = await devtools.Chromium.launch()
  print(browser.pid, browser.profile, flush=True)
  if sys.argv[1] == "leave":
    return
  await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["leave", "killed"])
async def test_a_browser_ends_with_its_owner(end, tmp_path):
  environment = os.environ | {"TMPDIR": str(tmp_path)}
  child = subprocess.Popen(
    [sys.executable, "-c", _CHILD, end],
    stdout=subprocess.PIPE,
    text=True,
    env=environment,
  )
  pid, profile = (await asyncio.to_thread(child.stdout.readline)).split()
  if end == "killed":
    assert group_members(int(pid))
    child.kill()
  await asyncio.to_thread(child.wait, 30)
  assert await gone(int(pid))
  if end == "killed":  # Its owner was killed; the next launch removes it.
    assert pathlib.Path(profile).exists()
    sweep = (
      "from cua_gyms.chromium import devtools as d;"
      "print(d.sweep_profiles(), d.sweep_profiles())"
    )
    swept = subprocess.run(
      [sys.executable, "-c", sweep],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )
    assert swept.stdout.split() == ["1", "0"]
  assert not pathlib.Path(profile).exists()


@pytest.mark.asyncio
async def test_a_browser_that_never_starts_is_not_started_for_ever(tmp_path):
  fake = tmp_path / "chromium"
  fake.write_text("#!/bin/sh\necho 'no display today' >&2\nexit 3\n")
  fake.chmod(0o755)
  browser = miniwob.Browser(executable=str(fake), max_launches=2)
  gym = miniwob.MiniWobGym(browser=browser)
  task = miniwob.MiniWobTasks().task(TASK, 1)
  for _ in range(2):
    with pytest.raises(devtools.LaunchError, match="no display today"):
      await gym.start(task)
  with pytest.raises(devtools.LaunchError, match="started 2 times in 60 s"):
    await gym.start(task)
  assert browser.lent == 0 and not list(tmp_path.glob("tunix-*"))


@pytest.mark.asyncio
async def test_a_page_that_hangs_is_given_up():
  browser = miniwob.Browser()
  (gym,) = await started(browser)
  await gym.page.evaluate(
    "document.body.addEventListener('click', () => { for (;;); }), 1"
  )
  gym.page._deadline_s = 1.0  # Of this page, which will not answer.
  with pytest.raises(devtools.CommandTimeout, match="in 1 s"):
    await gym.act(Action(Kind.CLICK, x=80, y=20))
  observation = await gym.start(miniwob.MiniWobTasks().task(TASK, 2))
  assert not observation.done and browser.lent == 1
  await browser.close()


@pytest.mark.asyncio
async def test_a_cancelled_action_costs_the_page_not_the_gym():
  browser = miniwob.Browser(max_pages=1)
  (gym,) = await started(browser)
  acting = asyncio.create_task(gym.act(WAIT))
  await asyncio.sleep(0.001)
  acting.cancel()
  with pytest.raises(asyncio.CancelledError):
    await acting
  with pytest.raises(RuntimeError, match="call start"):
    await gym.act(WAIT)
  assert browser.lent == 0
  await gym.start(miniwob.MiniWobTasks().task(TASK, 2))
  assert (await gym.act(await miniwob.oracle_action(gym))).done
  await browser.close()


@pytest.mark.asyncio
async def test_a_worn_tab_is_replaced_between_episodes(monkeypatch):
  monkeypatch.setattr(page_lib, "STARTS_PER_TAB", 2)
  browser = miniwob.Browser(max_pages=1)
  (gym,) = await started(browser)
  tasks, targets = miniwob.MiniWobTasks(), [gym.page.target]
  for seed in range(2, 5):
    await gym.start(tasks.task(TASK, seed))
    targets.append(gym.page.target)
  assert targets[0] == targets[1] != targets[2] == targets[3]
  await gym.close()  # Worn, so it is not lent again.
  (other,) = await started(browser)
  assert other.page.target not in targets
  assert browser.lent == 1 and browser.launches == 1 and browser.crashes == 0
  await browser.close()


@pytest.mark.asyncio
async def test_pages_are_bounded_and_waited_for():
  browser = miniwob.Browser(max_pages=1)
  (one,) = await started(browser)
  two = miniwob.MiniWobGym(browser=browser, page_deadline_s=0.2)
  task = miniwob.MiniWobTasks().task(TASK, 1)
  with pytest.raises(pool.NoFreePage, match="raise max_pages"):
    await two.start(task)
  two = miniwob.MiniWobGym(browser=browser)
  waiting = asyncio.create_task(two.start(task))
  await asyncio.sleep(0.05)
  assert not waiting.done()
  target = one.page.target
  await one.close()
  await waiting
  assert two.page.target == target  # The same tab, lent again.
  await browser.close()


@pytest.mark.asyncio
async def test_a_tab_that_shows_the_family_already_is_taken_first():
  browser, tasks = miniwob.Browser(spare=0), miniwob.MiniWobTasks()
  families = ("click-test", "focus-text", "click-color")
  gyms = [miniwob.MiniWobGym(browser=browser) for _ in families]
  for gym, family in zip(gyms, families):
    await gym.start(tasks.task(family, 1))
  tab_of = {family: gym.page for gym, family in zip(gyms, families)}
  for gym in gyms:
    await gym.close()
  for family in ("focus-text", "click-test", "click-color", "focus-text"):
    await gyms[0].start(tasks.task(family, 2))
    assert gyms[0].page is tab_of[family]
    await gyms[0].close()
  # For another family the one that has waited longest.
  await gyms[0].start(tasks.task("click-dialog", 2))
  assert gyms[0].page is tab_of["click-test"]
  await gyms[0].close()
  await browser.close()


@pytest.mark.asyncio
async def test_spare_tabs_keep_other_families_for_each_that_was_lent_at_once():
  browser, tasks = miniwob.Browser(spare=2), miniwob.MiniWobTasks()
  gym = miniwob.MiniWobGym(browser=browser)

  async def tab_of(family):
    await gym.start(tasks.task(family, 1))
    page = gym.page
    await gym.close()
    return page

  families = ("click-test", "focus-text", "click-color")
  tabs = [await tab_of(family) for family in families]
  assert len(set(tabs)) == 3  # One in use at once, and two besides.
  assert [await tab_of(family) for family in families] == tabs
  # No more than these: the one that has waited longest.
  assert await tab_of("click-dialog") is tabs[0]
  assert await tab_of("click-test") is tabs[1]
  await browser.close()
  with pytest.raises(ValueError, match="spare must be >= 0, got -1"):
    miniwob.Browser(spare=-1)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_gym_has_the_shared_browser_allow_as_many_as_are_used_at_once():
  task = miniwob.MiniWobTasks().task(TASK, 1)
  more = [miniwob.MiniWobGym(max_pages=34) for _ in range(34)]
  before = miniwob.shared_browser().max_pages
  await asyncio.gather(*(gym.start(task) for gym in more))  # None waits.
  shared = miniwob.shared_browser()
  assert before == 32 and shared.max_pages == shared.lent == 34
  assert miniwob.shared_browser(8).max_pages == 34
  await shared.close()
  for bad in (0, True, 1.5, "many"):
    with pytest.raises(ValueError, match="max_pages=.* whole number >= 1"):
      miniwob.MiniWobGym(max_pages=bad)


@pytest.mark.asyncio
async def test_pages_have_no_network_and_do_not_leave():
  requests = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      requests.append(self.path)
      self.send_response(200)
      self.send_header("Access-Control-Allow-Origin", "*")
      self.end_headers()

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  port = server.server_port
  browser = miniwob.Browser()
  (gym,) = await started(browser)
  try:
    for address in (
      f"http://127.0.0.1:{port}/fetch",
      f"http://localhost:{port}/fetch",
      "http://example.com/",
      "file:///etc/passwd",
    ):
      outcome = await gym.page.evaluate(
        f"fetch({address!r}).then(r => r.text()).catch(e => 'blocked')"
      )
      assert outcome == "blocked", address
    for script in (
      f"new Promise(r => {{ const i = new Image(); i.onerror = () => r(1);"
      f" i.onload = () => r(2); i.src = 'http://127.0.0.1:{port}/img' }})",
      "new Promise(r => { const w ="
      f" new WebSocket('ws://127.0.0.1:{port}/');"
      " w.onerror = () => r(1); w.onopen = () => r(2) })",
    ):
      assert await gym.page.evaluate(script) == 1
    await gym.page.evaluate(f"location.href = 'http://127.0.0.1:{port}/', 1")
    await gym.page.evaluate("location.reload(), 1")
    observation = await gym.act(WAIT)
    assert not observation.done
    address = await gym.page.evaluate("location.href")
    assert address.endswith("click-test.html")
    assert (await gym.act(await miniwob.oracle_action(gym))).done
    with pytest.raises(devtools.CommandFailed, match="ERR_"):
      await gym.page.start(f"http://127.0.0.1:{port}/top", 1)
  finally:
    server.shutdown()
    server.server_close()
    await browser.close()
  assert requests == []


@pytest.mark.asyncio
async def test_a_half_set_up_browser_is_never_used(monkeypatch):
  real, commands = devtools.Chromium.call, []

  async def hang_once(self, method, *args, **kwargs):
    commands.append((self, method))
    if len(commands) == 1:
      await asyncio.sleep(3600)
    return await real(self, method, *args, **kwargs)

  monkeypatch.setattr(devtools.Chromium, "call", hang_once)
  browser = miniwob.Browser()
  acquiring = asyncio.create_task(browser.acquire())
  while not commands:
    await asyncio.sleep(0.01)
  half = commands[0][0]
  pid = half.pid
  acquiring.cancel()
  with pytest.raises(asyncio.CancelledError):
    await acquiring
  assert browser.pid is None and await gone(pid)
  page = await browser.acquire()
  assert page.chromium is not half and browser.launches == 2
  denied = [c for c, method in commands if method.endswith("DownloadBehavior")]
  assert denied == [page.chromium]
  browser.release(page)
  await browser.close()


@pytest.mark.asyncio
async def test_launching_does_not_fork_python():
  forked = []
  os.register_at_fork(before=lambda: forked.append(1))
  chromium = await devtools.Chromium.launch()
  assert (await chromium.call("Browser.getVersion"))["product"]
  read, write = os.pipe()
  os.set_inheritable(write, True)  # As a careless library would leave it.
  other = await devtools.Chromium.launch()
  os.close(write)
  os.set_blocking(read, False)
  assert os.read(read, 1) == b""  # End of file: the browser did not keep it.
  os.close(read)
  await chromium.close()
  await other.close()
  assert not forked


@pytest.mark.asyncio
async def test_commands_fail_by_type():
  chromium = await devtools.Chromium.launch()
  with pytest.raises(devtools.CommandFailed, match="No.Such"):
    await chromium.call("No.Such")
  with pytest.raises(devtools.PageCrashed, match="Session"):
    await chromium.call("Page.enable", session="0" * 32)
  big = "x" * 3_000_000  # Far more than a pipe holds, both ways.
  target = await chromium.call("Target.createTarget", {"url": "about:blank"})
  session = (
    await chromium.call(
      "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
    )
  )["sessionId"]
  result = await chromium.call(
    "Runtime.evaluate",
    {"expression": f"'{big}'", "returnByValue": True},
    session,
  )
  assert result["result"]["value"] == big
  with pytest.raises(devtools.CommandTimeout, match="in 0.2 s"):
    await chromium.call(
      "Runtime.evaluate",
      {"expression": "new Promise(() => 0)", "awaitPromise": True},
      session,
      deadline_s=0.2,
    )
  await chromium.close()
  with pytest.raises(devtools.BrowserDied):
    await chromium.call("Browser.getVersion")
