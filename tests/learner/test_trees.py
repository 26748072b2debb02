"""Rows that are trees of prefixes give what each sequence gives by itself."""

import dataclasses

from flax import nnx
import jax
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import reference
from tunix.rl.multi_turn.learner.batches import minibatches
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy import text_inputs
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

from tests.learner import learner_cases
from tests.policy import qwen_sharding_script
from tests.policy import text_sharding_script

ROWS = dict(rows=2, row_length=96, patches=512, targets=96)
FAMILIES = (
  "qwen2_vl",
  "qwen2_5_vl",
  "qwen3_vl",
  "qwen3_vl_moe",
  "glm4v",
  "glm4v_moe",
  "gemma3",
)
SETTINGS = (
  dict(loss_aggregation="sequence_mean"),
  dict(loss_aggregation="constant"),
  dict(objective="gspo", kl_coef=0.1),
  dict(advantage="gae", value_learning_rate=1e-2, minibatches=2),
)


def sharp(config):
  """A random model whose attention is far from uniform."""
  model = hf_checkpoint.model_class(config)(config, nnx.Rngs(0))
  nnx.update(
    model, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, nnx.state(model))
  )
  return model


def family_case(family):
  config, processor = qwen_sharding_script.small(family)
  return learner_cases.Case(own=(sharp(config), processor))


def test_loss_and_gradients_are_those_of_each_sequence_by_itself(case):
  examples = learner_cases.examples_of(case.rewritten(3, 4, turns=4))
  check_gradients(case, examples, {})


@pytest.mark.parametrize(
  "family", trials.by_default([], FAMILIES, unlike=("qwen3_vl_moe", "gemma3"))
)
def test_every_family_gives_what_each_sequence_gives(family):
  case = family_case(family)
  examples = learner_cases.examples_of(case.rewritten(2, 3))
  check_gradients(case, examples)
  sequences = [e.sequence for e in examples]
  alone, together = (
    case.learner(tree=tree, **ROWS).sequence_logprobs(sequences)
    for tree in ("false", "true")
  )
  for a, b in zip(alone, together, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def check_gradients(case, examples, shape=ROWS):
  flat = case.learner(tree="false", **shape)
  want, want_sums, apart = learner_cases.gradients(flat, examples)
  tree = case.learner(tree="true", **shape)
  got, sums, shared = learner_cases.gradients(tree, examples)
  assert shared.row_tokens < 0.8 * apart.row_tokens
  assert shared.targets == apart.targets
  np.testing.assert_allclose(sums.loss, want_sums.loss, atol=1e-6)
  scale = max(float(np.abs(g).max()) for g in want.values())
  assert scale > 0
  assert learner_cases.largest_difference(got, want) <= 1e-5 * scale
  for name, value in want_sums.total.items():
    np.testing.assert_allclose(
      sums.total[name], value, rtol=1e-4, atol=1e-4, err_msg=name
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ("llama", "gemma3_text"))
def test_text_families_give_what_each_sequence_gives(family):
  config = qwen_checkpoint.small_config("qwen3_text_tiny")
  windows = text_sharding_script.WINDOWS if family == "gemma3_text" else {}
  config = dataclasses.replace(
    config,
    family=family,
    text=dataclasses.replace(config.text, **windows),
    tie_word_embeddings=family != "llama",
  )
  processor = text_inputs.TextProcessor(family)
  case = learner_cases.Case(own=(sharp(config), processor))
  examples = learner_cases.examples_of(case.rewritten(2, 3))
  check_gradients(case, examples, ROWS | {"patches": 0})


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_updates_are_those_of_each_sequence_by_itself(case, settings):
  """Of every way to weigh tokens, with a KL and with a value head."""
  groups = [case.rewritten(2, 3), case.rewritten(2, 3)]
  options = dict(skip_zero_advantage=False, groups_per_step=2, adam_eps=1e-3)
  reference = {"reference": case.model} if "kl_coef" in settings else {}
  flat, tree = (
    case.learner(tree=tree, **options, **settings, **reference)
    for tree in ("false", "true")
  )
  for step in groups:
    want, got = flat.update(step), tree.update(step)
    assert got["shared_tokens"] > 0 == want["shared_tokens"]
    for name in ("loss", "grad_norm", "kl", "value_loss"):
      if name in want:
        assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
  difference = learner_cases.largest_difference(
    flat.parameters(), tree.parameters()
  )
  assert difference < 1e-5


def test_a_sequence_does_not_depend_on_its_neighbours(case):
  learner = case.learner(tree="true")
  sequences = [
    e.sequence for e in learner_cases.examples_of(case.rewritten(2, 4))
  ]
  together = learner.sequence_logprobs(sequences)
  every_other = learner.sequence_logprobs(sequences[::2])
  for a, b in zip(together[::2], every_other, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  for sequence, want in zip(sequences, together):
    (alone,) = learner.sequence_logprobs([sequence])
    np.testing.assert_allclose(alone, want, atol=1e-6)


CONFIG = config_lib.LearnerConfig(groups_per_step=1)
ALWAYS = dataclasses.replace(CONFIG, tree="true")


def test_recurrent_layers_fall_back_with_a_message(caplog):
  config, _ = qwen_sharding_script.small("qwen3_5")
  model = hf_checkpoint.abstract_model(config, None)
  assert not minibatches.uses_tree(CONFIG, model)
  assert "learner.tree=auto" in caplog.text
  assert "state goes on from each token" in caplog.text
  with pytest.raises(ValueError, match="learner.tree=true.*tree=auto"):
    minibatches.uses_tree(ALWAYS, model)


def test_a_teacher_that_reads_no_trees_is_refused(case):
  config, _ = qwen_sharding_script.small("qwen3_5")
  model = hf_checkpoint.abstract_model(config, None)
  with pytest.raises(ValueError, match="reads no trees; set learner.tree=fal"):
    reference.Teacher(
      model, case.model, None, temperature=1.0, chunk=8, tree=True
    )


def test_auto_is_off_on_a_tpu_only(case):
  assert minibatches.uses_tree(CONFIG, case.model)
  with compiling.compile_for("tpu"):
    assert not minibatches.uses_tree(CONFIG, case.model)
    assert minibatches.uses_tree(ALWAYS, case.model)
