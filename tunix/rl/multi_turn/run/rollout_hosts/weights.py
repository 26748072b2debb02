"""Turns a policy's parameters into the tensors that travel to rollout hosts.

Promises: `state_like` of `tensors_of` gives the same values, placed as those
of the module here.
"""

from __future__ import annotations

from typing import Any, Mapping

from flax import nnx
import jax
import numpy as np


def tensors_of(state: nnx.State) -> dict[str, np.ndarray]:
  """A state's arrays in host memory, by dotted path."""
  return {
      ".".join(map(str, path)): np.asarray(variable[...])
      for path, variable in nnx.to_flat_state(state)
  }


def state_like(
    model: Any, tensors: Mapping[str, np.ndarray]
) -> nnx.State:
  """The parameters of a module, with other values, placed as its own.

  Raises:
    ValueError: they are of another policy.
  """
  flat = []
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    name, old = ".".join(map(str, path)), variable[...]
    new = tensors.get(name)
    if new is None or new.shape != old.shape:
      raise ValueError(
          f"the learner's weights hold no {name} of shape {list(old.shape)}"
      )
    flat.append((path, variable.replace(jax.device_put(new, old.sharding))))
  return nnx.from_flat_state(flat)
