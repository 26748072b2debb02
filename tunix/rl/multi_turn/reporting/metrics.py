"""Defines the metrics of a learner step: unit, meaning, advice.

`METRICS` documents every name that may stand in metrics.jsonl (docs/metrics.md
is written from it); `group_metrics` and `engine_metrics` make the readings
that come from episodes and from the rollout engine. The learner makes its own.

A run of several processes has one value of each: `over_processes` makes it, by
the rule that the metric declares.

Does not read the clock or write files.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, Iterable, Literal, Mapping, Sequence

from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import episode_tally
from tunix.rl.multi_turn.reporting import time_metrics


@dataclasses.dataclass(frozen=True)
class Metric:
  """One reading.

  Attributes:
    unit: "" for a plain ratio or a mean without unit.
    meaning: the measured quantity.
    advice: the action to take.
    processes: rule for a run of several. pooled: computed from the episodes,
      tokens or counters of all, as if there were one process.
  """

  unit: str
  meaning: str
  advice: str = ""
  processes: Literal["pooled", "sum", "mean", "max"] = "pooled"


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
    processes="max",
  ),
  "seconds_wait": Metric(
    "s",
    "The learner waited for groups.",
    "Most of seconds_total: collecting is the bottleneck; raise"
    " collect.concurrency, or queue.max_staleness to overlap.",
    processes="max",
  ),
  "seconds_publish": Metric(
    "s", "Handing the weights to the engine, reshard included.", processes="max"
  ),
  # Where the time went.
  **{
    name: Metric("s", texts[0], "".join(texts[1:]), "mean")
    for name, texts in time_metrics.TIME.items()
  },
  # Episodes.
  "reward_mean": Metric(
    "reward",
    "Mean over the valid episodes of this update.",
    "The curve that should rise. Flat from the start: see informative_groups.",
  ),
  "reward_std": Metric("reward", "Standard deviation of the same."),
  "success_rate": Metric(
    "",
    "Share of valid episodes that the gym judged solved.",
    "Noisy with few episodes: judge by the evaluation.",
  ),
  "informative_groups": Metric(
    "",
    "Share of groups whose members got different rewards: those with a"
    " gradient, unless algorithm.advantage=gdpo finds one in the parts.",
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
    processes="sum",
  ),
  "dealt_groups": Metric(
    "groups",
    "Groups that a process did not have in time (processes.share_s), and"
    " others gave.",
    "Often above 0: that host's gyms are slow or stuck; see its log.",
    processes="sum",
  ),
  "expert_episodes": Metric(
    "episodes",
    "Successes of the gym's oracle beside groups that failed, with"
    " collect.expert_share.",
    "Falls as tasks are solved; else they are beyond the policy.",
    processes="sum",
  ),
  "borrowed_episodes": Metric(
    "episodes",
    "Successes lent to groups, with learner.success_replay.",
    processes="sum",
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
    processes="sum",
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
    "Most of a turn: with engine_busy near 1 a larger engine.slots, or"
    " fewer sampling.max_new_tokens; else a larger collect.concurrency.",
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
    processes="sum",
  ),
  "overlap": Metric(
    "",
    "Share of wall time since the last step in which at least one"
    " environment and the policy worked at once.",
    "Near 0 with slow gyms: raise collect.concurrency.",
    processes="mean",
  ),
  "truncated_turns": Metric(
    "turns",
    "Completions cut at sampling.max_new_tokens (summaries: at"
    " agent.summary_tokens), mean an episode.",
    "Above 0.05: raise it.",
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
    "New training sequences begun because old screenshots were dropped, or"
    " a summary took the place of turns, mean an episode.",
    "Each costs a prefill; raise agent.max_images or agent.summary_at.",
  ),
  "summary_turns": Metric(
    "turns",
    "Turns in which the policy wrote a summary (agent.history=summary),"
    " mean an episode.",
    "Near 0: no episode needs one; near the other turns' number: raise"
    " agent.summary_at.",
  ),
  "untrained_tokens": Metric(
    "tokens",
    "Sampled tokens that are not trained on, as they are of another"
    " distribution than the run's (an agent's or a generator's temperature,"
    " a grammar), mean an episode.",
    "Above 0: let the agent leave these fields out; the log names them, see"
    " rollout.other_sampling.",
  ),
  # The rollout engine.
  "rollout_tokens_per_second": Metric(
    "tokens/s", "Sampled tokens a second of wall time since the last step."
  ),
  "rollout_calls_per_second": Metric(
    "calls/s",
    "Completions a second of wall time since the last step; a tool call of"
    " the built-in policy is some six tokens.",
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
  "prefill_per_unique_token": Metric(
    "",
    "Prompt tokens computed, for each that no earlier prompt of the same"
    " weights began with; sampled tokens need no computing again.",
    "Above 1.05: sessions lose their pages (raise engine.cache_tokens), or"
    " engine.share_prefixes is false.",
  ),
  "recomputed_tokens": Metric(
    "tokens",
    "Prompt tokens computed again because new weights made their keys and"
    " values old.",
    "A large part of prefill: updates come faster than turns; a larger"
    " learner.groups_per_step makes fewer of them.",
  ),
  "mixed_kv_tokens": Metric(
    "tokens",
    "Tokens sampled by new weights that read keys and values of older"
    " ones: the rest of completions that an update found running.",
    "Above 0 sampler_kl is not 0 on policy either; engine.on_update="
    "recompute makes it exact.",
  ),
  "batch_occupancy": Metric(
    "",
    "Share of computed decode places that were real tokens.",
    "Low: raise collect.concurrency or lower engine.slots.",
  ),
  "draft_acceptance": Metric(
    "",
    "Share of drafted tokens that were right, with engine.drafts.",
    "Low: text that does not repeat; lower engine.draft_tokens.",
  ),
  "engine_busy": Metric("", "Share of wall time the engine was not idle."),
  "lockstep_timeouts": Metric(
    "",
    "Batches that did not wait for every episode, since the last step.",
    "Above 0: the run is not repeatable; a gym is very slow.",
  ),
  "engine_compiles": Metric(
    "",
    "Programs that engines compiled since warm-up; a resumed run counts anew.",
    "Must stay 0: above it, the engine met an unplanned shape.",
  ),
  # The queue.
  "queue_size": Metric(
    "groups", "Groups waiting for the learner.", processes="sum"
  ),
  "dropped_stale": Metric(
    "groups",
    "Groups dropped for their age; a resumed run counts anew.",
    "Growing: wasted work; lower collect.concurrency.",
    processes="sum",
  ),
  "stale_token_share": Metric(
    "",
    "Share of the valid episodes' sampled tokens that left the loss for"
    " their age, with queue.stale_policy=trim.",
    "High: raise queue.max_staleness, lower collect.part_size, or let the"
    " learner take more groups an update.",
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
    "", "Share of the trained tokens that were the likeliest of their place."
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
    "tokens",
    "Tokens that learner.tree did not compute again: of prefixes that"
    " several sequences share.",
  ),
  "optimizer_steps": Metric("", "Optimizer steps so far."),
  "skipped_steps": Metric(
    "",
    "Optimizer steps skipped for a non-finite gradient, in all.",
    "Growing: the run has diverged.",
  ),
  "empty_updates": Metric(
    "",
    "Updates in which no token had weight, in all: nothing moved, neither"
    " weights nor the optimizer's state.",
    "Growing: see zero_advantage_groups, and importance_weight for tokens"
    " that algorithm.importance or algorithm.veto left out.",
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
  **{
    f"{name}_by_{by}/": Metric(unit, f"{meaning} {place}.", advice)
    for by, place in (
      ("turn", "of one group of turns, `…/03-04` the third and fourth"),
      (
        "images",
        "with one group of numbers of screenshots before them in"
        " the context, `…/05-08` five to eight",
      ),
    )
    for name, unit, meaning, advice in (
      (
        "success",
        "",
        "Share of episodes solved among those with turns",
        "Falls with the turn: long episodes fail; raise the context, or"
        " turn-level credit (algorithm=gigpo).",
      ),
      (
        "turn_tokens",
        "tokens",
        "Mean sampled tokens of turns",
        "Grows with the turn: the policy repeats itself late.",
      ),
      (
        "sampler_kl",
        "nats",
        "sampler_kl of tokens",
        "Far above the first group's: engine and learner see other"
        " positions or images late in an episode.",
      ),
      (
        "entropy",
        "nats",
        "entropy of tokens",
        "Near 0 at late turns alone: those turns no longer explore.",
      ),
    )
  },
  "reward_part/": Metric(
    "reward",
    "Mean of one part of a weighted environment.reward, before its weight,"
    " `reward_part/<name>`.",
    "One part rises while success_rate does not: the policy found a way to"
    " that part alone; change the weights.",
  ),
}
"""Prefixes of names that depend on the task or the reward."""


_SECTIONS = {
  "step": "The loop",
  "time/step": "Where the time goes",
  "reward_mean": "Episodes",
  "rollout_tokens_per_second": "The rollout engine",
  "queue_size": "The queue",
  "loss": "The learner",
  "status/succeeded": "How episodes end",
  "success_rate/…": "By family, turn, images and part",
}
"""First reading of a section of the reference -> its heading."""
_HEAD = ("| name | unit | meaning | action |", "|---|---|---|---|")


def is_documented(name: str) -> bool:
  return name in METRICS or any(name.startswith(p) for p in PATTERNS)


def group_metrics(
  groups: Iterable[trajectory_lib.TrajectoryGroup],
) -> dict[str, float]:
  """Readings of the episodes that an update learns from.

  Means over valid episodes are left out when there is none, so that a gap in
  a curve is a gap and not a 0.
  """
  return episode_tally.readings(episode_tally.of_groups(groups))


def engine_metrics(
  before: Mapping[str, float],
  after: Mapping[str, float],
  seconds: float,
  engines: int = 1,
) -> dict[str, float]:
  """Readings of the rollout engine between two of its `stats()`.

  Args:
    before: `stats()` at the previous step, {} at the first.
    after: `stats()` now.
    seconds: wall time between the two.
    engines: Number of engines whose counters were added up.
  """
  seconds = max(seconds, 1e-9)

  def grown(name: str) -> float:
    return float(after.get(name, 0.0)) - float(before.get(name, 0.0))

  prompt, computed = grown("prompt_tokens"), grown("prefilled_tokens")
  out = {
    "rollout_tokens_per_second": grown("decode_tokens") / seconds,
    "rollout_calls_per_second": grown("completed") / seconds,
    "prefill_tokens_per_second": computed / seconds,
    "engine_busy": min(
      1.0, max(0.0, 1.0 - grown("seconds_idle") / (engines * seconds))
    ),
    "lockstep_timeouts": grown("lockstep_timeouts"),
    "engine_compiles": float(after.get("compiles_after_warm_up", 0.0)),
  }
  if "seconds_idle" in after:
    for part in time_metrics.ENGINE:
      out[f"time/engine_{part}"] = grown(f"seconds_{part}") / engines
  if "mixed_tokens" in after:
    out["recomputed_tokens"] = grown("recomputed_tokens")
    out["mixed_kv_tokens"] = grown("mixed_tokens")
  if prompt > 0:
    out["prefix_reuse"] = max(0.0, 1.0 - computed / prompt)
  if grown("unique_prompt_tokens") > 0:
    out["prefill_per_unique_token"] = computed / grown("unique_prompt_tokens")
  if grown("decode_places") > 0:
    steps = grown("decode_tokens") - grown("accepted_tokens")
    out["batch_occupancy"] = steps / grown("decode_places")
  if grown("drafted_tokens") > 0:
    out["draft_acceptance"] = grown("accepted_tokens") / grown("drafted_tokens")
  return out


def over_processes(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """The run's value of each reading, from each process's.

  Args:
    readings: Readings of each process; a pooled metric has one value in all.
  """
  names = dict.fromkeys(name for one in readings for name in one)
  out = {}
  for name in names:
    values = [one[name] for one in readings if name in one]
    match METRICS[name].processes if name in METRICS else "pooled":
      case "sum":
        out[name] = sum(values)
      case "mean":
        out[name] = sum(values) / len(values)
      case "max":
        out[name] = max(values)
      case _:
        out[name] = values[0]
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
    "began; all other readings are of this step alone. Where several",
    "processes make the run, a reading is of all of them: computed from all",
    "their episodes, tokens and counters, or their sum, mean or maximum",
    "where its meaning ends so.",
  ]
  rows: list[tuple[str, Metric]] = list(METRICS.items())
  rows += [(f"{prefix}…", m) for prefix, m in PATTERNS.items()]
  for name, m in rows:
    if name in _SECTIONS:
      lines += ["", f"## {_SECTIONS[name]}", "", *_HEAD]
    meaning = m.meaning
    if m.processes != "pooled":
      meaning += f" Processes: {m.processes}."
    lines.append(f"| `{name}` | {m.unit} | {meaning} | {m.advice} |")
  return "\n".join(lines) + "\n"


def explanations() -> str:
  """The dashboard's metrics.json: what it shows of each reading."""
  return json.dumps(
    {
      name: {"unit": m.unit, "meaning": m.meaning, "advice": m.advice}
      for name, m in METRICS.items()
    },
    ensure_ascii=False,
    indent=1,
  )


def undocumented(metrics: Mapping[str, Any]) -> list[str]:
  """Names in `metrics` that the reference does not explain."""
  return sorted(name for name in metrics if not is_documented(name))


if __name__ == "__main__":
  shell_hints.show(
    explanations()
    if sys.argv[1:] == ["--json"]
    else reference().removesuffix("\n")
  )
