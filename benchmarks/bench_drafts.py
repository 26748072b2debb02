"""Times the engine with drafts and without, on the prompts of a run.

    make train ARGS='examples/configs/smollm2.yaml name=s'
    python benchmarks/bench_drafts.py runs/s
    python benchmarks/bench_drafts.py runs/s --text 'Tell me a story.'

The run's policy samples again what followed each prompt of its last episodes,
or answers `--text`, where little repeats. Engines with `drafts=false`, `true`
and `auto` take turns, `--rows` requests at a time. A row of the table is a
number of requests: tokens a second of decoding (medians of the rounds), their
ratio to the engine without drafts, the share of drafts that were right, and how
many completions are equal: all, but for ties that rounding decides.

Does not play environments: only the engine is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import statistics
from typing import Any, Iterator

import numpy as np
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import load_policy

MODES = ("false", "true", "auto")


def prompts(run: pathlib.Path, count: int) -> list[np.ndarray]:
  """The prompts of the run's last episodes, text only, int32 each."""
  lines = (run / "trajectories.jsonl").read_text().splitlines()
  result: list[np.ndarray] = []
  for line in reversed(lines):
    for sequence in json.loads(line).get("sequences", ()):
      mask = np.array(sequence["loss_mask"])
      starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
      tokens = np.array(sequence["tokens"], np.int32)
      result += [tokens[:start] for start in starts if start]
    if len(result) >= count:
      break
  return result[:count]


async def sample(
  engine: engine_lib.RolloutEngine,
  texts: list[np.ndarray],
  rows: int,
  most: int,
  stops: tuple[int, ...],
  first_seed: int,
) -> tuple[float, list[list[int]]]:
  """Returns tokens a second of decoding, and each prompt's completion."""
  places, out = asyncio.Semaphore(rows), [[0]] * len(texts)

  async def one(i: int) -> None:
    async with places:
      sampling = policy_client.SamplingParams(
        max_new_tokens=most, seed=first_seed + i, stop_token_ids=stops
      )
      prompt = policy_client.TokenPrompt(texts[i], ())
      completion = await engine.generate(prompt, sampling, session=f"{i}")
      await engine.release(f"{i}")
      out[i] = completion.tokens.tolist()

  before = engine.stats()
  await asyncio.gather(*map(one, range(len(texts))))
  after = engine.stats()
  tokens, seconds = (
    after[name] - before[name] for name in ("decode_tokens", "seconds_decode")
  )
  return tokens / seconds, out


def measure(args: argparse.Namespace, rows: int) -> Iterator[str]:
  """Yields the table's cells for a number of requests at a time."""
  model, processor, tokenizer = load_policy(args.run / "policy")
  texts = prompts(args.run, args.prompts)
  if args.text:
    turn = f"<|im_start|>user\n{args.text}<|im_end|>\n<|im_start|>assistant\n"
    texts = [np.array(tokenizer.encode(turn).ids, np.int32)] * args.prompts
  stops = tuple(
    i for i in [tokenizer.token_to_id("<|im_end|>")] if i is not None
  )
  engines = {}
  for mode in MODES:
    config = config_lib.EngineConfig(
      slots=rows,
      decode_rows=(rows,),
      context_length=max(map(len, texts)) + args.tokens,
      drafts=mode,
      draft_tokens=args.draft_tokens,
    )
    engine = engine_lib.RolloutEngine(
      model, processor, images.ImageStore(), config
    )
    engine.warm_up()
    engines[mode] = engine
  rates: dict[str, list[float]] = {mode: [] for mode in MODES}
  texts_of: dict[str, Any] = {}
  for number in range(args.rounds):
    seed = number * args.prompts
    for mode, engine in engines.items():
      rate, texts_of[mode] = asyncio.run(
        sample(engine, texts, rows, args.tokens, stops, seed)
      )
      rates[mode].append(rate)
  plain = statistics.median(rates["false"])
  yield str(rows)
  for mode in MODES:
    rate = statistics.median(rates[mode])
    yield f"{rate:.0f} ({rate / plain:.2f})"
  stats = engines["true"].stats()
  yield f"{stats['accepted_tokens'] / max(1, stats['drafted_tokens']):.2f}"
  same = sum(
    a == b for a, b in zip(texts_of["false"], texts_of["true"], strict=True)
  )
  yield f"{same} of {len(texts)}"
  for engine in engines.values():
    engine.close()


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("run", type=pathlib.Path, help="directory of a run")
  parser.add_argument("--text", default="", help="a user's words")
  parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--prompts", type=int, default=64)
  parser.add_argument("--tokens", type=int, default=48)
  parser.add_argument("--draft-tokens", type=int, default=3)
  args = parser.parse_args()
  print("| requests | false, tokens/s | true | auto | right | equal |")
  print("|---|---|---|---|---|---|")
  for rows in args.rows:
    print(f"| {' | '.join(measure(args, rows))} |", flush=True)


if __name__ == "__main__":
  main()
