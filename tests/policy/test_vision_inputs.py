"""Patches and positions of the small policy's processor."""

import numpy as np
import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs


@pytest.mark.parametrize(
  "height, width", [(16, 16), (1, 1), (17, 40), (96, 128), (35, 15)]
)
def test_cells_are_windows_of_the_edge_padded_image(height, width):
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
  processor = vision_inputs.TinyVLProcessor()
  image = processor.patchify(pixels)
  rows, cols = -(-height // 16), -(-width // 16)
  assert image.num_tokens == rows * cols
  assert image.num_tokens == processor.num_image_tokens(width, height)
  assert image.patches.shape == (rows * cols, processor.patch_bytes)
  for i in range(rows * cols):
    top, first_column = (i // cols) * 16 - 4, (i % cols) * 16 - 4
    window = image.patches[i].reshape(24, 24, 3)
    for y, x in rng.integers(0, 24, (20, 2)):
      source = pixels[
        min(max(top + y, 0), height - 1),
        min(max(first_column + x, 0), width - 1),
      ]
      np.testing.assert_array_equal(window[y, x], source)


def test_positions_are_fractions_of_the_image():
  image = vision_inputs.TinyVLProcessor().patchify(
    np.zeros((32, 40, 3), np.uint8)
  )
  unit = vision_inputs.POSITION_UNIT
  want_x = [8 / 40, 24 / 40, 36 / 40]  # The last cell shows 8 columns.
  want = [(y * unit, x * unit) for y in (0.25, 0.75) for x in want_x]
  np.testing.assert_allclose(image.positions, want, atol=0.5)


def test_a_strided_view_gives_the_same_patches():
  rng = np.random.default_rng(1)
  pixels = rng.integers(0, 256, (64, 80, 3), dtype=np.uint8)
  processor = vision_inputs.TinyVLProcessor()
  view = pixels[::2, ::-2]
  np.testing.assert_array_equal(
    processor.patchify(view).patches, processor.patchify(view.copy()).patches
  )


def test_rotary_positions_count_tokens():
  processor = vision_inputs.TinyVLProcessor()
  span = trajectory.ImageSpan(trajectory.ImageRef("0" * 64, 16, 16), 1, 1)
  got = processor.positions(np.zeros(7, np.int32), (span,), start=4)
  assert got.dtype == np.int32
  np.testing.assert_array_equal(got, [[4] * 3, [5] * 3, [6] * 3])


@pytest.mark.parametrize(
  "pixels, message",
  [
    (np.zeros((4, 4, 4), np.uint8), "uint8"),
    (np.zeros((4, 4, 3), np.float32), "float32"),
    (np.zeros((0, 4, 3), np.uint8), "4x0"),
    (np.zeros((160, 176, 3), np.uint8), "max_cells"),
  ],
)
def test_what_is_no_screenshot_is_refused(pixels, message):
  with pytest.raises(ValueError, match=message):
    vision_inputs.TinyVLProcessor(max_cells=100).patchify(pixels)
