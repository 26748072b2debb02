"""Writes the table of docs/tpu.md: what trains a policy on a slice, how fast.

For each published size and slice it plans several ways to train (all weights,
an adapter, an adapter with int8 rollout weights, rollouts elsewhere), takes the
first that fits, and of its meshes the one whose update has the lowest roofline.
Everything is predicted, as by `plan --analytic`; docs/tpu.md compares such
predictions with the compiler's.

  python benchmarks/tpu_table.py            # 10 minutes on a core
  python benchmarks/tpu_table.py --sizes 4B --slices v5e:4x4
"""

import argparse
import itertools
import sys

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import plan as plan_lib
from tunix.rl.multi_turn.planning import chips
from tunix.rl.multi_turn.planning import planned_run

SIZES = ("2B", "4B", "8B", "32B", "30B-A3B")
SLICES = {"v5e:4x4": "v5e-16", "v5p:2x4x4": "v5p-64", "v6e:8x8": "v6e-64"}
LENGTH = 8192
COMMON = (
  "gym.width=1280", "gym.height=704", "learner.patches=28160",
  "learner.targets=4096", "learner.logit_chunk=256",
  f"learner.row_length={LENGTH}", f"engine.context_length={LENGTH}",
  "engine.slots=16",
)  # fmt: skip
WAYS = (
  (),
  ("policy.lora_rank=16",),
  ("policy.lora_rank=16", "engine.weights=int8"),
  ("rollout.via=hosts",),
  ("policy.lora_rank=16", "rollout.via=hosts"),
)
ROWS = 64
"""Rows of the update whose seconds are printed."""


def meshes(devices: int):
  """Yields the settings of each mesh of `devices`, fsdp alone first."""
  for tensor, sequence, data in itertools.product((1, 4), (1, 2, 4), (1, 4)):
    fsdp, remainder = divmod(devices, tensor * sequence * data)
    if fsdp and not remainder and fsdp > 1:
      sizes = {
        "fsdp": fsdp, "data": data, "sequence": sequence, "tensor": tensor
      }  # fmt: skip
      axes = [f"mesh.{name}={size}" for name, size in sizes.items() if size > 1]
      yield [*axes, f"learner.rows={fsdp * data}"]


def best(size: str, topology: chips.Topology):
  """Returns the first way that fits, on its fastest mesh; None without one."""
  for way in WAYS:
    fitting = []
    for mesh in meshes(topology.devices):
      settings = [f"policy.name=Qwen3-VL-{size}", *way, *mesh]
      try:
        config, name, _ = planned_run.load([*settings, *COMMON], topology)
        run = planned_run.PlannedRun.of(config, name, topology)
        plan = plan_lib.make(run, compiling=False)
      except (ValueError, config_lib.ConfigError):
        continue  # A size that the policy's heads or rows do not divide into.
      if plan.fits:
        rate = plan.rates()["accumulate"]["tokens_per_second_per_chip"]
        fitting.append((rate, plan, settings))
    if fitting:
      return max(fitting, key=lambda one: one[0])
  return None


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
  parser.add_argument("--slices", nargs="+", choices=SLICES, default=SLICES)
  args = parser.parse_args()
  print(
    "| slice | policy | settings | GiB a chip | update, s"
    " | received, MB a token | decode, tokens/s |"
  )
  print("|---|---|---|---|---|---|---|")
  for text, size in itertools.product(args.slices, args.sizes):
    topology = chips.Topology.of(text)
    chosen = best(size, topology)
    if chosen is None:
      print(f"| {SLICES[text]} | {size} | nothing fits | | | | |", flush=True)
      continue
    rate, plan, settings = chosen
    tokens = ROWS * LENGTH
    rates = plan.rates()
    seconds = rates["accumulate"]["seconds"]
    received = seconds["network"] * topology.chip.ici
    of_call = plan.works["accumulate"].tokens / topology.devices
    decode = rates.get("decode step")
    decoded = (
      f"{decode['tokens_per_second_per_chip'] * topology.devices:,.0f}"
      if decode
      else "elsewhere"
    )
    print(
      f"| {SLICES[text]} | {size} | `{' '.join(settings[1:])}` |"
      f" {plan.total / 2**30:.1f} of {topology.chip.memory / 2**30:.1f} |"
      f" {tokens / rate / topology.devices:.1f}"
      f" ({rates['accumulate']['bound']}) | {received / of_call / 1e6:.2f} |"
      f" {decoded} |",
      flush=True,
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
