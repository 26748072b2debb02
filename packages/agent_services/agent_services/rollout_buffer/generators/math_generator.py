"""Plays mathematics: one question, one answer, checked.

A row of the input has `instance_id`, `prompt` (OpenAI messages, or a text) and
the truth as `label`, `answer` or `ground_truth`. Keys of the payload besides
the protocol's: `reward`, the registered reward that checks an answer (default
math), and `model`, a name for the server.

A group is valid when each member has an answer. Items hold the sampled tokens
where the server returns them; without, `extra_info.token_exact` is false.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Mapping

from agent_services.rollout_buffer import generating
from agent_services.runs import client as runs_client
from agent_services.runs import conversion
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.rewards import reward_registry
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences

TASK_TYPE = "math"
READS = ("input_file", "remote_engine_url", "remote_buffer_url")
_TRUTHS = ("label", "answer", "ground_truth")
_MOST_PARTS = 6
_CALL_S = 1800.0
_START_S = 60.0


class ModelError(http.CallError):
  """The model server does not answer as it should."""


def is_valid_group(group, min_valid_group_size, task_type="math"):
  """(valid, finished): it is whole, and each member counted has an answer."""
  del task_type
  _, items = group
  answered = [item for item in items if _last_text(item).strip()]
  finished = len(items) >= min_valid_group_size
  return finished and len(answered) >= min_valid_group_size, finished


def _last_text(item: Mapping[str, Any]) -> str:
  messages = item["messages"]
  content = messages[-1].get("content") if messages else None
  return content if isinstance(content, str) else ""


def run_rollout(data):
  asyncio.run(_run(data))


async def _run(data: Mapping[str, Any]) -> None:
  url = generating.engine_url(data)
  sampling = generating.sampling_of(data)
  reward = _reward(str(data.get("reward") or "math"))
  name = str(data.get("model") or "")
  if not name:
    name = await runs_client.model_name(url, _START_S)
  server = http.Http(ModelError, connections=int(data.get("num_process", 100)))

  async def play(job: generating.Job) -> dict[str, Any]:
    messages = _prompt(job)
    truth = _truth(job)
    request = {
      "model": name,
      "messages": messages,
      "seed": job.seed,
      **sampling,
    }
    reply, is_complete = await _asked(
      server, f"{url}/chat/completions", request
    )
    choice = reply["choices"][0]
    text = choice["message"].get("content") or ""
    score = 0.0
    if text.strip():
      score = reward_registry.as_reward(
        await asyncio.to_thread(reward, {"ground_truth": truth}, text)
      ).reward
    exact = _sequences(messages, reply) if is_complete else []
    return {
      "messages": [*messages, {"role": "assistant", "content": text}],
      "reward": score,
      "extra_info": {
        "finish_reason": choice.get("finish_reason"),
        "token_exact": bool(exact),
        "label": truth,
      },
      "sampling_params": sampling,
      **({"sequences": exact} if exact else {}),
    }

  with contextlib.ExitStack() as stack:
    if hasattr(reward, "close"):
      stack.callback(reward.close)
    try:
      await generating.generate(data, play)
    finally:
      await server.aclose()


def _reward(name: str) -> Any:
  try:
    reward_fn = rewards.get_reward_fn(name)
    return reward_fn() if isinstance(reward_fn, type) else reward_fn
  except ValueError as error:
    raise generating.GeneratorError(f"reward={name!r}: {error}") from None


def _prompt(job: generating.Job) -> list[dict[str, Any]]:
  prompt = job.row.get("prompt")
  if isinstance(prompt, str) and prompt:
    return [{"role": "user", "content": prompt}]
  if isinstance(prompt, list) and prompt:
    return [dict(message) for message in prompt]
  raise generating.GeneratorError(
    f"instance_id={job.instance_id!r}: prompt must be a text or a list of"
    " messages"
  )


def _truth(job: generating.Job) -> str:
  for key in _TRUTHS:
    if job.row.get(key) is not None:
      return str(job.row[key])
  raise generating.GeneratorError(
    f"instance_id={job.instance_id!r} has none of {', '.join(_TRUTHS)}; give"
    " each task its answer"
  )


async def _asked(
  server: http.Http, url: str, request: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
  """(reply, whether its tokens are all there are).

  A completion that the server aborts, as one does for new weights, is continued
  from its text; its tokens are not one prompt's then.
  """
  extras = {"logprobs": True, "return_token_ids": True}
  body = {**request, **extras}
  text, used = "", 0
  for part in range(_MOST_PARTS):
    reply = await server.ask("POST", url, _CALL_S, body=body)
    try:
      choice = reply["choices"][0]
      got = choice["message"].get("content") or ""
    except (KeyError, IndexError, TypeError, AttributeError):
      raise ModelError(
        f"the model server's answer is no chat completion: {str(reply)[:200]}"
      ) from None
    choice["message"]["content"] = text = text + got
    if choice.get("finish_reason") != "abort":
      return reply, part == 0
    used += int((reply.get("usage") or {}).get("completion_tokens") or 0)
    body = {**request, **extras}
    if text:
      body["messages"] = [
        *request["messages"],
        {"role": "assistant", "content": text},
      ]
      body["continue_final_message"] = True
      body["add_generation_prompt"] = False
    if "max_tokens" in request:
      body["max_tokens"] = request["max_tokens"] - used
      if body["max_tokens"] < 1:
        return reply, False
  raise ModelError(f"the server aborted a completion {_MOST_PARTS} times")


def _sequences(messages: object, reply: object) -> list[dict[str, Any]]:
  """The sampled tokens; [] where the server did not return them."""
  events = [
    {"type": "model_call", "messages": messages},
    {"type": "model_output", "modelOutput": reply},
  ]
  turns = conversion.turns_of(events)
  if not all(turn.is_exact for turn in turns):
    return []
  sequences, _ = conversion.sequences_of(turns, [()], None)
  written = [recorded_sequences.write(sequence) for sequence in sequences]
  if any(turn.versions is None for turn in turns):
    for sequence in written:
      sequence["versions"] = None  # The server reported none.
  return written
