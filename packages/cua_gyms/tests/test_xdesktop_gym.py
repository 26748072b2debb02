"""The `xdesktop` gym: real tasks on a real desktop, and what can go wrong."""

import asyncio
import os
import pathlib
import signal
import time

import numpy as np
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.net import concurrency

xdesktop = pytest.importorskip("cua_gyms.xdesktop")
from cua_gyms.sandbox import rooms  # noqa: E402
from cua_gyms.sandbox import sandbox_errors  # noqa: E402
from cua_gyms.xdesktop import families  # noqa: E402

real = [
  pytest.mark.xdesktop,
  pytest.mark.skipif(
    bool(xdesktop.missing() or rooms.no_namespaces()),
    reason=f"no {', '.join(xdesktop.missing()) or 'namespaces'} (sudo make"
    " desktop)",
  ),
]
Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
TASKS = xdesktop.XDesktopTasks()
# What a busy machine may take; none is reached on one at rest.
PATIENT = {"launch_s": 60.0, "call_s": 60.0}


def marked(function):
  for mark in real:
    function = mark(function)
  return function


async def play(gym, task):
  """The oracle plays; (verdict before, verdict after, actions)."""
  await gym.start(task)
  before = await gym.evaluate()
  actions = []
  while (action := await xdesktop.oracle_action(gym)) is not None:
    actions.append(action)
    await gym.act(action)
  return before, await gym.evaluate(), actions


@pytest.fixture(scope="module")
def room(tmp_path_factory):
  """A directory with a short name, for the sockets in it."""
  directory = pathlib.Path("/tmp") / f"xd-{os.getpid()}"
  directory.mkdir()
  yield directory
  assert list(directory.iterdir()) == []  # Whatever happened in the tests.
  directory.rmdir()


@pytest.fixture(scope="module")
def gym(room):
  desktop_gym = xdesktop.XDesktopGym(directory=str(room), **PATIENT)
  yield desktop_gym
  asyncio.run(desktop_gym.close())


# --- tasks --------------------------------------------------------------------


@marked
@pytest.mark.parametrize(
  "family",
  [
    "editor-replace-word",
    "files-rename",
    "terminal-count-lines",
    "window-minimize",
  ],
)
async def test_its_oracle_solves_what_doing_nothing_does_not(gym, family):
  task = TASKS.eval_task(family, 0)
  before, after, actions = await play(gym, task)
  assert not before.success and before.score == 0 and before.details["reason"]
  assert after.success and after.score == 1
  assert 0 < len(actions) <= task.max_turns


def test_every_family_is_a_function_of_its_seed():
  assert len(TASKS.families()) >= 15
  for name in TASKS.families():
    first, again = TASKS.task(name, 5), TASKS.task(name, 5)
    assert first == again and first.instruction and first.max_turns > 0
    families.instance.cache_clear()
    assert TASKS.task(name, 5) == first
    seeds = {TASKS.train_task(name, i).seed for i in range(50)}
    assert not seeds & {TASKS.eval_task(name, i).seed for i in range(50)}


def test_most_families_have_many_instances():
  many = [
    name
    for name in TASKS.families()
    if len({TASKS.task(name, s).instruction for s in range(40)}) > 3
  ]
  assert len(many) >= 10


def test_what_is_no_task_is_refused():
  with pytest.raises(ValueError, match="did you mean 'files-rename'"):
    TASKS.task("files-renam", 0)
  with pytest.raises(ValueError, match="seed must be"):
    TASKS.task("files-rename", -1)
  with pytest.raises(ValueError, match="'level'"):
    gyms.get("xdesktop").make_tasks((), {"level": 1})


@marked
async def test_a_damaged_neighbour_is_no_success(gym):
  task = TASKS.eval_task("terminal-count-lines", 0)
  await gym.start(task)
  for action in gym.oracle():
    await gym.act(action)
  assert (await gym.evaluate()).success
  await gym.act(Action(Kind.TYPE, text="touch extra.txt\n"))
  for _ in range(40):
    verdict = await gym.evaluate()
    if not verdict.success:
      break
    await gym.act(Action(Kind.WAIT, duration=0.1))
  assert verdict.details["reason"] == "there is extra.txt, which should not be"


# --- actions ------------------------------------------------------------------


def open_file(gym):
  (file,) = gym.desktop.room.home.glob("*.txt")
  return file


async def saved_text(gym):
  """Saves the file that the editor shows; returns its new text."""
  file = open_file(gym)
  before = file.read_text()
  await gym.act(Action(Kind.KEY, keys=("ctrl", "s")))
  for _ in range(40):
    if file.read_text() != before:
      break
    await gym.act(Action(Kind.WAIT, duration=0.1))
  return file.read_text().rstrip("\n")


@marked
async def test_text_of_any_script_reaches_a_program(gym):
  await gym.start(TASKS.task("editor-append-line", 1))
  text = 'Grüße, 你好! λ=½ ✓ "quoted" \\ ~ @ $PATH\nπ ≈ 3.14159; ÆØÅ…'
  before = open_file(gym).read_text()
  await gym.act(Action(Kind.KEY, keys=("ctrl", "end")))
  await gym.act(Action(Kind.TYPE, text=text))
  assert await saved_text(gym) == before + text


@pytest.mark.slow
@marked
async def test_one_action_is_one_whatever_the_time_between_and_within(
  gym, monkeypatch
):
  await gym.start(TASKS.task("editor-append-line", 1))
  display = gym.desktop.display
  window = display.windows()[-1]

  def click(column, count):
    x, y = window.x + 40 + 14 * column, window.y + 80
    return Action(Kind.CLICK, x=x, y=y, count=count)

  async def text_after(*actions):
    everything = Action(Kind.KEY, keys=("ctrl", "a"))
    typed = Action(Kind.TYPE, text="wordwordword")
    for action in (everything, typed, *actions):
      await gym.act(action)
    return await saved_text(gym)

  letter = Action(Kind.TYPE, text="X")
  for column in range(2):  # A double click would choose the word.
    one, two = click(column, 1), click(column, 2)
    assert len(await text_after(one, one, letter)) == 13
    assert await text_after(one, two, letter) == "X"  # A triple one the line.
  # A process that is held up while a key is down: it repeats after 0.66 s.
  sleep = time.sleep
  monkeypatch.setattr(time, "sleep", lambda s: sleep(1.0 if s > 0.01 else s))
  await gym.act(Action(Kind.KEY, keys=("ctrl", "end")))
  back = Action(Kind.KEY, keys=("backspace",))
  assert await text_after(back, back) == "wordwordwo"


@marked
async def test_keys_give_something_else_when_programs_are_at_rest(gym):
  await gym.start(TASKS.task("editor-append-line", 1))
  display, rests = gym.desktop.display, []
  del display.keyboard._spare[3:]  # pylint: disable=protected-access
  text = "αβγδεαβγδεζ"

  def rest():
    rests.append(gym.desktop.settle(0.04, 3.0))

  display.chord(("ctrl", "a"))
  await asyncio.to_thread(display.type, text, rest)
  assert len(rests) == 3
  assert await saved_text(gym) == text


@marked
async def test_what_does_nothing_says_why_and_the_edge_is_a_wall(gym):
  observation = await gym.start(TASKS.task("window-minimize", 1))
  assert observation.screenshot.shape == (768, 1024, 3)
  assert observation.screenshot.dtype == np.uint8 and not observation.done
  for action, words in (
    (Action(Kind.KEY, keys=("hyper",)), "no key 'hyper'"),
    (Action(Kind.TYPE, text="a\x07b"), "no key for '\\x07'"),
    (Action(Kind.CLICK, x=5, y=float("nan")), "y is nan"),
    (Action(Kind.SYSTEM_BUTTON, text="home"), "no button 'home'"),
    (Action(Kind.OPEN_APP, text="editr"), "did you mean 'editor'"),
  ):
    observation = await gym.act(action)
    assert words in observation.info["ignored"]
  observation = await gym.act(Action(Kind.MOVE, x=5000, y=-3))
  assert observation.info["clamped"]
  display = gym.desktop.display
  assert display.pointer() == (1023, 0)
  # The pointer is in the picture, unless it is not wanted there.
  await gym.act(Action(Kind.MOVE, x=700, y=600))
  with_pointer, without = display.screenshot(True), display.screenshot(False)
  rows, columns = np.nonzero((with_pointer != without).any(-1))
  assert rows.size and abs(rows.min() - 600) < 20
  assert abs(columns.min() - 700) < 20
  np.testing.assert_array_equal(without, display.screenshot(False))


@marked
async def test_an_application_opens_and_the_end_is_the_end(gym):
  await gym.start(TASKS.task("terminal-make-folders", 1))
  await gym.act(Action(Kind.OPEN_APP, text="Calculator"))
  for _ in range(100):
    titles = [w.window_class for w in gym.desktop.display.windows()]
    if "Galculator" in titles:
      break
    await gym.act(Action(Kind.WAIT, duration=0.1))
  assert titles == ["XTerm", "Galculator"]
  observation = await gym.act(Action(Kind.TERMINATE, success=True))
  assert observation.done and await xdesktop.oracle_action(gym) is None
  observation = await gym.act(Action(Kind.TYPE, text="mkdir late\n"))
  assert observation.done and "over" in observation.info["ignored"]
  assert not (await gym.evaluate()).success


@marked
async def test_a_reduced_screen_is_played_in_the_screenshots_pixels(room):
  gym = xdesktop.XDesktopGym(256, 192, directory=str(room), **PATIENT)
  try:
    _, after, _ = await play(gym, TASKS.task("window-close", 2))
    assert after.success
    assert gym.observation.screenshot.shape == (192, 256, 3)
    assert gym.desktop.display.width == 1024
  finally:
    await gym.close()


# --- faults -------------------------------------------------------------------


@marked
async def test_a_dead_server_loses_the_episode_and_only_that(gym):
  await gym.start(TASKS.task("window-minimize", 2))
  server = next(
    pid
    for pid in gym.desktop.room.pids()
    if b"Xvfb" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()[:9]
  )
  os.kill(server, signal.SIGKILL)
  with pytest.raises(sandbox_errors.DesktopLost):
    for _ in range(3):
      await gym.act(Action(Kind.MOVE, x=5, y=5))
  with pytest.raises(RuntimeError, match="no episode"):
    await gym.act(Action(Kind.MOVE, x=5, y=5))
  with pytest.raises(RuntimeError, match="no episode"):
    await gym.evaluate()
  assert (await gym.start(TASKS.task("window-minimize", 2))).screenshot.any()


@marked
async def test_a_server_that_hangs_is_ended_at_the_deadline(room):
  gym = xdesktop.XDesktopGym(directory=str(room), **PATIENT)
  await gym.start(TASKS.task("terminal-make-folders", 2))
  desktop = gym.desktop
  gym._call_s = 0.5
  pids = desktop.room.pids()
  for pid in pids:
    os.kill(pid, signal.SIGSTOP)
  with pytest.raises(concurrency.DeadlineExceeded, match="xdesktop"):
    await gym.act(Action(Kind.MOVE, x=5, y=5))
  for _ in range(3000):
    if not desktop.room.path.exists():
      break
    await asyncio.sleep(0.02)
  assert not desktop.room.path.exists()
  assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)
  await gym.close()


@marked
async def test_a_start_that_is_given_up_leaves_nothing(room):
  own = room / "own"
  own.mkdir()
  gym = xdesktop.XDesktopGym(directory=str(own), **PATIENT)
  given_up = 0
  for after_s in (0.02, 0.1, 0.2):
    started = asyncio.ensure_future(gym.start(TASKS.task("window-minimize", 3)))
    await asyncio.sleep(after_s)
    if started.cancel():  # A quick machine may be done with it by then.
      with pytest.raises(asyncio.CancelledError):
        await started
      given_up += 1
  assert given_up
  await gym.close()
  assert gym.desktop is None
  due = time.monotonic() + 60
  while list(own.iterdir()) and time.monotonic() < due:
    await asyncio.sleep(0.05)
  own.rmdir()


# --- settings -----------------------------------------------------------------


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"settle_s": 0}, "settle_s=0 must be > 0"),
    ({"call_s": float("inf")}, "call_s=inf"),
    ({"isolation": "vm"}, "isolation='vm' must be one of auto"),
    ({"width": 320, "height": 240, "zoom": 2}, "set zoom=3, or 0"),
    ({"width": 5000}, "at most 4096x4096"),
    ({"width": 0}, "width=0"),
    ({"heigth": 1}, "'heigth'; did you mean 'height'"),
  ],
)
def test_a_wrong_setting_is_named(settings, words):
  with pytest.raises(ValueError, match=words):
    gyms.from_config({"name": "xdesktop", **settings})


def test_a_run_brings_its_preset_and_refuses_what_has_another_key():
  chosen = ("gym=xdesktop", "gym.options.isolation=processes")
  config = config_lib.load_config(chosen)
  assert (config.gym.width, config.gym.height) == (256, 192)
  assert set(config.task_source.families) <= set(TASKS.families())
  for wrong in ("gym.options.width=300", "gym.options.difficulty=1"):
    with pytest.raises(config_lib.ConfigError, match="gym"):
      config_lib.load_config((*chosen, wrong))
