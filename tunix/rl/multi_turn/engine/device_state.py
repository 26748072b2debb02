"""Holds a policy's weights, KV cache and vision pool on the device.

Promises: the weights are the engine's own copy, so that their giver may donate
or update theirs; new weights are checked before they take over. On a mesh, KV
pages and vision tokens are split into shards over `cached_attention.ROWS`, and
heads as the policy wants it: a device holds its own shard only.
Matrices of Qwen policies are kept in the type they are computed in.

Does not compile or run programs; `programs` does.
"""

from __future__ import annotations

import math
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
from jax.typing import DTypeLike
import numpy as np
from tunix.rl.multi_turn.engine import page_layout
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import int8
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import experts
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

Path = tuple[str, ...]
Params = nnx.Module | nnx.State | Mapping[str, Any]
"""A policy's parameters: its module, its state (full or Param only), or the
pure dict of that."""


@runtime_checkable
class PagedPolicy(base.Policy, Protocol):
  """A policy with a program of its own for a KV cache in pages."""

  reads_pages: bool  # False: not on this backend.

  def init_pages(self, pages: int, page_size: int) -> Any:
    """Returns an empty KV cache (a pytree) of `pages` pages."""
    ...

  def extend_pages(
    self,
    tokens: base.Array,
    positions: base.Array,
    starts: base.Array,
    lengths: base.Array,
    cache: object,
    pages: base.Array,
    vision_index: base.Array | None = None,
    vision: object = None,
  ) -> tuple[jax.Array, Any]:
    """`extend` with a cache of pages; `pages` is int32[B, M], each row's."""
    ...


def leaves_by_path(params: Params) -> dict[Path, Any]:
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
      jax.tree_util.keystr((p,), simple=True)
      for p in path
      if not isinstance(p, jax.tree_util.GetAttrKey)
    ]
    named[tuple(parts)] = leaf
  return named


def _checked(
  params: Params,
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


def _narrow(model: base.Policy) -> dict[Path, Any]:
  """Returns the type in which a policy computes with its matrices, by path.

  Of a policy whose parameters are wider than that and which casts its matrices
  wherever it uses them: narrower ones give the same numbers.
  """
  if not isinstance(model, qwen_text.QwenText):
    return {}
  compute = jnp.dtype(model.config.compute_dtype)
  types = {}
  for path, module in nnx.iter_modules(model):
    names: tuple[str, ...] = ()
    if isinstance(module, layers.Linear) or (
      # The tower's positions are interpolated in float32.
      isinstance(module, layers.Embedding) and path[:1] != ("visual",)
    ):
      names = ("weight",)
    elif isinstance(module, experts.Experts):
      names = ("gate_up_proj", "down_proj")
    for name in names:
      dtype = getattr(module, name).dtype
      if jnp.issubdtype(dtype, jnp.floating) and (
        dtype.itemsize > compute.itemsize
      ):
        types[(*map(str, path), name)] = compute
  return types


def types_to_send(model: base.Policy, weights: str = "same") -> dict[Path, Any]:
  """Narrower types in which parameters may travel to an engine, by path.

  The engine's weights are equal bit for bit: it would round them so itself.

  Args:
    model: the policy.
    weights: Type of weights, see `DeviceState`; int8 ones are rounded once.
  """
  types = _narrow(model)
  if weights == "int8":
    for path in int8.paths(model):
      types.pop(path, None)
  return types


def _int8(
  model: Any, narrow: dict[Path, Any]
) -> tuple[Any, Callable[[dict[Path, Any]], dict[Path, Any]]]:
  """Returns the model's int8 copy and the converter of parameters.

  Rounded matrices leave `narrow`. Of a model of shapes, the copy is one, too.
  """
  if any(
    isinstance(x, jax.ShapeDtypeStruct)
    for x in jax.tree.leaves(nnx.state(model))
  ):
    graphdef, state = nnx.split(model)
    copy: Any = nnx.eval_shape(
      lambda s: int8.quantized(nnx.merge(graphdef, s)), state
    )
    convert: Any = lambda named: named
  else:
    convert = int8.Converter(model)
    copy = convert.copy()
  for path, value in leaves_by_path(copy).items():
    if value.dtype == jnp.int8:
      narrow.pop(path, None)
  return copy, convert


def _places(state: nnx.State, mesh: jax.sharding.Mesh | None) -> list[Any]:
  """Returns each parameter's sharding on a mesh, in order of the leaves."""
  if mesh is None:
    return [None] * len(jax.tree.leaves(state))
  return [
    sharding.parameter_sharding(variable, mesh)
    for variable in jax.tree.leaves(
      state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
  ]


def weight_bytes(
  model: base.Policy, mesh: jax.sharding.Mesh, weights: str = "same"
) -> int:
  """Returns the bytes of an engine's weights on a device.

  Args:
    model: the policy, of arrays or of shapes.
    mesh: Mesh that it lies on, real or abstract; None for a single device.
    weights: Type of weights, see `DeviceState`; "int8" counts matrices a byte a
      number, without their scales.
  """
  narrow = _narrow(model)
  rounded = int8.paths(model) if weights == "int8" else frozenset()
  total = 0
  for path, variable in nnx.to_flat_state(nnx.state(model)):
    name = tuple(map(str, path))
    item = jnp.dtype(narrow.get(name, variable.dtype)).itemsize
    shape = tuple(variable.shape)
    if mesh is not None:
      shape = sharding.parameter_sharding(variable, mesh).shard_shape(shape)
    total += math.prod(shape) * (1 if name in rounded else item)
  return total


def shards_of(model: base.Policy) -> int:
  """Shards of an engine's caches for a policy of arrays."""
  place = _replicated(tuple(jax.tree.leaves(nnx.state(model))))
  return cached_attention.row_shards(
    None if place is None else cast(jax.sharding.Mesh, place.mesh)
  )


def _replicated(params: tuple[Any, ...]) -> jax.sharding.NamedSharding | None:
  """Sharding that replicates on the parameters' mesh; None on one device."""
  for x in params:
    place = getattr(x, "sharding", None)  # numpy arrays have none.
    if isinstance(place, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
        place.mesh, jax.sharding.PartitionSpec()
      )
  return None


def cache_shapes(model: base.Policy) -> Callable[[int, int], Any]:
  """Shapes of a policy's `init_cache` by rows and tokens; makes none."""
  graphdef, state = nnx.split(model)
  return lambda rows, tokens: jax.eval_shape(
    lambda s: nnx.merge(graphdef, s).init_cache(rows, tokens), state
  )


def count_parameters(model: base.Policy) -> int:
  """Returns the number of a policy's parameters."""
  state = nnx.state(model, nnx.Param)
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


class DeviceState:
  """The buffers that an engine's programs read and donate.

  Attributes:
    params: the leaves of the policy's state.
    cache: KV cache, a tree of pages.
    pool: vision tokens, a tree of [shards, vision_tokens, …].
    merge: makes the policy of `params`, within a program.
    shards: blocks that a call's rows, the pages and the pool are split into.
    place: sharding of inputs and outputs beside the cache; None on a single
      device.
    row_place: Sharding of arrays that are split by rows.
    cache_place: the sharding of each leaf of the cache.
    cache_shape, pool_shape: shapes, dtypes and places of cache and pool.
    processor: the policy's host side.
    layout: gathers rows from pages; None where the policy reads pages itself.
    pages: Pages of a shard of the KV cache, page 0 included.
    page_size: tokens of a page.
    vision_tokens: size of a shard of the pool.
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
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Args:

      model: a flax nnx module; its present parameters are copied. Shapes are
        enough to lower programs, with `mesh`; nothing is made of them then.
      processor: the policy's host side.
      pages: Pages of a shard of the KV cache, page 0 included.
      page_size: tokens of a page.
      vision_tokens: size of a shard of the vision pool.
      weights: "same" as the model's, or "int8", see `policy.int8`.
      mesh: Mesh of a model of shapes; else that of its parameters.

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
    narrow = _narrow(model)
    if weights == "int8":
      model, self._convert = _int8(model, narrow)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    self._abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    named = leaves_by_path(state)
    if len(named) != len(leaves):
      raise ValueError("the policy's parameters do not have unique paths")
    order = {id(x): i for i, x in enumerate(leaves)}
    self._index = {path: order[id(leaf)] for path, leaf in named.items()}
    paths = {i: path for path, i in self._index.items()}
    dtypes = [narrow.get(paths[i], x.dtype) for i, x in enumerate(leaves)]
    if self._abstract:
      places = _places(state, mesh)
      self.params: tuple[Any, ...] = tuple(
        jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)
        for x, dtype, place in zip(leaves, dtypes, places, strict=True)
      )
    else:
      # Rounded matrices are new arrays already, and so are narrower ones.
      self.params = tuple(
        x if x.dtype == jnp.int8 else jnp.array(x, dtype, copy=True)
        for x, dtype in zip(leaves, dtypes, strict=True)
      )

    def merge(params: tuple[jax.Array, ...]) -> base.Policy:
      return nnx.merge(graphdef, jax.tree.unflatten(treedef, params))

    self.merge = merge
    self.place = _replicated(self.params)
    self._mesh = (
      None if self.place is None else cast(jax.sharding.Mesh, self.place.mesh)
    )
    self.shards = cached_attention.row_shards(self._mesh)
    self.row_place = self._placed(cached_attention.ROWS)
    self.vocabulary = self._vocabulary()
    self._make_cache(model)
    vision = jax.eval_shape(
      lambda p, *a: self.merge(p).encode_images(*a),
      self.params,
      *self.encode_shapes(1, processor.patches_per_token),
    )
    self.pool_shape = jax.tree.map(
      lambda x: self.rows_shape(
        x.dtype, self.shards, vision_tokens, *x.shape[2:]
      ),
      vision,
    )
    self.cache = self.pool = None
    if not self._abstract:
      self.reset()

  def _make_cache(self, model: base.Policy) -> None:
    """Fills in the cache's shape, where it lies, and its layout."""
    n, pages = self.page_size, self.shards * self.pages
    self.layout = None
    if isinstance(model, PagedPolicy) and model.reads_pages:
      make = lambda p: cast(PagedPolicy, self.merge(p)).init_pages(pages, n)
      axes = base.optional(model, "page_axes")
      place = lambda _: self._placed(*axes)
    else:
      make = lambda p: self.merge(p).init_cache(pages, n)
      layout = self.layout = page_layout.PageLayout(
        lambda batch, length: jax.eval_shape(
          lambda p: self.merge(p).init_cache(batch, length), self.params
        ),
        n,
        self._mesh,
        base.optional(model, "cache_axes"),
      )
      place = lambda i: self._placed(*layout.specs[i])
    shapes, tree = jax.tree.flatten(jax.eval_shape(make, self.params))
    self.cache_place: Any = None
    if self._mesh is not None:
      self.cache_place = jax.tree.unflatten(
        tree, map(place, range(len(shapes)))
      )
    self.cache_shape = jax.tree.unflatten(
      tree,
      [
        jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=None if self._mesh is None else place(i)
        )
        for i, x in enumerate(shapes)
      ],
    )

  @property
  def copies_pages(self) -> bool:
    """Whether a page's first tokens can be had by a copy: not of states,
    which are those after its last token, nor where the policy lays pages."""
    return self.layout is not None and not self.layout.keeps_state

  def reset(self) -> None:
    """Empties KV cache and vision pool."""
    self.cache = self.pool = None
    self.cache = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.cache_shape
    )
    self.pool = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.pool_shape
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

  def shape(self, dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
    """Returns an array that is not a parameter, and its place."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self.place)

  def rows_shape(self, dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
    """As `shape`, of an array that is split by rows."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self.row_place)

  def _placed(self, *axes: Any) -> jax.sharding.NamedSharding | None:
    if self._mesh is None:
      return None
    return jax.sharding.NamedSharding(
      self._mesh, jax.sharding.PartitionSpec(*axes)
    )

  def encode_shapes(
    self, images: int, patches: int
  ) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Patches, which of them are real, and their positions."""
    shape = self.rows_shape
    return (
      shape(jnp.uint8, images, patches, self.processor.patch_bytes),
      shape(jnp.bool_, images, patches),
      shape(jnp.int32, images, patches, self.processor.position_axes),
    )

  def jit(
    self, function: Callable[..., Any], out: object = None, **options: Any
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
