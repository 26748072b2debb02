"""Turns with screenshots of a checkpoint, held to transformers and the learner.

Promises: completions are those of `generate`, with its cache, and the learner
scores them as they were sampled.
"""

import json
import random

import chat_families
import numpy as np
import pytest
import rollout_micro_policy as micro
import torch
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings


class Talk(chat_families.Talk):
  """Conversations whose pictures exist."""

  def __init__(self, family, store, seed, sides=(20, 90), squares=0.0):
    """`squares` is the share of square pictures."""
    super().__init__(family, random.Random(seed))
    self.store, self.rng = store, np.random.default_rng(seed)
    self._sides, self._squares = sides, squares

  def content(self, images=True):
    parts = super().content(images)
    if isinstance(parts, str):
      return parts
    with_picture = lambda p: {**p, "image": self.see()} if "image" in p else p
    return [with_picture(part) for part in parts]

  def see(self):
    height, width = self.rng.integers(*self._sides, 2)
    if self.rng.random() < self._squares:
      height = width
    return self.store.put(
      self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    )

  def look(self, text):
    return {
      "role": "user",
      "content": [
        {"type": "text", "text": text},
        {"type": "image", "image": self.see()},
        {"type": "text", "text": "Go on."},
      ],
    }


def plain(messages):
  """Messages and pictures as transformers takes them."""
  texts, pictures = [], []
  for message in messages:
    parts = message["content"]
    if isinstance(parts, str):
      parts = [{"type": "text", "text": parts}]
    pictures += [p["image"] for p in parts if p["type"] == "image"]
    content = [
      {"type": "image"} if part["type"] == "image" else part for part in parts
    ]
    texts.append({**message, "content": content})
  return texts, pictures


def play(policy, talk_of, turns, context, **options):
  """Two sessions: the store, and (turn, prompt, completion) of each turn.

  Args:
    policy: model, processor, renderer.
    talk_of: (store, seed) -> `Talk`.
    turns: number of turns of a session.
    context: tokens of a sequence.
    **options: fields of `EngineConfig`.
  """
  model, processor, renderer = policy
  store = images_lib.ImageStore()
  engine = micro.engine_of(
      model, processor, store, slots=2, context_length=context,
      decode_rows=(2,), prefill_rows=(2,), window_buckets=(context,),
      image_buckets=(2,), decode_steps_per_call=4, page_size=12,
      banned_token_ids=model.config.banned_token_ids, **options,
  )  # fmt: skip
  greedy = policy_client.SamplingParams(
    max_new_tokens=6,
    temperature=0.0,
    stop_token_ids=tuple(renderer.stop_token_ids),
  )
  played = []
  with engine:
    for seed in range(2):
      talk = talk_of(store, 50 + seed)
      prompt = renderer.render([talk.system(), talk.look("Click OK.")])
      for turn in range(turns):
        (got,) = micro.generate(engine, (f"s{seed}", prompt, greedy))
        played.append((turn, prompt, got))
        ended = got.tokens[-1] in renderer.stop_token_ids
        bridge = renderer.bridge(
          [talk.look(f"{turn}.")], last_sampled_is_eot=ended
        )
        shift = len(prompt) + len(got.tokens)
        prompt = policy_client.TokenPrompt(
          np.concatenate([prompt.tokens, got.tokens, bridge.tokens]).astype(
            np.int32
          ),
          (*prompt.images, *(s.shifted(shift) for s in bridge.images)),
        )
  return store, played


def check_generate(module, policy, played, pixels_of, **options):
  """Holds completions to `generate` of transformers' model.

  Args:
    module: model of transformers.
    policy: model, processor, renderer.
    played: (turn, prompt, completion) of each turn.
    pixels_of: images of a prompt -> `pixel_values`.
    **options: arguments of `generate`; functions get the prompt's ids.
  """
  model, _, renderer = policy
  banned = list(model.config.banned_token_ids)
  before = 0
  for turn, prompt, got in played:
    ids = torch.tensor(prompt.tokens).long()[None]
    more = {k: v(ids) if callable(v) else v for k, v in options.items()}
    with torch.no_grad():
      output = module.float().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.tensor(pixels_of(prompt.images)),
        max_new_tokens=len(got.tokens),
        do_sample=False,
        eos_token_id=list(renderer.stop_token_ids),
        suppress_tokens=banned,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
      )
    want = output.sequences[0, len(prompt.tokens) :].tolist()
    assert got.tokens.tolist() == want
    logits = torch.stack([step[0] for step in output.logits]).double()
    logits[:, banned] = -torch.inf
    scores = torch.log_softmax(logits, -1).gather(
      -1, torch.tensor(want)[:, None]
    )[:, 0]
    np.testing.assert_allclose(got.logprobs, scores, atol=1e-4)
    if turn:  # It goes on from what the one before has cached.
      assert got.metrics["reused_tokens"] >= before
    before = len(prompt.tokens)


def check_scores(policy, store, played, row_length):
  """Holds the learner's log-probs of packed rows to those of sampling."""
  sequences = []
  for _, prompt, got in played:
    n, m = len(prompt.tokens), len(got.tokens)
    sequences.append(
      trajectory.TokenSequence(
        np.append(prompt.tokens, got.tokens),
        np.arange(n + m) >= n,
        np.append(np.zeros(n, np.float32), got.logprobs),
        np.append(np.full(n, -1, np.int32), got.versions),
        np.zeros(n + m, np.int32),
        prompt.images,
      )
    )
    again = trajectory.TokenSequence.from_json(sequences[-1].to_json())
    assert again == sequences[-1]
  learner = learner_lib.Learner(
    *policy[:2],
    store,
    learner_lib.LearnerConfig(rows=2, row_length=row_length),
    learner_lib.AlgorithmConfig(objective="behaviour_cloning"),
  )
  scored = learner.sequence_logprobs(sequences)
  for sequence, (_, prompt, got), row in zip(sequences, played, scored):
    assert len(row) == len(sequence.tokens)
    np.testing.assert_allclose(
      row[len(prompt.tokens) :], got.logprobs, atol=1e-4
    )


def check_image_settings_refused(directory, change, message, folder):
  """Asserts that a changed image processor's file is refused with a message."""
  for file in directory.iterdir():
    (folder / file.name).write_bytes(file.read_bytes())
  file = folder / image_settings.PREPROCESSOR
  raw = json.loads(file.read_text())
  file.write_text(json.dumps({**raw, **change}))
  with pytest.raises(ValueError, match=message):
    checkpoint.load_config(folder)
