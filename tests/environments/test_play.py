"""Playing: a page, an oracle, a script; and what is recorded."""

import asyncio
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import gym_servers
import httpx
import numpy as np
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import recordings
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.play import __main__ as command
from tunix.rl.multi_turn.environments.play import page as page_lib
from tunix.rl.multi_turn.environments.play import session as session_lib
from tunix.rl.multi_turn.net import http_server

Action = gui_action.GuiAction


def task(index=0, family="enter-text"):
  return desktop.DesktopTasks().train_task(family, index, 0)


def session(out=None, **options):
  gym = desktop.DesktopGym()
  return session_lib.Session("desktop", gym, out=out, **options)


def play(capsys, *arguments):
  status = command.main([str(a) for a in arguments])
  printed = capsys.readouterr()
  return status, printed.out, printed.err


# --- recordings ---------------------------------------------------------------


def test_an_oracle_records_what_it_plays(tmp_path, capsys):
  out = tmp_path / "deep" / "demos.jsonl"
  status, output, _ = play(
      capsys, "desktop", "enter-text", "--by", "oracle", "--episodes", 3,
      "--out", out,
  )  # fmt: skip
  assert status == 0 and output.count("solved") == 3
  episodes = recordings.read(out)
  ids = [r.task.task_id for r in episodes]
  assert ids == [task(i).task_id for i in range(3)]
  for recording in episodes:
    assert recording.success and recording.by == "oracle"
    # What is shown, done and named is what the gym shows, takes and names.
    gym = desktop.DesktopGym()
    observation = gym.start_sync(recording.task)
    for i, action in enumerate(recording.actions):
      np.testing.assert_array_equal(
        recording.observations[i].screenshot, observation.screenshot
      )
      if action.kind.value == "click":
        assert recording.targets[i] == gym.describe(action.x, action.y)
        assert recording.targets[i]
      observation = gym.act_sync(action)
    assert gym.evaluate_sync() == dataclasses.replace(
      recording.evaluation, details=dict(recording.evaluation.details)
    )


async def test_a_recording_is_shown_again(tmp_path):
  out = tmp_path / "d.jsonl"
  playing = session(out)
  await playing.start(task())
  while playing.evaluation is None:
    await playing.act(await playing.next_right())
  (recording,) = recordings.read(out)
  gym = recordings.ReplayGym([recording])
  shown = [await gym.start(recording.task)]
  while (action := gym.next_action()) is not None:
    shown.append(await gym.act(action))
  for one, other in zip(shown, recording.observations):
    np.testing.assert_array_equal(one.screenshot, other.screenshot)
  assert (await gym.act(Action("terminate"))).done
  assert (await gym.evaluate()).success
  await gym.start(recording.task)
  with pytest.raises(ValueError, match="was a click, not a wait"):
    await gym.act(Action("wait"))


def test_a_file_survives_a_crash_in_the_middle_of_a_line(tmp_path, capsys):
  out = tmp_path / "d.jsonl"
  arguments = ("desktop", "click-button", "--by", "oracle", "--out", out)
  play(capsys, *arguments)
  contents = out.read_bytes()
  out.write_bytes(contents + contents[: len(contents) // 2])
  assert len(recordings.read(out)) == 1
  play(capsys, *arguments, "--index", 1)
  assert len(recordings.read(out)) == 2


@pytest.mark.parametrize(
  "line, words",
  [
    ("{}", "line 1 is not a recording"),
    ('{"version": 2}', "line 1 is not a recording"),
    ('{"version": 1}', "line 1: KeyError: 'gym'"),
  ],
)
def test_a_line_that_is_no_recording_is_refused(tmp_path, line, words):
  (tmp_path / "d.jsonl").write_text(line + "\n")
  with pytest.raises(ValueError, match=words):
    recordings.read(tmp_path / "d.jsonl")


# --- scripts ------------------------------------------------------------------


@pytest.mark.parametrize("pixels", [None, np.zeros((2, 2, 3), np.uint8)])
def test_trees_are_not_recorded(pixels):
  tree = base.Observation(pixels, axtree="RootWebArea")
  with pytest.raises(ValueError, match="record mine with observation=screen"):
    recordings.Recording(
      "mine", task(), (tree,), (), (), base.Evaluation(0.0, False)
    )


def test_a_script_plays_a_task(tmp_path, capsys):
  gym = desktop.DesktopGym()
  gym.start_sync(task())
  lines = []
  while (action := desktop.oracle_action(gym)) is not None:
    lines.append(json.dumps(action.to_json()))
    gym.act_sync(action)
  script = tmp_path / "s.jsonl"
  script.write_text("\n".join(lines))
  arguments = ("desktop", "enter-text", "--by", "script", "--script", script)
  assert "-> solved in 2 turns" in play(capsys, *arguments)[1]
  out = tmp_path / "d.jsonl"
  # Another instance: the same actions are wrong, and not worth recording.
  output = play(capsys, *arguments, "--index", 1, "--out", out, "--only-solved")
  assert "not solved" in output[1] and not out.exists()


def test_a_task_of_a_gym_server_is_played(tmp_path, capsys):
  with gym_servers.serving() as (url, app):
    script = tmp_path / "s.jsonl"
    script.write_text('{"kind": "wait"}\n{"kind": "answer", "text": "x"}')
    out = tmp_path / "d.jsonl"
    for name in ("enter-text", "002"):  # A family, and a number.
      status, output, _ = play(
          capsys, "genv", name, "--by", "script", "--script", script, "--out",
          out, "--settings", f"{{base_url: '{url}'}}",
      )  # fmt: skip
      assert status == 0 and "not solved" in output
    assert app.store.open == 0
  assert [len(r.actions) for r in recordings.read(out)] == [2, 2]


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["desktp", "x"], "did you mean 'desktop'"),
    (["desktop", "enter-tex"], "enter-tex"),
    (["desktop", "enter-text", "--by", "script"], "--script FILE"),
    (["gymnasium", "FrozenLake-v1", "--by", "oracle"], "has no oracle"),
    (["desktop", "enter-text", "--settings", "5"], "--settings=5"),
    (["desktop", "enter-text", "--settings", "{width: 4}"], "width=4"),
    (["desktop", "enter-text", "--settings", "{wdth: 4}"], "'wdth'"),
  ],
)
def test_what_cannot_be_played_is_refused(arguments, words, capsys):
  status, _, error = play(capsys, *arguments)
  assert status == 2 and words in error


# --- the page -----------------------------------------------------------------


@pytest.fixture(name="page")
async def _page(tmp_path):
  playing = session(tmp_path / "d.jsonl")
  page = page_lib.Page(playing, task)
  with http_server.LoopbackServer(page.asgi) as server:
    async with httpx.AsyncClient(
      base_url=server.url, headers={"x-play-key": page.key}, timeout=30
    ) as http:
      yield http, playing, tmp_path / "d.jsonl"


async def test_a_person_plays_on_the_page(page):
  http, playing, out = page
  assert '<img id="screen"' in (await http.get("/")).text
  state = (await http.post("/state")).json()
  assert state["task_id"] == task().task_id and state["evaluation"] is None
  right = await playing.next_right()
  shown = (await http.post("/act", json=right.to_json())).json()
  assert shown["screenshot"] != state["screenshot"]
  solved = (await http.post("/help")).json()
  assert solved["evaluation"] == {"score": 1.0, "success": True}
  assert solved["recorded"] == 1
  over = await http.post("/act", json={"kind": "wait"})
  assert over.status_code == 409 and "start one" in over.json()["detail"]
  fresh = (await http.post("/next")).json()
  assert fresh["number"] == 1 and fresh["task_id"] == task(1).task_id
  ended = (await http.post("/act", json={"kind": "terminate"})).json()
  assert ended["evaluation"]["success"] is False
  assert [r.success for r in recordings.read(out)] == [True, False]


@pytest.mark.slow
@pytest.mark.browser
async def test_a_person_plays_in_a_browser(page):
  """The page's own script, in Chromium, by mouse and keyboard."""
  playwright = pytest.importorskip("playwright.async_api")
  chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
  if chromium is None:
    pytest.skip("no Chromium: sudo make browser")
  http, playing, out = page
  async with playwright.async_playwright() as started:
    browser = await started.chromium.launch(
      executable_path=chromium, args=["--no-sandbox"]
    )
    tab = await browser.new_page()
    tab.set_default_timeout(30_000)
    failures = []
    tab.on("pageerror", lambda error: failures.append(str(error)))
    await tab.goto(f"{http.base_url}#{http.headers['x-play-key']}")
    entries = tab.locator("#actions li")

    async def until(count):
      await playwright.expect(entries).to_have_count(count, timeout=30_000)
      return json.loads(await entries.last.text_content())

    async def at(x, y):
      box = await tab.locator("#screen").bounding_box()
      return (
        box["x"] + (x + 0.5) / 128 * box["width"],
        box["y"] + (y + 0.5) / 96 * box["height"],
      )

    await playwright.expect(tab.locator("#side")).to_contain_text("0 recorded")
    turns = 0
    while (right := await playing.next_right()) is not None:
      if right.kind == "click":
        await tab.mouse.click(*await at(right.x, right.y))
      elif right.kind == "type":
        await tab.fill("#text", right.text)
        await tab.click("button[data-do=type]")
      else:
        await tab.fill("#keys", "+".join(right.keys))
        await tab.click("button[data-do=key]")
      turns += 1
      rows = await until(turns)
      assert rows["kind"] == right.kind
      if right.kind == "click":
        assert (rows["x"], rows["y"]) == (int(right.x), int(right.y))
    assert turns >= 2
    verdict = tab.locator("#verdict")
    await playwright.expect(verdict).to_have_text("Solved, score 1")
    await tab.click("button[data-path=next]")
    await playwright.expect(verdict).to_have_text("")
    await tab.mouse.move(*await at(10, 80))
    await tab.mouse.down()
    await tab.mouse.move(*await at(60, 80))
    await tab.mouse.up()
    dragged = await until(1)
    assert (dragged["kind"], dragged["x2"]) == ("drag", 60)
    await tab.mouse.wheel(0, 200)
    scrolled = await until(2)
    assert scrolled["kind"] == "scroll" and scrolled["dy"] > 0
    await browser.close()
  assert not failures
  assert [r.success for r in recordings.read(out)] == [True]


async def test_the_page_is_for_who_has_its_key(page):
  http, _, _ = page
  for key in ("", "wrong"):
    reply = await http.post("/state", headers={"x-play-key": key})
    assert reply.status_code == 401
  bad = await http.post("/act", json={"kind": "click"})
  assert bad.status_code == 409 or bad.status_code == 422
  wrong = await http.post("/act", json={"kind": "click", "x": "1", "y": 2})
  assert wrong.status_code == 422 and "action.x" in wrong.json()["detail"]
  assert (await http.post("/act", content=b"x" * 70_000)).status_code == 413
  assert (await http.post("/act", content=b"{")).status_code == 409


async def test_two_clicks_at_a_time_are_made_one_after_the_other(page):
  http, playing, _ = page
  await http.post("/state")
  await asyncio.gather(
    *(
      http.post("/act", json={"kind": "move", "x": i, "y": 1}) for i in range(8)
    )
  )
  assert len(playing.actions) == 8


def test_the_command_serves_the_page():
  process = subprocess.Popen(
      [sys.executable, "-m", "tunix.rl.multi_turn.environments.play",
       "desktop", "enter-text"],
      stdout=subprocess.PIPE, text=True, env={**os.environ},
  )  # fmt: skip
  try:
    match = re.search(r"(http://127\S+)/#(\S+)", process.stdout.readline())
    reply = httpx.post(
      match[1] + "/state", headers={"x-play-key": match[2]}, timeout=30
    )
    assert reply.json()["task_id"] == task().task_id
  finally:
    process.terminate()
    process.wait(20)
    process.stdout.close()
