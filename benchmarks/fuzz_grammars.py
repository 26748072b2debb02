"""Breaks texts of every grammar and counts what its parser makes of them.

    python benchmarks/fuzz_grammars.py                     # 100,000 a family
    python benchmarks/fuzz_grammars.py --mutations 1000 --parser opencua

Fails at the first exception that is not the typed error, action outside the
screenshot, or position outside the text; it prints the seed and the text.
`slowest` is the longest that one text took.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time

sys.path.insert(
  0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "helpers")
)
import grammar_fuzz  # noqa: E402
from tunix.rl.multi_turn.parser import tool_parser  # noqa: E402


def fuzz(name: str, mutations: int, seed: int) -> str:
  """A line of figures of one grammar."""
  parser = tool_parser.make_tool_parser(name)
  texts = grammar_fuzz.seeds(parser)
  rng = random.Random(f"{seed}/{name}")
  calls = errors = 0
  slowest, began = 0.0, time.perf_counter()
  for i in range(mutations):
    text = grammar_fuzz.broken(texts, rng)
    start = time.perf_counter()
    try:
      call_count, wrong = grammar_fuzz.check(parser, text)
    except Exception:
      print(f"{name}: seed {seed}, mutation {i}: {text!r}", file=sys.stderr)
      raise
    slowest = max(slowest, time.perf_counter() - start)
    calls += call_count
    errors += wrong
  return (
    f"{name:<22} {mutations:>8,} texts {calls:>9,} calls {errors:>8,} errors"
    f"  {mutations / (time.perf_counter() - began):>7,.0f} texts/s"
    f"  slowest {slowest * 1e3:.1f} ms"
  )


def main() -> None:
  arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  arguments.add_argument("--mutations", type=int, default=100_000)
  arguments.add_argument("--seed", type=int, default=0)
  arguments.add_argument("--parser", help="one grammar; default: all")
  args = arguments.parse_args()
  names = [args.parser] if args.parser else tool_parser.tool_parser_names()
  for name in names:
    print(fuzz(name, args.mutations, args.seed), flush=True)
  print(f"{len(names)} grammars: 0 exceptions, 0 actions outside the screen")


if __name__ == "__main__":
  main()
