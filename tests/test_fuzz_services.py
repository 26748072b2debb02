"""The fuzzer of the services reaches every route, and reports what fails."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fuzz_services  # noqa: E402


class Failing:
  """A service of which nothing but a name is needed."""

  name, token = "gym", "t"


@pytest.mark.parametrize(
  "status, answer, path, trusted, kind",
  [
    ("500", b"", "/api/v1/gyms", True, "answer of 500"),
    ("closed (X)", b"", "/api/v1/gyms", True, "closed (X)"),
    ("200", b"", "/api/v1/gyms", False, "answered without a token"),
    ("200", b"", "/health", False, None),
    ("503", b"", "/api/v1/gyms", True, None),
  ],
)
def test_what_breaks_a_rule_is_a_finding(
  tmp_path, status, answer, path, trusted, kind
):
  report = fuzz_services.Report(tmp_path)
  fuzzer = fuzz_services.Fuzzer(Failing(), {}, [], report, 0.0, 0)
  fuzzer._judge("GET /x", status, answer, path, trusted)
  assert list(report.findings) == ([kind] if kind else [])
  assert report.answers["gym GET /x"] == {status: 1}


def test_the_routes_are_those_of_six_services():
  routes = fuzz_services.documented_routes()
  assert set(routes) == set(fuzz_services.BOUNDS)
  assert ("WS", "/openenv/{gym_id}/ws") in routes["gym"]
  assert ("POST", "/b/{buffer}/buffer/ack") in routes["buffer"]
  assert ("POST", "/inference/v1/generate") in routes["proxy"]
  assert ("GET", "/api/v1/events") in routes["monitor"]
  assert ("POST", "/runs") in routes["runs"]
  assert min(len(calls) for calls in routes.values()) >= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_moment_of_it_finds_nothing(tmp_path):
  command = [
      sys.executable, str(ROOT / "benchmarks" / "fuzz_services.py"),
      "--minutes", "0.2", "--services", "gym", "--folder", str(tmp_path),
  ]  # fmt: skip
  result = subprocess.run(command, capture_output=True, text=True, timeout=280)
  assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
  requests = re.search(r"(\d+) requests, (\d+) routes", result.stdout)
  assert int(requests[1]) >= int(requests[2]) >= 5
