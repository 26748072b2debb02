"""The learner attends within images of every size that its data has."""

import dataclasses
import types

import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import examples
from tunix.rl.multi_turn.learner.batches import minibatches
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

from tests.learner import learner_cases

SCREEN, LARGE = (48, 32), (192, 128)
ROWS = dict(rows=1, row_length=256, patches=1024, targets=64)
TOLERANCE = 2e-5


def patches_of(processor, size):
  return processor.num_image_tokens(*size) * processor.patches_per_token


@pytest.fixture(
  scope="module",
  params=trials.by_default(
    ["qwen3_vl_tiny"],
    ["qwen3_vl_tiny", "qwen2_5_vl_tiny"],
    unlike=["qwen2_5_vl_tiny"],
  ),
)
def policy(request):
  """A small model as a run with a gym of `SCREEN` has it."""
  config = qwen_checkpoint.small_config(request.param)
  deep = (0,) * bool(config.vision.deepstack_visual_indexes)
  config = dataclasses.replace(
    config,
    text=dataclasses.replace(config.text, num_hidden_layers=1),
    vision=dataclasses.replace(
      config.vision,
      depth=2,
      deepstack_visual_indexes=deep,
      fullatt_block_indexes=() if deep else (1,),
    ),
  )
  model = qwen_checkpoint.random_model(config, seed=1)
  return model, qwen_checkpoint.processor_of(config)


def sequences_of(case, *sizes):
  """A sequence with an image of each size, and one with all of them."""
  images = [case.image(*size) for size in sizes]
  parts = lambda image: [
    ("text", case.text(3)),
    ("image", image),
    ("sampled", case.text(4)),
  ]
  return [case.sequence(parts(image), turn=i) for i, image in enumerate(images)]


def reference(case, model, directory):
  """transformers' log-probs of the sampled tokens."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  saved = checkpoint.save_policy(directory, model)
  module = transformers.AutoModelForImageTextToText.from_pretrained(saved)
  vision = model.config.vision
  mean, std = np.array([vision.image_mean, vision.image_std])[:, :, None]

  def logprobs(sequence):
    (span,) = sequence.images
    pixels = case.store.get(span.image)
    image = case.processor.patchify(pixels)
    frame = image.patches.reshape(len(image.patches), 3, -1) / 255
    frame = (frame - mean) / std
    # Each patch twice, as one of two frames.
    frames = np.repeat(frame[:, :, None], 2, axis=2)
    ids = torch.tensor(sequence.tokens).long()[None]
    rows, columns = case.processor.grid(span.image.width, span.image.height)
    with torch.no_grad():
      logits = module(
        input_ids=ids,
        mm_token_type_ids=(ids == case.pad).int(),
        pixel_values=torch.tensor(
          frames.reshape(len(frame), -1), dtype=torch.float32
        ),
        image_grid_thw=torch.tensor([(1, rows, columns)]),
      ).logits[0]
    scores = torch.log_softmax(logits, -1).numpy()
    # Tokens that no sampler may draw have no share.
    banned = list(model.config.banned_token_ids)
    allowed = np.log1p(-np.exp(scores[:, banned]).sum(1))
    mask = np.flatnonzero(sequence.loss_mask)
    return scores[mask - 1, sequence.tokens[mask]] - allowed[mask - 1]

  return logprobs


def test_an_image_larger_than_the_screen_is_attended_whole(policy, tmp_path):
  case = learner_cases.Case(own=policy)
  learner = case.learner(**ROWS)
  want = reference(case, policy[0], tmp_path)
  small, large = sequences_of(case, SCREEN, LARGE)
  for batch in ([small], [large, small]):
    for sequence, got in zip(batch, learner.sequence_logprobs(batch)):
      logprobs = got[sequence.loss_mask]
      np.testing.assert_allclose(logprobs, want(sequence), atol=TOLERANCE)
  bound = learner.shape.image_patches
  assert bound == packing.image_bound(patches_of(policy[1], LARGE))
  # Each size was bounded by itself, and the smaller one by the larger's.
  assert learner.compiles["score"] == 2
  learner.sequence_logprobs([small])
  assert learner.compiles["score"] == 2


def test_a_bound_below_the_image_would_be_wrong(policy):
  """Checks that the test above can fail."""
  case = learner_cases.Case(own=policy)
  learner = case.learner(**ROWS)
  (large,) = sequences_of(case, LARGE)
  (right,) = learner.sequence_logprobs([large])
  # In fewer places than the image has patches, as by a screen's bound.
  few = patches_of(policy[1], SCREEN)
  learner.shape = dataclasses.replace(learner.shape, image_patches=few)
  learner._bounded = False
  learner._minibatches.packer._image_size = lambda image: few
  (batch,) = learner._minibatches.pack(*everything(large)).batches
  wrong = np.asarray(
    learner._programs.score(learner._params, learner._frozen, batch)
  )[np.asarray(batch.mask)]
  assert np.abs(wrong - right[large.loss_mask]).max() > 20 * TOLERANCE


def everything(*sequences):
  built = examples.from_sequences(sequences)
  return built, np.ones(len(built))


def test_bounds_are_few_and_near(policy):
  bounds = [packing.image_bound(n) for n in range(1, 20000)]
  assert all(n <= b <= max(n * 1.125, n + 8) for n, b in enumerate(bounds, 1))
  assert bounds == sorted(bounds)
  # At most eight in each doubling.
  assert len(set(bounds)) < 8 * 12


# --- refused -----------------------------------------------------------------


def test_the_packer_refuses_an_image_above_the_shapes_bound(policy):
  case = learner_cases.Case(own=policy)
  built, _ = everything(*sequences_of(case, SCREEN, LARGE))
  packer = batching.Packer(case.processor, case.store)
  few = patches_of(policy[1], SCREEN)
  shape = batching.BatchShape(1, 256, 1, 1024, 64, few)
  packer.plan(built[:1], shape)
  need = patches_of(policy[1], LARGE)
  with pytest.raises(
    ValueError, match=f"of 192x128 has {need} patches, .*image_patches={few}"
  ):
    packer.plan(built, shape)
  assert packer.largest_image(built) == need


def test_the_learner_refuses_an_image_above_the_policys_limit(policy):
  model, processor = policy
  case = learner_cases.Case(own=policy)
  learner = case.learner(**ROWS)
  small, large = sequences_of(case, SCREEN, LARGE)
  limit = patches_of(processor, SCREEN)
  # As `policy.config.max_image_patches` sets it.
  learner._minibatches._image_limit = limit
  learner._minibatches.packer.largest_image(everything(small)[0], limit)
  with pytest.raises(
    ValueError,
    match=f"192x128 has .* policy.config.max_image_patches={limit}; raise",
  ):
    learner.sequence_logprobs([large])
  assert model.config.max_image_patches == 0


def test_a_limit_below_the_screen_is_refused_when_loading():
  with pytest.raises(
    ValueError, match="max_image_patches=100: a screenshot of 192x128 has"
  ):
    checkpoint.load_policy("qwen3_vl_tiny", screen=LARGE, max_image_patches=100)
  with pytest.raises(ValueError, match="max_image_patches must be >= 0"):
    checkpoint.load_policy("qwen3_vl_tiny", max_image_patches=-1)


def test_a_resumed_learner_keeps_the_bound(policy):
  case = learner_cases.Case(own=policy)
  learner = case.learner(**ROWS)
  built, weights = everything(*sequences_of(case, LARGE))
  learner._minibatches.pack(built, weights)
  bound = learner.shape.image_patches
  progress = learner.progress()
  other = case.learner(**ROWS)
  assert other.shape.image_patches == 0
  other.load(other.arrays(), progress)
  assert other.shape.image_patches == bound
  # A checkpoint of before there were bounds.
  del progress["shape"]["image_patches"]
  third = case.learner(**ROWS)
  third.load(third.arrays(), progress)
  assert third.shape.image_patches == 0


@pytest.mark.parametrize("aligned", (True, False))
def test_a_resumed_learner_keeps_the_places_it_grew_by(policy, aligned):
  """Bound by bound, which alone does not lead to the last bound's places."""
  case = learner_cases.Case(own=policy)

  def fresh(patches):
    learner = case.learner(**ROWS | dict(patches=patches))
    learner._minibatches._aligned = aligned
    learner.shape = dataclasses.replace(learner.shape, aligned=aligned)
    return learner

  learner = fresh(1000)
  for sizes in ((SCREEN,), (LARGE,), (LARGE, (160, 128), LARGE)):
    learner._minibatches.pack(*everything(*sequences_of(case, *sizes)))
  learner.shape = learner._minibatches._grown(
    learner.shape, learner.shape.image_patches, 1700
  )
  grown, progress = learner.shape, learner.progress()
  assert grown.patches >= 1700
  for _ in range(2):  # A resumed run is resumed again.
    other = fresh(1000)
    other.load(other.arrays(), progress)
    assert other.shape == grown
    other._minibatches.pack(*everything(*sequences_of(case, LARGE)))
    assert other.shape == grown
    progress = other.progress()
  # A larger image gets a larger bound; other batches keep their own.
  more = fresh(3000)
  more.load(more.arrays(), progress)
  assert more.shape.patches >= 3000
  wide = case.learner(**ROWS | dict(row_length=128))
  wide.load(wide.arrays(), progress)
  assert wide.shape.patches < 1700


def test_images_lie_in_windows_where_the_policys_kernel_profits(policy):
  model, _ = policy
  case = learner_cases.Case(own=policy)
  head_dim = model.config.vision.head_dim
  for platform in ("cpu", "tpu"):
    with compiling.compile_for(platform):
      helps = kernels.windows_help(head_dim)
      assert model.wants_aligned_images == helps
      learner = case.learner(**ROWS)
    assert learner.shape.aligned == helps
  for wants in (None, False, True):
    like = types.SimpleNamespace(wants_aligned_images=wants)
    assert minibatches.aligns_images(like) == bool(wants)
  assert not minibatches.aligns_images(types.SimpleNamespace())


def test_splash_attention_takes_the_shapes_of_a_tpus_batches():
  """Heads of 64: buffers of whole blocks, images without windows."""
  config = qwen_checkpoint.small_config("qwen3_vl_tiny")
  vision = config.vision
  vision = dataclasses.replace(vision, hidden_size=64 * vision.num_heads)
  config = dataclasses.replace(config, vision=vision)
  own = (
    qwen_checkpoint.random_model(config, seed=1),
    qwen_checkpoint.processor_of(config),
  )
  case = learner_cases.Case(own=own)
  examples_and_weights = everything(*sequences_of(case, SCREEN, LARGE))
  for patches in (0, 1000):
    with compiling.compile_for("tpu"):
      learner = case.learner(**ROWS | dict(patches=patches))
    (batch,) = learner._minibatches.pack(*examples_and_weights).batches
    assert batch.inputs.patches.shape[1] % kernels.SPLASH_BLOCK == 0
    assert batch.inputs.image_patches and not batch.inputs.aligned_images


def test_a_policy_without_bounds_is_compiled_once():
  case = learner_cases.Case()
  learner = case.learner(row_length=128, patches=128)
  for size in ((32, 32), (160, 128)):
    learner.sequence_logprobs(sequences_of(case, size))
  assert learner.shape.image_patches == 0
  assert learner.compiles["score"] == 1
