"""Makes `rollout_micro_policy` importable however pytest was started."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
