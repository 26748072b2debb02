"""Keys that Python counts are those that `nnx.Rngs` counts."""

from flax import nnx
import jax
import numpy as np
import pytest
from tunix.rl.multi_turn.policy import random_keys


@pytest.mark.parametrize("seed", [0, 7])
def test_each_key_is_that_of_rngs(seed):
  keys, rngs = random_keys.Keys(seed), nnx.Rngs(seed)
  for _ in range(5):
    np.testing.assert_array_equal(
      jax.random.key_data(keys.params()), jax.random.key_data(rngs.params())
    )


def test_a_trace_of_a_thousand_keys_grows_with_their_number():
  """And not with its square: each is two equations, whatever came before."""

  def draw(count):
    def run():
      keys = random_keys.Keys()
      return [keys.params() for _ in range(count)]

    return len(jax.make_jaxpr(run)().eqns)

  assert draw(200) - draw(100) == draw(100) - draw(0)
