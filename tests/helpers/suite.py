"""Settings of the framework's and the services' tests, for a conftest.py.

They are quick starts and bounded memory.

Processes that tests start import no torch, see `children/sitecustomize.py`.
The collector of garbage looks less often: JAX's modules and traced programs
are many objects that live long.

Promises: after a module of tests, a worker that has grown by `GROWTH_BYTES`
drops what JAX compiled and returns freed pages to the system. Each of the three
workers of `make test` runs some hundred modules, and their compiled programs
alone would outgrow the machine. No client reads all authorities of the web.
"""

import ctypes
import gc
import os
import pathlib
import resource
import sys

import certifi
import pytest

GROWTH_BYTES = 3 << 29
PEER_TESTS = {
  "tests/vllm/": "vllm",
  "tests/sglang/": "sglang",
  "packages/agent_services/tests/workflow/test_areal_": "areal",
}
"""Beginning of a test's path -> the peer of all tests below it."""

gc.set_threshold(50_000, 20, 100)


def pytest_configure(config) -> None:
  """Lets children of this process find `children/sitecustomize.py`.

  Not where they are workers of pytest-xdist, whose tests need torch.
  """
  _trust_one_authority(config)
  workers = config.getoption("numprocesses", None)
  if workers and not hasattr(config, "workerinput"):
    return
  children = str(pathlib.Path(__file__).parent / "children")
  paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  if children not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([children, *filter(None, paths)])


def pytest_itemcollected(item) -> None:
  """Results of a run name the peer of each test: scripts/peers_table.py."""
  names = {name for mark in item.iter_markers("peer") for name in mark.args}
  names |= {
    name for path, name in PEER_TESTS.items() if item.nodeid.startswith(path)
  }
  item.user_properties += [("peer", name) for name in sorted(names)]


def _trust_one_authority(config) -> None:
  """httpx reads what it trusts for each client, 50 ms for the web's all."""
  first, end, _ = (
    pathlib.Path(certifi.where())
    .read_text("utf-8")
    .partition("-----END CERTIFICATE-----")
  )
  path = config.cache.mkdir("authority") / "first.pem"
  if not path.exists():  # Workers write the same.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(f"{first}{end}\n", "utf-8")
    part.replace(path)
  os.environ.setdefault("SSL_CERT_FILE", str(path))


def resident_bytes() -> int:
  pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  return int(pages) * resource.getpagesize()


@pytest.fixture(scope="session")
def resident_floor() -> list[int]:
  """[bytes that a worker has kept]: dropping again would look in vain."""
  return [1 << 29]


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(resident_floor):
  yield
  if (
    "jax" not in sys.modules
    or resident_bytes() < resident_floor[0] + GROWTH_BYTES
  ):
    return
  sys.modules["jax"].clear_caches()
  gc.collect()
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:  # glibc's
    trim(0)
  resident_floor[0] = resident_bytes()
