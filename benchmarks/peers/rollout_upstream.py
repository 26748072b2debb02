"""The column of `bench_rollout_peers` that samples with google-tunix."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import jax
import numpy as np
from peers import rollout_workload

CHECKED = rollout_workload.CHECKED
Workload = rollout_workload.Workload


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
    text_dir = directory / "text"
    text_dir.mkdir()
    tensors = safetensors_numpy.load_file(directory / "model.safetensors")
    safetensors_numpy.save_file(
      {
        key.replace("model.language_model.", "model."): value
        for key, value in tensors.items()
        if not key.startswith("model.visual.")
      },
      text_dir / "model.safetensors",
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
      params.create_model_from_safe_tensors(str(text_dir), config, mesh),
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
