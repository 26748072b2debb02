"""Tallies an update's episodes: sums and counts that add up over processes.

A tally is `{name: number}`, JSON. Names that begin with `most/` are largest
values, all others are sums. `readings` turns a tally, of one process or of
several added together, into metrics.

Promises: the readings of added tallies are those of all their groups together,
up to rounding.

Does not: name units or meanings (see `metrics`).
"""

from __future__ import annotations

import collections
import math
from typing import Iterable, Mapping

from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.core.statistics import reward_parts
from tunix.rl.multi_turn.core.statistics import turn_groups

Tally = dict[str, float]

_MOST = "most/"
_PER_EPISODE = (
  "truncated_turns",
  "fallback_turns",
  "history_rewrites",
  "summary_turns",
  "untrained_tokens",
)


def of_groups(groups: Iterable[trajectory_lib.TrajectoryGroup]) -> Tally:
  """The tally of the episodes of groups."""
  groups = list(groups)
  episodes = [t for g in groups for t in g]
  valid = [t for t in episodes if t.status.is_policy_outcome]
  tally: Tally = collections.defaultdict(float)
  tally["groups"] = len(groups)
  tally["episodes"] = len(episodes)
  tally["valid"] = len(valid)
  tally["refused_rewards"] = math.fsum(_each(episodes, "refused_rewards"))
  tally["informative"] = sum(group.varies for group in groups)
  for episode in episodes:
    tally[f"status/{episode.status.value}"] += 1
  _add_stages(tally, episodes)
  _add_outcomes(tally, valid)
  return dict(tally)


def _add_stages(
  tally: Tally, episodes: Iterable[trajectory_lib.Trajectory]
) -> None:
  """Adds seconds and turns of episodes that recorded their time."""
  timed = [t for t in episodes if "seconds" in t.metrics]
  if not timed:
    return
  tally["timed"] = len(timed)
  tally[f"{_MOST}seconds"] = max(_each(timed, "seconds"))
  tally["timed_turns"] = sum(t.num_turns for t in timed)
  for name in ("seconds", "seconds_model", "seconds_env", "seconds_setup"):
    tally[name] = math.fsum(_each(timed, name))
  # Absent of outside agents.
  tally["set_up"] = sum("seconds_setup" in t.metrics for t in timed)


def _add_outcomes(
  tally: Tally, valid: Iterable[trajectory_lib.Trajectory]
) -> None:
  """Adds rewards, successes and lengths of valid episodes."""
  for t in valid:
    solved = t.status is trajectory_lib.TrajectoryStatus.SUCCEEDED
    tally["reward"] += t.reward
    tally["reward_squared"] += float(t.reward) ** 2
    tally["solved"] += solved
    tally["turns"] += t.num_turns
    tally["sampled"] += t.num_sampled
    tally["stale"] += t.stale_tokens
    for name in _PER_EPISODE:
      tally[name] += t.metrics.get(name, 0.0)
    if family := family_of(t):
      tally[f"family/{family}"] += 1
      tally[f"family_solved/{family}"] += solved
    _add_turns(tally, t, solved)
    for name, part in reward_parts.of_episode(t).items():
      tally[f"part/{name}"] += part.value
      tally[f"parts/{name}"] += 1


def _add_turns(
  tally: Tally, episode: trajectory_lib.Trajectory, solved: bool
) -> None:
  """Adds an episode's turns and sampled tokens, by turn and by images.

  An episode counts once in each group that a turn of it belongs to.
  """
  for by in turn_groups.BY:
    turns: set[tuple[int, int]] = set()  # (group, turn)
    tokens: collections.Counter[int] = collections.Counter()
    for sequence in episode.sequences:
      mask = sequence.loss_mask
      groups = turn_groups.tokens_T(sequence, by)[mask].tolist()
      tokens.update(groups)
      turns.update(zip(groups, sequence.turn_ids[mask].tolist()))
    numbers = collections.Counter(group for group, _ in turns)
    for group, count in numbers.items():
      name = f"{by}/{turn_groups.NAMES[group]}"
      tally[f"turns_by_{name}"] += count
      tally[f"tokens_by_{name}"] += tokens[group]
      tally[f"episodes_by_{name}"] += 1
      tally[f"solved_by_{name}"] += solved


def family_of(trajectory: trajectory_lib.Trajectory) -> str:
  """The task family of an episode, "" when its task has none."""
  task = trajectory.task
  if isinstance(task, Mapping):
    return str(task.get("family", ""))
  return str(getattr(task, "family", ""))


def _each(
  episodes: Iterable[trajectory_lib.Trajectory], name: str
) -> list[float]:
  return [float(t.metrics[name]) for t in episodes if name in t.metrics]


def added(tallies: Iterable[Mapping[str, float]]) -> Tally:
  """The tally of all the groups that several tallies are of."""
  total: Tally = {}
  for tally in tallies:
    for name, value in tally.items():
      if name not in total:
        total[name] = value
      elif name.startswith(_MOST):
        total[name] = max(total[name], value)
      else:
        total[name] += value
  return total


def readings(tally: Mapping[str, float]) -> dict[str, float]:
  """Metrics of a tally; see `metrics.group_metrics`."""
  total, valid = tally["episodes"], tally["valid"]
  out: dict[str, float] = {"groups": tally["groups"], "episodes": total}
  if not total:
    return out
  out["invalid_episodes"] = (total - valid) / total
  for name, count in _under("status", tally):
    out[f"status/{name}"] = count / total
  out["informative_groups"] = tally["informative"] / tally["groups"]
  out["refused_rewards"] = tally["refused_rewards"]
  if tally.get("timed"):
    out |= _stage_readings(tally)
  if not valid:
    return out
  mean = out["reward_mean"] = tally["reward"] / valid
  square = tally["reward_squared"] / valid
  spread = square - mean**2
  if reward_equality.is_rounding(spread, square):
    spread = 0.0
  out["reward_std"] = math.sqrt(spread)
  for name, value in _under("part", tally):
    out[f"reward_part/{name}"] = value / tally[f"parts/{name}"]
  out["success_rate"] = tally["solved"] / valid
  for family, count in _under("family", tally):
    out[f"success_rate/{family}"] = tally[f"family_solved/{family}"] / count
  for by in turn_groups.BY:
    counts = _under(f"turns_by_{by}", tally)
    if len(counts) > 1:  # Else the means over all say it.
      for name, count in counts:
        place = f"by_{by}/{name}"
        episodes = tally[f"episodes_{place}"]
        out[f"success_{place}"] = tally[f"solved_{place}"] / episodes
        out[f"turn_tokens_{place}"] = tally[f"tokens_{place}"] / count
  out["turns_mean"] = tally["turns"] / valid
  sampled = tally["stale"] + tally["sampled"]
  out["stale_token_share"] = tally["stale"] / max(sampled, 1)
  out["episode_tokens_mean"] = tally["sampled"] / valid
  for name in _PER_EPISODE:
    out[name] = tally[name] / valid
  return out


def _stage_readings(tally: Mapping[str, float]) -> dict[str, float]:
  """Shares and seconds of stages; of the environment only where recorded."""
  timed, turns = tally["timed"], tally["timed_turns"]
  total, model, env, setup = (
    tally[name]
    for name in ("seconds", "seconds_model", "seconds_env", "seconds_setup")
  )
  out = {
    "episode_seconds_mean": total / timed,
    "episode_seconds_max": tally[f"{_MOST}seconds"],
    "model_share": model / max(total, 1e-9),
  }
  if not tally["set_up"]:
    return out
  out["env_share"] = (env + setup) / max(total, 1e-9)
  out["episode_seconds_setup"] = setup / timed
  if turns:
    out["turn_seconds_model"] = model / turns
    out["turn_seconds_env"] = env / turns
    out["turn_seconds_other"] = max(0.0, total - model - env - setup) / turns
  return out


def _under(prefix: str, tally: Mapping[str, float]) -> list[tuple[str, float]]:
  """(name, value) of the entries `prefix/name`, by name."""
  start = f"{prefix}/"
  return sorted(
    (name.removeprefix(start), value)
    for name, value in tally.items()
    if name.startswith(start)
  )
