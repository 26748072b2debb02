"""Makes meshes, and places arrays on them.

Axes: `data` copies the model and splits the batch, `fsdp` splits both,
`sequence` splits the model and the tokens of a row, `tensor` splits the model
within a layer. Every parameter carries the names of its dimensions' mesh axes
(metadata `axes`, set where it is created): a name, a tuple of names, or None;
a dimension split over `fsdp` is split over `sequence` too. A dimension that the
mesh does not divide evenly is split over fewer of them, at worst replicated; a
parameter with the metadata `else_axes` (an embedding, whose rows are as many as
a vocabulary has) then lies by these.

Axis types are Auto: the compiler places all other arrays.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Sequence

from flax import nnx
import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
from tunix.rl.multi_turn.policy import policy_settings

_Axis = str | tuple[str, ...] | None
AnyMesh = Mesh | jax.sharding.AbstractMesh
AXES = ("data", "fsdp", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp")
MODEL_AXES = ("fsdp", "sequence", "tensor")
"""Axes over which the model is split."""

TOKENS = (BATCH_AXES, "sequence")
"""Axes of activations [rows, tokens, …] between layers."""


def mesh_of(config: policy_settings.MeshConfig) -> Mesh | None:
  """Returns the learner's mesh; None for a single device.

  Raises:
    ValueError: Learner and engine together do not have all devices.
  """
  if config.devices == 1 and not config.engine:
    return None
  if why := config.misfit(jax.device_count(), jax.default_backend()):
    raise ValueError(why)
  return make_mesh(
    config.data,
    config.fsdp,
    config.tensor,
    jax.devices()[: config.devices],
    sequence=config.sequence,
  )


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
  *,
  sequence: int = 1,
) -> Mesh:
  """Returns a mesh with axes `AXES`.

  Args:
    data, fsdp, tensor, sequence: sizes; one of them may be -1, which takes
      the remaining devices.
    devices: default: all.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = {"data": data, "fsdp": fsdp, "sequence": sequence, "tensor": tensor}
  free = [name for name, size in sizes.items() if size == -1]
  fixed = 1
  for name, size in sizes.items():
    if size != -1:
      if size < 1:
        raise ValueError(f"mesh axis {name} must be >= 1 or -1, got {size}")
      fixed *= size
  if len(free) > 1:
    raise ValueError(f"only one mesh axis may be -1, got {free}")
  if free and len(devices) % fixed == 0:
    sizes[free[0]] = len(devices) // fixed
    fixed = len(devices)
  if fixed != len(devices):
    raise ValueError(
      f"mesh {sizes} does not fit {len(devices)} devices; the sizes must"
      " multiply to their number"
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def parameter_sharding(variable: nnx.Variable, mesh: AnyMesh) -> NamedSharding:
  """Returns a parameter's sharding, from its `axes` metadata and its shape."""
  about = variable.get_metadata()
  axes = about.get("axes", (None,) * len(variable.shape))
  spec = _fit(_sequenced(axes, mesh), variable.shape, mesh)
  if "else_axes" in about and not any(spec):
    axes = about["else_axes"]
    spec = _fit(_sequenced(axes, mesh), variable.shape, mesh)
  return NamedSharding(mesh, spec)


def split(mesh: AnyMesh, size: int, axes: str | tuple[str, ...]) -> int:
  """Parts into which a dimension of this size is divided over these axes."""
  names_of_axis = _divide(axes, size, mesh)
  if isinstance(names_of_axis, str):
    names_of_axis = (names_of_axis,)
  names = names_of_axis or ()
  return math.prod(mesh.shape[name] for name in names)


def shard_model(model: nnx.Module, mesh: Mesh) -> None:
  """Moves the model's parameters to their place on `mesh`, in place."""
  state = jax.tree.map(
    lambda v: v.replace(put(v[...], parameter_sharding(v, mesh))),
    nnx.state(model),
    is_leaf=lambda v: isinstance(v, nnx.Variable),
  )
  nnx.update(model, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Shards the leading axis (rows B, buffers S) over `data` and `fsdp`."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_batch_shards(mesh: Mesh) -> int:
  """Shards of a batch that this process holds.

  Raises:
    ValueError: a shard is held by several processes, or a process holds shards
      that do not follow one another.
  """
  shards = batch_shards(mesh)
  holders: dict[int, set[int]] = {}
  places: Any = batch_sharding(mesh).devices_indices_map((shards,))
  for device, index in places.items():
    holders.setdefault(device.process_index, set()).add(index[0].start or 0)
  local = sorted(holders.get(jax.process_index(), ()))
  together = sum(len(shards_of_host) for shards_of_host in holders.values())
  contiguous = local == list(range(local[0], local[0] + len(local)))
  if together != shards or not contiguous:
    raise ValueError(
      f"the mesh {dict(mesh.shape)} spreads a row of a batch over several"
      f" of the {len(holders)} processes; mesh.sequence * mesh.tensor must"
      f" divide the {jax.local_device_count()} devices of a process"
    )
  return len(local)


def put(value: object, where: jax.sharding.Sharding) -> jax.Array:
  """`value` laid out as `where` says, also over several processes.

  Args:
    value: an array that every process has whole, with equal content, or one
      that lies over the processes already.
    where: devices of one process or of several.
  """
  if where.is_fully_addressable:
    return jax.device_put(value, where)
  if isinstance(value, jax.Array) and not value.is_fully_addressable:
    if value.sharding.is_equivalent_to(where, value.ndim):
      return value
    return jax.jit(lambda x: x, out_shardings=where)(value)
  array = np.asarray(value)
  return jax.make_array_from_callback(
    array.shape, where, lambda index: array[index]
  )


class Copies:
  """Copies parameters to the devices of another mesh.

  Attributes:
    mesh: Mesh that receives the copies.
  """

  mesh: Mesh

  def of_state(self, state: nnx.State) -> nnx.State:
    """Copies `state` with every array on the devices of `mesh`."""
    return jax.tree.map(
      lambda v: v.replace(self.of_parameter(v)),
      state,
      is_leaf=lambda v: isinstance(v, nnx.Variable),
    )

  def of_parameter(self, variable: nnx.Variable) -> jax.Array:
    """Returns a parameter's array, on the devices of `mesh`."""
    where = parameter_sharding(variable, self.mesh)
    return self._copy(variable[...], where)

  def of_module(self, module: object) -> Any:
    """Returns a module like `module`, a policy on another mesh."""
    graphdef, state = nnx.split(module)
    copy = nnx.merge(graphdef, self.of_state(state))
    for _, node in nnx.iter_graph(copy):
      if isinstance(node, nnx.Module):
        for name, value in list(vars(node).items()):
          if isinstance(value, Mesh):
            setattr(node, name, self.mesh)
    return copy

  def _copy(self, array: jax.Array, where: NamedSharding) -> jax.Array:
    raise NotImplementedError


def _kept_axes(mesh: Mesh, devices: int) -> dict[str, int]:
  """Returns sizes of a mesh of `devices` that splits the model like `mesh`.

  The axes tensor, sequence and fsdp, in this order, are kept as far as the
  devices go; data takes the rest.
  """
  sizes = {}
  for name in ("tensor", "sequence", "fsdp"):
    sizes[name] = math.gcd(mesh.shape[name], devices)
    devices //= sizes[name]
  return {"data": devices, **sizes}


class EngineCopies(Copies):
  """Copies from the learner's devices to others of the same process.

  1. Parameters are rounded to the type in which the engine keeps them.
  2. Where the engine splits the model over fewer devices, one program gathers
     the parts on the learner's devices.
  3. Each part goes from the device that has it to those that need it.

  No part passes through host memory if the backend copies between devices.
  """

  def __init__(
    self,
    mesh: Mesh,
    devices: Sequence[jax.Device],
    types: Mapping[tuple[str, ...], Any],
  ):
    """Args:

    mesh: Mesh of the learner.
    devices: devices of the engine, none of the learner's.
    types: Types that parameters are rounded to first, by path.
    """
    self._types = types
    self._gather: dict[PartitionSpec, Callable[[jax.Array], jax.Array]] = {}
    sizes = _kept_axes(mesh, len(devices))
    self.mesh = make_mesh(devices=devices, **sizes)
    split_in = len(devices) // sizes["data"]
    self._gathered = Mesh(
      mesh.devices.reshape(
        mesh.size // split_in, 1, *(sizes[name] for name in AXES[1:])
      ),
      ("copy", *AXES),
      axis_types=(AxisType.Auto,) * (1 + len(AXES)),
    )

  def of_state(self, state: nnx.State) -> nnx.State:
    flat = []
    for path, variable in nnx.to_flat_state(state):
      if (narrow := self._types.get(tuple(map(str, path)))) is not None:
        variable = variable.replace(variable[...].astype(narrow))
      flat.append((path, variable.replace(self.of_parameter(variable))))
    return nnx.from_flat_state(flat)

  def _copy(self, array: jax.Array, where: NamedSharding) -> jax.Array:
    needed = where.addressable_devices_indices_map(array.shape)
    parts = {str(s.index): s.data for s in array.addressable_shards}
    if any(str(index) not in parts for index in needed.values()):
      if where.spec not in self._gather:
        there = NamedSharding(self._gathered, where.spec)
        self._gather[where.spec] = jax.jit(lambda x: x, out_shardings=there)
      array = self._gather[where.spec](array)
      parts = {str(s.index): s.data for s in array.addressable_shards}
    return jax.make_array_from_single_device_arrays(
      array.shape,
      where,
      [jax.device_put(parts[str(i)], device) for device, i in needed.items()],
    )


class HostCopies(Copies):
  """Copies arrays that lie over all processes to the devices of each.

  Every process gets the whole array, split over its own devices as a mesh of
  these alone would split it. The copies are made by one program a shape, over
  the devices' own network; all processes must call in the same order.

  Attributes:
    mesh: Mesh of this process's devices.
  """

  def __init__(self, mesh: Mesh):
    """Args:

    mesh: Mesh of all devices.
    """
    sizes = _kept_axes(mesh, mesh.size // jax.process_count())
    here = sorted(jax.local_devices(), key=lambda d: d.id)
    self.mesh = make_mesh(devices=here, **sizes)
    by_process: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
      by_process.setdefault(device.process_index, []).append(device)
    order = [
      make_mesh(
        devices=sorted(by_process[p], key=lambda d: d.id), **sizes
      ).devices
      for p in sorted(by_process)
    ]
    self._everywhere = Mesh(
      np.stack(order),
      ("process", *AXES),
      axis_types=(AxisType.Auto,) * (1 + len(AXES)),
    )
    self._copies: dict[Any, Any] = {}

  def _copy(self, array: jax.Array, where: NamedSharding) -> jax.Array:
    if array.is_fully_addressable:
      return jax.device_put(array, where)
    there = NamedSharding(self._everywhere, where.spec)
    key = array.sharding, there
    if key not in self._copies:
      self._copies[key] = jax.jit(lambda x: x, out_shardings=there)
    copied = self._copies[key](array)
    parts = {s.device: s.data for s in copied.addressable_shards}
    order = where.addressable_devices_indices_map(array.shape)
    return jax.make_array_from_single_device_arrays(
      array.shape, where, [parts[device] for device in order]
    )


def put_rows(
  rows: np.ndarray, where: jax.sharding.Sharding, processes: int
) -> jax.Array:
  """Returns a batch of which each process gives its own rows.

  Args:
    rows: [R, …] of this process, as many as of every other.
    where: Sharding of `batch_sharding`.
    processes: Number of processes that hold rows.

  Returns:
    [R * processes, …], in the order of the processes.
  """
  if where.is_fully_addressable:
    return jax.device_put(rows, where)
  shape = (rows.shape[0] * processes, *rows.shape[1:])
  return jax.make_array_from_process_local_data(where, rows, shape)


def local_rows(array: jax.Array | np.ndarray) -> np.ndarray:
  """Returns the rows of a batch that lie with this process, in order."""
  if not isinstance(array, jax.Array) or array.is_fully_addressable:
    return np.asarray(array)
  parts = {}
  for shard in array.addressable_shards:
    parts[shard.index[0].start or 0] = shard.data
  return np.concatenate([np.asarray(parts[at]) for at in sorted(parts)])


def constrain(x: jax.Array, mesh: Mesh | None, *axes: _Axis) -> jax.Array:
  """`x` laid out over these mesh axes, one for each leading dimension.

  Unchanged without a mesh, or where the mesh does not divide a dimension.
  """
  if mesh is None:
    return x
  padded = (*axes, *(None,) * (x.ndim - len(axes)))
  spec = _fit(padded, x.shape, mesh)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: Mesh) -> int:
  """Shards of a batch; B and S must be multiples of it."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def _sequenced(axes: Sequence[_Axis], mesh: AnyMesh) -> Sequence[_Axis]:
  if mesh.shape["sequence"] == 1:
    return axes
  return [_with_sequence(axis) for axis in axes]


def _with_sequence(axis: _Axis) -> str | tuple[str, ...] | None:
  names = (axis,) if isinstance(axis, str) else axis
  if not names or "fsdp" not in names or "sequence" in names:
    return axis
  at = names.index("fsdp") + 1
  return (*names[:at], "sequence", *names[at:])


def _fit(
  axes: Sequence[_Axis], shape: Sequence[int], mesh: AnyMesh
) -> PartitionSpec:
  if len(axes) != len(shape):
    raise ValueError(f"axes {axes} do not fit a parameter of shape {shape}")
  return PartitionSpec(
    *(_divide(axis, size, mesh) for axis, size in zip(axes, shape))
  )


def _divide(
  axis: _Axis, size: int, mesh: AnyMesh
) -> str | tuple[str, ...] | None:
  """Returns the longest beginning of the axes that divides a dimension."""
  if axis is None:
    return None
  names = (axis,) if isinstance(axis, str) else tuple(axis)
  while names and size % math.prod(mesh.shape[n] for n in names):
    names = names[:-1]
  if len(names) > 1:
    return names
  return names[0] if names else None
