"""Keys of new weights, counted in Python.

`nnx.Rngs` counts in an array. Where a policy is made under a trace (`jax.jit`,
`nnx.eval_shape`), each count walks the whole trace before it: the shapes of a
policy of 7 billion parameters took four seconds that way, and take one.
"""

from __future__ import annotations

from flax import nnx
import jax


class Keys:
  """Hands out the keys that `nnx.Rngs(seed)` would, one after the other."""

  def __init__(self, seed: int = 0):
    self._key = jax.random.key(seed)
    self._count = 0

  def params(self) -> jax.Array:
    """Returns the next key."""
    key = jax.random.fold_in(self._key, self._count)
    self._count += 1
    return key


Source = nnx.Rngs | Keys
