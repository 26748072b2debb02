"""Wrong command lines and files: each problem named with field, value and fix.

Every case is a user's slip; none may end in a traceback, and several in one
command line are reported at once.
"""

import bad_inputs
import pytest
from tunix.rl.multi_turn import config as config_lib


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
  for name, data in bad_inputs.FILES.items():
    (tmp_path / name).write_bytes(data)
  monkeypatch.chdir(tmp_path)


def problems_of(*argv):
  with pytest.raises(config_lib.ConfigError) as caught:
    config_lib.load_config(argv)
  return caught.value.problems


@pytest.mark.parametrize("case", bad_inputs.SETTINGS, ids=lambda case: case[0])
def test_one_slip_is_one_message_with_field_value_and_fix(case):
  argument, *parts = case
  problems = problems_of(argument)
  assert len(problems) == 1, problems
  for part in parts:
    assert part in problems[0]


@pytest.mark.parametrize(
    "argv, parts",
    [
        (
            ("learner.stps=3", "gim=x", "steps=-1", "queue.capacity=1",
             "reward=sucess"),
            ("learner.stps", "gim", "learner.steps=-1", "queue.capacity=1",
             "reward=sucess"),
        ),
        (("many.yaml",), ("learner.stps", "learner.rows=-1", "'x'")),
        (("many.yaml", "bad.yaml", "--foo"),
         ("two configuration files", "learner.stps", "--foo")),
        (("resume=/tmp/none", "name=x"), ("run.name", "not a run directory")),
        (("learner.rows=0", "mesh.data=3", "collect.min_valid=9"),
         ("learner.rows=0", "collect.min_valid=9")),
        (("rollout.via=external",), ("external.url", "policy.name=tiny_vl")),
    ],
    ids=lambda value: " ".join(value),
)  # fmt: skip
def test_several_slips_are_reported_at_once(argv, parts):
  problems = problems_of(*argv)
  assert len(problems) >= len(parts)
  for part in parts:
    assert any(part in problem for problem in problems), part


def test_what_follows_from_a_wrong_value_is_not_reported_beside_it():
  (problem,) = problems_of("learner.groups_per_step=0", "queue.capacity=4")
  assert "learner.groups_per_step=0" in problem
