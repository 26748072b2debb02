"""Rows of device calls: named, typed fields in one array."""

import jax
import numpy as np
import pytest
from tunix.rl.multi_turn.engine import programs


def random_rows(row, count, seed=0):
  """Any bits are valid fields, those of special floats included."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, count * row.itemsize, np.uint8).view(row)


@pytest.mark.parametrize(
  "row", (programs.DECODE_ROW, programs.prefill_row(1), programs.prefill_row(7))
)
def test_a_program_sees_every_field_bit_for_bit(row):
  rows = random_rows(row, 5)
  fields = jax.jit(lambda words: programs._fields(words, row))(  # pylint: disable=protected-access
    programs.words(rows)
  )
  assert set(fields) == set(row.names)
  for name, got in fields.items():
    want = rows[name]
    assert got.shape == want.shape and got.dtype == want.dtype, name
    assert np.asarray(got).tobytes() == want.tobytes(), name


def test_picked_rows_are_a_copy_with_rows_at_rest():
  rows = random_rows(programs.DECODE_ROW, 6)
  before = rows.copy()
  picked = programs.pick(rows, np.array([4, 1]), np.array([2, 0]), 3)
  assert picked.dtype == programs.DECODE_ROW
  assert picked[[2, 0]].tobytes() == rows[[4, 1]].tobytes()
  assert picked[1].tobytes() == bytes(programs.DECODE_ROW.itemsize)
  picked["start"] = 7
  assert rows.tobytes() == before.tobytes()
  programs.words(rows)[[4, 1, 0]] = programs.words(picked)[[2, 0, 1]]
  assert rows["start"][[4, 1, 0]].tolist() == [7, 7, 7]
