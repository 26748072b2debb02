"""Tiny Qwens of transformers, and packed batches to hold policies to them.

A reference model gets random weights of such a size that its logits are of
order 1, and is saved for `hf_checkpoint.load_model`. `draw_batch` packs random
sequences; `Reference.run` computes each of them alone and unpadded, and
`scorer` and `differentiator` all of them as they are packed.

Whatever is padding in a batch holds noise, so that a leak shows. Needs torch.
Axis names: see `policy.base`.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import opencua_reference
import torch
import transformers
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.gemma3 import gemma3_inputs
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_families
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs
from tunix.rl.multi_turn.policy.models.smolvlm import smolvlm_inputs

torch.set_num_threads(1)

VOCABULARY, WORDS = 160, 150
IMAGE, VIDEO, IMAGE_START, IMAGE_END = range(WORDS, WORDS + 4)
PATCH = 4
MERGE = 2
MAX_SIDE = 4  # Vision tokens of an image's side.
MAX_PATCHES = (MAX_SIDE * MERGE) ** 2
MAX_IMAGES = 6

# LLVM's optimiser is half of the time that a tiny model takes to compile.
CHEAP = {"xla_backend_optimization_level": 0}


_IDS = {
  "image_token_id": IMAGE,
  "video_token_id": VIDEO,
  "vision_start_token_id": IMAGE_START,
  "vision_end_token_id": IMAGE_END,
}
# Of families whose config.json names the placeholder alone.
_FIXED_IDS = {
  "opencua": {
    "video_token_id": IMAGE,
    "vision_start_token_id": 151661,
    "vision_end_token_id": 151663,
  }
}


def _config(family: str, **changes) -> qwen_config.QwenVLConfig:
  traits = qwen_families.VISION_LANGUAGE[family]
  qwen3 = traits.tower == "qwen3"
  width = 48 if qwen3 else 64  # Qwen3's heads need not add up to the width.
  text = dict(
    vocab_size=VOCABULARY,
    hidden_size=width,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    mrope_section=(4, 2, 2),
    rope_theta=5e6 if qwen3 else 1e6,
  )
  vision = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    out_hidden_size=width,
    patch_size=PATCH,
    spatial_merge_size=MERGE,
  )
  if qwen3:
    # 5 x 5 learned positions: some grids have fewer patches, some more.
    vision |= {"num_position_embeddings": 25}
    # For once not in the order of the blocks.
    deep = (2, 0) if family == "qwen3_vl_moe" else (0, 2)
    vision |= {"deepstack_visual_indexes": deep}
  elif traits.tower == "glm4v":
    vision |= {"num_position_embeddings": 25, "rms_norm_eps": 1e-5}
  elif traits.tower == "qwen2":
    vision |= {"intermediate_size": 64}  # A multiple of the width.
  else:
    # Windows of 2 x 2 vision tokens.
    vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": (2,)}
  if traits.tower == "glm4v":
    text |= {"partial_rotary_factor": 0.5, "mrope_section": (1, 1, 2)}
    text |= {"rms_norm_eps": 1e-5}
  if traits.sigmoid_router:
    # Heads that do not add up to the width, as published.
    text |= {"num_attention_heads": 6, "mlp_only_layers": (0,)}
    text |= {"shared_expert_intermediate_size": 16}
    text |= {"rms_norm_eps": 3e-2}  # As below.
  if traits.flat_positions:
    text |= {"mrope_section": (8, 0, 0)}
  if traits.linear:
    # Two kinds of layers, either first; heads rotated in part.
    text |= {"full_attention_layers": (1,), "linear_conv_kernel_dim": 4}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 12}
    text |= {"head_dim": 32, "partial_rotary_factor": 0.5}
    # Else the norm of a head that reads next to nothing enlarges rounding.
    text |= {"rms_norm_eps": 3e-2}
    vision |= {"deepstack_visual_indexes": ()}
  if traits.experts:
    text |= {"num_experts": 5, "num_experts_per_tok": 2}
    # In bfloat16 the reference takes multiples of 8 only.
    text |= {"moe_intermediate_size": 16}
  if traits.linear and traits.experts:
    text |= {"shared_expert_intermediate_size": 24, "intermediate_size": 0}
    # As many key heads as value heads, and the last layer is full.
    text |= {"linear_num_key_heads": 4, "full_attention_layers": (0, 2)}
  return qwen_config.QwenVLConfig(
    family=family,
    vision=qwen_config.VisionConfig(**vision),
    text=qwen_config.TextConfig(**text),
    **(_IDS | _FIXED_IDS.get(family, {})),
    **changes,
  )


_GEMMA_TEXT = {
  "vocab_size": VOCABULARY,
  "hidden_size": 48,
  "intermediate_size": 72,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "rope_theta": 1e6,
  "mrope_section": (8, 0, 0),
  "full_attention_layers": (1, 3),
  "sliding_window": 6,
  "local_rope_theta": 1e4,
  "query_pre_attn_scalar": 10.0,
}
# The published pattern of layers and scaled positions; windows as long as an
# image, of which a token is more.
_GEMMA_WIDE_TEXT = {
  "num_hidden_layers": 7,
  "num_attention_heads": 6,
  "full_attention_layers": (5,),
  "sliding_window": 4,
  "query_pre_attn_scalar": 16.0,
  "rope_scaling": rope_scaling.RopeScaling("linear", 8.0),
}


def _gemma(
  merge: int = 2, tokens: int = 4, text=None, **changes
) -> qwen_config.QwenVLConfig:
  """Windows hardly longer than an image, scores not scaled by the heads."""
  return qwen_config.QwenVLConfig(
    family="gemma3",
    vision=qwen_config.VisionConfig(
      depth=3,
      hidden_size=32,
      intermediate_size=40,
      num_heads=2,
      out_hidden_size=48,
      patch_size=PATCH,
      spatial_merge_size=merge,
      num_position_embeddings=tokens * merge**2,
    ),
    text=qwen_config.TextConfig(**{**_GEMMA_TEXT, **(text or {})}),
    **(_IDS | {"video_token_id": IMAGE}),
    **{"tie_word_embeddings": True, **changes},
  )


def _grouped() -> qwen_config.QwenVLConfig:
  """Experts in groups, more shared ones, scaled weights, two dense layers."""
  config = _config("glm4v_moe", tie_word_embeddings=True)
  text = dataclasses.replace(
    config.text,
    num_hidden_layers=4,
    mlp_only_layers=(0, 1),
    num_experts=8,
    num_experts_per_tok=3,
    expert_groups=4,
    chosen_groups=2,
    routed_scaling_factor=2.5,
    shared_expert_intermediate_size=32,
  )
  return dataclasses.replace(config, text=text)


def _tiled(family: str, tile: int, merge: int, text, **changes):
  """Tiles of `tile` pixels a side, cut to whole patches."""
  return qwen_config.QwenVLConfig(
    family=family,
    vision=qwen_config.VisionConfig(
      depth=3,
      hidden_size=32,
      intermediate_size=40,
      num_heads=2,
      out_hidden_size=48,
      patch_size=PATCH,
      spatial_merge_size=merge,
      num_position_embeddings=(tile // PATCH) ** 2,
      tile_size=tile,
    ),
    text=qwen_config.TextConfig(
      **{
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 1e5,
        "mrope_section": (8, 0, 0),
        "rms_norm_eps": 1e-5,
        **text,
      }
    ),
    **dict.fromkeys(_IDS, IMAGE),
    **changes,
  )


CONFIGS = {
  "qwen3_vl": _config("qwen3_vl"),
  "qwen3_vl tied": _config("qwen3_vl", tie_word_embeddings=True),
  "qwen3_vl_moe": _config("qwen3_vl_moe"),
  "qwen3_5": _config("qwen3_5"),
  "qwen3_5_moe": _config("qwen3_5_moe", tie_word_embeddings=True),
  "qwen2_5_vl": _config("qwen2_5_vl"),
  "qwen2_vl": _config("qwen2_vl"),
  "opencua": _config("opencua"),
  "glm4v": _config("glm4v"),
  "glm4v_moe": _config("glm4v_moe"),
  "glm4v_moe groups": _grouped(),
  "gemma3": _gemma(),
  "gemma3 wide": _gemma(
    merge=3, text=_GEMMA_WIDE_TEXT, tie_word_embeddings=False
  ),
  "smolvlm": _tiled("smolvlm", 16, 2, {}),
  # A token a tile; a wider decoder with Llama 3's positions.
  "idefics3": _tiled(
    "idefics3",
    14,
    3,
    {
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "rope_scaling": rope_scaling.RopeScaling("llama3", 8.0, 64),
    },
    tie_word_embeddings=True,
  ),
}


def _text_config(
  family: str, text=None, **changes
) -> qwen_text_config.QwenTextConfig:
  qwen3 = family == "qwen3"
  return qwen_text_config.QwenTextConfig(
    family=family,
    text=qwen_config.TextConfig(
      **{
        "vocab_size": VOCABULARY,
        "hidden_size": 48 if qwen3 else 64,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mrope_section": qwen_text_config.plain_rotary(16),
        "rope_theta": 1e6,
        **(text or {}),
      }
    ),
    **changes,
  )


TEXT_CONFIGS = {
  "qwen3": _text_config("qwen3"),
  "qwen3 tied": _text_config("qwen3", tie_word_embeddings=True),
  "qwen2": _text_config("qwen2"),
  "qwen2 tied": _text_config("qwen2", tie_word_embeddings=True),
  # Heads that do not add up to the width.
  "llama": _text_config("llama", text={"hidden_size": 48}),
  # An odd number of heads, as SmolLM2 has; positions scaled as Llama 3's, of
  # which the test's sequences see all three kinds of frequencies.
  "llama tied": _text_config(
    "llama",
    text={
      "hidden_size": 48,
      "num_attention_heads": 3,
      "num_key_value_heads": 1,
      "rms_norm_eps": 1e-5,
      "rope_scaling": rope_scaling.RopeScaling("llama3", 8.0, 64),
    },
    tie_word_embeddings=True,
  ),
  "gemma3_text": _text_config(
    "gemma3_text", text=_GEMMA_TEXT, tie_word_embeddings=True
  ),
  "gemma3_text wide": _text_config(
    "gemma3_text", text={**_GEMMA_TEXT, **_GEMMA_WIDE_TEXT}
  ),
}
PROCESSOR = qwen_vl_inputs.QwenVLProcessor(
  patch_size=PATCH,
  merge_size=MERGE,
  min_pixels=1,
  max_pixels=1 << 20,
  image_token_id=IMAGE,
)
FLAT = dataclasses.replace(PROCESSOR, flat_positions=True)


def processor_of(
  config: qwen_text_config.AnyConfig,
) -> qwen_vl_inputs.QwenVLProcessor:
  """The host side whose positions and sizes a model has."""
  if tile := config.vision.tile_size:  # Up to two of them a side.
    settings = smolvlm_inputs.default_settings(config)
    most = {"max_pixels": (2 * tile) ** 2}
    return smolvlm_inputs.processor(settings, config, most)
  if config.traits.mutual_images:
    return gemma3_inputs.processor(
      gemma3_inputs.default_settings(config), config, {}
    )
  return FLAT if config.traits.flat_positions else PROCESSOR


# --- batches -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Image:
  """An image of a buffer: `rows` x `columns` patches from `start` on.

  Of an image of tiles the rows are tiles, and the columns a tile's patches.
  """

  buffer: int
  start: int
  rows: int
  columns: int
  size: tuple[int, int]  # Width and height in pixels.

  @property
  def patches(self) -> slice:
    return slice(self.start, self.start + self.rows * self.columns)


@dataclasses.dataclass(frozen=True)
class Case:
  """A sequence: tokens [start, end) of a row, and the images it shows."""

  row: int
  start: int
  end: int
  images: tuple[Image, ...]

  @property
  def place(self) -> tuple[int, slice]:
    return self.row, slice(self.start, self.end)


@dataclasses.dataclass(frozen=True)
class Batch:
  """Inputs with float32 patches, and the sequences packed in them."""

  inputs: base.PolicyInputs
  cases: tuple[Case, ...]


class _Buffer:
  """One flat buffer of patches, filled image by image."""

  def __init__(
    self,
    number: int,
    rng: np.random.Generator,
    patches: int,
    processor: qwen_vl_inputs.QwenVLProcessor,
  ):
    self.number, self.rng, self.used = number, rng, 0
    self.processor = processor
    self.patches = rng.uniform(0, 255, (patches, processor.patch_bytes))
    self.segments = np.zeros(patches, np.int32)
    self.positions = rng.integers(1, 9, (patches, 4))
    self.images: list[Image] = []

  def add(self, height: int, width: int) -> Image | None:
    """An image of this many pixels; None when the buffer is full."""
    pixels = self.rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
    patched = self.processor.patchify(pixels)
    if self.rng.random() < 0.2:  # A gap, of whole vision tokens.
      gap = int(self.rng.integers(1, 4))
      self.used += self.processor.patches_per_token * gap
    rows, columns = self.processor.grid(width, height)
    image = Image(self.number, self.used, rows, columns, (width, height))
    if image.patches.stop > len(self.segments):
      return None
    # Pixels need not be whole numbers.
    self.patches[image.patches] = patched.patches + self.rng.random()
    self.positions[image.patches] = patched.positions
    self.images.append(image)
    self.segments[image.patches] = len(self.images)
    self.used = image.patches.stop
    return image


def draw_batch(
  rng: np.random.Generator,
  rows: int = 4,
  length: int = 0,
  buffers: int = 2,
  patches: int = 556,
  packed: bool = True,
  processor: qwen_vl_inputs.QwenVLProcessor = PROCESSOR,
) -> Batch:
  """Random sequences with 0 to `MAX_IMAGES` images each.

  Rows begin with padding now and then and nearly always end with it. Rows of a
  buffer share it, and now and then an image in it. The buffer has padding too,
  between images and at the end.

  Args:
    rng: random numbers.
    rows: B.
    length: T; 0 = 128, or twice as many where images are tiles.
    buffers: S, a divisor of B.
    patches: P, twice as many where images are tiles; 0 gives sequences of text
      only, longer than between images.
    packed: Whether a row holds as many sequences as fit; else one, from the
      row's beginning.
    processor: gives positions; see `Reference.processor`.
  """
  wide = 1 + hasattr(processor, "tile_tokens")
  length, patches = length or 128 * wide, patches * wide
  patches -= patches % processor.patches_per_token
  stores = [_Buffer(i, rng, patches, processor) for i in range(buffers)]
  tokens = rng.integers(0, WORDS, (rows, length))
  positions = rng.integers(0, 99, (rows, length, 3))
  segments = np.zeros((rows, length), np.int32)
  vision_index = np.full((rows, length), -1)
  cases = []
  for row in range(rows):
    store = stores[row // (rows // buffers)]
    at = int(rng.integers(0, 9)) if packed and rng.random() < 0.5 else 0
    for segment in itertools.count(1):
      drawn = _draw_sequence(rng, store, length - at)
      if drawn is None:
        break
      ids, spans, images = drawn
      case = Case(row, at, at + len(ids), images)
      tokens[case.place] = ids
      positions[case.place] = processor.positions(ids, spans)
      segments[case.place] = segment
      for span, image in zip(spans, images):
        first = at + span.offset
        numbers = span.numbers(ids)
        start = image.start // processor.patches_per_token
        vision_index[row, first : first + span.num_tokens] = np.where(
          numbers >= 0, start + numbers, -1
        )
      cases.append(case)
      at = case.end
      if not packed:
        break
  whole = lambda values: np.stack(values).astype(np.int32)
  inputs = base.PolicyInputs(
    tokens=whole(tokens),
    positions=whole(positions),
    segment_ids=segments,
    vision_index=whole(vision_index),
    patches=np.stack([s.patches for s in stores]).astype(np.float32),
    patch_segments=whole([s.segments for s in stores]),
    patch_positions=whole([s.positions for s in stores]),
    image_patches=max(
      [MAX_PATCHES, *(i.rows * i.columns for s in stores for i in s.images)]
    ),
  )
  return Batch(inputs, tuple(cases))


def _draw_sequence(
  rng: np.random.Generator, store: _Buffer, room: int
) -> tuple[np.ndarray, list[trajectory.ImageSpan], tuple[Image, ...]] | None:
  """Tokens, spans and images of a sequence; None when it does not fit."""
  with_images = len(store.segments) > 0
  words = lambda low: list(
    rng.integers(0, WORDS, rng.integers(low, 7 if with_images else 50))
  )
  ids, spans, images = words(2), [], []
  for _ in range(rng.integers(0, MAX_IMAGES + 1) if with_images else 0):
    if store.images and rng.random() < 0.15:  # One that is there already.
      image = store.images[rng.integers(len(store.images))]
    else:
      sides = rng.integers(1, MAX_SIDE + 1, 2) * MERGE * PATCH
      image = store.add(*(int(side) for side in sides))
    if image is None:
      return None
    ref = trajectory.ImageRef(f"{len(images):064x}", *image.size)
    ids += [IMAGE_START]
    shown, row = placeholders(
      store.processor, *image.size, lambda: [IMAGE_END, *words(0)[:2]]
    )
    spans.append(trajectory.ImageSpan(ref, len(ids), len(shown), row))
    ids += [*shown, IMAGE_END, *words(0)]
    images.append(image)
  if len(ids) > room:
    return None
  return np.array(ids, np.int32), spans, tuple(images)


def placeholders(
  processor: base.Processor,
  width: int,
  height: int,
  between: Callable[[], list[int]] = lambda: [IMAGE_END],
) -> tuple[list[int], int]:
  """Tokens of an image, and `row` of its span."""
  count = processor.num_image_tokens(width, height)
  run = getattr(processor, "tile_tokens", count)
  ids = [IMAGE] * run
  for _ in range(count // run - 1):
    ids += between() + [IMAGE] * run
  return ids, run if run < count else 0


def targets(inputs: base.PolicyInputs) -> tuple[np.ndarray, np.ndarray]:
  """The next token of each, and whether it is of the same sequence."""
  following = np.roll(inputs.tokens, -1, axis=1)
  ids = inputs.segment_ids
  same = (ids > 0) & (ids == np.roll(ids, -1, axis=1))
  same[:, -1] = False
  return following, same


# --- results -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Results:
  """Outputs of a batch; zeros where there is padding.

  Attributes:
    logits: float32[B, T, vocabulary].
    logprobs: float32[B, T], of each token's successor.
    gradients: key of the checkpoint -> gradient of the weighted sum of
      log-probs, as the reference holds it.
    pixel_gradient: float32[S, P, F].
  """

  logits: np.ndarray
  logprobs: np.ndarray
  gradients: dict[str, np.ndarray]
  pixel_gradient: np.ndarray


class Reference:
  """A model of transformers with random weights.

  Attributes:
    config: the policy's configuration.
    directory: Directory of its checkpoint.
    module: the model.
  """

  def __init__(
    self,
    config: qwen_text_config.AnyConfig,
    directory: pathlib.Path,
    seed: int = 0,
  ):
    self.config, self.directory = config, directory
    torch.manual_seed(seed)  # Some parameters stay near their first values.
    self.module = build(config).eval().float()
    for part in self.module.modules():
      if hasattr(part, "chunk_gated_delta_rule"):
        # Token by token: on chunks it loses digits where decay is strong.
        part.chunk_gated_delta_rule = functools.partial(
          _by_token, part.recurrent_gated_delta_rule
        )
    generator = torch.Generator().manual_seed(seed)
    for name, weight in self.module.named_parameters():
      noise = torch.randn(weight.shape, generator=generator)
      weight.data = _initial(name, weight.data, noise)
    for name, value in self.module.named_buffers():
      if name.endswith("correction_bias"):  # Changes many choices.
        value += 0.2 * torch.randn(value.shape, generator=generator)
    if config.traits.windows:
      # A word that is never learned, were it not that the output matrix is.
      self.module.get_input_embeddings().padding_idx = None
    self.module.save_pretrained(directory)
    self.module.double()  # So that what differs is our rounding.
    if hasattr(self.module, "set_experts_implementation"):
      self.module.set_experts_implementation("eager")  # Others lack float64.

  @property
  def processor(self) -> qwen_vl_inputs.QwenVLProcessor:
    """The host side whose positions the model has."""
    return processor_of(self.config)

  def in_bfloat16(self) -> torch.nn.Module:
    """The model as transformers loads it in that dtype."""
    return type(self.module).from_pretrained(
      self.directory, dtype=torch.bfloat16
    )

  @functools.cache  # noqa: B019
  def policy(self, **changes: Any) -> qwen_text.QwenText:
    """Ours with the same weights; `changes` as of `load_model`."""
    return hf_checkpoint.load_model(self.directory, **changes)

  def run(
    self,
    batch: Batch,
    weights_BT: np.ndarray | None = None,
    module: torch.nn.Module | None = None,
  ) -> Results:
    """Every sequence alone, forwards and backwards.

    Args:
      batch: packed sequences.
      weights_BT: Weight of each token's log-prob in the loss; None = no
        gradients.
      module: Module to run in place of `self.module`.
    """
    module = self.module if module is None else module
    module.zero_grad()
    dtype = next(module.parameters()).dtype
    b, t = batch.inputs.tokens.shape
    logits = np.zeros((b, t, self.config.vocab_size), np.float32)
    logprobs = np.zeros((b, t), np.float32)
    pixels = torch.tensor(batch.inputs.patches, requires_grad=True)
    pixels.grad = torch.zeros_like(pixels)
    for case in batch.cases:
      ids = torch.tensor(batch.inputs.tokens[case.place]).long()[None]
      images = {}
      if hasattr(module, "get_rope_index") or hasattr(
        getattr(module, "model", None), "get_rope_index"
      ):
        images["mm_token_type_ids"] = (ids == IMAGE).int()
      if self.config.traits.mutual_images:
        images["token_type_ids"] = (ids == IMAGE).int()
      if case.images and self.config.traits.tower == "idefics3":
        tiles = [t for i in case.images for t in self._tiles(pixels, i)]
        images["pixel_values"] = torch.stack(tiles).to(dtype)[None]
      elif case.images and self.config.traits.mutual_images:
        whole = [self._image(pixels, i) for i in case.images]
        images["pixel_values"] = torch.stack(whole).to(dtype)
      elif case.images:
        shown = [pixels[i.buffer, i.patches] for i in case.images]
        grids = [(1, i.rows, i.columns) for i in case.images]
        images |= {
          "pixel_values": self._normalised(torch.cat(shown)).to(dtype),
          "image_grid_thw": torch.tensor(grids),
        }
      out = module(
        input_ids=ids, attention_mask=torch.ones_like(ids), **images
      ).logits[0]
      scores = torch.log_softmax(out.float(), -1)[:-1]
      scores = scores.gather(-1, ids[0, 1:, None])[:, 0]
      if weights_BT is not None:
        weight = torch.tensor(weights_BT[case.place])[:-1]
        (scores * weight).sum().backward()
      logits[case.place] = out.detach().float().numpy()
      logprobs[case.row, case.start : case.end - 1] = scores.detach().numpy()
    gradients = {}
    if weights_BT is not None:
      gradients = {
        file_key(self.config, name): weight.grad.float().numpy().copy()
        for name, weight in module.named_parameters()
      }
    return Results(logits, logprobs, gradients, pixels.grad.numpy())

  def _tiles(self, patches: torch.Tensor, image: Image) -> list[torch.Tensor]:
    side = math.isqrt(image.columns)
    return [
      self._image(
        patches,
        dataclasses.replace(
          image,
          start=image.start + tile * image.columns,
          rows=side,
          columns=side,
        ),
      )
      for tile in range(image.rows)
    ]

  def _image(self, patches: torch.Tensor, image: Image) -> torch.Tensor:
    """[3, H, W], normalised, of an image's patches, which lie by tokens."""
    merge = self.config.vision.spatial_merge_size
    rows, columns = image.rows // merge, image.columns // merge
    own = patches[image.buffer, image.patches]
    own = own.reshape(rows, columns, merge, merge, 3, PATCH, PATCH)
    own = own.permute(4, 0, 2, 5, 1, 3, 6)
    own = own.reshape(3, image.rows * PATCH, image.columns * PATCH) / 255
    vision = self.config.vision
    mean, std = torch.tensor([vision.image_mean, vision.image_std])
    return (own - mean[:, None, None]) / std[:, None, None]

  def _normalised(self, patches_PF: torch.Tensor) -> torch.Tensor:
    """As the processor of the checkpoint would give it: each frame twice."""
    vision = self.config.vision
    statistics = torch.tensor([vision.image_mean, vision.image_std])
    mean, std = statistics[:, None, :, None, None]
    pixels = patches_PF.reshape(len(patches_PF), 3, 1, -1) / 255
    pixels = (pixels - mean) / std
    return pixels.expand(-1, -1, 2, -1).reshape(len(patches_PF), -1)


_GEMMA_KEYS = (
  ("model.vision_tower.", "vision_tower.vision_model."),
  ("model.multi_modal_projector.", "multi_modal_projector."),
  ("model.language_model.", "language_model.model."),
  ("lm_head.", "language_model.lm_head."),
)


def file_key(config: qwen_text_config.AnyConfig, name: str) -> str:
  """The key in the published files of a parameter of the reference."""
  for own, published in _GEMMA_KEYS if config.family == "gemma3" else ():
    if name.startswith(own):
      return published + name.removeprefix(own)
  return name


def _by_token(rule, *args, cu_seqlens=None, **options):
  assert cu_seqlens is None
  return rule(*args, **options)


def build(config: qwen_text_config.AnyConfig) -> torch.nn.Module:
  """The model that transformers makes of our `config.json`."""
  if isinstance(config, qwen_text_config.QwenTextConfig):
    return transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(**qwen_text_config.to_hf(config))
    )
  if config.family == "opencua":
    return opencua_reference.OpenCua(qwen_config.to_hf(config))
  return transformers.AutoModelForImageTextToText.from_config(
    transformers.AutoConfig.for_model(**qwen_config.to_hf(config))
  )


def _initial(
  name: str, value: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
  """Of order 1 / sqrt(inputs), so that activations stay of order 1."""
  if value.dim() == 1:  # Norms stay near 1 and biases near 0.
    return value + 0.1 * noise
  if name.endswith("conv1d.weight"):
    # Queries and keys are mostly positive, as a product of them near 0 would
    # leave a head's norm nothing but rounding errors to enlarge.
    return noise + 0.5
  inputs = value.shape[-1] if "experts" in name else value[0].numel()
  if name.endswith(("lm_head.weight", "embed_tokens.weight")):
    noise = noise / 2  # The largest of thousands of logits is of order 1.
  return noise / inputs**0.5


def compiled(
  model: qwen_text.QwenText, f: Callable[..., Any]
) -> Callable[..., Any]:
  """f(model, *args) as a jitted function of `args`."""
  graph, state = nnx.split(model)
  run = lambda state, *args: f(nnx.merge(graph, state), *args)
  return functools.partial(jax.jit(run, compiler_options=CHEAP), state)


def scorer(model: qwen_text.QwenText) -> Callable[[Batch], Results]:
  """Logits and log-probs of packed batches, compiled once for each shape."""

  def score(model, inputs, following):
    logits = model.logits(model(inputs))
    return logits, _logprobs(logits, following)

  run = compiled(model, score)

  def results(batch: Batch) -> Results:
    following, same = targets(batch.inputs)
    logits, logprobs = run(batch.inputs, following)
    return _results(batch, logits, np.where(same, logprobs, 0))

  return results


def differentiator(
  model: qwen_text.QwenText,
) -> Callable[[Batch, np.ndarray, Results], Results]:
  """`scorer` with gradients: (batch, weights [B, T], reference) -> results.

  Of the reference only the layout of its gradients is read.
  """

  def loss(model, patches, inputs, following, weights_BT):
    inputs = dataclasses.replace(inputs, patches=patches)
    logits = model.logits(model(inputs))
    logprobs = _logprobs(logits, following)
    return (logprobs * weights_BT).sum(), (logits, logprobs)

  def score(model, inputs, *args):
    (_, scores), gradients = nnx.value_and_grad(
      loss, argnums=(0, 1), has_aux=True
    )(model, inputs.patches, inputs, *args)
    return scores, gradients

  run = compiled(model, score)

  def results(batch: Batch, weights_BT: np.ndarray, want: Results) -> Results:
    following, same = targets(batch.inputs)
    (logits, logprobs), (gradients, pixel_gradient) = run(
      batch.inputs, following, weights_BT
    )
    return dataclasses.replace(
      _results(batch, logits, np.where(same, logprobs, 0)),
      gradients=_by_key(model, gradients, want.gradients),
      pixel_gradient=np.asarray(pixel_gradient),
    )

  return results


def _logprobs(logits_BTX: jax.Array, following_BT: jax.Array) -> jax.Array:
  scores = jax.nn.log_softmax(logits_BTX)
  return jnp.take_along_axis(scores, following_BT[..., None], -1)[..., 0]


def _results(batch: Batch, logits, logprobs) -> Results:
  real = batch.inputs.segment_ids[..., None] > 0
  nothing = np.zeros_like(batch.inputs.patches)
  return Results(np.where(real, logits, 0), logprobs, {}, nothing)


def _by_key(
  model: qwen_text.QwenText, state: nnx.State, like: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """The arrays of a state by their keys in the checkpoint."""
  arrays = {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}
  found = {}
  for tensor in hf_checkpoint.tensors_of(model):
    if tensor.fixed:
      assert not arrays[tensor.path].any()  # Choices have no gradient.
      continue
    array = arrays[tensor.path]
    for key, one in zip(tensor.keys, array if tensor.stacked else [array]):
      # Experts are held the other way round.
      swapped = tensor.transposed or one.shape != like[key].shape
      found[key] = one.swapaxes(-1, -2) if swapped else one
  return found
