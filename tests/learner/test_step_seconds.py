"""Every second of the learner's thread is of one phase."""

import pytest
from tunix.rl.multi_turn.learner import loop


def test_phases_sum_to_the_wall_and_the_inner_one_counts():
  now = [100.0]
  seconds = loop.StepSeconds(lambda: now[0])

  def passes(amount):
    now[0] += amount

  passes(1)
  with seconds("wait"):
    passes(2)
  with seconds("learn"):
    passes(4)
    with seconds("save"):
      passes(8)
    passes(16)
  with pytest.raises(RuntimeError):
    with seconds("publish"):
      passes(32)
      raise RuntimeError()
  spent = seconds.take()
  assert spent == {
    "time/step": 63.0,
    "time/wait": 2.0,
    "time/learn": 20.0,
    "time/publish": 32.0,
    "time/save": 8.0,
    "time/evaluate": 0.0,
    "time/report": 0.0,
    "time/other": 1.0,
  }
  # A phase that goes on is divided between two readings.
  with seconds("report"):
    passes(1)
    first = seconds.take()
    passes(2)
  second = seconds.take()
  assert (first["time/report"], second["time/report"]) == (1.0, 2.0)


def test_a_phase_without_a_name_is_refused():
  with pytest.raises(ValueError, match="phase must be one of"):
    with loop.StepSeconds()("tea"):
      pass
