"""Every second of the engine's thread is of one part, also while it passes."""

import pytest
from tunix.rl.multi_turn.engine import requests


def test_a_reading_has_the_part_in_progress_and_an_inner_one_alone(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(requests.time, "perf_counter", lambda: now[0])
  counters = requests.Counters()

  def passes(amount):
    now[0] += amount
    read = counters.to_dict()
    return [
      read[f"seconds_{part}"]
      for part in ("idle", "host", "prefill", "vision", "decode")
    ]

  assert passes(1) == [0, 0, 0, 0, 0]  # Before the thread has begun.
  counters.enter("idle")
  assert passes(2) == [2, 0, 0, 0, 0]
  counters.enter("host")
  with counters.spending("prefill"):
    assert passes(4) == [2, 0, 4, 0, 0]
    with counters.spending("vision"):
      assert passes(8) == [2, 0, 4, 8, 0]
    assert passes(16) == [2, 0, 20, 8, 0]
  with pytest.raises(RuntimeError):
    with counters.spending("decode"):
      passes(32)
      raise RuntimeError()
  assert passes(64) == [2, 64, 20, 8, 32]
