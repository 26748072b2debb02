"""A policy's parameters by their paths."""

from __future__ import annotations

from typing import Any, Collection, Mapping

from flax import nnx
import jax
import numpy as np

Path = tuple[str, ...]


def pure_leaves(params: Any) -> dict[Path, Any]:
  """Flattens a module, an nnx.State or a plain tree to {path: array}."""
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


def checked(
    params: Any,
    given: Mapping[Path, jax.ShapeDtypeStruct],
    required: Collection[Path],
) -> dict[Path, Any]:
  """The leaves of parameters that fit a policy.

  Args:
    params: as for `pure_leaves`.
    given: the policy's own.
    required: those that must be there.

  Raises:
    ValueError: one is missing, unknown, or has another shape.
  """
  named = pure_leaves(params)
  missing = sorted(required - set(named))
  unknown = sorted(set(named) - set(given))
  if missing or unknown:
    show = lambda paths: ", ".join("/".join(p) for p in paths[:5]) or "none"
    raise ValueError(
        f"weights do not fit the policy: missing {show(missing)};"
        f" unknown {show(unknown)}"
    )
  for path, value in named.items():
    if np.shape(value) != given[path].shape:
      raise ValueError(
          f"weight {'/'.join(path)} has shape {np.shape(value)}, the policy"
          f" needs {given[path].shape}"
      )
  return named
