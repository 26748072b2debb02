"""Makes the collector's fakes importable however pytest was started."""

import pathlib
import sys

sys.path.insert(
  0, str(pathlib.Path(__file__).parents[1] / "trajectory_collector")
)
