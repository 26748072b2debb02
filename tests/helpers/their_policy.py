"""A user's module with a policy factory: TinyVL, as small as it gets."""

from tunix.rl.multi_turn.policy.checkpoints import checkpoint


def create(layers=2, *, seed, mesh, compute_dtype):
  """(model, processor, tokenizer)."""
  return checkpoint.create_policy(
    "nano", seed, mesh=mesh, layers=layers, compute_dtype=compute_dtype
  )
