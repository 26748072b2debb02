"""The learner's tests compile many small programs and run each a few times."""

import jax
import pytest

from tests.learner import learner_cases


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def programs():
  """Compiled programs by configuration, shared by learners that agree."""
  return {}


@pytest.fixture
def case(programs):
  return learner_cases.Case(programs=programs)
