"""States of linear attention on a mesh are those of one device."""

import pathlib

import forced_devices
import numpy as np
import pytest

# Its process compiles two engines.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HELPERS = pathlib.Path(forced_devices.__file__).parent


@pytest.fixture(scope="module", name="report")
def _report():
  start = (
    f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n"
    "from tests.engine import states_mesh_script\n"
    "states_mesh_script.main()"
  )
  return forced_devices.report(
    "-c",
    start,
    devices=4,
    seconds=600,
    flags="--xla_backend_optimization_level=0",
  )


def test_completions_equal_those_of_one_device(report):
  want, got = report["one"], report["mesh"]
  assert got["tokens"] == want["tokens"]
  for one, other in zip(want["logprobs"], got["logprobs"]):
    np.testing.assert_allclose(other, one, atol=1e-4)


@pytest.mark.parametrize("case", ["one", "mesh"])
def test_a_second_turn_goes_on_from_its_state(report, case):
  """All of the first turn's tokens but the last, whose state is not kept."""
  first = report[case]["tokens"][: len(report[case]["reused"])]
  assert all(reused > 16 for reused in report[case]["reused"]), first


def test_a_device_holds_its_shard_of_the_states(report):
  """Split by rows alone, and an empty page for each shard."""
  assert report["mesh"]["kv_cache"] < 0.6 * report["one"]["kv_cache"]
