"""A session trains on tokens of its own distribution, and on no others.

The learner's scores of what a session exports are computed here, as `learner`
computes them.
"""

import jax.numpy as jnp
import numpy as np
import openai
import pytest
import rollout_references as references
from rollout_server import ask
from rollout_server import export
from rollout_server import screenshot
from rollout_server import start
from tunix.rl.multi_turn.learner import logprobs as learner_logprobs
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

pytestmark = pytest.mark.timeout(300)
GO = [{"role": "user", "content": "go"}]
SCHEMA = {
  "type": "json_schema",
  "json_schema": {
    "name": "x",
    "schema": {
      "type": "object",
      "properties": {"a": {"type": "boolean"}},
      "required": ["a"],
      "additionalProperties": False,
    },
  },
}
OTHERS = {
  "temperature": {"temperature": 0.5},
  "greedy": {"temperature": 0},
  "hot": {"temperature": 1.5},
  "top_p": {"top_p": 0.5},
  "top_k": {"extra_body": {"top_k": 3}},
  "min_p": {"extra_body": {"min_p": 0.2}},
  "min_tokens": {"extra_body": {"min_tokens": 3}},
  "frequency_penalty": {"frequency_penalty": 0.3},
  "presence_penalty": {"presence_penalty": -1},
  "response_format": {"response_format": SCHEMA, "max_tokens": 60},
}


def opened(running, **body):
  answer = running.post("/rl/start_session", {"task_id": "t", **body})
  assert answer.status_code == 200, answer.text
  session = answer.json()
  return session, running.client(f"/sessions/{session['session_id']}")


def gaps(running, exported, temperature):
  """Sampled minus learner's log-probs of the trainable tokens of sequences."""
  tensors = [one["tensor_dict"] for one in exported]
  sequences = [(np.array(t["input_ids"][0], np.int32), ()) for t in tensors]
  logits = references.Recompute(
    running.model, running.processor, running.images, 256, 1
  ).logits(sequences)
  banned = learner_logprobs.banned_mask(
    logits[0].shape[-1], running.model.config.banned_token_ids
  )
  differences = []
  for (tokens, _), row, tensor in zip(sequences, logits, tensors):
    scores = learner_logprobs.score(
      jnp.asarray(row[:-1]), jnp.asarray(tokens[1:]), temperature, banned
    )
    sampled = np.array(tensor["logprobs"][0], np.float32)[1:]
    mask = np.array(tensor["loss_mask"][0], bool)[1:]
    differences.extend((sampled - np.asarray(scores.logprobs))[mask])
  return np.array(differences)


@pytest.mark.parametrize("name", OTHERS)
def test_a_turn_of_another_distribution_is_answered_and_masked(running, name):
  """The session's own turns before and after it train."""
  session, client = opened(running)
  first = ask(client, GO).choices[0].message
  history = [
    *GO,
    {"role": "assistant", "content": first.content},
    {"role": "user", "content": "on"},
  ]
  other = ask(client, history, **OTHERS[name]).choices[0]
  history += [
    {"role": "assistant", "content": other.message.content},
    {"role": "user", "content": "and on"},
  ]
  last = ask(client, history).choices[0]
  (one,) = export(running, session, style="concat").values()
  turns = {t["turn_id"]: t for t in one["sampling"]}
  field = {"greedy": "temperature", "hot": "temperature"}.get(name, name)
  assert turns[1]["untrained"].startswith(field)
  assert not turns[0]["untrained"] and not turns[2]["untrained"]
  fields = {**OTHERS[name], **OTHERS[name].get("extra_body", {})}
  for key in sampling_rule.FIELDS:
    default = getattr(sampling_rule.SamplingRule(), key)
    assert turns[0][key] == turns[2][key] == default
    assert turns[1][key] == fields.get(key, default)
  assert one["untrained_tokens"] == len(other.token_ids)
  mask = np.array(one["tensor_dict"]["loss_mask"][0], bool)
  ids = np.array(one["turn_ids"])
  assert mask[ids == 0].any() and mask[ids == 2].any()
  assert not mask[ids == 1].any()
  assert mask[ids == 2].sum() == len(last.token_ids)
  # Each alone: the sequence of the other turn trains nothing.
  alone = list(export(running, session).values())
  trains = [sum(a["tensor_dict"]["loss_mask"][0]) > 0 for a in alone]
  assert trains == [True, False, True]
  assert [a["untrained_tokens"] > 0 for a in alone] == [False, True, False]


@pytest.mark.parametrize("name", OTHERS)
def test_a_session_may_refuse_other_distributions(running, name):
  session, client = opened(running, other_sampling="refuse")
  with pytest.raises(openai.BadRequestError, match="trained on") as refused:
    ask(client, GO, **OTHERS[name])
  field = {"greedy": "temperature", "hot": "temperature"}.get(name, name)
  assert refused.value.param.startswith(field)
  assert "temperature=1" in str(refused.value)  # The session's.
  assert not export(running, session)
  assert ask(client, GO).choices  # It goes on.


@pytest.mark.parametrize("name", OTHERS)
def test_a_session_may_train_on_them_with_their_own_log_probs(running, name):
  """For a correction by importance; greedy log-probs are of no distribution."""
  session, client = opened(running, other_sampling="train")
  answer = ask(client, GO, logprobs=True, **OTHERS[name]).choices[0]
  (one,) = export(running, session).values()
  mask = np.array(one["tensor_dict"]["loss_mask"][0], bool)
  if name == "greedy":
    assert one["untrained_tokens"] == len(answer.token_ids) and not mask.any()
    return
  assert mask.sum() == len(answer.token_ids) and not one["untrained_tokens"]
  np.testing.assert_allclose(
    np.array(one["tensor_dict"]["logprobs"][0])[mask],
    [t.logprob for t in answer.logprobs.content],
    atol=1e-6,
  )


@pytest.mark.parametrize("temperature", (0.5, 1.0, 1.5))
def test_the_learner_scores_a_session_as_it_was_sampled(running, temperature):
  """Requests that name the run's temperature, or none at all."""
  session, client = opened(running, sampling={"temperature": temperature})
  for options in ({}, {"temperature": temperature}, {"temperature": None}):
    ask(client, GO, max_tokens=20, seed=len(options) + 7, **options)
  differences = gaps(running, export(running, session).values(), temperature)
  assert len(differences) > 10 and np.abs(differences).max() < 1e-4
  # OpenAI's default is another distribution than that of a run at 0.5.
  ask(client, GO, max_tokens=20, seed=5, temperature=2.0)
  *_, last = export(running, session).values()
  assert last["untrained_tokens"] and not any(
    last["tensor_dict"]["loss_mask"][0]
  )


def test_a_screenshots_turn_is_masked_too_and_counted(running):
  session, client = opened(running)
  before = running.app._service.tokens["untrained"]
  answer = ask(client, [screenshot()], temperature=0.7)
  (one,) = export(running, session, style="concat").values()
  assert one["images"] and not any(one["tensor_dict"]["loss_mask"][0])
  sampled = len(answer.choices[0].token_ids)
  assert running.app._service.tokens["untrained"] - before == sampled


def test_an_export_of_which_nothing_is_trainable_is_an_error_in_the_log(
  running, caplog
):
  session, client = opened(running, sampling={"temperature": 0.7})
  assert session["sampling"]["temperature"] == 0.7
  assert session["other_sampling"] == "mask"
  export(running, session)
  ask(client, GO, temperature=0)
  logged = lambda: [r for r in caplog.records if r.levelname == "ERROR"]
  assert not logged()
  export(running, session)
  (record,) = logged()
  assert "none of its sampled tokens is trainable: temperature=0, not" in (
    record.getMessage()
  )
  ask(client, GO)
  export(running, session)
  assert len(logged()) == 1


def test_what_ends_a_turn_does_not_change_its_distribution(running):
  session, client = opened(running)
  ask(client, GO, stop=["zq"], max_tokens=3, extra_body={"top_k": -1})
  ask(client, GO, extra_body={"stop_token_ids": [5]}, n=2)
  for one in export(running, session).values():
    assert not one["untrained_tokens"] and any(
      one["tensor_dict"]["loss_mask"][0]
    )


def test_requests_outside_of_sessions_are_free(running):
  answer = ask(running.client(), GO, temperature=0.3, top_p=0.5)
  assert answer.choices[0].token_ids


@pytest.mark.parametrize(
  "body,field",
  [
    ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0}}, "sampling.top_p"),
    ({"sampling": {"heat": 1}}, "sampling.heat"),
    ({"other_sampling": "ignore"}, "other_sampling"),
  ],
)
def test_a_wrong_start_names_the_field(running, body, field):
  answer = running.post("/rl/start_session", body)
  assert answer.status_code == 400
  assert answer.json()["error"]["param"] == field


def test_a_start_without_sampling_is_the_servers(running):
  """As AReaL's clients start one."""
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  ask(client, GO)
  (one,) = export(running, session).values()
  assert one["sampling"][0]["temperature"] == 1.0
  assert any(one["tensor_dict"]["loss_mask"][0])
