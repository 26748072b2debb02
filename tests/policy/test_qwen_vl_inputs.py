"""Sizes, patches and M-RoPE positions of Qwen-VL, against transformers'."""

import itertools
import json
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs

FAMILIES = {
  "qwen2_5_vl": qwen_vl_inputs.QWEN2_5_VL,
  "qwen3_vl": qwen_vl_inputs.QWEN3_VL,
}
# Small, so that a reference image is small.
LIMITS = {"min_pixels": 56 * 56, "max_pixels": 200 * 200}
IMAGE = 151655
TEXT = 7

family = pytest.mark.parametrize("family", FAMILIES)


def make(family="qwen3_vl", image_token_id=IMAGE, **limits):
  return qwen_vl_inputs.QwenVLProcessor.from_preprocessor_config(
    FAMILIES[family], image_token_id=image_token_id, **(limits or LIMITS)
  )


def noise(width, height, seed=0):
  rng = np.random.default_rng((seed, width, height))
  return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(processor, pieces):
  """Tokens and spans of [text tokens, (width, height), text tokens, …]."""
  tokens, spans = [], []
  for piece in pieces:
    if isinstance(piece, int):
      tokens += [TEXT] * piece
      continue
    width, height = piece
    count = processor.num_image_tokens(width, height)
    ref = trajectory.ImageRef(f"{len(spans):064x}", width, height)
    spans.append(trajectory.ImageSpan(ref, len(tokens), count))
    tokens += [IMAGE] * count
  return np.array(tokens, np.int32), tuple(spans)


# --- sizes -------------------------------------------------------------------


@pytest.mark.parametrize(
  "family, size, want",
  [
    ("qwen2_5_vl", (1522, 1022), (1512, 1008)),  # 36.5 rows round to 36.
    ("qwen2_5_vl", (1512, 1050), (1512, 1064)),  # 37.5 rows round to 38.
    ("qwen2_5_vl", (1280, 720), (1288, 728)),
    ("qwen3_vl", (1280, 720), (1280, 704)),  # 22.5 rows round to 22.
    ("qwen3_vl", (1920, 1080), (1920, 1088)),
    ("qwen3_vl", (1, 1), (256, 256)),
    ("qwen3_vl", (8192, 8192), (4096, 4096)),
  ],
)
def test_sizes_of_the_default_settings(family, size, want):
  processor = qwen_vl_inputs.QwenVLProcessor.from_preprocessor_config(
    FAMILIES[family]
  )
  factor = processor.patch_size * 2
  width, height = want
  assert processor.image_size(*size) == want
  assert processor.grid(*size) == (height // factor * 2, width // factor * 2)
  tokens = (height // factor) * (width // factor)
  assert processor.num_image_tokens(*size) == tokens


sides = st.integers(1, 6000)


@given(sides, sides, st.sampled_from([28, 32]), st.data())
@settings(max_examples=300, deadline=None)
def test_a_size_keeps_to_the_limits(height, width, factor, data):
  low = data.draw(st.integers(1, 1 << 16))
  high = data.draw(st.integers(max(4 * low, 16 * factor**2), 1 << 24))
  if max(height, width) > 200 * min(height, width):
    with pytest.raises(ValueError, match=f"{width}x{height}.*200"):
      qwen_vl_inputs.smart_resize(height, width, factor, low, high)
    return
  rows, cols = qwen_vl_inputs.smart_resize(height, width, factor, low, high)
  assert rows > 0 and cols > 0 and rows % factor == 0 and cols % factor == 0
  assert rows * cols <= high or min(rows, cols) == factor
  # Shrinking loses less than a token of each side.
  assert rows * cols >= low or (rows + factor) * (cols + factor) >= high


@pytest.mark.parametrize("height, width", [(0, 5), (5, 0), (-1, 5)])
def test_a_size_that_is_none_is_refused(height, width):
  with pytest.raises(ValueError, match=f"> 0, got {width}x{height}"):
    qwen_vl_inputs.smart_resize(height, width, 28, 1, 10**6)


def test_the_aspect_ratio_has_a_limit():
  assert qwen_vl_inputs.smart_resize(2, 400, 28, 784, 10**6) == (28, 420)
  with pytest.raises(ValueError, match="401x2 .* 200.5, .* at most 200; crop"):
    qwen_vl_inputs.smart_resize(2, 401, 28, 784, 10**6)


def test_a_trajectory_shares_its_pixels():
  budget = qwen_vl_inputs.pixel_budget
  assert budget(1_000_000, 64_000_000, 10) == 1_000_000
  assert budget(1_000_000, 6_400_000, 10) == 640_000
  assert budget(1_000_000, 10_249, 10) == 1024
  assert budget(1_000_000, 7_849, 10, factor=28) == 784
  with pytest.raises(ValueError, match="10 images 1023 .* 1024 and 10240"):
    budget(1_000_000, 10_239, 10)
  with pytest.raises(ValueError, match="max_pixels=1000 "):
    budget(1000, 10**9, 1)
  with pytest.raises(ValueError, match="images must be > 0, got 0"):
    budget(1000, 10**9, 0)


# --- patches -----------------------------------------------------------------


@family
@pytest.mark.parametrize("merge", [1, 2, 3])
def test_patches_are_cells_grouped_by_vision_token(family, merge):
  config = {**FAMILIES[family], "merge_size": merge}
  processor = qwen_vl_inputs.QwenVLProcessor.from_preprocessor_config(
    config, min_pixels=1
  )
  patch, factor = processor.patch_size, processor.patch_size * merge
  down, across = 3, 2
  pixels = noise(across * factor, down * factor)  # Needs no resizing.
  image = processor.patchify(pixels)
  rows, cols = down * merge, across * merge
  assert image.num_tokens == down * across
  assert image.patches.dtype == np.uint8
  assert image.patches.shape == (rows * cols, processor.patch_bytes)
  assert image.positions.dtype == np.int32
  assert image.positions.shape == (rows * cols, processor.position_axes)
  assert len(image.patches) == image.num_tokens * processor.patches_per_token
  order = [
    (i * merge + k, j * merge + l)
    for i, j in itertools.product(range(down), range(across))
    for k, l in itertools.product(range(merge), repeat=2)
  ]
  for (row, col), got, position in zip(order, image.patches, image.positions):
    assert tuple(position) == (row, col, rows, cols)
    cell = pixels[row * patch :, col * patch :][:patch, :patch]
    want = np.stack([cell[..., c] for c in range(3)])
    np.testing.assert_array_equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("size", [(128, 96), (130, 101)])  # As is; resized.
def test_a_strided_or_read_only_view_gives_the_same_patches(size):
  processor = make()
  view = noise(2 * size[0], 2 * size[1])[::2, ::-2]
  view.flags.writeable = False
  np.testing.assert_array_equal(
    processor.patchify(view).patches, processor.patchify(view.copy()).patches
  )


@pytest.mark.parametrize(
  "pixels, message",
  [
    (np.zeros((4, 64, 64, 3), np.uint8), r"stills only.*uint8\[4, 64"),
    (np.zeros((64, 64, 4), np.uint8), "stills only"),
    (np.zeros((64, 64), np.uint8), "stills only"),
    (np.zeros((64, 64, 3), np.float32), "float32"),
    (np.zeros((0, 64, 3), np.uint8), "64x0"),
    (np.zeros((1, 201, 3), np.uint8), "201x1"),
  ],
)
def test_what_is_no_still_is_refused(pixels, message):
  with pytest.raises(ValueError, match=message):
    make().patchify(pixels)


# --- rotary positions --------------------------------------------------------


def slow_positions(processor, tokens, spans):
  """M-RoPE one token at a time."""
  begins = {span.offset: span for span in spans}
  out, current = [], 0
  while len(out) < len(tokens):
    span = begins.get(len(out))
    if span is None:
      out.append((current,) * 3)
      current += 1
      continue
    rows, cols = processor.grid(span.image.width, span.image.height)
    rows, cols = rows // 2, cols // 2
    out += [
      (current, current + r, current + c)
      for r, c in itertools.product(range(rows), range(cols))
    ]
    current += max(rows, cols)
  return np.array(out, np.int32).reshape(-1, 3)


pieces = st.lists(
  st.one_of(
    st.integers(1, 9), st.tuples(st.integers(9, 700), st.integers(9, 700))
  ),
  max_size=8,
)


@given(pieces, st.data())
@settings(deadline=None)
def test_positions_of_a_tail_are_the_tail_of_the_positions(pieces, data):
  processor = make()
  tokens, spans = prompt(processor, pieces)
  want = slow_positions(processor, tokens, spans)
  got = processor.positions(tokens, spans)
  assert got.dtype == np.int32
  np.testing.assert_array_equal(got, want)
  start = data.draw(st.integers(0, len(tokens)))
  got = processor.positions(tokens, spans, start)
  assert got.dtype == np.int32 and got.shape == (len(tokens) - start, 3)
  np.testing.assert_array_equal(got, want[start:])


def test_an_image_takes_its_longer_side_of_positions():
  processor = make()
  tokens, spans = prompt(processor, [2, (96, 64), 2])
  np.testing.assert_array_equal(
    processor.positions(tokens, spans),
    [[0] * 3, [1] * 3]
    + [[2, 2, 2], [2, 2, 3], [2, 2, 4]]
    + [[2, 3, 2], [2, 3, 3], [2, 3, 4]]
    + [[5] * 3, [6] * 3],
  )


@pytest.mark.parametrize(
  "change, message",
  [
    ({"offset": 2}, r"\[2, 8\) of 96x64 .*token 7 at 2, not .* 151655"),
    ({"offset": 4}, r"\[4, 10\) .*token 7 at 9,"),
    ({"num_tokens": 5}, r"\[3, 8\).* 5 tokens, .* 2x3 = 6"),
    ({"offset": 6}, r"\[6, 12\) .*leaves the 11 tokens"),
  ],
)
@pytest.mark.parametrize("start", [0, 11])
def test_a_span_that_does_not_fit_is_named(change, message, start):
  processor = make()
  tokens, (span,) = prompt(processor, [3, (96, 64), 2])
  fields = {"image": span.image, "offset": span.offset, "num_tokens": 6}
  wrong = trajectory.ImageSpan(**{**fields, **change})
  with pytest.raises(ValueError, match=message):
    processor.positions(tokens, (wrong,), start)


def test_spans_out_of_order_are_named():
  processor = make()
  tokens, spans = prompt(processor, [(96, 64), 1, (64, 64)])
  with pytest.raises(ValueError, match=r"\[0, 6\) .*before 11"):
    processor.positions(tokens, spans[::-1])


@pytest.mark.parametrize("start", [-1, 6])
def test_a_start_outside_the_tokens_is_refused(start):
  with pytest.raises(ValueError, match=f"the 5 tokens, got {start}"):
    make().positions(np.zeros(5, np.int32), (), start)


def test_placeholders_are_unchecked_without_their_id():
  processor = make(image_token_id=None)
  tokens, spans = prompt(processor, [3, (96, 64), 2])
  np.testing.assert_array_equal(
    processor.positions(np.zeros_like(tokens), spans),
    make().positions(tokens, spans),
  )


# --- settings ----------------------------------------------------------------

QWEN3_FILE = {
  "size": {"longest_edge": 16777216, "shortest_edge": 65536},
  "patch_size": 16,
  "temporal_patch_size": 2,
  "merge_size": 2,
  "image_mean": [0.5, 0.5, 0.5],
  "image_std": [0.5, 0.5, 0.5],
  "image_processor_type": "Qwen2VLImageProcessorFast",
}


def read(config, **overrides):
  # Through JSON, as a checkpoint's file comes.
  return qwen_vl_inputs.QwenVLProcessor.from_preprocessor_config(
    json.loads(json.dumps(dict(config))), **overrides
  )


@family
def test_the_default_settings_are_a_checkpoints(family):
  processor = read(FAMILIES[family])
  assert processor == make(
    family,
    None,
    min_pixels=FAMILIES[family]["min_pixels"],
    max_pixels=FAMILIES[family]["max_pixels"],
  )
  assert processor.mean == FAMILIES[family]["image_mean"]
  assert processor.std == FAMILIES[family]["image_std"]
  assert processor.patch_bytes == 3 * FAMILIES[family]["patch_size"] ** 2
  assert processor.patches_per_token == 4


def test_limits_are_read_from_both_keys():
  new = read(QWEN3_FILE)
  assert new == read(FAMILIES["qwen3_vl"])
  both = read({**QWEN3_FILE, "min_pixels": 4096, "max_pixels": None})
  assert (both.min_pixels, both.max_pixels) == (4096, 16777216)
  processor = read(QWEN3_FILE, max_pixels=100_000, image_token_id=IMAGE)
  assert (processor.min_pixels, processor.max_pixels) == (65536, 100_000)
  assert processor.image_token_id == IMAGE


@pytest.mark.parametrize(
  "change, message",
  [
    ({"temporal_patch_size": 1}, "temporal_patch_size must be 2.* 1"),
    ({"resample": 2}, "resample must be 3.*got 2"),
    ({"do_resize": False}, "do_resize must be True"),
    ({"rescale_factor": 1.0}, "rescale_factor"),
    ({"patch_size": None}, "patch_size is missing"),
    ({"patch_size": 0}, "patch_size must be an int > 0, got 0"),
    ({"merge_size": 2.0}, "merge_size must be an int > 0, got 2.0"),
    ({"image_mean": None}, "image_mean is missing"),
    ({"image_mean": [0.5]}, "mean must be three numbers, got"),
    ({"image_std": [0.5, 0, 1]}, "std must be three numbers > 0"),
    ({"size": {"height": 5}}, "neither min_pixels nor size.shortest_edge"),
    ({"size": 448}, "neither min_pixels nor size.shortest_edge"),
    ({"max_pixels": 65535}, "max_pixels=65535 .* min_pixels=65536"),
    ({"min_pixels": 1, "max_pixels": 1023}, "vision token's 1024 pixels"),
  ],
)
def test_settings_that_cannot_be_followed_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    read({**QWEN3_FILE, **change})


# --- transformers ------------------------------------------------------------


def reference_processor(family, min_pixels, max_pixels):
  """The PIL-based one by name: with torchvision, the short name is another.

  `size` rather than min_pixels: in 5.12.1 the latter changes the defaults of
  every later one.
  """
  pytest.importorskip("torch")
  module = pytest.importorskip(
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
  )
  config = FAMILIES[family]
  return module.Qwen2VLImageProcessorPil(
    patch_size=config["patch_size"],
    merge_size=config["merge_size"],
    temporal_patch_size=2,
    size={"shortest_edge": min_pixels, "longest_edge": max_pixels},
    image_mean=list(config["image_mean"]),
    image_std=list(config["image_std"]),
  )


def normalised(processor, patches):
  """The reference's arithmetic: float64 up to /255, then float32."""
  x = patches.reshape(len(patches), 3, -1)
  x = (x.astype(np.float64) * (1 / 255)).astype(np.float32)
  mean, std = np.array([processor.mean, processor.std], np.float32)
  return (x - mean[:, None]) / std[:, None]


def trap_sizes(factor):
  """Sizes at which another rounding, order or limit would show."""
  half = factor // 2
  for k, l in itertools.product(range(6), range(1, 6)):
    yield factor * k + half, factor * l  # Half-way, to even.
    yield factor * l + half, factor * k + half
  for size in (1, 2, 3, half - 1, half, half + 1, factor - 1, factor):
    yield size, size  # Tiny: to min_pixels.
    yield 3 * size, size
  for short in (1, 2, 5, 9):
    yield 200 * short, short  # As extreme as is legal.
    yield short, 199 * short
    yield 150 * short, short
  for n in range(-1, 2):  # About both limits.
    yield 56 + n, 56
    yield 200, 200 + n
    yield 196 + n, 224
  yield from ((1522, 1022), (1022, 1522), (641, 479))


def random_sizes(count, seed):
  rng = np.random.default_rng(seed)
  while count:
    # Log-uniform areas from below min_pixels to above max_pixels.
    area = math.exp(rng.uniform(math.log(200), math.log(400 * 400)))
    ratio = math.exp(rng.uniform(-1, 1) * rng.choice([0.7, 5.2]))
    size = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
    if 0 < max(size) <= 200 * min(size):
      count -= 1
      yield size


def check_parity(processor, reference, width, height):
  pixels = noise(width, height)
  # As a PIL image: of an array with a side of 3 it would guess the channels.
  want = reference(images=[Image.fromarray(pixels)], return_tensors="np")
  got = processor.patchify(pixels)
  message = f"{width}x{height}"
  _, rows, cols = want["image_grid_thw"][0]
  assert want["image_grid_thw"].tolist() == [[1, rows, cols]], message
  assert processor.grid(width, height) == (rows, cols), message
  assert got.num_tokens == rows * cols // 4, message
  assert got.num_tokens == processor.num_image_tokens(width, height), message
  values = want["pixel_values"]
  assert values.dtype == np.float32, message
  values = values.reshape(len(values), 3, 2, -1)
  np.testing.assert_array_equal(values[:, :, 1], values[:, :, 0], message)
  np.testing.assert_array_equal(
    normalised(processor, got.patches), values[:, :, 0], message
  )


@family
def test_patches_are_the_references(family):
  processor = make(family)
  reference = reference_processor(family, **LIMITS)
  sizes = list(trap_sizes(processor.factor))
  sizes += random_sizes(250 - len(sizes), seed=0)
  areas = [width * height for width, height in sizes]
  assert min(areas) < LIMITS["min_pixels"] < LIMITS["max_pixels"] < max(areas)
  for width, height in sizes:
    check_parity(processor, reference, width, height)


@family
@pytest.mark.parametrize("size", [(1280, 720), (800, 1100)])
def test_patches_of_a_screenshot_are_the_references(family, size):
  limits = {key: FAMILIES[family][key] for key in LIMITS}
  check_parity(
    make(family, **limits), reference_processor(family, **limits), *size
  )


@family
def test_sizes_are_the_references(family):
  pytest.importorskip("torch")
  module = pytest.importorskip(
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
  )
  rng = np.random.default_rng(1)
  defaults = tuple(FAMILIES[family][key] for key in LIMITS)
  factor = FAMILIES[family]["patch_size"] * 2
  cases = []
  for height, width in rng.integers(1, rng.choice([300, 9000], (3000, 2))):
    low = int(rng.integers(1, 1 << 18))
    limits = (low, low + int(rng.integers(0, 1 << 20)))
    cases += [(int(height), int(width), factor, *defaults)]
    cases += [(int(height), int(width), factor, *limits)]
  for rows, cols, scale in rng.integers(1, 60, (1000, 3)).tolist():
    # The limit's area is whole tokens of the image's own aspect ratio, so that
    # the last bit decides between a row more and a row less.
    size, area = (rows * scale, cols * scale), rows * cols * factor**2
    cases += [(*size, factor, 1, area), (*size, factor, area, 1 << 30)]
  compared = 0
  for args in cases:
    try:
      want = module.smart_resize(*args)
    except ValueError:
      with pytest.raises(ValueError, match="aspect ratio"):
        qwen_vl_inputs.smart_resize(*args)
      continue
    compared += 1
    assert qwen_vl_inputs.smart_resize(*args) == want, args
  assert compared > 7000


@pytest.fixture(scope="module")
def reference_models():
  """Tiny models: only their `get_rope_index` is called."""
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  text = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
  }
  vision = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
  }
  return {
    "qwen2_5_vl": transformers.Qwen2_5_VLModel(
      transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config={**vision, "fullatt_block_indexes": [0]}
      )
    ),
    "qwen3_vl": transformers.Qwen3VLModel(
      transformers.Qwen3VLConfig(
        text_config={**text, "head_dim": 8},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
      )
    ),
  }


@family
def test_positions_are_the_references(family, reference_models):
  import torch  # pylint: disable=g-import-not-at-top

  processor = make(family)
  rng = np.random.default_rng(2)
  counts = set()
  for _ in range(120):
    count = int(rng.integers(0, 7))
    counts.add(count)
    pieces = [int(rng.integers(0, 20))]
    for size in rng.integers(20, 600, (count, 2)).tolist():
      # Never two images side by side: the reference takes them for one.
      pieces += [tuple(size), int(rng.integers(1, 20))]
    if count and rng.random() < 0.2:
      pieces.pop()  # Ends with an image.
    tokens, spans = prompt(processor, pieces)
    if not len(tokens):
      continue
    grids = [
      (1, *processor.grid(span.image.width, span.image.height))
      for span in spans
    ]
    want, _ = reference_models[family].get_rope_index(
      input_ids=torch.tensor(tokens)[None],
      mm_token_type_ids=torch.tensor(tokens == IMAGE).int()[None],
      image_grid_thw=torch.tensor(grids) if grids else None,
    )
    np.testing.assert_array_equal(
      processor.positions(tokens, spans), want[:, 0].T.numpy(), str(pieces)
    )
  assert counts == set(range(7))
