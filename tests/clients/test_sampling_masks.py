"""Sampling masks in servers' answers become the support of each token."""

import numpy as np
import pytest
from tunix.rl.multi_turn.clients import remote_protocols
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

ROWS = [[7, 3, 5], [], [2]]
TOKENS = np.array([3, 9, 2])


def vllm(mask):
  return {
    "choices": [
      {
        "text": "x",
        "finish_reason": "stop",
        "token_ids": TOKENS.tolist(),
        "logprobs": {"token_logprobs": [-1.0, -2.0, 0.0]},
        "sampling_mask": mask,
      }
    ]
  }


def sglang(mask):
  return {
    "text": "x",
    "meta_info": {
      "output_token_logprobs": [[-9.0, int(i), "x"] for i in TOKENS],
      "output_token_sampling_mask": mask,
      "output_token_sampling_logprobs": [-1.0, -2.0, 0.0],
    },
  }


@pytest.mark.parametrize(
  "answer",
  [
    remote_protocols.of_openai(vllm(ROWS)),
    remote_protocols.of_openai(
      vllm({"token_ids": [7, 3, 5, 2], "offsets": [0, 3, 3, 4]})
    ),
    remote_protocols.of_sglang(sglang(ROWS)),
  ],
)
def test_both_servers_masks_are_read(answer):
  support = remote_protocols.support_of(answer, TOKENS, False)
  assert support.tolist() == [[7, 3, 5], [-1, -1, -1], [2, -1, -1]]
  # With a mask log-probs are those of the truncated distribution.
  assert answer.logprobs == [-1.0, -2.0, 0.0]


def test_without_a_mask_there_is_no_support():
  answer = remote_protocols.of_openai(vllm(None))
  assert remote_protocols.support_of(answer, TOKENS, False) is None
  masked = remote_protocols.of_openai(vllm(ROWS))
  # Of a text that was tokenised here it is not known.
  assert remote_protocols.support_of(masked, TOKENS, True) is None


@pytest.mark.parametrize(
  "mask, message",
  [
    ([[7, 5], [], [2]], "not of the 3"),
    ([[3], [9]], "of 2 tokens"),
    ("abc", "no list of token ids"),
    ({"token_ids": [1]}, "no list of token ids"),
  ],
)
def test_a_mask_of_other_tokens_is_refused(mask, message):
  with pytest.raises(remote_protocols.RemoteError, match=message):
    answer = remote_protocols.of_openai(vllm(mask))
    remote_protocols.support_of(answer, TOKENS, False)


def test_parts_of_a_completion_are_joined_and_one_without_a_mask_is_none():
  join = remote_protocols.joined_support
  a, b = np.array([[1, 2]]), np.array([[3, 4, 5], [6, -1, -1]])
  assert join([a, b]).tolist() == [[1, 2, -1], [3, 4, 5], [6, -1, -1]]
  assert join([a, None]) is None and join([]) is None


@pytest.mark.parametrize("options, masked", [
    ({}, False), ({"temperature": 0.5}, False),
    ({"top_k": 8, "temperature": 0.0}, False), ({"top_k": 8}, True),
    ({"top_p": 0.9}, True), ({"min_p": 0.1}, True),
])  # fmt: skip
def test_sglang_is_asked_for_a_mask_when_it_samples_from_a_part(
  options, masked
):
  """Its other log-probs are of the whole vocabulary."""
  body = remote_protocols.sglang_body(
    policy_client.TokenPrompt([1, 2]),
    policy_client.SamplingParams(**options),
    [],
    (),
  )
  assert body.get("return_sampling_mask", False) is masked


# --- the types ----------------------------------------------------------------


def completion(**fields):
  return policy_client.Completion(
    TOKENS, [-1.0] * 3, [0] * 3, policy_client.FinishReason.STOP, **fields
  )


def test_a_support_is_made_of_alternatives_and_never_without_the_token():
  sampled = completion(
    top_tokens=[[3, 7], [8, 1], [2, 4]],
    top_logprobs=[[-0.5, -1.0], [-0.7, -0.7], [0.0, -np.inf]],
  ).with_support()
  rows = [set(row[row >= 0].tolist()) for row in sampled.support]
  # 9 was drawn among ties of which only two are listed.
  assert rows == [{3, 7}, {8, 1, 9}, {2}]
  assert completion().with_support().support is None
  own = completion(support=[[3], [9], [2]])
  assert own.with_support() is own


def sequence(support):
  return trajectory.TokenSequence(
    tokens=[1, 3, 9],
    loss_mask=[False, True, True],
    logprobs=[0.0, -1.0, -2.0],
    versions=[-1, 0, 0],
    turn_ids=[0, 0, 0],
    support=support,
  )


def test_one_support_has_one_form_and_survives_json():
  one = sequence([[-1] * 4, [-1, 3, -1, 7], [-1] * 4])
  assert one.support.tolist() == [[-1, -1], [7, 3], [-1, -1]]
  assert trajectory.TokenSequence.from_json(one.to_json()) == one
  assert one != sequence(None)
  assert "support" not in sequence(None).to_json()


@pytest.mark.parametrize(
  "support, message",
  [
    ([[-1], [3]], r"must be \[T, K\]"),
    ([[4], [3], [9]], "not sampled carries a support"),
    ([[-1], [4], [9]], "outside of its support"),
  ],
)
def test_a_support_that_cannot_be_is_refused(support, message):
  with pytest.raises(ValueError, match=message):
    sequence(support)
