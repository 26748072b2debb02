"""Puts a run's readings into sentences: what bounds it, what to change.

    for line in advice.lines(columns, evals): line["text"], line["about"]

Every figure is the mean of the last ten steps, as on the tiles; a rule that
cannot be read, because its metric is missing, gives no sentence.

Does not: judge a run by one step, or change anything.
"""

from __future__ import annotations

import pathlib
from typing import Any, Callable, Sequence

import numpy as np

from training_monitor.core import json_text
from training_monitor.core.statistics import success_rates
from training_monitor.dashboard import curves as curves_lib
from training_monitor.dashboard import text as text_lib

FEW_GROUPS = 0.25
SOLVED, HOPELESS = 0.85, 0.15
COLLAPSED = 0.2
"""Of the entropy that training began with."""
WEAKER = 0.15
"""How far below the mean of all a family is named."""
TRUNCATED, CONTEXT, WANDERING, BROKEN, CLIPPED = 0.05, 0.03, 0.2, 0.05, 0.2
IDLE = 0.2
"""Share of the time from which an engine has room for more episodes."""
BOUND = 0.5
"""Share of a step from which one thing bounds it."""

Row = dict[str, Any]
_METRICS: dict[str, dict[str, str]] = json_text.read(
  pathlib.Path(__file__).with_name("metrics.json")
)
"""Readings that the framework documents; `make docs` writes the file."""


def lines(columns: curves_lib.Columns, evals: Sequence[Row]) -> list[Row]:
  """Returns sentences: first about learning, then about throughput.

  Args:
    columns: Columns of the run.
    evals: Points from `RunPages.eval_points`.

  Returns:
    Rows of {about, text, path}: `about` is "learning", "throughput" or
    "warning"; `path` follows the run's own address, None without a page.
  """
  sentences = [_learning(columns, evals), _bound(columns)]
  sentences += [rule(columns) for rule in _RULES]
  return [line for line in sentences if line is not None]


def chart_about(names: Sequence[str]) -> list[Row]:
  """Returns {name, meaning, advice, unit} of a chart's documented metrics."""
  documented = []
  for name in names:
    metric = _METRICS.get(curves_lib.DERIVED.get(name, (name,))[0])
    if metric is not None:
      documented.append(
        {
          "name": name,
          "meaning": _MEANING.get(name, metric["meaning"]),
          "advice": metric["advice"],
          "unit": metric["unit"],
        }
      )
  return documented or [
    {"name": names[0], "meaning": text, "advice": "", "unit": ""}
    for start, text in _PREFIXES.items()
    if names[0] == start
  ]


_MEANING = {"engine_idle": "Share of wall time the engine was idle."}
_PREFIXES = {
  "success_rate/": "Success of each task family among the valid episodes of"
  " an update.",
  "status/": "Shares of the episodes of an update by how they ended.",
}


def _line(about: str, text: str, path: str | None = None) -> Row:
  return {"about": about, "text": text, "path": path}


def _percent(share: float) -> str:
  return f"{100 * share:.0f} %"


def _begin(columns: curves_lib.Columns, name: str) -> float | None:
  """Returns the mean of the first readings; None for a short run."""
  readings = columns.values.get(name, np.zeros(0))
  readings = readings[np.isfinite(readings)]
  if len(readings) < 2 * success_rates.RECENT_STEPS:
    return None
  return float(readings[: success_rates.RECENT_STEPS].mean())


def _learning(columns: curves_lib.Columns, evals: Sequence[Row]) -> Row | None:
  now, then = columns.recent("success_rate"), _begin(columns, "success_rate")
  text = ""
  if now is not None and then is not None:
    word = (
      "rose" if now > then + 0.02 else "fell" if now < then - 0.02 else "stayed"
    )
    text = (
      f"Success in training {word} "
      + (
        f"at {_percent(now)}"
        if word == "stayed"
        else f"from {_percent(then)} to {_percent(now)}"
      )
      + ", the means of the first and last ten steps."
    )
  if len(evals) > 1:
    last = evals[-1]
    # Updates began from the last baseline, the warm start where there is one.
    before = [e for e in evals[:-1] if e["kind"] == "baseline"] or evals[:1]
    first = before[-1]
    apart = last["low"] > first["high"] or last["high"] < first["low"]
    text += (
      f" Evaluations: {text_lib.percent(first['rate'])} ({first['name']}) to"
      f" {text_lib.percent(last['rate'])} ({last['name']})"
      + ("." if apart else ", within their 95 % intervals.")
    )
  return _line("learning", text.strip(), "/evals") if text else None


def _bound(columns: curves_lib.Columns) -> Row | None:
  total, wait, learn = (
    columns.recent(f"seconds_{n}") for n in ("total", "wait", "learn")
  )
  if not total or wait is None or learn is None:
    return None
  if wait / total >= BOUND:
    text = (
      "Collecting bounds this run: the learner waits"
      f" {_percent(wait / total)}"
      " of a step."
    )
    model, env = columns.recent("model_share"), columns.recent("env_share")
    if model is not None and env is not None:
      text += (
        f" Episodes spend {_percent(model)} of their time on the model and"
        f" {_percent(env)} in the environment: " + _helps(columns, model >= env)
      )
    return _line("throughput", text, "/health")
  if learn / total >= BOUND:
    return _line(
      "throughput",
      f"The update bounds this run: it takes {_percent(learn / total)} of a"
      " step, and episodes wait for it. A larger learner.rows or more"
      " devices help.",
      "/health",
    )
  remainder = max(0.0, 1 - (wait + learn) / total)
  return _line(
    "throughput",
    f"Nothing alone bounds this run: of a step {_percent(wait / total)} is"
    f" waiting for episodes, {_percent(learn / total)} the update,"
    f" {_percent(remainder)} publishing weights and the rest.",
    "/health",
  )


def _helps(columns: curves_lib.Columns, waits_for_model: bool) -> str:
  """Names the setting that speeds up a run whose learner waits."""
  if not waits_for_model:
    return "more environments at once (collect.concurrency) help."
  busy = columns.recent("engine_busy")
  if busy is not None and 1 - busy > IDLE:
    return (
      f"the engine is idle {_percent(1 - busy)} of the time, so more"
      " engine.slots do not help; more episodes at once (collect.concurrency)"
      " or a larger queue.max_staleness do."
    )
  return "more engine.slots or a faster model helps."


def _gradients(columns: curves_lib.Columns) -> Row | None:
  share, won = (
    columns.recent("informative_groups"),
    columns.recent("success_rate"),
  )
  if share is None or won is None or share >= FEW_GROUPS:
    return None
  about = f"Only {_percent(share)} of the groups have a gradient"
  if won >= SOLVED:
    return _line(
      "warning",
      f"{about} at {_percent(won)} success: these tasks are"
      " solved. Raise gym.options.difficulty or add tasks.",
      "/tasks?sort=learnable",
    )
  if won <= HOPELESS:
    return _line(
      "warning",
      f"{about} at {_percent(won)} success: the tasks are too"
      " hard. Warm-start longer, or begin with easier ones.",
      "/tasks?solved=never",
    )
  return _line(
    "warning",
    f"{about}: most tasks are always or never solved. Set"
    " task_source.order=curriculum or a larger collect.group_size.",
    "/tasks?sort=learnable",
  )


def _weakest(columns: curves_lib.Columns) -> Row | None:
  rates = {
    name.partition("/")[2]: rate
    for name in columns.values
    if name.startswith("success_rate/")
    if (rate := columns.recent(name)) is not None
  }
  if len(rates) < 2:
    return None
  weakest = min(rates, key=lambda name: rates[name])
  mean = sum(rates.values()) / len(rates)
  if rates[weakest] > mean - WEAKER:
    return None
  return _line(
    "warning",
    f"Weakest family: {weakest} with {_percent(rates[weakest])},"
    f" all together {_percent(mean)}.",
    "/tasks",
  )


def _entropy(columns: curves_lib.Columns) -> Row | None:
  now, then = columns.recent("entropy"), _begin(columns, "entropy")
  won = columns.recent("success_rate")
  if now is None or not then or now > COLLAPSED * then or (won or 0) > SOLVED:
    return None
  return _line(
    "warning",
    f"Entropy fell from {then:.2g} to {now:.2g} nats before the"
    " tasks were solved: raise algorithm.clip_high or"
    " algorithm.entropy_coef.",
  )


def _broken(columns: curves_lib.Columns) -> Row | None:
  share = columns.recent("invalid_episodes")
  if share is None or share <= BROKEN:
    return None
  ends = {
    name: rate
    for name in ("env_error", "timeout", "model_error")
    if (rate := columns.recent(f"status/{name}"))
  }
  most = max(ends, key=lambda name: ends[name]) if ends else ""
  return _line(
    "warning",
    f"{_percent(share)} of the episodes are ended by"
    " infrastructure"
    + (f", most by {most.replace('_', ' ')}" if most else "")
    + ".",
    f"/rollouts?end={most}" if most else "/rollouts?error=broken",
  )


def _share(
  name: str, limit: float, text: str, path: str | None = None
) -> Callable[[curves_lib.Columns], Row | None]:
  """Returns a rule that warns of a metric above `limit`.

  Args:
    name: Name of the metric.
    limit: Largest value without a warning.
    text: Sentence with `{share}` or `{percent}` for the value.
    path: Page about it, see `lines`.
  """

  def rule(columns: curves_lib.Columns) -> Row | None:
    share = columns.recent(name)
    if share is None or share <= limit:
      return None
    return _line(
      "warning",
      text.format(share=f"{share:.2g}", percent=_percent(share)),
      path,
    )

  return rule


def _count(name: str, text: str) -> Callable[[curves_lib.Columns], Row | None]:
  """Returns a rule that warns of a counter that rose in the last steps.

  Args:
    name: Name of the metric.
    text: Sentence with `{count}` for the rise and `{steps}` for the steps.
  """

  def rule(columns: curves_lib.Columns) -> Row | None:
    counts = columns.values.get(name, np.zeros(0))
    counts = counts[np.isfinite(counts)][-success_rates.RECENT_STEPS :]
    if len(counts) < 2 or (rise := counts[-1] - counts[0]) <= 0:
      return None
    return _line(
      "warning", text.format(count=f"{rise:.0f}", steps=len(counts)), "/health"
    )

  return rule


_RULES: tuple[Callable[[curves_lib.Columns], Row | None], ...] = (
    _gradients, _weakest, _entropy,
    _share(
        "truncated_turns", TRUNCATED, "{share} completions an episode are cut"
        " off: raise sampling.max_new_tokens.",
    ),
    _share(
        "status/context_limit", CONTEXT, "{percent} of the episodes end at the"
        " context's limit: raise engine.context_length or lower"
        " agent.max_images.", "/rollouts?end=context_limit",
    ),
    _share(
        "status/max_turns", WANDERING, "{percent} of the episodes run out of"
        " turns: raise environment.max_turns, or see where they wander.",
        "/rollouts?end=max_turns",
    ),
    _count(
        "dropped_stale", "{count} groups were dropped for their age in the last"
        " {steps} steps: lower collect.concurrency, or raise"
        " queue.max_staleness.",
    ),
    _broken,
    _share(
        "clip_fraction", CLIPPED, "The clip removes the gradient of {percent}"
        " of the tokens: lower learner.learning_rate or learner.epochs.",
    ),
    _count(
        "skipped_steps", "{count} of the last {steps} steps were skipped for a"
        " gradient that is not finite: the run has diverged. Resume an earlier"
        " checkpoint with a lower learner.learning_rate.",
    ),
)  # fmt: skip
