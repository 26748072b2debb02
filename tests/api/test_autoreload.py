"""Edits of one's own module take effect in the next run: real %autoreload."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap

import chat_server
import pytest

MODULE = """
import numpy as np
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.parser import tool_parser


class Gym:
  def start(self, task):
    self.hit = False
    return base.Observation(np.zeros((96, 128, 3), np.uint8), text="gym one")

  def act(self, action):
    self.hit = True
    return base.Observation(np.ones((96, 128, 3), np.uint8), done=True)

  def evaluate(self):
    return base.Evaluation(score=float(self.hit), success=self.hit)

  def close(self):
    pass


class Tasks:
  def __init__(self, families=None):
    pass

  def families(self):
    return ("press",)

  def train_task(self, family, index, seed=0):
    return base.Task(f"{family}/{index}", family, "Press.", seed=index)

  eval_task = train_task


gyms.register("mine", gyms.GymSpec(make=Gym, tasks=Tasks, lists_tasks=True))
GYM = gyms.GymSpec(make=Gym, tasks=Tasks, lists_tasks=True)


@tool_parser.register_tool_parser("mine")
class Parser(tool_parser.GuiActionParser):
  X = 11

  def parse_result(self, model_response):
    call = trajectory.ToolCall("point", {"x": self.X})
    return tool_parser.ParseResult(calls=(call,))

  def get_tool_prompt(self, tools_schema=None):
    return "Anything."

  def format(self, calls, thought=None):
    return "OK"

  def to_gui_action(self, call, width, height):
    return gui_action.GuiAction("click", x=call.arguments["x"], y=5)

  def format_gui_action(self, action, width, height, thought=None):
    return "OK"


class Agent(agents.ToolAgent):
  def __init__(self, system_prompt="", parser_name="qwen", *, screen=None):
    super().__init__("agent one", parser_name, screen=screen)


def score(task, action):
  return 0.25
"""

SESSION = """
    import json, pathlib, sys, time
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    sys.path.insert(0, {folder!r})

    def cell(text):
      shell.run_cell(text).raise_error()

    def play(gym, parser):
      cell(f'''
    episode = mt.play(
        {url!r}, "press", gym="{{gym}}", reward=mine.score,
        agent={{{{"name": "mine:Agent", "parser": "{{parser}}"}}}},
    )
    ''')
      episode = shell.user_ns["episode"]
      step = episode.trajectory.steps[0]
      return dict(
          said=json.dumps(step.to_json()["chat_completions"]),
          clicked=step.info["gui_actions"][0]["x"], reward=episode.reward,
      )

    cell("%load_ext autoreload")
    cell("%autoreload 2")
    cell("import mine, tunix.rl.multi_turn as mt")
    found = [play("mine", "mine"), play("mine:GYM", "mine:Parser")]
    path = pathlib.Path(mine_path := shell.user_ns["mine"].__file__)
    text = path.read_text()
    for old, new in (
        ("gym one", "gym two"), ("agent one", "agent two"),
        ("X = 11", "X = 22"),
        ("return 0.25", "return 0.75"),
    ):
      assert old in text
      text = text.replace(old, new)
    time.sleep(1.1)  # Autoreload looks at the time of the file, in seconds.
    path.write_text(text)
    found += [play("mine", "mine"), play("mine:GYM", "mine:Parser")]
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_edited_gym_parser_agent_and_reward_are_what_plays_next(tmp_path):
  (tmp_path / "mine.py").write_text(MODULE)
  with chat_server.serving() as (url, _):
    program = textwrap.dedent(SESSION.format(folder=str(tmp_path), url=url))
    process = subprocess.run(
      [sys.executable, "-c", program],
      capture_output=True,
      text=True,
      timeout=380,
      check=False,
      cwd=pathlib.Path(tmp_path),
    )
  assert process.returncode == 0, process.stderr + process.stdout
  assert "autoreload of" not in process.stdout + process.stderr, process.stderr
  data = json.loads(process.stdout.splitlines()[-1])
  for one in data[:2]:
    assert "gym one" in one["said"] and "agent one" in one["said"]
    assert one["clicked"] == 11 and one["reward"] == 0.25
  for one in data[2:]:
    assert "gym two" in one["said"] and "agent two" in one["said"]
    assert one["clicked"] == 22 and one["reward"] == 0.75
