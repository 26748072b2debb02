"""Tests have torch, for their references; processes they start have none."""

import importlib.util
import os
import subprocess
import sys

_FOUND = "import importlib.util as u; print(u.find_spec('torch') is not None)"


def _found(**environment):
  process = subprocess.run(
    [sys.executable, "-c", _FOUND],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  return process.stdout.strip() == "True"


def test_a_child_finds_torch_only_where_it_is_to_be_seen():
  here = importlib.util.find_spec("torch") is not None
  assert not _found()
  assert _found(TESTS_SEE_TORCH="1") == here


def test_references_are_not_skipped_where_torch_is_installed():
  installed = _found(TESTS_SEE_TORCH="1")
  assert (importlib.util.find_spec("torch") is not None) == installed
