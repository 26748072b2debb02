"""What all tests share: quick starts and compilation, bounded memory.

Most of the suite's time would be XLA's, on programs that run for milliseconds:
they are compiled without most optimisations, here and in the processes that
tests start. `make test-all` compiles as a user's run does, as does whatever
sets JAX_DISABLE_MOST_OPTIMIZATIONS=0. Of what is left, the emitters that build
a module of MLIR for each fused kernel take the most; XLA's older ones emit the
same kernels, and each program is one module of LLVM's instead of many. An XLA
that has one of these flags no more ends with an error that names it.

Processes that tests start import no torch, see `children/sitecustomize.py`.
The collector of garbage looks less often: JAX's modules and traced programs
are many objects that live long.

Promises: after a module of tests, a worker larger than `LARGE_BYTES` drops
what JAX compiled and returns freed pages to the system. Each of the three
workers of `make test` runs some hundred modules, and their compiled programs
alone would outgrow the machine.
"""

import ctypes
import gc
import os
import pathlib
import resource
import sys

import pytest

LARGE_BYTES = 2 << 30

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
  _FLAGS = (
      "--xla_cpu_use_fusion_emitters=false"
      " --xla_cpu_parallel_codegen_split_count=1"
  )
  _CHOSEN = os.environ.get("XLA_FLAGS", "")
  if _FLAGS not in _CHOSEN:  # As it is in workers, and of two the last counts.
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {_CHOSEN}".strip()

gc.set_threshold(50_000, 20, 100)


def pytest_configure(config) -> None:
  """Lets children of this process find `children/sitecustomize.py`.

  Not where they are workers of pytest-xdist, whose tests need torch.
  """
  workers = config.getoption("numprocesses", None)
  if workers and not hasattr(config, "workerinput"):
    return
  children = str(pathlib.Path(__file__).parent / "helpers" / "children")
  paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  if children not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [children, *filter(None, paths)]
    )


def resident_bytes() -> int:
  pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  return int(pages) * resource.getpagesize()


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
  yield
  if "jax" not in sys.modules or resident_bytes() < LARGE_BYTES:
    return
  sys.modules["jax"].clear_caches()
  gc.collect()
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:  # glibc's
    trim(0)
