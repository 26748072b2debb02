"""report.png: the run in one picture, drawn with matplotlib.

Curve, evaluation bars with intervals, and film strips below; for places where
a page cannot be opened. Text is drawn as it is, never as mathematics.
"""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import run_data

_COLOURS = ("#98a2b3", "#d98e2b", "#2563c9", "#2e8b57")
_RED = "#e0202a"
_COLUMNS = 5  # Frames of a strip.


def draw(run: run_data.Run, *, film_strips: int = 4) -> pathlib.Path:
  """Writes report.png into the run directory and returns its path."""
  # The object interface: no global state, safe beside a user's pyplot.
  from matplotlib import figure as figure_lib  # pylint: disable=g-import-not-at-top
  from matplotlib.backends import backend_agg  # pylint: disable=g-import-not-at-top

  stories = run_data.choose_episodes(run.episodes, film_strips)
  strips = [e for story in stories for e in story]
  height = 3.8 + 2.0 * len(strips)  # Inches.
  figure = figure_lib.Figure(figsize=(11, height), dpi=110)
  backend_agg.FigureCanvasAgg(figure)
  grid = figure.add_gridspec(
      1 + len(strips),
      _COLUMNS * 2,
      height_ratios=[2.9, *[2.0] * len(strips)],
      hspace=0.42,
      wspace=0.35,
      left=0.06,
      right=0.98,
      top=1 - 0.8 / height,
      bottom=0.4 / height,
  )
  figure.text(
      0.06, 1 - 0.38 / height, run.name, fontsize=13, parse_math=False
  )
  _curve(figure.add_subplot(grid[0, : _COLUMNS]), run)
  _bars(figure.add_subplot(grid[0, _COLUMNS:]), run)
  for row, episode in enumerate(strips, 1):
    _strip(figure, grid, row, run, episode)
  path = run.directory / "report.png"
  partial = path.with_suffix(".part")
  figure.savefig(partial, format="png")
  partial.replace(path)
  return path


def _plain(axes: Any, title: str) -> None:
  axes.set_title(title, fontsize=10, loc="left", parse_math=False)
  axes.tick_params(labelsize=8, length=0)
  axes.grid(axis="y", color="#e4e7ec", linewidth=0.8)
  axes.set_axisbelow(True)
  for side in axes.spines.values():
    side.set_visible(False)


def _curve(axes: Any, run: run_data.Run) -> None:
  _plain(axes, "training episodes, by update")
  top, drawn = 1.0, False
  for metric, label, colour in (
      ("reward_mean", "reward", 1),
      ("success_rate", "success rate", 2),
  ):
    line = report.curve(run, metric, label, colour)
    same = report.curve(run, "success_rate", "", 0).raw
    if not line.x or (metric == "reward_mean" and line.raw == same):
      continue
    drawn = True
    top = max(top, max(line.raw))
    axes.plot(line.x, line.raw, color=_COLOURS[colour], alpha=0.3, lw=0.8)
    axes.plot(line.x, line.strong, color=_COLOURS[colour], lw=2, label=label)
  for mark in report.evaluation_marks(run):
    axes.errorbar(
        [mark.x],
        [mark.y],
        yerr=[[mark.y - mark.low], [mark.high - mark.y]],
        fmt="o",
        color="#1c2330",
        markerfacecolor="white",
        ms=5,
        lw=1.2,
    )
  axes.set_ylim(bottom=None, top=top * 1.05)
  if drawn:
    axes.legend(fontsize=8, frameon=False, loc="lower right")
  else:
    axes.text(0.5, 0.5, "no updates yet", ha="center", color="#667085",
              transform=axes.transAxes)


def _bars(axes: Any, run: run_data.Run) -> None:
  _plain(axes, "evaluation on held-out seeds, 95 % intervals")
  axes.set_ylim(0, 1.12)
  if not run.evaluations:
    axes.text(0.5, 0.5, "no evaluation yet", ha="center", color="#667085",
              transform=axes.transAxes)
    axes.set_xticks([])
    return
  groups, series = report.bars(run)
  width = 0.8 / len(series)
  for s, (label, cells) in enumerate(series):
    shown = [(g, cell) for g, cell in enumerate(cells) if cell]
    xs = [g + (s - (len(series) - 1) / 2) * width for g, _ in shown]
    rates = [cell[0] for _, cell in shown]
    axes.bar(xs, rates, width * 0.92, color=_COLOURS[s % 4], label=label)
    axes.errorbar(
        xs,
        rates,
        yerr=[
            [max(0.0, cell[0] - cell[1]) for _, cell in shown],
            [max(0.0, cell[2] - cell[0]) for _, cell in shown],
        ],
        fmt="none",
        color="#1c2330",
        lw=1,
    )
  names = ["\n".join(textwrap.wrap(g.replace("-", "- "), 9)) for g in groups]
  axes.set_xticks(range(len(groups)))
  axes.set_xticklabels(
      [n.replace("- ", "-") for n in names], fontsize=7.5, parse_math=False
  )
  axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")


def _strip(
    figure: Any, grid: Any, row: int, run: run_data.Run, episode: Any
) -> None:
  frames = episode.frames
  if len(frames) > _COLUMNS:
    frames = (*frames[: _COLUMNS - 1], frames[-1])
  for column, frame in enumerate(frames):
    axes = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
      side.set_color("#c9ced8")
    image = report.open_image(run, frame)
    if image is None:
      axes.text(0.5, 0.5, "not kept", ha="center", color="#667085",
                transform=axes.transAxes)
    else:
      axes.imshow(image, interpolation="nearest")
      axes.set_autoscale_on(False)
      for action in frame.actions:
        _act(axes, action)
    acts = ", ".join(run_data.describe_action(a) for a in frame.actions)
    caption = f"{frame.label}: {acts}" if acts else frame.label
    axes.set_xlabel(
        "\n".join(textwrap.wrap(caption, 34)[:2]), fontsize=7, parse_math=False
    )
    if column == 0:
      title = f"{episode.status.value}, v{episode.version}:"
      asked = " ".join(episode.instruction.split())
      axes.set_title(
          f"{title} {asked[:110]}",
          fontsize=8.5,
          loc="left",
          color="#1f7a4a" if episode.success else "#b3372f",
          parse_math=False,
      )


def _act(axes: Any, action: dict[str, Any]) -> None:
  x, y = action.get("x"), action.get("y")
  x2, y2 = action.get("x2"), action.get("y2")
  dx, dy = action.get("dx", 0.0), action.get("dy", 0.0)
  if x is not None and x2 is None and (dx or dy):
    x2, y2 = x + dx, y + dy
  if x is None and x2 is not None:
    x, y, x2, y2 = x2, y2, None, None
  if x is None or y is None:
    return
  for colour, size, width in (("white", 11, 3.2), (_RED, 11, 1.6)):
    axes.plot([x], [y], "o", mec=colour, mfc="none", ms=size, mew=width)
  if x2 is not None:
    axes.annotate(
        "", (x2, y2), (x, y), arrowprops={"arrowstyle": "->", "color": _RED}
    )
