"""Refuses configurations that no policy here computes.

Does not: import JAX.
"""

from __future__ import annotations

from typing import Any, Mapping

DTYPES = ("float32", "bfloat16")


def check_dtypes(compute_dtype: str, param_dtype: str) -> None:
  """Raises a ValueError unless both are of `DTYPES`."""
  for name, value in (
      ("compute_dtype", compute_dtype), ("param_dtype", param_dtype)
  ):  # pyformat: disable
    if value not in DTYPES:
      raise ValueError(
          f"{name}={value!r} must be one of {', '.join(DTYPES)}; a narrower"
          " type has no exponent or no precision to spare for gradients"
      )


def refuse(bad: bool, problem: str) -> None:
  """Raises a ValueError that names a field of config.json, if `bad`."""
  if bad:
    raise ValueError(f"config.json: {problem}")


def refuse_quantized(raw: Mapping[str, Any]) -> None:
  """Refuses a checkpoint whose weights are quantized (FP8, AWQ, GPTQ, ...)."""
  found = raw.get("quantization_config")
  if found:
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    raise ValueError(
        f"config.json: quantization_config.quant_method={method!r}, quantized"
        " weights are neither trained nor unpacked here; give the bfloat16"
        " checkpoint that they were made from (for the name without -FP8,"
        " -AWQ or -GPTQ-Int4)"
    )
