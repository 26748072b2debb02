"""Episodes whose policy another program has: the lines, without the program."""

import asyncio

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import arithmetic
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.run.evaluations import outside_policy

Kind = gui_action.GuiActionKind


class Watched(outside_policy.Episodes):
  """Remembers the environments that it has made."""

  def __init__(self, *settings):
    super().__init__(["name=x", *settings])
    self.pairs, make = [], self._factory

    def watched(task):
      self.pairs.append(make(task))
      return self.pairs[-1]

    watched.episode_reward = make.episode_reward
    self._factory = watched


async def finish(episodes, split, index, answer):
  """(the messages of each turn, the outcome); `answer` makes the texts."""
  result = await episodes.play({"start": {"split": split, "index": index}})
  name, turns = result["episode"], []
  while "outcome" not in result:
    before = turns[-1] if turns else []
    turns.append([*before[: result["kept"]], *result["messages"]])
    reply = {"episode": name, "text": answer(turns[-1]), "truncated": False}
    result = await episodes.play({"reply": reply})
  assert not episodes._playing
  return turns, result["outcome"]


def oracle_of(episodes):
  oracle = desktop.GYM.load_oracle()

  def act(messages):
    del messages
    agent, env = episodes.pairs[-1]
    action = oracle.act(env.gym) or gui_action.GuiAction(Kind.TERMINATE)
    sx, sy = env.scale
    return agent.tool_parser.format_gui_action(
      action.scaled(1 / sx, 1 / sy), env.image.width, env.image.height, None
    )

  return act


def images_of(messages):
  return [
    part["image_url"]["url"]
    for message in messages
    if isinstance(message["content"], list)
    for part in message["content"]
    if part["type"] == "image_url"
  ]


@pytest.mark.parametrize("agent", ["tool", "ui_tars_1_5"])
def test_an_oracle_wins_by_text_alone(agent):
  episodes = Watched("gym=desktop", f"agent={agent}", "tasks=enter-text")
  for index in range(2):
    turns, outcome = asyncio.run(
      finish(episodes, "train", index, oracle_of(episodes))
    )
    assert outcome["reward"] == 1.0 and outcome["success"]
    assert outcome["status"] == "succeeded" and outcome["turns"] == len(turns)
    for turn, messages in enumerate(turns):
      urls = images_of(messages)
      assert len(urls) == turn + 1  # A screenshot a turn, all of them kept.
      assert all(url.startswith("data:image/png;base64,") for url in urls)
      assert messages[-1]["role"] == "user"


def test_a_shortened_history_is_what_is_asked():
  episodes = Watched(
    "gym=desktop",
    "agent.max_images=1",
    "agent.list_dropped_turns=true",
    "environment.max_turns=3",
  )

  def click(messages):
    del messages
    return episodes.pairs[-1][0].tool_parser.format_gui_action(
      gui_action.GuiAction(Kind.CLICK, 1, 1), 128, 96, None
    )

  turns, outcome = asyncio.run(finish(episodes, "train", 0, click))
  assert outcome["status"] == "max_turns" and outcome["turns"] == len(turns) > 1
  assert [len(images_of(messages)) for messages in turns] == [1] * len(turns)
  assert "Previous actions" in str(turns[-1])


def test_text_tasks_play_too():
  episodes = Watched("environment=gsm8k")
  task = episodes.task("eval", 0)
  turns = arithmetic.solve(task.params, ())
  result, outcome = asyncio.run(
    finish(episodes, "eval", 0, lambda messages: turns[-1]["content"])
  )
  assert outcome["success"] and outcome["reward"] == 1.0
  assert str(task.params["question"]) in str(result[0])
  _, outcome = asyncio.run(
    finish(episodes, "eval", 0, lambda messages: "-1234567")
  )
  assert outcome["reward"] == 0.0 and not outcome["success"]


def test_an_episode_that_no_policy_decided_is_an_error():
  episodes = Watched("gym=desktop")

  async def broken():
    answer = await episodes.play({"start": {"split": "train", "index": 0}})
    _, env = episodes.pairs[-1]
    env.gym.act = None
    parser = episodes.pairs[-1][0].tool_parser
    click = parser.format_gui_action(
      gui_action.GuiAction(Kind.CLICK, 3, 3), 128, 96, None
    )
    reply = {"episode": answer["episode"], "text": click}
    return await episodes.play({"reply": reply})

  with pytest.raises(RuntimeError, match="status=env_error"):
    asyncio.run(broken())
  assert not episodes._playing


def test_an_agent_that_summarizes_is_refused():
  with pytest.raises(config_lib.ConfigError, match="agent.history=window"):
    outside_policy.Episodes(["agent.history=summary"])


def test_a_closed_episode_is_gone():
  episodes = Watched("gym=desktop")

  async def close():
    answer = await episodes.play({"start": {"split": "train", "index": 0}})
    name = answer["episode"]
    assert await episodes.play({"close": {"episode": name}}) == {}
    assert await episodes.play({"close": {"episode": name}}) == {}
    assert not episodes._playing
    with pytest.raises(ValueError, match=f"no episode {name}"):
      await episodes.play({"reply": {"episode": name, "text": ""}})
    with pytest.raises(ValueError, match="starts, replies or closes"):
      await episodes.play({"stop": 1})
    with pytest.raises(ValueError, match="must be train or eval"):
      await episodes.play({"start": {"split": "test", "index": 0}})

  asyncio.run(close())


def test_tasks_are_listed_and_wrong_settings_named():
  facts, _ = outside_policy.prepare(
    {
      "settings": ["gym=desktop", "tasks=[click-button,drag-to-target]"],
      "train": 4,
      "eval": 2,
    }
  )
  assert [row["family"] for row in facts["train"]] == [
    "click-button",
    "drag-to-target",
  ] * 2
  ids = [row["task_id"] for row in [*facts["train"], *facts["eval"]]]
  assert len(set(ids)) == 6 and all(r["instruction"] for r in facts["train"])
  with pytest.raises(config_lib.ConfigError, match="desktopp"):
    outside_policy.prepare(
      {"settings": ["gym=desktopp"], "train": 1, "eval": 1}
    )
