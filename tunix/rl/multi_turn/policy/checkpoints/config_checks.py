"""Refuses configurations that no policy here computes.

Does not: import JAX.
"""

from __future__ import annotations

import types
from typing import Any, Mapping

DTYPES = ("float32", "bfloat16")
REMATS = ("none", "dots", "block")
"""What the backward pass computes again: nothing, all of a layer but the
results of its matrix products, all of it. Fastest, and largest, first."""
AUTO = "auto"

NOT_HERE: Mapping[str, str] = types.MappingProxyType(
  {"gemma3n": "Gemma 3n has another decoder and tower than Gemma 3"}
)
"""Known `model_type`s without a policy here that are near one, and why."""


def why_not(model_type: object) -> str:
  """ " (reason)" for a model_type of `NOT_HERE`, else nothing."""
  reason = NOT_HERE.get(str(model_type))
  return f" ({reason})" if reason else ""


def check_dtypes(compute_dtype: str, param_dtype: str) -> None:
  """Raises a ValueError unless both are of `DTYPES`."""
  for name, value in (
    ("compute_dtype", compute_dtype),
    ("param_dtype", param_dtype),
  ):
    if value not in DTYPES:
      raise ValueError(
        f"{name}={value!r} must be one of {', '.join(DTYPES)}; a narrower"
        " type has no exponent or no precision to spare for gradients"
      )


def check_remat(remat: str) -> None:
  """Raises a ValueError unless it is one of `REMATS` or `AUTO`."""
  if remat not in (*REMATS, AUTO):
    raise ValueError(
      f"remat must be one of {', '.join((*REMATS, AUTO))}, got {remat!r}"
    )


def refuse(bad: bool, problem: str) -> None:
  """Raises a ValueError that names a field of config.json, if `bad`."""
  if bad:
    raise ValueError(f"config.json: {problem}")


def refuse_quantized(raw: Mapping[str, Any]) -> None:
  """Refuses quantized weights (FP8, AWQ, GPTQ, ...)."""
  section = raw.get("quantization_config")
  if section:
    method = section
    if isinstance(section, Mapping):
      method = section.get("quant_method")
    raise ValueError(
      f"config.json: quantization_config.quant_method={method!r}, quantized"
      " weights are neither trained nor unpacked here; give the bfloat16"
      " checkpoint that they were made from (for the name without -FP8, -AWQ or"
      " -GPTQ-Int4)"
    )
