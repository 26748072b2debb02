"""Samples from and scores a text policy on a mesh of four devices.

The engine drafts. Prints the tokens that it drafted, the log-probs as sampled
there, as the learner scores them there and on one device, and the norms of both
learners' gradients, as JSON.
"""

import asyncio
import json

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import sharding


def main():
  mesh = sharding.make_mesh(1, 2, 1, sequence=2)
  named = by_name.resolve("qwen3_text_tiny")
  store = images_lib.ImageStore()
  policies = {"mesh": named.create(0, mesh), "one": named.create(0)}
  model, processor, encoder = policies["mesh"]
  prompt = np.array(encoder.encode("Add 3 and 4. Add 3 and 4.").ids, np.int32)
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=2,
      context_length=64,
      decode_rows=(2,),
      prefill_rows=(2,),
      prefill_buckets=(32,),
      drafts="true",
    ),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:
    got = asyncio.run(
      engine.generate(
        policy_client.TokenPrompt(prompt, ()),
        policy_client.SamplingParams(max_new_tokens=8, seed=0),
        session="s",
      )
    )
    drafted = engine.stats()["drafted_tokens"]
  n, m = len(prompt), len(got.tokens)
  sequence = trajectory.TokenSequence(
    np.append(prompt, got.tokens),
    np.arange(n + m) >= n,
    np.append(np.zeros(n, np.float32), got.logprobs),
    np.append(np.full(n, -1, np.int32), got.versions),
    np.zeros(n + m, np.int32),
    (),
  )
  report = {"drafted": drafted, "sampled": [float(x) for x in got.logprobs]}
  for name, (model, processor, _) in policies.items():
    learner = learner_lib.Learner(
      model,
      processor,
      store,
      learner_lib.LearnerConfig(rows=2, row_length=64),
      learner_lib.AlgorithmConfig(objective="behaviour_cloning"),
      mesh=mesh if name == "mesh" else None,
    )
    (scored,) = learner.sequence_logprobs([sequence])
    report[name] = [float(x) for x in scored[n:]]
    norm = learner.update_on_sequences([sequence])["grad_norm"]
    report[f"{name}_norm"] = float(norm)
  print(json.dumps(report))


if __name__ == "__main__":
  main()
