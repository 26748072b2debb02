"""Pretrains the small policies that the package ships. A maintainer's command.

    python scripts/pretraining/pretrain.py --out DIR
    python scripts/pretraining/pretrain.py --out DIR \\
        --policy qwen3_vl_tiny

The result stands in for the pretrained model that a real user starts from. It
is made by imitation alone: grounding conversations about random desktops, so
that the policy reads and points, and demonstrations of every task family by a
demonstrator with habits, so that it knows the moves and prefers some wrong
ones. No reward is used. The same learner as in training runs it, with the
objective `behaviour_cloning`.

Writes the policy directory, `log.jsonl` (one object a report) and
`recipe.json` (every setting and seed) into DIR, the policy also every
--save-every steps, so a run that is cut short leaves a usable policy.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import dataclasses
import json
import pathlib
import time
from typing import Any, Mapping, Sequence

import grounding_conversations
import numpy as np
import tqdm
import train_tokenizer
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import scenes
from tunix.rl.multi_turn.environments.gyms.desktop import words
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run.warm_start import demonstrations

TokenSequence = trajectory.TokenSequence

HABITS = {
  "open-icon": ("single_click", 0.7),
  "enter-text": ("skip_focus", 0.6),
  "click-button": ("wrong_widget", 0.6),
  "click-color": ("wrong_widget", 0.5),
  "close-dialog": ("wrong_widget", 0.6),
}


CHANGES: dict[str, dict[str, Any]] = {
  "tiny_vl": {"size": "tiny"},
  # Four patches a vision token, where tiny_vl has one. Attention within
  # images costs as much as the largest needs: screenshots of one size.
  "qwen3_vl_tiny": {
    "size": "qwen3_vl_tiny",
    "patches": 16384,
    "steps": 760,
    "first_steps": 380,
    "first_copies": 20,
    "other_sizes": (),
    "other_scenes": 0,
  },
}
"""Name of a shipped policy -> how its recipe differs from the defaults."""

# Kinds of `scenes.FIELD_KINDS` whose names are one word: a pair needs that.
_PAIR_KINDS = ("color", "icon", "button", "check box")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Settings and seeds of a pretraining; they decide its result.

  Attributes:
    steps: optimizer steps.
    seed: Seed of weights and data.
    first_steps: steps, at the beginning, that are about telling apart things
      of one kind and nothing else.
    first_scenes: scenes of such a step.
    first_copies: conversations a step in which quoted words are typed, from
      the middle of the first steps on: enough of them to leave their plateau
      beside pointing, as neither survives steps that are about the other alone.
    copies: The same after the first steps.
    field_share: share of such scenes among the inventories later on.
    width, height: of the screenshots, in pixels.
    other_sizes: (width, height) of the screenshots of `other_scenes` of the
      inventories, so that a position means the same on every screen.
    inventories, questions: conversations of each kind a step.
    episodes: demonstrated episodes a step.
    late: share of the steps, at the end, in which a step has
      `late_inventories` and `late_episodes` instead.
    quickstart_share: share of scenes and episodes from the quickstart's
      families; the rest are of all families, or random scenes.
    grid: (columns, rows) that points are snapped to.
    habits: family -> (habit, rate).
    learning_rate, muon_learning_rate, warmup_steps: of the optimizer; a
      cosine to 0 follows.
    row_length, rows, patches, targets: capacities of a packed batch.
    size: Size of the policy, as `checkpoint.create_policy` takes it.
    system_prompt, parser: first message of episodes, and their grammar.
  """

  steps: int = 2000
  seed: int = 0
  first_steps: int = 360
  first_scenes: int = 76
  first_copies: int = 4
  copies: int = 4
  field_share: float = 0.45
  width: int = 128
  height: int = 96
  other_sizes: tuple[tuple[int, int], ...] = (
    (160, 120),
    (160, 210),
    (224, 160),
  )
  other_scenes: int = 3
  inventories: int = 36
  questions: int = 8
  episodes: int = 17
  late: float = 0.35
  late_inventories: int = 20
  late_episodes: int = 28
  quickstart_share: float = 0.8
  grid: tuple[int, int] = demonstrations.POINT_GRID
  habits: dict[str, tuple[str, float]] = dataclasses.field(
    default_factory=lambda: dict(HABITS)
  )
  learning_rate: float = 1.5e-3
  muon_learning_rate: float = 0.02
  warmup_steps: int = 50
  row_length: int = 448
  rows: int = 24
  patches: int = 4096
  targets: int = 2944
  size: str = "tiny"
  system_prompt: str = "desktop_compact"
  parser: str = "computer_use_compact"

  @property
  def largest_screen(self) -> tuple[int, int]:
    """(width, height) of the largest screenshot."""
    return max(
      ((self.width, self.height), *self.other_sizes),
      key=lambda size: size[0] * size[1],
    )


class DataMaker:
  """Makes the sequences of a step; a function of (recipe, step)."""

  def __init__(
    self, recipe: Recipe, renderer: Any, image_store: images.ImageStore
  ):
    self._recipe = recipe
    self._renderer = renderer
    self._store = image_store
    self._tasks = desktop.DesktopTasks()
    self._grounder = grounding_conversations.Grounder(
      renderer,
      self._agent().tool_parser,
      grid=recipe.grid,
      words=words.TYPING_WORDS,
    )
    self._gym = self._make_gym()
    self._other_gyms = [desktop.DesktopGym(*s) for s in recipe.other_sizes]
    self._demonstrator = demonstrations.Demonstrator(
      renderer,
      self._agent,
      self._make_gym,
      desktop.GYM.load_oracle(),
      image_store,
      habits=recipe.habits,
      grid=recipe.grid,
    )

  def _agent(self) -> tool_agent.ToolAgent:
    return tool_agent.ToolAgent(
      prompts.get_prompt(self._recipe.system_prompt), self._recipe.parser
    )

  def _make_gym(self) -> desktop.DesktopGym:
    return desktop.DesktopGym(self._recipe.width, self._recipe.height)

  def _scene(self, rng: np.random.Generator, other: bool = False):
    """(image, referring expressions) of a task's start or a random scene."""
    gym = self._gym
    if other:
      gym = self._other_gyms[int(rng.integers(len(self._other_gyms)))]
    while True:
      if rng.random() < self._recipe.quickstart_share:
        observation = gym.start_sync(self._task(rng, int(rng.random() < 0.2)))
      else:
        observation = gym.random_scene(int(rng.integers(2**31)))
      # Title bars are everywhere and easy; they would crowd out the rest.
      expressions = [
        e
        for e in gym.referring_expressions()
        if not e[0].startswith("the title bar") or rng.random() < 0.1
      ]
      if expressions:
        return self._store.put(observation.screenshot), expressions

  def _task(self, rng: np.random.Generator, difficulty: int):
    quick = rng.random() < self._recipe.quickstart_share
    families = desktop.QUICKSTART_FAMILIES if quick else self._tasks.families()
    family = families[int(rng.integers(len(families)))]
    index, seed = int(rng.integers(2**31)), self._recipe.seed
    return self._tasks.train_task(family, index, seed, difficulty=difficulty)

  def _field(self, rng: np.random.Generator, kinds: Sequence[str]):
    """(image, referring expressions) of things of one kind."""
    kind = kinds[int(rng.integers(len(kinds)))]
    observation = self._gym.field(int(rng.integers(2**31)), kind)
    image = self._store.put(observation.screenshot)
    return image, self._gym.referring_expressions()

  def first_sequences(self, step: int) -> list[TokenSequence]:
    """Conversations of a first step: names and the places of their things.

    Begins with colours alone, since these are easiest to see; when telling them
    apart has been learned, icons and buttons come in, and longer formats.
    """
    r = self._recipe
    rng = np.random.default_rng([r.seed, step])
    if step < r.first_steps // 2:
      return [
        self._grounder.pairs_sequence(*self._field(rng, ("color",)), rng)
        for _ in range(r.first_scenes)
      ]
    return [
      self._field_sequence(rng, pairs=i % 3 > 0, point_rate=0.7)
      for i in range(r.first_scenes - 2 * r.first_copies)
    ] + self._copies(rng, r.first_copies)

  def _copies(
    self, rng: np.random.Generator, count: int
  ) -> list[TokenSequence]:
    return [self._grounder.copies_sequence(rng) for _ in range(count)]

  def _field_sequence(
    self, rng: np.random.Generator, *, pairs: bool, point_rate: float
  ) -> TokenSequence:
    """Things of one kind, as pairs or as an inventory."""
    if pairs:  # A shape's name has two words, which is no pair.
      scene = self._field(rng, _PAIR_KINDS)
      return self._grounder.pairs_sequence(*scene, rng)
    return self._grounder.inventory_sequence(
      *self._field(rng, scenes.FIELD_KINDS), rng, items=6, point_rate=point_rate
    )

  def heldout(self) -> dict[str, list[TokenSequence]]:
    """Sequences to report on.

    "mixed" ones, "copies", and pairs of each kind of thing.
    """
    rng = np.random.default_rng([self._recipe.seed, 1 << 30])
    data = {
      "mixed": [
        s
        for s in self.sequences(self._recipe.first_steps)
        if len(s.tokens) <= self._recipe.row_length
      ],
      "copies": [self._grounder.copies_sequence(rng) for _ in range(24)],
    }
    for kind in _PAIR_KINDS:
      data[kind] = [
        self._grounder.pairs_sequence(*self._field(rng, (kind,)), rng)
        for _ in range(24)
      ]
    return data

  def sequences(self, step: int) -> list[TokenSequence]:
    """All of a step's sequences."""
    r = self._recipe
    if step < r.first_steps:
      return self.first_sequences(step)
    rng = np.random.default_rng([r.seed, step])
    inventories, episodes = r.inventories, r.episodes
    if step >= (1 - r.late) * r.steps:
      inventories, episodes = r.late_inventories, r.late_episodes
    fields = round(r.field_share * inventories)
    result = (
      self._copies(rng, r.copies)
      + [
        self._field_sequence(rng, pairs=i % 2 == 0, point_rate=0.5)
        for i in range(fields)
      ]
      + [
        self._grounder.inventory_sequence(
          *self._scene(rng, other=i < r.other_scenes), rng
        )
        for i in range(inventories - fields)
      ]
      + [
        self._grounder.question_sequence(*self._scene(rng), rng)
        for _ in range(r.questions)
      ]
    )
    tasks = [
      (self._task(rng, int(rng.random() < 0.2)), int(rng.integers(2**31)))
      for _ in range(episodes)
    ]
    result += asyncio.run(self._demonstrator.sequences(tasks))
    return result


def heldout_report(
  learner: learner_lib.Learner,
  sequences: Mapping[str, Sequence[TokenSequence]],
  number_start: int,
) -> dict[str, float]:
  """Mean log-probs (nats) of number tokens and of other trainable ones.

  Of "mixed" sequences as `number_logprob` and `other_logprob`, of the words of
  "copies" as `copies_logprob`, of the number tokens of every other kind as
  `<kind>_logprob`: it stands still while a policy points at things of the kind
  but cannot distinguish them.
  """
  report = {}
  for kind, some in sequences.items():
    numbers, of_words = [], []
    for sequence, logprobs in zip(some, learner.sequence_logprobs(some)):
      n = sequence.tokens - number_start
      is_number = (n >= 0) & (n < 1000) & sequence.loss_mask
      numbers.append(logprobs[is_number])
      of_words.append(logprobs[sequence.loss_mask & ~is_number])
    number, other = (
      float(np.mean(values)) if len(values) else 0.0
      for values in (np.concatenate(numbers), np.concatenate(of_words))
    )
    if kind == "mixed":
      report["number_logprob"], report["other_logprob"] = number, other
    else:
      mean = other if kind == "copies" else number
      report[f"{kind.replace(' ', '_')}_logprob"] = mean
  return report


def pretrain(
  recipe: Recipe,
  out: pathlib.Path,
  *,
  report_every: int = 25,
  save_every: int = 250,
) -> dict[str, float]:
  """Runs the recipe; returns the last report."""
  out.mkdir(parents=True, exist_ok=True)
  (out / "recipe.json").write_text(
    json.dumps(dataclasses.asdict(recipe), indent=2) + "\n"
  )
  store = images.ImageStore(capacity_bytes=256 << 20)
  model, processor, tokenizer = checkpoint.create_policy(
    recipe.size, seed=recipe.seed, screen=recipe.largest_screen
  )
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)
  learner = learner_lib.Learner(
    model,
    processor,
    store,
    learner_lib.LearnerConfig(
      steps=recipe.steps,
      optimizer="muon",
      learning_rate=recipe.learning_rate,
      muon_learning_rate=recipe.muon_learning_rate,
      schedule="cosine",
      warmup_steps=min(recipe.warmup_steps, recipe.steps // 2),
      b2=0.98,
      row_length=recipe.row_length,
      rows=recipe.rows,
      patches=recipe.patches,
      targets=recipe.targets,
      overlong="drop",
    ),
    learner_lib.AlgorithmConfig(objective="behaviour_cloning"),
    seed=recipe.seed,
  )
  data = DataMaker(recipe, renderer, store)
  heldout = DataMaker(
    dataclasses.replace(recipe, seed=recipe.seed + 1), renderer, store
  ).heldout()
  number_start = tokenizer.token_to_id("0")

  started = time.monotonic()
  report: dict[str, float] = {}
  pool = concurrent.futures.ThreadPoolExecutor(1, "pretrain-data")
  with pool, (out / "log.jsonl").open("w") as log:
    next_data = pool.submit(data.sequences, 0)
    bar = tqdm.trange(recipe.steps, desc="pretrain", mininterval=5)
    losses = []
    for step in bar:
      sequences = next_data.result()
      if step + 1 < recipe.steps:
        next_data = pool.submit(data.sequences, step + 1)
      metrics = learner.update_on_sequences(sequences)
      losses.append(metrics["loss"])
      if (step + 1) % report_every == 0 or step + 1 == recipe.steps:
        report = {
          "step": step + 1,
          "seconds": round(time.monotonic() - started, 1),
          "loss": float(np.mean(losses)),
          "tokens_per_second": metrics["learner_tokens_per_second"],
          **heldout_report(learner, heldout, number_start),
        }
        losses.clear()
        log.write(json.dumps(report) + "\n")
        log.flush()
        bar.set_postfix_str(
          f"loss {report['loss']:.3f}, held-out numbers"
          f" {report['number_logprob']:.2f}, colors"
          f" {report['color_logprob']:.2f}, copies"
          f" {report['copies_logprob']:.2f}"
        )
      if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
        checkpoint.save_policy(out, learner.policy(), dtype="float16")
  return report


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python scripts/pretraining/pretrain.py",
    description=(
      "Pretrains the small policies that the package ships. A maintainer's"
      " command."
    ),
  )
  out.add_argument(
    "--out", type=pathlib.Path, required=True, help="directory to write"
  )
  out.add_argument(
    "--policy",
    choices=sorted(CHANGES),
    default="tiny_vl",
    help="the shipped policy to make (%(default)s)",
  )
  out.add_argument("--steps", type=int, help="default: the recipe's")
  out.add_argument(
    "--seed",
    type=int,
    default=Recipe.seed,
    help="of weights and data (%(default)s)",
  )
  out.add_argument(
    "--save-every",
    type=int,
    default=250,
    metavar="STEPS",
    help="steps between two saves (%(default)s)",
  )
  return out


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  for option, least in (("steps", 1), ("seed", 0), ("save_every", 1)):
    value = getattr(args, option)
    if value is not None and not least <= value < 2**63:
      name = option.replace("_", "-")
      parser().error(f"--{name}={value} must be {least} or more, below 2**63")
  train_tokenizer.refuse_folder(parser(), "--out", args.out)
  host_memory.tune()
  changes = dict(CHANGES[args.policy], seed=args.seed)
  if args.steps is not None:
    changes["steps"] = args.steps
  recipe = Recipe(**changes)
  report = pretrain(recipe, args.out, save_every=args.save_every)
  print(json.dumps(report))


if __name__ == "__main__":
  main()
