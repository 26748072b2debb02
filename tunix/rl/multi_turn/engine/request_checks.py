"""What a request must be before the engine takes it."""

from __future__ import annotations

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.policy import base


def check(
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    context_length: int,
    vocabulary: int,
    processor: base.Processor,
) -> None:
  """Refuses what the policy cannot read or the engine cannot sample.

  Args:
    prompt: tokens and images.
    sampling: how.
    context_length: tokens of a sequence, sampled ones included.
    vocabulary: tokens that the policy knows.
    processor: the policy's host side.

  Raises:
    ContextLimitError: the prompt leaves no room to sample.
    ValueError: naming the field.
  """
  n = len(prompt)
  if n < 1:
    raise ValueError("prompt.tokens is empty; give at least one token")
  if n >= context_length:
    raise policy_client.ContextLimitError(
        f"prompt of {n} tokens leaves no room to sample in the context of"
        f" {context_length}; shorten the history or raise"
        " context_length"
    )
  low, high = int(prompt.tokens.min()), int(prompt.tokens.max())
  if low < 0 or high >= vocabulary:
    raise ValueError(
        f"prompt.tokens holds id {low if low < 0 else high}, outside of the"
        f" policy's vocabulary [0, {vocabulary})"
    )
  if len(sampling.stop_token_ids) > programs_lib.MAX_STOP_TOKENS:
    raise ValueError(
        f"stop_token_ids has {len(sampling.stop_token_ids)} entries, the"
        f" engine takes at most {programs_lib.MAX_STOP_TOKENS}"
    )
  for token in sampling.stop_token_ids:
    if not 0 <= token < vocabulary:
      raise ValueError(
          f"stop_token_ids holds {token}, outside of the policy's vocabulary"
          f" [0, {vocabulary})"
      )
  for span in prompt.images:
    image = span.image
    tokens = processor.num_image_tokens(image.width, image.height)
    if tokens != span.num_tokens:
      raise ValueError(
          f"an image of {image.width}x{image.height} becomes {tokens} tokens;"
          f" the prompt holds {span.num_tokens} placeholders for it at token"
          f" {span.offset}"
      )
