"""The torch side of `bench_learner --beside torch`: transformers' model, eager.

On a GPU where torch sees one. bfloat16 is autocast over float32 weights, and
layers are recomputed in the backward pass where the other side's are.

Trains transformers' Qwen3-VL on the very arrays that the project's packer
made: the same rows, targets, weights, advantages, and optimizer (AdamW behind
a clipped gradient norm). Logits are computed at the targets only, as here.

Does not: pack. A row holds one sequence, so that plain causal attention is
right.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
from tunix.rl.multi_turn.learner.batches import batching


class Trainer:
  """transformers' module and its optimizer."""

  def __init__(
    self,
    directory: pathlib.Path,
    vision: Any,
    rate: float,
    dtype: str = "float32",
    remat: str = "none",
  ):
    """Loads the module.

    Args:
      directory: A checkpoint of the policy; a PEFT adapter may lie in the
        folder `adapter` beside it.
      vision: Its `VisionConfig`; None of a text policy.
      rate: Learning rate.
      dtype: Type of activations.
      remat: "none", or layers are recomputed in the backward pass.
    """
    import torch  # pylint: disable=g-import-not-at-top
    import transformers  # pylint: disable=g-import-not-at-top

    torch.set_num_threads(os.cpu_count() or 1)
    self._torch, self._vision = torch, vision
    self._device = "cuda" if torch.cuda.is_available() else "cpu"
    if os.environ.get("TUNIX_BENCH_CPU"):
      self._device = "cpu"
    self._autocast = lambda: torch.autocast(
      self._device, torch.bfloat16, enabled=dtype == "bfloat16"
    )
    loader = transformers.AutoModelForImageTextToText
    if vision is None:
      loader = transformers.AutoModelForCausalLM
    self._module: Any = (
      loader.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
      )
      .train()
      .to(self._device)
    )
    if remat != "none":
      self._module.gradient_checkpointing_enable({"use_reentrant": False})
    adapter = directory.parent / "adapter"
    if adapter.is_dir():
      import peft  # pylint: disable=g-import-not-at-top

      peft.PeftModel.from_pretrained(self._module, adapter, is_trainable=True)
    self._trained = [p for p in self._module.parameters() if p.requires_grad]
    self._optimizer = torch.optim.AdamW(
      self._trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    self.version = f"torch {torch.__version__}, transformers" + (
      f" {transformers.__version__}"
    )

  def logprobs(self, batch: batching.Batch) -> np.ndarray:
    """float32[M] of the batch's real targets, in their order."""
    with self._torch.no_grad():
      return self._scores(batch).float().cpu().numpy()

  def device_peak(self) -> int:
    """Returns the most bytes of the GPU so far; 0 on a CPU."""
    if self._device == "cpu":
      return 0
    return self._torch.cuda.max_memory_allocated()

  def update(self, batch: batching.Batch) -> dict[str, float]:
    """One optimizer step; its gradient's norm."""
    torch = self._torch
    self._optimizer.zero_grad(set_to_none=True)
    logprobs = self._scores(batch)
    real = np.asarray(batch.mask)[0]
    pick = lambda x: torch.tensor(np.asarray(x)[0][real], device=self._device)
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(ratio * pick(batch.advantages) * pick(batch.weights)).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
    self._optimizer.step()
    return {"grad_norm": float(norm)}

  def _scores(self, batch: batching.Batch) -> Any:
    with self._torch.device(self._device), self._autocast():
      return self._scores_here(batch)

  def _scores_here(self, batch: batching.Batch) -> Any:
    torch, inputs = self._torch, batch.inputs
    ids = torch.tensor(np.asarray(inputs.tokens)).long()
    places = torch.tensor(np.asarray(inputs.positions)).long()
    further: dict[str, Any] = {"position_ids": places[..., 0]}
    banned: list[int] = []
    if self._vision is not None:
      further = self._images(inputs) | {"position_ids": places.permute(2, 0, 1)}
      banned = [
        self._module.config.image_token_id,
        self._module.config.video_token_id,
      ]
    hidden = self._module.model(
      input_ids=ids, use_cache=False, **further
    ).last_hidden_state
    real = np.asarray(batch.mask)[0]
    at = torch.tensor(np.asarray(batch.index)[0][real]).long()
    targets = torch.tensor(np.asarray(batch.targets)[0][real]).long()
    logits = self._module.lm_head(hidden.reshape(-1, hidden.shape[-1])[at])
    logits = logits.float()
    if banned:
      logits = logits.index_fill(1, torch.tensor(banned), -1e30)
    scores = torch.log_softmax(logits, dim=-1)
    return scores.gather(1, targets[:, None])[:, 0]

  def _images(self, inputs: Any) -> dict[str, Any]:
    """Returns the arguments that screenshots are, in the order of the rows."""
    torch = self._torch
    index = np.asarray(inputs.vision_index)
    segments = np.asarray(inputs.patch_segments)[0]
    per_token = self._vision.spatial_merge_size**2
    starts = [
      first * per_token
      for row in index
      for first in _first_tokens(row, segments, per_token)
    ]
    frames, grids = [], []
    for start in starts:
      here = np.flatnonzero(segments == segments[start])
      patches = np.asarray(inputs.patches)[0][here]
      grids.append((1, *np.asarray(inputs.patch_positions)[0][start][2:]))
      frames.append(torch.tensor(patches))
    pixels = torch.cat(frames).float() / 127.5 - 1.0
    pixels = pixels.reshape(len(pixels), 3, 1, -1).expand(-1, -1, 2, -1)
    return {
      "pixel_values": pixels.reshape(len(pixels), -1),
      "image_grid_thw": torch.tensor(np.array(grids)).long(),
      "mm_token_type_ids": torch.tensor(index >= 0).int(),
    }


def _first_tokens(
  row: np.ndarray, segments: np.ndarray, per_token: int
) -> list[int]:
  """First vision token of each image that a row shows, in its order."""
  shown = row[row >= 0]
  image = segments[shown * per_token]
  begins = np.flatnonzero(np.diff(image, prepend=-1))
  return [int(shown[i]) for i in begins]
