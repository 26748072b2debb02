"""The rollout engine beside what else could sample for it, in one run.

Plays the same multi-turn episodes with the same weights in every column: a
Qwen3-VL of a CPU's size, `episodes` at a time, a new screenshot each turn,
`sampled` tokens a turn at temperature 1. A group of episodes starts from one
screenshot, as in GRPO. No column stops early, so that no peer has to wait for
the longest answer of its batch, and none is charged for compilation.

  ours          `RolloutEngine`, each episode on its own.
  ours, text    the same with text in place of pixels, beside `upstream`.
  transformers  `generate` on torch, the batch turn by turn, all of the prompt
                and its images each time: `generate` cannot add images to
                `past_key_values`.
  by hand       the same model with `past_key_values` kept over turns and a
                loop of our own in place of `generate`: the most that can be
                had of it.
  upstream      `tunix.generate.sampler.Sampler`, the batch turn by turn. No
                Qwen-VL there: `models.qwen3` with our decoder's weights, and
                text in place of pixels, as many tokens of it.

Before the clock starts, the columns are held to each other: with these weights
all of them find the same greedy tokens.

    python benchmarks/bench_rollout_peers.py --json peers.json
    python benchmarks/bench_rollout_peers.py --size small
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any, Callable

from flax import nnx
import jax
import numpy as np
from peers import rollout_torch
from peers import rollout_upstream
from peers import rollout_workload
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

COLUMNS = ("ours", "transformers", "by hand", "ours, text", "upstream")
BESIDE = {"upstream": "ours, text"}
"""What a column is compared with, unless that is "ours"."""
TARGETS = {"upstream": 5.0, "transformers": 3.0}
CHECKED = rollout_workload.CHECKED
Workload = rollout_workload.Workload


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--episodes", type=int, default=32)
  parser.add_argument("--group", type=int, default=8)
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--sampled", type=int, default=30)
  parser.add_argument("--text", type=int, default=24)
  parser.add_argument("--screen", type=int, nargs=2, default=(224, 160))
  parser.add_argument("--size", default="tiny", choices=("tiny", "small"))
  parser.add_argument("--rounds", type=int, default=2)
  parser.add_argument(
    "--columns", nargs="*", default=COLUMNS, choices=COLUMNS, metavar="NAME"
  )
  parser.add_argument("--steps", type=int, default=None)
  parser.add_argument("--rows", type=int, nargs="*", default=None)
  parser.add_argument("--prefill-rows", type=int, nargs="*", default=None)
  parser.add_argument("--tokens", type=int, nargs="*", default=None)
  parser.add_argument("--windows", type=int, nargs="*", default=None)
  parser.add_argument("--json", type=pathlib.Path, default=None)
  return parser.parse_args()


def make_policy(args: argparse.Namespace):
  """(model, processor); weights whose logits are of order 1."""
  config = qwen_checkpoint.small_config("qwen3_vl_tiny")
  # Upstream's model knows no other base, nor tied weights of another name.
  text = dataclasses.replace(config.text, rope_theta=1_000_000.0)
  if args.size == "small":
    text = dataclasses.replace(
      text,
      hidden_size=512,
      intermediate_size=1536,
      num_hidden_layers=8,
      num_attention_heads=8,
      num_key_value_heads=4,
      head_dim=64,
      mrope_section=(12, 10, 10),
    )
  vision = dataclasses.replace(config.vision, out_hidden_size=text.hidden_size)
  config = dataclasses.replace(config, text=text, vision=vision)
  processor = qwen_checkpoint.processor_of(config)
  model = qwen_checkpoint.random_model(config)
  table = model.language_model.embed_tokens.weight
  table[...] = table[...] * 10.0  # Else greedy tokens would hang on rounding.
  return model, processor


# --- ours --------------------------------------------------------------------


class Ours:
  """Each episode a coroutine."""

  def __init__(self, args, workload: Workload, model, processor, text: bool):
    self.name = "ours, text" if text else "ours"
    self._load, self._model, self._text = workload, model, text
    options = {
      "decode_steps_per_call": args.steps,
      "decode_rows": args.rows,
      "prefill_rows": args.prefill_rows,
      "prefill_buckets": args.tokens,
      "window_buckets": args.windows,
    }
    self._store = images_lib.ImageStore()
    self.engine = engine_lib.RolloutEngine(
      model,
      processor,
      self._store,
      engine_config.EngineConfig(
        slots=args.episodes,
        context_length=workload.context,
        **{k: v for k, v in options.items() if v is not None},
      ),
      image_sizes=[tuple(args.screen)],
      banned_token_ids=model.config.banned_token_ids,
    )
    self.engine.warm_up()
    self._runs = 0

  def greedy(self, with_image: bool) -> np.ndarray | None:
    load = self._load
    tokens, spans = load.text_turn(0, 0), ()
    if with_image and self._text:
      return None
    if with_image:
      tokens = load.turn(0, 0)
      spans = (self._span(0, 0, 1),)
    sampling = policy_client.SamplingParams(
      max_new_tokens=CHECKED, temperature=0.0
    )
    prompt = policy_client.TokenPrompt(tokens, spans)
    call = self.engine.generate(prompt, sampling, session="greedy")
    tokens = asyncio.run(call).tokens
    asyncio.run(self.engine.release("greedy"))
    return tokens

  def run(self) -> dict[str, Any]:
    before = self.engine.stats()
    self._runs += 1
    # What an earlier round has cached is not this one's.
    self.engine.update_weights(self._runs, self._model).result(60)
    started = time.perf_counter()
    asyncio.run(self._play())
    seconds = time.perf_counter() - started
    after = self.engine.stats()
    counts = {k: after[k] - before[k] for k in after}
    return {
      "seconds": seconds,
      "prefilled": int(counts["prefilled_tokens"]),
      "images": int(counts["images_encoded"]),
      "sampled": int(counts["decode_tokens"]),
      "compiles": int(after["compiles_after_warm_up"]),
      "shares": {
        part: round(counts[f"seconds_{part}"] / seconds, 3)
        for part in ("vision", "prefill", "decode", "host")
      },
    }

  def close(self) -> None:
    self.engine.close()

  def _span(self, episode, turn, offset) -> trajectory.ImageSpan:
    image = self._store.put(self._load.pixels[episode][turn])
    return trajectory.ImageSpan(image, offset, self._load.image_tokens)

  async def _play(self) -> None:
    episodes = range(self._load.args.episodes)
    await asyncio.gather(*(self._episode(i) for i in episodes))

  async def _episode(self, episode: int) -> None:
    args = self._load.args
    sampling = policy_client.SamplingParams(max_new_tokens=args.sampled)
    tokens = np.zeros(0, np.int32)
    spans: tuple[trajectory.ImageSpan, ...] = ()
    name = f"{self._runs}.{episode}"
    for turn in range(args.turns):
      if self._text:
        new = self._load.text_turn(episode, turn)
      else:
        spans += (self._span(episode, turn, len(tokens) + 1),)
        new = self._load.turn(episode, turn)
      tokens = np.concatenate([tokens, new])
      prompt = policy_client.TokenPrompt(tokens, spans)
      got = await self.engine.generate(prompt, sampling, session=name)
      tokens = np.concatenate([tokens, got.tokens])
    await self.engine.release(name)


# --- all of them -------------------------------------------------------------


def check(columns) -> list[str]:
  """Holds the columns to each other's greedy tokens; says what was compared.

  Raises:
    AssertionError: they do not compute the same model.
  """
  lines = []
  for with_image, what in ((True, "an image"), (False, "text")):
    tokens = {c.name: c.greedy(with_image) for c in columns}
    tokens = {k: v.tolist() for k, v in tokens.items() if v is not None}
    if len({tuple(v) for v in tokens.values()}) > 1:
      raise AssertionError(f"greedy tokens after {what} differ: {tokens}")
    lines.append(f"{what}: {', '.join(tokens)} agree on {CHECKED} tokens")
  return lines


def table(workload, results) -> str:
  """Returns the table that is printed."""
  lines = [
    f"{'':14}{'tokens/s':>10}{'seconds':>9}{'median':>9}{'prefilled':>11}"
    f"{'x unique':>10}"
    f"{'images':>8}{'slower':>9}{'target':>8}"
  ]
  for name, got in results.items():
    ratio = f"{got['slower']:.2f}x" if "slower" in got else ""
    target = f">= {TARGETS[name]:g}x" if name in TARGETS else ""
    lines.append(
      f"{name:14}{got['tokens_per_second']:10.0f}{got['seconds']:9.2f}"
      f"{got['median_seconds']:9.2f}{got['prefilled']:11d}"
      f"{got['prefilled'] / workload.unique_tokens:10.3f}"
      f"{got['images']:8d}{ratio:>9}{target:>8}"
    )
  lines.append(
    "'slower' than ours; upstream than ours on text."
    f" {workload.unique_tokens} unique prompt tokens,"
    f" {workload.distinct_images} distinct images,"
    f" {workload.sampled_tokens} sampled tokens"
  )
  return "\n".join(lines)


def main() -> None:
  args = parse_args()
  host_memory.tune()
  model, processor = make_policy(args)
  workload = Workload(args, model.config, processor)
  columns = []
  with tempfile.TemporaryDirectory() as directory:
    directory = pathlib.Path(directory)
    hf_checkpoint.save_model(directory, model)
    make: dict[str, Callable[[], Any]] = {
      "ours": lambda: Ours(args, workload, model, processor, text=False),
      "ours, text": lambda: Ours(args, workload, model, processor, text=True),
      "transformers": lambda: rollout_torch.Transformers(
        args, workload, directory
      ),
      "by hand": lambda: rollout_torch.ByHand(args, workload, directory),
      "upstream": lambda: rollout_upstream.Upstream(args, workload, directory),
    }
    for name in args.columns:
      try:
        columns.append(make[name]())
      except ImportError as error:
        print(f"{name} is left out: {error}")
  checks = check(columns)
  for line in checks:
    print(line)
  times: dict[str, list[dict[str, Any]]] = {c.name: [] for c in columns}
  # The first of each compiles, or touches memory for the first time.
  for round_ in range(args.rounds + 1):
    for column in columns:
      got = column.run()
      print(
        f"round {round_ or 'warm'}: {column.name} {got['seconds']:.2f} s",
        flush=True,
      )
      if round_:
        times[column.name].append(got)
  results = {}
  for name, rounds in times.items():
    # The least disturbed: machines are shared.
    best = min(rounds, key=lambda r: r["seconds"])
    seconds = best["seconds"]
    results[name] = best | {
      "median_seconds": statistics.median(r["seconds"] for r in rounds),
      "all_seconds": [round(r["seconds"], 3) for r in rounds],
      "tokens_per_second": best["sampled"] / seconds,
    }
  for name, got in results.items():
    if (baseline := results.get(BESIDE.get(name, "ours"))) is not None:
      got["beside"] = BESIDE.get(name, "ours")
      got["slower"] = got["seconds"] / baseline["seconds"]
  for column in columns:
    column.close()
  parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
  load = os.getloadavg()[1]
  print(f"\n{parameters / 1e6:.1f}M parameters, float32, load {load:.1f}")
  if load > 1.5 * (os.cpu_count() or 1):
    # torch's threads wait for each other at every operation.
    print("other work runs here: torch's columns suffer most from that")
  print(table(workload, results))
  for name in ("ours", "ours, text"):
    if name in results:
      print(f"{name}, shares of its time: {results[name]['shares']}")
  report = {
    "parameters": parameters,
    "load": load,
    "workload": {
      k: getattr(workload, k)
      for k in ("unique_tokens", "distinct_images", "sampled_tokens", "context")
    },
    "checked": checks,
    "columns": results,
    "arguments": {k: str(v) for k, v in vars(args).items()},
  }
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
