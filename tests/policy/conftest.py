"""The policies' tests compile many small programs and run each once."""

import pytest
import quick_compiles


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
  with quick_compiles.quick_compiles():
    yield
