"""Holds a policy's weights, KV cache and vision pool on the device.

Promises: the weights are the engine's own copy, so that their giver may donate
or update theirs; new weights are checked before they take over. On a mesh, the
cache lies where the policy wants it, the pool on every device.

Does not compile or run programs; `programs` does.
"""

from __future__ import annotations

from typing import (
  Any,
  Callable,
  cast,
  Collection,
  Mapping,
  Protocol,
  runtime_checkable,
)

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.engine import kv_cache
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import int8

Path = tuple[str, ...]
Params = nnx.Module | nnx.State | Mapping[str, Any]
"""A policy's parameters: its module, its state (full or Param only), or the
pure dict of that."""


@runtime_checkable
class PagedPolicy(base.Policy, Protocol):
  """A policy with a program of its own for a KV cache in pages."""

  reads_pages: bool  # False: not on this backend.

  def init_pages(self, pages: int, page_size: int) -> Any:
    """An empty KV cache (a pytree) of `pages` pages."""
    ...

  def extend_pages(
      self,
      tokens: base.Array,
      positions: base.Array,
      starts: base.Array,
      lengths: base.Array,
      cache: Any,
      pages: base.Array,
      vision_index: base.Array | None = None,
      vision: Any = None,
  ) -> tuple[jax.Array, Any]:
    """`extend` with a cache of pages; `pages` is int32[B, M], each row's."""
    ...


def leaves_by_path(params: Any) -> dict[Path, Any]:
  """Flattens `Params` or any other tree of arrays to {path: array}."""
  if isinstance(params, nnx.Module):
    params = nnx.state(params)
  if isinstance(params, nnx.State):
    params = nnx.to_pure_dict(params)
  flat, _ = jax.tree_util.tree_flatten_with_path(params)
  named = {}
  for path, leaf in flat:
    # A tree of nnx variables adds an attribute step that a pure dict lacks.
    parts = [
        str(getattr(p, "key", getattr(p, "idx", None)))
        for p in path
        if not isinstance(p, jax.tree_util.GetAttrKey)
    ]
    named[tuple(parts)] = leaf
  return named


def _checked(
    params: Any,
    own: Mapping[Path, jax.ShapeDtypeStruct],
    required: Collection[Path],
) -> dict[Path, Any]:
  """`leaves_by_path` of parameters that fit a policy.

  Args:
    params: the new ones.
    own: the policy's.
    required: paths that must be among the new ones.

  Raises:
    ValueError: a parameter is missing, unknown, or has another shape.
  """
  named = leaves_by_path(params)
  missing = sorted(set(required) - set(named))
  unknown = sorted(set(named) - set(own))
  if missing or unknown:
    show = lambda paths: ", ".join("/".join(p) for p in paths[:5]) or "none"
    raise ValueError(
        f"weights do not fit the policy: missing {show(missing)};"
        f" unknown {show(unknown)}"
    )
  for path, value in named.items():
    if np.shape(value) != own[path].shape:
      raise ValueError(
          f"weight {'/'.join(path)} has shape {np.shape(value)}, the policy"
          f" needs {own[path].shape}"
      )
  return named


def _replicated(
    params: tuple[jax.Array, ...],
) -> jax.sharding.NamedSharding | None:
  """Sharding that replicates on the parameters' mesh; None on one device."""
  for x in params:
    if isinstance(x.sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
          x.sharding.mesh, jax.sharding.PartitionSpec()
      )
  return None


def cache_shapes(model: Any) -> Callable[[int, int], Any]:
  """Shapes of a policy's `init_cache` by rows and tokens; makes none."""
  graphdef, state = nnx.split(model)
  return lambda rows, tokens: jax.eval_shape(
      lambda s: nnx.merge(graphdef, s).init_cache(rows, tokens), state
  )


class DeviceState:
  """The buffers that an engine's programs read and donate.

  Attributes:
    params: the leaves of the policy's state.
    cache: KV cache, a tree of pages.
    pool: vision tokens, a tree of [1, vision_tokens, …].
    merge: makes the policy of `params`, within a program.
    place: sharding of inputs and outputs beside the cache; None on a single
      device.
    cache_place: the sharding of each leaf of the cache.
    cache_shape, pool_shape: shapes, dtypes and places of those trees.
    processor: the policy's host side.
    layout: gathers rows from pages; None where the policy reads pages itself.
    pages: of the KV cache, page 0 included.
    page_size: tokens of a page.
    vision_tokens: size of the pool.
    vocabulary: tokens that the policy knows.
  """

  def __init__(
      self,
      model: base.Policy,
      processor: base.Processor,
      *,
      pages: int,
      page_size: int,
      vision_tokens: int,
      weights: str = "same",
  ):
    """Args:

      model: a flax nnx module; its present parameters are copied.
      processor: the policy's host side.
      pages: of the KV cache, page 0 included.
      page_size: tokens of a page.
      vision_tokens: size of the vision pool.
      weights: "same" as the model's, or "int8", see `policy.int8`.

    Raises:
      ValueError: a setting does not go together with this policy.
    """
    self.pages = pages
    self.page_size = page_size
    self.vision_tokens = vision_tokens
    self.processor = processor
    self._own = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for path, x in leaves_by_path(nnx.state(model)).items()
    }
    self._required = set(leaves_by_path(nnx.state(model, nnx.Param)))
    self._convert: Callable[[dict[Path, Any]], dict[Path, Any]] = lambda x: x
    if weights == "int8":
      converter = int8.Converter(model)
      self._convert = converter
      model = cast(base.Policy, converter.copy())
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    # Rounded matrices are new arrays already.
    self.params = tuple(
        x if x.dtype == jnp.int8 else jnp.array(x, copy=True) for x in leaves
    )
    named = leaves_by_path(state)
    if len(named) != len(leaves):
      raise ValueError("the policy's parameters do not have unique paths")
    order = {id(x): i for i, x in enumerate(leaves)}
    self._index = {path: order[id(leaf)] for path, leaf in named.items()}
    self.merge: Callable[[tuple[jax.Array, ...]], base.Policy] = (
        lambda params: nnx.merge(
            graphdef, jax.tree.unflatten(treedef, params)
        )
    )
    self.place = _replicated(self.params)
    self.vocabulary = self._vocabulary()
    self._make_cache(isinstance(model, PagedPolicy) and model.reads_pages)
    vision = jax.eval_shape(
        lambda p, *a: self.merge(p).encode_images(*a),
        self.params,
        *self.encode_shapes(1, processor.patches_per_token),
    )
    self.pool_shape = jax.tree.map(
        lambda x: self.shape(x.dtype, 1, vision_tokens, *x.shape[2:]),
        vision,
    )
    self.reset()

  def _make_cache(self, reads_pages: bool) -> None:
    """Fills in how the cache is made, where it lies, and its layout."""
    n = self.page_size
    self.layout = None
    if reads_pages:
      # Where the policy wants it, else everywhere.
      self._init_cache = jax.jit(
          lambda p: cast(PagedPolicy, self.merge(p)).init_pages(self.pages, n)
      )
    else:
      self._init_cache = self.jit(
          lambda p: self.merge(p).init_cache(self.pages, n)
      )
      self.layout = kv_cache.PageLayout(
          lambda batch, length: jax.eval_shape(
              lambda p: self.merge(p).init_cache(batch, length), self.params
          ),
          self.pages,
          n,
      )
    self.cache = self._init_cache(self.params)
    self.cache_place = jax.tree.map(lambda x: x.sharding, self.cache)
    self.cache_shape = jax.tree.map(
        lambda x: self.shape(x.dtype, *x.shape)
        if self.place is None
        else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        self.cache,
    )

  def reset(self) -> None:
    """Empties KV cache and vision pool."""
    self.cache = self.pool = None
    self.cache = self._init_cache(self.params)
    self.pool = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
        self.pool_shape,
    )

  def prepare(self, params: Params) -> tuple[jax.Array, ...]:
    """New leaves for `params`, checked and placed.

    Args:
      params: the policy's parameters. Values are cast to its dtypes and moved
        to its device, never copied when they are already there: the caller
        must not donate or delete them while the engine uses them.

    Raises:
      ValueError: a parameter is missing, unknown, or has another shape.
    """
    named = _checked(params, self._own, self._required)
    new = list(self.params)
    for path, value in self._convert(named).items():
      old = self.params[self._index[path]]
      if value.dtype != old.dtype:
        value = value.astype(old.dtype)
      new[self._index[path]] = jax.device_put(value, old.sharding)
    return tuple(new)

  def shape(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """An array that is not a parameter, and its place."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self.place)

  def encode_shapes(
      self, images: int, patches: int
  ) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Patches, which of them are real, and their positions."""
    return (
        self.shape(jnp.uint8, images, patches, self.processor.patch_bytes),
        self.shape(jnp.bool_, images, patches),
        self.shape(jnp.int32, images, patches, self.processor.position_axes),
    )

  def jit(
      self, function: Callable[..., Any], out: Any = None, **options: Any
  ) -> Any:
    """`jax.jit` with the results' places fixed (`out`, else `place`).

    Programs hand arrays to each other, so each needs them where the last one
    left them.
    """
    if self.place is not None:
      options["out_shardings"] = self.place if out is None else out
    return jax.jit(function, **options)

  def _vocabulary(self) -> int:
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

    def one_step(params, tokens, positions, starts, lengths):
      model = self.merge(params)
      hidden, _ = model.extend(
          tokens, positions, starts, lengths, model.init_cache(1, 8)
      )
      return model.logits(hidden)

    logits = jax.eval_shape(
        one_step, self.params, ints(1, 1), ints(1, 1, 3), ints(1), ints(1)
    )
    return logits.shape[-1]
