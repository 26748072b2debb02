"""Every token that an outside agent's policy sampled is trained on once.

Random clients resample, rewrite history, interleave conversations and ask for
n answers; a slow search over all interactions says what each must extend.
"""

import itertools
import json

from hypothesis import given
from hypothesis import HealthCheck
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
from told_sessions import answer
from told_sessions import ASK
from told_sessions import CALL
from told_sessions import calling
from told_sessions import completion
from told_sessions import IMAGES
from told_sessions import new_session
from told_sessions import NEXT
from told_sessions import renderer
from told_sessions import say
from told_sessions import TOOLS
from told_sessions import user


def loose(message):
  """Returns the parts that must be equal, and the ids, which may be absent."""
  content = message.get("content") or ""
  if not isinstance(content, str):
    content = [p.get("text", p.get("image")) for p in content]
    if len(content) == 1 and isinstance(content[0], str):
      content = content[0]
  calls = message.get("tool_calls") or []
  call_values = []
  for call in calls:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
      arguments = json.loads(arguments)
    call_values.append((call["function"]["name"], arguments))
  ids = [c.get("id") for c in calls] or [message.get("tool_call_id")]
  return (message["role"], content, call_values), ids if all(ids) else None


def same(one, other):
  (value, ids), (other_value, other_ids) = loose(one), loose(other)
  return value == other_value and (not ids or not other_ids or ids == other_ids)


class Client:
  """Sends random requests and records what the store must hold."""

  def __init__(self, draw):
    self.draw = draw
    self.session = new_session()
    self.sent = []  # (interaction, messages, tools, canonical)
    self.logprobs = []
    self.serial = itertools.count(1)

  def one_of(self, *choices):
    return self.draw(st.sampled_from(choices))

  def new_messages(self):
    return self.one_of(
      [user("Go on.")],
      [{"role": "user", "content": "Go on."}],
      [user("Look", IMAGES[0], "here"), user(IMAGES[1])],
      [NEXT],
      [NEXT, {**NEXT, "tool_call_id": "d"}, user(IMAGES[1])],
      [say("A shot."), user("\nMore")],
      [],
    )

  def echo(self, interaction):
    """The answer as clients send it back, and whether as it was sampled."""
    reply = interaction.answer
    kind = self.one_of("told", "told", "dumped", "raw", "no ids")
    if kind == "raw":
      return say(interaction.text), True
    if kind == "dumped":
      reply = {**reply, "refusal": None, "audio": None}
      if isinstance(reply["content"], str) and reply["content"]:
        reply["content"] = [{"type": "text", "text": reply["content"]}]
      if reply.get("tool_calls"):
        call = reply["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        function = {**call["function"], "arguments": arguments}
        reply["tool_calls"] = [{**call, "function": function}]
        reply["content"] = ""
    elif kind == "no ids" and reply.get("tool_calls"):
      calls = [{**c, "id": None} for c in reply["tool_calls"]]
      reply = {**reply, "tool_calls": calls}
    plain = (
      not reply.get("tool_calls")
      and interaction.answer["content"] == interaction.text
    )
    return reply, plain

  def request(self):
    """(messages, tools, its chain is as sampled)"""
    kind = self.one_of("extend", "extend", "extend", "resample", "edit", "new")
    if not self.sent or kind == "new":
      return [*ASK, *self.new_messages()], self.one_of(None, TOOLS), True
    interaction, messages, tools, canonical = self.draw(
      st.sampled_from(self.sent)
    )
    if kind == "resample":
      return list(messages), tools, canonical
    reply, plain = self.echo(interaction)
    messages = [*messages, reply, *self.new_messages()]
    if kind == "edit":  # It may still extend something, or not.
      at = self.draw(st.integers(0, len(messages) - 1))
      messages[at] = self.one_of(user("Edited."), messages[at])
      tools = self.one_of(tools, None)
      return messages, tools, False
    return messages, tools, canonical and plain

  def sampled(self, messages):
    """(ids, they are what the template has)"""
    text = self.one_of("Click Save.", " trailing ", CALL, None)
    closed = self.one_of(True, True, False)
    if text is None:
      ids = self.draw(st.lists(st.integers(300, 1500), min_size=1, max_size=3))
      canonical = False
    else:
      start = renderer().render(messages).tokens
      rendered = renderer().render([*messages, say(text)], False).tokens
      ids = [*rendered[len(start) : -2]]
      canonical = rendered[: len(start)].tolist() == start.tolist()
    if closed:
      ids.append(renderer().end_of_turn_id)
    return ids, canonical

  def expected(self, messages, tools):
    """The interaction to extend, by trying all."""

    def covers(interaction):
      """Returns how many messages are the interaction's; None for none."""
      at = 0
      if interaction.before is not None:
        at = covers(interaction.before)
        if at is None:
          return None
      new = (
        interaction.new_messages[1:]
        if interaction.before
        else interaction.new_messages
      )
      end = at + len(new) + 1
      if end > len(messages):
        return None
      if not all(map(same, new, messages[at : end - 1])):
        return None
      message = messages[end - 1]
      fits = same(message, interaction.answer) or same(
        message, say(interaction.text)
      )
      return end if fits else None

    candidates = []
    for interaction, _, with_tools, _ in self.sent:
      end = covers(interaction) if (with_tools or []) == (tools or []) else None
      if end is not None:
        message, reply = loose(messages[end - 1]), loose(interaction.answer)
        rank = end, message == reply, message[0] == reply[0], interaction.index
        candidates.append((rank, interaction))
    return max(candidates, key=lambda f: f[0], default=(None, None))[1]

  def turn(self):
    messages, tools, canonical = self.request()
    before = self.expected(messages, tools)
    pending = self.session.prompt(messages, tools)
    assert pending.parent == (before and before.id)
    assert [loose(m) for m in pending.messages][-1] == loose(messages[-1])
    assert len(pending.messages) == len(messages)
    tokens, images = pending.prompt.tokens.tolist(), pending.prompt.images
    if before is None:
      rendered = renderer().render(messages)
      assert (tokens, images) == (rendered.tokens.tolist(), rendered.images)
      assert pending.num_reused == 0
      canonical = True
    else:
      old = [*before.prompt.tokens, *before.completion.tokens]
      covered = len(before.messages) + 1
      bridge = renderer().bridge(
        messages[covered:],
        last_sampled_is_eot=before.completion.tokens[-1]
        == renderer().end_of_turn_id,
      )
      assert tokens == [*old, *bridge.tokens]
      shifted = tuple(s.shifted(len(old)) for s in bridge.images)
      assert images == before.prompt.images + shifted
      assert pending.num_reused == len(old)
    if canonical:
      rendered = renderer().render(messages)
      assert (tokens, images) == (rendered.tokens.tolist(), rendered.images)
    for _ in range(self.one_of(1, 1, 1, 3)):
      ids, as_template = self.sampled(messages)
      logprobs = [-next(self.serial) / 1024 for _ in ids]
      text = renderer().decode(ids)
      reply = say(self.one_of(text, text.strip()))
      if text == CALL:
        reply = self.one_of(
          calling(f"c{next(self.serial)}"), calling("c"), calling(None)
        )
      untrained = self.one_of("", "", "temperature=0.5")
      interaction = self.session.add(
        pending,
        completion(ids, logprobs),
        assistant_message=reply,
        untrained=untrained,
      )
      assert interaction.text == text
      if not untrained:
        self.logprobs += logprobs
      self.sent.append(
        (interaction, messages, tools, canonical and as_template)
      )


def check_export(client, style):
  session = client.session
  exported = session.export(style)
  by_id = {i.id: i for i in session.interactions}
  trained = [t for e in exported for t in e.trained]
  assert sorted(trained) == sorted(
    i.id for i in session.interactions if not i.untrained
  )
  assert sum(e.untrained_tokens for e in exported) == sum(
    len(i.completion.tokens) for i in session.interactions if i.untrained
  )
  # Each sampled token has a log-prob of its own: none twice, none missing.
  got = np.concatenate(
    [e.sequence.logprobs[e.sequence.loss_mask] for e in exported]
  )
  assert sorted(got.tolist()) == sorted(client.logprobs)
  for e in exported:
    last, sequence = by_id[e.id], e.sequence
    want = [*last.prompt.tokens, *last.completion.tokens]
    assert sequence.tokens.tolist() == want
    assert sequence.images == last.prompt.images
    chain = (*last.ancestors, last)
    assert set(sequence.turn_ids.tolist()) == {
      interaction.index for interaction in chain
    }
    for interaction in chain:
      begin = len(interaction.prompt)
      where = slice(begin, begin + len(interaction.completion.tokens))
      is_trained = interaction.id in e.trained
      assert np.all(sequence.loss_mask[where] == is_trained)
      assert np.all(sequence.turn_ids[where] == interaction.index)
      assert (
        sequence.tokens[where].tolist()
        == interaction.completion.tokens.tolist()
      )
      if is_trained:
        got = sequence.logprobs[where]
        assert np.array_equal(got, interaction.completion.logprobs)
    total = sum(len(by_id[t].completion.tokens) for t in e.trained)
    assert sequence.num_sampled == total
    if style == "individual":
      assert e.trained == (() if last.untrained else (e.id,))
  if style == "individual":
    assert [e.id for e in exported] == list(by_id)
  else:
    parents = {i.parent for i in session.interactions}
    assert {e.id for e in exported} == set(by_id) - parents


@given(data=st.data(), turns=st.integers(1, 8))
@settings(
  max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_random_clients(data, turns):
  client = Client(data.draw)
  for _ in range(turns):
    client.turn()
  client.session.end()
  check_export(client, "individual")
  check_export(client, "concat")


@given(
  rewards=st.lists(st.none() | st.floats(-9, 9), min_size=1, max_size=6),
  discount=st.floats(0, 1),
)
@settings(max_examples=30, deadline=None)
def test_discounted_rewards_are_the_returns(rewards, discount):
  session = new_session()
  for index, reward in enumerate(rewards):
    answer(session, [user(str(index))], "ok", id=str(index))
    if reward is not None:
      session.set_reward(None, reward)
  want = [
    sum((r or 0) * discount**k for k, r in enumerate(rewards[at:]))
    for at in range(len(rewards))
  ]
  got = [e.reward for e in session.export(discount=discount)]
  np.testing.assert_allclose(got, want, atol=1e-9)
  session.apply_reward_discount(discount)
  assert [i.reward for i in session.interactions] == got
  # Once only, whatever is asked afterwards.
  assert [e.reward for e in session.export(discount=0.1)] == got
