"""scripts/peers_table.py: what it counts in the results of real test runs."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # A run of tests with a worker of its own.
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import peers_table  # noqa: E402

TESTS = """
import pytest

@pytest.mark.peer("openai")
@pytest.mark.parametrize("n", range(3))
def test_three(n):
  assert n != 1

@pytest.mark.peer("ai_sdk")
@pytest.mark.peer("gymnasium")
def test_one():
  pass

@pytest.mark.peer("verifiers")
def test_absent():
  pytest.skip("no verifiers")

@pytest.mark.peer("sb3")
def test_that_ends_badly(request):
  request.addfinalizer(lambda: 1 / 0)

def test_of_nobody():
  pass
"""


@pytest.fixture(scope="module", name="results")
def _results(tmp_path_factory):
  """Of a run with the suite's own hooks, in two workers."""
  folder = tmp_path_factory.mktemp("run")
  for name in ("tests/conftest.py", "tests/helpers/suite.py", "pyproject.toml"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text((ROOT / name).read_text())
  (folder / "tests" / "test_peers.py").write_text(TESTS)
  result = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-n", "2", "--junitxml=run.xml"],
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
    env={**os.environ, "PYTHONPATH": ""},  # Workers find all packages.
  )
  assert result.returncode == 1, result.stdout + result.stderr  # Tests failed.
  return folder / "run.xml"


def rows(text):
  lines = [line for line in text.splitlines() if line.startswith("| ")]
  return {
    cells[0]: cells[1:]
    for line in lines
    if (cells := [cell.strip() for cell in line.strip("|").split("|")])
  }


def test_outcomes_are_counted_by_peer(results):
  outcomes, day = peers_table.counts([results])
  assert outcomes["openai"] == {"passed": 2, "failed": 1}
  assert outcomes["gymnasium"] == {"passed": 1}
  assert outcomes["verifiers"] == {"skipped": 1}
  assert outcomes["sb3"]["failed"] == 1
  assert len(day) == 10
  twice, _ = peers_table.counts([results, results])
  assert twice["openai"] == {"passed": 4, "failed": 2}


def test_each_peer_has_a_row_and_only_what_ran_a_version(results, tmp_path):
  agent = tmp_path / ".venv-agent-clients/lib/python3.12/site-packages"
  (agent / "openai-7.8.9.dist-info").mkdir(parents=True)
  (agent / "openai-7.8.9.dist-info/METADATA").write_text(
    "Metadata-Version: 2.1\nName: openai\nVersion: 7.8.9\n"
  )
  package = tmp_path / ".venv-agent-clients/ai-sdk/node_modules/ai"
  package.mkdir(parents=True)
  (package / "package.json").write_text('{"name": "ai", "version": "5.6.7"}')
  shown = rows(peers_table.table([results], tmp_path))
  assert len(shown) == len(peers_table.PEERS) + 1  # And the head.
  assert shown["openai"][0] == "7.8.9" and shown["openai"][-1] == "2 of 3"
  assert shown["AI SDK"][0] == "5.6.7"
  assert shown["Gymnasium"][-1] == "1 of 1"
  assert shown["Gymnasium"][0][0].isdigit()  # Of this test's environment.
  assert shown["verifiers"] == ["–", "–", "not run here"]
  version, day = peers_table.PEERS["slime"].by_hand
  assert shown["slime's client"][0::2] == [version, f"by hand on {day}"]


def test_a_peer_that_has_no_row_is_an_error(results, tmp_path):
  wrong = tmp_path / "wrong.xml"
  wrong.write_text(results.read_text().replace('"gymnasium"', '"gym"'))
  with pytest.raises(ValueError, match="names the peer 'gym'; take one of"):
    peers_table.counts([wrong])


def test_the_page_has_the_table_of_all_peers(results, tmp_path):
  page = peers_table.PAGE.read_text()
  begin, end = map(page.index, (peers_table.BEGIN, peers_table.END))
  shown = rows(page[begin:end])
  assert list(shown)[1:] == [peer.title for peer in peers_table.PEERS.values()]
  copy = tmp_path / "page.md"
  copy.write_text(page)
  text = peers_table.table([results])
  peers_table.write(text, copy)
  assert text in copy.read_text()
  assert copy.read_text().partition(peers_table.BEGIN)[0] == (page[:begin])
