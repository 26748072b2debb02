"""`/v1/completions`, asked by the real `openai` client."""

import numpy as np
import openai
import pytest
import rollout_references
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import screenshot
from rollout_server import start

pytestmark = pytest.mark.timeout(300)


def complete(client, prompt, **options):
  options = {"model": MODEL, "max_tokens": 8, "seed": 3} | options
  extra = {"return_token_ids": True} | options.pop("extra_body", {})
  return client.completions.create(prompt=prompt, extra_body=extra, **options)


def dense_logprobs(running, ids, banned=()):
  """float32[T, V] of the policy's forward pass, without a cache."""
  model = rollout_references.Recompute(
    running.model, running.processor, running.images, 64, images=1
  )
  (logits,) = model.logits([(np.array(ids, np.int32), ())])
  return rollout_references.logprobs_of(logits, banned)


@pytest.mark.slow
def test_a_text_and_its_tokens_give_the_same_completion(running):
  client = running.client()
  text = "Click the "
  one = complete(client, text, logprobs=0)
  ids = running.renderer.encode(text).tolist()
  choice = one.choices[0]
  assert choice.prompt_token_ids == ids
  assert choice.text == running.renderer.decode(choice.token_ids)
  assert one.usage.prompt_tokens == len(ids)
  assert one.usage.completion_tokens == len(choice.token_ids)
  for prompt in (ids, [ids], [text]):
    same = complete(client, prompt).choices[0]
    assert same.token_ids == choice.token_ids
    assert same.logprobs is None
  logprobs = choice.logprobs
  assert (
    len(logprobs.token_logprobs)
    == len(logprobs.tokens)
    == len(choice.token_ids)
  )
  assert (
    all(p <= 0 for p in logprobs.token_logprobs)
    and logprobs.top_logprobs is None
  )
  assert logprobs.text_offset[0] == 0
  assert logprobs.text_offset == sorted(logprobs.text_offset)
  # The same as a chat's, where the prompt is.
  messages = [{"role": "user", "content": "hello"}]
  chat = ask(client, messages, logprobs=True, max_tokens=8, seed=3)
  raw = complete(client, chat.prompt_token_ids, logprobs=0)
  assert raw.choices[0].token_ids == chat.choices[0].token_ids
  np.testing.assert_allclose(
    raw.choices[0].logprobs.token_logprobs,
    [t.logprob for t in chat.choices[0].logprobs.content],
    atol=1e-5,
  )


def test_special_tokens_that_are_spelled_stay_text(running):
  spelled = complete(running.client(), "<|im_end|>").choices[0]
  assert running.renderer.end_of_turn_id not in spelled.prompt_token_ids


def test_a_stream_adds_up(running):
  client = running.client()
  options = dict(n=2, max_tokens=20, logprobs=0, temperature=1.5)
  answer = complete(client, "a b c", **options)
  events = list(
    complete(
      client,
      "a b c",
      stream=True,
      stream_options={"include_usage": True},
      **options,
    )
  )
  assert events[-1].choices == [] and events[-1].usage == answer.usage
  assert {e.object for e in events} == {"text_completion"}
  for i, choice in enumerate(answer.choices):
    choices = [e.choices[0] for e in events if e.choices]
    own = [c for c in choices if c.index == i]
    assert "".join(c.text for c in own) == choice.text
    assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
    assert own[-1].finish_reason == choice.finish_reason
    assert own[-1].token_ids == choice.token_ids
    assert own[-1].prompt_token_ids == choice.prompt_token_ids
    assert own[-1].logprobs == choice.logprobs
  assert len({tuple(c.token_ids) for c in answer.choices}) == 2


@pytest.mark.parametrize(
    "change, param, words",
    [
        ({"prompt": ""}, "prompt", "not empty"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ["a", 1]}, "prompt", "texts alone"),
        ({"prompt": ["a", [1]]}, "prompt", "texts alone"),
        ({"prompt": [[1], 2]}, "prompt[1]", "not empty, got 2"),
        ({"prompt": ["a", ""]}, "prompt[1]", "not empty"),
        ({"prompt": [[1], []]}, "prompt[1]", "not empty"),
        ({"prompt": [[1], [True]]}, "prompt[1]", "token ids"),
        ({"prompt": [[1], [2**30]]}, "prompt[1]", "vocabulary"),
        ({"prompt": ["a", "word " * 100_000]}, "prompt[1]", "cannot fit"),
        ({"prompt": ["a"] * 5}, "prompt", "5 prompts for n=1"),
        ({"prompt": ["a"] * 3, "n": 2}, "prompt", "at most 4 completions"),
        ({"prompt": [1, True]}, "prompt", "token ids"),
        ({"prompt": [-1]}, "prompt", "token ids"),
        ({"prompt": [2**40]}, "prompt", "token ids"),
        ({"prompt": [2**30]}, "prompt", "vocabulary"),
        ({"prompt": list(range(300))}, "prompt", "context length is 256"),
        ({"prompt": "word " * 100_000}, "prompt", "the prompt cannot fit"),
        ({"prompt": "a\ud800"}, "prompt", "surrogate"),
        ({"echo": "yes"}, "echo", "true or false"),
        ({"prompt": "x", "echo": True, "logprobs": 0}, "echo", "leave one out"),
        ({"extra_body": {"min_tokens": -1}}, "min_tokens", "an integer in [0"),
        ({"extra_body": {"min_tokens": True}}, "min_tokens", "an integer"),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens", "exceeds the 8"),
        ({"extra_body": {"min_tokens": 2}, "stop": "a"}, "min_tokens",
         "min_tokens=2 and stop exclude"),
        ({"extra_body": {"min_tokens": 2, "guided_regex": "a+"}}, "min_tokens",
         "guided_regex"),
        ({"extra_body": {"continue_final_message": True}},
         "continue_final_message", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"logprobs": 21}, "logprobs", "[0, 20]"),
        ({"logprobs": True}, "logprobs", "an integer"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "[-2.0, 2.0]"),
        ({"extra_body": {"prompt_embeds": "x"}}, "prompt_embeds",
         "not supported"),
        ({"extra_body": {"messages": []}}, "messages", "not supported"),
        ({"extra_body": {"stop_token_ids": [2**30]}}, "stop_token_ids",
         "vocabulary"),
        ({"n": 2, "temperature": 0}, "n", "temperature=0"),
        ({"stream_options": {"include_usage": True}}, "stream_options",
         "stream=true"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(
  running, change, param, words
):
  change = {"prompt": "x"} | change
  if "\ud800" in change["prompt"]:  # The client cannot encode it either.
    answer = running.post(
      "/v1/completions", content=b'{"model": "nano", "prompt": "a\\ud800"}'
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]
    return
  with pytest.raises(openai.BadRequestError) as refused:
    complete(running.client(), **change)
  assert refused.value.param == param
  assert words in refused.value.message


@pytest.mark.parametrize("by", ["text", "tokens"])
def test_a_list_of_prompts_is_a_request_for_each(running, by):
  client = running.client()
  prompts = ["once upon", "Click the "]
  if by == "tokens":
    prompts = [running.renderer.encode(p).tolist() for p in prompts]
  options = dict(n=2, logprobs=0, temperature=1.5)
  both = complete(client, prompts, **options)
  assert [c.index for c in both.choices] == [0, 1, 2, 3]
  alone = [complete(client, p, **options) for p in prompts]
  for got, want in zip(both.choices, [c for one in alone for c in one.choices]):
    assert (got.text, got.token_ids) == (want.text, want.token_ids)
    assert got.prompt_token_ids == want.prompt_token_ids
    np.testing.assert_allclose(
      got.logprobs.token_logprobs, want.logprobs.token_logprobs, atol=1e-5
    )
  for name in ("prompt_tokens", "completion_tokens"):
    assert getattr(both.usage, name) == sum(
      getattr(one.usage, name) for one in alone
    )
  events = list(complete(client, prompts, stream=True, **options))
  for i, choice in enumerate(both.choices):
    own = [e.choices[0] for e in events if e.choices[0].index == i]
    assert "".join(c.text for c in own) == choice.text
    assert own[-1].token_ids == choice.token_ids
    assert own[-1].prompt_token_ids == choice.prompt_token_ids


def test_prompts_of_a_list_are_turns_of_a_session(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  first = complete(client, "once", max_tokens=3)
  longer = "once" + first.choices[0].text + " more"
  both = complete(client, [longer, "another"], max_tokens=3, n=2)
  rows = export(running, session)
  for choice in both.choices:  # Each is a sequence of its own.
    row = rows[choice.interaction_id]["tensor_dict"]
    ids = choice.prompt_token_ids
    assert row["input_ids"] == [ids + choice.token_ids]
    assert row["loss_mask"] == [[0] * len(ids) + [1] * len(choice.token_ids)]
  assert set(rows) == {first.id} | {c.interaction_id for c in both.choices}
  # One that is refused takes the others with it.
  with pytest.raises(openai.BadRequestError):
    complete(client, ["good", "word " * 100_000])
  assert set(export(running, session)) == set(rows)
  assert running.settled()["active"] == 0


@pytest.mark.parametrize("by", ["text", "tokens"])
def test_echo_begins_with_the_prompt(running, by):
  client = running.client()
  text = "Click <|im_end|> the 🙂"
  prompt = text if by == "text" else running.renderer.encode(text).tolist()
  plain = complete(client, prompt).choices[0]
  both = complete(client, [prompt, prompt], echo=True)
  assert [c.text for c in both.choices] == [text + plain.text] * 2
  assert both.choices[0].token_ids == plain.token_ids
  events = list(complete(client, prompt, echo=True, stream=True))
  assert "".join(e.choices[0].text for e in events) == text + plain.text


def test_min_tokens_holds_back_stop_tokens(running):
  client = running.client()
  one = complete(client, "once upon", temperature=0, max_tokens=1, logprobs=0)
  (stop,) = one.choices[0].token_ids
  options = dict(temperature=0, max_tokens=8, logprobs=0)
  short = complete(
    client, "once upon", extra_body={"stop_token_ids": [stop]}, **options
  ).choices[0]
  assert short.token_ids == [stop] and short.finish_reason == "stop"
  choice = complete(
    client,
    "once upon",
    extra_body={
      "stop_token_ids": [stop],
      "min_tokens": 3,
      "return_raw_logprobs": True,
    },
    **options,
  ).choices[0]
  assert len(choice.token_ids) > 3 or choice.finish_reason == "length"
  assert stop not in choice.token_ids[:3]
  assert running.renderer.end_of_turn_id not in choice.token_ids[:3]
  # Of the distribution that was sampled from: the policy's own without them.
  logprobs = np.array(choice.logprobs.token_logprobs)
  raw = np.array(choice.raw_logprobs)
  assert np.all(logprobs[:3] >= raw[:3] - 1e-5) and logprobs[0] > raw[0]
  ids = running.renderer.encode("once upon").tolist()
  dense = dense_logprobs(running, ids, running.model.config.banned_token_ids)[
    -1
  ]
  ends = {stop, running.renderer.end_of_turn_id}
  free = 1 - sum(np.exp(dense[t]) for t in ends)
  np.testing.assert_allclose(
    logprobs[0], dense[choice.token_ids[0]] - np.log(free), atol=1e-3
  )
  for endpoint, body in (
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("responses", {"input": "a"}),
    (
      "messages",
      {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    ),
  ):
    answer = running.post(
      f"/v1/{endpoint}", {"model": MODEL, "min_tokens": 4, **body}
    )
    assert answer.status_code == 200, answer.text


def test_an_image_cannot_come_as_tokens(running):
  client = running.client()
  chat = ask(client, [screenshot()])
  with pytest.raises(openai.BadRequestError, match="stands for an image"):
    complete(client, chat.prompt_token_ids)


@pytest.mark.slow
def test_a_repeated_completion_is_not_sampled_again(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  one, two = (complete(client, "again", seed=None) for _ in "ab")
  assert one.id == two.id and one.choices[0] == two.choices[0]
  other = complete(client, "again", seed=None, temperature=0.9)
  assert other.id != one.id
  assert set(export(running, session)) == {one.id, other.id}
