"""A run of one process, which the runs of several are compared with."""

import pods
import pytest


@pytest.fixture(scope="session")
def one(tmp_path_factory):
  """Directory of the run of one process that pods are compared with.

  `conftest.py` of the repository keeps the files that use it in one worker.
  """
  folder = tmp_path_factory.mktemp("one")
  pod = pods.Pod(folder, 1, *pods.ARGUMENTS, f"run.dir={folder}")
  assert pod.wait() == [0], pod.said()
  return folder / "r"
