"""Fixtures with a rollout buffer service, for a conftest.py."""

import pytest


@pytest.fixture(name="running", scope="module")
def running_fixture(tmp_path_factory):
  import buffer_services  # pylint: disable=g-import-not-at-top

  with buffer_services.Running(tmp_path_factory.mktemp("buffer")) as running:
    yield running


@pytest.fixture(name="buffer")
def buffer_fixture(running):
  """The service, its default buffer fresh, with groups of four."""
  assert running.start().status_code == 200
  return running
