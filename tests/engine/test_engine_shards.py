"""An engine's caches on a mesh: each device holds its shard, and completions
are those of one device."""

import forced_devices
import numpy as np
import pytest

# Its process compiles the programs of six engines, for eight devices.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = 8


@pytest.fixture(scope="module", name="report")
def _report():
  return forced_devices.report(
    "-m",
    "tests.engine.engine_shards_script",
    devices=8,
    seconds=800,
    flags="--xla_backend_optimization_level=0",
  )


@pytest.mark.parametrize("case", ("rows", "all", "lockstep", "short"))
def test_completions_equal_those_of_one_device(report, case):
  """Images, shared prefixes, grammars, top log-probs, two turns a session."""
  want, got = report["one"], report[case]
  assert got["tokens"] == want["tokens"]
  for name in ("logprobs", "top"):
    for one, other in zip(want[name], got[name]):
      np.testing.assert_allclose(other, one, atol=1e-4)


def test_lockstep_is_equal_to_the_bit(report):
  for name in ("tokens", "logprobs", "top"):
    assert report["lockstep"][name] == report["again"][name]


@pytest.mark.parametrize("case, shards, heads", (("rows", 8, 1), ("all", 4, 2)))
def test_a_device_holds_its_shard_of_the_caches(report, case, shards, heads):
  one, got = report["one"], report[case]
  assert got["cache_tokens"] == one["cache_tokens"]
  tokens = one["cache_tokens"]
  a_token = one["device_bytes"]["kv_cache"] / (tokens + PAGE)
  # Each shard has an empty page of its own.
  assert got["device_bytes"]["kv_cache"] == a_token / heads * (
    tokens / shards + PAGE
  )
  assert (
    got["device_bytes"]["vision_pool"]
    <= max(one["device_bytes"]["vision_pool"] / shards, 1) * 2
  )
  assert got["device_bytes"]["weights"] < one["device_bytes"]["weights"] / 3


def test_prefixes_are_shared_within_a_shard(report):
  assert report["one"]["stats"]["shared_tokens"] > 0
  assert report["all"]["stats"]["shared_tokens"] > 0


def test_pages_that_run_short_are_taken_from_their_own_shard(report):
  stats = report["short"]["stats"]
  assert stats["evictions"] + stats["preemptions"] > 0
  assert stats["failed"] == 0
