"""Compiles a jitted function once for each set of argument shapes.

Promises: shapes with their places compile the program that arrays of the same
shapes and places run; what was compiled from shapes pins no array.

Does not: lay out arguments; a compiled program refuses arrays that lie
elsewhere.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy import host_memory


class Program:
  """A jitted function, compiled once for each set of argument shapes.

  Calls of several threads that need one compilation wait for the first.
  """

  def __init__(self, function: jax.stages.Wrapped):
    self._function = function
    self._compiled: dict[Any, Any] = {}
    self._lock = threading.Lock()

  @property
  def compiles(self) -> int:
    return len(self._compiled)

  def __call__(self, *args: Any) -> Any:
    return self.prepare(*args)(*args)

  def prepare(self, *args: Any) -> Any:
    """Returns the compiled program for such arguments; runs nothing."""
    leaves, tree = jax.tree.flatten(args)
    key = tree, tuple((x.shape, x.dtype) for x in leaves)
    compiled = self._compiled.get(key)
    if compiled is None:
      with self._lock:
        compiled = self._compiled.get(key)
        if compiled is None:
          compiled = self.lower(*args).compile(compiling.update_options())
          self._compiled[key] = compiled
          host_memory.release()  # Gigabytes that the compiler has used.
    return compiled

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Returns the program before compilation; placed shapes do for arrays."""
    return self._function.lower(*args)

  @property
  def compiled(self) -> list[Any]:
    """The compiled programs, for inspection."""
    return list(self._compiled.values())


def shape_of(array: Any, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array, or of another shape, that lies there."""
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)


def shapes_of(arrays: object) -> Any:
  """Returns a pytree of arrays as their shapes, types and places.

  They may have been donated.
  """
  return jax.tree.map(lambda x: shape_of(x, x.sharding), arrays)
