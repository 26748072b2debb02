"""Shows a run's progress: a bar on a terminal, plain lines elsewhere.

Shows reward and success (means of the last updates), sampled tokens a second,
a turn's seconds by stage, the share of time that the learner waits, overlap,
staleness and the time left; before
training, the running stage. Lines come at most every few seconds, so that a log
stays readable; a bar shows as many of the readings as its terminal has room
for.

Does not write files.
"""

from __future__ import annotations

import collections
import sys
import textwrap
import threading
from typing import Any, Mapping, Sequence, TextIO

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.reporting import reporting_settings

_BAR_FORMAT = (
  "{desc} {n_fmt}/{total_fmt} {bar} {percentage:3.0f}% [{elapsed}<{remaining}]"
)
_BAR_COLUMNS = 32  # Of a bar of ten, its share and its times.
_COLUMNS = 80  # Of a terminal that does not tell.


def duration(seconds: float) -> str:
  """`seconds` as 9s, 3m05s or 2h07m."""
  seconds = int(round(max(0.0, seconds)))
  if seconds < 60:
    return f"{seconds}s"
  minutes, remainder = divmod(seconds, 60)
  if minutes < 60:
    return f"{minutes}m{remainder:02d}s"
  return f"{minutes // 60}h{minutes % 60:02d}m"


class ProgressBar:
  """Observer; see the module docstring."""

  receives = (
    events.StepFinished,
    events.Progress,
    events.EvalFinished,
    events.RunStarted,
    events.RunFinished,
  )

  def __init__(
    self,
    total: int,
    config: reporting_settings.ReportConfig = reporting_settings.ReportConfig(),
    *,
    stream: TextIO | None = None,
    start: int = 0,
  ):
    """Args:

    total: learner steps of the run.
    config: `progress` and `progress_s`.
    stream: Stream to write to; None = stderr.
    start: steps already made, when resuming.
    """
    self._stream = stream or sys.stderr
    mode = config.progress
    if mode == "auto":
      mode = "bar" if self._stream.isatty() else "lines"
    self._mode = mode
    self._total = total
    self._start = start
    self._interval = config.progress_s
    self._lock = threading.RLock()
    self._bar: Any = None
    self._bar_stage = ""
    self._last_line = float("-inf")
    self._stage_line = ("", float("-inf"))
    self._first: float | None = None
    self._recent: dict[str, collections.deque[float]] = {
      "reward_mean": collections.deque(maxlen=success_rates.RECENT_STEPS),
      "success_rate": collections.deque(maxlen=success_rates.RECENT_STEPS),
    }

  def on_event(self, event: events.Event) -> None:
    if self._mode == "none":
      return
    with self._lock:
      if isinstance(event, events.StepFinished):
        self._step(event)
      elif isinstance(event, events.Progress):
        self._progress(event)
      elif isinstance(event, events.EvalFinished):
        self._print(_evaluation(event))
      elif isinstance(event, events.RunStarted):
        self._print(f"run {event.run_name}")
      elif isinstance(event, events.RunFinished):
        self._close_bar()
        error = f": {event.error}" if event.error else ""
        self._print(f"run {event.status}{error}")
        for note in event.notes:
          self._print(f"warning: {note}")

  def _step(self, event: events.StepFinished) -> None:
    now = event.time
    # The first step compiles; the time left is judged by the ones after it.
    if self._first is None:
      self._first, self._start = now, event.step
    for name, values in self._recent.items():
      value = event.metrics.get(name)
      if value is not None:
        values.append(float(value))
    figures = self._figures(event.metrics)
    if self._mode == "bar":
      bar = self._open("train", self._total)
      bar.n = event.step
      self._beside(bar, figures)
    elif now - self._last_line >= self._interval or event.step >= self._total:
      self._last_line = now
      updates = event.step - self._start
      eta = ""
      if 0 < updates and event.step < self._total:
        pace = (now - self._first) / updates
        eta = f"eta {duration(pace * (self._total - event.step))}"
      parts = [f"step {event.step}/{self._total}", *figures, eta]
      self._print(" · ".join(filter(None, parts)))

  def _figures(self, metrics: Mapping[str, float]) -> list[str]:
    parts = []
    for name, label in (("reward_mean", "reward"), ("success_rate", "success")):
      values = self._recent[name]
      if values:
        parts.append(f"{label} {sum(values) / len(values):.2f}")
    speed = metrics.get("rollout_tokens_per_second")
    if speed is not None:
      parts.append(f"{speed:.0f} tok/s")
    turn = [
      f"{name} {1000 * seconds:.0f} ms"
      for name in ("model", "env")
      if (seconds := metrics.get(f"turn_seconds_{name}")) is not None
    ]
    if turn:
      parts.append(f"turn: {', '.join(turn)}")
    step = metrics.get("time/step", 0.0)
    if step > 0:
      waits = 100 * metrics.get("time/wait", 0.0) / step
      parts.append(f"learner waits {waits:.0f} %")
    overlap = metrics.get("overlap")
    if overlap is not None:
      parts.append(f"overlap {100 * overlap:.0f} %")
    staleness = metrics.get("staleness_mean")
    if staleness is not None:
      parts.append("staleness " + f"{staleness:.1f}".removesuffix(".0"))
    return parts

  def _beside(self, bar: Any, parts: Sequence[str]) -> None:
    """Draws the bar, and after it the first parts that fit."""
    room = self._columns() - len(f"{bar.desc} {bar.n}/{bar.total} ")
    room -= _BAR_COLUMNS
    text = ""
    for part in parts:
      longer = f"{text} · {part}" if text else part
      if len(longer) > room:
        break
      text = longer
    text = text.replace("{", "{{").replace("}", "}}")
    bar.bar_format = f"{_BAR_FORMAT} {text}"
    bar.refresh()

  def _columns(self) -> int:
    return getattr(self._bar, "ncols", None) or _COLUMNS

  def _progress(self, event: events.Progress) -> None:
    if self._mode == "bar":
      bar = self._open(event.stage, event.total)
      bar.n = event.done
      self._beside(bar, [event.message])
      return
    stage, printed = self._stage_line
    ends = event.total is not None and event.done >= event.total
    now = event.time
    if stage == event.stage and not ends and now - printed < self._interval:
      return
    self._stage_line = (event.stage, now)
    total = f"/{event.total}" if event.total is not None else ""
    message = f" {event.message}" if event.message else ""
    self._print(f"{event.stage} {event.done}{total}{message}")

  def _open(self, stage: str, total: int | None) -> Any:
    if self._bar is None or self._bar_stage != stage:
      import tqdm  # pylint: disable=g-import-not-at-top

      self._close_bar()
      self._bar_stage = stage
      self._bar = tqdm.tqdm(
        total=total,
        desc=stage,
        initial=self._start if stage == "train" else 0,
        file=self._stream,
        dynamic_ncols=True,
        bar_format=_BAR_FORMAT,
      )
    return self._bar

  def _close_bar(self) -> None:
    if self._bar is not None:
      self._bar.close()
      self._bar = None

  def _print(self, text: str) -> None:
    if self._bar is not None:
      lines = textwrap.wrap(
        text,
        self._columns(),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
      )
      self._bar.write("\n".join(lines), file=self._stream)
    else:
      print(text, file=self._stream, flush=True)


def _evaluation(event: events.EvalFinished) -> str:
  rate = event.results.get("success_rate")
  invalid = event.results.get("invalid", 0)
  lost = f"; {invalid} invalid, see faults in summary.json" if invalid else ""
  if rate is None:
    return f"evaluation {event.name}: no valid episode{lost}"
  low, high = event.results.get("interval", (0.0, 1.0))
  tasks = ", ".join(
    f"{family} {figures['success_rate']:.3f}"
    for family, figures in event.results.get("by_task", {}).items()
    if figures.get("success_rate") is not None
  )
  return (
    f"evaluation {event.name}: success {rate:.3f} [{low:.2f}, {high:.2f}] of"
    f" {event.results.get('episodes', 0)} episodes"
    + (f" ({tasks})" if tasks else "")
    + lost
  )
