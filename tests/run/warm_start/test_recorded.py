"""Recorded episodes become the very demonstrations that an oracle gives."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.play import __main__ as command
from tunix.rl.multi_turn.environments.play import session as session_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.run.warm_start import recorded

FAMILIES = ("enter-text", "click-button", "open-icon", "drag-to-target")


@pytest.fixture(scope="module", name="file")
def _file(tmp_path_factory):
  path = tmp_path_factory.mktemp("demos") / "demos.jsonl"
  for family in FAMILIES:
    assert not command.main([
        "desktop", family, "--by", "oracle", "--episodes", "2", "--out",
        str(path),
    ])  # fmt: skip
  return path


def config(path, *overrides):
  return config_lib.load_config(
    [f"warm_start.recordings={path}", "warm_start.steps=2", *overrides]
  )


def demonstrator(oracle, make_gym, grid):
  _, processor, tokenizer = checkpoint.create_policy("nano")
  return demonstrations.Demonstrator(
    qwen.QwenRenderer(tokenizer, processor.num_image_tokens),
    lambda: tool_agent.ToolAgent(
      prompts.get_prompt("desktop_compact"), "computer_use_compact"
    ),
    make_gym,
    oracle,
    images.ImageStore(),
    grid=grid,
  )


@pytest.mark.parametrize("grid", [None, demonstrations.POINT_GRID])
def test_they_are_the_tokens_that_the_oracle_itself_would_give(file, grid):
  source = recorded.for_run(config(file), None)
  tasks = list(itertools.islice(source.tasks, 8))
  assert len({t.task_id for t in tasks}) == 8
  replayed = asyncio.run(
    demonstrator(source.oracle, source.make_gym, grid).episodes(
      [(t, 0) for t in tasks]
    )
  )
  # The same tasks without the recording's name.
  own = [desktop.DesktopTasks().task(t.family, t.seed) for t in tasks]
  played = asyncio.run(
    demonstrator(desktop.GYM.load_oracle(), desktop.DesktopGym, grid).episodes(
      [(t, 0) for t in own]
    )
  )
  assert {t.family for t in tasks} == set(FAMILIES)
  for one, other in zip(replayed, played):
    assert one.status is other.status and one.reward == other.reward == 1.0
    for a, b in zip(one.sequences, other.sequences):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
      assert a.images == b.images


def test_a_person_who_says_done_is_cloned_to_the_end(tmp_path):
  """Also what the gym itself would not have ended."""
  path = tmp_path / "d.jsonl"

  class Patient(desktop.DesktopGym):
    """Ends at a signal."""

    async def act(self, action):
      observation = await super().act(action)
      return dataclasses.replace(observation, done=False)

  async def play():
    session = session_lib.Session("desktop", Patient(), out=path)
    await session.start(desktop.DesktopTasks().train_task("enter-text", 0, 0))
    while (action := await session.next_right()) is not None:
      await session.act(action)
    await session.act(gui_action.GuiAction("terminate"))

  asyncio.run(play())
  source = recorded.for_run(config(path), None)
  (episode,) = asyncio.run(
    demonstrator(source.oracle, source.make_gym, None).episodes(
      [(next(source.tasks), 0)]
    )
  )
  assert episode.status.value == "succeeded"
  # This grammar has no word for "done", so the action before is the last.
  assert len(episode.steps) == 2
  wordy = config(path, "agent.parser=computer_use")
  source = recorded.for_run(wordy, None)
  assert len(source.make_gym()._all) == 1  # pylint: disable=protected-access
  (only,) = source.make_gym()._all.values()  # pylint: disable=protected-access
  assert only.actions[-1].kind.value == "terminate"


def test_what_the_grammar_cannot_say_is_refused(tmp_path):
  path = tmp_path / "d.jsonl"

  async def play():
    session = session_lib.Session("desktop", desktop.DesktopGym(), out=path)
    await session.start(desktop.DesktopTasks().train_task("enter-text", 0, 0))
    await session.act(gui_action.GuiAction("wait"))
    while (action := await session.next_right()) is not None:
      await session.act(action)

  asyncio.run(play())
  with pytest.raises(config_lib.ConfigError, match="cannot write.*wait"):
    recorded.for_run(config(path), None)


@pytest.mark.parametrize(
  "overrides, words",
  [
    (["gym.width=256", "gym.height=192"], "shows 128x96"),
    (["warm_start.recordings=/nowhere"], "/nowhere"),
  ],
)
def test_recordings_that_do_not_fit_are_refused(file, overrides, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    recorded.for_run(config(file, *overrides), None)


def test_recordings_need_steps_and_make_an_oracle_unnecessary(file):
  with pytest.raises(config_lib.ConfigError, match="warm_start.steps=0"):
    config(file, "warm_start.steps=0")
  loaded = config(file, "gym=gymnasium", "tasks=[FrozenLake-v1]")
  assert loaded.warm_start.steps == 2
  with pytest.raises(config_lib.ConfigError, match="no oracle"):
    config_lib.load_config(
      ["gym=gymnasium", "tasks=[FrozenLake-v1]", "warm_start.steps=2"]
    )


def test_the_oracle_demonstrates_the_families_that_are_named():
  loaded, source = run_tasks.resolve(config_lib.load_config([
      "tasks=[enter-text]", "warm_start.steps=2",
      "warm_start.families=[click-button, open-icon]",
  ]))  # fmt: skip
  demonstrated = itertools.islice(recorded.for_run(loaded, source).tasks, 4)
  assert [t.family for t in demonstrated] == ["click-button", "open-icon"] * 2
  trained = itertools.islice(run_tasks.make_sampler(loaded, source), 2)
  assert {t.family for t in trained} == {"enter-text"}
  with pytest.raises(config_lib.ConfigError, match="click-buton.*click-button"):
    run_tasks.resolve(config_lib.load_config([
        "tasks=[enter-text]", "warm_start.steps=2",
        "warm_start.families=[click-buton]",
    ]))  # fmt: skip
  with pytest.raises(config_lib.ConfigError, match="set warm_start.steps"):
    config_lib.load_config(["warm_start.families=[click-button]"])


def test_failures_are_not_cloned(tmp_path):
  script = tmp_path / "s.jsonl"
  script.write_text('{"kind": "terminate"}')
  path = tmp_path / "d.jsonl"
  command.main(["desktop", "enter-text", "--by", "script", "--script",
                str(script), "--out", str(path)])  # fmt: skip
  with pytest.raises(config_lib.ConfigError, match="none of its 1 episodes"):
    recorded.for_run(config(path), None)


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_run_clones_them(tmp_path, file):
  status = train.main([
      f"run.dir={tmp_path}", "name=r", small_runs.NANO,
      "warm_start.source=none", f"warm_start.recordings={file}",
      "warm_start.steps=2", "warm_start.batch_size=4", "steps=0",
      "tasks=[enter-text]", "eval.episodes_per_task=1",
      "eval.modes=[sampled]", "engine.slots=4",
      "report.progress=none", "report.images=false",
  ])  # fmt: skip
  assert status == 0
  assert (tmp_path / "r" / "warm_start" / "model.safetensors").exists()
