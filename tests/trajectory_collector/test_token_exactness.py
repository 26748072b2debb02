"""The property that training stands on, with the real renderer and agent.

Random episodes: text and screenshots, tool outputs, completions that end,
are cut, or do not survive re-tokenising, agents that rewrite their history.
"""

import asyncio
import dataclasses
import functools
import pathlib

import collector_fakes as fakes
from hypothesis import given
from hypothesis import HealthCheck
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import tokenizers
import tunix.rl.multi_turn as package
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.agents import ToolAgent
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.trajectory_collector import sequence_builder

PROPERTY = settings(
  max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@functools.lru_cache(1)
def renderer():
  path = pathlib.Path(package.__file__).parent
  tokenizer = tokenizers.Tokenizer.from_file(
    str(path / "policy/data/tiny_vl/tokenizer.json")
  )
  return qwen.QwenRenderer(tokenizer, lambda w, h: (w // 32) * (h // 32))


@functools.lru_cache(1)
def vocabulary():
  made = renderer()
  size = made._encoder.get_vocab_size()
  return [
    i
    for i in range(size)
    if i not in (made.image_token_id, made.end_of_turn_id)
  ]


TEXTS = st.one_of(
  st.text(max_size=12),
  st.sampled_from(
    [
      "",
      "\n",
      "Click Save.",
      "<|im_end|>",
      "<|image_pad|>",
      "<tool_response>",
      " trailing ",
    ]
  ),
)
IMAGES = st.builds(
  trajectory_lib.ImageRef,
  sha256=st.sampled_from(["0" * 64, "1" * 64, "ab" * 32]),
  width=st.sampled_from([32, 64, 96]),
  height=st.sampled_from([32, 64]),
)
OBSERVATIONS = st.fixed_dictionaries(
  {"text": TEXTS.filter(bool)},
  optional={
    "screenshot": IMAGES,
    "tool_outputs": st.dictionaries(
      st.sampled_from(["a", "b"]), TEXTS, max_size=2
    ),
  },
)


@dataclasses.dataclass(frozen=True)
class Turn:
  """What happens in a turn."""

  text: str | None  # Sampled canonically when set …
  raw: tuple[int, ...]  # … otherwise these positions in the vocabulary.
  ends: bool
  observation: dict
  rewrite: str


TURNS = st.lists(
  st.builds(
    Turn,
    text=st.one_of(
      st.none(),
      TEXTS,
      st.just(
        '<tool_call>\n{"name": "click", "arguments": {"x": 1}}\n</tool_call>'
      ),
    ),
    raw=st.lists(st.integers(0, 10**6), min_size=1, max_size=8).map(tuple),
    ends=st.booleans(),
    observation=OBSERVATIONS,
    rewrite=st.sampled_from(["no"] * 6 + ["edit", "cut", "answer"]),
  ),
  min_size=1,
  max_size=7,
)


class RewritingAgent(ToolAgent):
  """A ToolAgent that sometimes changes what was said."""

  def __init__(self, turns, **kwargs):
    self.turns = turns
    super().__init__("Use the computer.", on_parse_error="retry", **kwargs)

  def reset(self):
    super().reset()
    self.override = None
    self.turn = 0
    self.expected_rewrites = 0

  @property
  def chat_completions(self):
    messages = super().chat_completions
    if self.override is None:
      return messages
    kept, length = self.override
    return kept + list(messages[length:])

  def update_from_env(self, observation, reward=0.0, done=False, info=None):
    super().update_from_env(observation, reward, done, info)
    if not self.trajectory.steps:
      return
    rewrite = self.turns[self.turn].rewrite
    self.turn += 1
    if rewrite == "no":
      return
    messages = [dict(m) for m in self.chat_completions]
    length = len(super().chat_completions)
    if rewrite == "edit":
      messages[0]["content"] = f"Rewritten after turn {self.turn}."
    elif rewrite == "cut":
      messages = [messages[0], {"role": "user", "content": "Go on."}]
    else:
      last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
      messages[last]["content"] += " (edited)"
    self.override = (messages, length)
    if not done:
      self.expected_rewrites += 1


class Env:
  runs_inline = True

  def __init__(self, first, turns):
    self.first, self.turns, self.count = first, turns, 0

  async def reset(self):
    return self.first, {}

  async def step(self, action):
    turn = self.turns[self.count]
    self.count += 1
    done = self.count == len(self.turns)
    return turn.observation, float(done), done, {}

  async def close(self):
    pass


def sampled_ids(turn):
  if turn.text is None:
    ids = [vocabulary()[i % len(vocabulary())] for i in turn.raw]
  else:
    ids = renderer().encode(turn.text).tolist()
  return ids + [renderer().end_of_turn_id] if turn.ends or not ids else ids


class Sampler(fakes.TokenClient):
  """Samples the turns; log-probs number the tokens of the episode."""

  def __init__(self, turns):
    super().__init__(lambda turn, _: sampled_ids(turns[turn]))
    self.completions = []
    self.images = []
    self.count = 0

  async def generate(self, prompt, sampling, *, session):
    done = await super().generate(prompt, sampling, session=session)
    n = len(done.tokens)
    self.images.append(prompt.images)
    numbered = policy_client.Completion(
      done.tokens,
      -np.arange(self.count + 1, self.count + n + 1) / 1024,
      np.full(n, len(self.completions)),
      done.finish_reason,
    )
    self.count += n
    self.completions.append(numbered)
    return numbered


@PROPERTY
@given(
  first=OBSERVATIONS,
  turns=TURNS,
  max_images=st.sampled_from([None, None, 1, 2]),
  max_new_tokens=st.sampled_from([2, 64]),
)
def test_token_exactness(first, turns, max_images, max_new_tokens):
  seen = []
  agent = RewritingAgent(turns, max_images=max_images)
  client = Sampler(turns)
  model = tc.PolicyModel(
    client,
    renderer(),
    policy_client.SamplingParams(max_new_tokens=max_new_tokens),
  )

  class Watching(tc.TrajectoryCollectEngine):
    async def _reply(self, messages, turn):
      seen.append([sequence_builder._snapshot(m) for m in messages])
      return await super()._reply(messages, turn)

  result = asyncio.run(
    Watching(
      agent, Env(first, turns), model, max_steps=len(turns), gamma=0.5
    ).collect()
  )
  assert result.error is None
  assert len(client.prompts) == len(turns) == len(result.steps)

  # Every sampled token is trainable in exactly one sequence, in order, with
  # its own log-prob and version; nothing else is.
  for name in ("tokens", "logprobs", "versions"):
    trained = [getattr(s, name)[s.loss_mask] for s in result.sequences]
    sampled = [getattr(c, name) for c in client.completions]
    assert np.array_equal(np.concatenate(trained), np.concatenate(sampled))
  assert sum(s.num_sampled for s in result.sequences) == client.count

  # The text the agent saw is the text of the ids.
  for step, done in zip(result.steps, client.completions):
    assert step.model_response == renderer().decode(done.tokens)

  # Prompts grow by what was sampled and what came since, or start anew.
  sessions = [session for session, _ in client.requests]
  for turn in range(1, len(turns)):
    whole = np.concatenate(
      [client.prompts[turn - 1], client.completions[turn - 1].tokens]
    )
    if sessions[turn] == sessions[turn - 1]:
      assert np.array_equal(client.prompts[turn][: len(whole)], whole)
      previous = client.images[turn - 1]
      assert client.images[turn][: len(previous)] == previous
    # A new sequence starts if and only if the agent rewrote something.
    before = seen[turn - 1] + [
      {"role": "assistant", "content": result.steps[turn - 1].model_response}
    ]
    rewritten = seen[turn][: len(before)] != before
    assert (sessions[turn] != sessions[turn - 1]) == rewritten
  assert len(result.sequences) == len(set(sessions))
  assert result.metrics["history_rewrites"] == len(set(sessions)) - 1
  assert sorted(client.released) == sorted(set(sessions)) == client.opened

  # Sequences end with a sampled token and hold their last prompt whole.
  for number, sequence in enumerate(result.sequences):
    assert sequence.loss_mask[-1]
    last = max(
      i for i, s in enumerate(sessions) if s == f"{sessions[0][:-1]}{number}"
    )
    expected = np.concatenate(
      [client.prompts[last], client.completions[last].tokens]
    )
    assert np.array_equal(sequence.tokens, expected)
    assert sequence.images == client.images[last]

  # Every screenshot of the messages stands in the prompt, in order.
  for messages, spans in zip(seen, client.images):
    wanted = [
      part["image"]
      for m in messages
      if isinstance(m["content"], list)
      for part in m["content"]
      if part["type"] == "image"
    ]
    assert [span.image for span in spans] == wanted


@PROPERTY
@given(first=OBSERVATIONS, turns=TURNS)
def test_canonical_episodes_read_like_the_chat_template(first, turns):
  """Where sampling was canonical, growing and re-rendering agree."""
  turns = [
    # The template joins a leading newline with the one of its header.
    dataclasses.replace(
      t, text=(t.text or "").lstrip() or "ok", ends=True, rewrite="no"
    )
    for t in turns
  ]
  agent = RewritingAgent(turns)
  client = Sampler(turns)
  seen = []

  class Watching(tc.TrajectoryCollectEngine):
    async def _reply(self, messages, turn):
      seen.append(renderer().render(messages).tokens)
      return await super()._reply(messages, turn)

  # Twelve characters are 48 tokens at most.
  sampling = policy_client.SamplingParams(max_new_tokens=64)
  model = tc.PolicyModel(client, renderer(), sampling)
  result = asyncio.run(
    Watching(agent, Env(first, turns), model, max_steps=len(turns)).collect()
  )
  assert result.error is None
  assert len(result.sequences) == 1
  for grown, rendered in zip(client.prompts, seen):
    assert np.array_equal(grown, rendered)


def test_prompts_given_out_earlier_stay_as_they_were():
  """They are views into a buffer that grows; they must never change."""
  builder = tc.SequenceBuilder(fakes.CharRenderer())
  messages = [{"role": "user", "content": "go"}]
  given_out = []
  for turn in range(200):
    prompt = builder.prompt(messages)
    given_out.append((prompt.tokens, prompt.tokens.copy()))
    assert not prompt.tokens.flags.writeable
    text = builder.append(
      policy_client.Completion(
        np.array([75 + turn % 20, fakes.EOT]),
        np.array([-1.0, -1.0]),
        np.array([0, 0]),
        policy_client.FinishReason.STOP,
      )
    )
    messages += [
      {"role": "assistant", "content": text},
      {"role": "user", "content": f"{turn}"},
    ]
  for view, copy in given_out:
    assert np.array_equal(view, copy)
  assert builder.build()[0].num_sampled == 400


def test_a_retried_model_call_gets_the_same_prompt():
  builder = tc.SequenceBuilder(fakes.CharRenderer())
  messages = [{"role": "user", "content": "go"}]
  first = builder.prompt(messages)
  assert np.array_equal(builder.prompt(messages).tokens, first.tokens)
  other = builder.prompt([{"role": "user", "content": "stop"}])
  assert not np.array_equal(other.tokens, first.tokens)
  builder.append(
    policy_client.Completion(
      np.array([fakes.EOT]),
      np.array([-1.0]),
      np.array([0]),
      policy_client.FinishReason.STOP,
    )
  )
  (sequence,) = builder.build()
  assert np.array_equal(sequence.tokens[:-1], other.tokens)
  assert set(sequence.turn_ids) == {0}


def test_an_unanswered_prompt_is_not_trained_on():
  builder = tc.SequenceBuilder(fakes.CharRenderer())
  image = trajectory_lib.ImageRef("0" * 64, 32, 32)
  messages = [{"role": "user", "content": "go"}]
  builder.prompt(messages)
  text = builder.append(
    policy_client.Completion(
      np.array([80, fakes.EOT]),
      np.array([-1.0, -2.0]),
      np.array([4, 5]),
      policy_client.FinishReason.STOP,
    )
  )
  whole = builder.build()[0]
  messages += [
    {"role": "assistant", "content": text},
    {"role": "user", "content": [{"type": "image", "image": image}]},
  ]
  prompt = builder.prompt(messages)
  assert len(prompt.images) == 1
  assert builder.build() == [whole]
