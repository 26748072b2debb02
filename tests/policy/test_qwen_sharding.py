"""Qwen-VL policies on eight devices give what they give on one."""

import forced_devices
import pytest
import trials

# Each family on all axes at once; those whose code looks at the mesh itself
# without some of them, too.
MESHES = {
  "qwen3_vl": (
    "data2_fsdp2_tensor2",
    "fsdp2_sequence2_tensor2",
    "data2_sequence4",
  ),
  "qwen3_vl_moe": ("fsdp2_sequence2_tensor2",),
  "qwen2_5_vl": ("fsdp2_sequence2_tensor2",),
  "qwen3_5": ("fsdp2_sequence2_tensor2",),
  "glm4v": ("fsdp2_sequence2_tensor2",),
  "glm4v_moe": ("fsdp4_tensor2",),
  "gemma3": ("fsdp2_sequence2_tensor2", "data2_sequence4"),
  "qwen2_vl": ("fsdp2_sequence2_tensor2",),
}


@pytest.fixture(
  scope="module",
  params=trials.by_default(
    [], MESHES, unlike=("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
  ),
)
def report(request):
  return forced_devices.report(
    "-m",
    "tests.policy.qwen_sharding_script",
    request.param,
    *MESHES[request.param],
    seconds=600,
  )


# The fixture's process shares two cores with eight device threads.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_loss_and_gradients_equal_one_device(report):
  for mesh, errors in report.items():
    assert errors["loss"] < 1e-5, mesh
    assert errors["gradient"] < 1e-5, mesh


def test_no_device_gathers_the_embedding_or_the_logits(report):
  for mesh, program in report.items():
    # Both have the vocabulary as one of their dimensions.
    assert program["whole_vocabulary"] == [], mesh


def test_weights_are_split_over_the_model_axes(report):
  # The tower is split over `fsdp` alone in some of them.
  for mesh, sizes in report.items():
    assert sizes["weights_share"] < 1.8 / sizes["model_devices"], mesh


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_text_policy_on_a_mesh_equals_one_device(family):
  report = forced_devices.report(
    "-m",
    "tests.policy.text_sharding_script",
    family,
    "fsdp2_sequence2_tensor2",
    seconds=600,
  )
  for mesh, errors in report.items():
    assert errors["loss"] < 1e-5, mesh
    assert errors["gradient"] < 1e-5, mesh
    assert errors["weights_share"] < 0.4, mesh
