"""Says which backend a program is compiled for, and with which options.

Few modules ask: what differs by backend is `kernels`' business.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from typing import Any, Iterator, Sequence

import jax
import jax.numpy as jnp

_UPDATE_OPTIONS = (
  ("xla_cpu_experimental_ynn_fusion_type", ""),
  ("xla_cpu_prefer_vector_width", 512),
  ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),
)

_WAITING_OPTIONS = {
  "cpu": (("xla_backend_optimization_level", 1),),
  "gpu": (("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", False)),
}

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  "target", default=None
)


def backend() -> str:
  """Returns the backend compiled for: "cpu", "gpu" or "tpu"."""
  return _target.get() or jax.default_backend()


@contextlib.contextmanager
def compile_for(platform: str) -> Iterator[None]:
  """Traces for another backend than the default one (ahead of time)."""
  token = _target.set(platform)
  try:
    yield
  finally:
    _target.reset(token)


def compiler_options() -> dict[str, Any]:
  """Options for programs that are compiled while a user waits.

  On a CPU libraries take most of the time, and LLVM's later optimisations of
  the rest cost a quarter of the compile time for no measurable gain. On a GPU
  the autotuner compiles each product and fusion dozens of times, which takes
  minutes before the first turn.
  """
  return _taken(_WAITING_OPTIONS.get(backend(), ()))


def update_options() -> dict[str, Any]:
  """Options for the learner's programs, which run long and often.

  On a CPU XLA gives products of many shapes to the YNN library, with what
  follows them. Gradients of a decoder and a vision tower take a fifth less time
  and memory on Eigen's, and a twentieth less with vectors of 512 bits where a
  processor has them (`benchmarks/bench_learner.py --beside torch`). Its default
  order of operations computes all layers again before the backward pass needs
  them, and keeps them: `remat` would save nothing.
  """
  return _taken(_UPDATE_OPTIONS if backend() == "cpu" else ())


def _taken(options: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """Returns the options that this XLA has and the user did not set."""
  return {
    option: value
    for option, value in options
    if not _chosen(option) and _takes(option, value)
  }


def _chosen(option: str) -> bool:
  """Returns whether the environment or the user decided on `option`."""
  return bool(
    jax.config.read("jax_disable_most_optimizations")
  ) or option in os.environ.get("XLA_FLAGS", "")


@functools.cache
def _takes(option: str, value: Any) -> bool:
  """Returns whether this XLA has the option; it refuses unknown ones."""
  probe = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), jnp.float32))
  try:
    probe.compile({option: value})
  except jax.errors.JaxRuntimeError as error:
    if option not in str(error):
      raise
    return False
  return True
