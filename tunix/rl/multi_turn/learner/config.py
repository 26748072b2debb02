"""Declares the learner's settings: algorithm, optimizer, batches, checkpoints.

`AlgorithmConfig`, `LearnerConfig` and `CheckpointConfig` are sections of a
run's configuration and at the same time arguments of `Learner` and
`LearnerCheckpoints`. Constructing one refuses values out of range and values
of one section that contradict each other.

Does not: resolve the names of algorithms (see `algorithms.parts`), or import
JAX.
"""

from __future__ import annotations

from typing import Iterator, Literal

from tunix.rl.multi_turn.core import settings

_ALGORITHMS = "tunix.rl.multi_turn.learner.algorithms"
_NO_CLIP = ("cispo", "kl_cov", "policy_gradient", "sapo")
"""Objectives without the clipped gain that a dual clip bounds."""
COMPARED_WITH_NOTHING = (
  "filtered",
  "gae",
  "none",
  "reinforce_pp",
  "remax",
  "reward",
)
"""Advantages without a baseline of the group's own: groups of one will do, and
a group of equal rewards may have a gradient."""


@settings.settings
class AlgorithmConfig:
  """The algorithm that turns rewards into a loss."""

  name: str = settings.setting(
    default="",
    doc="Preset of a published algorithm, e.g. gspo: defaults for the"
    " settings below and a few of the learner's, see docs/algorithms.md."
    ' "" = the defaults below.',
    registry=f"{_ALGORITHMS}.presets:PRESETS",
  )
  advantage: str = settings.setting(
    default="grpo",
    doc="grpo: (r - mean) / std of the group. dr_grpo: r - mean. rloo: r -"
    " mean of the others. opo: r - the mean weighed by tokens. turn_returns:"
    " each turn's discounted return, normalised over the turns of the group."
    " gigpo: grpo, and each turn's return among turns from the same state."
    " hgpo: the same, among turns with equal histories of several lengths."
    " pass_at_k: gain in the best of k. reinforce_pp: each turn's return,"
    " normalised over the update. reinforce_pp_baseline: r - mean, normalised"
    " over the update. gpg: r - mean, scaled for groups without a gradient."
    " gdpo: each part of environment.reward as grpo, their weighted sum"
    " normalised over the update."
    " remax: r - r of a greedy episode of the same task. gae: of a value head"
    " (PPO), see gae_lambda. reward: r as it is, e.g. of a buffer that has"
    " normalised it, or a weight to clone with. filtered: 1 where r >="
    " filter_reward, else 0. none: 0, for distillation alone."
    " A function of google-tunix's signature, (rewards, num_generations), may"
    " be given by its path, e.g. tunix.rl.algo_core:compute_rloo_advantages.",
    registry=f"{_ALGORITHMS}.advantages:ESTIMATORS",
  )
  objective: str = settings.setting(
    default="grpo",
    doc="Policy objective. grpo: the clipped ratio times the advantage. gspo:"
    " the same with one ratio a sequence; gspo_token: each token with its own"
    " gradient. cispo: log-probs weighed by the clipped ratio. sapo: a"
    " smooth gate instead of the clip. clip_cov, kl_cov: grpo that holds the"
    " tokens back which lower the entropy most. policy_gradient: without a"
    " ratio."
    " behaviour_cloning: imitates demonstrations (warm start).",
    registry=f"{_ALGORITHMS}.objectives:OBJECTIVES",
  )
  clip_low: float = settings.setting(
    default=0.2, doc="The ratio is clipped below at 1 - this.", ge=0, le=1
  )
  clip_high: float = settings.setting(
    default=0.28, doc="The ratio is clipped above at 1 + this.", ge=0
  )
  dual_clip: float = settings.setting(
    default=0.0,
    doc="Bound of the loss of a negative advantage, in multiples of it (3 as"
    " published); objectives grpo, gspo and gspo_token. 0 = no bound.",
    ge=0,
  )
  sapo_tau_pos: float = settings.setting(
    default=1.0, doc="Temperature of sapo's gate for positive advantages.", gt=0
  )
  sapo_tau_neg: float = settings.setting(
    default=1.05, doc="The same for negative ones.", gt=0
  )
  cov_share: float = settings.setting(
    default=2e-4,
    doc="Share of tokens that clip_cov and kl_cov hold back; at least one of"
    " a micro-batch's buffer.",
    gt=0,
    le=1,
  )
  cov_low: float = settings.setting(
    default=1.0,
    doc="clip_cov draws them from tokens whose covariance of log-prob and"
    " advantage is above this.",
  )
  cov_high: float = settings.setting(
    default=5.0, doc="And below this; both of clip_cov."
  )
  cov_kl_coef: float = settings.setting(
    default=1.0, doc="Weight of the KL on tokens that kl_cov holds back.", ge=0
  )
  gae_lambda: float = settings.setting(
    default=0.95,
    doc="Decay of advantage=gae between turns, where collect.gamma is the"
    " discount.",
    ge=0,
    le=1,
  )
  gae_token_lambda: float = settings.setting(
    default=1.0,
    doc="The same between the tokens of a turn, where the discount is 1.",
    ge=0,
    le=1,
  )
  gae_bootstrap: bool = settings.setting(
    default=False,
    doc="What an episode that a limit ended is still worth: the value of its"
    " last state, instead of nothing. For limits that are no part of the"
    " task; needs collect.gamma < 1.",
  )
  gae_normalise: bool = settings.setting(
    default=True,
    doc="Advantages of gae are scaled to mean 0 and variance 1 over the"
    " tokens of an update.",
  )
  value_coef: float = settings.setting(
    default=0.5,
    doc="Weight of the value head's loss in the gradient of the policy's"
    " trunk.",
    ge=0,
  )
  value_clip: float = settings.setting(
    default=0.2,
    doc="A value counts as moved by this much at most, in its loss. 0 = no"
    " clip.",
    ge=0,
  )
  value_learning_rate: float = settings.setting(
    default=1e-3, doc="Of the value head, constant.", gt=0
  )
  value_warmup: int = settings.setting(
    default=0,
    doc="Updates at the start in which the value head alone learns.",
    ge=0,
  )
  teacher: str = settings.setting(
    default="",
    doc="Policy that is distilled: a registered name or a directory, of the"
    ' same tokenizer and image processor. "" = none.',
  )
  distill_coef: float = settings.setting(
    default=0.0,
    doc="Weight of the reverse KL to the teacher: each sampled token's"
    " advantage grows by this times log p of the teacher - log p of the"
    " policy.",
    ge=0,
  )
  keep_sampling_mask: bool = settings.setting(
    default=False,
    doc="The tokens that top_k, top_p and min_p left to be sampled are kept"
    " with each sampled one, and the learner's log-probs are of them. Needs"
    " 0 < sampling.top_k <= 20.",
  )
  std_eps: float = settings.setting(
    default=1e-6,
    doc="Added to the standard deviation of a group's rewards.",
    ge=0,
  )
  gigpo_step_weight: float = settings.setting(
    default=1.0,
    doc="Weight of gigpo's and hgpo's advantages among equal states.",
    ge=0,
  )
  hgpo_history: int = settings.setting(
    default=2,
    doc="hgpo compares turns whose last 1, 2, ... states are equal, up to this"
    " many before the turn's own.",
    ge=0,
    le=64,
  )
  hgpo_alpha: float = settings.setting(
    default=1.0,
    doc="hgpo weighs the comparison of k + 1 equal states by (k + 1) to this"
    " power. 0 = all equally.",
    ge=0,
    le=16,
  )
  gigpo_mask: tuple[float, ...] = settings.setting(
    default=(),
    doc="Parts of the screen that gigpo and hgpo leave out of states,"
    " e.g. a clock: left, top, right, bottom as shares of the screen, four"
    " numbers a part.",
  )
  gigpo_cells: int = settings.setting(
    default=0,
    doc="gigpo and hgpo compare screenshots by the brightness of this many"
    " cells along each side. 0 = by every pixel. Coarse cells take different"
    " states for one.",
    ge=0,
    le=256,
  )
  entropy_share: float = settings.setting(
    default=1.0,
    doc="Share of a group's turns that is trained on, those of the highest"
    " mean entropy: of the sampled tokens' distributions with"
    " engine.entropies, else estimated by their log-probs.",
    gt=0,
    le=1,
  )
  pass_k: int = settings.setting(
    default=4, doc="k of advantage=pass_at_k.", unit="episodes", ge=1
  )
  filter_reward: float = settings.setting(
    default=0.5,
    doc="Least reward of an episode that advantage=filtered learns from.",
  )
  overlong_tokens: int = settings.setting(
    default=0,
    doc="An episode that samples more tokens than this loses 1 of its reward;"
    " the loss of reward begins overlong_cache tokens before. 0 = none.",
    unit="tokens",
    ge=0,
  )
  overlong_cache: int = settings.setting(
    default=0,
    doc="See overlong_tokens. 0 = a fifth of them, as published.",
    unit="tokens",
    ge=0,
  )
  filter_truncated: bool = settings.setting(
    default=False,
    doc="Leave episodes that a limit ended (turns, context, tokens of the"
    " last turn) out of the loss; their rewards count in their group.",
  )
  kl_coef: float = settings.setting(
    default=0.0,
    doc="Weight of the KL divergence from the policy at the start of GRPO."
    " 0 = no reference model is kept.",
    ge=0,
  )
  kl_in: Literal["loss", "reward"] = settings.setting(
    default="loss",
    doc="loss: the KL is a term of the loss. reward: each turn's reward is"
    " lowered by the KL of its tokens, before advantages are computed.",
  )
  kl_estimator: str = settings.setting(
    default="k3",
    doc="Per-token estimator: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 -"
    " log r. k1 has no gradient on average: with kl_coef > 0 only for"
    " kl_in=reward.",
    registry=f"{_ALGORITHMS}.kl:ESTIMATORS",
  )
  kl_target: float = settings.setting(
    default=0.0,
    doc="KL a token that kl_coef is adapted to after each update, by 2 % at"
    " most. 0 = kl_coef is constant.",
    unit="nats",
    ge=0,
  )
  entropy_coef: float = settings.setting(
    default=0.0, doc="Weight of the entropy bonus.", ge=0
  )
  importance: str = settings.setting(
    default="none",
    doc="Correction for tokens sampled from other weights than the learner's."
    " none: the ratio to the sampled log-probs is all. decoupled: the ratio"
    " is to the weights at the update's start, times the ratio of learner to"
    " sampler. tis: times that ratio truncated at tis_cap. mis: times that"
    " ratio, 0 outside [mis_low, tis_cap]. tis_sequence, mis_sequence: with"
    " the product over the sequence. mis_geometric: with its geometric mean.",
    registry=f"{_ALGORITHMS}.importance:CORRECTIONS",
  )
  tis_cap: float = settings.setting(
    default=2.0,
    doc="Largest ratio of learner to sampler: truncated (tis) or left out"
    " (mis) beyond.",
    ge=1,
  )
  mis_low: float = settings.setting(
    default=0.0, doc="Ratios below it are left out by mis.", ge=0, le=1
  )
  veto: float = settings.setting(
    default=0.0,
    doc="A sequence with a token whose ratio of learner to sampler is below"
    " this has weight 0 (1e-4 as published); not with importance=none. 0 = no"
    " veto.",
    ge=0,
    lt=1,
  )
  loss_aggregation: str = settings.setting(
    default="token_mean",
    doc="token_mean: all tokens of the batch count equally. episode_mean: all"
    " episodes do. sequence_mean: all sequences do, of which an episode whose"
    " history is rewritten has several. constant: sums over a fixed length, no"
    " length bias.",
    registry=f"{_ALGORITHMS}.aggregation:AGGREGATORS",
  )
  loss_length: int = settings.setting(
    default=0,
    doc="Length L that loss_aggregation=constant divides by. 0 ="
    " learner.row_length.",
    unit="tokens",
    ge=0,
  )

  def problems(self) -> Iterator[str]:
    if self.kl_coef > 0 and self.kl_estimator == "k1" and self.kl_in == "loss":
      yield (
        f"kl_estimator=k1 with kl_coef={self.kl_coef} would do nothing: its"
        " gradient vanishes on average; set it to k2 or k3, or kl_in=reward"
      )
    if self.kl_target > 0 and not self.kl_coef:
      yield (
        f"kl_target={self.kl_target} adapts kl_coef, which is 0; set the"
        " coefficient to begin with, e.g. kl_coef=0.01"
      )
    if 0 < self.dual_clip <= 1:
      yield (
        f"dual_clip={self.dual_clip} would cut the loss at ratio 1; set it"
        " > 1 or 0"
      )
    if self.dual_clip and self.objective in _NO_CLIP:
      yield (
        f"dual_clip={self.dual_clip} is not read by"
        f" objective={self.objective}; set it to 0"
      )
    if self.veto and self.importance == "none":
      yield (
        f"veto={self.veto} is of a correction, and importance=none; set"
        " importance=tis or veto=0"
      )
    if self.cov_low >= self.cov_high:
      yield (f"cov_low={self.cov_low} must be below cov_high={self.cov_high}")
    if self.distill_coef and not self.teacher:
      yield (
        f"distill_coef={self.distill_coef} needs a teacher; set teacher= to"
        " the name or directory of a policy of the same tokenizer"
      )
    if self.teacher and not self.distill_coef:
      yield (
        f"teacher={self.teacher} is not asked with distill_coef=0; set the"
        ' coefficient, e.g. 1, or teacher=""'
      )
    if self.advantage == "none" and not self.distill_coef:
      yield (
        "advantage=none learns from no reward, and distill_coef=0 from no"
        " teacher; set advantage=grpo, or teacher and distill_coef"
      )
    mask = self.gigpo_mask
    parts = [mask[i : i + 4] for i in range(0, len(mask), 4)]
    if any(
      len(part) < 4
      or not 0 <= part[0] < part[2] <= 1
      or not 0 <= part[1] < part[3] <= 1
      for part in parts
    ):
      yield (
        f"gigpo_mask={list(mask)} must be left, top, right, bottom of each"
        " part, shares of the screen with left < right and top < bottom, e.g."
        " [0.9,0,1,0.05]"
      )
    if (mask or self.gigpo_cells) and self.advantage not in ("gigpo", "hgpo"):
      yield (
        f"gigpo_mask={list(mask)}, gigpo_cells={self.gigpo_cells} compare"
        f" states, and advantage={self.advantage} does not; set"
        " advantage=gigpo, or leave them out"
      )
    if self.overlong_cache > self.overlong_tokens:
      yield (
        f"overlong_cache={self.overlong_cache} is more than"
        f" overlong_tokens={self.overlong_tokens}; lower the first"
      )

  @property
  def kl_in_loss(self) -> bool:
    """Whether the loss has a KL term."""
    return self.kl_coef > 0 and self.kl_in == "loss"

  @property
  def kl_in_reward(self) -> bool:
    """Whether rewards have a KL price."""
    return self.kl_coef > 0 and self.kl_in == "reward"

  @property
  def overlong_begin(self) -> int:
    """Tokens over which the price of length rises; 0 where there is none."""
    return self.overlong_cache or -(-self.overlong_tokens // 5)


@settings.settings
class LearnerConfig:
  """The optimizer and the shape of its batches."""

  steps: int = settings.setting(
    default=150,
    doc="Updates. 0 = no GRPO: warm start and evaluation only.",
    ge=0,
  )
  groups_per_step: int = settings.setting(
    default=16, doc="Groups an update learns from.", ge=1, le=100_000
  )
  publish_every: int = settings.setting(
    default=1, doc="The engine gets new weights every this many updates.", ge=1
  )
  minibatches: int = settings.setting(
    default=1, doc="Optimizer steps an update's groups are divided into.", ge=1
  )
  epochs: int = settings.setting(
    default=1, doc="Passes over an update's groups.", ge=1
  )
  rows: int = settings.setting(
    default=4,
    doc="Rows of one compiled batch; gradients accumulate over batches.",
    ge=1,
    le=65_536,
  )
  row_length: int = settings.setting(
    default=512,
    doc="Tokens of a packed row; sequences are never cut.",
    unit="tokens",
    ge=16,
    le=10**7,
  )
  patches: int = settings.setting(
    default=0,
    doc="Image patches that a batch shard holds. 0 = decided by the first"
    " batch, never too few for a full row. Either way they are rounded up to"
    " what attention within images computes by, and grow where larger images"
    " come or an example's images need more places, for which the programs"
    " are compiled again.",
    unit="patches",
    ge=0,
  )
  targets: int = settings.setting(
    default=0,
    doc="Sampled tokens that a batch shard holds. 0 = decided by the first"
    " batch and kept, never too few for a full row.",
    unit="tokens",
    ge=0,
  )
  logit_chunk: int = settings.setting(
    default=1024,
    doc="Sampled tokens of a batch shard whose logits exist at a time:"
    " fewer take less memory, more are faster.",
    unit="tokens",
    ge=1,
  )
  tree: Literal["auto", "true", "false"] = settings.setting(
    default="auto",
    doc="true: sequences of an update that begin with the same tokens and"
    " pixels share them in a row, as a tree whose prefixes are computed once;"
    " with the same loss and gradients. auto: where the policy supports it,"
    " but not on TPU, whose attention kernel takes no tree.",
  )
  overlong: Literal["error", "drop"] = settings.setting(
    default="error",
    doc="A sequence longer than a row ends the run (error), or is left out"
    " and counted (drop).",
  )
  optimizer: Literal["adamw", "muon"] = settings.setting(
    default="adamw",
    doc="muon: matrices by orthogonalised momentum, all else by AdamW.",
  )
  learning_rate: float = settings.setting(
    default=3e-4,
    doc="Peak of the schedule; of AdamW's part under optimizer=muon.",
    gt=0,
  )
  muon_learning_rate: float = settings.setting(
    default=0.02, doc="Peak for the matrices under optimizer=muon.", gt=0
  )
  schedule: Literal["constant", "cosine", "linear"] = settings.setting(
    default="constant",
    doc="After warm-up the learning rate is constant, or falls to 0 at the"
    " last step by a cosine or a line.",
  )
  warmup_steps: int = settings.setting(
    default=0, doc="Steps in which the learning rate rises linearly.", ge=0
  )
  weight_decay: float = settings.setting(
    default=0.0, doc="AdamW's decay of matrices.", ge=0
  )
  b1: float = settings.setting(
    default=0.9, doc="Decay of Adam's first moment.", ge=0, lt=1
  )
  b2: float = settings.setting(
    default=0.999, doc="Decay of Adam's second moment.", ge=0, lt=1
  )
  adam_eps: float = settings.setting(
    default=1e-8, doc="Added to the root of Adam's second moment.", ge=0
  )
  grad_clip: float = settings.setting(
    default=1.0,
    doc="Largest global norm of the gradient. 0 = no clipping.",
    ge=0,
  )
  freeze_vision: bool = settings.setting(
    default=False,
    doc="GRPO leaves the vision tower as it is: no gradient, no optimizer"
    " state. With an adapter (policy.lora_rank) it is frozen in any case.",
  )
  reference_on: Literal["device", "host"] = settings.setting(
    default="device",
    doc="Place of the reference's weights (algorithm.kl_coef) between their"
    " uses. host: they are copied to the devices once an update. With an"
    " adapter only the adapter's are kept twice.",
  )
  skip_zero_advantage: bool = settings.setting(
    default=True,
    doc="Leave groups whose episodes all got the same reward out of the"
    " batch: their policy gradient is 0. Not with a KL or entropy term.",
  )
  success_replay: int = settings.setting(
    default=0,
    doc="A group without a success borrows the newest one of its task that is"
    " at most this many versions old. 0 = none is borrowed. Above"
    " queue.max_staleness it needs algorithm.importance.",
    unit="versions",
    ge=0,
  )
  dynamic_sampling: int = settings.setting(
    default=0,
    doc="Groups whose episodes all got the same reward are replaced by new"
    " ones, up to this many times groups_per_step an update; later ones are"
    " taken as they are. 0 = none is replaced.",
    ge=0,
  )

  def problems(self) -> Iterator[str]:
    groups, parts = self.groups_per_step, self.minibatches
    if groups % parts != 0:
      yield (
        f"groups_per_step={groups} cannot be divided into"
        f" minibatches={parts}; make it a multiple"
      )
    if self.warmup_steps > self.steps > 0:
      yield (
        f"warmup_steps={self.warmup_steps} outlasts steps={self.steps};"
        " lower the first"
      )
    if self.schedule != "constant" and 0 < self.steps <= self.warmup_steps:
      yield (
        f"schedule={self.schedule} has no steps left after"
        f" warmup_steps={self.warmup_steps}; lower it"
      )

  @property
  def steps_per_update(self) -> int:
    """Optimizer steps that one update makes."""
    return self.minibatches * self.epochs

  @property
  def optimizer_steps(self) -> int:
    """Optimizer steps of all updates, where the schedule ends; at least 1."""
    return max(1, self.steps * self.steps_per_update)


@settings.settings
class CheckpointConfig:
  """Interval of checkpoints, and the number kept."""

  every: int = settings.setting(
    default=40, doc="Save every this many updates. 0 = only at the end.", ge=0
  )
  keep: int = settings.setting(default=2, doc="Newest checkpoints kept.", ge=1)
  keep_best: str = settings.setting(
    default="",
    doc="Keeps one checkpoint more: of the update whose evaluation (every"
    " eval.every updates, which are saved then) has the highest value of this"
    " figure: success_rate, mean_reward, pass_at_K or pass_hat_K of the first"
    " of eval.modes, or of another mode, as in greedy.success_rate. Of equal"
    ' ones the earliest. "" = none.',
  )
  resume_from: str = settings.setting(
    default="newest",
    doc="Checkpoint that resume= continues from: newest, best (of keep_best)"
    " or its number. From an older one the run goes back: newer checkpoints,"
    " and groups that were not trained on, are deleted.",
  )
  deadline_s: float = settings.setting(
    default=1800.0,
    doc="Seconds for a checkpoint to be on disk, after which the run fails.",
    gt=0,
  )

  def problems(self) -> Iterator[str]:
    choice = self.resume_from
    if choice not in ("newest", "best") and not choice.isdecimal():
      yield (
        f"resume_from={choice!r} must be newest, best, or the number of a"
        " checkpoint"
      )
