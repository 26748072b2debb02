"""The real vLLM in bfloat16: how far its log-probs are from the learner's."""

import asyncio

import numpy as np
import pytest
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
import vllm_server


@pytest.fixture(scope="module", name="narrow")
def _narrow(policy, tmp_path_factory):
  """Directory of the policy in bfloat16."""
  return checkpoint.save_policy(
    tmp_path_factory.mktemp("narrow") / "policy",
    policy.model,
    policy.directory,
    "bfloat16",
  )


@pytest.fixture(scope="module", name="narrow_server")
def _narrow_server(narrow, tmp_path_factory):
  launch = vllm_server.launch_of(narrow)
  assert "--dtype bfloat16" in launch.command()
  log = tmp_path_factory.mktemp("vllm") / "log"
  with vllm_server.VllmServer(launch, log) as server:
    yield server


def test_log_probs_are_near_those_of_both_types(policy, narrow, narrow_server):
  prompts = [
    policy.prompt(*seeds, text=text)
    for text in ("look", "where", "which", "what now")
    for seeds in ((), (1,), (2, 3), (4, 5, 6))
  ]

  async def sample():
    client = policy.client(narrow_server)
    try:
      return await vllm_server.answers_of(
        client, prompts, policy.sampling(max_new_tokens=32, stop_token_ids=())
      )
    finally:
      await client.aclose()

  answers = asyncio.run(sample())
  figures = {}
  for kind in ("bfloat16", "float32"):
    model, _, _ = checkpoint.load_policy(
      narrow, compute_dtype=kind, param_dtype="float32"
    )
    score = vllm_server.scorer_of(policy, model, 1.0)
    gaps = np.concatenate(
      [
        vllm_server.gaps(score, model, prompt, completion)
        for prompt, _, completion in answers
      ]
    )
    figures[kind] = (gaps.mean(), np.abs(gaps).mean(), np.abs(gaps).max())
  for bias, mean, largest in figures.values():
    assert abs(bias) < 0.01 and 1e-4 < mean < 0.05 and largest < 0.5, figures
