"""Draws what runs learned, and trains the runs of docs/learning.md.

    python scripts/learning_curves.py                 # train all, and draw
    python scripts/learning_curves.py calculator mcp  # some of them
    python scripts/learning_curves.py --draw runs/mcp --out docs/images

A picture shows the success rate of each update's training episodes (thin), its
running mean (thick), and the evaluations on held-out tasks with their 95 %
intervals: after cloning (at 0) and at the end. A line of a table goes to
stdout.

Does not: compare with a baseline. The configurations are examples/configs/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import time
from typing import Any, Iterator, Mapping, Sequence

import httpx
from tunix.rl.multi_turn.reporting import svg

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples" / "configs"
NAMES = (
  "calculator",
  "mcp",
  "qwen3_vl_computer_use",
  "run_service",
  "smollm2",
  "miniwob_text",
  "database",
)
_STYLE = (
  "<style>svg{background:#fff;font:11px sans-serif}"
  ".grid{stroke:#e4e7ec}.tick{fill:#667085}"
  ".raw,.strong{fill:none;stroke:#2563c9;stroke-linejoin:round}"
  ".raw{opacity:.35}.strong{stroke-width:2.2}"
  ".mark{stroke:#1c2330;fill:#fff;stroke-width:1.6}</style>"
)
_MEAN_OF = 5  # Updates of the thick line.
_START_S = 60.0


def picture(directory: pathlib.Path) -> str:
  """An SVG file of a run's success rate over its updates."""
  lines = (directory / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  steps = [m["step"] for m in metrics]
  rates = [m["success_rate"] for m in metrics]
  means = [
    sum(rates[max(0, i - _MEAN_OF + 1) : i + 1]) / min(i + 1, _MEAN_OF)
    for i in range(len(rates))
  ]
  marks = []
  for name, at in (("warm_start", 0), ("final", max(steps, default=0))):
    evaluation = _evaluations(directory).get(name)
    if evaluation:
      low, high = evaluation["interval"]
      label = f"{name}: {_interval(evaluation)}"
      rate = evaluation["success_rate"]
      marks.append(svg.Interval(at, rate, low, high, label))
  chart = svg.line_chart(
    [svg.Line("success rate", steps, rates, means, 2)],
    y_range=(0.0, 1.0),
    x_label="updates by GRPO",
    marks=marks,
    height=200,
  )
  head, tail = chart.split(">", 1)
  # A file by itself names its language and size, which a page's does not.
  head = head.replace(
    "<svg", '<svg xmlns="http://www.w3.org/2000/svg" width="720"', 1
  )
  return f"{head}>{_STYLE}{tail}\n"


def table_line(directory: pathlib.Path) -> str:
  """Success at the start, after cloning and after GRPO, and the time."""
  summary = _summary(directory)
  evaluations = _evaluations(directory)
  cells = [
    _interval(evaluations[name]) if name in evaluations else "–"
    for name in ("initial", "warm_start", "final")
  ]
  minutes = summary["seconds"] / 60
  cells = [directory.name, *cells, str(summary["step"]), f"{minutes:.1f}"]
  return f"| {' | '.join(cells)} |"


def _summary(directory: pathlib.Path) -> Mapping[str, Any]:
  return json.loads((directory / "summary.json").read_text())


def _evaluations(directory: pathlib.Path) -> Mapping[str, Any]:
  return _summary(directory)["eval"]


def _interval(evaluation: Mapping[str, Any]) -> str:
  low, high = evaluation["interval"]
  return f"{evaluation['success_rate']:.2f} [{low:.2f}, {high:.2f}]"


@contextlib.contextmanager
def service(port: int) -> Iterator[None]:
  """The run service in a process of its own."""
  command = [sys.executable, "-m", "tunix.rl.multi_turn.agents.run_service"]
  with subprocess.Popen([*command, "--port", str(port)]) as process:
    try:
      _await(f"http://127.0.0.1:{port}/runs/none", process)
      yield
    finally:
      process.terminate()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
  end = time.monotonic() + _START_S
  while process.poll() is None and time.monotonic() < end:
    try:
      httpx.get(url, timeout=2.0)
      return
    except httpx.TransportError:
      time.sleep(0.2)
  raise RuntimeError(f"the run service does not answer at {url}")


def train(name: str, runs: pathlib.Path, port: int) -> pathlib.Path:
  """Trains one configuration; returns its run directory.

  Raises:
    CalledProcessError: the run failed.
  """
  command = [
    sys.executable,
    "-m",
    "tunix.rl.multi_turn.train",
    str(CONFIGS / f"{name}.yaml"),
    f"run.dir={runs}",
    f"name={name}",
  ]
  context: Any = contextlib.nullcontext()
  if name == "run_service":
    command.append(f"run_service.base_url=http://127.0.0.1:{port}")
    context = service(port)
  with context:
    subprocess.run(command, cwd=ROOT, check=True)
  return runs / name


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("names", nargs="*", default=list(NAMES), metavar="name")
  parser.add_argument("--runs", default="runs", help="where runs are made")
  parser.add_argument("--draw", nargs="+", help="only draw these runs")
  parser.add_argument("--out", default="runs", help="where pictures go")
  parser.add_argument("--port", type=int, default=3000, help="of the service")
  args = parser.parse_args(argv)
  unknown = sorted(set(args.names) - set(NAMES))
  if unknown:
    parser.error(f"unknown: {unknown[0]}; known: {', '.join(NAMES)}")
  out = pathlib.Path(args.out)
  out.mkdir(parents=True, exist_ok=True)
  print("| run | start | after cloning | after GRPO | updates | minutes |")
  print("|---|---|---|---|---|---|")
  for name in args.draw or args.names:
    directory = (
      pathlib.Path(name)
      if args.draw
      else train(name, pathlib.Path(args.runs).resolve(), args.port)
    )
    (out / f"learning_{directory.name}.svg").write_text(picture(directory))
    print(table_line(directory), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
