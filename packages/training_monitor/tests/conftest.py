"""Tests of the package alone, without the framework."""

import pathlib

import monitor_fixtures
from monitor_fixtures import *  # noqa: F403
import pytest

HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  monitor_fixtures.mark_slow(items, HERE)
