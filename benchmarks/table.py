"""One table of the figures that count, each beside its target and its peer.

Runs the benchmarks below one after the other, reads their JSON and prints a
table in Markdown. Peers run in the same process or beside it, in turns, so
their ratios hold on a shared machine; seconds do not. A figure that is worse
than the baseline's by more than its margin is marked, and the exit status is 1
then: ratios are held to any baseline, other figures to one of the same machine.

    python benchmarks/table.py                      # or make bench
    python benchmarks/table.py --only learner server
    python benchmarks/table.py --save benchmarks/baseline.json
    python benchmarks/table.py --into docs/performance.md

What a benchmark found is kept in build/bench: with --again only those run that
have not yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any, Callable, Iterable, Sequence

HERE = pathlib.Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
FOUND = HERE.parent / "build" / "bench"
LIMIT = 1800.0  # s, of a benchmark.
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
WORSE = "**worse**"


@dataclasses.dataclass(frozen=True)
class Figure:
  """A row.

  Attributes:
    name: Unique name of the measurement.
    unit: Unit of the figure; "×" is a ratio to the peer.
    find: Reads the figure from the benchmark's report; raises KeyError where
      the report has none.
    target: Value to reach; None = only watched.
    lower: Whether less is better.
    margin: Relative change for the worse that is more than noise.
  """

  name: str
  unit: str
  find: Callable[[Any], float]
  target: float | None = None
  lower: bool = False
  margin: float = 0.2

  def reached(self, value: float) -> bool | None:
    if self.target is None:
      return None
    return value <= self.target if self.lower else value >= self.target

  def worse(self, value: float, before: float) -> bool:
    """Whether `value` is worse than `before` by more than the margin."""
    ratio = value / before if self.lower else before / value
    return ratio > 1 + self.margin


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A script, its arguments and what it is run for."""

  name: str
  script: str
  arguments: tuple[str, ...]
  figures: tuple[Figure, ...]


def _by(rows: Sequence[dict[str, Any]], **have: Any) -> dict[str, Any]:
  for row in rows:
    if all(row[key] == value for key, value in have.items()):
      return row
  raise KeyError(str(have))


def _learner(
  name: str, share_target: float | None = None
) -> tuple[Figure, ...]:
  return (
      Figure(f"learner, {name}, torch's time over ours", "×",
             lambda r: r["wall_ratio"], 2.0),
      Figure(f"learner, {name}, peak memory over torch's", "×",
             lambda r: r["ours"]["peak_mb"] / r["torch"]["peak_mb"], 1.0, True),
      Figure(f"learner, {name}", "tokens/s",
             lambda r: r["ours"]["tokens_per_s"]),
      Figure(f"learner, {name}, share of the matmul peak", "",
             lambda r: r["ours"]["share_of_matmul_peak"], share_target),
  )  # fmt: skip


def _slower(column: str) -> Callable[[Any], float]:
  return lambda r: r["columns"][column]["slower"]


def _collector(way: str) -> Figure:
  return Figure(
    f"collector, a turn, {way}",
    "CPU µs",
    lambda r: r["us_per_turn"][way]["cpu"],
    150.0,
    True,
  )


def _overhead(kind: str, target: float) -> Figure:
  return Figure(
    f"policy server beside the engine, {kind}, p50",
    "ms",
    lambda r: r["latency"][kind]["overhead"]["p50_ms"],
    target,
    True,
  )


TABLE = (
    Benchmark(
        "learner", "bench_learner.py",
        ("--beside", "torch", "--size", "tiny", "--rounds", "5"),
        _learner("Qwen3-VL of 2.3M parameters"),
    ),
    Benchmark(
        "learner_small", "bench_learner.py",
        ("--beside", "torch", "--size", "small", "--rounds", "3"),
        _learner("Qwen3-VL of 48.6M parameters", 0.6),
    ),
    Benchmark(
        "rollouts", "bench_rollout_peers.py", ("--rounds", "5"),
        (
            Figure("multi-turn VL rollouts, transformers' time over ours", "×",
                   _slower("transformers"), 5.0),
            Figure("multi-turn VL rollouts, time of a loop by hand over ours",
                   "×", _slower("by hand"), 2.0),
            Figure("multi-turn text rollouts, time of tunix' Sampler over ours",
                   "×", _slower("upstream"), 5.0),
            Figure("multi-turn VL rollouts", "tokens/s",
                   lambda r: r["columns"]["ours"]["tokens_per_second"]),
            Figure("prefilled over unique tokens", "×",
                   lambda r: r["columns"]["ours"]["prefilled"]
                   / r["workload"]["unique_tokens"], 1.05, True, 0.02),
        ),
    ),
    Benchmark(
        "long_horizon", "bench_long_horizon.py", ("--window", "3"),
        (
            Figure("28 turns, 3 screenshots, tokens computed without the tree"
                   " over with it", "×",
                   lambda r: r["false"]["computed_tokens"]
                   / r["auto"]["computed_tokens"], 3.0, margin=0.05),
            Figure("28 turns, 3 screenshots, learner's time without the tree"
                   " over with it", "×",
                   lambda r: r["false"]["learner_s"] / r["auto"]["learner_s"]),
            Figure("28 turns, 3 screenshots", "episodes/h",
                   lambda r: r["auto"]["episodes_per_hour"]),
            Figure("28 turns, 3 screenshots, prefilled over unique tokens", "×",
                   lambda r: r["auto"]["prefill_per_unique_token"],
                   1.05, True, 0.02),
        ),
    ),
    Benchmark(
        "decode", "bench_decode_bound.py", (),
        (
            Figure("decode, share of its bound", "",
                   lambda r: max(t["fraction"] for t in r["tried"]), 0.6),
        ),
    ),
    Benchmark(
        "server", "bench_server.py", (),
        (
            _overhead("4 KB", 1.5),
            _overhead("5 screenshots, all seen", 6.0),
            _overhead("5 screenshots, one new", 6.0),
        ),
    ),
    Benchmark(
        "collector", "bench_collector.py", (),
        (
            *(_collector(w) for w in ("inline", "tasks", "tokens", "threads")),
            Figure("collector, upstream's turn over ours in tasks", "×",
                   lambda r: r["us_per_turn"]["upstream"]["cpu"]
                   / r["us_per_turn"]["tasks"]["cpu"]),
        ),
    ),
    Benchmark(
        "conversion", "bench_conversion.py", ("--tokens", "48000"),
        (
            Figure("48k tokens in 1,000 turns to arrays", "M tokens/CPU s",
                   lambda r: r["48000"]["pack"] / 1e6, 20.0),
        ),
    ),
    Benchmark(
        "miniwob", "bench_miniwob.py", ("--pages", "16", "--rounds", "3"),
        (
            Figure("MiniWoB++ of 16 pages", "steps/s",
                   lambda r: _by(r, episodes=16)["steps_per_s"], 200.0),
            Figure("MiniWoB++ of 16 pages, beside the steps", "resets/s",
                   lambda r: _by(r, episodes=16)["resets_per_s"], 60.0),
        ),
    ),
    Benchmark(
        "monitor", "bench_monitor.py", (),
        (
            Figure("monitor, an episode of 7 turns a request", "/CPU s",
                   lambda r: _by(r, per_batch=1)["episodes_per_cpu_s"], 800.0),
            Figure("monitor, eight of them a request", "/CPU s",
                   lambda r: _by(r, per_batch=8)["episodes_per_cpu_s"], 800.0),
        ),
    ),
    Benchmark(
        "start", "bench_start.py", ("--rounds", "3"),
        (
            Figure("command to first update, nothing compiled", "s",
                   lambda r: r["cold"], 15.0, True),
            Figure("command to first update, compiled before", "s",
                   lambda r: r["warm"], None, True),
        ),
    ),
)  # fmt: skip


def machine() -> dict[str, Any]:
  """Describes the hardware and JAX version that measured times depend on."""
  model = platform.machine()
  info = pathlib.Path("/proc/cpuinfo")
  if info.is_file():
    lines = info.read_text(encoding="utf-8").splitlines()
    named = [
      x.partition(":")[2].strip() for x in lines if x.startswith("model name")
    ]
    model = named[0] if named else model
  return {
    "processor": model,
    "cores": os.cpu_count(),
    "jax": importlib.metadata.version("jax"),
  }


def run(benchmark: Benchmark) -> str | None:
  """Runs it into its file; the reason where it made none."""
  FOUND.mkdir(parents=True, exist_ok=True)
  output = FOUND / f"{benchmark.name}.json"
  output.unlink(missing_ok=True)
  argv = [sys.executable, str(HERE / benchmark.script), *benchmark.arguments]
  log = FOUND / f"{benchmark.name}.log"
  print(f"== {benchmark.script} {' '.join(benchmark.arguments)}", flush=True)
  measured = {
    "on": f"{datetime.date.today():%Y-%m-%d}",
    "load_before": round(os.getloadavg()[0], 1),
  }
  with log.open("w", encoding="utf-8") as out:
    try:
      subprocess.run(
        [*argv, "--json", str(output)],
        stdout=out,
        stderr=out,
        timeout=LIMIT,
        check=False,  # Some exit with 1 where a target is missed.
      )
    except subprocess.TimeoutExpired:
      return f"took more than {LIMIT:.0f} s"
  if output.is_file():
    report = json.loads(output.read_text(encoding="utf-8"))
    output.write_text(json.dumps({"report": report, "measured": measured}))
    return None
  last = log.read_text(encoding="utf-8", errors="replace").split("\n")
  lines = [line for line in last if line.strip()] or ["it said nothing"]
  return f"{lines[-1]} ({log})"


def figures(benchmark: Benchmark) -> dict[str, float]:
  """Returns the figures of a benchmark's report; leaves out missing ones."""
  content = json.loads((FOUND / f"{benchmark.name}.json").read_text())
  report, values = content["report"], {}
  for figure in benchmark.figures:
    try:
      values[figure.name] = round(figure.find(report), 4)
    except KeyError:
      pass  # A peer that is not installed here.
  return values


def measured(names: Iterable[str]) -> str:
  """Days on which these were measured, and the load that they met."""
  records = [
    json.loads((FOUND / f"{name}.json").read_text())["measured"]
    for name in names
  ]
  days = sorted({one["on"] for one in records})
  return (
    " to ".join(dict.fromkeys((days[0], days[-1])))
    + ", load before a benchmark at most"
    f" {max(one['load_before'] for one in records)}"
  )


def _number(value: float) -> str:
  return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rows(
  values: dict[str, float], baseline: dict[str, Any] | None
) -> tuple[list[str], list[str]]:
  """The table's lines, and the names of the figures that are worse."""
  here = machine()
  same = baseline is not None and baseline["machine"] == here
  lines = [
    "| figure | unit | now | target | baseline |",
    "|---|---|---|---|---|",
  ]
  worse = []
  for figure in (f for b in TABLE for f in b.figures if f.name in values):
    value = values[figure.name]
    before = (baseline or {"figures": {}})["figures"].get(figure.name)
    comparable = before is not None and (same or figure.unit == "×")
    if comparable and figure.worse(value, before):
      worse.append(figure.name)
    target = ""
    if figure.target is not None:
      sign = "≤" if figure.lower else "≥"
      target = f"{sign} {_number(figure.target)}"
      target += ", reached" if figure.reached(value) else ""
    before_cell = "" if before is None or not comparable else _number(before)
    if figure.name in worse:
      before_cell += f", {WORSE}"
    lines.append(
      f"| {figure.name} | {figure.unit} | {_number(value)} | {target} |"
      f" {before_cell} |"
    )
  return lines, worse


def write_into(page: pathlib.Path, lines: Sequence[str], when: str) -> None:
  """Puts the table between the marks of a page.

  Args:
    page: Markdown file.
    lines: Lines of the table.
    when: Days and load; see `measured`.

  Raises:
    SystemExit: the page has no marks.
  """
  text = page.read_text(encoding="utf-8")
  if text.count(BEGIN) != 1 or text.count(END) != 1:
    raise SystemExit(f"{page} has no lines {BEGIN} and {END}; add them")
  head, remainder = text.split(BEGIN)
  _, tail = remainder.split(END)
  here = machine()
  about = (
    f"{here['processor']}, {here['cores']} cores, JAX {here['jax']};"
    f" measured {when}."
  )
  body = "\n".join([BEGIN, about, "", *lines, END])
  page.write_text(head + body + tail, encoding="utf-8")


def _baseline(file: pathlib.Path) -> dict[str, Any] | None:
  if not file.is_file():
    return None
  content = json.loads(file.read_text(encoding="utf-8"))
  if not {"machine", "figures"} <= set(content):
    raise SystemExit(f"{file} is no baseline; make one with --save {file}")
  return content


def save(file: pathlib.Path, values: dict[str, float]) -> None:
  """Writes a baseline; keeps earlier figures of this machine."""
  here, earlier = machine(), _baseline(file)
  if earlier is not None and earlier["machine"] == here:
    values = earlier["figures"] | values
  text = json.dumps(
    {"machine": here, "figures": values}, indent=2, ensure_ascii=False
  )
  file.write_text(text + "\n", encoding="utf-8")


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  names = [b.name for b in TABLE]
  parser.add_argument(
    "--only",
    nargs="+",
    choices=names,
    default=names,
    metavar="NAME",
    help=f"of {', '.join(names)}",
  )
  parser.add_argument(
    "--again", action="store_true", help="keep what was found"
  )
  parser.add_argument("--baseline", type=pathlib.Path, default=BASELINE)
  parser.add_argument("--save", type=pathlib.Path, metavar="FILE")
  parser.add_argument("--into", type=pathlib.Path, metavar="PAGE")
  args = parser.parse_args()
  baseline = _baseline(args.baseline)
  if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
    print(
      f"other work runs here (load {os.getloadavg()[0]:.1f}): only ratios"
      " mean something"
    )
  values: dict[str, float] = {}
  shown = []
  failed = {}
  for benchmark in (b for b in TABLE if b.name in args.only):
    reuse = args.again and (FOUND / f"{benchmark.name}.json").is_file()
    reason = None if reuse else run(benchmark)
    if reason is not None:
      failed[benchmark.name] = reason
      continue
    shown.append(benchmark.name)
    values |= figures(benchmark)
  lines, worse = rows(values, baseline)
  print("\n" + "\n".join(lines))
  for name, reason in failed.items():
    print(f"{name} failed: {reason}")
  if args.save:
    save(args.save, values)
  if args.into:
    write_into(args.into, lines, measured(shown))
  return 1 if worse or failed else 0


if __name__ == "__main__":
  sys.exit(main())
