"""Sides of `bench_pretrained` that decode, each a process of its own.

A side loads the same weights, then decodes the prompts of a file whenever it
reads a line, and prints what it took. It runs in the environment of its
engine, so that nothing else is imported here.

    ours       `RolloutEngine`
    llama.cpp  llama-cpp-python's binding of `llama_decode`, a token a sequence
               and call; the most likely token is numpy's
    vllm       `LLMEngine.step`, in this process
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any, Callable

import numpy as np

CONTEXT = 256  # Tokens of a sequence.
FILE_TYPES = {"float32": 0, "bfloat16": 32, "int8": 7}
"""llama.cpp's types of a GGUF file."""

Run = Callable[[np.ndarray, int], tuple[Any, float, Any]]
"""(prompts [B, T], tokens to sample) -> (tokens [B, tokens], seconds of a
step, logits by which each token leads)."""


def ours(about: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
  import asyncio  # pylint: disable=g-import-not-at-top

  import bench_decode_bound  # pylint: disable=g-import-not-at-top
  import jax  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.core import images as images_lib  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.core import policy_client  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.engine import config as engine_config  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.engine import engine as engine_lib  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.policy import host_memory  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.policy.checkpoints import checkpoint  # pylint: disable=g-import-not-at-top

  host_memory.tune()
  rounded = about["dtype"] == "int8"
  dtype = "float32" if rounded else about["dtype"]
  model, processor, _ = checkpoint.load_policy(
    about["directory"], compute_dtype=dtype
  )
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    images_lib.ImageStore(),
    engine_config.EngineConfig(
      slots=max(about["batches"]),
      context_length=CONTEXT,
      decode_rows=tuple(about["batches"]),
      window_buckets=(CONTEXT,),
      prefill_buckets=(64,),
      weights="int8" if rounded else "same",
      **about["options"],
    ),
  )
  engine.warm_up()
  state = engine._state  # pylint: disable=protected-access
  rates = bench_decode_bound.machine(dtype)
  facts = rates | {
    "weight_bytes": sum(x.nbytes for x in state.params),
    "token_bytes": sum(x.nbytes for x in jax.tree.leaves(state.cache))
    / (state.pages * state.page_size),
    "parameters": sum(x.size for x in state.params),
  }
  version = [0]

  async def play(prompts, count):
    names = [f"{version[0]}.{i}" for i in range(len(prompts))]
    version[0] += 1

    async def generate(tokens):
      sampling = policy_client.SamplingParams(
        max_new_tokens=tokens, temperature=0.0
      )
      calls = [
        engine.generate(policy_client.TokenPrompt(p), sampling, session=name)
        for p, name in zip(prompts, names)
      ]
      return await asyncio.gather(*calls)

    await generate(1)  # Every prompt is cached now: what follows is decoding.
    started = time.perf_counter()
    out = await generate(count)
    seconds = time.perf_counter() - started
    for name in names:
      await engine.release(name)
    return [list(map(int, one.tokens)) for one in out], seconds / count, None

  return lambda prompts, count: asyncio.run(play(prompts, count)), facts


def llama(about: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
  import llama_cpp  # pylint: disable=g-import-not-at-top

  lib: Any = llama_cpp
  lib.llama_backend_init()
  options = lib.llama_model_default_params()
  options.use_mmap = False
  source, file = (name.encode() for name in about["gguf"])
  rounding = lib.llama_model_quantize_default_params()
  rounding.allow_requantize = rounding.pure = True
  rounding.ftype = FILE_TYPES[about["dtype"]]
  if lib.llama_model_quantize(source, file, rounding):
    raise SystemExit(f"llama.cpp does not convert {source}")
  model = lib.llama_model_load_from_file(file, options)
  words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
  contexts: dict[int, Any] = {}

  def context(rows: int):
    if rows not in contexts:
      options = lib.llama_context_default_params()
      options.n_ctx, options.n_seq_max = CONTEXT * rows, rows
      options.n_threads = options.n_threads_batch = about["threads"]
      if about["dtype"] == "float32":
        options.type_k = options.type_v = lib.GGML_TYPE_F32
      contexts[rows] = lib.llama_init_from_model(model, options)
    return contexts[rows]

  def run(prompts: np.ndarray, count: int):
    rows, length = prompts.shape
    here = context(rows)
    lib.llama_memory_clear(lib.llama_get_memory(here), True)
    batch = lib.llama_batch_init(max(rows, length), 0, 1)

    def call(entries):
      batch.n_tokens = len(entries)
      for i, (token, position, row, has_logits) in enumerate(entries):
        batch.token[i], batch.pos[i] = int(token), position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.logits[i] = has_logits
      if lib.llama_decode(here, batch):
        raise SystemExit("llama_decode refuses the batch")

    def logits(place: int) -> np.ndarray:
      pointer = lib.llama_get_logits_ith(here, place)
      return np.ctypeslib.as_array(pointer, (words,))

    first = []
    for row, prompt in enumerate(prompts):
      call([(t, i, row, i == length - 1) for i, t in enumerate(prompt)])
      first.append(int(logits(length - 1).argmax()))
    tokens, leads = [first], []
    started = time.perf_counter()
    for step in range(count - 1):
      place = length + step
      call([(t, place, row, 1) for row, t in enumerate(tokens[-1])])
      scores = [logits(row) for row in range(rows)]
      tokens.append([int(one.argmax()) for one in scores])
      if about["leads"]:
        leads.append(
          [float(np.diff(np.partition(s, -2)[-2:])[0]) for s in scores]
        )
    seconds = time.perf_counter() - started
    lib.llama_batch_free(batch)
    by_row = np.transpose(tokens).tolist()
    return by_row, seconds / (count - 1), np.transpose(leads).tolist()

  return run, {"version": f"llama-cpp-python {llama_cpp.__version__}"}


def vllm(about: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
  import vllm as lib  # pylint: disable=g-import-not-at-top

  engine = lib.LLM(
    about["directory"],
    dtype=about["dtype"],
    max_model_len=CONTEXT,
    max_num_seqs=max(about["batches"]),
    enable_prefix_caching=False,
    generation_config="vllm",
    disable_log_stats=True,
  ).llm_engine

  def run(prompts: np.ndarray, count: int):
    sampling = lib.SamplingParams(
      temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
    )
    for row, prompt in enumerate(prompts):
      engine.add_request(
        str(row), {"prompt_token_ids": prompt.tolist()}, sampling
      )
    tokens: dict[int, list[int]] = {}
    started, before = 0.0, 0
    while engine.has_unfinished_requests():
      for out in engine.step():
        tokens[int(out.request_id)] = list(out.outputs[0].token_ids)
      if not started and len(tokens) == len(prompts):
        started = time.perf_counter()
        before = sum(map(len, tokens.values()))
    seconds = time.perf_counter() - started
    steps = (count * len(prompts) - before) / len(prompts)
    return [tokens[row] for row in range(len(prompts))], seconds / steps, None

  return run, {"version": f"vllm {lib.__version__}"}


SIDES = {"ours": ours, "llama.cpp": llama, "vllm": vllm}


def main() -> None:
  about = json.loads(sys.argv[1])
  # Libraries print, also from C: their output goes to stderr.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  run, facts = SIDES[about["side"]](about)
  prompts = np.load(about["prompts"])

  def answer(content: Any) -> None:
    print(json.dumps(content), file=answers, flush=True)

  answer(facts)
  for line in sys.stdin:
    tokens, step_s, leads = run(prompts[: int(line)], about["new"])
    status = pathlib.Path("/proc/self/status").read_text()
    peak = next(x for x in status.splitlines() if x.startswith("VmHWM"))
    answer(
      {
        "tokens": tokens,
        "step_s": step_s,
        "leads": leads,
        "peak_mb": int(peak.split()[1]) / 1024,
      }
    )


if __name__ == "__main__":
  main()
