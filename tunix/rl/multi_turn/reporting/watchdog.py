"""Watches a run's metrics for training that cannot succeed, and says why.

Each rule judges the metrics of learner steps, or the ends of episodes, against
thresholds of `WatchdogConfig`. A rule that holds emits one `Fault` of stage
"watchdog" with a diagnosis, and again only after it stopped holding in between.
A rule in `stop` also ends the run: `check` raises. So does, always, `invalid`:
the first episodes of a run, evaluations included, that all had no outcome of
the policy, no turn, or no token to train on; in training, once the retries of a
group have failed too.

Promises: an observer, so it returns at once and does not raise by itself; a
metric that is absent is not judged.

Does not: change anything; a resumed run begins to watch anew.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import statistics
import threading
from typing import Callable, get_args, Mapping

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.reporting import reporting_settings

_LOG = logging.getLogger(__name__)

Metrics = Mapping[str, float]


_APART = 3
"""Updates in a row whose gap on equal weights is a finding: one may have a few
tokens of very low probability."""

INVALID = "invalid"
"""The rule that always ends the run."""


class RunStopped(RuntimeError):
  """The watchdog ended the run; the text is its diagnosis."""


@dataclasses.dataclass(frozen=True)
class Finding:
  """A diagnosis of a rule.

  Attributes:
    rule: One of `reporting_settings.WatchdogRule`, or `INVALID`.
    message: The diagnosis.
  """

  rule: str
  message: str


class Rules:
  """The rules as a state machine over metrics and episodes; not an observer.

  One call at a time.
  """

  def __init__(self, config: reporting_settings.WatchdogConfig):
    self._c = config
    self._unsolved = self._even = self._not_finite = self._failed = 0
    self._apart = 0
    # Of each group of turns or images: updates in a row with a gap.
    self._apart_by: collections.Counter[str] = collections.Counter()
    self._skipped: float | None = None
    self._steps: float | None = None
    self._norms: collections.deque[float] = collections.deque(
      maxlen=config.window
    )
    self._first: dict[str, list[float]] = {"entropy": [], "sampler_kl": []}
    self._recent: dict[str, collections.deque[float]] = {
      name: collections.deque(maxlen=config.window) for name in self._first
    }
    self._holding: set[str] = set()
    # Of the first episodes, while none is valid: (status, error) of each.
    self._invalid: list[tuple[str, str]] | None = []
    # Whether one was of an evaluation, or of a group that was given up.
    self._final = False

  def step(self, metrics: Metrics) -> list[Finding]:
    """Judges one learner step."""
    return self._new(
      dict(
        filter(
          None,
          [
            self._without_gradient(metrics),
            self._not_a_number(metrics),
            self._gradient(metrics),
            self._kl(metrics),
            self._entropy(metrics),
            self._gap(metrics),
          ],
        )
      ),
      frozenset(get_args(reporting_settings.WatchdogRule)) - {"environments"},
    )

  def episode(self, status: trajectory.TrajectoryStatus) -> list[Finding]:
    """Judges the end of an episode of training."""
    if status is trajectory.TrajectoryStatus.CANCELLED:
      return []
    self._failed = 0 if status.is_policy_outcome else self._failed + 1
    diagnoses = {}
    if self._c.failed_episodes and self._failed >= self._c.failed_episodes:
      diagnoses["environments"] = (
        f"the last {self._failed} episodes were ended by infrastructure, the"
        f" newest as {status.value}: no environment or no engine works; see"
        " the faults in summary.json"
      )
    return self._new(diagnoses, frozenset({"environments"}))

  def first_episode(
    self, episode: trajectory.Trajectory, split: str = "train"
  ) -> list[Finding]:
    """Judges the end of one of the first episodes, evaluations included."""
    if self._invalid is None or not self._c.invalid_episodes:
      return []
    if episode.status is trajectory.TrajectoryStatus.CANCELLED:
      return []
    error = episode.error or ""
    if episode.status.is_policy_outcome:
      untrained = 0 if episode.has_loss else episode.untrained_tokens
      if untrained and split != "train":
        return []  # It is measured, and says nothing about training.
      if not untrained and (episode.num_turns or episode.has_loss):
        self._invalid = None
        return []
      if untrained:
        error = (
          "its sampled tokens are not trained on, as its requests asked for"
          " another distribution than the run's; see rollout.other_sampling"
        )
    self._invalid.append((episode.status.value, error))
    self._final = self._final or split != "train"
    return self._all_invalid()

  def given_up(self) -> list[Finding]:
    """Judges the first episodes when a group's last attempt has failed."""
    self._final = True
    return self._all_invalid()

  def _all_invalid(self) -> list[Finding]:
    limit = self._c.invalid_episodes
    if self._invalid is None or not limit or not self._final:
      return []
    number = len(self._invalid)
    if number < limit:
      return []
    statuses = collections.Counter(status for status, _ in self._invalid)
    status, count = statuses.most_common(1)[0]
    errors = collections.Counter(e for s, e in self._invalid if s == status)
    error = errors.most_common(1)[0][0] or "without an error's text"
    self._invalid = None
    return [
      Finding(
        INVALID,
        (
          f"all of the first {number} episodes were invalid, {count} of them by"
          f" {status}: {error}; nothing can be learned or measured until it is"
          " mended (watchdog.invalid_episodes=0 runs on)"
        ),
      )
    ]

  def _new(
    self, texts: Mapping[str, str], judged: frozenset[str]
  ) -> list[Finding]:
    """The rules that did not hold before."""
    fresh = [Finding(r, m) for r, m in texts.items() if r not in self._holding]
    self._holding = (self._holding - judged) | set(texts)
    return fresh

  def _without_gradient(self, m: Metrics) -> tuple[str, str] | None:
    if "zero_advantage_groups" not in m or "success_rate" not in m:
      return None
    none = m["zero_advantage_groups"] >= m.get("groups", math.inf)
    solved = m["success_rate"] > 0
    self._unsolved = self._unsolved + 1 if none and not solved else 0
    self._even = self._even + 1 if none and solved else 0
    limit = self._c.no_gradient_updates
    if limit and self._unsolved >= limit:
      return "unsolved", (
        f"no task was solved and no group had a gradient in"
        f" {self._unsolved} updates: nothing is learned; clone demonstrations"
        " first (warm_start.steps), or choose tasks that the policy solves"
        " sometimes"
      )
    if limit and self._even >= limit:
      return "no_variance", (
        "the episodes of each group got the same reward in"
        f" {self._even} updates (success {m['success_rate']:.2f}): nothing is"
        " learned; choose harder tasks, raise collect.group_size or"
        " sampling.temperature"
      )
    return None

  def _not_a_number(self, m: Metrics) -> tuple[str, str] | None:
    skipped = m.get("skipped_steps", 0.0)
    before, self._skipped = self._skipped, skipped
    wrong = [
      name
      for name in ("loss", "grad_norm")
      if name in m and not math.isfinite(m[name])
    ]
    bad = bool(wrong) or skipped > (before or 0.0)
    self._not_finite = self._not_finite + 1 if bad else 0
    limit = self._c.nan_updates
    if not limit or self._not_finite < limit:
      return None
    what = " and ".join(wrong) or "a gradient"
    return "nan", (
      f"{what} was not finite in {self._not_finite} updates in a row, and"
      " such steps are not made; resume from an earlier checkpoint with a"
      " lower learner.learning_rate"
    )

  def _gradient(self, m: Metrics) -> tuple[str, str] | None:
    norm = m.get("grad_norm")
    if norm is None or not math.isfinite(norm):
      return None
    usual = statistics.median(self._norms) if self._norms else 0.0
    full = len(self._norms) == self._c.window
    self._norms.append(norm)
    factor = self._c.gradient_factor
    high = norm > max(factor * usual, self._c.gradient_floor)
    if not (factor and full and usual and high):
      return None
    return "gradient", (
      f"the gradient's norm is {norm:.3g}, {norm / usual:.0f} times its usual"
      f" {usual:.3g}; lower learner.learning_rate or learner.grad_clip"
    )

  def _kl(self, m: Metrics) -> tuple[str, str] | None:
    kl = m.get("kl")
    if kl is None or not self._c.max_kl or not kl > self._c.max_kl:
      return None
    return "kl", (
      f"the KL from the reference is {kl:.3g} nats a token, more than"
      f" {self._c.max_kl:g}: the policy has left it; raise algorithm.kl_coef"
      " or lower learner.learning_rate"
    )

  def _drift(self, name: str, m: Metrics) -> tuple[float, float] | None:
    """(mean over the first window, over the last); None for fewer than two."""
    value = m.get(name)
    if value is None or not math.isfinite(value):
      return None
    first, recent = self._first[name], self._recent[name]
    if len(first) < self._c.window:
      first.append(value)
      return None
    recent.append(value)
    if len(recent) < self._c.window:
      return None
    return statistics.fmean(first), statistics.fmean(recent)

  def _entropy(self, m: Metrics) -> tuple[str, str] | None:
    means = self._drift("entropy", m)
    solved = m.get("success_rate", 0.0) >= 0.9
    if means is None or solved or not self._c.entropy_fraction:
      return None
    first, now = means
    if not now < self._c.entropy_fraction * first:
      return None
    return "entropy", (
      f"the policy's entropy fell from {first:.3g} to {now:.3g} nats at a"
      f" success of {m.get('success_rate', 0.0):.2f}: it no longer explores;"
      " raise algorithm.clip_high or algorithm.entropy_coef, or begin again"
      " with a lower learner.learning_rate"
    )

  def _gap(self, m: Metrics) -> tuple[str, str] | None:
    before, steps = self._steps, m.get("optimizer_steps")
    self._steps = steps
    kl, limit = m.get("sampler_kl"), self._c.gap_limit
    # Tokens of the weights that the update began with, and moved once.
    same = (
      m.get("staleness_max") == 0
      and steps is not None
      and steps - (before or 0.0) == 1
      and not m.get("mixed_kv_tokens")
    )
    if same and kl is not None and limit:
      self._apart = 0 if kl <= limit else self._apart + 1
      groups = _gaps_by_group(m)
      self._apart_by = collections.Counter(
        {
          name: self._apart_by[name] + 1
          for name, gap in groups.items()
          if gap > limit
        }
      )
      # No part of the usual level that later updates are compared with.
      if 0 < self._apart < _APART:
        return None
      if self._apart:
        return "logprob_gap", (
          "engine and learner disagree on equal weights: at staleness 0 and"
          " with one optimizer step the KL of their log-probs was above"
          f" {limit:g} nats a token in {self._apart} updates, last {kl:.2g}"
          f"{_worst_group(m)}; check that the engine loads every version and"
          " reports log-probs of the distribution sampled from (after"
          " temperature, top_p, top_k and min_p)"
        )
      late = [n for n, times in self._apart_by.items() if times >= _APART]
      if late:
        worst = max(late, key=lambda name: groups[name])
        return "logprob_gap", (
          "engine and learner agree on most tokens and not on those of"
          f" {_of_group(worst)}: on equal weights the KL of their log-probs"
          f" there was above {limit:g} nats a token in {_APART} updates, last"
          f" {groups[worst]:.2g} against {kl:.2g} in all; compare positions,"
          " the order of images and what the history cut in such contexts"
        )
    means = self._drift("sampler_kl", m)
    if means is None or not self._c.gap_factor:
      return None
    first, now = means
    if not (now > self._c.gap_floor and now > self._c.gap_factor * first):
      return None
    return "logprob_gap", (
      f"the log-probs of engine and learner drift apart: their KL rose from"
      f" {first:.2g} to {now:.2g} nats a token{_worst_group(m)}; lower"
      " queue.max_staleness or the optimizer steps of an update, or set"
      " algorithm.importance=tis. If neither is above 1, check that the"
      " engine loads every version"
    )


def _gaps_by_group(m: Metrics) -> dict[str, float]:
  """KL of the sampler by group, under "turn/03-04" and "images/05-08"."""
  start = "sampler_kl_by_"
  return {
    name.removeprefix(start): value
    for name, value in m.items()
    if name.startswith(start) and math.isfinite(value)
  }


def _of_group(name: str) -> str:
  """Words for a group, such as "turns 03-04"."""
  by, _, group = name.partition("/")
  return f"turns {group}" if by == "turn" else f"contexts with {group} images"


def _worst_group(m: Metrics) -> str:
  """Words about the group whose gap is twice that of all; "" for none."""
  groups = _gaps_by_group(m)
  worst = max(groups, key=lambda name: groups[name], default="")
  if not worst or groups[worst] < 2 * m.get("sampler_kl", 0.0):
    return ""
  return f", {groups[worst]:.2g} at {_of_group(worst)}"


class Watchdog:
  """Observer around `Rules`; see the module docstring."""

  receives = (events.StepFinished, events.EpisodeFinished, events.GroupFinished)

  def __init__(
    self,
    config: reporting_settings.WatchdogConfig,
    emit: Callable[[events.Event], None],
  ):
    """Args:

    config: thresholds, and the rules that stop the run.
    emit: receives a `Fault` for each finding.
    """
    self._config = config
    self._rules = Rules(config)
    self._emit = emit
    self._lock = threading.Lock()
    self._on_stop: list[Callable[[BaseException], None]] = []
    self._stopped: RunStopped | None = None

  def on_stop(self, call: Callable[[BaseException], None]) -> None:
    """Adds what is called with the error when a rule ends the run."""
    self._on_stop.append(call)

  def check(self) -> None:
    """Raises RunStopped if a rule ended the run."""
    if self._stopped is not None:
      raise self._stopped

  def on_event(self, event: events.Event) -> None:
    if not self._config.on:
      return
    with self._lock:
      if isinstance(event, events.StepFinished):
        findings = self._rules.step(event.metrics)
      elif isinstance(event, events.EpisodeFinished):
        findings = [
          *self._rules.first_episode(event.trajectory, event.split),
          *(
            self._rules.episode(event.trajectory.status)
            if event.split == "train"
            else ()
          ),
        ]
      elif isinstance(event, events.GroupFinished):
        dropped = event.outcome == "dropped"
        findings = self._rules.given_up() if dropped else []
      else:
        return
    for finding in findings:
      _LOG.warning("watchdog (%s): %s", finding.rule, finding.message)
      self._emit(events.Fault("watchdog", finding.rule, finding.message))
      stops = finding.rule in (*self._config.stop, INVALID)
      if stops and self._stopped is None:
        self._stopped = RunStopped(
          f"stopped by the watchdog ({finding.rule}): {finding.message}"
        )
        for call in self._on_stop:
          call(self._stopped)
