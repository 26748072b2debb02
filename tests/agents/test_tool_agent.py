"""Agents: exact messages, shared history, and what malformed output becomes."""

import json

import pytest
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser

QWEN = tool_parser.make_tool_parser("qwen")
CALL = QWEN.format([trajectory.ToolCall("calculator", {"expression": "1+1"})])
TOOLS = {"calculator": tools.CalculatorTool}


def image(n):
  return trajectory.ImageRef(f"{n:064x}", 224, 160)


def make(**kwargs):
  return agents.ToolAgent("Be brief.", "qwen", TOOLS, **kwargs)


def contents(agent):
  return [m["content"] for m in agent.chat_completions]


def play(agent, turns, text=CALL):
  """`turns` turns of screenshots; returns what the model saw at each."""
  views = []
  agent.update_from_env(
    {"screenshot": image(0), "instruction": "go"}, 0.0, False, {}
  )
  for i in range(turns):
    views.append(list(agent.chat_completions))
    agent.update_from_model(text)
    agent.update_from_env({"screenshot": image(i + 1)}, 0.0, False, {})
  return views


class TestBaseAgent:
  def test_is_abstract(self):
    with pytest.raises(TypeError):
      agents.BaseAgent()  # pylint: disable=abstract-class-instantiated
    for name in (
      "chat_completions",
      "trajectory",
      "update_from_env",
      "update_from_model",
      "reset",
    ):
      assert name in agents.BaseAgent.__abstractmethods__


class TestSystemPrompt:
  def test_message_zero_holds_prompt_schema_and_markup(self):
    (system,) = make().chat_completions
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    schema = tools.CalculatorTool().json
    assert json.dumps(schema, ensure_ascii=False) in system["content"]
    for tag in ("<tools>", "</tools>", "<tool_call>", "</tool_call>"):
      assert tag in system["content"]

  def test_tool_prompt_goes_where_the_template_says(self):
    agent = agents.ToolAgent("A $tools_prompt Z", "qwen", TOOLS)
    text = agent.chat_completions[0]["content"]
    assert text.startswith("A # Tools") and text.endswith("</tool_call> Z")

  def test_schema_may_be_given_without_tools(self):
    agent = agents.ToolAgent("", "qwen", tools_schema=[{"name": "f"}])
    assert '{"name": "f"}' in agent.chat_completions[0]["content"]
    with pytest.raises(ValueError, match="not both"):
      agents.ToolAgent("", "qwen", TOOLS, tools_schema=[])

  def test_gui_parser_brings_its_own_tools(self):
    agent = agents.ToolAgent("", "computer_use")
    assert "left_click_drag" in agent.chat_completions[0]["content"]

  def test_no_tools_no_tool_prompt(self):
    agent = agents.ToolAgent("Hi.")
    assert agent.chat_completions == [{"role": "system", "content": "Hi."}]

  def test_unknown_parser_and_mode_are_refused(self):
    with pytest.raises(ValueError, match="unknown tool parser 'qwn'"):
      agents.ToolAgent("", "qwn")
    with pytest.raises(ValueError, match="on_parse_error"):
      make(on_parse_error="ignore")


class TestObservations:
  def test_question(self):
    agent = make()
    agent.update_from_env({"question": "1+1=?"}, 0.0, False, {})
    assert agent.chat_completions[1:] == [{"role": "user", "content": "1+1=?"}]

  def test_tool_outputs(self):
    agent = make()
    agent.update_from_env(
      {"tool_outputs": {"a": "2", "b": "Error: x"}}, 0.0, False, {}
    )
    assert agent.chat_completions[1:] == [
      {
        "role": "user",
        "tool_call_id": "a",
        "content": "Tool returned result: 2",
      },
      {
        "role": "user",
        "tool_call_id": "b",
        "content": "Tool returned result: Error: x",
      },
    ]

  def test_text(self):
    agent = make()
    agent.update_from_env("hello", 0.0, False, {})
    agent.update_from_env({"text": "there"}, 0.0, False, {})
    assert contents(agent)[1:] == ["hello", "there"]

  def test_screenshot_with_instruction_is_image_then_text(self):
    agent = make()
    agent.update_from_env(
      {"screenshot": image(1), "instruction": "press OK", "text": "note"},
      0.0,
      False,
      {},
    )
    assert agent.chat_completions[1] == {
      "role": "user",
      "content": [
        {"type": "image", "image": image(1)},
        {"type": "text", "text": "press OK\nnote"},
      ],
    }

  def test_later_screenshot_is_the_image_only(self):
    agent = make()
    agent.update_from_env({"screenshot": image(1)}, 0.0, False, {})
    assert contents(agent)[1] == [{"type": "image", "image": image(1)}]

  def test_nothing_to_say_adds_no_message(self):
    agent = make()
    for empty in (None, {}, {"tool_outputs": {}}):
      agent.update_from_env(empty, 0.0, False, {})
    assert len(agent.chat_completions) == 1

  @pytest.mark.parametrize(
    "bad, reason",
    [
      ({"obs": 1}, "needs one of question.*got obs"),
      (3, "str or a dict"),
      ({"screenshot": b"png"}, "must be an ImageRef, got bytes"),
    ],
  )
  def test_unknown_observation_is_refused(self, bad, reason):
    with pytest.raises(ValueError, match=reason):
      make().update_from_env(bad, 0.0, False, {})


class TestEpisode:
  def test_two_turns_history_in_full(self):
    agent = make()
    agent.update_from_env(
      {"question": "1+1=?"}, 0.0, False, {"task": {"id": 7}}
    )
    action = agent.update_from_model(f"I add.\n{CALL}")
    (call,) = action.tool_calls
    assert (call.name, call.arguments) == ("calculator", {"expression": "1+1"})
    agent.update_from_env(
      {"tool_outputs": {call.call_id: "2"}}, 0.0, False, {"n": 1}
    )
    answer = agent.update_from_model("2")
    assert answer.action == "2"
    agent.update_from_env({}, 1.0, True, {"success": True})

    assert [m["role"] for m in agent.chat_completions] == [
      "system",
      "user",
      "assistant",
      "user",
      "assistant",
    ]
    assert contents(agent)[1:] == [
      "1+1=?",
      f"I add.\n{CALL}",
      "Tool returned result: 2",
      "2",
    ]
    first, second = agent.trajectory.steps
    assert agent.trajectory.task == {"id": 7}
    assert (
      first.thought == "I add." and first.model_response == f"I add.\n{CALL}"
    )
    assert first.observation == {"tool_outputs": {call.call_id: "2"}}
    assert (first.reward, first.done, first.info) == (0.0, False, {"n": 1})
    assert (second.reward, second.done) == (1.0, True)
    assert first.chat_completions == agent.chat_completions[:3]
    assert second.chat_completions == agent.chat_completions

  def test_first_observation_is_the_task_when_info_has_none(self):
    agent = make()
    agent.update_from_env({"question": "q"}, 0.0, False, {})
    assert agent.trajectory.task == {"question": "q"}

  def test_reset_forgets_everything_but_the_system_message(self):
    agent = make(on_parse_error="retry")
    play(agent, 2, text="nonsense")
    agent.reset()
    assert len(agent.chat_completions) == 1
    assert agent.trajectory.steps == [] and agent.trajectory.task is None
    agent.update_from_env({"question": "q"}, 0.0, False, {})
    assert contents(agent)[1] == "q"

  def test_trajectory_survives_json(self):
    agent = make()
    play(agent, 3)
    agent.trajectory.status = trajectory.TrajectoryStatus.FAILED
    text = json.dumps(agent.trajectory.to_json())
    back = trajectory.Trajectory.from_json(json.loads(text))
    assert [s.chat_completions for s in back.steps] == [
      list(s.chat_completions) for s in agent.trajectory.steps
    ]
    assert len(text) < 12_000  # Shared messages are written once.


class TestSharing:
  def test_messages_are_the_same_objects_every_turn(self):
    views = play(make(), 5)
    for before, after in zip(views, views[1:]):
      assert len(after) == len(before) + 2
      assert all(a is b for a, b in zip(before, after))

  def test_a_list_handed_out_does_not_grow(self):
    agent = make()
    before = agent.chat_completions
    agent.update_from_env({"question": "q"}, 0.0, False, {})
    assert len(before) == 1 and len(agent.chat_completions) == 2

  def test_steps_share_one_list(self):
    agent = make()
    play(agent, 50)
    views = [s.chat_completions for s in agent.trajectory.steps]
    assert len({id(v._messages) for v in views}) == 1  # pylint: disable=protected-access
    assert [len(v) for v in views] == list(range(3, 103, 2))

  def test_view_behaves_like_the_list_it_was(self):
    messages = [{"n": i} for i in range(4)]
    view = agents.MessageView(messages, 3)
    messages.append({"n": 9})
    assert view == messages[:3] and messages[:3] == view and view != messages
    assert view[-1] == {"n": 2} and view[1:] == messages[1:3]
    assert view[::-1] == messages[2::-1] and view + [1] == messages[:3] + [1]
    assert list(reversed(view)) == messages[2::-1] and view[5:] == []
    for index in (3, -4):
      with pytest.raises(IndexError):
        view[index]  # pylint: disable=pointless-statement


class TestWindow:
  @staticmethod
  def images(messages):
    return [
      p["image"]
      for m in messages
      if isinstance(m["content"], list)
      for p in m["content"]
      if p["type"] == "image"
    ]

  def test_only_the_newest_images_are_seen(self):
    agent = make(max_images=2)
    for turn, view in enumerate(play(agent, 6)):
      newest = [image(i) for i in range(max(0, turn - 1), turn + 1)]
      assert self.images(view) == newest

  def test_full_history_is_kept(self):
    agent, unlimited = make(max_images=2), make()
    play(agent, 6)
    play(unlimited, 6)
    assert list(agent.history) == unlimited.chat_completions
    assert len(agent.chat_completions) == len(unlimited.chat_completions)

  def test_dropped_image_becomes_a_note_beside_its_text(self):
    agent = make(max_images=1, image_note="(gone)")
    play(agent, 2)
    assert contents(agent)[1] == "(gone)\ngo"
    assert contents(agent)[3] == "(gone)"

  def test_rewrite_shows_as_another_prefix_and_older_snapshots_stay(self):
    agent = make(max_images=2)
    views = play(agent, 3)
    assert all(a is b for a, b in zip(views[0], views[1]))
    assert views[1][1] is not views[2][1]
    assert agent.trajectory.steps[1].chat_completions[:-1] == views[1]

  def test_stride_makes_rewrites_rare(self):
    agent = make(max_images=5, image_stride=4)
    play(agent, 20)
    assert agent.history_rewrites == 4  # At images 6, 10, 14 and 18.
    assert 2 <= len(self.images(agent.chat_completions)) <= 5

  @pytest.mark.parametrize(
    "kwargs", [{"max_images": 0}, {"max_images": 2, "image_stride": 3}]
  )
  def test_bad_window_is_refused(self, kwargs):
    with pytest.raises(ValueError, match="image"):
      make(**kwargs)


class TestMalformed:
  BROKEN = '<tool_call>\n{"name": \n</tool_call>'

  def test_plain_agent_answers_with_the_raw_text(self):
    agent = make()
    for text in ("The answer is 2.", self.BROKEN, ""):
      assert agent.update_from_model(text).action == text
    infos = [s.info for s in agent.trajectory.steps]
    assert infos[0] == {} and "bad JSON" in infos[1]["parse_errors"][0]

  def test_answer_leaves_reasoning_out(self):
    action = make().update_from_model("<think>1 and 1</think>\n\n2")
    assert action.action == "2"

  def test_retry_gives_no_calls_and_tells_the_policy(self):
    agent = make(on_parse_error="retry")
    action = agent.update_from_model(self.BROKEN)
    assert action.action == [] and action.tool_calls == []
    agent.update_from_env({"screenshot": image(1)}, 0.0, False, {"k": 1})
    parts = contents(agent)[-1]
    assert parts[0]["type"] == "image"
    assert parts[1]["text"].startswith("Error: bad JSON")
    step = agent.trajectory.steps[0]
    assert step.info["parse_errors"] and step.info["k"] == 1
    agent.update_from_model(CALL)
    agent.update_from_env({"screenshot": image(2)}, 0.0, False, {})
    assert len(contents(agent)[-1]) == 1  # Said once.

  def test_end_gives_the_text_and_records_the_error(self):
    agent = make(on_parse_error="end")
    assert agent.update_from_model("no call").action == "no call"
    assert agent.trajectory.steps[0].info["parse_errors"] == [
      "no tool call in the response"
    ]

  @pytest.mark.parametrize("mode", ["answer", "retry", "end"])
  def test_good_calls_beside_a_bad_one_are_kept(self, mode):
    agent = make(on_parse_error=mode)
    action = agent.update_from_model(self.BROKEN + CALL)
    assert len(action.tool_calls) == 1
    assert agent.trajectory.steps[0].info["parse_errors"]

  def test_what_is_not_text_is_refused(self):
    with pytest.raises(tool_parser.ToolParseError, match="must be a str"):
      make().update_from_model(None)
