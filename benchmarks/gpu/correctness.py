"""Computes what must be equal on every device, and compares two devices.

    python benchmarks/gpu/correctness.py device.npz
    JAX_PLATFORMS=cpu python benchmarks/gpu/correctness.py cpu.npz
    python benchmarks/gpu/correctness.py device.npz --beside cpu.npz --json FILE

A file holds attention of packed rows and of images with its gradients, in
float32 and bfloat16, and for each small vision-language family the log-probs of
a packed batch with screenshots and the norm of an update's gradient. The second
form exits with 1 where a difference exceeds `LIMITS`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from peers import learner_workload  # noqa: E402
from tunix.rl.multi_turn.policy.layers import kernels  # noqa: E402

FAMILIES = ("qwen3_vl_tiny", "qwen2_5_vl_tiny", "qwen2_vl_tiny", "qwen3_5_tiny")
LIMITS = {"float32": 1e-3, "bfloat16": 8e-2}
"""Largest difference, beside values and log-probs of the order of 1 to 10."""


def attention(images: bool, dtype: str, segments: int) -> np.ndarray:
  """Returns output and gradients of attention, float32[4, B, T, N, H]."""
  rng = np.random.default_rng(0)
  b, t, n, h = 2, kernels.PACKED_FROM, 4, 64
  q, k, v, pull = (
    jnp.asarray(rng.standard_normal((b, t, n, h)), dtype) for _ in range(4)
  )
  # Rows of other lengths, the second with fewer segments and padding.
  ends = np.sort(rng.choice(np.arange(1, t), (b, segments - 1)), axis=1)
  ids = (np.arange(t)[None, :, None] >= ends[:, None]).sum(-1)
  ids[1] = np.where(ids[1] > segments // 2, -1, ids[1])
  ids = ids.astype(np.int32)

  @jax.jit
  def run(q, k, v):
    if images:
      mix = lambda q, k, v: kernels.image_attention(q, k, v, ids, t)
    else:
      mix = lambda q, k, v: kernels.causal_attention(q, k, v, ids)
    out, back = jax.vjp(mix, q, k, v)
    return out, *back(pull)

  return np.stack([np.asarray(x, np.float32) for x in run(q, k, v)])


def family(name: str) -> dict[str, np.ndarray]:
  """Returns log-probs of a packed batch, and an update's gradient norm."""
  args = types.SimpleNamespace(
      size=name, dtype="float32", remat="none", rows=4, row_length=256,
      images=2, width=96, height=64,
  )  # fmt: skip
  load = learner_workload.Workload(args)
  batch = load.batch()
  scores = load.scores(batch)
  metrics = load.learner.update(load.groups)
  return {
    "logprobs": scores[np.asarray(batch.mask)],
    "grad_norm": np.float32(metrics["grad_norm"]),
  }


def compute() -> dict[str, np.ndarray]:
  """Returns every array by name; a name ends in its dtype."""
  arrays = {}
  for images in (False, True):
    for dtype in LIMITS:
      what = "attention of images" if images else "attention of rows"
      for segments in (3, 40):  # The kernel's own segments, and a mask's.
        arrays[f"{what}, {segments} segments, {dtype}"] = attention(
          images, dtype, segments
        )
  for name in FAMILIES:
    for part, value in family(name).items():
      arrays[f"{name}, {part}, float32"] = value
  return arrays


def differences(path: str, other: str) -> dict[str, float]:
  """Returns the largest difference of each array of two files."""
  with np.load(path) as here, np.load(other) as there:
    assert set(here) == set(there), set(here) ^ set(there)
    return {k: float(np.abs(here[k] - there[k]).max()) for k in sorted(here)}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("file", help="of arrays, written without --beside")
  parser.add_argument("--beside", metavar="FILE", help="compare with it")
  parser.add_argument("--json", type=pathlib.Path, help="for the differences")
  args = parser.parse_args()
  if not args.beside:
    with jax.default_matmul_precision("highest"):
      np.savez(args.file, **compute())
    return 0
  gaps = differences(args.file, args.beside)
  limit = lambda name: LIMITS[name.rpartition(", ")[2]]
  report = {"gaps": gaps, "ok": all(g <= limit(n) for n, g in gaps.items())}
  print(json.dumps(report, indent=2))
  if args.json:
    args.json.write_text(json.dumps(report))
  return int(not report["ok"])


if __name__ == "__main__":
  sys.exit(main())
