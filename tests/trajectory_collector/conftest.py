"""Rollout buffer services; makes `collector_fakes` importable."""

import pathlib
import sys

from buffer_fixtures import *  # noqa: F403

sys.path.insert(0, str(pathlib.Path(__file__).parent))
