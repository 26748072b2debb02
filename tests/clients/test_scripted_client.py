"""Clients without a model behave as an engine would."""

import numpy as np
import pytest
from tunix.rl.multi_turn import clients
from tunix.rl.multi_turn.core import policy_client

PROMPT = policy_client.TokenPrompt(np.array([4, 5, 6]))
FinishReason = policy_client.FinishReason


async def test_script_sees_prompt_and_session():
  calls = []

  def script(prompt, session):
    calls.append((prompt.tokens.tolist(), session))
    return [7, 2, 9]

  client = clients.ScriptedClient(script, version=3)
  client.open_session("s")
  sampling = policy_client.SamplingParams(stop_token_ids=(2,))
  got = await client.generate(PROMPT, sampling, session="s")
  assert calls == [([4, 5, 6], "s")]
  # What an engine would not have sampled is not returned.
  assert got.tokens.tolist() == [7, 2]
  assert got.finish_reason is FinishReason.STOP
  assert got.logprobs.tolist() == [0.0, 0.0]
  assert got.versions.tolist() == [3, 3]
  await client.release("s")


@pytest.mark.parametrize(
  ("most", "context", "want"), [(2, None, 2), (64, 4, 1), (64, 100, 3)]
)
async def test_script_is_cut_at_length_and_context(most, context, want):
  async def script(prompt, session):
    del prompt, session
    return np.array([7, 8, 2])

  client = clients.ScriptedClient(script, context_length=context)
  sampling = policy_client.SamplingParams(
    max_new_tokens=most, stop_token_ids=(2,)
  )
  got = await client.generate(PROMPT, sampling, session="s")
  assert got.tokens.tolist() == [7, 8, 2][:want]
  stopped = got.finish_reason is FinishReason.STOP
  assert stopped == (want == 3)


async def test_script_errors_are_named():
  sampling = policy_client.SamplingParams()
  client = clients.ScriptedClient(lambda p, s: [], context_length=3)
  with pytest.raises(policy_client.ContextLimitError, match="of 3"):
    await client.generate(PROMPT, sampling, session="s")
  client = clients.ScriptedClient(lambda p, s: [])
  with pytest.raises(ValueError, match="no token in session 's'"):
    await client.generate(PROMPT, sampling, session="s")
  client = clients.ScriptedClient(lambda p, s: [3, -1])
  with pytest.raises(ValueError, match="negative id: -1"):
    await client.generate(PROMPT, sampling, session="s")
  with pytest.raises(ValueError, match="version"):
    clients.ScriptedClient(lambda p, s: [1], version=-1)


async def test_replay_returns_the_recording_once():
  recorded = policy_client.Completion(
    np.array([1, 2]),
    np.array([-0.5, -1.0]),
    np.array([0, 1]),
    FinishReason.LENGTH,
  )
  client = clients.ReplayClient({"a": [recorded]})
  sampling = policy_client.SamplingParams()
  assert await client.generate(PROMPT, sampling, session="a") is recorded
  for session in ("a", "b"):
    with pytest.raises(LookupError, match=repr(session)):
      await client.generate(PROMPT, sampling, session=session)
