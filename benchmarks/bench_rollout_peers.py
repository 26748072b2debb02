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
from tunix.rl.multi_turn import images as images_lib
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn import trajectory
from tunix.rl.multi_turn.policy import hf_checkpoint
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy import qwen_checkpoint
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.rollout import engine as engine_lib

COLUMNS = ("ours", "transformers", "by hand", "ours, text", "upstream")
BESIDE = {"upstream": "ours, text"}
"""What a column is compared with, unless that is "ours"."""
TARGETS = {"upstream": 5.0, "transformers": 3.0}
CHECKED = 8  # Greedy tokens that all columns must agree on.


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
  vision = dataclasses.replace(
      config.vision, out_hidden_size=text.hidden_size
  )
  config = dataclasses.replace(config, text=text, vision=vision)
  processor = qwen_checkpoint.processor_of(config)
  rows, columns = processor.grid(*args.screen)
  config = dataclasses.replace(config, max_image_patches=rows * columns)
  model = qwen_checkpoint.random_model(config)
  table = model.language_model.embed_tokens.weight
  table[...] = table[...] * 10.0  # Else greedy tokens would hang on rounding.
  return model, processor


class Workload:
  """Screenshots and words of every episode; the same in every column.

  Attributes:
    pixels: [episode][turn] uint8[H, W, 3].
    texts: [episode][turn] int32[.], what is shown beside the screenshot.
    image_tokens: of a screenshot.
    unique_tokens: of all prompts, without what was sampled; those that a
      group has in common once.
    distinct_images: as it says.
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
        pixels.append(
            rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        )
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
    return np.concatenate([
        [config.vision_start_token_id],
        np.full(self.image_tokens, config.image_token_id),
        [config.vision_end_token_id],
        self.texts[episode][turn],
    ]).astype(np.int32)

  def text_turn(self, episode: int, turn: int) -> np.ndarray:
    """The same length without pixels, and as much in common in a group."""
    which = (episode // self.args.group, 0) if turn == 0 else (episode, turn)
    rng = np.random.default_rng((*which, 1))
    return rng.integers(300, 1300, self.turn_tokens).astype(np.int32)


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
        slots=args.episodes,
        context_length=workload.context,
        image_sizes=[tuple(args.screen)],
        banned_token_ids=model.config.banned_token_ids,
        **{k: v for k, v in options.items() if v is not None},
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
    sampling = policy_client.SamplingParams(CHECKED, temperature=0.0)
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
    done = {k: after[k] - before[k] for k in after}
    return {
        "seconds": seconds,
        "prefilled": int(done["prefilled_tokens"]),
        "images": int(done["images_encoded"]),
        "sampled": int(done["decode_tokens"]),
        "compiles": int(after["compiles_after_warm_up"]),
        "shares": {
            part: round(done[f"seconds_{part}"] / seconds, 3)
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


# --- transformers ------------------------------------------------------------


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
      known = self._cache.get_seq_length()
      ids = torch.tensor(self._tokens[:, known:]).long()
      # Rows are of one shape, hence of the same positions.
      places = self._load.processor.positions(
          self._tokens[0], self._spans[0], known
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
      self._tokens = np.concatenate(
          [self._tokens, drawn.int().numpy()], axis=1
      )
    return self._tokens[:, -count:]


# --- upstream ----------------------------------------------------------------


class _Digits:
  """A tokenizer for the sampler: ids as words. It takes strings only."""

  def encode(self, text: str, **unused) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids, **unused) -> str:
    return " ".join(map(str, ids))

  bos_id = eos_id = pad_id = lambda self: 0


class Upstream:
  """`Sampler`, the batch turn by turn, on text of the same lengths."""

  name = "upstream"

  def __init__(self, args, workload: Workload, directory: pathlib.Path):
    from safetensors import numpy as safetensors_numpy  # pylint: disable=g-import-not-at-top
    from tunix.generate import sampler  # pylint: disable=g-import-not-at-top
    from tunix.models.qwen3 import model as model_lib  # pylint: disable=g-import-not-at-top
    from tunix.models.qwen3 import params  # pylint: disable=g-import-not-at-top

    self._load, self._args = workload, args
    text = workload.config.text
    theirs = directory / "text"
    theirs.mkdir()
    tensors = safetensors_numpy.load_file(directory / "model.safetensors")
    safetensors_numpy.save_file(
        {
            key.replace("model.language_model.", "model."): value
            for key, value in tensors.items()
            if not key.startswith("model.visual.")
        },
        theirs / "model.safetensors",
    )
    config = model_lib.ModelConfig(
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        embed_dim=text.hidden_size,
        hidden_dim=text.intermediate_size,
        num_heads=text.num_attention_heads,
        head_dim=text.head_dim,
        num_kv_heads=text.num_key_value_heads,
        rope_theta=int(text.rope_theta),
        norm_eps=text.rms_norm_eps,
        use_tied_embedding=workload.config.tie_word_embeddings,
    )
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    self._sampler = sampler.Sampler(
        params.create_model_from_safe_tensors(str(theirs), config, mesh),
        _Digits(),
        sampler.CacheConfig(
            cache_size=workload.context,
            num_layers=text.num_hidden_layers,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
        ),
    )

  def greedy(self, with_image: bool) -> np.ndarray | None:
    if with_image:
      return None  # It cannot look.
    out = self._sampler(
        _Digits().decode(self._load.text_turn(0, 0)),
        CHECKED,
        max_prompt_length=self._load.turn_tokens,
        eos_tokens=[self._load.config.image_token_id],
        forbidden_tokens=self._load.config.banned_token_ids,
    )
    return np.asarray(out.tokens[0])

  def run(self) -> dict[str, Any]:
    load, args = self._load, self._args
    prefilled = 0
    started = time.perf_counter()
    rows: list[list[int]] = [[] for _ in range(args.episodes)]
    for turn in range(args.turns):
      for i, row in enumerate(rows):
        row += load.text_turn(i, turn).tolist()
      prefilled += sum(map(len, rows))
      out = self._sampler(
          [_Digits().decode(row) for row in rows],
          args.sampled,
          max_prompt_length=len(rows[0]),  # No padding is computed.
          # Banned, so that it never ends early.
          eos_tokens=[load.config.image_token_id],
          forbidden_tokens=load.config.banned_token_ids,
          temperature=1.0,
          top_p=1.0,
          seed=turn,
          return_logprobs=True,
      )
      for row, tokens in zip(rows, out.tokens):
        assert len(tokens) == args.sampled
        row += np.asarray(tokens).tolist()
    return {
        "seconds": time.perf_counter() - started,
        "prefilled": prefilled,
        "images": 0,
        "sampled": load.sampled_tokens,
    }

  def close(self) -> None:
    del self._sampler


# --- all of them -------------------------------------------------------------


def check(columns) -> list[str]:
  """Holds the columns to each other's greedy tokens; says what was compared.

  Raises:
    AssertionError: they do not compute the same model.
  """
  said = []
  for with_image, what in ((True, "an image"), (False, "text")):
    found = {c.name: c.greedy(with_image) for c in columns}
    found = {k: v.tolist() for k, v in found.items() if v is not None}
    if len({tuple(v) for v in found.values()}) > 1:
      raise AssertionError(f"greedy tokens after {what} differ: {found}")
    said.append(f"{what}: {', '.join(found)} agree on {CHECKED} tokens")
  return said


def table(workload, results) -> str:
  """What is printed."""
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
        "ours, text": lambda: Ours(
            args, workload, model, processor, text=True
        ),
        "transformers": lambda: Transformers(args, workload, directory),
        "by hand": lambda: ByHand(args, workload, directory),
        "upstream": lambda: Upstream(args, workload, directory),
    }
    for name in args.columns:
      try:
        columns.append(make[name]())
      except ImportError as error:
        print(f"{name} is left out: {error}")
  said = check(columns)
  for line in said:
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
    if (ours := results.get(BESIDE.get(name, "ours"))) is not None:
      got["beside"] = BESIDE.get(name, "ours")
      got["slower"] = got["seconds"] / ours["seconds"]
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
          for k in (
              "unique_tokens", "distinct_images", "sampled_tokens", "context"
          )
      },
      "checked": said,
      "columns": results,
      "arguments": {k: str(v) for k, v in vars(args).items()},
  }
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
