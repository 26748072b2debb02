"""What a learner is told: algorithm, optimiser, shape of batches.

Names and defaults follow the sections `algorithm`, `learner` and `sampling` of
a run's configuration; `LearnerConfig.from_sections` copies them. Contradictory
values are refused here, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import aggregation
from tunix.rl.multi_turn.learner.algorithms import importance as importance_lib
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import objectives

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """A learner's configuration.

  Attributes:
    objective, advantage, importance, kl_estimator, loss_aggregation: names in
      the registries of `algorithms`.
    clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high].
    std_eps: added to the standard deviation of a group's rewards.
    gamma: discount a turn, for estimators of turns.
    kl_coef: weight of the KL to the reference; 0 = no reference is needed.
    entropy_coef: weight of the entropy bonus.
    tis_cap: truncation of importance weights.
    loss_length: tokens L of loss aggregation "constant"; 0 = row_length.
    temperature: of the sampler.
    top_k, top_p: of the sampler (0 and 1: no truncation).
    row_length, rows: tokens of a row, rows of a micro-batch.
    patches, targets: patches and sampled tokens a batch shard of a
      micro-batch can hold; 0 = decided by the first batch seen and kept, but
      never too few for a full row.
    logit_chunk: sampled tokens of a shard whose logits exist at a time.
    share_prompts: store prompts that sequences share once, for policies that
      support it.
    overlong: "error", or "drop" (and count) sequences longer than a row.
    minibatches, epochs: optimizer steps an update's groups are divided into,
      and passes over them.
    optimizer: "adamw", or "muon": matrices by orthogonalised momentum, all
      else by AdamW.
    learning_rate: peak.
    muon_learning_rate: peak for the matrices under "muon".
    schedule: "constant", "linear" or "cosine" (to 0 at total_steps) after a
      linear rise over warmup_steps; both in optimizer steps.
    weight_decay: AdamW's, of parameters with at least two axes.
    b1, b2, adam_eps: of Adam.
    grad_clip: largest global gradient norm; 0 = none.
    skip_zero_advantage: leave sequences without policy gradient out of
      batches; they still count in the loss's normalisation.
    seed: of the order of groups in minibatches.
  """

  objective: str = "grpo"
  advantage: str = "grpo"
  importance: str = "none"
  kl_estimator: str = "k3"
  loss_aggregation: str = "token_mean"
  clip_low: float = 0.2
  clip_high: float = 0.28
  std_eps: float = 1e-6
  gamma: float = 1.0
  kl_coef: float = 0.0
  entropy_coef: float = 0.0
  tis_cap: float = 2.0
  loss_length: int = 0
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  row_length: int = 512
  rows: int = 8
  patches: int = 0
  targets: int = 0
  logit_chunk: int = 1024
  share_prompts: bool = True
  overlong: str = "error"
  minibatches: int = 1
  epochs: int = 1
  optimizer: str = "adamw"
  learning_rate: float = 3e-4
  muon_learning_rate: float = 0.02
  schedule: str = "constant"
  warmup_steps: int = 0
  total_steps: int = 0
  weight_decay: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  adam_eps: float = 1e-8
  grad_clip: float = 1.0
  skip_zero_advantage: bool = True
  seed: int = 0

  def __post_init__(self):
    # Unknown names raise, naming the nearest known one.
    objectives.OBJECTIVES.get(self.objective)
    advantages.ESTIMATORS.get(self.advantage)
    importance_lib.CORRECTIONS.get(self.importance)
    kl.ESTIMATORS.get(self.kl_estimator)
    aggregation.AGGREGATORS.get(self.loss_aggregation)
    for name in ("rows", "row_length", "logit_chunk", "minibatches", "epochs"):
      self._need(name, getattr(self, name) >= 1, ">= 1")
    for name in (
        "patches",
        "targets",
        "loss_length",
        "warmup_steps",
        "total_steps",
        "kl_coef",
        "entropy_coef",
        "weight_decay",
        "grad_clip",
        "std_eps",
        "top_k",
        "clip_high",
    ):
      self._need(name, getattr(self, name) >= 0, ">= 0")
    self._need("clip_low", 0 <= self.clip_low <= 1, "in [0, 1]")
    self._need("gamma", 0 <= self.gamma <= 1, "in [0, 1]")
    self._need("tis_cap", self.tis_cap >= 1, ">= 1")
    self._need("learning_rate", self.learning_rate > 0, "> 0")
    self._need("muon_learning_rate", self.muon_learning_rate > 0, "> 0")
    self._need(
        "optimizer", self.optimizer in OPTIMIZERS, f"one of {OPTIMIZERS}"
    )
    self._need(
        "temperature",
        self.temperature > 0,
        "> 0: greedy samples carry no policy gradient",
    )
    self._need("top_p", 0 < self.top_p <= 1, "in (0, 1]")
    self._need("overlong", self.overlong in ("error", "drop"), "error or drop")
    self._need(
        "kl_estimator",
        self.kl_estimator != "k1" or not self.kl_coef,
        f"k2 or k3 with kl_coef={self.kl_coef} (the gradient of k1 vanishes)",
    )
    self._need("schedule", self.schedule in SCHEDULES, f"one of {SCHEDULES}")
    if self.schedule != "constant":
      self._need(
          "total_steps",
          self.total_steps > self.warmup_steps,
          f"> warmup_steps={self.warmup_steps} for schedule {self.schedule!r}",
      )
    uses_ratio = objectives.OBJECTIVES.get(self.objective).uses_advantages
    corrected = importance_lib.CORRECTIONS.get(self.importance).needs_proximal
    if (self.top_k or self.top_p < 1) and uses_ratio and not corrected:
      raise ValueError(
          f"top_k={self.top_k}, top_p={self.top_p}: the sampler's log-probs are"
          " of a truncated distribution, which the learner does not reproduce;"
          " sample without truncation or set importance='tis'"
      )

  def _need(self, name: str, ok: bool, what: str) -> None:
    if not ok:
      raise ValueError(
          f"LearnerConfig.{name} must be {what}, got {getattr(self, name)!r}"
      )

  @property
  def policy_gradient_only(self) -> bool:
    """Whether a sequence of advantage 0 has no gradient at all."""
    uses = objectives.OBJECTIVES.get(self.objective).uses_advantages
    return uses and self.kl_coef == 0 and self.entropy_coef == 0

  @classmethod
  def from_sections(cls, *sections: Any, **changes: Any) -> LearnerConfig:
    """Takes every field that a section has under the same name.

    Args:
      *sections: dataclasses, e.g. the run's `algorithm`, `learner` and
        `sampling` sections; a later one wins. Fields unknown here are passed
        over: sections hold more than the learner needs.
      **changes: fields, checked.
    """
    known = {f.name for f in dataclasses.fields(cls)}
    values = {}
    for section in sections:
      for field in dataclasses.fields(section):
        if field.name in known:
          values[field.name] = getattr(section, field.name)
    return cls(**(values | changes))
