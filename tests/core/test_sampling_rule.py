"""A turn's sampling parameters, beside those that a run is trained under."""

import pytest
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

RULE = sampling_rule.SamplingRule(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
  "request_fields",
  [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0},
    {"temperature": "0.7", "top_k": None, "seed": 3, "max_tokens": 8},
    {"sampling_params": {"temperature": 0.7}, "stop": ["x"]},
    {
      "presence_penalty": 0,
      "repetition_penalty": 1.0,
      "logit_bias": {},
      "response_format": {"type": "text"},
      "tool_choice": "auto",
    },
  ],
)
def test_the_run_s_own_distribution_is_trained_on(request_fields):
  assert not RULE.reason_against(request_fields)


@pytest.mark.parametrize(
  "request_fields, field",
  [
    ({"temperature": 1}, "temperature=1, not the run's 0.7"),
    ({"temperature": 0}, "temperature"),
    ({"temperature": "hot"}, "temperature='hot' is no number"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.0}, "top_p"),
    ({"extra_body": {"top_k": 3}}, "top_k=3"),
    ({"sampling_params": {"min_p": "0.2"}}, "min_p=0.2"),
    ({"min_tokens": 3}, "min_tokens=3"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ({"logit_bias": {"7": -100}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"guided_regex": "a+"}, "guided_regex"),
  ],
)
def test_another_one_is_named_and_masked_or_refused(request_fields, field):
  assert RULE.reason_against(request_fields).startswith(field)
  refusing = sampling_rule.SamplingRule(0.7, 0.9, other="refuse")
  with pytest.raises(sampling_rule.OtherSampling) as refused:
    refusing.reason_against(request_fields)
  assert str(refused.value).startswith(field)
  assert "temperature=0.7, top_p=0.9" in str(refused.value)


def test_a_learner_that_corrects_may_train_on_others_but_not_on_greedy_ones():
  rule = sampling_rule.SamplingRule(0.7, 0.9, other="train")
  assert not rule.reason_against({"temperature": 1, "min_tokens": 3})
  assert rule.reason_against({"temperature": 0}).startswith("temperature=0")
