"""Keeps the policy that the KL is measured to: a copy of what is trained.

With an adapter that is the adapter's: the base weights are shared, and a
reference costs no more than what is trained.

Promises: the copy never changes; on the host it is divided as its arrays are,
and takes device memory only while it is used.
"""

from __future__ import annotations

from typing import Mapping

import jax


class Reference:
  """See the module docstring."""

  def __init__(self, params: Mapping[str, jax.Array], on_host: bool):
    """Args:

      params: copied already, at their place on the devices.
      on_host: whether they wait in the hosts' memory.
    """
    self._places = {name: x.sharding for name, x in params.items()}
    self._on_host = on_host
    self._kept = dict(params)
    if on_host:
      self._kept = {
          name: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
          for name, x in params.items()
      }

  @property
  def memory_kinds(self) -> set[str | None]:
    """Of the arrays between their uses."""
    return {x.sharding.memory_kind for x in self._kept.values()}

  def params(self) -> dict[str, jax.Array]:
    """Returns the parameters, on the devices."""
    if not self._on_host:
      return self._kept
    return {
        name: jax.device_put(x, self._places[name])
        for name, x in self._kept.items()
    }
