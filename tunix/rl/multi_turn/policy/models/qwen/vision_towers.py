"""Implements the vision towers of Qwen2-VL to Qwen3.5, and of GLM-V.

Each tower reads like its forward pass: patches and their learned positions,
blocks of attention within an image, and the merging of 2x2 patches into a
vision token.

Source: the technical reports of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and
GLM-4.1V-Thinking, and `transformers`' `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl` and
`glm4v`, to which the numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.layers import vision_blocks
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

_SHARPNESS = -0.75
"""Of the cubic convolution (Keys 1981) that stretches GLM-V's positions."""

_QWEN3_LAYERS = ("linear_fc1", "linear_fc2")


class _Tower(nnx.Module):
  """Patches, blocks and a merger.

  A family makes its parts in `_make_parts`, in the order of their random
  numbers, and adds what its forward pass has besides.
  """

  patch_bias = True
  blocks: Any  # nnx.List, of `_make_parts`.
  merger: Any

  def __init__(
    self,
    config: qwen_shapes.QwenVLConfig,
    init: layers.Init,
    mesh: jax.sharding.Mesh | None = None,
  ):
    vision = config.vision
    self.config = config
    self.mesh = mesh
    self.patch_embed = layers.PatchEmbed(
      vision.patch_size,
      vision.hidden_size,
      init,
      vision.image_mean,
      vision.image_std,
      bias=self.patch_bias,
    )
    tensor = vision_blocks.tensor_axis(config)
    self._make_parts(vision_blocks.Make(vision, init, tensor, mesh))

  def _make_parts(self, make: vision_blocks.Make) -> None:
    raise NotImplementedError

  def _make_blocks(
    self,
    make: vision_blocks.Make,
    norm: Callable[[], nnx.Module],
    mlp: Callable[[], nnx.Module],
    attention_bias: bool = True,
  ) -> nnx.List:
    attention = lambda: vision_blocks.VisionAttention(make, attention_bias)
    return nnx.List(
      [
        vision_blocks.VisionBlock(norm, attention(), mlp())
        for _ in range(make.vision.depth)
      ]
    )

  def __call__(
    self,
    patches_SPF: jax.Array,
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
    reach: kernels.Reach,
  ) -> jax.Array:
    """Vision tokens [S, V, 1 + deepstack, D].

    Args:
      patches_SPF: uint8 (or any number in [0, 255]).
      segments_SP: int32, the image a patch belongs to.
      positions_SP4: int32, row and column of the patch and of its grid.
      reach: Most patches of an image, and whether images are aligned.
    """
    config = self.config
    x = self.patch_embed(patches_SPF, jnp.dtype(config.compute_dtype))
    x = self._with_positions(x, positions_SP4)
    rotation = layers.vision_rotation(
      positions_SP4[..., :2], config.vision.head_dim
    )
    run = lambda segments: vision_blocks.runner(
      config, self.mesh, segments, rotation, reach
    )
    return self._merged(x, run, segments_SP, positions_SP4)

  def _with_positions(
    self, x_SPD: jax.Array, positions_SP4: jax.Array
  ) -> jax.Array:
    """Adds learned positions, where the family has them."""
    del positions_SP4
    return x_SPD

  def _merged(
    self,
    x_SPD: jax.Array,
    run: Callable[[jax.Array], Any],
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
  ) -> jax.Array:
    """Runs the blocks and merges patches; `run` is of some segments."""
    del positions_SP4
    scan = self.config.scan_layers
    x = layers.repeat(run(segments_SP), self.blocks, x_SPD, scan)
    return self.merger(x)[:, :, None]


# --- Qwen2-VL, Qwen2.5-VL -----------------------------------------------------


class PatchMerger(nnx.Module):
  """Merges four neighbouring patches to one vision token."""

  def __init__(
    self,
    make: vision_blocks.Make,
    norm: type[layers.RMSNorm] | type[layers.LayerNorm] = layers.RMSNorm,
  ):
    vision, init, tensor, self.mesh = make
    wide = vision.hidden_size * vision.patches_per_token
    self.merge = vision.patches_per_token
    self.ln_q = norm(vision.hidden_size, init)
    # The checkpoint numbers the layers with the activation between.
    self.mlp = vision_blocks.TwoLayerMLP(
      (wide, wide, vision.out_hidden_size),
      init,
      tensor,
      layers.gelu,
      ("0", "2"),
    )

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    x = self.mlp(self.ln_q(x_SPD).reshape(s, p // self.merge, -1))
    return sharding.constrain(x, self.mesh, *sharding.TOKENS)


class Qwen2(_Tower):
  """Layer norms and full attention."""

  patch_bias = False

  def _make_parts(self, make: vision_blocks.Make) -> None:
    vision, init, tensor, _ = make
    width = vision.hidden_size
    self.blocks = self._make_blocks(
      make,
      functools.partial(layers.LayerNorm, width, init),
      lambda: vision_blocks.TwoLayerMLP(
        (width, vision.intermediate_size, width), init, tensor, quick_gelu
      ),
    )
    self.merger = PatchMerger(make, layers.LayerNorm)


def quick_gelu(x: jax.Array) -> jax.Array:
  """Returns x sigmoid(1.702 x)."""
  return x * jax.nn.sigmoid(1.702 * x)


class Qwen2_5(_Tower):
  """RMS norms; most blocks attend within windows of 112 pixels.

  Windows are a second kind of segment: patches are never moved.
  """

  patch_bias = False

  def _make_parts(self, make: vision_blocks.Make) -> None:
    vision, init, tensor, _ = make
    width = vision.hidden_size
    self.blocks = self._make_blocks(
      make,
      functools.partial(layers.RMSNorm, width, init),
      lambda: layers.GatedMLP(
        width, vision.intermediate_size, init, tensor, bias=True
      ),
    )
    self.merger = PatchMerger(make)

  def _merged(
    self,
    x_SPD: jax.Array,
    run: Callable[[jax.Array], Any],
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
  ) -> jax.Array:
    config, x = self.config, x_SPD
    runs = run(self._windows(segments_SP, positions_SP4)), run(segments_SP)
    # Neighbouring blocks that attend alike run as one loop.
    attends_to_all = lambda pair: pair[0] in config.vision.fullatt_block_indexes
    for to_all, numbered in itertools.groupby(
      enumerate(self.blocks), attends_to_all
    ):
      blocks = [block for _, block in numbered]
      x = layers.repeat(runs[to_all], blocks, x, config.scan_layers)
    return self.merger(x)[:, :, None]

  def _windows(
    self, segments_SP: jax.Array, positions_SP4: jax.Array
  ) -> jax.Array:
    """Returns int32[S, P], equal for patches of one window of one image."""
    vision = self.config.vision
    # A window holds whole merged tokens.
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size
    side *= vision.spatial_merge_size
    place = jnp.asarray(positions_SP4)
    at, of = place[..., :2] // side, -(-place[..., 2:] // side)
    # Room for 4096 windows of an image: 117 megapixels.
    number = jnp.minimum(at[..., 0] * of[..., 1] + at[..., 1], 4095)
    return jnp.where(segments_SP > 0, segments_SP * 4096 + number, 0)


# --- Qwen3-VL, Qwen3.5 --------------------------------------------------------


class DeepMerger(vision_blocks.TwoLayerMLP):
  """Merges four neighbouring patches to one vision token.

  The norm is over a patch, or (deepstack) over the four together.
  """

  def __init__(self, make: vision_blocks.Make, norm_after: bool):
    vision, init, tensor, self.mesh = make
    wide = vision.hidden_size * vision.patches_per_token
    self.merge = vision.patches_per_token
    self.norm_after = norm_after
    self.norm = layers.LayerNorm(
      wide if norm_after else vision.hidden_size, init
    )
    widths = wide, wide, vision.out_hidden_size
    super().__init__(widths, init, tensor, layers.gelu, _QWEN3_LAYERS)

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    x = x_SPD if self.norm_after else self.norm(x_SPD)
    x = x.reshape(s, p // self.merge, -1)
    x = super().__call__(self.norm(x) if self.norm_after else x)
    return sharding.constrain(x, self.mesh, *sharding.TOKENS)


class Qwen3(_Tower):
  """Learned positions; outputs of a few blocks are merged too ("deepstack").

  Those are later added to the decoder's first layers.
  """

  def _make_parts(self, make: vision_blocks.Make) -> None:
    vision, init, tensor, _ = make
    width = vision.hidden_size
    self.pos_embed = layers.Embedding(
      vision.num_position_embeddings, width, init, (None, "fsdp")
    )
    self.blocks = self._make_blocks(
      make,
      functools.partial(layers.LayerNorm, width, init),
      lambda: vision_blocks.TwoLayerMLP(
        (width, vision.intermediate_size, width),
        init,
        tensor,
        layers.gelu_tanh,
        _QWEN3_LAYERS,
      ),
    )
    self.merger = DeepMerger(make, norm_after=False)
    self.deepstack_merger_list = nnx.List(
      [
        DeepMerger(make, norm_after=True)
        for _ in vision.deepstack_visual_indexes
      ]
    )

  def _merged(
    self,
    x_SPD: jax.Array,
    run: Callable[[jax.Array], Any],
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
  ) -> jax.Array:
    config, x = self.config, x_SPD
    indexes = config.vision.deepstack_visual_indexes
    block_run = run(segments_SP)
    deep, first = [], 0
    blocks = list(self.blocks)
    for i in sorted(indexes):
      x = layers.repeat(block_run, blocks[first : i + 1], x, config.scan_layers)
      deep.append(self.deepstack_merger_list[indexes.index(i)](x))
      first = i + 1
    x = layers.repeat(block_run, blocks[first:], x, config.scan_layers)
    return jnp.stack([self.merger(x), *deep], axis=2)

  def _with_positions(
    self, x_SPD: jax.Array, positions_SP4: jax.Array
  ) -> jax.Array:
    """Adds the square of positions, stretched over the image's grid.

    Bilinear, corner on corner. In whole numbers up to the fraction, so that no
    rounding picks another neighbour.
    """
    # A small table, looked up four times: once gathered is cheapest.
    table = sharding.constrain(self.pos_embed.weight[...], self.mesh)
    side = round(self.config.vision.num_position_embeddings**0.5)
    place = jnp.asarray(positions_SP4)
    steps = jnp.maximum(place[..., 2:] - 1, 1)
    scaled = place[..., :2] * (side - 1)
    low = scaled // steps
    fraction = (scaled % steps).astype(jnp.float32) / steps
    high = jnp.minimum(low + 1, side - 1)
    taps = (low, 1 - fraction), (high, fraction)
    table = table.astype(jnp.float32)
    places = vision_blocks.interpolated(table, side, taps)
    return x_SPD + places.astype(x_SPD.dtype)


# --- GLM-4.1V, GLM-4.5V -------------------------------------------------------


class Downsample(nnx.Module):
  """Convolution without overlap: the patches of a vision token become one.

  The kernel is [out, D, side, side], as in the checkpoint.
  """

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    side = vision.spatial_merge_size
    self.weight = init.normal(
      (vision.out_hidden_size, vision.hidden_size, side, side),
      ("fsdp", None, None, None),
    )
    self.bias = init.full(0.0, vision.out_hidden_size)
    self.merge = vision.patches_per_token

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    kernel = self.weight[...]
    # A vision token's patches follow each other in raster order.
    flat = kernel.transpose(2, 3, 1, 0).reshape(-1, kernel.shape[0])
    y = kernels.dot(x_SPD.reshape(s, p // self.merge, -1), flat)
    return y + self.bias[...].astype(y.dtype)


class GatedMerger(layers.GatedMLP):
  """down(silu(gate(y)) * up(y)) with y = gelu(norm(proj(x)))."""

  def __init__(self, make: vision_blocks.Make):
    vision, init, tensor, _ = make
    width = vision.out_hidden_size
    self.proj = layers.Linear(width, width, init, ("fsdp", tensor), False)
    self.post_projection_norm = layers.LayerNorm(width, init, 1e-5)
    super().__init__(width, vision.intermediate_size, init, tensor)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.post_projection_norm(self.proj(x))
    return super().__call__(layers.gelu(x))


class Embeddings(nnx.Module):
  """A square of learned positions, one for each patch of a square image."""

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    self.position_embedding = layers.Embedding(
      vision.num_position_embeddings, vision.hidden_size, init, (None, "fsdp")
    )


class Glm4v(_Tower):
  """RMS norms, learned positions, and a convolution that merges patches."""

  def _make_parts(self, make: vision_blocks.Make) -> None:
    vision, init, tensor, _ = make
    width = vision.hidden_size
    norm = functools.partial(layers.RMSNorm, width, init, vision.rms_norm_eps)
    self.post_conv_layernorm = norm()
    self.embeddings = Embeddings(vision, init)
    # As wide inside as a vision token: `intermediate_size` is the merger's.
    self.blocks = self._make_blocks(
      make,
      norm,
      lambda: layers.GatedMLP(width, vision.out_hidden_size, init, tensor),
      attention_bias=False,
    )
    self.post_layernorm = norm()
    self.downsample = Downsample(vision, init)
    self.merger = GatedMerger(make)

  def _merged(
    self,
    x_SPD: jax.Array,
    run: Callable[[jax.Array], Any],
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
  ) -> jax.Array:
    scan = self.config.scan_layers
    x = layers.repeat(run(segments_SP), self.blocks, x_SPD, scan)
    x = self.downsample(self.post_layernorm(x))
    x = sharding.constrain(self.merger(x), self.mesh, *sharding.TOKENS)
    return x[:, :, None]

  def _with_positions(
    self, x_SPD: jax.Array, positions_SP4: jax.Array
  ) -> jax.Array:
    """Adds the square of positions, stretched over the image's grid.

    Bicubic, centre on centre; beyond the square its border repeats. In whole
    numbers up to the fraction, so that no rounding picks another neighbour.
    """
    x = self.post_conv_layernorm(x_SPD)
    # A small table, looked up sixteen times: once gathered is cheapest.
    table = self.embeddings.position_embedding.weight[...]
    table = sharding.constrain(table, self.mesh).astype(jnp.float32)
    side = round(self.config.vision.num_position_embeddings**0.5)
    place = jnp.asarray(positions_SP4)
    count = jnp.maximum(place[..., 2:], 1)
    # (place + 1/2) / count * side - 1/2, times 2 count.
    scaled = (2 * place[..., :2] + 1) * side - count
    low = scaled // (2 * count)
    fraction = (scaled % (2 * count)).astype(jnp.float32) / (2 * count)
    taps = [
      (jnp.clip(low + step, 0, side - 1), _cubic(fraction - step))
      for step in (-1, 0, 1, 2)
    ]
    places = vision_blocks.interpolated(table, side, taps)
    return x + places.astype(x.dtype)


def _cubic(distance: jax.Array) -> jax.Array:
  """Weight of a neighbour at a distance within 2."""
  a, x = _SHARPNESS, jnp.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  return jnp.where(x <= 1, near, far)
