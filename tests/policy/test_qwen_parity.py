"""Qwen2.5-VL and Qwen3-VL against transformers.

Packed, padded batches of ours; the reference gets each sequence alone. Errors
of gradients are relative to the largest entry of the tensor's gradient.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import published_sizes  # noqa: E402
import qwen_reference  # noqa: E402
import trials as cases  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy.models.qwen import qwen_config  # noqa: E402

from tests.policy import test_hf_checkpoint as checkpoints  # noqa: E402

pytestmark = pytest.mark.peer("transformers")
PARAMETERS = published_sizes.PUBLISHED
TOL = 1e-5
# Rounding in float32 reaches 1.1e-5 in the gradients of GLM's vision tower.
GRADIENT_TOL = {"glm4v": 2e-5}
CASES = 50

# What rounding depends on, each once: experts, states, windows, norms, towers.
UNLIKE = (
    "qwen2_vl", "qwen3_vl", "qwen3_5_moe", "opencua", "glm4v",
    "glm4v_moe groups", "gemma3 wide", "smolvlm", "idefics3",
)  # fmt: skip
configuration = pytest.mark.parametrize(
  "name",
  cases.by_default(
    checkpoints.DIFFERENT, qwen_reference.CONFIGS, unlike=UNLIKE
  ),
)
family = pytest.mark.parametrize(
  "name",
  cases.by_default(
    checkpoints.DIFFERENT, qwen_config.FAMILIES, unlike=checkpoints.UNLIKE
  ),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
  """Name of a configuration -> its model of transformers."""

  @functools.cache
  def make(name):
    return qwen_reference.Reference(
      qwen_reference.CONFIGS[name], tmp_path_factory.mktemp("qwen")
    )

  return make


@dataclasses.dataclass(frozen=True)
class Trial:
  batch: qwen_reference.Batch
  weights_BT: np.ndarray
  want: qwen_reference.Results
  got: qwen_reference.Results


def enough(batches):
  """Whether they have `CASES` sequences, of each number of images."""
  sequences = [case for batch in batches for case in batch.cases]
  counts = {len(case.images) for case in sequences}
  return (
    len(batches) > 1
    and len(sequences) >= CASES
    and counts == set(range(7))
    and rows_share_an_image(batches)
  )


def rows_share_an_image(batches):
  shown = [
    [(image, case.row) for case in batch.cases for image in case.images]
    for batch in batches
  ]
  return any(
    one == two and row != other
    for images in shown
    for one, row in images
    for two, other in images
  )


@pytest.fixture(scope="module")
def trials(reference):
  """Name of a configuration -> batches of `CASES` sequences at least."""

  @functools.cache
  def make(name):
    model = reference(name).policy()
    assert model.config == qwen_reference.CONFIGS[name]
    run = qwen_reference.differentiator(model)
    rng = np.random.default_rng(list(qwen_reference.CONFIGS).index(name))
    made_trials = []
    while not enough([trial.batch for trial in made_trials]):
      batch = qwen_reference.draw_batch(
        rng, processor=reference(name).processor
      )
      _, same = qwen_reference.targets(batch.inputs)
      weights = np.where(same, rng.normal(size=same.shape), 0)
      weights = weights.astype(np.float32)
      want = reference(name).run(batch, weights)
      got = run(batch, weights, want)
      made_trials.append(Trial(batch, weights, want, got))
    return tuple(made_trials)

  return make


def relative(got, want):
  """The largest error over the largest value."""
  return np.abs(got - want).max() / np.abs(want).max()


def assert_gradients_close(got, want, tolerance=TOL):
  assert set(got.gradients) == set(want.gradients)
  for key, value in want.gradients.items():
    tower = key.startswith(("vision_tower.", "model.vision_model."))
    if tower and key.endswith("k_proj.bias"):
      # Without positions that turn, it moves all scores of a query alike.
      other = got.gradients[key.replace("k_proj", "q_proj")]
      assert np.abs(value).max() < 1e-12
      assert np.abs(got.gradients[key]).max() <= tolerance * np.abs(other).max()
      continue
    error = relative(got.gradients[key], value)
    # Few numbers, each a sum over all tokens that mostly cancels: 6e-6 as a
    # run compiles, up to 2.3e-5 as tests do (see conftest.py).
    # A bias of keys moves a softmax only as far as positions turn it.
    few = key.endswith(("A_log", "dt_bias", "k_proj.bias"))
    assert error <= tolerance * (1 + 2 * few), f"{key}: {error:.1e}"


# --- logits and gradients ----------------------------------------------------


@configuration
def test_the_cases_are_of_all_kinds(name, trials):
  batches = [trial.batch for trial in trials(name)]
  cases = [(batch, case) for batch in batches for case in batch.cases]
  assert len(cases) >= CASES
  assert {len(case.images) for _, case in cases} == set(range(7))
  grids = {(i.rows, i.columns) for _, case in cases for i in case.images}
  traits = qwen_reference.CONFIGS[name].traits
  if traits.mutual_images:
    assert len(grids) == 1
    _some_windows_end_in_images(name, batches)
  elif traits.tower == "idefics3":
    sides = {i.size for _, case in cases for i in case.images}
    assert {tiles for tiles, _ in grids} == {3, 5} and len(sides) >= 12
  else:
    assert len(grids) >= 12
    # More patches than learned positions, and fewer; whole windows, and not.
    assert min(min(g) for g in grids) == 2 and max(max(g) for g in grids) == 8
  assert any(case.start > 0 for _, case in cases if case.start < 9)
  for batch in batches:
    inputs = batch.inputs
    b, s = len(inputs.tokens), len(inputs.patches)
    assert (b, s) == (4, 2)  # Two rows share each of two buffers.
    assert len(batch.cases) > b
    assert (inputs.segment_ids == 0).any()
    assert (inputs.patch_segments == 0).any()
    # Attention among patches goes block by block.
    assert inputs.patches.shape[1] > 3 * qwen_reference.MAX_PATCHES
  assert rows_share_an_image(batches)


def _some_windows_end_in_images(name, batches):
  """A word's window begins after the first token of an image it sees."""
  window = qwen_reference.CONFIGS[name].text.sliding_window
  cut = 0
  for batch in batches:
    is_vision = batch.inputs.vision_index >= 0
    for case in batch.cases:
      row = is_vision[case.place]
      for q in np.flatnonzero(~row):
        first = q - window + 1
        cut += first > 0 and row[first] and row[first - 1]
  assert cut > 20


@configuration
def test_logits_and_logprobs_are_the_references(name, trials):
  for trial in trials(name):
    np.testing.assert_allclose(
      trial.got.logits, trial.want.logits, rtol=0, atol=TOL
    )
    np.testing.assert_allclose(
      trial.got.logprobs, trial.want.logprobs, rtol=0, atol=TOL
    )
    assert 0.3 < trial.want.logits.std() < 3  # Of order 1.


@configuration
def test_gradients_of_parameters_are_the_references(name, trials):
  for trial in trials(name):
    assert_gradients_close(trial.got, trial.want, GRADIENT_TOL.get(name, TOL))


@configuration
def test_gradients_of_pixels_are_the_references(name, trials):
  for trial in trials(name):
    got, want = trial.got.pixel_gradient, trial.want.pixel_gradient
    assert relative(got, want) <= GRADIENT_TOL.get(name, TOL)
    padding = trial.batch.inputs.patch_segments == 0
    assert not got[padding].any() and want.any()


# Each tower has a loop of its own.
VARIANTS = [
  ("qwen3_vl", {"remat": "dots"}),
  ("qwen3_vl", {"scan_layers": True, "remat": "none"}),
  ("qwen3_vl_moe", {"scan_layers": True, "remat": "block"}),
  ("qwen2_5_vl", {"scan_layers": True, "remat": "dots"}),
  ("qwen2_vl", {"scan_layers": True, "remat": "dots"}),
]


@pytest.mark.parametrize("name, changes", VARIANTS)
@pytest.mark.slow
def test_scanning_and_rematerialising_change_nothing(
  name, changes, reference, trials
):
  trial = trials(name)[0]
  model = reference(name).policy(**changes)
  assert model.language_model.stacked == changes.get("scan_layers", False)
  got = qwen_reference.differentiator(model)(
    trial.batch, trial.weights_BT, trial.want
  )
  np.testing.assert_allclose(got.logits, trial.got.logits, rtol=0, atol=TOL)
  assert_gradients_close(got, trial.got)
  assert relative(got.pixel_gradient, trial.got.pixel_gradient) <= TOL


@family
def test_a_batch_of_text_has_no_patches(name, reference):
  rng = np.random.default_rng(1)
  batch = qwen_reference.draw_batch(rng, length=200, patches=0)
  assert batch.inputs.patches.shape[:2] == (2, 0) and len(batch.cases) > 20
  got = qwen_reference.scorer(reference(name).policy())(batch)
  want = reference(name).run(batch)
  np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=TOL)


def test_a_prompt_stored_once_is_the_prefix_of_its_completions(reference):
  rng = np.random.default_rng(18)
  batch = qwen_reference.draw_batch(rng, rows=1, buffers=1, packed=False)
  inputs, (case,) = batch.inputs, batch.cases
  cut = int(np.flatnonzero(inputs.vision_index[0] >= 0).max()) + 1
  ends = case.end, case.end - 1
  assert len(case.images) > 1 and 0 < cut < min(ends) - 1
  # The reference gets two sequences that differ after the prompt.
  tokens = np.repeat(inputs.tokens, 2, axis=0)
  tokens[1, cut:] = rng.integers(0, qwen_reference.WORDS, tokens[1, cut:].shape)
  twice = dataclasses.replace(inputs, tokens=tokens)
  cases = tuple(
    dataclasses.replace(case, row=row, end=end) for row, end in enumerate(ends)
  )
  want = reference("qwen3_vl").run(qwen_reference.Batch(twice, cases)).logits
  # Ours: prompt, completion, completion, whose positions both follow on it.
  parts = [(0, 0, cut), (0, cut, ends[0]), (1, cut, ends[1])]
  pick = np.concatenate([np.arange(a, b) for _, a, b in parts])
  lengths = [b - a for _, a, b in parts]
  until = np.repeat([sum(lengths), sum(lengths[:2]), sum(lengths)], lengths)
  tokens = np.concatenate([tokens[row, a:b] for row, a, b in parts])[None]
  packed = dataclasses.replace(
    inputs,
    tokens=tokens,
    positions=inputs.positions[:, pick],
    vision_index=inputs.vision_index[:, pick],
    segment_ids=np.ones_like(tokens),
    seen_until=until[None],
  )
  score = qwen_reference.scorer(reference("qwen3_vl").policy())
  got = score(qwen_reference.Batch(packed, ())).logits[0]
  want = np.concatenate([want[row, a:b] for row, a, b in parts])
  np.testing.assert_allclose(got, want, rtol=0, atol=TOL)


# Largest error of a log-prob in bfloat16, from what was measured over 250
# sequences. Rounding now and then sends a token to another expert.
BFLOAT16_BOUNDS = {
  "smolvlm": 0.08,
  "idefics3": 0.08,
  "qwen3_vl": 0.08,
  "qwen3_vl tied": 0.1,
  "qwen3_vl_moe": 1.1,
  "qwen2_5_vl": 0.08,
  "qwen2_vl": 0.08,
  "qwen3_5": 0.3,
  "qwen3_5_moe": 1.5,
  "opencua": 0.08,
  "glm4v": 0.08,
  "glm4v_moe": 1.1,
  "glm4v_moe groups": 1.1,
  "gemma3": 0.1,
  "gemma3 wide": 0.1,
}


@pytest.mark.parametrize(
  "name",
  cases.by_default(
    [], BFLOAT16_BOUNDS, unlike=(*checkpoints.DIFFERENT, *UNLIKE)
  ),
)
def test_bfloat16_is_as_exact_as_the_references(name, reference, trials):
  policy = reference(name).policy(compute_dtype="bfloat16")
  score = qwen_reference.scorer(policy)
  module = reference(name).in_bfloat16()
  own_errors, reference_errors = [], []
  for trial in trials(name):
    _, same = qwen_reference.targets(trial.batch.inputs)
    exact = trial.want.logprobs[same]
    other = reference(name).run(trial.batch, module=module)
    own_errors.append(np.abs(score(trial.batch).logprobs[same] - exact))
    reference_errors.append(np.abs(other.logprobs[same] - exact))
  own_errors = np.concatenate(own_errors)
  reference_errors = np.concatenate(reference_errors)
  assert 0 < own_errors.max() <= BFLOAT16_BOUNDS[name]  # 0 were float32.
  assert own_errors.mean() <= 1.5 * reference_errors.mean()


# --- decoding ----------------------------------------------------------------

CHUNK = 24


def decode(model, inputs, vision, lengths_B, rng):
  """Hidden states [B, T, D] by way of a cache: chunks, then single tokens."""
  extend = qwen_reference.compiled(
    model, lambda model, *args: model.extend(*args)
  )
  b, t = inputs.tokens.shape
  # What a slot held before is never attended to.
  noise = lambda x: rng.normal(scale=100, size=x.shape).astype(x.dtype)
  cache = jax.tree.map(noise, model.init_cache(b, t + 5))
  is_vision = inputs.vision_index >= 0
  text_from_B = t - np.argmax(is_vision[:, ::-1], axis=1)
  text_from_B[~is_vision.any(axis=1)] = 0
  prompt_B = np.maximum(lengths_B - 6, text_from_B)
  hidden = np.zeros((b, t, model.config.text.hidden_size), np.float32)
  done_B = np.zeros(b, np.int32)
  while (done_B < lengths_B).any():
    prefill = (done_B < prompt_B).any()
    width, target_B = (CHUNK, prompt_B) if prefill else (1, lengths_B)
    # Also 0: a row that waits.
    count_B = np.minimum(rng.integers(0, width + 1, b), target_B - done_B)
    count_B = count_B.astype(np.int32)
    if model.config.whole_image_tokens:
      count_B = _to_image_ends(is_vision, done_B, count_B)
    column = done_B[:, None] + np.arange(width)
    place = np.arange(b)[:, None], np.minimum(column, t - 1)
    real = np.arange(width) < count_B[:, None]
    junk = rng.integers(0, 9, real.shape).astype(np.int32)
    new, cache = extend(
      np.where(real, inputs.tokens[place], junk),
      np.where(real[..., None], inputs.positions[place], junk[..., None]),
      done_B,
      count_B,
      cache,
      *(
        (np.where(real, inputs.vision_index[place], junk), vision)
        if prefill and vision is not None
        else ()
      ),
    )
    rows = place[0].repeat(width, axis=1)
    hidden[rows[real], column[real]] = np.asarray(new)[real]
    done_B = done_B + count_B
  return hidden


def _to_image_ends(is_vision_BT, done_B, count_B):
  """Counts that end no row's call within an image."""
  counts = count_B.copy()
  for row, start in enumerate(done_B):
    while counts[row] and start + counts[row] < is_vision_BT.shape[1]:
      end = start + counts[row]
      if not is_vision_BT[row, end - 1 : end + 1].all():
        break
      counts[row] -= 1
  return counts


@family
def test_layers_of_two_kinds_are_not_stacked(name, reference):
  model = reference(name).policy(scan_layers=True)
  traits = model.config.traits
  mixed = traits.linear or traits.sigmoid_router or traits.windows
  assert model.language_model.stacked == (not mixed)


@pytest.mark.parametrize(
  "name, patches, scan_layers",
  cases.by_default(
    # The engine's tests decode with the others: test_engine_states.py with
    # Qwen3.5, test_engine_families.py with experts.
    [("qwen2_5_vl", 800, False)],
    # OpenCUA's decoder is Qwen2.5-VL's. The scan of stacked layers is that
    # of all families; those with layers of two kinds have none.
    [
      *(
        (name, 800, False) for name in qwen_config.FAMILIES if name != "opencua"
      ),
      ("qwen3_vl", 0, False),
      ("qwen3_vl", 800, True),
      ("qwen3_vl_moe", 800, True),
    ],
    unlike=[
      *(
        (name, 800, False)
        for name in (*checkpoints.DIFFERENT, *checkpoints.UNLIKE)
      ),
      ("qwen3_vl", 0, False),
      ("qwen3_vl_moe", 800, True),
    ],
  ),
)
def test_decoding_with_a_cache_equals_the_whole_forward(
  name, patches, scan_layers, reference
):
  rng = np.random.default_rng(11)
  tiles = qwen_reference.CONFIGS[name].traits.tower == "idefics3"
  batch = qwen_reference.draw_batch(
    rng,
    length=150 * (1 + tiles),
    patches=patches,
    packed=False,
    **({"processor": reference(name).processor} if tiles else {}),
  )
  lengths = np.array([case.end for case in batch.cases])
  if patches:
    assert lengths.max() > 2 * CHUNK and len(set(lengths)) > 1 + (not tiles)
  model = reference(name).policy(scan_layers=scan_layers)
  assert model.language_model.stacked == scan_layers

  def whole(model, i):
    vision = None
    if patches:
      vision = model.encode_images(
        i.patches, i.patch_segments, i.patch_positions
      )
    return model(i), vision

  want, vision = qwen_reference.compiled(model, whole)(batch.inputs)
  got = decode(model, batch.inputs, vision, lengths, rng)
  for case in batch.cases:
    np.testing.assert_allclose(
      got[case.place], want[case.place], rtol=0, atol=TOL
    )


# --- configurations ----------------------------------------------------------


def _sizes():
  """The smallest of three families; the others, a sample of them, are slow."""
  by_family = {}
  for name in sorted(PARAMETERS, key=PARAMETERS.get):
    by_family.setdefault(published_sizes.SIZES[name].family, []).append(name)
  larger = [name for _, *names in by_family.values() for name in names]
  return [
    *(
      pytest.param(
        names[0],
        marks=() if family in checkpoints.DIFFERENT else pytest.mark.slow,
      )
      for family, names in by_family.items()
    ),
    *(pytest.param(n, marks=pytest.mark.slow) for n in cases.some(larger)),
  ]


def test_all_published_sizes_are_counted():
  assert set(PARAMETERS) == set(published_sizes.SIZES)


@pytest.mark.parametrize("name", _sizes())
def test_a_published_size_has_the_references_parameters(name):
  config = published_sizes.SIZES[name]
  with torch.device("meta"):
    module = qwen_reference.build(config)
  # A router's correction, which is not trained, is in the files as well.
  want = {
    qwen_reference.file_key(config, key): tuple(w.shape)
    for key, w in module.state_dict().items()
  }
  if config.family == "gemma3":
    del want["language_model.lm_head.weight"]  # Tied.
  elif config.tie_word_embeddings:
    del want["lm_head.weight"]
  # Stacked layers have the same keys, and are made in a fraction of the time.
  abstract = hf_checkpoint.abstract_model(
    dataclasses.replace(config, scan_layers=True)
  )
  got = {
    key: tensor.shape
    for tensor in hf_checkpoint.tensors_of(abstract)
    for key in tensor.keys
  }
  assert set(got) == set(want)
  for key, shape in got.items():
    # Experts lie the other way round in the published files.
    swapped = ".experts." in key
    assert want[key] == ((shape[0], *shape[:0:-1]) if swapped else shape), key
  count = sum(np.prod(shape, dtype=np.int64) for shape in got.values())
  corrections = sum(
    np.prod(shape, dtype=np.int64)
    for key, shape in got.items()
    if key.endswith("correction_bias")
  )
  assert count == corrections + sum(w.numel() for w in module.parameters())
  assert count == PARAMETERS[name]


@pytest.mark.parametrize("name", published_sizes.SIZES)
def test_a_configuration_survives_its_file(name):
  config = published_sizes.SIZES[name]
  raw = json.loads(json.dumps(qwen_config.to_hf(config)))
  assert qwen_config.from_hf(raw) == config


def edited(name, changes):
  """The `config.json` of a size with other values; None = without."""
  raw = qwen_config.to_hf(published_sizes.SIZES[name])
  for path, value in changes.items():
    *sections, key = path.split(".")
    section = raw
    for part in sections:
      section = section[part]
    section[key] = value
    if value is None:
      del section[key]
  return raw


QWEN3, MIXTURE, QWEN2 = "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen2.5-VL-7B"
TEXT, VISION = "text_config", "vision_config"
ROPE = "text_config.rope_parameters"


@pytest.mark.parametrize(
  "name, section, field, value, message",
  [
    (QWEN3, "", "model_type", "gemma3n", "='gemma3n' is none of"),
    (QWEN3, "", "model_type", None, "=None is none of"),
    (QWEN3, TEXT, "hidden_act", "gelu", "text hidden_act='gelu'"),
    (QWEN2, TEXT, "hidden_act", "relu", "text hidden_act='relu'"),
    (QWEN3, VISION, "hidden_act", "silu", "has gelu_pytorch_tanh"),
    (QWEN2, VISION, "hidden_act", "gelu", "qwen2_5_vl has silu"),
    (QWEN3, ROPE, "rope_type", "yarn", "'yarn' lacks 'factor'"),
    (QWEN3, ROPE, "rope_type", "linear", "'linear' lacks 'factor'"),
    (QWEN2, ROPE, "rope_type", "dynamic", "the longest sequence of a"),
    (QWEN2, ROPE, "rope_type", "longrope", "here are linear, yarn"),
    (QWEN2, ROPE, "partial_rotary_factor", 0.5, "=0.5, heads are"),
    (QWEN3, TEXT, "layer_types", ["sliding"], r"\['sliding'\]"),
    (
      QWEN3,
      "",
      "quantization_config",
      {"quant_method": "fp8"},
      "quant_method='fp8', .* name without -FP8",
    ),
    (QWEN2, TEXT, "use_sliding_window", True, "no windows here"),
    (QWEN3, TEXT, "attention_bias", True, "qwen3_vl has none"),
    (MIXTURE, TEXT, "norm_topk_prob", False, "always add up to 1"),
    (QWEN3, VISION, "temporal_patch_size", 1, "=1, only 2"),
    (QWEN2, VISION, "in_channels", 1, "=1, only 3"),
    (QWEN3, VISION, "out_hidden_size", 8, "=8 must equal text.hidden_size"),
    (QWEN3, VISION, "num_heads", 0, ">= 1, got 0"),
    (QWEN3, VISION, "num_position_embeddings", 7, "=7 is not a square"),
    (QWEN3, VISION, "deepstack_visual_indexes", [27], "do not fit 27"),
    (QWEN3, TEXT, "num_key_value_heads", 5, "heads=32 is not a multiple"),
    (QWEN3, ROPE, "mrope_section", [1, 2, 3], "half of head_dim=128"),
  ],
)
def test_what_would_be_computed_wrongly_is_refused(
  name, section, field, value, message
):
  path = f"{section}.{field}".strip(".")
  with pytest.raises(ValueError, match=message) as error:
    qwen_config.from_hf(edited(name, {path: value}))
  assert field in str(error.value)


def test_scaled_rotary_positions_of_older_files_are_read():
  raw = edited(QWEN2, {ROPE: None})
  raw[TEXT]["rope_scaling"] = {"type": "yarn", "mrope_section": [16, 24, 24]}
  with pytest.raises(ValueError, match="rope_type='yarn' lacks 'factor'"):
    qwen_config.from_hf(raw)
  raw[TEXT]["rope_scaling"] |= {
    "factor": 4,
    "original_max_position_embeddings": 32768,
  }
  scaling = qwen_config.from_hf(raw).text.rope_scaling
  assert (scaling.kind, scaling.factor) == ("yarn", 4)
  assert scaling.original_max_position_embeddings == 32768


@pytest.mark.parametrize(
  "name, section",
  [(QWEN3, TEXT), (QWEN3, VISION), (QWEN2, TEXT), (QWEN2, VISION)],
)
def test_a_missing_section_is_named(name, section):
  with pytest.raises(ValueError, match=f"lacks '{section}'.*download"):
    qwen_config.from_hf(edited(name, {section: None}))


def test_files_of_older_transformers_are_read_alike():
  config = published_sizes.SIZES[QWEN2]
  raw = qwen_config.to_hf(config)
  text = raw.pop(TEXT)
  rope = text.pop("rope_parameters")
  vision = raw[VISION]
  vision["in_chans"] = vision.pop("in_channels")
  old = {
    **text,
    **raw,
    "rope_theta": rope["rope_theta"],
    "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    "use_sliding_window": False,
  }
  assert qwen_config.from_hf(old) == config

  config = published_sizes.SIZES[QWEN3]
  raw = qwen_config.to_hf(config)
  rope = raw[TEXT].pop("rope_parameters")
  raw[TEXT]["rope_theta"] = rope.pop("rope_theta")
  raw[TEXT]["rope_scaling"] = rope
  assert qwen_config.from_hf(raw) == config


def test_only_what_a_run_decides_can_be_changed():
  raw = qwen_config.to_hf(published_sizes.SIZES[QWEN3])
  config = qwen_config.from_hf(raw, compute_dtype="bfloat16", remat="dots")
  assert (config.compute_dtype, config.remat) == ("bfloat16", "dots")
  with pytest.raises(ValueError, match="'text' .* cannot be changed.*remat"):
    qwen_config.from_hf(raw, text=None)
  with pytest.raises(ValueError, match="remat must be one of none, dots"):
    qwen_config.from_hf(raw, remat="all")
