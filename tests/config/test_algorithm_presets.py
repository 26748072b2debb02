"""`algorithm=NAME` is the published algorithm, and any key goes before it."""

import pathlib

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.algorithms import presets

NAMES = presets.PRESETS.names()
DOCS = pathlib.Path(__file__).parents[2] / "docs"
PUBLISHED = {
  # Clip ranges, section 4.1; token-level loss; dynamic sampling.
  "dapo": dict(clip_low=0.2, clip_high=0.28, loss_aggregation="token_mean"),
  # Section 5.1.
  "gspo": dict(objective="gspo", clip_low=3e-4, clip_high=4e-4),
  # Section 4.1 of DeepSeekMath.
  "grpo": dict(kl_coef=0.04, kl_estimator="k3"),
  "grpo_constant": dict(advantage="grpo", loss_aggregation="constant"),
  "gdpo": dict(advantage="gdpo", kl_coef=0.0),
  "dart": dict(entropy_share=0.8, importance="tis"),
  "dr_grpo": dict(advantage="dr_grpo", loss_aggregation="constant"),
  "rloo": dict(advantage="rloo", kl_in="reward"),
  "sapo": dict(sapo_tau_pos=1.0, sapo_tau_neg=1.05),
  "gpg": dict(advantage="gpg", objective="policy_gradient"),
  "cispo": dict(objective="cispo", clip_low=1.0),
  "gigpo": dict(advantage="gigpo", gigpo_step_weight=1.0),
  "hgpo": dict(advantage="hgpo"),
  "reinforce_pp": dict(advantage="reinforce_pp"),
  "ppo": dict(advantage="gae", objective="grpo", clip_high=0.2),
  "remax": dict(advantage="remax", objective="policy_gradient"),
  # Section 4.2: r, omega_low and omega_high; k and beta.
  "clip_cov": dict(cov_share=2e-4, cov_low=1.0, cov_high=5.0),
  "kl_cov": dict(objective="kl_cov", cov_kl_coef=1.0),
  "distill": dict(advantage="none", distill_coef=1.0),
}
NEEDED = {
  "distill": ["algorithm.teacher=tiny_vl"],
  "gdpo": ["environment.reward={success: 1, format: 0.1}"],
}
own_preset = presets.AlgorithmPreset({"algorithm.clip_high": 0.5}, "nowhere")


def load(*overrides):
  return config_lib.load_config(["name=x", *overrides])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_brings_its_preset_and_can_be_built(name):
  config = load(f"algorithm={name}", *NEEDED.get(name, ()))
  assert config.algorithm.name == name
  values = loader.to_dict(config)
  for key, value in presets.get(name).settings.items():
    section, field = key.split(".")
    assert values[section][field] == value, key
  for field, value in PUBLISHED.get(name, {}).items():
    assert getattr(config.algorithm, field) == value, field
  parts.Algorithm.of(config.algorithm).check_sampling(config.sampling)
  assert "arXiv:" in presets.get(name).paper
  # The resolved file says the same without the name's help.
  again = config_lib.from_yaml(config.to_yaml())
  assert again == config


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_preset_is_a_setting(name):
  assert set(presets.get(name).settings) <= set(
    loader.leaves(train_config.TrainConfig)
  )


def test_any_key_goes_before_the_preset_in_any_order(tmp_path):
  for order in (1, -1):
    argv = ["algorithm=gspo", "algorithm.clip_high=0.01"][::order]
    config = load(*argv, "learner.minibatches=2")
    assert config.algorithm.clip_high == 0.01
    assert config.algorithm.clip_low == 3e-4
    assert config.learner.minibatches == 2
  file = tmp_path / "run.yaml"
  file.write_text("algorithm: {name: dapo, clip_low: 0.1}\n")
  config = load(str(file), "algorithm=gspo")
  assert config.algorithm.objective == "gspo"
  assert config.algorithm.clip_low == 0.1


def test_without_a_name_nothing_changes():
  assert load().algorithm == config_lib.TrainConfig().algorithm
  assert config_lib.TrainConfig().algorithm.name == ""


def test_a_preset_of_ones_own_is_named_by_its_path():
  config = load(f"algorithm={__name__}:own_preset")
  assert config.algorithm.clip_high == 0.5


@pytest.mark.parametrize(
  "argv, message",
  [
    (["algorithm=gsop"], "did you mean 'gspo'"),
    (["algorithm=json:dumps"], "not an AlgorithmPreset"),
    (["algorithm=gspo", "learner.groups_per_step=6"], "minibatches=4"),
    (["algorithm=pass_at_k", "algorithm.pass_k=9"], "group_size=8"),
    (["algorithm=grpo", "learner.skip_zero_advantage=true"], "kl_coef"),
    (["algorithm.kl_target=0.1"], "kl_coef"),
    (["algorithm.dual_clip=0.9"], "dual_clip=0.9"),
    (["algorithm=cispo", "algorithm.dual_clip=3"], "objective=cispo"),
    (["algorithm.veto=1e-4"], "importance=none"),
    (["algorithm.overlong_cache=10"], "overlong_tokens=0"),
    (
      ["algorithm=reinforce_pp", "learner.dynamic_sampling=1"],
      "dynamic_sampling=1",
    ),
    (
      [
        "algorithm=gdpo",
        "learner.dynamic_sampling=1",
        "environment.reward={success: 1, exact_match: 0.1}",
      ],
      "algorithm.advantage=gdpo learns",
    ),
    (["watchdog.stop=[unsloved]"], "did you mean 'unsolved'"),
    (
      ["algorithm=ppo", "collect.gamma=1", "algorithm.gae_bootstrap=true"],
      "gae_bootstrap=true",
    ),
    (["algorithm=ppo", "learner.dynamic_sampling=1"], "advantage=gae"),
    (
      ["algorithm=ppo", "learner.skip_zero_advantage=true"],
      "algorithm.advantage=gae",
    ),
    (["algorithm=distill"], "needs a teacher"),
    (["algorithm.teacher=tiny_vl"], "distill_coef=0"),
    (["algorithm.advantage=none"], "distill_coef=0"),
    (["algorithm.cov_low=6"], "cov_high=5"),
    (["algorithm.keep_sampling_mask=true"], "sampling.top_k=0"),
    (["sampling.top_p=0.9"], "keep_sampling_mask=true"),
    (
      [
        "algorithm.keep_sampling_mask=true",
        "sampling.top_k=20",
        "rollout.via=proxy",
      ],
      "rollout.via=in_process",
    ),
  ],
)
def test_what_cannot_be_is_refused(argv, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    load(*argv)


def test_some_learn_from_single_episodes():
  single = ["collect.group_size=1", "collect.min_valid=1"]
  for name in ("reinforce_pp", "ppo", "remax"):
    load(f"algorithm={name}", *single)
  with pytest.raises(config_lib.ConfigError, match="compares"):
    load("algorithm=rloo", *single)


def test_the_table_of_the_docs_is_the_code_s():
  text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
  assert presets.table() in text, (
    "docs/algorithms.md is out of date; its table is the output of"
    " python -m tunix.rl.multi_turn.learner.algorithms.presets"
  )
