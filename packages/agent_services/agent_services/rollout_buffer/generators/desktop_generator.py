"""Plays gyms, the desktop by default, by an OpenAI-compatible server.

A row of the input has `instance_id` and a task: `task`, a gym's task as JSON,
or `family` and `index` (default 0). Keys of the payload besides the protocol's:

    gym            desktop           one of --gyms
    width, height  128, 96           of the screen, px
    gym_settings   {}                those of --client-settings
    max_turns      8                 a task's own limit wins
    agent          tool              of the run service's agents
    agent_config   {}                {parser, systemPrompt, maxImages, …}
    model          the server's first
    image_token_id the tokenizer's   placeholder of images in prompts

Items hold the sampled tokens and the screenshots; where the server does not
return tokens, `extra_info.token_exact` is false. A group is valid when it is
whole and its rewards differ.
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
from typing import Any, Mapping

from agent_services.rollout_buffer import generating
from agent_services.rollout_buffer import requests
from agent_services.rollout_buffer import rights
from agent_services.run_service import environments
from agent_services.run_service import runs
from agent_services.run_service import schemas
from agent_services.runs import client as runs_client
from agent_services.runs import conversion
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences
from tunix.rl.multi_turn.trajectory_collector import records

TASK_TYPE = "desktop"
_IMAGE_TOKENS = ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>")
_START_S = 60.0
_EPISODE_S = 1800.0
_TURN_S = 300.0
_IMAGE_BYTES = 1 << 30


class _Pictures:
  """Data URLs of screenshots, and the way back."""

  def __init__(self, store: images_lib.ImageStore):
    self._urls = data_urls.DataUrls(store)
    self.refs: dict[str, trajectory.ImageRef] = {}

  async def of(self, image: trajectory.ImageRef, form: str) -> str:
    del form
    url = await self._urls.of(image)
    self.refs[url] = image
    return url

  def close(self) -> None:
    self._urls.close()


def run_rollout(data):
  asyncio.run(_run(data))


async def _run(data: Mapping[str, Any]) -> None:
  url = generating.engine_url(data)
  name = str(data.get("model") or "")
  if not name:
    name = await runs_client.model_name(url, _START_S)
  sampling = {
    key: value
    for key, value in generating.sampling_of(data).items()
    if key in schemas.Sampling.model_fields
  }
  image_token = _image_token(data)

  async def play(job: generating.Job) -> dict[str, Any]:
    return await _episode(
      job,
      data,
      image_token,
      {
        "baseUrl": url,
        "name": name,
        "sampling": {**sampling, "seed": job.seed},
      },
    )

  await generating.generate(data, play)


async def _episode(
  job: generating.Job,
  data: Mapping[str, Any],
  image_token: int | None,
  model: Mapping[str, Any],
) -> dict[str, Any]:
  allowed = data.get(rights.ALLOWED) or {}
  gym = str(data.get("gym") or "desktop")
  if gym not in allowed.get("gyms", ()):
    raise generating.GeneratorError(
      f"gym={gym!r} is not played here; list it with --gyms"
    )
  task = _task(gym, job)
  body = _valid(
    {
      "task": task["instruction"],
      "agent": data.get("agent") or "tool",
      "agentConfig": data.get("agent_config") or {},
      "maxSteps": task.get("max_turns") or int(data.get("max_turns") or 8),
      "maxRunTimeSec": _EPISODE_S,
      "maxStepTimeSec": _TURN_S,
      "model": dict(model),
      "env": {
        "type": "gym",
        "gym": gym,
        "task": task,
        "width": int(data.get("width") or requests.SCREEN[0]),
        "height": int(data.get("height") or requests.SCREEN[1]),
        "settings": data.get("gym_settings") or {},
      },
      "images": "base64",
    }
  )
  store = images_lib.ImageStore(capacity_bytes=_IMAGE_BYTES)
  try:
    agent = schemas.make_agent(body)
    env = environments.make_environment(
      body.env,
      instruction=body.task,
      parser=agent.tool_parser,
      max_steps=body.maxSteps,
      on_parse_error=body.agentConfig.onParseError,
      images=store,
      allowed_gyms=allowed["gyms"],
      client_settings=allowed["client_settings"],
    )
  except (ValueError, ImportError) as error:
    raise generating.GeneratorError(str(error)) from None
  pictures = _Pictures(store)
  run: Any = runs.Run(body, agent, env, pictures, True)  # type: ignore[arg-type]
  try:
    await run.play()
    if run.status != "completed":
      raise RuntimeError(run.reason)
    return await asyncio.to_thread(
      _item, run, agent, store, pictures.refs, image_token
    )
  finally:
    pictures.close()


def _item(
  run: runs.Run,
  agent: base_agent.BaseAgent,
  store: images_lib.ImageStore,
  refs: Mapping[str, trajectory.ImageRef],
  image_token: int | None,
) -> dict[str, Any]:
  ended = run.events[-1]["evaluation"]
  turns = conversion.turns_of(run.events)
  shown = [
    [refs[url] for url in conversion.image_urls(turn.messages)]
    for turn in turns
  ]
  exact = all(turn.is_exact for turn in turns)
  exact = exact and (image_token is not None or not any(shown))
  item: dict[str, Any] = {
    "messages": trajectory.encode(list(agent.chat_completions)),
    "reward": float(ended["score"]),
    "extra_info": {
      "finish_reason": "length"
      if run.reason in ("max_steps", "context_limit")
      else "stop",
      "reason": run.reason,
      "success": ended["success"],
      "token_exact": exact,
    },
    "sampling_params": run.body.model.sampling.model_dump(exclude_none=True),
  }
  if exact:
    sequences, _ = conversion.sequences_of(turns, shown, image_token)
    item["sequences"] = [recorded_sequences.write(one) for one in sequences]
    if any(turn.versions is None for turn in turns):
      for sequence in item["sequences"]:
        sequence["versions"] = None  # The server reported none.
  item["images"] = records.write_images(item, store)
  return item


def _task(gym: str, job: generating.Job) -> dict[str, Any]:
  """The row's task as JSON."""
  row = job.row
  if isinstance(row.get("task"), Mapping):
    return {"instruction": "", **row["task"]}
  family = row.get("family")
  if not isinstance(family, str):
    raise generating.GeneratorError(
      f"instance_id={job.instance_id!r} has neither task nor family; give a"
      " gym's task, or a family and an index"
    )
  try:
    source = _tasks(gym)
    return source.train_task(family, int(row.get("index") or 0)).to_json()
  except (ValueError, KeyError, TypeError) as error:
    raise generating.GeneratorError(
      f"instance_id={job.instance_id!r}: gym {gym!r} has no task"
      f" {row.get('index') or 0} of family {family!r}: {error}"
    ) from None


@functools.cache
def _tasks(gym: str) -> Any:
  """Tasks of a gym that the operator lists."""
  return gyms.get(gym, "operator").make_tasks((), {})


def _valid(body: Mapping[str, Any]) -> schemas.CreateBody:
  try:
    return json_models.validate(schemas.CreateBody, body)
  except ValueError as error:
    raise generating.GeneratorError(str(error)) from None


def _image_token(data: Mapping[str, Any]) -> int | None:
  """The id of image placeholders; None where it is not known."""
  token_id = data.get("image_token_id")
  if token_id is not None:
    return int(token_id)
  path = data.get("tokenizer_path")
  file = pathlib.Path(str(path or "")) / "tokenizer.json"
  if not path or not file.is_file():
    return None
  import tokenizers  # pylint: disable=g-import-not-at-top

  tokenizer = tokenizers.Tokenizer.from_file(str(file))
  token_ids = (tokenizer.token_to_id(token) for token in _IMAGE_TOKENS)
  return next((number for number in token_ids if number is not None), None)
