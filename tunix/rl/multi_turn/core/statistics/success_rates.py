"""Computes success rates with confidence intervals.

Turns the outcomes of evaluation episodes into the JSON of `summary.json`
under `eval.<name>`. An episode that infrastructure ended (a broken browser, a
timeout) is no evidence about the policy: it is counted under `invalid` and
enters no rate.

Several attempts at one task are no independent trials: an interval then
counts as many trials as give the variance between tasks, and what tasks are
solved in k attempts is estimated too (`pass_at_k`).

Does not run episodes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Iterable, Mapping, Sequence

from .. import trajectory as trajectory_lib
from . import pass_at_k

MODES = ("greedy", "sampled")
RECENT_STEPS = 10
"""Updates that a reading of training is the mean of, wherever one is shown."""


@dataclasses.dataclass(frozen=True)
class EpisodeResult:
  """Outcome of one evaluation episode.

  Attributes:
    family: task family.
    mode: "greedy" or "sampled".
    status: how the episode ended.
    success: whether the gym called the task solved.
    reward: undiscounted sum.
    turns: turns taken.
    task: Task that it attempts; "" where each episode has its own task.
  """

  family: str
  mode: str
  status: trajectory_lib.TrajectoryStatus
  success: bool
  reward: float = 0.0
  turns: int = 0
  task: str = ""

  def __post_init__(self):
    object.__setattr__(
      self, "status", trajectory_lib.TrajectoryStatus(self.status)
    )
    if self.mode not in MODES:
      raise ValueError(
        f"EpisodeResult.mode must be one of {', '.join(MODES)}, got"
        f" {self.mode!r}"
      )
    if self.status is trajectory_lib.TrajectoryStatus.RUNNING:
      raise ValueError("an episode that still runs has no result")
    if self.success and not self.is_valid:
      raise ValueError(
        f"an episode that ended as {self.status.value} cannot have succeeded"
      )

  @property
  def is_valid(self) -> bool:
    """True when the policy decided the outcome."""
    return self.status.is_policy_outcome

  @classmethod
  def from_trajectory(
    cls,
    trajectory: trajectory_lib.Trajectory,
    family: str,
    mode: str,
    task: str = "",
  ) -> EpisodeResult:
    """The result of a finished trajectory: success is status succeeded."""
    return cls(
      family=family,
      mode=mode,
      status=trajectory.status,
      success=(trajectory.status is trajectory_lib.TrajectoryStatus.SUCCEEDED),
      reward=float(trajectory.reward),
      turns=trajectory.num_turns,
      task=task,
    )


def wilson_interval(
  successes: float, n: float, z: float = 1.96
) -> tuple[float, float]:
  """Wilson's score interval of a binomial proportion.

  Unlike the textbook interval it is right for small n and for rates of 0 and
  1 (E. B. Wilson, 1927).

  Args:
    successes: how many of n; a fraction where trials weigh less than one.
    n: trials; 0 gives (0, 1), nothing is known.
    z: standard normal quantile, 1.96 for 95 %.

  Returns:
    (low, high), within [0, 1].
  """
  if n < 0 or not 0 <= successes <= n:
    raise ValueError(f"need 0 <= successes <= n, got {successes} of {n}")
  if not z > 0:
    raise ValueError(f"z must be > 0, got {z}")
  if n == 0:
    return 0.0, 1.0
  rate = successes / n
  scale = 1 / (1 + z * z / n)
  centre = (rate + z * z / (2 * n)) * scale
  half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) * scale
  # The bounds at 0 and n are exact; rounding must not cross the rate.
  low = 0.0 if successes == 0 else max(0.0, centre - half)
  high = 1.0 if successes == n else min(1.0, centre + half)
  return low, high


def attempts_of(results: Iterable[EpisodeResult]) -> list[tuple[int, int]]:
  """(successes, valid attempts) of each task that has a valid attempt."""
  successes: dict[Any, list[bool]] = collections.defaultdict(list)
  for number, result in enumerate(results):
    if result.is_valid:
      task = (result.family, result.task) if result.task else number
      successes[task].append(result.success)
  return [(sum(of_task), len(of_task)) for of_task in successes.values()]


def effective_trials(attempts: Sequence[tuple[int, int]]) -> float:
  """Independent trials that would vary as much as these attempts at tasks.

  The mean of a cluster sample has the variance G/(G-1) sum((y_g - p n_g)^2)
  / n^2 (W. G. Cochran, Sampling Techniques, 1977, section 9A), that of
  independent trials p (1 - p) / n. Between the tasks and the attempts, and the
  number of tasks where all attempts had one outcome.

  Args:
    attempts: (successes, attempts >= 1) of each task.
  """
  n, tasks = sum(count for _, count in attempts), len(attempts)
  if n == tasks or tasks < 2:
    return float(tasks)
  rate = sum(wins for wins, _ in attempts) / n
  squares = sum((wins - rate * count) ** 2 for wins, count in attempts)
  variance = tasks / (tasks - 1) * squares / n**2
  alone = rate * (1 - rate)
  if not alone:
    return float(tasks)
  return float(min(n, max(tasks, alone / variance if variance else n)))


def _rate(results: Sequence[EpisodeResult]) -> dict[str, Any]:
  """The figures of one cell; rates are None without a valid episode."""
  valid = [r for r in results if r.is_valid]
  wins = sum(r.success for r in valid)
  n = len(valid)
  attempts = attempts_of(valid)
  if n == len(attempts):
    low, high = wilson_interval(wins, n)
  else:
    trials = effective_trials(attempts)
    low, high = wilson_interval(wins / n * trials, trials)
  several = {}
  if n > len(attempts):
    several = {
      "tasks": len(attempts),
      **{
        name: {
          k: {
            **figures,
            "interval": list(
              wilson_interval(
                figures["rate"] * figures["tasks"], figures["tasks"]
              )
            ),
          }
          for k, figures in pass_at_k.table(attempts, one).items()
        }
        for name, one in (
          ("pass_at_k", pass_at_k.pass_at_k),
          ("pass_hat_k", pass_at_k.pass_hat_k),
        )
      },
    }
  return {
    "success_rate": wins / n if n else None,
    "interval": [low, high],
    "episodes": n,
    "successes": wins,
    "invalid": len(results) - n,
    "mean_reward": sum(r.reward for r in valid) / n if n else None,
    "mean_turns": sum(r.turns for r in valid) / n if n else None,
    **several,
  }


def _table(results: Sequence[EpisodeResult]) -> dict[str, Any]:
  families: dict[str, list[EpisodeResult]] = collections.defaultdict(list)
  for result in results:
    families[result.family].append(result)
  statuses = collections.Counter(r.status.value for r in results)
  return {
    **_rate(results),
    "by_task": {f: _rate(families[f]) for f in sorted(families)},
    "statuses": dict(sorted(statuses.items())),
  }


def summarise(
  results: Iterable[EpisodeResult], modes: Sequence[str] = MODES
) -> dict[str, Any]:
  """The JSON of one evaluation.

  Args:
    results: Results of all families and modes, in any order.
    modes: Modes by preference; the first one that occurs is the headline.

  Returns:
    `{"success_rate", "interval", "episodes", "successes", "invalid",
    "mean_reward", "mean_turns", "by_task", "statuses", "headline", <mode>:
    {…}}`: the headline mode's figures on top, and each mode's own under its
    name. `success_rate` is in [0, 1] or None without a valid episode,
    `interval` is 95 % Wilson. With several attempts at a task also `tasks`,
    and `pass_at_k` and `pass_hat_k`: {k: {"rate", "tasks", "interval"}}, of
    the tasks with at least k valid attempts. Their intervals, Wilson's of so
    many tasks, are wider than need be.

  Raises:
    ValueError: no results, or a result of a mode not listed.
  """
  by_mode: dict[str, list[EpisodeResult]] = {m: [] for m in modes}
  for result in results:
    if result.mode not in by_mode:
      raise ValueError(
        f"a result has mode {result.mode!r}, but only {list(modes)} are"
        " evaluated"
      )
    by_mode[result.mode].append(result)
  tables = {m: _table(rs) for m, rs in by_mode.items() if rs}
  if not tables:
    raise ValueError("no evaluation results; run at least one episode")
  headline = next(iter(tables))
  return {**tables[headline], "headline": headline, **tables}


def text_of(figures: Mapping[str, Any]) -> str:
  """A rate with its interval, in the digits that every text has."""
  low, high = figures["interval"]
  return f"{figures['success_rate']:.3f} [{low:.2f}, {high:.2f}]"


def format_table(
  summaries: Mapping[str, Mapping[str, Any]], columns: int | None = None
) -> str:
  """Evaluations side by side as plain text: a row a family.

  Args:
    summaries: evaluation name to what `summarise` returned, in the order of
      the columns.
    columns: Width of the terminal. Where the cells with their counts do not
      fit, the
      episodes are a row of their own.
  """
  table = _text_of(_rows(summaries, counts=True))
  if columns and max(map(len, table.splitlines())) > columns:
    rows = _rows(summaries, counts=False)
    rows.append(["episodes", *(str(s["episodes"]) for s in summaries.values())])
    table = _text_of(rows)
  return table


def _rows(
  summaries: Mapping[str, Mapping[str, Any]], counts: bool
) -> list[list[str]]:
  def cell(figures: Mapping[str, Any] | None) -> str:
    return _cell(figures, counts)

  families = sorted({f for s in summaries.values() for f in s["by_task"]})
  rows = [["task", *summaries]]
  for family in families:
    rows.append(
      [family] + [cell(s["by_task"].get(family)) for s in summaries.values()]
    )
  rows.append(["all", *(cell(s) for s in summaries.values())])
  for mode in MODES:
    if any(mode in s and s["headline"] != mode for s in summaries.values()):
      rows.append(
        [f"all, {mode}", *(cell(s.get(mode)) for s in summaries.values())]
      )
  return rows


def _text_of(rows: Sequence[Sequence[str]]) -> str:
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return "\n".join(
    "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip()
    for row in rows
  )


def _cell(figures: Mapping[str, Any] | None, counts: bool) -> str:
  if not figures or figures["success_rate"] is None:
    return "-"
  count = f" n={figures['episodes']}" if counts else ""
  return f"{text_of(figures)}{count}"
