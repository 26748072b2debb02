"""Resolves the names of an `AlgorithmConfig` to its five parts.

A name is one of the part's registry, or "package.module:attribute". Refuses
unknown names, naming the nearest known one, and sampling that the chosen parts
cannot learn from.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import aggregation
from tunix.rl.multi_turn.learner.algorithms import gae
from tunix.rl.multi_turn.learner.algorithms import importance
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import objectives

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm's settings and the functions that they name.

  Attributes:
    config: the settings.
    estimate: advantages of the turns of a group, or of a step's groups; or of
      the tokens of an episode, by a value head.
    aggregate: weights of tokens in the loss.
    correction: Correction of tokens sampled by other weights.
    objective: loss of a token.
    kl: price of a token's distance to the reference.
  """

  config: config_lib.AlgorithmConfig
  estimate: advantages.AnyEstimator | gae.TokenEstimator
  aggregate: aggregation.Aggregator
  correction: importance.Correction
  objective: objectives.Objective
  kl: kl.KlEstimator

  @classmethod
  def of(cls, config: config_lib.AlgorithmConfig) -> Algorithm:
    """Returns the algorithm that `config` names.

    Raises:
      ValueError: an unknown name.
      ImportError: a path to nothing.
    """
    return cls(
      config,
      estimate=advantages.adapted(
        _find(advantages.ESTIMATORS, config.advantage)
      ),
      aggregate=_find(aggregation.AGGREGATORS, config.loss_aggregation),
      correction=_find(importance.CORRECTIONS, config.importance),
      objective=_find(objectives.OBJECTIVES, config.objective),
      kl=_find(kl.ESTIMATORS, config.kl_estimator),
    )

  @property
  def policy_gradient_only(self) -> bool:
    """Whether a sequence of advantage 0 has no gradient at all."""
    config = self.config
    return (
      self.objective.uses_advantages
      and not config.kl_in_loss
      and config.entropy_coef == 0
      and config.distill_coef == 0
      and not self.has_critic
    )

  @property
  def has_critic(self) -> bool:
    """Whether a value head is trained beside the policy."""
    return self.objective.uses_advantages and isinstance(
      self.estimate, gae.TokenEstimator
    )

  @property
  def needs_greedy(self) -> bool:
    """Whether a greedy episode is played beside each group."""
    return isinstance(self.estimate, advantages.GreedyEstimator)

  def gae_options(self, gamma: float) -> gae.GaeOptions:
    """Returns the numbers of `advantage=gae`; `gamma` discounts a turn."""
    c = self.config
    return gae.GaeOptions(gamma, c.gae_lambda, c.gae_token_lambda)

  def advantage_options(self, gamma: float) -> advantages.AdvantageOptions:
    """Returns the numbers of the advantages; `gamma` discounts a turn."""
    c = self.config
    return advantages.AdvantageOptions(
      std_eps=c.std_eps,
      gamma=gamma,
      step_weight=c.gigpo_step_weight,
      history=c.hgpo_history,
      history_alpha=c.hgpo_alpha,
      pass_k=c.pass_k,
      filter_reward=c.filter_reward,
    )

  @property
  def objective_options(self) -> objectives.ObjectiveOptions:
    """Numbers of the objective."""
    fields = dataclasses.fields(objectives.ObjectiveOptions)
    return objectives.ObjectiveOptions(
      **{field.name: getattr(self.config, field.name) for field in fields}
    )

  @property
  def importance_options(self) -> importance.ImportanceOptions:
    """Numbers of the correction."""
    c = self.config
    return importance.ImportanceOptions(
      cap=c.tis_cap, low=c.mis_low, veto=c.veto
    )

  def check_sampling(self, sampling: policy_client.SamplingConfig) -> None:
    """Raises ValueError unless tokens sampled like this can be learned from."""
    if sampling.temperature <= 0:
      raise ValueError(
        f"temperature={sampling.temperature} must be > 0: greedy samples"
        " carry no policy gradient"
      )
    truncated = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    corrected = self.correction.needs_proximal
    has_mask = self.config.keep_sampling_mask
    if has_mask and not 0 < sampling.top_k <= policy_client.MAX_TOP_LOGPROBS:
      raise ValueError(
        f"keep_sampling_mask=true needs 0 < top_k <="
        f" {policy_client.MAX_TOP_LOGPROBS}, got top_k={sampling.top_k}: so"
        " many tokens are kept with each sampled one"
      )
    reproduced = has_mask or corrected
    if truncated and self.objective.uses_advantages and not reproduced:
      raise ValueError(
        f"top_k={sampling.top_k}, top_p={sampling.top_p}: the sampler's"
        " log-probs are of a truncated distribution, which the learner does"
        " not reproduce; sample without truncation, or set"
        " keep_sampling_mask=True or importance='tis'"
      )


def _find(operators: registry.Registry[T], name: str) -> T:
  return operators.get(name, "operator")
