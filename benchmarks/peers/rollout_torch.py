"""Columns of `bench_rollout_peers` that sample with transformers, on torch."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import numpy as np
from peers import rollout_workload
from tunix.rl.multi_turn.core import trajectory

CHECKED = rollout_workload.CHECKED
Workload = rollout_workload.Workload


class Transformers:
  """`generate`, the batch turn by turn."""

  name = "transformers"

  def __init__(self, args, workload: Workload, directory: pathlib.Path):
    import torch  # pylint: disable=g-import-not-at-top
    import transformers  # pylint: disable=g-import-not-at-top

    self._torch = torch
    torch.set_num_threads(os.cpu_count() or 1)
    self._load, self._args = workload, args
    self.module = transformers.AutoModelForImageTextToText.from_pretrained(
      directory, dtype=torch.float32
    ).eval()
    self.version = f"transformers {transformers.__version__}"
    self._seen: dict[bytes, Any] = {}

  def greedy(self, with_image: bool) -> np.ndarray:
    load, torch = self._load, self._torch
    tokens = load.turn(0, 0) if with_image else load.text_turn(0, 0)
    pixels = [self._pixels(0, 0)] if with_image else []
    ids = torch.tensor(tokens[None]).long()
    out = self._generate(ids, pixels, do_sample=False, count=CHECKED)
    return out[0].numpy()

  def run(self) -> dict[str, Any]:
    load, args, torch = self._load, self._args, self._torch
    prefilled = images = 0
    started = time.perf_counter()
    ids = torch.zeros((args.episodes, 0), dtype=torch.long)
    pixels: list[list[Any]] = [[] for _ in range(args.episodes)]
    for turn in range(args.turns):
      new = np.stack([load.turn(i, turn) for i in range(args.episodes)])
      ids = torch.cat([ids, torch.tensor(new).long()], dim=1)
      for i in range(args.episodes):
        pixels[i].append(self._pixels(i, turn))
      prefilled += ids.numel()
      images += sum(map(len, pixels))
      flat = [p for row in pixels for p in row]
      out = self._generate(ids, flat, do_sample=True, count=args.sampled)
      ids = torch.cat([ids, out], dim=1)
    return {
      "seconds": time.perf_counter() - started,
      "prefilled": prefilled,
      "images": images,
      "sampled": load.sampled_tokens,
    }

  def close(self) -> None:
    del self.module

  def _generate(self, ids, pixels, do_sample: bool, count: int):
    torch = self._torch
    pad = self._load.config.image_token_id
    images = {}
    if pixels:
      images = {
        "pixel_values": torch.cat([p for p, _ in pixels]),
        "image_grid_thw": torch.tensor([grid for _, grid in pixels]),
        "mm_token_type_ids": (ids == pad).int(),
      }
    with torch.inference_mode():
      out = self.module.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=do_sample,
        temperature=1.0 if do_sample else None,
        top_k=0 if do_sample else None,
        top_p=1.0 if do_sample else None,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=list(self._load.config.banned_token_ids),
        **images,
      )
    return out[:, ids.shape[1] :]

  def _pixels(self, episode: int, turn: int):
    """As the checkpoint's processor gives them: normalised, frames twice."""
    torch, load = self._torch, self._load
    pixels = load.pixels[episode][turn]
    patched = load.processor.patchify(pixels)
    values = torch.tensor(patched.patches).float() / 127.5 - 1.0
    values = values.reshape(len(values), 3, 1, -1).expand(-1, -1, 2, -1)
    rows, columns = load.processor.grid(pixels.shape[1], pixels.shape[0])
    return values.reshape(len(values), -1), (1, rows, columns)


class ByHand(Transformers):
  """Its forward passes with a cache kept over turns."""

  name = "by hand"

  def greedy(self, with_image: bool) -> np.ndarray:
    load, torch = self._load, self._torch
    tokens = load.turn(0, 0) if with_image else load.text_turn(0, 0)
    pixels = [self._pixels(0, 0)] if with_image else []
    with torch.inference_mode():
      self._begin(1, [[self._image(0, 0)]] if with_image else [[]])
      out = self._turn(tokens[None], pixels, CHECKED, greedy=True)
    return out[0]

  def run(self) -> dict[str, Any]:
    load, args, torch = self._load, self._args, self._torch
    count = args.episodes
    started = time.perf_counter()
    with torch.inference_mode():
      self._begin(count, [[] for _ in range(count)])
      for turn in range(args.turns):
        new = np.stack([load.turn(i, turn) for i in range(count)])
        for i, spans in enumerate(self._spans):
          spans.append(self._image(self._tokens.shape[1], turn, i))
        pixels = [self._pixels(i, turn) for i in range(count)]
        self._turn(new, pixels, args.sampled, greedy=False)
    return {
      "seconds": time.perf_counter() - started,
      "prefilled": args.turns * count * load.turn_tokens
      + (args.turns - 1) * count,
      "images": args.turns * count,
      "sampled": load.sampled_tokens,
    }

  def _image(self, start: int, turn: int, episode: int = 0):
    height, width, _ = self._load.pixels[episode][turn].shape
    ref = trajectory.ImageRef(f"{turn:064x}", width, height)
    return trajectory.ImageSpan(ref, start + 1, self._load.image_tokens)

  def _begin(self, rows: int, spans) -> None:
    import transformers  # pylint: disable=g-import-not-at-top

    self._cache = transformers.DynamicCache(config=self.module.config)
    self._tokens = np.zeros((rows, 0), np.int32)
    self._spans = spans

  def _turn(self, new, pixels, count: int, greedy: bool) -> np.ndarray:
    torch = self._torch
    self._tokens = np.concatenate([self._tokens, new], axis=1)
    for _ in range(count):
      cached_tokens = self._cache.get_seq_length()
      ids = torch.tensor(self._tokens[:, cached_tokens:]).long()
      # Rows are of one shape, hence of the same positions.
      places = self._load.processor.positions(
        self._tokens[0], self._spans[0], cached_tokens
      )
      places = torch.tensor(places.T[:, None]).long()
      images = {}
      if pixels:
        images = {
          "pixel_values": torch.cat([p for p, _ in pixels]),
          "image_grid_thw": torch.tensor([grid for _, grid in pixels]),
        }
        pixels = []
      out = self.module(
        input_ids=ids,
        position_ids=places.expand(-1, len(ids), -1),
        past_key_values=self._cache,
        use_cache=True,
        logits_to_keep=1,
        **images,
      )
      logits = out.logits[:, -1].float()
      logits[:, list(self._load.config.banned_token_ids)] = -torch.inf
      if greedy:
        drawn = logits.argmax(-1, keepdim=True)
      else:
        drawn = torch.multinomial(torch.softmax(logits, -1), 1)
      self._tokens = np.concatenate([self._tokens, drawn.int().numpy()], axis=1)
    return self._tokens[:, -count:]
