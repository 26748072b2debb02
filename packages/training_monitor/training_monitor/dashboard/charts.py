"""Lists a run's charts by section: their keys, titles and metrics."""

from __future__ import annotations

from typing import Any, Callable

_SECTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "learning": (
        {"key": "reward", "title": "Reward", "names": ("reward_mean",)},
        {"key": "success", "title": "Success", "names": ("success_rate",),
         "evals": True, "unit": "share"},
        {"key": "tasks", "title": "Success by task",
         "names": ("success_rate/",), "unit": "share"},
        {"key": "groups", "title": "Groups with a gradient",
         "names": ("informative_groups",), "unit": "share"},
        {"key": "turns", "title": "Turns of an episode",
         "names": ("turns_mean",)},
        {"key": "episode_tokens", "title": "Tokens of an episode",
         "names": ("episode_tokens_mean",)},
        {"key": "ends", "title": "Episode outcomes", "names": ("status/",),
         "unit": "share"},
    ),
    "stability": (
        {"key": "loss", "title": "Loss", "names": ("loss", "policy_loss")},
        {"key": "kl", "title": "KL", "names": ("kl", "sampler_kl")},
        {"key": "entropy", "title": "Entropy", "names": ("entropy",)},
        {"key": "clip", "title": "Clip fraction",
         "names": ("clip_fraction", "clip_fraction_low", "clip_fraction_high")},
        {"key": "grad", "title": "Gradient norm", "names": ("grad_norm",)},
        {"key": "staleness", "title": "Staleness",
         "names": ("staleness_mean", "staleness_max")},
        {"key": "queue", "title": "Groups waiting",
         "names": ("queue_size", "dropped_stale")},
    ),
    "throughput": (
        {"key": "tokens", "title": "Tokens per second",
         "names": ("rollout_tokens_per_second", "learner_tokens_per_second")},
        {"key": "calls", "title": "Model calls per second",
         "names": ("rollout_calls_per_second",)},
        {"key": "share", "title": "Model, environment, idle",
         "names": ("model_share", "env_share", "engine_idle", "overlap"),
         "unit": "share"},
        {"key": "turn_seconds", "title": "Turn time",
         "names": ("turn_seconds_model", "turn_seconds_env",
                   "turn_seconds_other")},
        {"key": "busy", "title": "Episodes in flight",
         "names": ("episodes_busy",)},
        {"key": "seconds", "title": "Step time",
         "names": ("time/wait", "time/learn", "time/publish", "time/save",
                   "time/evaluate", "time/report", "time/other")},
        {"key": "engine_time", "title": "Engine's time",
         "names": ("time/engine_idle", "time/engine_prefill",
                   "time/engine_decode", "time/engine_vision",
                   "time/engine_host")},
        {"key": "rollout_time", "title": "Rollout's time",
         "names": ("time/rollout_model", "time/rollout_env",
                   "time/rollout_both", "time/rollout_none")},
    ),
}  # fmt: skip
CHARTS: tuple[dict[str, Any], ...] = tuple(
  {**chart, "section": section}
  for section, charts in _SECTIONS.items()
  for chart in charts
)
"""Charts of a run, in order; docs/metrics.md explains the readings."""


def measured(has: Callable[[str], bool]) -> list[dict[str, Any]]:
  """Returns the charts that have a reading, with the names to show.

  Args:
    has: Returns whether a run has readings of a metric.
  """
  return [chart for chart in CHARTS if any(map(has, chart["names"]))]
