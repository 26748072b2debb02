"""Several processes that learn together do what one does."""

import forced_devices
import pytest
import trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# float32 sums in another order.
MEANS = {"reward_mean", "reward_std", "advantage_std", "grad_norm"}


@pytest.fixture(scope="module", params=(2, 4) if trials.share() == 1 else (2,))
def reports(request, tmp_path_factory):
  processes = request.param
  return forced_devices.reports(
    "-m",
    "tests.learner.learner_processes_script",
    tmp_path_factory.mktemp("processes"),
    processes=processes,
    devices=8 // processes,
    seconds=800,
  )


def test_losses_weights_and_readings_equal_those_of_one_device(reports):
  for report in reports:
    for mesh in ("data", "mixed"):
      errors = report[mesh]
      assert errors["loss"] < 1e-5
      assert errors["parameters"] < 1e-5
      assert errors["logprobs"] < 1e-5
      for name, difference in errors["metrics"].items():
        assert difference <= (1e-6 if name in MEANS else 0), name
    assert report["one_learns"] < 1e-5  # The others have nothing to learn.


def test_a_process_without_groups_or_sequences_joins_in(reports):
  for index, report in enumerate(reports):
    for name, difference in report["one_gives"].items():
      assert difference <= (0 if name in ("groups", "tokens") else 1e-5), name
    count, difference = report["one_asks"]
    assert bool(count) == (index == 0) and difference < 1e-5


def test_what_needs_all_groups_of_a_step_has_them(reports):
  for report in reports:
    for name, difference in report["whole_step"].items():
      assert difference < 1e-5, name


def test_each_process_gets_the_whole_policy_for_its_own_devices(reports):
  for report in reports:
    for mesh in ("data", "mixed"):
      sizes = report[mesh]["mesh"]
      assert report[mesh]["here"]
      assert report["local"] == sizes["data"] * sizes["fsdp"] * sizes["tensor"]
    assert report["mixed"]["mesh"]["tensor"] == 2


def test_they_save_one_checkpoint_and_continue_from_it(reports):
  for report in reports:
    for mesh in ("data", "mixed"):
      assert report[mesh]["extras"] == {"at": 2}
      assert report[mesh]["restored"] == 0


def test_who_is_at_another_step_is_told_so(reports):
  for i, report in enumerate(reports):
    assert f"process {i} is at 'step of {i}' where" in report["apart"]
