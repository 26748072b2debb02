"""Small episodes for the learner's tests: real policy, made-up tokens."""

import dataclasses
import functools

import numpy as np
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

FIRST_ID, LAST_ID = 1100, 1400  # Ordinary tokens of the shipped tokenizer.

# Fields that no compiled program depends on, except whether an update makes
# several optimizer steps.
HOST_ONLY = dict(
  row_length=16,
  rows=1,
  patches=0,
  targets=0,
  tree="auto",
  overlong="error",
  minibatches=1,
  epochs=1,
  skip_zero_advantage=True,
)
HOST_ONLY_ALGORITHM = dict(
  advantage="grpo", loss_aggregation="token_mean", std_eps=1e-6, loss_length=0
)


@functools.lru_cache(maxsize=None)
def policy(seed):
  """(model, processor) that no test may change."""
  model, processor, _ = checkpoint.create_policy("nano", seed=seed, layers=1)
  return model, processor


class Case:
  """A nano policy, an image store, and a generator of episodes."""

  def __init__(self, seed=0, programs=None, own=None):
    self.model, self.processor = own or policy(seed)
    self.programs = {} if programs is None else programs
    self.store = images.ImageStore()
    self.rng = np.random.default_rng(seed)
    self.pad = getattr(self.model.config, "image_token_id", 0)
    banned = set(self.model.config.banned_token_ids)
    self.ids = np.array(
      [i for i in range(FIRST_ID, LAST_ID) if i not in banned]
    )

  def learner(self, mesh=None, reference=None, model=None, **arguments):
    """A learner; the shape of its batches is the same in all tests.

    Settings of `LearnerConfig`, `AlgorithmConfig` and `SamplingParams`, and
    the learner's own arguments, are given by their names.
    """
    arguments = (
      dict(rows=2, row_length=64, patches=32, targets=48, learning_rate=1e-2)
      | arguments
    )

    seed = arguments.pop("seed", 0)
    teacher = arguments.pop("teacher", None)
    if arguments.get("distill_coef"):
      arguments["teacher"] = "named"  # Its name, a setting of its own.

    def take(cls):
      names = {f.name for f in dataclasses.fields(cls)} & arguments.keys()
      return cls(**{name: arguments.pop(name) for name in names})

    sampling = take(policy_client.SamplingParams)
    learner = learner_lib.Learner(
      model or self.model,
      self.processor,
      self.store,
      config := take(learner_lib.LearnerConfig),
      algorithm := take(learner_lib.AlgorithmConfig),
      sampling=sampling,
      seed=seed,
      mesh=mesh,
      reference=reference,
      teacher=teacher,
      **arguments,
    )
    # Compiling is all the time these tests take, and a program has no state.
    key = (
      dataclasses.replace(config, **HOST_ONLY),
      dataclasses.replace(algorithm, **HOST_ONLY_ALGORITHM),
      config.steps_per_update == 1,
      learner.algorithm.has_critic,
      sampling.temperature,
      mesh,
    )
    learner._programs = self.programs.setdefault(key, learner._programs)
    return learner

  def image(self, width=32, height=32):
    return self.store.put(
      self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    )

  def screenshot(self):
    """Parts of a sequence: an image, of a policy that reads them."""
    reads = self.processor.patches_per_token > 0
    return [("image", self.image())] if reads else []

  def text(self, length):
    return self.rng.choice(self.ids, length).astype(np.int32)

  def sequence(self, parts, turn=0, logprob=-5.0, version=0):
    """From ("text", ids), ("image", ref) and ("sampled", ids) parts."""
    tokens, mask, spans, at = [], [], [], 0
    for kind, value in parts:
      if kind == "image":
        count = self.processor.num_image_tokens(value.width, value.height)
        spans.append(trajectory.ImageSpan(value, at, count))
        value = np.full(count, self.pad, np.int32)
      tokens.append(np.asarray(value, np.int32))
      mask.append(np.full(len(value), kind == "sampled"))
      at += len(value)
    mask = np.concatenate(mask)
    length = len(mask)
    noise = 0.1 * self.rng.standard_normal(length)
    return trajectory.TokenSequence(
      tokens=np.concatenate(tokens),
      loss_mask=mask,
      logprobs=np.where(mask, np.minimum(logprob + noise, 0), 0),
      versions=np.where(mask, version, -1),
      turn_ids=np.full(length, turn),
      images=tuple(spans),
    )

  def episode(self, prompt, reward, turns=2, version=0, status=None):
    """`turns` sequences; all begin with `prompt`'s parts at turn 0."""
    sequences = []
    for turn in range(turns):
      parts = list(prompt)
      if turn:
        parts = [("text", self.text(3)), ("image", self.image())]
      parts.append(("sampled", self.text(int(self.rng.integers(1, 5)))))
      sequences.append(self.sequence(parts, turn=turn, version=version))
    if status is None:
      status = (
        trajectory.TrajectoryStatus.SUCCEEDED
        if reward > 0
        else trajectory.TrajectoryStatus.FAILED
      )
    return trajectory.Trajectory(
      task="t",
      steps=[trajectory.Step() for _ in range(turns)],
      reward=float(reward),
      status=status,
      sequences=sequences,
      trajectory_id=f"e{int(self.rng.integers(1 << 60))}",
    )

  def group(self, rewards, name="g", turns=2, version=0):
    prompt = [
      ("text", self.text(4)),
      ("image", self.image()),
      ("text", self.text(3)),
    ]
    return trajectory.TrajectoryGroup(
      name,
      "task",
      tuple(self.episode(prompt, r, turns, version) for r in rewards),
      start_version=version,
    )

  def groups(self, count=2, size=3, turns=2, version=0):
    out = []
    for i in range(count):
      rewards = self.rng.random(size)
      out.append(self.group(rewards, f"g{i}", turns, version))
    return out

  def rewritten(self, count=2, size=3, turns=3):
    """Groups whose histories are rewritten, so that sequences share prefixes.

    Every episode has one sequence of two turns with all screenshots, and one a
    turn from then on: of a window, whose earlier screenshots and actions are
    words. Two members of a group sample the same first action.
    """
    out = []
    for number in range(count):
      text = self.text(4)
      prompt = [("text", text), *self.screenshot(), ("text", self.text(3))]
      same = self.text(3)
      members = []
      for member in range(size):
        first = same if member < 2 else self.text(3)
        parts = [*prompt, ("sampled", first)]
        words, sequences = [("text", text), ("text", first)], []
        earlier = []
        for turn in range(1, turns):
          action = self.text(int(self.rng.integers(1, 4)))
          screen = [
            ("text", self.text(2)),
            *self.screenshot(),
            ("text", self.text(1)),
          ]
          if turn > 1:
            parts = [*words, *earlier]
          parts = [*parts, *screen, ("sampled", action)]
          sequences.append(self.sequence(parts, turn=turn))
          if turn > 1:  # The screenshot before this one leaves the window.
            words += [("text", self.text(1)), earlier[-1]]
          earlier = [*screen, ("text", action)]
        members.append(
          trajectory.Trajectory(
            task="t",
            steps=[trajectory.Step() for _ in range(turns)],
            reward=float(self.rng.random()),
            status=trajectory.TrajectoryStatus.SUCCEEDED,
            sequences=sequences,
            trajectory_id=f"e{int(self.rng.integers(1 << 60))}",
          )
        )
      out.append(
        trajectory.TrajectoryGroup(f"r{number}", "task", tuple(members))
      )
    return out


def examples_of(groups):
  """Their examples, with dr_grpo advantages."""
  per_group, _ = example_lib.from_groups(
    groups, advantages.dr_grpo, advantages.AdvantageOptions()
  )
  return [e for group in per_group for e in group]


def gradients(learner, examples, weights=None):
  """({name: gradient}, sums, stats) of one step, which is not made."""
  weighed, own_weights = learner._minibatches.weigh(examples)
  packed = learner._minibatches.pack(
    weighed, own_weights if weights is None else weights
  )
  programs, params = learner._programs, learner._params
  frozen = learner._frozen
  grads, sums = programs.start(
    params, frozen, packed.batches[0], packed.extras[0]
  )
  for batch, extra in zip(packed.batches, packed.extras):
    grads, sums = programs.accumulate(params, grads, sums, frozen, batch, extra)
  grads = {k: np.asarray(v) for k, v in grads.items()}
  return grads, sums, packed.stats


def largest_difference(a, b):
  """Over two {name: array}."""
  assert a.keys() == b.keys()
  return max(
    float(np.max(np.abs(np.asarray(a[k]) - np.asarray(b[k])))) for k in a
  )


def pack(learner, groups):
  """Packs the examples of groups, as an update would."""
  minibatches = learner._minibatches
  return minibatches.pack(*minibatches.weigh(examples_of(groups)))
