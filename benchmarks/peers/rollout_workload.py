"""The episodes of `bench_rollout_peers`: the same in every column."""

from __future__ import annotations

import numpy as np
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

CHECKED = 8  # Greedy tokens that all columns must agree on.


class Workload:
  """Screenshots and words of every episode; the same in every column.

  Attributes:
    pixels: [episode][turn] uint8[H, W, 3].
    texts: [episode][turn] int32[.], what is shown beside the screenshot.
    image_tokens: Tokens of a screenshot.
    unique_tokens: Tokens of all prompts without sampled ones; tokens that a
      group has in common count once.
    distinct_images: Number of different screenshots.
  """

  def __init__(self, args, config: qwen_config.QwenVLConfig, processor):
    self.args, self.config, self.processor = args, config, processor
    width, height = args.screen
    self.image_tokens = processor.num_image_tokens(width, height)
    self.pixels, self.texts = [], []
    for episode in range(args.episodes):
      pixels, texts = [], []
      for turn in range(args.turns):
        which = (episode // args.group, 0) if turn == 0 else (episode, turn)
        rng = np.random.default_rng(which)
        pixels.append(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        texts.append(rng.integers(300, 1300, args.text).astype(np.int32))
      self.pixels.append(pixels)
      self.texts.append(texts)
    groups = -(-args.episodes // args.group)
    later = args.episodes * (args.turns - 1)
    self.turn_tokens = self.image_tokens + 2 + args.text
    self.unique_tokens = (groups + later) * self.turn_tokens
    self.distinct_images = groups + later
    self.sampled_tokens = args.episodes * args.turns * args.sampled
    self.context = args.turns * (self.turn_tokens + args.sampled)

  def turn(self, episode: int, turn: int) -> np.ndarray:
    """int32[.]: what a turn adds to the prompt."""
    config = self.config
    return np.concatenate(
      [
        [config.vision_start_token_id],
        np.full(self.image_tokens, config.image_token_id),
        [config.vision_end_token_id],
        self.texts[episode][turn],
      ]
    ).astype(np.int32)

  def text_turn(self, episode: int, turn: int) -> np.ndarray:
    """The same length without pixels, and as much in common in a group."""
    which = (episode // self.args.group, 0) if turn == 0 else (episode, turn)
    rng = np.random.default_rng((*which, 1))
    return rng.integers(300, 1300, self.turn_tokens).astype(np.int32)
