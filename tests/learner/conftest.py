"""The learner's tests compile many small programs and run each a few times."""

import pytest
import quick_compiles

from tests.learner import learner_cases


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
  with quick_compiles.quick_compiles():
    yield


@pytest.fixture(scope="session")
def programs():
  """Compiled programs by configuration, shared by learners that agree."""
  return {}


@pytest.fixture
def case(programs):
  return learner_cases.Case(programs=programs)
