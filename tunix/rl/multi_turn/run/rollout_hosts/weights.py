"""Turns a policy's parameters into the tensors that travel to rollout hosts.

Promises: `state_like` of `tensors_of` gives the same values, but for those that
are rounded to a narrower type, placed as those of the module here.
"""

from __future__ import annotations

from typing import Any, Mapping

from flax import nnx
import jax
import numpy as np
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding


def tensors_of(
  state: nnx.State,
  copies: sharding.HostCopies | None = None,
  keep: bool = True,
  types: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
  """A state's arrays in host memory, by dotted path.

  Args:
    state: State of the policy.
    copies: Copies, if it lies over several processes, all of which call this
      together; a tensor at a time is whole on their devices.
    keep: whether this process wants them; {} otherwise.
    types: Types that arrays are rounded to first, by dotted path.
  """
  tensors = {}
  for path, variable in nnx.to_flat_state(state):
    name = ".".join(map(str, path))
    if types and name in types:
      variable = variable.replace(variable[...].astype(types[name]))
    value = variable[...] if copies is None else copies.of_parameter(variable)
    if keep:
      tensors[name] = np.asarray(value)
    else:
      jax.block_until_ready(value)
    del value, variable  # Before the next one is copied.
  return tensors


def state_like(
  model: base.Policy, tensors: Mapping[str, np.ndarray]
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
