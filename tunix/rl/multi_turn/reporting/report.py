"""Writes report.html, the page of a run directory.

    python -m tunix.rl.multi_turn.reporting.report runs/<name>

Promises: the page stands alone: styles, charts (SVG) and screenshots are
inside; no network, no scripts; dark and light. Every text that a model, a task
or a configuration wrote is escaped.

Does not: need the run to have ended, or change another file.
"""

from __future__ import annotations

import base64
import html
import io
import pathlib
import sys
import time
from typing import Any, Protocol, Sequence

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import metrics as metrics_lib
from tunix.rl.multi_turn.reporting import progress
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import run_data
from tunix.rl.multi_turn.reporting import svg
from tunix.rl.multi_turn.reporting import time_metrics

TEXT = 220  # Characters of a completion that are shown.
_DETAILS = (
  "entropy",
  "grad_norm",
  "clip_fraction",
  "informative_groups",
  "staleness_mean",
  "turns_mean",
  "turn_seconds_model",
  "turn_seconds_env",
  "turn_seconds_other",
  "overlap",
  "episodes_busy",
  "invalid_episodes",
  "rollout_tokens_per_second",
  "learner_tokens_per_second",
)


def build_report(
  directory: str | pathlib.Path,
  config: reporting_settings.ReportConfig = reporting_settings.ReportConfig(),
) -> pathlib.Path:
  """Writes report.html into the run directory, and returns its path.

  Args:
    directory: the run directory.
    config: `film_strips`.

  Raises:
    FileNotFoundError: the directory holds no run.
  """
  run = run_data.load(directory)
  path = run.directory / "report.html"
  partial = path.with_suffix(".part")
  partial.write_text(render(run, config), encoding="utf-8")
  partial.replace(path)
  return path


def render(
  run: run_data.RunDirectory,
  config: reporting_settings.ReportConfig = reporting_settings.ReportConfig(),
) -> str:
  """The page as one string."""
  return page(
    run.name,
    [
      heading(run),
      tiles(run),
      training_curve(run),
      evaluations(run),
      _attempts(run),
      _digest(run),
      _seconds(run),
      _films(run, config),
      readings(run),
      _troubles(run),
      _config(run),
    ],
  )


def page(title: str, parts: Sequence[str]) -> str:
  """A page of its own of parts made here; empty ones are left out."""
  style = (
    pathlib.Path(__file__)
    .with_name("report_style.css")
    .read_text(encoding="utf-8")
  )
  head = [
    "<!doctype html><html lang=en><head><meta charset=utf-8>",
    "<meta name=viewport content='width=device-width,initial-scale=1'>",
    f"<title>{_esc(title)}</title><style>{style}</style></head><body>",
  ]
  return "\n".join(p for p in (*head, *parts, "</body></html>") if p)


def _esc(value: object) -> str:
  return html.escape(str(value), quote=True)


def _row(*cells: object, tag: str = "td") -> str:
  """A table's row of cells that are HTML."""
  return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
  return f"<table>{_row(*head, tag='th')}{''.join(rows)}</table>"


def _card(title: str, *parts: str) -> str:
  return f"<h2>{title}</h2><div class=card>{''.join(parts)}</div>"


def _folded(title: str, summary: str, content: str) -> str:
  return (
    f"<h2>{title}</h2><details class=card><summary>{summary}</summary>"
    f"{content}</details>"
  )


def heading(run: run_data.RunDirectory) -> str:
  """The run's name and state."""
  summary = run.summary
  words = [str(summary.get("status", "unfinished"))]
  if isinstance(summary.get("started"), (int, float)):
    started = time.localtime(summary["started"])
    words.append(time.strftime("started %Y-%m-%d %H:%M", started))
  if isinstance(summary.get("seconds"), (int, float)):
    words.append(f"{progress.duration(summary['seconds'])} in all")
  if summary.get("error"):
    words.append(str(summary["error"]))
  lines = [f"<p class=faint>{_esc(' · '.join(words))}</p>"]
  lines += [
    f"<p class=bad>{_esc(note)}</p>" for note in summary.get("notes") or ()
  ]
  return f"<h1>{_esc(run.name)}</h1>{''.join(lines)}"


def tiles(run: run_data.RunDirectory) -> str:
  """Its figures at a glance."""
  shown: list[tuple[str, str]] = []
  rates = run.evaluations
  if rates:
    last = list(rates)[-1]
    low, high = rates[last]["interval"]
    shown.append(
      (
        f"{rates[last]['success_rate']:.3f}",
        f"success, {last} evaluation [{low:.2f}, {high:.2f}]",
      )
    )
    before = "warm_start" if "warm_start" in rates else next(iter(rates))
    if before != last:
      shown.append(
        (f"{rates[before]['success_rate']:.3f}", f"before GRPO ({before})")
      )
  if run.metrics:
    shown.append((f"{int(run.metrics[-1]['step'])}", "updates"))
  episodes = run.summary.get("episodes") or {}
  trained = sum(int(n) for k, n in episodes.items() if k.startswith("train/"))
  if trained:
    shown.append((f"{trained}", "training episodes"))
  _, speed = run.series("rollout_tokens_per_second")
  if speed:
    shown.append((f"{sum(speed) / len(speed):.0f}", "sampled tokens/s, mean"))
  cards = [
    f"<div class='card tile'><b>{_esc(value)}</b><span>{_esc(label)}</span>"
    "</div>"
    for value, label in shown
  ]
  return f"<div class=tiles>{''.join(cards)}</div>"


def _seconds(run: run_data.RunDirectory) -> str:
  """Shares of the wall time of all steps but the first, which compiles."""
  steps = [m for m in run.metrics if "time/step" in m]
  steps = steps[1:] or steps
  total = sum(m["time/step"] for m in steps)
  if not total:
    return ""
  rows = []
  for who, parts in time_metrics.ACCOUNTS.items():
    shares = {p: sum(m.get(f"time/{p}") or 0.0 for m in steps) for p in parts}
    if any(shares.values()):
      percentages = ", ".join(
        f"{part.rpartition('_')[2]} {seconds / total:.0%}"
        for part, seconds in shares.items()
        if seconds >= 0.005 * total
      )
      rows.append(f"<tr><th>{who}</th><td>{percentages}</td></tr>")
  mean = total / len(steps)
  return _card(
    "Time",
    f"<p class=faint>{mean:.2f} s a step, mean of {len(steps)}</p>",
    f"<table>{''.join(rows)}</table>",
  )


def _span_of(count: int) -> int:
  """Updates that curves of `count` points are averaged over."""
  return max(1, min(20, count // 8))


def _curve(
  run: run_data.RunDirectory, metric: str, label: str, colour: int
) -> svg.Line:
  steps, values = run.series(metric)
  return svg.Line(
    label, steps, values, run_data.smooth(values, _span_of(len(values))), colour
  )


def _evaluation_marks(run: run_data.RunDirectory) -> list[svg.Interval]:
  """Evaluations at the steps they belong to."""
  last = run.metrics[-1]["step"] if run.metrics else 0
  marks = []
  for name, results in run.evaluations.items():
    if name.startswith("step_"):
      step = float(name[5:])
    elif name in ("warm_start", "final"):
      step = 0.0 if name == "warm_start" else float(last)
    else:
      continue
    low, high = results["interval"]
    rate = results["success_rate"]
    label = f"{name}: {rate:.3f} [{low:.2f}, {high:.2f}]"
    marks.append(svg.Interval(step, rate, low, high, label))
  return marks


def training_curve(run: run_data.RunDirectory) -> str:
  """Reward and success by update, with evaluations; "" before the first."""
  lines = [
    _curve(run, "success_rate", "success rate", 2),
    _curve(run, "reward_mean", "reward", 1),
  ]
  lines = [line for line in lines if line.x]
  if not lines:
    return ""
  if len(lines) == 2 and lines[0].raw == lines[1].raw:
    lines = [
      svg.Line(
        "success rate (= reward)", lines[0].x, lines[0].raw, lines[0].strong, 2
      )
    ]
  values = [v for line in lines for v in line.raw]
  inside = min(values) >= 0 and max(values) <= 1
  chart = svg.line_chart(
    lines,
    y_range=(0.0, 1.0) if inside else None,
    marks=_evaluation_marks(run),
    width=1060,
    height=300,
  )
  keys = "".join(
    f'<span class="key c{line.colour}"><i></i>{_esc(line.label)}</span>'
    for line in lines
  )
  return _card(
    "Training episodes",
    f"<div class=legend>{keys}<span class=faint>thin: one update; thick:"
    " running mean; circles: held-out evaluation, 95 % interval</span></div>",
    chart,
  )


def _headline_names(run: run_data.RunDirectory) -> list[str]:
  names: list[str] = [
    n for n in ("initial", "warm_start", "final") if n in run.evaluations
  ]
  return names or list(run.evaluations)[-3:]


def _bars(
  run: run_data.RunDirectory,
) -> tuple[list[str], list[tuple[str, list[Any]]]]:
  """Groups and series for bars: tasks and "all" by evaluation."""
  names = _headline_names(run)
  rates = run.evaluations
  families = sorted({f for n in names for f in rates[n].get("by_task", {})})
  series = []
  for name in names:
    cells = [rates[name].get("by_task", {}).get(f) for f in families]
    cells.append(rates[name])
    series.append((name.replace("_", " "), [_cell(c) for c in cells]))
  return [*families, "all tasks"], series


def _cell(figures: Any) -> tuple[float, float, float] | None:
  if not figures or figures.get("success_rate") is None:
    return None
  low, high = figures["interval"]
  return figures["success_rate"], low, high


def evaluations(run: run_data.RunDirectory) -> str:
  """Evaluations as bars and a table; "" without one."""
  if not run.evaluations:
    return ""
  groups, series = _bars(run)
  chart = svg.interval_bars(groups, series, width=1060, height=280)
  names = list(run.evaluations)
  modes = [
    m
    for m in ("greedy", "sampled")
    if any(m in run.evaluations[n] for n in names)
  ]
  rows = [
    _row(
      _esc(name),
      *(_rate(results.get(mode)) for mode in modes),
      int(results.get("episodes", 0)),
      int(results.get("invalid", 0)),
    )
    for name, results in run.evaluations.items()
  ]
  return _card(
    "Evaluation on held-out seeds",
    svg.legend([label for label, _ in series]),
    chart,
    _table(["evaluation", *modes, "episodes", "invalid"], rows),
  )


def _rate(figures: object) -> str:
  cell = _cell(figures)
  if cell is None:
    return "–"
  rate, low, high = cell
  return f"{rate:.3f} <small>[{low:.2f}, {high:.2f}]</small>"


def _attempts(run: run_data.RunDirectory) -> str:
  """pass@k and pass^k, where tasks were attempted several times."""
  rows = []
  for name, results in run.evaluations.items():
    for kind, label in (("pass_at_k", "pass@"), ("pass_hat_k", "pass^")):
      for k, figures in (results.get(kind) or {}).items():
        low, high = figures["interval"]
        rows.append(
          _row(
            _esc(name),
            f"{label}{_esc(k)}",
            f"{figures['rate']:.3f} <small>[{low:.2f}, {high:.2f}]</small>",
            int(figures["tasks"]),
          )
        )
  if not rows:
    return ""
  head = ("evaluation", "figure", "rate", "tasks")
  return _card("Several attempts", _table(head, rows))


def _digest(run: run_data.RunDirectory) -> str:
  """The gym's summary of an evaluation's episodes, with its pictures."""
  digest = run.evaluation.get("digest")
  if not isinstance(digest, dict) or not digest.get("lines"):
    return ""
  parts = [f"<p>{_esc(line)}</p>" for line in digest["lines"]]
  for name in digest.get("pictures", ()):
    file = run.directory / pathlib.Path(str(name)).name
    if file.is_file():
      data = base64.b64encode(file.read_bytes()).decode()
      parts.append(
        f"<img style='max-width:100%' alt='{_esc(name)}'"
        f" src='data:image/png;base64,{data}'>"
      )
  return _card("Of the gym", *parts)


# --- film strips -------------------------------------------------------------


def _films(
  run: run_data.RunDirectory, config: reporting_settings.ReportConfig
) -> str:
  stories = run_data.choose_episodes(run.episodes, config.film_strips)
  if not stories:
    return ""
  parts = ["<h2>Episodes</h2>"]
  for story in stories:
    parts.append("<div class=card>")
    parts.append(f"<h3>{_esc(story[0].family or 'task')}</h3>")
    parts += [film(run, episode) for episode in story]
    parts.append("</div>")
  return "\n".join(parts)


def film(
  run: Images, episode: run_data.ShownEpisode, most: int = 12, width: int = 960
) -> str:
  """An episode's screens in a row, with what was done on each.

  Args:
    run: Source of its screenshots.
    episode: Episode of the run.
    most: Turns that are drawn.
    width: Wider screenshots are scaled down to it, px.
  """
  good = "good" if episode.success else "bad"
  title = (
    f"<p><span class={good}>{_esc(episode.status.value)}</span>"
    f" “{_esc(_cut(episode.instruction))}”"
    f" <small>{_esc(episode.split)}, weights version"
    f" {episode.version}, reward {episode.reward:g}</small></p>"
  )
  frames = episode.frames
  shown = frames if len(frames) <= most else frames[: most - 1]
  figures = [figure(run, frame, width) for frame in shown]
  if len(frames) > most:
    hidden = len(frames) - most
    figures.append(f"<figure><div class=none>{hidden} more</div></figure>")
    figures.append(figure(run, frames[-1], width))
  return f"{title}<div class=strip>{''.join(figures)}</div>"


def figure(images: Images, frame: run_data.Frame, width: int) -> str:
  """A turn: its screen with what was done on it, and the completion."""
  uri = data_uri(images, frame, width)
  if frame.image is None:
    observation = _esc(_cut(frame.observed))
    picture = f"<div class=seen>{observation}</div>" if observation else ""
  elif uri is None:
    picture = "<div class=none>screenshot not kept</div>"
  else:
    picture = svg.marked_screenshot(
      uri, frame.image.width, frame.image.height, frame.actions
    )
  acts = ", ".join(run_data.describe_action(a) for a in frame.actions)
  lines = [f"<b>{_esc(frame.label)}</b> {_esc(_cut(acts))}"]
  if frame.note:
    lines.append(f"<span class=bad>{_esc(_cut(frame.note))}</span>")
  if frame.text:
    lines.append(f"<span class=say>{_esc(_cut(frame.text))}</span>")
  return (
    f"<figure>{picture}<figcaption>{'<br>'.join(lines)}</figcaption></figure>"
  )


def _cut(text: str) -> str:
  text = " ".join(text.split())
  return text if len(text) <= TEXT else text[: TEXT - 1] + "…"


class Images(Protocol):
  """Source of screenshots; a run directory is one."""

  def open_image(self, ref: trajectory_lib.ImageRef) -> Any | None:
    """A PIL image; None when it is not there."""


def data_uri(images: Images, frame: run_data.Frame, width: int) -> str | None:
  """The frame's screenshot as a data URI; above `width` px smaller, as JPEG."""
  image = None if frame.image is None else images.open_image(frame.image)
  if image is None:
    return None
  buffer = io.BytesIO()
  if image.width > width:
    image.thumbnail((width, 16 * width))
    image.save(buffer, format="JPEG", quality=85)
    kind = "jpeg"
  else:
    image.save(buffer, format="PNG")
    kind = "png"
  encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
  return f"data:image/{kind};base64,{encoded}"


# --- the rest ----------------------------------------------------------------


def readings(
  run: run_data.RunDirectory, names: Sequence[str] = _DETAILS
) -> str:
  """A small curve of each metric that was measured."""
  cards = []
  for name in names:
    line = _curve(run, name, name, 2)
    if not line.x:
      continue
    metric = metrics_lib.METRICS.get(name)
    unit = f" <small>{_esc(metric.unit)}</small>" if metric else ""
    tip = _esc(metric.meaning if metric else "")
    chart = svg.line_chart([line], width=330, height=130)
    cards.append(
      f'<div class=card title="{tip}"><h3>{_esc(name)}{unit}</h3>{chart}</div>'
    )
  if not cards:
    return ""
  return "<h2>Readings</h2><div class=multiples>" + "".join(cards) + "</div>"


def _troubles(run: run_data.RunDirectory) -> str:
  rows = []
  for kind in ("episodes", "groups", "faults"):
    counts = run.summary.get(kind) or {}
    for name, count in sorted(counts.items()):
      rows.append(_row(kind, _esc(name), _esc(count)))
  if not rows:
    return ""
  return _folded(
    "Counts",
    "How episodes and groups ended, and which faults were contained",
    _table(("kind", "outcome", "count"), rows),
  )


def _config(run: run_data.RunDirectory) -> str:
  if not run.config:
    return ""
  content = f"<pre>{_esc(run.config)}</pre>"
  return _folded("Configuration", "config.yaml", content)


def main(argv: Sequence[str]) -> int:
  """Builds the reports of the run directories named in `argv`."""
  if not argv or argv[0] in ("-h", "--help"):
    print("usage: python -m tunix.rl.multi_turn.reporting.report runs/<name>")
    return 0 if argv else 2
  for directory in argv:
    try:
      written = build_report(directory)
    except FileNotFoundError as error:
      print(f"error: {error}", file=sys.stderr)
      return 1
    print(written)
  return 0


if __name__ == "__main__":
  raise SystemExit(main(sys.argv[1:]))
