"""Declares presets of published algorithms: `algorithm=NAME`.

A preset holds defaults, by dotted key, that make the loss its authors publish:
the parts of `algorithm`, and what of the learner, the queue and the discount
belongs to the method. Any later key overrides one. Sizes (groups, episodes,
learning rate) are the run's: they depend on the model and the tasks.

    python -m tunix.rl.multi_turn.learner.algorithms.presets

prints the table of docs/algorithms.md.

Does not: import a part, or build one.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import registry


@dataclasses.dataclass(frozen=True)
class AlgorithmPreset:
  """A published algorithm.

  Attributes:
    settings: defaults by dotted key.
    paper: Publication.
    note: Differences from it, or what is left to the user; "" for nothing.
  """

  settings: Mapping[str, Any]
  paper: str
  note: str = ""


PRESETS: registry.Registry[AlgorithmPreset] = registry.Registry("algorithm")


def _preset(
  name: str,
  paper: str,
  *,
  advantage: str,
  objective: str = "grpo",
  aggregation: str = "token_mean",
  clip: tuple[float, float] | None = (0.2, 0.2),
  note: str = "",
  further: Mapping[str, Any] | None = None,
  **algorithm: Any,
) -> None:
  """Registers one; `algorithm` are further settings of the section."""
  values = {
    "advantage": advantage,
    "objective": objective,
    "loss_aggregation": aggregation,
    **algorithm,
  }
  if clip:
    values |= {"clip_low": clip[0], "clip_high": clip[1]}
  defaults = {f"algorithm.{key}": value for key, value in values.items()}
  in_loss = values.get("kl_coef") and values.get("kl_in") != "reward"
  if in_loss or advantage == "gae" or values.get("distill_coef"):
    defaults["learner.skip_zero_advantage"] = False
  PRESETS.register(
    name, AlgorithmPreset({**defaults, **(further or {})}, paper, note)
  )


def get(name: str) -> AlgorithmPreset:
  """Returns the preset of a name or of a path "package.module:attribute".

  Raises:
    ValueError: unknown, the message names the nearest; or no preset.
    ImportError: nothing at that path.
  """
  preset = PRESETS.get(name, "operator")
  if not isinstance(preset, AlgorithmPreset):
    raise ValueError(
      f"{name} is a {type(preset).__name__}, not an AlgorithmPreset; a part"
      " of an algorithm is named by its own setting, e.g. algorithm.advantage"
    )
  return preset


_preset(
  "grpo",
  "DeepSeekMath, arXiv:2402.03300",
  advantage="grpo",
  aggregation="episode_mean",
  kl_coef=0.04,
  kl_estimator="k3",
)
_preset(
  "dr_grpo",
  "Understanding R1-Zero-Like Training, arXiv:2503.20783",
  advantage="dr_grpo",
  aggregation="constant",
  note="Set algorithm.loss_length to the budget of tokens of an episode; it"
  " scales the gradient only.",
)
_preset(
  "grpo_constant",
  "Understanding R1-Zero-Like Training, arXiv:2503.20783",
  advantage="grpo",
  aggregation="constant",
  note="grpo without its 1/|o|: a long failure costs each of its tokens as"
  " much as a short one. algorithm.loss_length as for dr_grpo, whose"
  " advantage is not divided by the spread.",
)
_preset(
  "gdpo",
  "GDPO, arXiv:2601.05242",
  advantage="gdpo",
  note="Needs environment.reward as a mapping of parts to weights.",
)
_preset(
  "dart",
  "DART, arXiv:2509.23866",
  advantage="grpo",
  clip=(0.2, 0.28),
  importance="tis",
  entropy_share=0.8,
  note="The choice of steps by entropy and the truncated correction only;"
  " stored successes are learner.success_replay. Clip range of DAPO.",
)
_preset(
  "dapo",
  "DAPO, arXiv:2503.14476",
  advantage="grpo",
  clip=(0.2, 0.28),
  filter_truncated=True,
  further={"learner.dynamic_sampling": 9},
  note="Soft overlong punishment needs the budget of tokens:"
  " algorithm.overlong_tokens.",
)
_preset(
  "gspo",
  "GSPO, arXiv:2507.18071",
  advantage="grpo",
  objective="gspo",
  aggregation="sequence_mean",
  clip=(3e-4, 4e-4),
  further={"learner.minibatches": 4},
)
_preset(
  "gspo_token",
  "GSPO, arXiv:2507.18071",
  advantage="grpo",
  objective="gspo_token",
  aggregation="sequence_mean",
  clip=(3e-4, 4e-4),
  further={"learner.minibatches": 4},
  note="For advantages of turns, e.g. algorithm.advantage=turn_returns.",
)
_preset(
  "gigpo",
  "GiGPO, arXiv:2505.10978",
  advantage="gigpo",
  kl_coef=0.01,
  kl_estimator="k3",
  further={"collect.gamma": 0.95},
)
_preset(
  "hgpo",
  "HGPO, arXiv:2602.22817",
  advantage="hgpo",
  kl_coef=0.01,
  kl_estimator="k3",
  further={"collect.gamma": 0.95},
)
_preset(
  "rloo",
  "Back to Basics, arXiv:2402.14740",
  advantage="rloo",
  objective="policy_gradient",
  clip=None,
  aggregation="constant",
  kl_coef=0.03,
  kl_in="reward",
  kl_estimator="k1",
)
_preset(
  "reinforce_pp",
  "REINFORCE++, arXiv:2501.03262",
  advantage="reinforce_pp",
  kl_coef=0.01,
  kl_in="reward",
  kl_estimator="k1",
  note="The KL price is a turn's, not a token's.",
)
_preset(
  "reinforce_pp_baseline",
  "REINFORCE++, arXiv:2501.03262",
  advantage="reinforce_pp_baseline",
  kl_coef=1e-3,
  kl_estimator="k2",
)
_preset(
  "opo",
  "On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585",
  advantage="opo",
  objective="policy_gradient",
  clip=None,
  note="Exactly on-policy: keep queue.max_staleness=0 and one optimizer step"
  " an update.",
)
_preset(
  "gpg",
  "GPG, arXiv:2504.02546",
  advantage="gpg",
  objective="policy_gradient",
  clip=None,
)
_preset(
  "cispo",
  "MiniMax-M1, arXiv:2506.13585",
  advantage="grpo",
  objective="cispo",
  clip=(1.0, 4.0),
  further={"learner.dynamic_sampling": 9},
  note="The paper gives no upper bound; 5 is that of The Art of Scaling RL"
  " Compute, arXiv:2510.13786.",
)
_preset(
  "sapo",
  "SAPO, arXiv:2511.20347",
  advantage="grpo",
  objective="sapo",
  clip=None,
  aggregation="sequence_mean",
  sapo_tau_pos=1.0,
  sapo_tau_neg=1.05,
)
_preset(
  "pass_at_k",
  "Pass@K Policy Optimization, arXiv:2505.15201",
  advantage="pass_at_k",
  objective="policy_gradient",
  clip=None,
  pass_k=4,
  note="algorithm.pass_k at most collect.min_valid.",
)
_preset(
  "decoupled_ppo",
  "AReaL, arXiv:2505.24298",
  advantage="grpo",
  importance="mis",
  tis_cap=5.0,
  further={"learner.minibatches": 4},
  note="For queue.max_staleness > 0; tokens beyond the cap are left out, as"
  " in the authors' code.",
)

_preset(
  "ppo",
  "PPO, arXiv:1707.06347; GAE, arXiv:1506.02438",
  advantage="gae",
  gae_lambda=0.95,
  value_clip=0.2,
  further={"collect.gamma": 0.99, "learner.minibatches": 4},
  note="A value head on the policy's trunk; discount and lambda act between"
  " turns. algorithm.value_warmup trains the head alone at first.",
)
_preset(
  "remax",
  "ReMax, arXiv:2310.10505",
  advantage="remax",
  objective="policy_gradient",
  clip=None,
  aggregation="constant",
  note="One greedy episode more a group, which is never trained on.",
)
_preset(
  "clip_cov",
  "The Entropy Mechanism of RL, arXiv:2505.22617",
  advantage="grpo",
  objective="clip_cov",
  cov_share=2e-4,
  further={"learner.minibatches": 4},
  note="Its share is of 2e5 tokens; raise algorithm.cov_share for small"
  " batches, whose least is one token a buffer.",
)
_preset(
  "kl_cov",
  "The Entropy Mechanism of RL, arXiv:2505.22617",
  advantage="grpo",
  objective="kl_cov",
  clip=None,
  cov_share=2e-3,
  cov_kl_coef=1.0,
  further={"learner.minibatches": 4},
  note="See clip_cov.",
)
_preset(
  "distill",
  "On-Policy Distillation, arXiv:2306.13649",
  advantage="none",
  objective="policy_gradient",
  clip=None,
  distill_coef=1.0,
  note="Needs algorithm.teacher, a policy of the same tokenizer. With"
  " algorithm.advantage=grpo rewards count, too.",
)


_preset(
  "weighted_cloning",
  "Reward-weighted regression, as in arXiv:1910.00177",
  advantage="reward",
  objective="policy_gradient",
  clip=None,
  note="Rewards are weights: of demonstrations, or of recorded episodes"
  " (rollout.via=offline). A negative one unlearns.",
)
_preset(
  "filtered_cloning",
  "Filtered cloning, arXiv:2106.01345",
  advantage="filtered",
  objective="policy_gradient",
  clip=None,
  filter_reward=0.5,
  note="Imitates episodes of at least algorithm.filter_reward.",
)


_COLUMNS = {
    "advantage": (
        "advantage", "pass_k", "gae_lambda", "value_clip", "distill_coef",
        "filter_reward", "entropy_share",
    ),
    "objective": (
        "objective", "clip_low", "clip_high", "sapo_tau_pos", "sapo_tau_neg",
        "cov_share", "cov_kl_coef",
    ),
    "aggregation": ("loss_aggregation",),
    "correction": ("importance", "tis_cap"),
    "KL": ("kl_coef", "kl_in", "kl_estimator"),
    "filters": ("filter_truncated",),
}  # fmt: skip
_IMPLIED = ("learner.skip_zero_advantage",)
"""Follows from a KL in the loss, a value head or a teacher."""


def table() -> str:
  """Returns the presets as a Markdown table, a row each."""
  heads = ["name", *_COLUMNS, "beside it", "paper"]
  lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
  for name in PRESETS.names():
    preset = PRESETS.get(name)
    cells = [f"`{name}`"]
    for fields in _COLUMNS.values():
      cells.append(_cell(preset.settings, fields))
    cells.append(
      ", ".join(
        f"`{key}={value}`"
        for key, value in preset.settings.items()
        if not key.startswith("algorithm.") and key not in _IMPLIED
      )
    )
    cells.append(f"{preset.paper}. {preset.note}".rstrip(". ") + ".")
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)


def _cell(values: Mapping[str, Any], fields: tuple[str, ...]) -> str:
  """Returns the first field's value, then the others that the preset sets."""
  entries = [
    (field, values[f"algorithm.{field}"])
    for field in fields
    if f"algorithm.{field}" in values
  ]
  if not entries:
    return ""
  first, *further = entries
  name, value = first
  shown = value if isinstance(value, str) else f"{name}={value}"
  return ", ".join([shown, *(f"{name}={value}" for name, value in further)])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  words = sys.argv[1:] if argv is None else list(argv)
  if words:
    print(f"error: {words[0]}: it takes no arguments", file=sys.stderr)
    return 2
  print(table())
  return 0


if __name__ == "__main__":
  sys.exit(main())
