"""Compiles without most of XLA's optimisations for a while."""

import contextlib

import jax


@contextlib.contextmanager
def quick_compiles():
  """Within, programs compile fast and run slowly; after, as before."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
