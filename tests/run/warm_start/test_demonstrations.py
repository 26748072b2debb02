"""Demonstrations: right moves, named targets, habits, and nothing to copy."""

import asyncio
import dataclasses
import json
import re

import grounding_conversations
import numpy as np
import pretrain
import pytest
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import (
  family as desktop_family,
)
from tunix.rl.multi_turn.environments.gyms.desktop import scenes
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run.warm_start import demonstrations

Kind = gui_action.GuiActionKind
PARSER = tool_parser.make_tool_parser("computer_use_compact")
TASKS = desktop.DesktopTasks()


@pytest.fixture(scope="module")
def renderer():
  _, processor, tokenizer = checkpoint.create_policy("nano")
  return qwen.QwenRenderer(tokenizer, processor.num_image_tokens)


def make_agent():
  return tool_agent.ToolAgent(
    prompts.get_prompt("desktop_compact"), "computer_use_compact"
  )


def make(renderer, **changes):
  return demonstrations.Demonstrator(
    **{
      "renderer": renderer,
      "make_agent": make_agent,
      "make_gym": desktop.DesktopGym,
      "oracle": desktop.GYM.load_oracle(),
      "image_store": images.ImageStore(),
      "grid": demonstrations.POINT_GRID,
      **changes,
    }
  )


def play(demonstrator, tasks, **kwargs):
  return asyncio.run(
    demonstrator.episodes(
      [(task, seed) for seed, task in enumerate(tasks)], **kwargs
    )
  )


def said(episode):
  """(text before the call, action in pixels) of each turn."""
  turns = []
  for step in episode.steps:
    result = PARSER.parse_result(step.model_response)
    (call,) = result.calls
    turns.append((result.thought or "", PARSER.to_gui_action(call, 128, 96)))
  return turns


def test_a_task_without_a_solution_is_left_out(renderer):
  right = desktop.GYM.load_oracle()
  tasks = [TASKS.train_task("click-button", i) for i in range(3)]
  episodes = []

  def act(gym):
    if gym.episode.spec.instruction == tasks[1].instruction:
      raise LookupError("nothing to click")
    return right.act(gym)

  oracle = dataclasses.replace(right, act=act)
  episodes = play(make(renderer, oracle=oracle), tasks)
  assert len({t.instruction for t in tasks}) == 3
  task_ids = [e.task["task_id"] for e in episodes]
  assert task_ids == [tasks[0].task_id, tasks[2].task_id]


@pytest.mark.parametrize("family", desktop.families())
def test_demonstrations_win_and_name_what_they_touch(renderer, family):
  tasks = [TASKS.train_task(family, i, difficulty=i % 2) for i in range(6)]
  named = pointed = 0
  for task, episode in zip(tasks, play(make(renderer), tasks)):
    assert episode.status is trajectory.TrajectoryStatus.SUCCEEDED
    gym = desktop.DesktopGym()
    gym.start_sync(task)
    for thought, action in said(episode):
      if action.kind in (Kind.CLICK, Kind.DRAG):
        pointed += 1
        if thought:
          named += 1
          assert gym.describe(action.x, action.y) == thought
          assert thought in [e[0] for e in gym.referring_expressions()]
      else:
        assert not thought
      gym.act_sync(action)
    assert gym.evaluate_sync().success
  if pointed and family != "drag-path":
    assert named >= 0.5 * pointed, family


def test_at_once_changes_nothing(renderer):
  tasks = [TASKS.train_task("enter-text", i) for i in range(5)]
  one, many = (play(make(renderer), tasks, at_once=n) for n in (1, 4))
  for a, b in zip(one, many):
    assert a.task == b.task
    np.testing.assert_array_equal(a.sequences[0].tokens, b.sequences[0].tokens)


@pytest.mark.parametrize(
  "habit,family,check",
  [
    ("skip_focus", "enter-text", lambda a: a.kind is Kind.TYPE),
    ("single_click", "open-icon", lambda a: a.count == 1),
    ("wrong_widget", "click-button", lambda a: a.kind is Kind.CLICK),
  ],
)
def test_habits_spoil_the_first_move(renderer, habit, family, check):
  tasks = [TASKS.train_task(family, i) for i in range(8)]
  bad = play(make(renderer, habits={family: (habit, 1.0)}), tasks)
  good = play(make(renderer, habits={family: (habit, 0.0)}), tasks)
  for wrong, right in zip(bad, good):
    assert not wrong.status.value == "succeeded"
    assert check(said(wrong)[0][1])
    assert said(wrong)[0] != said(right)[0]
    # It says what it does, although that is wrong.
    if habit == "wrong_widget":
      gym = desktop.DesktopGym()
      gym.start_sync(TASKS.train_task(family, bad.index(wrong)))
      thought, action = said(wrong)[0]
      assert gym.describe(action.x, action.y) == (thought or None)


def test_unknown_habits_and_oracles_are_refused(renderer):
  with pytest.raises(ValueError, match="'sloth' of 'open-icon'.*single_click"):
    make(renderer, habits={"open-icon": ("sloth", 0.5)})
  with pytest.raises(ValueError, match="in \\[0, 1\\], got 2"):
    make(renderer, habits={"open-icon": ("single_click", 2)})
  with pytest.raises(ValueError, match="'chess' has no oracle"):
    gyms.GymSpec(name="chess", make=desktop.DesktopGym).load_oracle()


def test_a_broken_demonstration_is_an_error(renderer):
  def broken(gym):
    raise OSError("no oracle today")

  oracle = dataclasses.replace(desktop.GYM.load_oracle(), act=broken)
  tasks = [TASKS.train_task("click-button", i) for i in range(3)]
  with pytest.raises(RuntimeError, match="click-button/0/.*no oracle today"):
    play(make(renderer, oracle=oracle), tasks, at_once=2)


def test_a_demonstration_that_broke_is_played_again(renderer):
  right = desktop.GYM.load_oracle()
  faults = [OSError("busy"), OSError("busy still")]

  def act(gym):
    if faults:
      raise faults.pop()
    return right.act(gym)

  oracle = dataclasses.replace(right, act=act)
  tasks = [TASKS.train_task("click-button", i) for i in range(2)]
  episodes = play(make(renderer, oracle=oracle), tasks)
  assert [e.task["task_id"] for e in episodes] == [t.task_id for t in tasks]
  assert all(e.reward == 1.0 for e in episodes) and not faults


def grounder(renderer, **changes):
  return grounding_conversations.Grounder(
    renderer, PARSER, grid=demonstrations.POINT_GRID, **changes
  )


@pytest.mark.parametrize("kind", ["inventory", "question"])
def test_conversations_are_right_and_never_repeat(renderer, kind):
  gym, store = desktop.DesktopGym(), images.ImageStore()
  rng = np.random.default_rng(0)
  for seed in range(20):
    observation = gym.random_scene(seed)
    expressions = gym.referring_expressions()
    teacher = grounder(renderer, reverse_rate=0.0, type_rate=0.0)
    make_one = getattr(teacher, f"{kind}_sequence")
    sequence = make_one(store.put(observation.screenshot), expressions, rng)
    sampled = sequence.tokens[sequence.loss_mask]
    blocks = renderer.decode(sampled).replace("<|im_end|>", "\n")
    named = []
    for piece in blocks.split("</tool_call>")[:-1]:
      result = PARSER.parse_result(piece.strip() + "\n</tool_call>")
      (call,) = result.calls
      action = PARSER.to_gui_action(call, 128, 96)
      (place,) = [e[1:] for e in expressions if e[0] == result.thought]
      assert abs(action.x - place[0]) <= 2.5 and abs(action.y - place[1]) <= 2.5
      named.append(result.thought)
    assert len(set(named)) == len(named) >= 1


@pytest.mark.parametrize("kind", sorted({*scenes.FIELD_KINDS} - {"shape"}))
def test_pairs_teach_where_each_thing_is_and_nothing_else(renderer, kind):
  gym, store = desktop.DesktopGym(), images.ImageStore()
  for seed in range(10):
    image = store.put(gym.field(seed, kind).screenshot)
    expressions = gym.referring_expressions()
    sequence = grounder(renderer).pairs_sequence(
      image, expressions, np.random.default_rng(seed)
    )
    text = renderer.decode(sequence.tokens).split("assistant\n")[1]
    matches = re.findall(r"([A-Za-z]+)(\d+),(\d+)", text)
    assert len(matches) == len(expressions) >= 3
    for name, x, y in matches:
      ((_, px, py),) = [e for e in expressions if name in e[0].split()]
      assert abs(int(x) * 128 / 1000 - px) <= 2.5
      assert abs(int(y) * 96 / 1000 - py) <= 2.5
    learned = [
      renderer.decode([int(t)]) for t in sequence.tokens[sequence.loss_mask]
    ]
    assert learned == [n for _, x, y in matches for n in (x, y)]


def test_copies_teach_the_quoted_words_and_nothing_else(renderer):
  teacher = grounder(renderer, words=("cat", "violin", "zebra"))
  result = set()
  for seed in range(10):
    sequence = teacher.copies_sequence(np.random.default_rng(seed))
    assert not sequence.images
    text = renderer.decode(sequence.tokens)
    words = re.findall(r'user\n[^"\n]*"(\w+)"', text)
    typed = re.findall(r'"type", "text": "(\w+)"', text)
    learned = [
      renderer.decode([int(t)]) for t in sequence.tokens[sequence.loss_mask]
    ]
    assert sorted(words) == ["cat", "violin", "zebra"]
    assert words == typed == learned
    result.add(tuple(words))
  assert len(result) > 1


def test_nothing_visible_is_refused(renderer):
  store = images.ImageStore()
  image = store.put(np.zeros((96, 128, 3), np.uint8))
  with pytest.raises(ValueError, match="something visible"):
    grounder(renderer).inventory_sequence(image, [], np.random.default_rng(0))


@pytest.mark.slow
def test_pretraining_leaves_a_policy_a_log_and_its_recipe(tmp_path):
  recipe = pretrain.Recipe(
      steps=4, first_steps=2, first_scenes=4, copies=1, size="nano",
      inventories=4, questions=2, episodes=2,
      late_inventories=2, late_episodes=3, other_scenes=1,
      rows=4, patches=1024, targets=1024,
  )  # fmt: skip
  report = pretrain.pretrain(recipe, tmp_path, report_every=2)
  log = [
    json.loads(x) for x in (tmp_path / "log.jsonl").read_text().split("\n") if x
  ]
  assert [r["step"] for r in log] == [2, 4] and log[-1] == report
  assert all(np.isfinite(list(r.values())).all() for r in log)
  saved = json.loads((tmp_path / "recipe.json").read_text())
  assert saved["steps"] == 4 and saved["habits"]["open-icon"][1] == 0.7
  model, _, _ = checkpoint.load_policy(tmp_path)
  assert model.config.width == 32


def test_a_summary_carries_a_place_out_of_a_windows_sight(renderer):
  """In turn 14 the window is blind; a summary that tells the place is not."""
  tasks = [TASKS.train_task("recall-place", i) for i in range(8)]

  def last_turns(**history):
    def make_agent():
      return tool_agent.ToolAgent(
        prompts.get_prompt("desktop_compact"),
        "computer_use_compact",
        summary_prompt="Sum up.",
        **history,
      )

    return play(make(renderer, make_agent=make_agent), tasks)

  def texts(episode):
    *seen, _ = episode.steps[-1].chat_completions
    return json.dumps(trajectory.encode(seen))

  specs = [
    desktop_family.spec_of(
      desktop_family.get("recall-place"), task.seed, 0
    ).data
    for task in tasks
  ]
  assert {data["tells"] for data in specs} == {True, False}
  windows = last_turns(max_images=5, list_dropped_turns=True)
  summaries = last_turns(summary_at=400)
  for data, window, summary in zip(specs, windows, summaries):
    # All are played to their end, by one who knows the place.
    assert window.reward == summary.reward == 1.0
    shown = window.steps[0].observation["screenshot"].sha256
    assert shown not in texts(window) and shown not in texts(summary)
    # The last click is written as the summary has it.
    point = re.search(r"\[\d+, \d+\]", summary.steps[-1].model_response)[0]
    assert point not in texts(window)
    assert (point in texts(summary)) == data["tells"]
    assert max(len(s) for s in summary.sequences) <= 640
    written = [s for s in summary.steps if s.info.get("summary")]
    assert 2 <= len(written) == len(summary.sequences) - 1
