"""Policies by name: architectures, custom factories, and their files."""

import asyncio
import json
import pathlib
import re
import sys
import types

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import custom_policy
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture
def module(monkeypatch):
  """A module of the user's, to put factories in."""
  policies = types.ModuleType("their_policies")
  monkeypatch.setitem(sys.modules, policies.__name__, policies)
  return policies


@pytest.fixture(scope="module")
def example():
  """docs/policies.md's own policy, as the module `my_policy`."""
  (code,) = re.findall(
    r"```python\n(import types\n.*?)```", DOCS.read_text(), re.DOTALL
  )
  assert len([line for line in code.splitlines() if line.strip()]) <= 40
  policies = types.ModuleType("my_policy")
  exec(compile(code, str(DOCS), "exec"), policies.__dict__)
  sys.modules["my_policy"] = policies
  yield policies
  del sys.modules["my_policy"]


def nano(layers=1, seed=0, compute_dtype="float32"):
  return checkpoint.create_policy(
    "nano", seed, layers=layers, compute_dtype=compute_dtype
  )


# --- built-in policies and directories ---------------------------------------


def test_every_built_in_is_created_by_its_name():
  kinds = {"tiny_vl": tiny_vl.TinyVL}
  for name in by_name.BUILT_IN:
    named = by_name.resolve(name)
    assert (named.name, named.tokenizer, named.weights) == (
      name,
      name if name == "smolvlm_tiny" else "tiny_vl",
      name,
    )
    assert not named.brings_weights
    assert named.takes_image_budget == (
      name in ("qwen3_5_tiny", "smolvlm_tiny")
      or ("qwen" in name and "_vl_" in name)
    )
    model, _, _ = named.create(seed=1)
    assert isinstance(model, kinds.get(name, qwen_text.QwenText))
  assert set(by_name.SHIPPED) == {"tiny_vl", "qwen3_vl_tiny"}


def test_a_directory_brings_its_weights(tmp_path):
  model, _, _ = checkpoint.create_policy("qwen3_text_tiny", seed=4)
  by_name.resolve("qwen3_text_tiny").save(tmp_path, model)
  named = by_name.resolve(str(tmp_path))
  assert named.brings_weights and named.weights == str(tmp_path)
  assert not named.takes_image_budget
  again, _, _ = named.load(named.weights)
  fresh, _, _ = named.create(seed=5)
  named.check(tmp_path, fresh)
  same = lambda other: (
    np.array_equal(other.model.norm.weight[...], model.model.norm.weight[...])
    and np.array_equal(
      other.model.embed_tokens.weight[...], model.model.embed_tokens.weight[...]
    )
  )
  assert same(again) and not same(fresh)


@pytest.mark.parametrize(
  "name, is_factory",
  [
    ("my_policy:create", True),
    ("a.b.c:Class.make", True),
    ("tiny_vl", False),
    ("runs/a:b/policy", False),
    ("~/a:b", False),
    ("a:", False),
    (":b", False),
  ],
)
def test_a_factory_is_told_from_a_path(name, is_factory):
  assert policy_settings.is_factory(name) == is_factory


# --- factories ---------------------------------------------------------------


def test_the_run_gives_what_the_signature_names(module):
  arguments = {}

  def create(*, layers=1, seed, screen):
    arguments.update(layers=layers, seed=seed, screen=screen)
    return nano(layers, seed)

  module.create = create
  named = by_name.resolve("their_policies:create")
  assert (named.tokenizer, named.weights) == ("", "")
  model, _, _ = named.create(
    7, None, (64, 48), compute_dtype="float32", layers=2
  )
  assert arguments == {"layers": 2, "seed": 7, "screen": (64, 48)}
  assert model.config.layers == 2


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"layer": 2}, "no argument 'layer'; did you mean 'layers'?"),
    ({"layers": 2}, "needs the argument 'width'; set policy.config.width"),
    (
      {"width": 1, "layers": 2, "compute_dtype": "bfloat16"},
      "takes no compute_dtype, so policy.dtype=bfloat16",
    ),
  ],
)
def test_arguments_that_do_not_fit_are_named(module, changes, message):
  module.create = lambda width, layers=1, seed=0: nano(layers, seed)
  named = by_name.resolve("their_policies:create")
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    named.create(0, **changes)
  assert "their_policies:create" in str(error.value)


def without(original, name):
  """Returns an object like `original` without one attribute."""
  return types.SimpleNamespace(
    **{
      key: getattr(original, key)
      for key in dir(original)
      if not key.startswith("__") and key != name
    }
  )


class Bare(nnx.Module):
  """Has what its attributes are set to."""


def bare(model, lacking):
  policy = Bare()
  for name in ("encode_images", "init_cache", "extend", "logits", "config"):
    if name != lacking:
      setattr(policy, name, nnx.static(getattr(model, name)))
  return policy


@pytest.mark.parametrize(
  "edit, message",
  [
    (lambda m, p, t: (m, p), "must return the tuple"),
    (lambda m, p, t: ("m", p, t), "the model is a str"),
    (lambda m, p, t: (bare(m, ""), p, t), "no method '__call__'"),
    (lambda m, p, t: (m, without(p, "patchify"), t), "no method 'patchify'"),
    (
      lambda m, p, t: (m, without(p, "patch_bytes"), t),
      "no attribute 'patch_bytes'",
    ),
    (lambda m, p, t: (m, p, "t"), "the tokenizer is a str"),
  ],
)
def test_what_a_factory_must_return_is_checked(module, edit, message):
  module.create = lambda: edit(*nano())
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    by_name.resolve("their_policies:create").create()
  assert "their_policies:create" in str(error.value)


@pytest.mark.parametrize(
  "lacking", ["encode_images", "init_cache", "extend", "logits"]
)
def test_a_missing_method_is_named(module, lacking):
  class Model(Bare):
    def __call__(self, inputs):
      return inputs

  def create():
    model, processor, tokenizer = nano()
    policy = Model()
    for name in ("encode_images", "init_cache", "extend", "logits", "config"):
      if name != lacking:
        setattr(policy, name, nnx.static(getattr(model, name)))
    return policy, processor, tokenizer

  module.create = create
  with pytest.raises(ValueError, match=f"Model.*no method '{lacking}'"):
    by_name.resolve("their_policies:create").create()


def test_placeholders_must_be_banned(module):
  def create():
    model, processor, tokenizer = nano()
    model.config = nnx.static(
      types.SimpleNamespace(vocab_size=9999, banned_token_ids=())
    )
    return model, processor, tokenizer

  module.create = create
  with pytest.raises(ValueError, match="banned_token_ids lacks.*image_pad"):
    by_name.resolve("their_policies:create").create()


@pytest.mark.parametrize(
  "name, message",
  [
    ("no_such_module:create", "no_such_module"),
    ("their_policies:nothing", "has no 'nothing'"),
    ("their_policies:number", "is a int; give a function"),
    ("their_policies:half", "attribute save, but not its counterpart"),
  ],
)
def test_a_name_without_a_factory_is_refused(module, name, message):
  module.number = 3
  module.half = lambda: None
  module.half.save = print
  with pytest.raises(ValueError, match=message) as error:
    by_name.resolve(name)
  assert name in str(error.value)


# --- files of factories ------------------------------------------------------


def test_what_a_run_has_saved_loads_by_the_same_name(module, tmp_path):
  module.create = nano
  named = by_name.resolve("their_policies:create")
  model, _, _ = named.create(seed=3)
  model.embedding.set_value(model.embedding[...].astype(jnp.bfloat16))
  named.save(tmp_path, model)
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["factory"] == "their_policies:create"
  named.check(tmp_path, model)
  again, _, _ = named.load(tmp_path)
  want = checkpoint.named_parameters(model)
  for key, value in checkpoint.named_parameters(again).items():
    np.testing.assert_array_equal(
      np.asarray(value, np.float32), np.asarray(want[key], np.float32)
    )
  with pytest.raises(
    ValueError, match="policy=their_policies:create warm_start.source=path"
  ):
    checkpoint.load_policy(tmp_path)  # A file does not decide what code runs.
  with pytest.raises(ValueError, match="tensor blocks.1.* absent there"):
    named.load(tmp_path, layers=2)
  (tmp_path / custom_policy.WEIGHTS).write_bytes(b"half")
  with pytest.raises(ValueError, match="not a whole safetensors file"):
    named.check(tmp_path, model)
  (tmp_path / custom_policy.WEIGHTS).unlink()
  with pytest.raises(FileNotFoundError, match="has no model.safetensors"):
    named.load(tmp_path)
  with pytest.raises(FileNotFoundError, match="not a directory"):
    named.load(tmp_path / "nowhere")


def test_a_factory_may_keep_files_of_its_own(module, tmp_path):
  class Factory:
    def __call__(self, seed=0):
      return nano(seed=seed)

    def save(self, directory, model):
      np.save(directory / "mine.npy", np.asarray(model.embedding[...]))

    def load(self, directory, model):
      model.embedding.set_value(jnp.asarray(np.load(directory / "mine.npy")))

  module.create = Factory()
  named = by_name.resolve("their_policies:create")
  model, _, _ = named.create(seed=3)
  named.save(tmp_path / "p", model)
  assert not (tmp_path / "p" / custom_policy.WEIGHTS).exists()
  again, _, _ = named.load(tmp_path / "p")
  np.testing.assert_array_equal(again.embedding[...], model.embedding[...])


# --- the example -------------------------------------------------------------


def test_the_documented_policy_is_sampled_from_and_learns(example, tmp_path):
  """Engine and learner agree on it, and it loads by its name again."""
  named = by_name.resolve("my_policy:create")
  model, processor, encoder = named.create(seed=1, width=16)
  store = images_lib.ImageStore()
  prompt = np.array(encoder.encode("Add 3 and 4.").ids, np.int32)
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=2,
      context_length=64,
      decode_rows=(2,),
      prefill_rows=(2,),
      prefill_buckets=(32,),
    ),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:
    got = asyncio.run(
      engine.generate(
        policy_client.TokenPrompt(prompt, ()),
        policy_client.SamplingParams(max_new_tokens=8, seed=0),
        session="s",
      )
    )
  n, m = len(prompt), len(got.tokens)
  sequence = trajectory.TokenSequence(
    np.append(prompt, got.tokens),
    np.arange(n + m) >= n,
    np.append(np.zeros(n, np.float32), got.logprobs),
    np.append(np.full(n, -1, np.int32), got.versions),
    np.zeros(n + m, np.int32),
    (),
  )
  learner = learner_lib.Learner(
    model,
    processor,
    store,
    learner_lib.LearnerConfig(rows=1, row_length=64),
    learner_lib.AlgorithmConfig(objective="behaviour_cloning"),
  )
  (again,) = learner.sequence_logprobs([sequence])
  np.testing.assert_allclose(again, sequence.logprobs, rtol=0, atol=1e-5)
  metrics = learner.update_on_sequences([sequence])
  assert metrics["grad_norm"] > 0
  named.save(tmp_path, learner.policy())
  learned, _, _ = named.load(tmp_path, width=16)
  assert not np.array_equal(learned.table[...], model.table[...])
  np.testing.assert_array_equal(learned.table[...], learner.policy().table[...])
