"""Compiles without most of XLA's optimisations for a while."""

import contextlib

import jax


@contextlib.contextmanager
def quick_compiles():
  """Turns most of XLA's optimisations off, and restores the caller's choice."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
