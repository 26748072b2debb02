"""The policies' tests compile many small programs and run each once."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
