"""The engine samples from a policy that lies on a mesh as from one that does
not."""

import forced_devices
import numpy as np
import pytest

# Its process compiles four engines.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", name="report")
def _report():
  return forced_devices.report(
    "-m",
    "tests.engine.engine_mesh_script",
    devices=4,
    seconds=600,
    flags="--xla_backend_optimization_level=0",
  )


@pytest.mark.parametrize("case", ["split-same", "split-int8"])
def test_completions_equal_those_of_one_device(report, case):
  want, got = report[f"one-{case.split('-')[1]}"], report[case]
  assert got["tokens"] == want["tokens"]
  assert got["versions"] == want["versions"]
  assert {v for run in got["versions"] for v in run} == {0, 1}
  for one, other in zip(want["logprobs"], got["logprobs"]):
    np.testing.assert_allclose(other, one, atol=1e-4)
