"""Packing: nothing lost, nothing twice, shared things once, fixed shapes."""

import collections
import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

PAD_IMAGE = 999
PROCESSOR = vision_inputs.TinyVLProcessor()


def _screens(count):
  store = images.ImageStore()
  rng = np.random.default_rng(0)
  sizes = [(16, 16), (32, 16), (32, 32), (48, 16)]
  refs = [
    store.put(
      rng.integers(0, 256, (*sizes[i % len(sizes)][::-1], 3), dtype=np.uint8)
    )
    for i in range(count)
  ]
  return store, refs


STORE, REFS = _screens(6)


def _sequence(blocks, tag):
  """Blocks of ("text" | "sampled", ids) and ("image", number)."""
  tokens, mask, spans = [], [], []
  for kind, value in blocks:
    if kind == "image":
      ref = REFS[value]
      count = PROCESSOR.num_image_tokens(ref.width, ref.height)
      spans.append(trajectory.ImageSpan(ref, len(tokens), count))
      tokens += [PAD_IMAGE] * count
      mask += [False] * count
    else:
      tokens += value
      mask += [kind == "sampled"] * len(value)
  mask = np.array(mask)
  index = np.arange(len(tokens))
  return trajectory.TokenSequence(
    tokens,
    mask,
    # Distinct in every sampled token of every sequence.
    np.where(mask, -(1 + tag + index / 128), 0),
    np.where(mask, tag, -1),
    np.zeros(len(tokens), int),
    tuple(spans),
  )


_ids = st.lists(st.integers(1, 9), min_size=1, max_size=6)
_prompt = st.lists(
  st.one_of(
    st.tuples(st.just("text"), _ids),
    st.tuples(st.just("image"), st.integers(0, len(REFS) - 1)),
  ),
  min_size=1,
  max_size=3,
)
_answer = st.tuples(st.just("sampled"), _ids)


@st.composite
def _examples(draw):
  """Several sequences; some begin like another one, images recur."""
  prompts = draw(st.lists(_prompt, min_size=1, max_size=4))
  out, drawn = [], []
  for tag in range(draw(st.integers(1, 10))):
    blocks = list(draw(st.sampled_from(prompts))) + [draw(_answer)]
    if drawn and draw(st.booleans()):
      earlier = draw(st.sampled_from(drawn))
      earlier = earlier[: draw(st.integers(1, len(earlier)))]
      if len(_sequence(earlier, 0)) <= 18:  # As long as a prompt.
        blocks = [*earlier, draw(_answer)]
    drawn.append(blocks)
    blocks = list(blocks)
    for _ in range(draw(st.integers(0, 2))):
      blocks += draw(_prompt) + [draw(_answer)]
    if draw(st.booleans()):
      blocks += [("text", draw(_ids))]
    sequence = _sequence(blocks, tag)
    values = np.where(
      sequence.loss_mask, tag + np.arange(len(sequence)) / 64 + 0.5, 0
    )
    out.append(example_lib.Example(sequence, values, tag, tag // 2))
  return out


def _shape(buffers):
  return batching.BatchShape(
    rows=2 * buffers, row_length=72, buffers=buffers, patches=24, targets=48
  )


def _visible(batch, buffer, at):
  """(token, position, image pixels) that flat position `at` attends to."""
  inputs = batch.inputs
  rows = inputs.tokens.shape[0] // batch.index.shape[0]
  row, column = divmod(int(at), inputs.tokens.shape[1])
  row += buffer * rows
  own = inputs.segment_ids[row, column]
  assert own > 0, "a target is predicted from padding"
  out = []
  for t in range(column + 1):
    if inputs.seen_until is None:
      visible = inputs.segment_ids[row, t] == own
    else:
      visible = column < inputs.seen_until[row, t]
    if not visible:
      continue
    pixels = None
    index = inputs.vision_index[row, t]
    if index >= 0:
      pixels = inputs.patches[buffer, index].tobytes()
    out.append(
      (int(inputs.tokens[row, t]), inputs.positions[row, t].tolist(), pixels)
    )
  return out


def _expected_context(example, upto):
  """The same for tokens [0, upto) of the sequence itself."""
  sequence = example.sequence
  positions = PROCESSOR.positions(sequence.tokens, sequence.images)
  pixels = {}
  for span in sequence.images:
    patches = PROCESSOR.patchify(STORE.get(span.image)).patches
    for i in range(span.num_tokens):
      pixels[span.offset + i] = patches[i].tobytes()
  return [
    (int(sequence.tokens[t]), positions[t].tolist(), pixels.get(t))
    for t in range(upto)
  ]


@given(_examples(), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sampled_token_is_a_target_once_in_its_own_context(
  examples, buffers, tree
):
  shape = _shape(buffers)
  packer = batching.Packer(PROCESSOR, STORE, tree=tree)
  weights = np.linspace(1, 2, len(examples))
  plan = packer.plan(examples, shape)
  batches = packer.fill(plan, examples, weights)
  got = collections.Counter()
  for batch in batches:
    assert batch.inputs.tokens.shape == (shape.rows, shape.row_length)
    assert batch.inputs.patches.shape[:2] == (shape.buffers, shape.patches)
    assert batch.index.shape == (shape.buffers, shape.targets)
    assert not np.any(batch.weights[~batch.mask])
    for buffer, slot in np.argwhere(batch.mask):
      number = int(batch.sequences[buffer, slot])
      example = examples[number]
      context = _visible(batch, buffer, batch.index[buffer, slot])
      at = len(context)
      assert context == _expected_context(example, at)
      sequence = example.sequence
      assert sequence.loss_mask[at]
      assert batch.targets[buffer, slot] == sequence.tokens[at]
      assert batch.logprobs[buffer, slot] == sequence.logprobs[at]
      assert batch.versions[buffer, slot] == sequence.versions[at]
      assert batch.advantages[buffer, slot] == example.advantages[at]
      assert batch.weights[buffer, slot] == np.float32(weights[number])
      assert batch.groups[buffer, slot] == example.group
      got[number, at] += 1
  want = {
    (number, int(at))
    for number, e in enumerate(examples)
    for at in np.flatnonzero(e.sequence.loss_mask)
  }
  assert set(got) == want and set(got.values()) <= {1}
  assert plan.stats.targets == len(want)


@given(_examples())
@settings(max_examples=20, deadline=None)
def test_each_image_lies_once_in_a_buffer(examples):
  packer = batching.Packer(PROCESSOR, STORE)
  plan = packer.plan(examples, _shape(2))
  for batch in packer.fill(plan, examples, np.ones(len(examples))):
    segments = batch.inputs.patch_segments
    for buffer in range(segments.shape[0]):
      pictures = [
        batch.inputs.patches[buffer, segments[buffer] == k].tobytes()
        for k in range(1, segments[buffer].max() + 1)
      ]
      assert len(set(pictures)) == len(pictures)


def test_a_group_shares_its_prompt_and_first_screenshot():
  prompt = [("text", [1, 2, 3]), ("image", 2), ("text", [4, 5])]
  sequences = [
    _sequence(prompt + [("sampled", [6, i % 9 + 1, 7])], i) for i in range(8)
  ]
  examples = example_lib.from_sequences(sequences)
  shape = batching.BatchShape(1, 64, 1, 8, 32)
  shared = batching.Packer(PROCESSOR, STORE, tree=True).plan(examples, shape)
  # A prompt of 9 tokens and the first of 3 sampled ones once, then another of
  # each; the last predicts nothing.
  assert shared.stats.row_tokens == 9 + 1 + 8
  assert shared.stats.batches == 1
  assert shared.stats.patches == 4
  alone = batching.Packer(PROCESSOR, STORE).plan(examples, shape)
  assert alone.stats.row_tokens == 8 * 11
  assert alone.stats.batches == 2
  assert alone.stats.patches == 2 * 4


@given(
  st.lists(st.integers(1, 12), max_size=12),
  st.integers(12, 20),
  st.integers(1, 90),
)
@settings(max_examples=50, deadline=None)
def test_images_lie_apart_and_cross_no_window(sizes, window, places):
  windows = packing.Windows(places, window)
  uses = np.zeros(places, int)
  for size in sizes:
    if windows.fit([size]) is None:
      for start in range(0, places, window):
        assert (uses[start : start + window] == 0).sum() < size
      continue
    (at,) = windows.take([size])
    assert at // window == (at + size - 1) // window
    uses[at : at + size] += 1
    assert windows.used == np.flatnonzero(uses).max() + 1
  assert uses.max(initial=0) <= 1


@given(_examples())
@settings(max_examples=20, deadline=None)
def test_no_image_of_a_bounded_batch_crosses_a_multiple_of_the_bound(examples):
  packer = batching.Packer(PROCESSOR, STORE)
  bound = packing.image_bound(packer.largest_image(examples))
  shape = _shape(2).bounded(bound)
  shape = shape.bounded(bound, packer.places_of_one(examples, shape))
  plan = packer.plan(examples, shape)
  for batch in packer.fill(plan, examples, np.ones(len(examples))):
    assert batch.inputs.aligned_images == bool(bound)
    for segments in batch.inputs.patch_segments:
      for image in range(1, segments.max() + 1):
        places = np.flatnonzero(segments == image)
        assert not bound or len(set(places // bound)) == 1


@given(_examples())
@settings(max_examples=20, deadline=None)
def test_images_lie_without_gaps_where_windows_do_not_help(examples):
  packer = batching.Packer(PROCESSOR, STORE)
  bound = packing.image_bound(packer.largest_image(examples))
  shape = dataclasses.replace(_shape(2), aligned=False).bounded(bound)
  assert packer.places_of_one(examples, shape) <= shape.patches
  plan = packer.plan(examples, shape)
  for batch in packer.fill(plan, examples, np.ones(len(examples))):
    assert not batch.inputs.aligned_images
    for segments in batch.inputs.patch_segments:
      assert (np.diff((segments > 0).astype(int)) <= 0).all()


@pytest.mark.parametrize("patches", (8, 100, 576, 7000, 7488))
@pytest.mark.parametrize("multiple", (1, 4, 9))
@pytest.mark.parametrize("aligned", (True, False))
def test_a_buffer_is_rounded_up_to_what_attention_computes_by(
  aligned, multiple, patches
):
  patches = -(-patches // multiple) * multiple
  shape = batching.BatchShape(1, 64, 1, patches, 64, aligned=aligned)
  assert shape.bounded(0) == shape
  for bound in (576, 648):
    shape = shape.bounded(bound, multiple=multiple)
    assert shape.bounded(bound, multiple=multiple) == shape
    assert shape.patches >= patches and shape.patches % multiple == 0
    if aligned:
      assert shape.patches % bound == 0
    else:
      assert patches <= 128 or shape.patches % 128 == 0
      assert shape.patches - patches < 128 * multiple
  if not aligned and patches <= 128:
    assert shape.patches == patches


@pytest.mark.parametrize("aligned", (True, False))
def test_a_suggested_buffer_suits_attention_within_images(aligned):
  examples = example_lib.from_sequences(
    [
      _sequence([("image", i % 6), ("text", [1] * 9), ("sampled", [2])], i)
      for i in range(60)
    ]
  )
  packer = batching.Packer(PROCESSOR, STORE)
  bound = packing.image_bound(packer.largest_image(examples))
  bound *= 3  # 128 is no multiple of it, and neither is a row's need.
  shape = packer.suggest(
    examples, 4, 145, 1, image_patches=bound, aligned=aligned
  )
  assert shape.patches == (-(-145 // bound) * bound if aligned else 256)
  assert packer.plan(examples, shape).placed


@given(_examples())
@settings(max_examples=40, deadline=None)
def test_a_tree_holds_each_prefix_once(examples):
  prefixes = set()
  for example in examples:
    sequence = example.sequence
    shown = {
      span.offset + i: span.image.sha256
      for span in sequence.images
      for i in range(span.num_tokens)
    }
    path = ()
    for at in range(packing.used_length(sequence)):
      path = hash((path, int(sequence.tokens[at]), shown.get(at)))
      prefixes.add(path)
  items = packing.make_items(examples, 10**6, tree=True)
  assert sum(item.length for item in items) == len(prefixes)
  numbers = [piece.example for item in items for piece in item.pieces]
  assert sorted(numbers) == list(range(len(examples)))


@given(_examples(), st.integers(72, 100))
@settings(max_examples=40, deadline=None)
def test_a_tree_longer_than_a_row_is_cut(examples, row_length):
  items = packing.make_items(examples, row_length, tree=True)
  assert max(item.length for item in items) <= row_length
  numbers = [piece.example for item in items for piece in item.pieces]
  assert sorted(numbers) == list(range(len(examples)))


def test_a_tree_is_cut_where_its_parts_share_least():
  """Two episodes of three nested turns; a row holds one of them."""
  sequences = []
  for episode in (0, 1):
    for turn in range(1, 4):
      blocks = [("text", [1, 2])] + [("sampled", [3 + episode] * 4)] * turn
      sequences.append(_sequence(blocks + [("sampled", [9])], 0))
  items = packing.make_items(
    example_lib.from_sequences(sequences), 16, tree=True
  )
  # 2 + 12, of which two shorter sequences are prefixes.
  assert [item.length for item in items] == [14, 14]
  assert [sorted(p.example for p in item.pieces) for item in items] == [
    [0, 1, 2],
    [3, 4, 5],
  ]


def test_a_token_sampled_in_several_sequences_is_a_target_of_each():
  twice = [
    _sequence([("text", [1, 2]), ("sampled", [3, 4, last])], last)
    for last in (5, 5, 6)
  ]
  examples = example_lib.from_sequences(twice)
  packer = batching.Packer(PROCESSOR, STORE, tree=True)
  plan = packer.plan(examples, batching.BatchShape(1, 8, 1, 4, 16))
  (batch,) = packer.fill(plan, examples, np.array([1.0, 2.0, 4.0]))
  assert plan.stats.row_tokens == 4
  mask = batch.mask[0]
  targets = batch.targets[0, mask].reshape(3, 3)
  weights = batch.weights[0, mask].reshape(3, 3)
  np.testing.assert_array_equal(
    sorted(map(tuple, targets)), [(3, 4, 5), (3, 4, 5), (3, 4, 6)]
  )
  np.testing.assert_array_equal(sorted(weights[:, 0]), [1, 2, 4])
  np.testing.assert_array_equal(
    batch.index[0, mask].reshape(3, 3), [[1, 2, 3]] * 3
  )


def test_first_fit_decreasing_fills_rows():
  def of(length):
    return _sequence([("text", [1] * length), ("sampled", [2])], 0)

  examples = example_lib.from_sequences([of(n) for n in (3, 7, 5, 5, 4, 6)])
  shape = batching.BatchShape(3, 10, 1, 1, 30)
  plan = batching.Packer(PROCESSOR, STORE).plan(examples, shape)
  assert plan.stats.batches == 1
  assert plan.stats.row_tokens == plan.stats.row_capacity == 30


def test_packing_is_deterministic():
  rng = np.random.default_rng(3)
  examples = example_lib.from_sequences(
    [
      _sequence(
        [
          ("image", int(rng.integers(6))),
          ("text", [1] * int(rng.integers(1, 9))),
          ("sampled", [2] * int(rng.integers(1, 9))),
        ],
        i,
      )
      for i in range(40)
    ]
  )

  def pack():
    packer = batching.Packer(PROCESSOR, STORE)
    plan = packer.plan(examples, _shape(2))
    return packer.fill(plan, examples, np.ones(40))

  for a, b in zip(pack(), pack(), strict=True):
    np.testing.assert_array_equal(a.inputs.tokens, b.inputs.tokens)
    np.testing.assert_array_equal(a.index, b.index)
    np.testing.assert_array_equal(a.inputs.patches, b.inputs.patches)


def test_what_cannot_fit_is_refused_by_name():
  packer = batching.Packer(PROCESSOR, STORE, banned_token_ids=[8])
  long = _sequence([("text", [1] * 30), ("sampled", [2, 3])], 0)
  picture = _sequence([("image", 2), ("sampled", [2])], 0)
  many = _sequence([("text", [1]), ("sampled", [2] * 9)], 0)
  shape = batching.BatchShape(1, 16, 1, 3, 8)
  for sequence, field in (
    (long, "row_length"),
    (picture, "patches"),
    (many, "targets"),
  ):
    examples = example_lib.from_sequences([sequence])
    with pytest.raises(ValueError, match=field):
      packer.plan(examples, shape)
  assert packer.check(example_lib.from_sequences([many, long]), 16) == [1]
  banned = _sequence([("text", [1]), ("sampled", [8])], 0)
  with pytest.raises(ValueError, match="banned"):
    packer.check(example_lib.from_sequences([banned]), 16)


def test_a_sampled_first_token_is_refused():
  sequence = trajectory.TokenSequence(
    [1, 2], [True, True], [-1, -1], [0, 0], [0, 0]
  )
  with pytest.raises(ValueError, match="begin sequences with a prompt"):
    example_lib.from_sequences([sequence])


def test_missing_pixels_are_an_error():
  packer = batching.Packer(PROCESSOR, images.ImageStore())
  examples = example_lib.from_sequences(
    [_sequence([("image", 0), ("sampled", [2])], 0)]
  )
  plan = packer.plan(examples, _shape(1))
  with pytest.raises(KeyError, match="not in the store"):
    packer.fill(plan, examples, np.ones(1))


def test_an_image_of_another_size_than_its_placeholders_is_an_error():
  sequence = trajectory.TokenSequence(
    [PAD_IMAGE] * 3 + [2],
    [False] * 3 + [True],
    [0, 0, 0, -1],
    [-1, -1, -1, 0],
    [0] * 4,
    (trajectory.ImageSpan(REFS[2], 0, 3),),
  )
  packer = batching.Packer(PROCESSOR, STORE)
  examples = example_lib.from_sequences([sequence])
  plan = packer.plan(examples, _shape(1))
  with pytest.raises(ValueError, match="becomes 4 tokens"):
    packer.fill(plan, examples, np.ones(1))


def test_suggested_shape_holds_everything_and_wastes_little():
  rng = np.random.default_rng(5)
  examples = example_lib.from_sequences(
    [
      _sequence([("image", i % 6), ("text", [1] * 20), ("sampled", [2] * 5)], i)
      for i in range(int(rng.integers(20, 30)))
    ]
  )
  packer = batching.Packer(PROCESSOR, STORE)
  shape = packer.suggest(examples, rows=4, row_length=64, buffers=2)
  plan = packer.plan(examples, shape)
  loose = batching.BatchShape(4, 64, 2, 128, 128)
  assert plan.stats.batches == packer.plan(examples, loose).stats.batches
  assert shape.targets <= 64 and shape.patches <= 64


def test_a_suggested_shape_holds_whatever_fits_a_row():
  easy = _sequence([("image", 0), ("text", [1] * 9), ("sampled", [2])], 0)
  packer = batching.Packer(PROCESSOR, STORE)
  shape = packer.suggest(
    example_lib.from_sequences([easy]), rows=4, row_length=32, buffers=1
  )
  pictures = [("image", i) for i in range(6)] * 2
  for hard in (
    [("text", [1]), ("sampled", [2] * 32)],
    [*pictures, ("sampled", [2])],
  ):
    examples = example_lib.from_sequences([_sequence(hard, 0)])
    assert packer.plan(examples, shape).stats.batches == 1
  # A shape that is asked for is the one that is given.
  suggested = packer.suggest((), 4, 32, 1, patches=8, targets=16)
  assert (suggested.patches, suggested.targets) == (8, 16)


# --- groups to examples -----------------------------------------------------


def test_only_valid_members_count_and_normalise():
  def episode(reward, status):
    sequence = _sequence([("text", [1]), ("sampled", [2, 3])], 0)
    return trajectory.Trajectory(
      steps=[trajectory.Step()],
      reward=reward,
      status=status,
      sequences=[sequence],
    )

  status = trajectory.TrajectoryStatus
  group = trajectory.TrajectoryGroup(
    "g",
    "t",
    (
      episode(1.0, status.SUCCEEDED),
      episode(0.0, status.FAILED),
      episode(-9.0, status.ENV_ERROR),
    ),
  )
  (examples,), stats = example_lib.from_groups(
    [group], advantages.dr_grpo, advantages.AdvantageOptions()
  )
  assert [e.advantages[1] for e in examples] == [0.5, -0.5]
  assert (stats.episodes, stats.valid, stats.success) == (3, 2, 0.5)
  assert stats.reward_mean == 0.5
  per_member = [
    stats.advantages[m.trajectory_id] for m in group.trajectories[:2]
  ]
  assert [float(values[-1]) for values in per_member] == [0.5, -0.5]
  assert len(stats.advantages) == 2
  broken = trajectory.TrajectoryGroup("b", "t", (episode(1.0, status.TIMEOUT),))
  (none,), stats = example_lib.from_groups(
    [broken], advantages.grpo, advantages.AdvantageOptions()
  )
  assert not none and stats.zero_groups == 1


# --- rules at their edges -----------------------------------------------------


def _picture_sequence(ref, sampled):
  """A prompt of two tokens, the last of which is all of a picture."""
  tokens = [5, PAD_IMAGE, *sampled]
  mask = np.array([False, False, *[True] * len(sampled)])
  return trajectory.TokenSequence(
    tokens,
    mask,
    np.where(mask, -1.0, 0),
    np.where(mask, 0, -1),
    np.zeros(len(tokens), int),
    images=(trajectory.ImageSpan(ref, 1, 1),),
  )


@pytest.mark.parametrize("same", [True, False])
def test_sequences_part_where_their_pictures_differ(same):
  sequences = [
    _picture_sequence(REFS[0], [7, 8]),
    _picture_sequence(REFS[0 if same else 1], [9, 8]),
  ]
  items = batching.packing.make_items(
    example_lib.from_sequences(sequences), 64, tree=True
  )
  assert len(items) == 1  # The word before the picture.
  assert items[0].length == 3 + 3 - (2 if same else 1)


@pytest.mark.parametrize("row_length, count", [(6, 1), (5, 2)])
def test_a_shared_prompt_and_its_branches_fill_a_row_to_the_last_token(
  row_length, count
):
  # A trunk of 2 and branches of 2 tokens that predict another, each.
  sequences = [_picture_sequence(REFS[0], [n, 8, 9]) for n in (1, 2)]
  items = batching.packing.make_items(
    example_lib.from_sequences(sequences), row_length, tree=True
  )
  assert len(items) == count
  assert max(item.length for item in items) <= row_length


def test_every_sampled_token_carries_the_advantage_of_its_turn():
  mask = np.array([False, True, True, False, True])
  turn_ids = np.array([0, 0, 0, 1, 1])

  def member(*rewards):
    return trajectory.Trajectory(
      steps=[trajectory.Step(reward=r) for r in rewards],
      reward=sum(rewards),
      status=trajectory.TrajectoryStatus.FAILED,
      sequences=[
        trajectory.TokenSequence(
          [5, 6, 7, 8, 9],
          mask,
          np.where(mask, -1.0, 0),
          np.where(mask, 0, -1),
          turn_ids,
        )
      ],
    )

  group = trajectory.TrajectoryGroup(
    "g", "t", (member(1.0, 0.0), member(0.0, 3.0))
  )
  (built,), stats = example_lib.from_groups(
    [group], advantages.turn_returns, advantages.AdvantageOptions(gamma=0.5)
  )
  for example, one in zip(built, group, strict=True):
    per_turn = stats.advantages[one.trajectory_id]
    assert len(set(per_turn)) == 2
    first, second = per_turn
    np.testing.assert_array_equal(
      example.advantages, [0, first, first, 0, second]
    )
