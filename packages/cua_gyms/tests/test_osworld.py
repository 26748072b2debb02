"""OSWorld's protocol: a server as its source has it, that runs commands."""

import ast
import json

from cua_gyms import machines
from cua_gyms.osworld import actions as osworld_actions
from cua_gyms.osworld import evaluation as osworld_evaluation
from cua_gyms.osworld import gym as osworld
import fake_osworld
import hypothesis
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import http_server

GuiAction = gui_action.GuiAction


def _desktop_task():
  return desktop.DesktopTasks().train_task("enter-text", 0, 0)


@pytest.fixture(scope="module", name="served")
def _served(tmp_path_factory):
  fake = fake_osworld.FakeOSWorld(
    _desktop_task(), tmp_path_factory.mktemp("home")
  )
  with http_server.LoopbackServer(fake.asgi) as server:
    fake.url = server.url
    yield fake


@pytest.fixture(name="machine")
def _machine(served):
  served.log.clear()
  served.broken.clear()
  served.hang_s = 0.0
  return served


def make(machine, **settings):
  return osworld.OSWorldGym(
    machine.url, reset=machine.revert, settle_s=0.0, **settings
  )


def task(evaluator=None, config=(), **more):
  """In the shape that OSWorld publishes."""
  data = {
    "id": "1",
    "snapshot": "os",
    "instruction": "Write a file.",
    "config": list(config),
    "related_apps": ["os"],
    "evaluator": WHICH if evaluator is None else evaluator,
  }
  return base.Task("osworld/os/1", "os", params={"osworld": {**data, **more}})


def step(kind, **parameters):
  return {"type": kind, "parameters": parameters}


def result(command, **more):
  return {"type": "vm_command_line", "command": command, **more}


def rules(**entries):
  return {"type": "rule", "rules": entries}


WHICH = {
  "func": "check_include_exclude",
  "result": result("which sh"),
  "expected": rules(include=["sh"], exclude=["not found"]),
}


async def test_an_episode_acts_with_pyautogui_and_is_judged(machine):
  gym = make(machine, width=128, height=96)
  own = desktop.DesktopGym()
  expected = own.start_sync(_desktop_task())
  shown = await gym.start(task())
  assert shown.instruction == "Write a file."
  assert (shown.screenshot == expected.screenshot).all()
  actions = 0
  while (action := desktop.oracle_action(own)) is not None:
    # The server runs whole pixels.
    expected, shown = own.act_sync(action), await gym.act(action)
    actions += 1
  assert actions >= 2 and machine.gym.evaluate_sync().success
  assert (shown.screenshot == expected.screenshot).all()
  verdict = await gym.evaluate()
  assert verdict.score == 1.0 and verdict.success
  assert verdict.details == {"metrics": {"check_include_exclude": 1.0}}
  assert machine.log[0] == ("revert", machine.url)
  runs = [body["command"] for what, body in machine.log if what == "execute"]
  codes = [command[2] for command in runs if command[0] == "python"]
  assert len(codes) == actions
  assert all(c.startswith(osworld_actions.PREFIX) for c in codes)
  await gym.close()
  await gym.close()


@pytest.mark.parametrize(
    "action, sent",
    [
        (GuiAction("click", x=5.4, y=7.6, count=2),
         [{"kind": "click", "x": 5, "y": 8, "count": 2, "button": "left"}]),
        (GuiAction("scroll", x=3, y=4, dy=80.0),
         [{"kind": "move", "x": 3, "y": 4}, {"kind": "scroll", "dy": 40.0}]),
        (GuiAction("scroll", dx=-10.0), [{"kind": "scroll", "dx": -20.0}]),
        (GuiAction("drag", x=1, y=2, x2=3, y2=4),
         [{"kind": "move", "x": 1, "y": 2},
          {"kind": "drag", "x2": 3, "y2": 4}]),
        (GuiAction("type", text="a'b\"\\\n<c"),
         [{"kind": "type", "text": "a'b\"\\\n"},
          {"kind": "key", "keys": ["shift", ","]},
          {"kind": "type", "text": "c"}]),
        (GuiAction("key", keys=("ctrl", "pageup")),
         [{"kind": "key", "keys": ["ctrl", "pageup"]}]),
        (GuiAction("system_button", text="enter"),
         [{"kind": "key", "keys": ["enter"]}]),
    ],
)  # fmt: skip
async def test_each_action_is_run_by_the_machines_python(machine, action, sent):
  gym = make(machine)
  await gym.start(task())
  assert not (await gym.act(action)).text
  assert [b for w, b in machine.log if w == "act"] == sent
  await gym.close()


@pytest.mark.parametrize(
  "action",
  [
    GuiAction("open_app", text="maps"),
    GuiAction("key", keys=("hyper",)),
    GuiAction("key", keys=("'); import os; ('",)),
    GuiAction("type", text="grüße"),
    GuiAction("click", x=1, y=1, button="back"),
    GuiAction("system_button", text="home"),
  ],
)
async def test_what_a_machine_has_not_is_told_and_not_run(machine, action):
  gym = make(machine)
  await gym.start(task())
  shown = await gym.act(action)
  assert shown.text.startswith("Error: this machine") and not shown.done
  assert not [w for w, _ in machine.log if w == "execute"]
  await gym.close()


@hypothesis.settings(max_examples=200, derandomize=True, database=None)
@hypothesis.given(
  st.one_of(
    st.builds(lambda t: GuiAction("type", text=t), st.text(max_size=40)),
    st.builds(
      lambda k: GuiAction("key", keys=k),
      st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3),
    ),
  )
)
def test_what_a_policy_types_is_never_code(action):
  """Every action becomes calls of pyautogui, with literals."""
  try:
    code = osworld_actions.code(action, 40.0)
  except ValueError:
    return
  for statement in ast.parse(code or "").body:
    call = statement.value
    assert isinstance(call, ast.Call) and call.func.value.id == "pyautogui"
    assert all(isinstance(a, ast.Constant) for a in call.args)
    assert all(isinstance(k.value, ast.Constant) for k in call.keywords)


async def test_the_set_up_is_done_in_order(machine, tmp_path):
  (tmp_path / "note.txt").write_text("from here")
  gym = make(machine, upload_root=str(tmp_path))
  await gym.start(task(config=[
      step("execute", command=["python", "-c",
                               "open('w','w').write('{SCREEN_WIDTH_HALF}')"]),
      step("command", command="cat w && echo x >> n && wc -l < n", shell=True,
           until={"stdout": "2"}),
      step("upload_file", files=[{"local_path": "note.txt", "path": "~/d/n"}]),
      step("open", path="~/d/n"),
      step("launch", command=["xterm"]),
      step("activate_window", window_name="n", strict=True),
      step("sleep", seconds=0.01),
  ]))  # fmt: skip
  assert (machine.home / "w").read_text() == "64"
  assert (machine.home / "d/n").read_text() == "from here"
  calls = [w for w, _ in machine.log]
  assert calls.index("open_file") < calls.index("launch")
  await gym.close()


async def test_metrics_and_getters_are_those_of_osworld(machine):
  (machine.home / "out.txt").write_text("alpha\nbeta\n")
  gym = make(machine)
  several = {
    "func": ["exact_match", "file_contains", "match_in_list"],
    "conj": "and",
    "result": [
      result(["cat", "out.txt"]),
      {"type": "vm_file", "path": "~/out.txt", "dest": "out.txt"},
      {"type": "vm_command_error", "command": "echo no >&2", "shell": True},
    ],
    "expected": [
      rules(expected="alpha\nbeta\n"),
      rules(expected=["alpha", "beta"]),
      rules(expected=["no\n"]),
    ],
  }
  cases = [
      (several, 1.0),
      ({**several, "conj": "or", "func": ["exact_match"] * 3,
        "expected": [rules(expected="?")] * 2 + [rules(expected="no\n")]}, 1.0),
      ({"func": "file_contains", "result": {"type": "vm_file", "path": "~/x"},
        "expected": rules(expected=["a"])}, 0.0),
      ({"func": "exact_match", "result": {"type": "vm_screen_size"},
        "expected": rules(expected={"width": 128, "height": 96})}, 1.0),
      ({"func": "literal_match", "result": result("echo A"),
        "expected": rules(), "options": {"ignore_case": True}}, 0.0),
      ({"func": "is_in_list", "result": {"type": "vm_terminal_output"},
        "expected": rules(expected="ls")}, 1.0),
      ({**WHICH, "postconfig": [step("execute", command="rm out.txt")]}, 1.0),
  ]  # fmt: skip
  for evaluator, score in cases:
    await gym.start(task(evaluator))
    assert (await gym.evaluate()).score == score, evaluator
  assert not (machine.home / "out.txt").exists()
  await gym.close()


@pytest.mark.parametrize("says", [True, False])
async def test_what_cannot_be_done_must_be_said(machine, says):
  gym = make(machine)
  for evaluator, score in (
    ({"func": "infeasible"}, float(not says)),
    (WHICH, float(says)),
  ):
    await gym.start(task(evaluator))
    assert (await gym.act(GuiAction("terminate", success=says))).done
    assert (await gym.evaluate()).score == score
  await gym.close()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"evaluator": {}}, "evaluator.func is missing"),
        ({"evaluator": {"func": "compare_docx_files", "result": result("x")}},
         r"func\[0\].*compare_docx_files"),
        ({"evaluator": {**WHICH, "expected": {"type": "cloud_file"}}},
         r"expected\[0\].type.*cloud_file"),
        ({"evaluator": {**WHICH, "conj": "xor"}}, "conj='xor'"),
        ({"evaluator": {**WHICH, "func": ["exact_match"] * 2}}, "a list"),
        ({"config": [step("googledrive")]}, r"config\[0\].type.*googledrive"),
        ({"config": [step("open", pth="x")]}, r"config\[0\]: open takes no"),
        ({"evaluator": {**WHICH, "postconfig": [step("login")]}},
         r"postconfig\[0\]"),
    ],
)  # fmt: skip
async def test_what_cannot_be_played_is_refused_before_it_is(
  machine, change, words
):
  gym = make(machine)
  with pytest.raises(ValueError, match=words):
    await gym.start(task(**change))
  assert not machine.log


async def test_failures_are_errors_and_give_the_machine_back(machine):
  gym = make(machine)
  with pytest.raises(osworld.OSWorldError, match=r"config\[0\] \(open\).*404"):
    await gym.start(task(config=[step("open", path="~/nowhere")]))
  passwords = {"local_path": "/etc/passwd", "path": "x"}
  upload = step("upload_file", files=[passwords])
  with pytest.raises(osworld.OSWorldError, match="upload_root"):
    await gym.start(task(config=[upload]))
  outside = make(machine, upload_root=str(machine.home))
  await gym.close()
  with pytest.raises(osworld.OSWorldError, match="not a file under"):
    await outside.start(task(config=[upload]))
  await outside.close()
  machine.broken.add("screenshot")
  with pytest.raises(osworld.OSWorldError, match="not a picture"):
    await gym.start(task())
  machine.broken.clear()
  await gym.close()
  machine.hang_s = 4.0
  hasty = make(machine, call_s=2.0)
  with pytest.raises(osworld.OSWorldError, match="within 2 s"):
    await hasty.start(task())
  await hasty.close()
  machine.hang_s = 0.0
  wrong = make(machine, width=640)
  with pytest.raises(osworld.OSWorldError, match="gym.width=128"):
    await wrong.start(task())
  await wrong.close()
  assert await machines.take([machine.url], 0.0) == machine.url
  machines.give_back(machine.url)


async def test_a_machine_has_one_episode_at_a_time(machine):
  first, second = make(machine), make(machine, start_s=0.2)
  await first.start(task())
  with pytest.raises(osworld.OSWorldError, match="became free"):
    await second.start(task())
  await first.close()
  second._start_s = 60.0  # It resets the machine, too.
  await second.start(task())
  await second.close()


def test_task_files_are_a_task_set(tmp_path):
  domain = tmp_path / "os"
  domain.mkdir()
  for i in range(30):
    data = dict(task().params["osworld"], id=f"id-{i}")
    (domain / f"{i}.json").write_text(json.dumps(data))
  options = {"tasks_dir": str(tmp_path)}
  skip = {**options, "unsupported": "skip"}
  make = gyms.get("osworld").make_tasks
  task_set = make((), options)
  train = {task_set.train_task("os", i).task_id for i in range(60)}
  held_out = {task_set.eval_task("os", i).task_id for i in range(60)}
  assert len(train) + len(held_out) == 30 and not train & held_out and held_out
  (domain / "x.json").write_text(
    json.dumps(
      {"id": "x", "instruction": "i", "evaluator": {"func": "compare_table"}}
    )
  )
  with pytest.raises(ValueError, match="x.json.*compare_table.*skip"):
    make((), options)
  skipped = make(("os",), skip)
  assert skipped.families() == ("os",)
  with pytest.raises(ValueError, match="tasks_dir"):
    make()
  with pytest.raises(ValueError, match="chrome"):
    make(("chrome",), skip)


def test_metrics_are_a_registry():
  assert {"exact_match", "check_include_exclude"} <= set(
    osworld_evaluation.METRICS.names()
  )
