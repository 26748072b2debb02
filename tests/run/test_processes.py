"""Settings that are refused before the processes of a run begin."""

import copy

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.run.multiprocess import processes


class BesideAnother(peers_lib.Peers):
  """The first of two; the other's configuration differs in a value."""

  count = 2

  def gather(self, what, value):
    other = copy.deepcopy(value)
    if what == "configuration":
      other["learner"]["rows"] += 1
    return [value, other]


def test_a_difference_is_named_with_both_values():
  config = config_lib.load_config(["learner.rows=4"])
  with pytest.raises(config_lib.ConfigError) as caught:
    processes.check(BesideAnother(), config)
  assert list(caught.value.problems) == [
    "process 1 has learner.rows=5 (process 0: 4); start all with the same"
    " configuration"
  ]
  processes.check(peers_lib.ALONE, config)


def test_one_queue_s_file_for_several_processes_is_refused():
  config = config_lib.load_config(["queue.path=/tmp/q.db"])
  with pytest.raises(config_lib.ConfigError, match="leave it at auto"):
    processes.check(BesideAnother(), config)


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"count": 2}, "processes.count=2 needs processes.coordinator"),
    ({"index": 1}, "processes.index=1 needs processes.coordinator"),
  ],
)
def test_who_is_numbered_needs_a_coordinator(settings, words, monkeypatch):
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  with pytest.raises(config_lib.ConfigError, match=words):
    processes.join(processes.ProcessesConfig(**settings))


def test_without_any_of_it_a_process_is_alone(monkeypatch):
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  assert processes.join(processes.ProcessesConfig()) is peers_lib.ALONE
