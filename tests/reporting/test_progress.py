"""Progress on a terminal and in a log."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest
import synthetic_run
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import progress
from tunix.rl.multi_turn.reporting import reporting_settings

Config = reporting_settings.ReportConfig


def step(number, time=0.0, **metrics):
  return events.StepFinished(number, number, metrics, time=time)


def test_plain_lines_are_few_and_say_what_matters():
  out = io.StringIO()
  bar = progress.ProgressBar(100, Config(progress_s=5.0), stream=out)
  for number in range(1, 101):
    bar.on_event(
      step(
        number,
        time=float(number),
        reward_mean=0.5,
        success_rate=0.25,
        rollout_tokens_per_second=812.3,
        turn_seconds_model=0.519,
        turn_seconds_env=0.0,
        overlap=0.13,
        **{"time/step": 2.0, "time/wait": 0.9},
        staleness_mean=0.5,
      )
    )
  written = out.getvalue().splitlines()
  assert len(written) == 21
  assert written[1] == (
    "step 6/100 · reward 0.50 · success 0.25 · 812 tok/s · turn: model 519"
    " ms, env 0 ms · learner waits 45 % · overlap 13 % · staleness 0.5 · eta"
    " 1m34s"
  )
  assert written[-1].startswith("step 100/100")
  assert "eta" not in written[-1]


def test_stages_and_evaluations_are_told():
  out = io.StringIO()
  bar = progress.ProgressBar(10, stream=out)
  bar.on_event(events.Progress("warm start", 0, 50, "loss 2.1", time=0.0))
  bar.on_event(events.Progress("warm start", 1, 50, time=1.0))
  bar.on_event(events.Progress("warm start", 50, 50, time=2.0))
  bar.on_event(events.EvalFinished("warm_start", synthetic_run.results(0.5)))
  bar.on_event(
    events.EvalFinished("final", {"success_rate": None, "invalid": 7})
  )
  bar.on_event(events.RunFinished("interrupted"))
  written = out.getvalue().splitlines()
  assert written[:2] == ["warm start 0/50 loss 2.1", "warm start 50/50"]
  assert "evaluation warm_start: success 0.425 [0.34, 0.51]" in written[2]
  assert "click-button 0.50" in written[2]
  assert "no valid episode; 7 invalid, see faults" in written[3]
  assert written[4] == "run interrupted"


def _written(terminal: int) -> str:
  """Returns what a terminal with a closed other side holds; closes it."""
  parts = []
  with contextlib.suppress(OSError):  # EIO is its end; a read gives a part.
    while part := os.read(terminal, 65536):
      parts.append(part)
  os.close(terminal)
  return b"".join(parts).decode()


@pytest.mark.parametrize(
  "columns, last",
  [
    (80, "success 0.25"),
    (120, "model 519 ms, env 0 ms"),
    (170, "staleness 0.5"),
  ],
)
def test_a_bar_shows_the_readings_that_fit_and_cuts_none(columns, last):
  own, other = pty.openpty()
  size = struct.pack("HHHH", 40, columns, 0, 0)
  fcntl.ioctl(other, termios.TIOCSWINSZ, size)
  with open(other, "w", encoding="utf-8") as terminal:
    bar = progress.ProgressBar(10, Config(), stream=terminal)
    bar.on_event(
      step(
        3,
        reward_mean=0.5,
        success_rate=0.25,
        overlap=0.13,
        rollout_tokens_per_second=812.3,
        turn_seconds_model=0.519,
        turn_seconds_env=0.0,
        staleness_mean=0.5,
      )
    )
    results = synthetic_run.results(0.5)
    bar.on_event(events.EvalFinished("final", results))
    bar.on_event(events.RunFinished("completed"))
  text = _written(own)
  drawn = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text))
  assert max(map(len, drawn)) <= columns
  (shown,) = {  # Drawn more than once, at other times.
    line.partition("] ")[2].strip() for line in drawn if "reward" in line
  }
  assert shown.startswith("reward 0.50 · ") and shown.endswith(last)
  assert "evaluation final" in text


def test_a_terminal_gets_a_bar_and_none_is_silent():
  out = io.StringIO()
  bar = progress.ProgressBar(10, Config(progress="bar"), stream=out)
  bar.on_event(events.Progress("compile", 1, 2))
  bar.on_event(step(3, reward_mean=0.5))
  bar.on_event(events.RunFinished("completed"))
  text = out.getvalue()
  assert "compile 1/2" in text and "train 3/10" in text
  assert "reward 0.50" in text and "run completed" in text
  silent = io.StringIO()
  progress.ProgressBar(10, Config(progress="none"), stream=silent).on_event(
    step(1)
  )
  assert not silent.getvalue()
  with pytest.raises(ValueError, match="progress"):
    Config(progress="fancy")


@pytest.mark.parametrize(
  "seconds, text", [(9.4, "9s"), (185, "3m05s"), (7620, "2h07m"), (-1, "0s")]
)
def test_durations(seconds, text):
  assert progress.duration(seconds) == text
