"""Proves that an engine in another process samples with the weights it got.

After a hand-over the engine completes a few fixed prompts. The policy here
scores the same tokens with the weights that were handed over. Two faults show:

- the log-probs differ by more than a tolerance: the engine computes with other
  weights (an older version, half of a checkpoint, an old output head);
- the weights of several hand-overs move the log-probs here by more than engine
  and policy differed at first, and the engine repeats its own: nothing was
  loaded, even where a step of the learner is smaller than the tolerance.

The prompts are completed one at a time: an engine without new weights repeats
itself almost to the bit only where its batches are the same too.

Promises: the probe samples on the road that episodes take; every call has the
client's deadline. Blocks its caller, so it runs on the hand-over's own thread.

Does not: compare every tensor. A fault that moves the log-probs of no probe by
more than the tolerance goes unseen.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Callable, Sequence

import numpy as np
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

Score = Callable[[Any, Sequence[trajectory.TokenSequence]], "list[np.ndarray]"]
"""(weights, sequences) -> float32[S] log-probs of their sampled tokens."""

SAMPLING = policy_client.SamplingParams(
  max_new_tokens=16, temperature=2.0, seed=20261
)
"""Sampling of the probe. At temperature 2 log-probs still move where the policy
has become certain, and a server that reports them before temperature shows."""

_STILL = 0.1
"""Part of the policy's movement below which the engine has not moved. Loaded
weights move it by as much, or by its own rounding."""


class ProbeMismatch(RuntimeError):
  """The engine's log-probs are not those of the weights it was given."""


@dataclasses.dataclass
class _Answer:
  """An engine's completion of a prompt, and its scores here."""

  tokens: np.ndarray
  engine: np.ndarray
  policy: np.ndarray


class Probe:
  """See the module docstring. One call at a time."""

  def __init__(
    self,
    make_client: Callable[[], openai_client.OpenAIClient],
    prompts: Sequence[policy_client.TokenPrompt],
    score: Score,
    tolerance: float,
  ):
    """Args:

    make_client: Returns an unused client of the engine at each call.
    prompts: Prompts to complete; one with an image where the policy sees
      any, so that its vision tower is compared too.
    score: Scores tokens with given weights, at the temperature of `SAMPLING`.
    tolerance: Largest mean difference of log-probs over a completion, in
      nats.
    """
    if not tolerance > 0:
      raise ValueError(f"tolerance must be > 0 nats, got {tolerance}")
    self._make_client = make_client
    self._prompts = list(prompts)
    self._score = score
    self._tolerance = tolerance
    # Of the last hand-over that moved the log-probs by more than rounding.
    self._before: list[_Answer | None] = [None] * len(self._prompts)

  def check(self, params: object) -> float:
    """Compares the engine with `params`; returns the largest difference.

    Args:
      params: The weights it was given last, an nnx state or a module.

    Raises:
      ProbeMismatch: It computes with others; names both values.
      RemoteError, TimeoutError, ValueError: It does not answer.
    """
    completions = asyncio.run(self._ask())
    scores = self._score(
      params,
      [
        _sequence(prompt, completion)
        for prompt, completion in zip(self._prompts, completions)
      ],
    )
    answers = [
      _Answer(completion.tokens, completion.logprobs, logprobs)
      for completion, logprobs in zip(completions, scores)
    ]
    worst = 0.0
    for prompt, now in zip(self._prompts, answers):
      difference = float(np.abs(now.engine - now.policy).mean())
      worst = max(worst, difference)
      if not difference <= self._tolerance:
        raise ProbeMismatch(
          f"{self._quoted(prompt, now)}; they differ by {difference:.3g} nats"
          f" a token, tolerance {self._tolerance:g}"
        )
    self._check_moved(answers)
    return worst

  def _check_moved(self, answers: Sequence[_Answer]) -> None:
    """Raises ProbeMismatch where only the log-probs here have moved.

    A movement is compared once it exceeds what engine and policy differed by
    before it. Their difference now says nothing of rounding: in an engine that
    stands still it is the movement itself.
    """
    pairs = [
      (prompt, before, now)
      for prompt, before, now in zip(self._prompts, self._before, answers)
      if before is not None and np.array_equal(before.tokens, now.tokens)
    ]
    moved = [True] * len(answers)  # Other tokens begin a new comparison.
    for prompt, before, now in pairs:
      step = float(np.abs(now.policy - before.policy).mean())
      engine_step = float(np.abs(now.engine - before.engine).mean())
      at = next(i for i, answer in enumerate(answers) if answer is now)
      moved[at] = step > float(np.abs(before.engine - before.policy).mean())
      if moved[at] and engine_step < _STILL * step:
        raise ProbeMismatch(
          f"{self._quoted(prompt, now)}; the new weights move the latter by"
          f" {step:.3g} nats a token, and the engine's by {engine_step:.3g}"
        )
    self._before = [
      now if is_new or before is None else before
      for before, now, is_new in zip(self._before, answers, moved)
    ]

  def _quoted(self, prompt: policy_client.TokenPrompt, now: _Answer) -> str:
    at = int(np.argmax(np.abs(now.engine - now.policy)))
    return (
      f"of the probe with {len(prompt.images)} images, token"
      f" {int(now.tokens[at])} has log-prob {float(now.engine[at]):.6f} in"
      f" the engine and {float(now.policy[at]):.6f} with the learner's"
      " weights"
    )

  async def _ask(self) -> list[policy_client.Completion]:
    client = self._make_client()  # Connections belong to a loop.
    try:
      completions = []
      for i, prompt in enumerate(self._prompts):
        session = f"hand-over-probe-{i}"
        completions.append(
          await client.generate(prompt, SAMPLING, session=session)
        )
        await client.release(session)
    finally:
      await client.aclose()
    for completion in completions:
      if completion.fallback or not len(completion.tokens):
        cause = completion.fallback or "no tokens"
        raise ValueError(
          f"the engine's answer to the probe cannot be compared ({cause});"
          " it must return token ids and their log-probs"
        )
    return completions


def _sequence(
  prompt: policy_client.TokenPrompt, completion: policy_client.Completion
) -> trajectory.TokenSequence:
  """Returns the completion after its prompt, as a learner reads it."""
  before, after = len(prompt), len(completion.tokens)
  mask = np.arange(before + after) >= before
  return trajectory.TokenSequence(
    tokens=np.concatenate([prompt.tokens, completion.tokens]),
    loss_mask=mask,
    logprobs=np.concatenate([np.zeros(before), completion.logprobs]),
    versions=np.where(mask, 0, -1),
    turn_ids=np.zeros(before + after),
    images=prompt.images,
  )
