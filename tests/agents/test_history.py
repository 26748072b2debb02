"""Histories: in full, the newest screenshots, and a summary of older turns."""

import chat_families
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn.agents import history as history_lib
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser

QWEN = tool_parser.make_tool_parser("computer_use")


def image(n):
  return trajectory.ImageRef(f"{n:064x}", 224, 160)


def click(thought):
  call = trajectory.ToolCall(
    "computer_use", {"action": "left_click", "coordinate": [1, 2]}
  )
  return QWEN.format([call], thought)


def play(agent, turns):
  """Returns the view of the policy at each of `turns` turns."""
  agent.update_from_env({"screenshot": image(0), "instruction": "Buy milk."})
  views = []
  for i in range(turns):
    views.append(list(agent.chat_completions))
    agent.update_from_model(click(f"Hm.\nAction: Press {i}."))
    agent.update_from_env({"screenshot": image(i + 1)})
  return views


def images_of(messages):
  return [
    part["image"]
    for message in messages
    if isinstance(message["content"], list)
    for part in message["content"]
    if part["type"] == "image"
  ]


def text_of(message):
  content = message["content"]
  if isinstance(content, str):
    return content
  return "\n".join(p["text"] for p in content if p["type"] == "text")


def make(**kwargs):
  return agents.ToolAgent("Be brief.", "computer_use", **kwargs)


class TestSummary:
  def test_older_turns_become_lines_of_the_task_s_message(self):
    views = play(make(max_images=2, list_dropped_turns=True), 5)
    assert [len(messages) for messages in views] == [2, 4, 4, 4, 4]
    assert text_of(views[1][1]) == "Buy milk."
    last = views[4]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "user"]
    assert text_of(last[1]) == (
      "Buy milk.\n\nPrevious actions:\n"
      "Step 1: Press 0.\nStep 2: Press 1.\nStep 3: Press 2."
    )
    assert images_of(last) == [image(3), image(4)]
    assert last[2]["content"] == click("Hm.\nAction: Press 3.")
    assert text_of(last[3]) == ""

  def test_one_screenshot_is_the_task_and_the_list_of_steps(self):
    views = play(make(max_images=1, list_dropped_turns=True), 3)
    assert [len(messages) for messages in views] == [2, 2, 2]
    assert text_of(views[2][1]).endswith("Step 1: Press 0.\nStep 2: Press 1.")

  def test_a_stride_rewrites_rarely(self):
    agent = make(max_images=4, image_stride=3, list_dropped_turns=True)
    views = play(agent, 12)
    assert agent.history_rewrites == 3
    for before, after in zip(views, views[1:]):
      if len(after) > len(before):
        assert all(a is b for a, b in zip(before, after))

  def test_the_whole_episode_is_kept(self):
    agent, full = make(max_images=2, list_dropped_turns=True), make()
    play(agent, 6)
    play(full, 6)
    assert list(agent.history) == full.chat_completions

  def test_a_turn_without_a_thought_is_its_call_and_is_cut(self):
    agent = make(max_images=1, list_dropped_turns=True)
    agent.update_from_env({"screenshot": image(0), "instruction": "go"})
    agent.update_from_model(click(None) + "x" * 999)
    agent.update_from_env({"screenshot": image(1)})
    line = text_of(agent.chat_completions[1]).splitlines()[-1]
    assert line.startswith("Step 1: </tool_call>xxx") and len(line) < 320

  def test_errors_of_the_kept_turn_stay(self):
    agent = make(max_images=1, list_dropped_turns=True)
    agent.update_from_env({"screenshot": image(0), "instruction": "go"})
    agent.update_from_model(click("a"))
    agent.update_from_env({"screenshot": image(1), "text": "Error: no"})
    assert text_of(agent.chat_completions[1]) == (
      "Error: no\ngo\n\nPrevious actions:\nStep 1: a"
    )

  def test_needs_a_window(self):
    with pytest.raises(ValueError, match="needs max_images"):
      make(list_dropped_turns=True)


def by_tree(**settings):
  """An agent that reads three trees; its views turn by turn."""
  agent = agents.ToolAgent("", "browsergym", observation="axtree", **settings)
  agent.update_from_env({"instruction": "Sign in.", "axtree": "PAGE 0"})
  views = []
  for turn in range(3):
    views.append(list(agent.chat_completions))
    agent.update_from_model(f"click('{turn}')")
    agent.update_from_env({"axtree": f"PAGE {turn + 1}", "text": "Error: no"})
  return views


class TestTrees:
  def test_a_tree_stands_between_the_task_and_the_errors(self):
    views = by_tree()
    assert views[0][-1]["content"] == "Sign in.\nPAGE 0"
    assert views[1][-1]["content"] == "PAGE 1\nError: no"
    assert [m["content"] for m in views[2] if "PAGE" in m["content"]] == [
      "Sign in.\nPAGE 0",
      "PAGE 1\nError: no",
      "PAGE 2\nError: no",
    ]

  def test_only_the_newest_trees_stay(self):
    last = by_tree(max_images=1)[2]
    assert [m["content"] for m in last if m["role"] == "user"] == [
      "Sign in.\n(an older page)",
      "(an older page)\nError: no",
      "PAGE 2\nError: no",
    ]

  def test_a_summary_keeps_the_task_and_the_steps(self):
    last = by_tree(max_images=1, list_dropped_turns=True)[2]
    assert [m["role"] for m in last] == ["system", "user"]
    assert last[1]["content"] == (
      "PAGE 2\nError: no\n\nSign in.\n\nPrevious actions:\n"
      "Step 1: click('0')\nStep 2: click('1')"
    )

  def test_a_screenshot_s_tree_goes_with_it(self):
    agent = agents.ToolAgent("", "browsergym", observation="both", max_images=1)
    for n in range(2):
      agent.update_from_env({"screenshot": image(n), "axtree": f"PAGE {n}"})
      agent.update_from_model("click('1')")
    texts = [text_of(m) for m in agent.chat_completions if m["role"] == "user"]
    assert [t.strip() for t in texts] == ["(an older screenshot)", "PAGE 1"]
    assert images_of(agent.chat_completions) == [image(1)]


MESSAGES = st.lists(
  st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 3)),
  max_size=30,
)


@settings(max_examples=200)
@given(
  messages=MESSAGES,
  window=st.integers(1, 4),
  stride=st.integers(1, 4),
  lists=st.booleans(),
)
def test_the_newest_images_are_seen_in_order(messages, window, stride, lists):
  history = history_lib.MessageHistory(
    window, min(stride, window), list_dropped_turns=lists
  )
  history.append({"role": "system", "content": "s"})
  every, lines = [], []
  for n, (role, images) in enumerate(messages):
    if role == "assistant":
      lines.append(f"turn {n}")
      history.append({"role": role, "content": f"did {n}"}, lines[-1])
    else:
      refs = [image(100 * n + i) for i in range(images)]
      every += refs
      parts = [{"type": "image", "image": ref} for ref in refs]
      history.append(
        {
          "role": role,
          "content": [*parts, {"type": "text", "text": f"see {n}"}],
        }
      )
    visible = images_of(history.seen)
    assert len(visible) <= max(window, images)
    assert visible == every[len(every) - len(visible) :]
    assert history.seen[0] == {"role": "system", "content": "s"}
    # Every turn remains, as its messages or as a line.
    text = "\n".join(map(text_of, history.seen))
    for line in lines:
      assert line in text or line.replace("turn", "did") in text
  assert len(history.full) == len(messages) + 1


class TestOlderScreenshots:
  """GLM-4.5V's history: those before the newest at half their sides."""

  def agent(self, **options):
    store = images_lib.ImageStore()
    options |= {"older_scale": 0.5, "image_store": store}
    return tool_agent.ToolAgent("s", "glm_v", **options), store

  def play(self, agent, store, turns):
    views = []
    for turn in range(turns):
      shot = store.put(np.full((48, 61, 3), turn, np.uint8))
      agent.update_from_env({"screenshot": shot, "instruction": f"t{turn}"})
      views.append(agent.chat_completions)
      agent.update_from_model(f"turn {turn}")
    return views

  def sizes(self, messages):
    return [
      (part["image"].width, part["image"].height)
      for message in messages
      if isinstance(message["content"], list)
      for part in message["content"]
      if part["type"] == "image"
    ]

  def test_all_but_the_newest_are_half(self):
    agent, store = self.agent(max_images=5, list_dropped_turns=True)
    for turn, messages in enumerate(self.play(agent, store, 8)):
      older = min(turn, 4)
      assert self.sizes(messages) == [(30, 24)] * older + [(61, 48)]
    assert agent.history_rewrites == 7  # Each turn's but the first.
    # In full, they are as they were.
    assert self.sizes(agent.history) == [(61, 48)] * 8
    (first, *_) = [m for m in messages if isinstance(m["content"], list)]
    older = first["content"][0]["image"]
    assert np.all(store.get(older) == 3)  # Of the fourth turn.

  def test_without_a_window_they_are_half_too(self):
    agent, store = self.agent()
    (*_, last) = self.play(agent, store, 3)
    assert self.sizes(last) == [(30, 24), (30, 24), (61, 48)]

  def test_the_template_has_a_placeholder_for_each_at_its_own_size(self):
    agent, store = self.agent()
    (*_, last) = self.play(agent, store, 3)
    family = chat_families.FAMILIES["glm_v"]
    prompt = chat_families.renderer(family).render(last)
    assert (prompt.tokens.tolist(), prompt.images) == chat_families.expected(
      family, last
    )
    assert [span.num_tokens for span in prompt.images] == [
      chat_families.image_tokens(*size) for size in self.sizes(last)
    ]

  @pytest.mark.parametrize(
    "options, words",
    [
      ({"older_scale": 0.0}, "in \\(0, 1\\], got 0"),
      ({"older_scale": 1.5}, "in \\(0, 1\\], got 1.5"),
      ({"older_scale": 0.5}, "needs an image_store"),
    ],
  )
  def test_what_cannot_be_is_refused(self, options, words):
    with pytest.raises(ValueError, match=words):
      tool_agent.ToolAgent("s", "glm_v", **options)


class TestPolicySummaries:
  """`agent.history=summary`: what the policy wrote stands for its turns."""

  def summarized(self, turns, **kwargs):
    agent = make(summary_at=100, **kwargs)
    play(agent, turns)
    request = list(agent.summary_request(100))
    agent.update_from_summary("I pressed 0 and 1.")
    return agent, request

  def test_no_summary_is_requested_below_the_bound_or_without_one(self):
    agent = make(summary_at=100)
    play(agent, 1)
    assert agent.summary_request(99) is None
    assert not agent.is_summarizing
    assert make().summary_request(10**9) is None

  def test_the_request_ends_the_history_and_the_answer_is_a_turn(self):
    agent, request = self.summarized(2, summary_prompt="Sum up.")
    assert request[-1] == {"role": "user", "content": "Sum up."}
    assert [m["role"] for m in request[-3:]] == ["assistant", "user", "user"]
    step = agent.current_step
    assert step.info == {"summary": True} and step.action.tool_calls == []
    assert list(step.chat_completions)[:-1] == request
    assert step.chat_completions[-1]["content"] == step.model_response
    # The screen before the next turn is the one before the summary.
    assert step.observation == agent.trajectory.steps[-2].observation

  def test_task_summary_and_newest_screenshot_are_left(self):
    agent, request = self.summarized(2)
    system, user = agent.chat_completions
    assert system is request[0]
    assert images_of([user]) == [image(2)]
    assert text_of(user) == "Buy milk.\n\nI pressed 0 and 1."
    assert agent.history_rewrites == 1
    # All of it was said.
    assert len(agent.history) == len(request) + 1

  @pytest.mark.parametrize("count", [1, 2, 3, 9])
  def test_as_many_screenshots_stay_as_asked_for(self, count):
    agent, _ = self.summarized(3, summary_images=count)
    newest = [image(i) for i in range(4)][-count:]
    assert images_of(agent.chat_completions) == newest

  def test_later_turns_extend_it_and_a_second_one_replaces_the_first(self):
    agent, _ = self.summarized(2)
    before = list(agent.chat_completions)
    agent.update_from_model(click("Hm."))
    agent.update_from_env({"screenshot": image(7)})
    assert agent.chat_completions[:2] == before
    request = agent.summary_request(100)
    assert "I pressed 0" in text_of(request[1])
    agent.update_from_summary("<think>So?</think>\n\nAll pressed. ")
    (user,) = agent.chat_completions[1:]
    assert text_of(user) == "Buy milk.\n\nAll pressed."
    assert images_of([user]) == [image(7)]

  def test_text_alone_and_outputs_of_tools(self):
    agent = make(summary_at=1)
    agent.update_from_env({"question": "What is 2 + 2?"})
    agent.update_from_model(click("Hm."))
    agent.update_from_env({"tool_outputs": {"a": "4", "b": "5"}})
    agent.summary_request(1)
    agent.update_from_summary("It is 4.")
    first, second = agent.chat_completions[1:]
    assert first["tool_call_id"] == "a" and second["tool_call_id"] == "b"
    assert first["content"] == (
      "Tool returned result: 4\n\nWhat is 2 + 2?\n\nIt is 4."
    )
    assert second["content"] == "Tool returned result: 5"
