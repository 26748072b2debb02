"""The table that `make bench` ends in."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def table(tmp_path, monkeypatch):
  spec = importlib.util.spec_from_file_location(
    "benchmark_table", ROOT / "benchmarks" / "table.py"
  )
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, spec.name, module)
  spec.loader.exec_module(module)
  monkeypatch.setattr(module, "FOUND", tmp_path / "found")
  return module


def small(table, name="conversion"):
  """A benchmark of the table on little work."""
  (benchmark,) = [b for b in table.TABLE if b.name == name]
  return table.Benchmark(
    name,
    benchmark.script,
    ("--tokens", "400", "--turns", "10"),
    (
      table.Figure("packed", "tokens/s", lambda r: r["400"]["pack"], 1.0),
      table.Figure("left out", "", lambda r: r["elsewhere"]),
    ),
  )


@pytest.mark.slow
def test_a_benchmark_runs_and_its_figures_are_read(table):
  benchmark = small(table)
  assert table.run(benchmark) is None
  figures = table.figures(benchmark)
  assert set(figures) == {"packed"} and figures["packed"] > 1
  assert "load before" in table.measured([benchmark.name])


@pytest.mark.slow
def test_what_a_failed_one_said_last_is_the_reason(table):
  broken = table.Benchmark("broken", "bench_conversion.py", ("--no-such",), ())
  assert "unrecognized arguments: --no-such" in table.run(broken)


def test_names_are_unique_and_scripts_are_there(table):
  names = [f.name for b in table.TABLE for f in b.figures]
  assert len(set(names)) == len(names)
  assert all((ROOT / "benchmarks" / b.script).is_file() for b in table.TABLE)


def of(table, **figures):
  """Two figures: a ratio that shall be high, and seconds that shall be low."""
  table.TABLE = (
    table.Benchmark(
      "b",
      "bench_start.py",
      (),
      (
        table.Figure("ratio", "×", lambda r: 0.0, 2.0),
        table.Figure("seconds", "s", lambda r: 0.0, 15.0, lower=True),
      ),
    ),
  )
  return figures


def test_what_became_worse_than_the_baseline_is_marked(table):
  before = {
    "machine": table.machine(),
    "figures": of(table, ratio=2.0, seconds=10.0),
  }
  lines, worse = table.rows({"ratio": 1.9, "seconds": 11.0}, before)
  assert not worse and "≥ 2 |" in lines[2] and "≤ 15, reached" in lines[3]
  lines, worse = table.rows({"ratio": 1.5, "seconds": 13.0}, before)
  assert worse == ["ratio", "seconds"]
  assert lines[2].endswith("| 2, **worse** |")


def test_seconds_of_another_machine_are_no_baseline(table):
  before = {
    "machine": {"processor": "another"},
    "figures": of(table, ratio=2.0, seconds=1.0),
  }
  lines, worse = table.rows({"ratio": 1.0, "seconds": 14.0}, before)
  assert worse == ["ratio"]
  assert lines[3].endswith("|  |")


def test_a_page_gets_the_table_between_its_marks(table, tmp_path):
  page = tmp_path / "page.md"
  page.write_text(f"before\n\n{table.BEGIN}\nold\n{table.END}\n\nafter\n")
  of(table)
  lines, _ = table.rows({"ratio": 2.5}, None)
  for _ in range(2):
    table.write_into(page, lines, "on a day")
  text = page.read_text()
  assert text.startswith("before\n") and text.endswith("\nafter\n")
  assert "old" not in text and "measured on a day." in text
  assert text.count("| ratio | × | 2.5 |") == 1
  page.write_text("nothing\n")
  with pytest.raises(SystemExit, match="has no lines"):
    table.write_into(page, lines, "on a day")


def test_days_and_load_are_those_of_each_benchmark(table):
  table.FOUND.mkdir()
  for name, on, load in (("a", "2026-01-02", 0.1), ("b", "2026-01-01", 0.7)):
    (table.FOUND / f"{name}.json").write_text(
      json.dumps({"measured": {"on": on, "load_before": load}})
    )
  assert table.measured(["a"]) == (
    "2026-01-02, load before a benchmark at most 0.1"
  )
  assert table.measured(["a", "b"]).startswith("2026-01-01 to 2026-01-02, ")


def test_saving_keeps_what_this_machine_found_before(table, tmp_path):
  file = tmp_path / "baseline.json"
  table.save(file, {"ratio": 2.0})
  table.save(file, {"seconds": 1.0})
  assert json.loads(file.read_text())["figures"] == {
    "ratio": 2.0,
    "seconds": 1.0,
  }
  file.write_text('{"machine": {"processor": "another"}, "figures": {"x": 1}}')
  table.save(file, {"ratio": 3.0})
  assert json.loads(file.read_text())["figures"] == {"ratio": 3.0}
  file.write_text("{}")
  with pytest.raises(SystemExit, match="is no baseline"):
    table.save(file, {})
