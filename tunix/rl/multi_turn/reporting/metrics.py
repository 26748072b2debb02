"""Defines the metrics of a learner step: unit, meaning, advice.

`METRICS` documents every name that may stand in metrics.jsonl (docs/metrics.md
is written from it); `group_metrics` and `engine_metrics` make the readings
that come from episodes and from the rollout engine. The learner makes its own.

Does not read the clock or write files. Numpy only.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Iterable, Mapping

import numpy as np
from tunix.rl.multi_turn.core import trajectory as trajectory_lib


@dataclasses.dataclass(frozen=True)
class Metric:
  """One reading.

  Attributes:
    unit: "" for a plain ratio or a mean without unit.
    meaning: the measured quantity.
    advice: the action to take.
  """

  unit: str
  meaning: str
  advice: str = ""


_STATUS_ADVICE = {
    "max_turns": "High: raise environment.max_turns, or the policy wanders.",
    "context_limit": (
        "Above a few percent: raise engine.context_length or lower"
        " agent.max_images."
    ),
    "parse_error": (
        "Should fall early. If it rises again the policy is breaking:"
        " lower learner.learning_rate or add algorithm.kl_coef."
    ),
    "timeout": "See collect.deadlines; not trained on.",
    "env_error": "A gym fails; see the faults in summary.json.",
    "model_error": "The engine fails; see the faults in summary.json.",
}

METRICS: dict[str, Metric] = {
    # The loop.
    "step": Metric("updates", "Updates made so far, this one included."),
    "version": Metric("", "Version of the weights after this update."),
    "time": Metric("s", "When the update ended, since the epoch."),
    "seconds_total": Metric(
        "s",
        "The whole step: waiting, learning, publishing.",
        "Compare with seconds_wait and seconds_learn to find the bottleneck.",
    ),
    "seconds_wait": Metric(
        "s",
        "The learner waited for groups.",
        "Most of seconds_total: collecting is the bottleneck; raise"
        " collect.concurrency, or queue.max_staleness to overlap.",
    ),
    "seconds_publish": Metric(
        "s", "Handing the weights to the engine, reshard included."
    ),
    # Episodes.
    "reward_mean": Metric(
        "reward",
        "Mean over the valid episodes of this update.",
        "The curve that should rise. Flat from the start: see"
        " informative_groups.",
    ),
    "reward_std": Metric("reward", "Standard deviation of the same."),
    "success_rate": Metric(
        "",
        "Share of valid episodes that the gym judged solved.",
        "Noisy with few episodes: judge by the evaluation.",
    ),
    "informative_groups": Metric(
        "",
        "Share of groups with a gradient: their members got different"
        " rewards.",
        "Near 0 with low reward: tasks too hard, warm-start longer. Near 0"
        " with high reward: solved, raise gym.options.difficulty.",
    ),
    "groups": Metric("groups", "Groups of this update."),
    "zero_advantage_groups": Metric(
        "groups", "Groups of this update without a gradient."
    ),
    "replaced_groups": Metric(
        "groups",
        "Groups of equal rewards that others replaced, with"
        " learner.dynamic_sampling.",
        "Many: tasks are too hard or solved; the time is spent on them.",
    ),
    "borrowed_episodes": Metric(
        "episodes", "Successes lent to groups, with learner.success_replay."
    ),
    "episodes": Metric(
        "episodes", "Episodes of this update, invalid ones included."
    ),
    "valid_episodes": Metric(
        "episodes", "Episodes of this update that may be trained on."
    ),
    "invalid_episodes": Metric(
        "",
        "Share of this update's episodes ended by infrastructure; left out of"
        " all other statistics and of training.",
        "Above 0.05: look at the faults in summary.json.",
    ),
    "refused_rewards": Metric(
        "episodes",
        "Episodes of this update, invalid for a reward that is no number, not"
        " finite or larger than collect.max_reward.",
        "Above 0: mend or scale the reward; see the faults RewardError in"
        " summary.json.",
    ),
    "refused_groups": Metric(
        "groups",
        "Groups collected since the last step with fewer valid episodes than"
        " collect.min_valid; their tasks are re-queued or given up.",
        "Above 0: look at the faults in summary.json.",
    ),
    "turns_mean": Metric("turns", "Mean turns of a valid episode."),
    "episode_tokens_mean": Metric(
        "tokens", "Mean sampled tokens of a valid episode."
    ),
    "episode_seconds_mean": Metric("s", "Mean wall time of an episode."),
    "episode_seconds_max": Metric(
        "s",
        "The slowest episode.",
        "Far above the mean: stragglers; lower environment.max_turns or use"
        " queue.max_staleness.",
    ),
    "model_share": Metric(
        "",
        "Share of episodes' time spent waiting for the policy.",
        "Low: gyms are the bottleneck; raise collect.concurrency.",
    ),
    "env_share": Metric(
        "",
        "Share of episodes' time spent in the environment: steps, reset,"
        " reward and closing.",
        "High: gyms are the bottleneck; raise collect.concurrency.",
    ),
    "turn_seconds_model": Metric(
        "s",
        "Mean seconds of a turn waiting for the policy: rendering, the"
        " engine's queue and sampling.",
        "Most of a turn: a larger engine.slots, or fewer"
        " sampling.max_new_tokens.",
    ),
    "turn_seconds_env": Metric(
        "s", "Mean seconds of a turn in the environment's step."
    ),
    "turn_seconds_other": Metric(
        "s",
        "Mean seconds of a turn in neither: parsing, bookkeeping, waiting for"
        " the event loop. An episode's setup is not in it.",
        "Not small against the other two: the host is too busy; lower"
        " collect.concurrency.",
    ),
    "episode_seconds_setup": Metric(
        "s",
        "Mean seconds of an episode in reset, reward and closing.",
        "Most of an episode: reuse what the gym starts.",
    ),
    "episodes_busy": Metric(
        "episodes",
        "Seconds that environments and the policy worked for training"
        " episodes, summed over the episodes, a second of wall time since the"
        " last step: the mean number of episodes in flight.",
        "Far below collect.concurrency: episodes wait for admission; raise"
        " queue.max_staleness.",
    ),
    "overlap": Metric(
        "",
        "Share of wall time since the last step in which at least one"
        " environment and the policy worked at once.",
        "Near 0 with slow gyms: raise collect.concurrency.",
    ),
    "truncated_turns": Metric(
        "turns",
        "Completions cut at sampling.max_new_tokens, mean an episode.",
        "Above 0.05: raise sampling.max_new_tokens.",
    ),
    "fallback_turns": Metric(
        "turns",
        "Completions whose tokens or log-probs are not the sampler's own, as"
        " its server did not return them, mean an episode.",
        "Above 0: the server must return token ids and log-probs; see"
        " docs/serving.md.",
    ),
    "history_rewrites": Metric(
        "",
        "New training sequences begun because old screenshots were dropped,"
        " mean an episode.",
        "Each costs a prefill; raise agent.max_images.",
    ),
    # The rollout engine.
    "rollout_tokens_per_second": Metric(
        "tokens/s", "Sampled tokens a second of wall time since the last step."
    ),
    "prefill_tokens_per_second": Metric(
        "tokens/s", "Prompt tokens computed a second of wall time."
    ),
    "prefix_reuse": Metric(
        "",
        "Share of prompt tokens whose KV cache was kept from earlier turns.",
        "Low with several turns: sessions lose their pages; raise"
        " engine.cache_tokens.",
    ),
    "batch_occupancy": Metric(
        "",
        "Share of computed decode places that were real tokens.",
        "Low: raise collect.concurrency or lower engine.slots.",
    ),
    "engine_busy": Metric(
        "", "Share of wall time the engine was not idle."
    ),
    "lockstep_timeouts": Metric(
        "",
        "Batches that did not wait for every episode, since the last step.",
        "Above 0: the run is not repeatable; a gym is very slow.",
    ),
    "engine_compiles": Metric(
        "",
        "Programs compiled since warm-up, by this process.",
        "Must stay 0: above it, the engine met an unplanned shape.",
    ),
    # The queue.
    "queue_size": Metric("groups", "Groups waiting for the learner."),
    "dropped_stale": Metric(
        "groups",
        "Groups dropped for their age by this process; a resumed run counts"
        " anew.",
        "Growing: wasted work; lower collect.concurrency.",
    ),
    "staleness_mean": Metric(
        "versions", "Mean lag of sampled tokens behind the learner."
    ),
    "staleness_max": Metric(
        "versions", "Largest such lag; never above queue.max_staleness."
    ),
    # The learner.
    "loss": Metric(
        "",
        "The objective with all its terms.",
        "Its size means little in policy gradient; watch the ratios.",
    ),
    "policy_loss": Metric("", "The objective without KL and entropy terms."),
    "grad_norm": Metric(
        "",
        "Global norm before clipping.",
        "Spikes: lower learner.learning_rate. Always above"
        " learner.grad_clip: every step is clipped.",
    ),
    "learning_rate": Metric("", "Of this update's last optimizer step."),
    "entropy": Metric(
        "nats",
        "Mean entropy of the sampled positions.",
        "Falling to 0 before success: raise algorithm.clip_high or"
        " algorithm.entropy_coef.",
    ),
    "top_token": Metric(
        "",
        "Share of the trained tokens that were the likeliest of their place.",
    ),
    "logprob": Metric("nats", "Mean log-prob of the sampled tokens now."),
    "ratio_mean": Metric(
        "",
        "Mean ratio of the learner's probability to the sampler's.",
        "Far from 1 at staleness 0 with one optimizer step an update"
        " (learner.minibatches and learner.epochs 1): engine and learner"
        " disagree.",
    ),
    "ratio_max": Metric("", "Largest ratio."),
    "ratio_min": Metric("", "Smallest ratio."),
    "sampler_kl": Metric(
        "nats",
        "KL of the sampler from the learner, estimator k3.",
        "Above 0.01 at staleness 0 with one optimizer step an update: numeric"
        " mismatch; use float32.",
    ),
    "logprob_gap_max": Metric(
        "nats",
        "Largest difference of learner's and sampler's log-prob of a token.",
        "Above 1e-3 at staleness 0 in float32 with one optimizer step an"
        " update is an error of the program. Later steps of an update move"
        " away from the sampler as they should.",
    ),
    "importance_weight": Metric(
        "", "Mean weight of algorithm.importance; 1 without a correction."
    ),
    "kl_coef": Metric(
        "", "Coefficient of this update's KL, with algorithm.kl_target."
    ),
    "overlong_price": Metric(
        "reward",
        "Mean reward that an episode lost for its length, with"
        " algorithm.overlong_tokens.",
    ),
    "kl": Metric(
        "nats",
        "KL from the reference policy, with algorithm.kl_coef > 0.",
        "Growing fast: raise kl_coef.",
    ),
    "clip_fraction": Metric(
        "",
        "Share of tokens whose gradient the clip removed.",
        "Above 0.2: updates are too large; lower the learning rate, or"
        " learner.epochs.",
    ),
    "clip_fraction_low": Metric("", "The part below 1 - clip_low."),
    "clip_fraction_high": Metric("", "The part above 1 + clip_high."),
    "clip_fraction_dual": Metric(
        "", "Share of tokens whose loss algorithm.dual_clip bounds."
    ),
    "held_fraction": Metric(
        "", "Share of tokens that objective=clip_cov or kl_cov holds back."
    ),
    "teacher_kl": Metric(
        "nats", "Log-prob now less the teacher's, with algorithm.teacher."
    ),
    "value_loss": Metric("", "Of the value head (advantage=gae)."),
    "value_clip_fraction": Metric("", "Share of tokens whose value it clips."),
    "value_mean": Metric("reward", "Mean value at the update's start."),
    "value_target_mean": Metric("reward", "Mean of what it is trained on."),
    "explained_variance": Metric(
        "",
        "Share of the targets' variance that the values explain.",
        "At 0 or below for long: raise algorithm.value_learning_rate.",
    ),
    "advantage_mean": Metric("", "Mean over sampled tokens."),
    "advantage_std": Metric("", "Standard deviation over sampled tokens."),
    "advantage_abs_max": Metric("", "Largest magnitude."),
    "completion_tokens": Metric(
        "tokens", "Sampled tokens of all valid episodes of this update."
    ),
    "sampled_tokens": Metric("tokens", "Sampled tokens trained on."),
    "tokens": Metric("tokens", "Tokens of the sequences trained on."),
    "sequences": Metric("", "Token sequences trained on."),
    "micro_batches": Metric("", "Compiled batches accumulated."),
    "packing_efficiency": Metric(
        "",
        "Share of the rows' places that hold tokens.",
        "Low: lower learner.rows, or set learner.row_length to a multiple of"
        " a typical sequence.",
    ),
    "patch_efficiency": Metric(
        "", "Share of the patch buffers that holds pixels."
    ),
    "shared_tokens": Metric(
        "tokens", "Prompt tokens stored once for several sequences."
    ),
    "optimizer_steps": Metric("", "Optimizer steps so far."),
    "skipped_steps": Metric(
        "",
        "Optimizer steps skipped for a non-finite gradient, in all.",
        "Growing: the run has diverged.",
    ),
    "empty_updates": Metric(
        "", "Updates without a group with a gradient, in all."
    ),
    "dropped_sequences": Metric(
        "",
        "Sequences longer than a row, left out, in all.",
        "Above 0: raise learner.row_length.",
    ),
    "compiles": Metric(
        "",
        "Programs the learner compiled in this process.",
        "Growing after the first updates: shapes vary.",
    ),
    "learner_tokens_per_second": Metric(
        "tokens/s", "Sequence tokens through the update, by its wall time."
    ),
    "seconds_learn": Metric("s", "The whole update."),
    "seconds_pack": Metric("s", "Of it: advantages, patches, packing."),
    "seconds_score": Metric("s", "Of it: log-probs before the update."),
    "seconds_step": Metric("s", "Of it: gradients and optimizer."),
}
for _status in trajectory_lib.TrajectoryStatus:
  if _status is not trajectory_lib.TrajectoryStatus.RUNNING:
    METRICS[f"status/{_status.value}"] = Metric(
        "",
        f"Share of episodes that ended as {_status.value}.",
        _STATUS_ADVICE.get(_status.value, ""),
    )
PATTERNS: dict[str, Metric] = {
    "success_rate/": Metric(
        "", "success_rate of one task family, `success_rate/<family>`."
    ),
    "reward_part/": Metric(
        "reward",
        "Mean of one part of a weighted environment.reward, before its weight,"
        " `reward_part/<name>`.",
        "One part rises while success_rate does not: the policy found a way to"
        " that part alone; change the weights.",
    ),
}
"""Prefixes of names that depend on the task or the reward."""


def is_documented(name: str) -> bool:
  return name in METRICS or any(name.startswith(p) for p in PATTERNS)


def family_of(trajectory: trajectory_lib.Trajectory) -> str:
  """The task family of an episode, "" when its task has none."""
  task = trajectory.task
  if isinstance(task, Mapping):
    return str(task.get("family", ""))
  return str(getattr(task, "family", ""))


def group_metrics(
    groups: Iterable[trajectory_lib.TrajectoryGroup],
) -> dict[str, float]:
  """Readings of the episodes that an update learns from.

  Means over valid episodes are left out when there is none, so that a gap in
  a curve is a gap and not a 0.
  """
  groups = list(groups)
  episodes = [t for g in groups for t in g]
  valid = [t for t in episodes if t.status.is_policy_outcome]
  total = len(episodes)
  statuses = collections.Counter(t.status.value for t in episodes)
  out: dict[str, float] = {"groups": len(groups), "episodes": total}
  if not total:
    return out
  out["invalid_episodes"] = (total - len(valid)) / total
  for name, count in sorted(statuses.items()):
    out[f"status/{name}"] = count / total
  spread = [
      len({t.reward for t in g if t.status.is_policy_outcome}) > 1
      for g in groups
  ]
  out["informative_groups"] = sum(spread) / len(spread)
  out["refused_rewards"] = sum(
      t.metrics.get("refused_rewards", 0) for t in episodes
  )
  seconds = _each(episodes, "seconds")
  if seconds:
    out["episode_seconds_mean"] = float(np.mean(seconds))
    out["episode_seconds_max"] = max(seconds)
    out |= _stage_metrics(episodes)
  if not valid:
    return out
  rewards = np.array([t.reward for t in valid], np.float64)
  out["reward_mean"] = float(rewards.mean())
  out["reward_std"] = float(rewards.std())
  for name, values in sorted(_reward_parts(valid).items()):
    out[f"reward_part/{name}"] = float(np.mean(values))
  solved = collections.defaultdict(list)
  for t in valid:
    solved[family_of(t)].append(
        t.status is trajectory_lib.TrajectoryStatus.SUCCEEDED
    )
  out["success_rate"] = sum(map(sum, solved.values())) / len(valid)
  for family, wins in sorted(solved.items()):
    if family:
      out[f"success_rate/{family}"] = sum(wins) / len(wins)
  out["turns_mean"] = sum(t.num_turns for t in valid) / len(valid)
  out["episode_tokens_mean"] = sum(t.num_sampled for t in valid) / len(valid)
  for name in ("truncated_turns", "fallback_turns", "history_rewrites"):
    out[name] = sum(t.metrics.get(name, 0.0) for t in valid) / len(valid)
  return out


def _reward_parts(
    episodes: Iterable[trajectory_lib.Trajectory],
) -> dict[str, list[float]]:
  """Values of each part of a weighted reward, by its name."""
  found: dict[str, list[float]] = collections.defaultdict(list)
  for episode in episodes:
    info = episode.steps[-1].info if episode.steps else {}
    parts = {}
    for key in ("reward_metadata", "final_reward"):
      of_key = info.get(key)
      if isinstance(of_key, Mapping):
        of_parts = of_key.get("parts")
        parts |= of_parts if isinstance(of_parts, Mapping) else of_key
    for name, part in parts.items():
      if isinstance(part, Mapping) and isinstance(
          part.get("reward"), (int, float)
      ):
        found[name].append(float(part["reward"]))
  return found


def _stage_metrics(
    episodes: Iterable[trajectory_lib.Trajectory],
) -> dict[str, float]:
  """Shares and seconds of the stages of episodes that recorded their time.

  Readings of the environment are left out when no episode recorded it: outside
  agents do not.
  """
  known = [t for t in episodes if "seconds" in t.metrics]
  total, model, env, setup = (
      sum(_each(known, name))
      for name in ("seconds", "seconds_model", "seconds_env", "seconds_setup")
  )
  out = {"model_share": model / max(total, 1e-9)}
  if not any("seconds_setup" in t.metrics for t in known):
    return out
  out["env_share"] = (env + setup) / max(total, 1e-9)
  out["episode_seconds_setup"] = setup / len(known)
  turns = sum(t.num_turns for t in known)
  if turns:
    out["turn_seconds_model"] = model / turns
    out["turn_seconds_env"] = env / turns
    out["turn_seconds_other"] = (
        max(0.0, total - model - env - setup) / turns
    )
  return out


def _each(
    episodes: Iterable[trajectory_lib.Trajectory], name: str
) -> list[float]:
  return [float(t.metrics[name]) for t in episodes if name in t.metrics]


def engine_metrics(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
  """Readings of the rollout engine between two of its `stats()`.

  Args:
    before: `stats()` at the previous step, {} at the first.
    after: `stats()` now.
    seconds: wall time between the two.
  """
  seconds = max(seconds, 1e-9)

  def grown(name: str) -> float:
    return float(after.get(name, 0.0)) - float(before.get(name, 0.0))

  prompt, computed = grown("prompt_tokens"), grown("prefilled_tokens")
  out = {
      "rollout_tokens_per_second": grown("decode_tokens") / seconds,
      "prefill_tokens_per_second": computed / seconds,
      "engine_busy": min(
          1.0, max(0.0, 1.0 - grown("seconds_idle") / seconds)
      ),
      "lockstep_timeouts": grown("lockstep_timeouts"),
      "engine_compiles": float(after.get("compiles_after_warm_up", 0.0)),
  }
  if prompt > 0:
    out["prefix_reuse"] = max(0.0, 1.0 - computed / prompt)
  if grown("decode_places") > 0:
    out["batch_occupancy"] = grown("decode_tokens") / grown("decode_places")
  return out


def reference() -> str:
  """docs/metrics.md."""
  lines = [
      "# Metrics",
      "",
      "Written by `python -m tunix.rl.multi_turn.reporting.metrics >"
      " docs/metrics.md`.",
      "",
      "`runs/<name>/metrics.jsonl` holds one JSON object a learner step, each",
      "line complete as soon as it is written. A reading without a value at a",
      "step (no valid episode, nothing to learn from, no reference policy) is",
      'absent; a non-finite one is null. "In all" means counted since the run',
      "began; all other readings are of this step alone.",
      "",
      "| name | unit | meaning | action |",
      "|---|---|---|---|",
  ]
  rows: list[tuple[str, Metric]] = list(METRICS.items())
  rows += [(f"{prefix}…", m) for prefix, m in PATTERNS.items()]
  for name, m in rows:
    lines.append(f"| `{name}` | {m.unit} | {m.meaning} | {m.advice} |")
  return "\n".join(lines) + "\n"


def undocumented(metrics: Mapping[str, Any]) -> list[str]:
  """Names in `metrics` that the reference does not explain."""
  return sorted(name for name in metrics if not is_documented(name))


if __name__ == "__main__":
  print(reference(), end="")
