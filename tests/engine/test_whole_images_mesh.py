"""A policy whose images' tokens see each other, on a mesh and on one device."""

import forced_devices
import numpy as np
import pytest

qwen_reference = pytest.importorskip("qwen_reference")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  directory = tmp_path_factory.mktemp("policy")
  qwen_reference.Reference(qwen_reference.CONFIGS["gemma3"], directory)
  return forced_devices.report(
    "-m",
    "tests.engine.gemma_mesh_script",
    str(directory),
    devices=8,
    seconds=600,
    flags="--xla_backend_optimization_level=0",
  )


def test_completions_and_gradients_equal_those_of_one_device(report):
  one, got = report["one"], report["mesh"]
  assert got["tokens"] == one["tokens"]
  for a, b in zip(one["sampled"], got["sampled"], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
  assert got["norm"] == pytest.approx(one["norm"], rel=1e-4)


@pytest.mark.parametrize("mesh", ["one", "mesh"])
def test_the_learner_scores_packed_rows_as_they_were_sampled(report, mesh):
  report_of_mesh = report[mesh]
  assert sum(map(len, report_of_mesh["sampled"])) >= 20
  sampled, scored = report_of_mesh["sampled"], report_of_mesh["scored"]
  for a, b in zip(sampled, scored, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
