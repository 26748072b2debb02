"""Processes that tests start take less time for it than a user's.

They find no torch, as where a user runs them. It is installed for the tests'
references alone; with it there, google-tunix imports it, by way of
tensorboardX, at each start: a second of three. Tests of what is imported set
TESTS_SEE_TORCH.

They look for garbage as seldom as the tests' own process, see conftest.py.
"""

import gc
import importlib.machinery
import os

_find_spec = importlib.machinery.PathFinder.find_spec


def _find_all_but_torch(name, path=None, target=None):
  return None if name == "torch" else _find_spec(name, path, target)


if "TESTS_SEE_TORCH" not in os.environ:
  importlib.machinery.PathFinder.find_spec = _find_all_but_torch
gc.set_threshold(50_000, 20, 100)
