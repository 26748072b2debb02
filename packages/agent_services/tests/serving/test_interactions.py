"""Records, refusals and limits of an outside agent's session."""

import contextlib
import dataclasses
import functools
import json

from agent_services.serving.endpoints import session_routes
from agent_services.serving.sessions import interactions
from agent_services.serving.sessions import session_store
import numpy as np
import pytest
from told_sessions import answer
from told_sessions import ASK
from told_sessions import CALL
from told_sessions import calling
from told_sessions import Clock
from told_sessions import completion
from told_sessions import IMAGES
from told_sessions import new_session
from told_sessions import NEXT
from told_sessions import renderer
from told_sessions import say
from told_sessions import spoken
from told_sessions import TOOLS
from told_sessions import user
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import trajectory


def test_three_turns_with_the_last_rewarded():
  session = new_session()
  one = answer(session, ASK, CALL, calling("c"))
  history = [*ASK, calling("c", arguments={"x": 1}, content=""), NEXT]
  two = answer(session, history, "Half", closed=False)
  history += [say("Half"), user("Go on.")]
  three = answer(session, history, "Done.")
  assert (two.parent, three.parent) == (one.id, two.id)
  # The policy was cut in the second turn; the bridge closes it.
  end = renderer().end_of_turn_id
  assert three.extension.tokens[0] == end != two.extension.tokens[0]
  session.set_reward(None, 1)
  assert [e.reward for e in session.export(discount=0.5)] == [0.25, 0.5, 1]
  assert [e.reward for e in session.export(discount=None)] == [0, 0, 1]
  (exported,) = session.export("concat")
  assert exported.trained == (one.id, two.id, three.id)
  assert session.get(three.id).reward == 1
  assert session.get().id == three.id


def test_siblings_are_told_apart_by_what_is_sent_back():
  session = new_session()
  pending = session.prompt(ASK)
  messages_sent = [calling("c"), calling("d"), calling("d"), calling(None)]
  siblings = [
    session.add(pending, spoken(CALL), assistant_message=t)
    for t in messages_sent
  ]

  def parent(message, **kwargs):
    return session.prompt([*ASK, message, NEXT], **kwargs).parent

  assert parent(calling("c")) == siblings[0].id
  assert parent(calling("d")) == siblings[2].id  # The newest of equals.
  assert parent(calling("e")) == siblings[3].id  # The ids of one are unknown.
  assert parent(calling(None)) == siblings[3].id
  assert parent(say(CALL)) == siblings[3].id
  assert parent(calling("c", '{ "x":1 }')) == siblings[0].id
  assert parent(calling("c", '{"x": 2}')) is None
  assert parent(calling("c"), tools=TOOLS) is None
  assert parent(calling("c"), tools=[]) == siblings[0].id
  # Told so goes before sampled so.
  first = answer(session, [user("Hi")], "yes")
  second = answer(session, [user("Hi")], " yes ", say("yes"))
  third = answer(session, [user("Hi")], "yes", say("no"))
  ask = lambda text: session.prompt([user("Hi"), say(text)]).parent
  assert (ask("yes"), ask(" yes "), ask("no")) == (
    second.id,
    second.id,
    third.id,
  )
  assert first.id not in (ask("yes"), ask("no"))


def test_a_shared_prefix_is_trained_in_the_first_leaf_only():
  session = new_session()
  root = answer(session, ASK, "Root")
  pending = session.prompt([*ASK, say("Root"), user("Go on.")])
  leaves = [
    session.add(pending, spoken(t), assistant_message=say(t)) for t in "ab"
  ]
  first, second = session.export("concat")
  assert first.trained == (root.id, leaves[0].id)
  assert second.trained == (leaves[1].id,)
  where = slice(len(root.prompt), len(root.prompt) + 2)
  assert not second.sequence.loss_mask[where].any()
  assert np.all(second.sequence.versions[where] == -1)
  assert np.all(second.sequence.logprobs[where] == 0)


def test_what_was_recorded_does_not_change_with_the_clients_objects():
  session = new_session()
  messages = [user("Save.", IMAGES[0])]
  reply = calling("c", arguments={"x": 1})
  interaction = answer(session, messages, CALL, reply)
  sent_back = [user("Save.", IMAGES[0]), calling("c"), NEXT]
  messages[0]["content"][0]["text"] = "Delete."
  reply["tool_calls"][0]["function"]["arguments"]["x"] = 9
  assert session.prompt(sent_back).parent == interaction.id
  assert interaction.messages[0]["content"][0]["text"] == "Save."
  assert json.loads(
    interaction.answer["tool_calls"][0]["function"]["arguments"]
  ) == {"x": 1}


def test_finding_the_parent_costs_a_step_a_message(monkeypatch):
  session = new_session(max_interactions=401)
  history = [user("Begin.")]
  for turn in range(40):
    for number in range(5):  # Resampled with equal answers.
      answer(session, history, "ok", id=f"{turn}.{number}")
      answer(session, history, CALL, calling(f"{turn}.{number}"))
    history += [calling(f"{turn}.{turn % 5}"), NEXT]
  steps = []
  node = interactions.Node
  follow = node.follow
  monkeypatch.setattr(
    node, "follow", lambda n, k: steps.append(k) or follow(n, k)
  )
  pending = session.prompt(history)
  assert len(pending.ancestors) == 40
  assert len(steps) == len(history) + 1  # And one for the tools.


@pytest.mark.parametrize(
  ("tokens", "logprobs", "versions", "says"),
  [
    ([], None, None, "no token"),
    ([-4], None, None, "negative id"),
    ([7, 8], [-1, np.nan], None, "finite"),
    ([7, 8], [-1, -np.inf], None, "finite"),
    ([7, 8], [-1, 0.01], None, "<= 0"),
    ([7, 8], None, [0, -1], "version"),
    ([7, "image"], None, None, "placeholder"),
  ],
)
def test_what_cannot_be_trained_on_is_refused(tokens, logprobs, versions, says):
  session = new_session()
  tokens = [renderer().image_token_id if t == "image" else t for t in tokens]
  pending = session.prompt(ASK)
  with pytest.raises(interactions.InteractionError, match=says) as caught:
    session.add(
      pending,
      completion(tokens, logprobs, versions),
      assistant_message=say("x"),
    )
  assert caught.value.code == "bad_completion"
  assert session.interactions == () and session.export("concat") == []
  interaction = session.add(pending, spoken("x"), assistant_message=say("x"))
  assert session.prompt([*ASK, say("x")]).parent == interaction.id


@contextlib.contextmanager
def refused(code):
  with pytest.raises(interactions.InteractionError) as caught:
    yield caught
  assert caught.value.code == code


def test_each_refusal_has_its_code_and_changes_nothing():
  session = new_session(max_interactions=2)
  pending = session.prompt(ASK)
  add = functools.partial(session.add, pending, spoken("x"))
  with refused("unknown_interaction"):
    session.set_reward(None, 1.0)
  interaction = add(assistant_message=say("x"), id="a")
  with refused("duplicate_interaction"):
    add(assistant_message=say("x"), id="a")
  for message in ("x", user("x")):
    with refused("bad_message"):
      add(assistant_message=message)
  other = session_store.ServedSession(renderer(), "t")
  with refused("unknown_prompt"):
    other.add(pending, spoken("x"), assistant_message=say("x"))
  for reward in (np.nan, np.inf, -np.inf, 1e39, "1", None):
    with refused("bad_reward"):
      session.set_reward("a", reward)
  with refused("unknown_interaction"):
    session.set_reward("b", 1.0)
  for discount in (-0.1, 1.1, np.nan, "1"):
    with refused("bad_discount"):
      session.apply_reward_discount(discount)
  with refused("bad_style"):
    session.export("tree")
  assert session.interactions == (interaction,)
  add(assistant_message=say("x"))
  with refused("session_full"):
    add(assistant_message=say("x"))
  with refused("session_full"):
    session.prompt(ASK)


@pytest.mark.parametrize(
  "messages",
  [
    [],
    ["hello"],
    [{"content": "no role"}],
    [{"role": "robot", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}],
    [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
    [{"role": "user", "content": [{"type": "image", "image": []}]}],
    [{"role": "assistant", "tool_calls": ["click"]}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [calling("c", arguments={"x": object()})],
  ],
)
def test_messages_that_cannot_be_read_are_refused(messages):
  with refused("bad_message"):
    new_session().prompt(messages)


def test_arguments_that_are_no_json_match_as_text():
  session = new_session()
  for text in ("{", "[" * 100_000, "1" * 5000):
    interaction = answer(session, ASK, CALL, calling("c", text))
    again = [*ASK, calling("c", text), NEXT]
    assert session.prompt(again).parent == interaction.id
  with refused("bad_message"):
    session.prompt(ASK, tools=[object()])


def test_an_ended_or_discounted_session_takes_no_more():
  for stop, code in (
    (lambda s: s.end(), "session_ended"),
    (lambda s: s.apply_reward_discount(1.0), "reward_already_discounted"),
  ):
    session = new_session()
    pending = session.prompt(ASK)
    answer(session, ASK, "x")
    session.set_reward(None, 2.0)
    stop(session)
    with refused(code):
      session.prompt(ASK)
    with refused(code):
      session.add(pending, spoken("x"), assistant_message=say("x"))
    assert [e.reward for e in session.export("concat")] == [2.0]
  with refused("reward_already_discounted"):
    session.apply_reward_discount(1.0)
  with refused("reward_already_discounted"):
    session.set_reward(None, 1.0)


def test_store_limits_expires_and_drops():
  clock = Clock()
  store = session_store.SessionStore(
    renderer(), max_sessions=2, timeout_s=10, clock=clock
  )
  one, two = store.start("task"), store.start()
  assert one.task_id == "task"
  assert len({one.id, one.key, two.id, two.key}) == 4
  assert store.get(one.id) is store.by_key(one.key) is one
  with refused("capacity"):
    store.start()
  with refused("unknown_session"):
    store.get(one.key)
  with refused("unknown_session") as caught:
    store.by_key("guess")
  assert "guess" not in str(caught.value)
  clock.now += 6
  answer(two, ASK, "x")
  clock.now += 6
  assert store.sweep() == [one.id]
  assert (one.ended, two.ended) == (True, False)
  assert store.sweep(clock.now + 5) == [two.id]
  assert len(two.export()) == 1  # Still there …
  assert len(store) == 2
  assert store.sweep(clock.now + 15) == []
  assert len(store) == 0  # … and dropped after as long again.
  with refused("unknown_session"):
    store.by_key(two.key)
  three = store.start()
  store.end(three.id)
  assert three.ended
  store.drop(three.id)
  store.drop("unknown")
  assert len(store) == 0
  with pytest.raises(ValueError, match="max_sessions"):
    session_store.SessionStore(renderer(), max_sessions=0)
  with pytest.raises(ValueError, match="timeout_s"):
    session_store.SessionStore(renderer(), timeout_s=np.nan)


def test_tensor_dict_is_a_row_of_areals_batch():
  session = new_session()
  interaction = answer(session, ASK, "x")
  answer(session, [user("Hi")], "y")
  session.set_reward(interaction.id, 0.5)
  pictured, plain = session.export(discount=0.0)
  all_spans = []

  def multi_modal(spans):
    all_spans.extend(spans)
    return {"pixel_values": 1, "image_grid_thw": 2}

  row = interactions.to_tensor_dict(pictured, multi_modal)
  length = len(pictured.sequence)
  for name, dtype in (
    ("input_ids", np.int32),
    ("attention_mask", np.bool_),
    ("loss_mask", np.int32),
    ("logprobs", np.float32),
    ("versions", np.int32),
  ):
    assert row[name].shape == (1, length) and row[name].dtype == dtype
  assert row["rewards"].dtype == np.float32
  assert row["rewards"].tolist() == [0.5]
  assert row["attention_mask"].all()
  prompt = len(interaction.prompt)
  assert row["loss_mask"][0].tolist() == [0] * prompt + [1] * (length - prompt)
  assert set(row["versions"][0, :prompt].tolist()) == {-1}
  assert set(row["versions"][0, prompt:].tolist()) == {3}
  assert not row["logprobs"][0, :prompt].any()
  assert all_spans == list(pictured.sequence.images)
  assert row["multi_modal_input"] == [{"pixel_values": 1, "image_grid_thw": 2}]
  assert interactions.to_tensor_dict(plain)["multi_modal_input"] == [{}]
  with pytest.raises(ValueError, match="multi_modal"):
    interactions.to_tensor_dict(pictured)


@pytest.mark.parametrize("style", interactions.STYLES)
def test_entropies_go_the_whole_way_of_an_export(style):
  """As a run's own server tells them, and its client reads them."""
  session = new_session()
  messages = list(ASK)
  entropies = []
  for text in ("one", "two"):
    completion = spoken(text)
    entropies.append(
      np.linspace(0.25, 2.0, len(completion.tokens), dtype=np.float32)
    )
    completion = dataclasses.replace(completion, entropies=entropies[-1])
    session.add(
      session.prompt(messages), completion, assistant_message=say(text)
    )
    messages += [say(text), user("Go on.")]
  exported = json.loads(
    b"".join(session_routes._encoded(session.exporter(style, 1.0)))
  )
  sequences = [
    proxy.sequence_of(one) for one in exported["interactions"].values()
  ]
  assert sequences == [one.sequence for one in session.export(style=style)]
  trained = [s.entropies[s.loss_mask] for s in sequences]
  np.testing.assert_array_equal(
    np.concatenate(trained), np.concatenate(entropies)
  )
  # One answer without them, and its sequence has none.
  answer(session, messages, "three")
  last = session.export(style=style)[-1].sequence
  assert last.entropies is None
  exported = json.loads(
    b"".join(session_routes._encoded(session.exporter(style, 1.0)))
  )
  silent = list(exported["interactions"].values())[-1]
  assert "entropies" not in silent and "entropies" not in silent["tensor_dict"]
  assert proxy.sequence_of(silent).entropies is None


def test_rows_of_placeholders_survive_an_export():
  ref = trajectory.ImageRef("0" * 64, 4, 4)
  sequence = trajectory.TokenSequence(
    [7, 7, 6, 7, 7, 9],
    [False] * 5 + [True],
    [0.0] * 5 + [-0.5],
    [-1] * 5 + [0],
    [0] * 6,
    (trajectory.ImageSpan(ref, 0, 5, 2),),
  )
  one = interactions.Exported("i", 1.0, sequence, ("i",))
  text = b"".join(session_routes._encoded([one]))  # pylint: disable=protected-access
  exported = json.loads(text)["interactions"]["i"]
  assert proxy.sequence_of(exported).images == sequence.images
