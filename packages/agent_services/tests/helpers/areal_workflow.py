"""Plays episodes by AReaL's own `OpenAIProxyWorkflow`, and checks its tensors.

    python areal_workflow.py URL MODE

Runs where the package areal can be imported. The agent keeps the ids and
log-probs of every answer; what the workflow returns must be those, in torch's
tensors. Prints a JSON object: reward of each interaction, in order, and the
shape of the batch that AReaL makes of them and of a row of its RLVR workflow.
"""

import asyncio
import json
import os
import sys
import tempfile

from areal.experimental.openai.proxy import workflow as workflow_lib
from areal.utils import data as data_lib
import openai
import torch

KEPT = tempfile.mkdtemp()  # An agent may run in a process of its own.


class Agent:
  """Asks twice; only its last answer has a reward."""

  async def run(self, data, base_url=None, api_key=None, **unused):
    del unused
    client = openai.AsyncOpenAI(
      base_url=base_url or os.environ["OPENAI_BASE_URL"],
      api_key=api_key or os.environ["OPENAI_API_KEY"],
    )
    messages = [{"role": "user", "content": data["question"]}]
    for turn in range(2):
      got = await client.chat.completions.create(
        model="default",
        messages=messages,
        max_completion_tokens=4,
        temperature=1.0,
        logprobs=True,
        extra_body={"return_token_ids": True},
      )
      choice = got.choices[0]
      kept = {
        "id": got.id,
        "prompt": got.model_extra["prompt_token_ids"],
        "sampled": choice.model_extra["token_ids"],
        "logprobs": [one.logprob for one in choice.logprobs.content],
      }
      with open(f"{KEPT}/{turn}", "w", encoding="utf-8") as out:
        json.dump(kept, out)
      messages += [
        {"role": "assistant", "content": choice.message.content},
        {"role": "user", "content": "go on"},
      ]
    return 1.0 if data["last"] else {got.id: 1.0}


def check(interaction, kept):
  """AReaL's tensors of an answer are what its server told the agent."""
  found = interaction.to_tensor_dict()
  ids = kept["prompt"] + kept["sampled"]
  read, sampled = len(kept["prompt"]), len(kept["sampled"])
  expected = {
    "input_ids": torch.tensor([ids], dtype=torch.int32),
    "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
    "loss_mask": torch.tensor([[0] * read + [1] * sampled], dtype=torch.int32),
    "logprobs": torch.tensor([[0.0] * read + kept["logprobs"]]),
    "versions": torch.tensor([[-1] * read + [0] * sampled], dtype=torch.int32),
    "rewards": torch.tensor([interaction.reward]),
  }
  assert set(found) == set(expected), set(found)
  for name, value in expected.items():
    assert found[name].dtype == value.dtype, (name, found[name].dtype)
    assert torch.equal(found[name], value), (name, found[name], value)


async def main(url, mode):
  workflow = workflow_lib.OpenAIProxyWorkflow(
    mode, Agent(), url, discount=0.5, subproc_max_workers=1
  )
  for last in (True, False):
    got = await workflow.arun_episode(None, {"question": "go", "last": last})
    assert len(got) == 2
    for turn, (name, interaction) in enumerate(got.items()):
      with open(f"{KEPT}/{turn}", encoding="utf-8") as file:
        kept = json.load(file)
      assert name == interaction.interaction_id == kept["id"]
      check(interaction, kept)
  rows = [one.to_tensor_dict() for one in got.values()]
  other = {name: value.clone() for name, value in rows[0].items()}
  batch = data_lib.concat_padded_tensors([*rows, other])
  shape = list(batch["input_ids"].shape)
  assert shape[1] == max(row["input_ids"].shape[1] for row in rows)
  rewards = [one.reward for one in got.values()]
  print(json.dumps({"rewards": rewards, "rows": shape[0]}))


if __name__ == "__main__":
  asyncio.run(main(*sys.argv[1:]))
