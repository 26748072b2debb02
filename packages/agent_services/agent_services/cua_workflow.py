"""AReaL's workflow of computer-use episodes that an agent service plays.

`CUAAgentWorkflow.arun_episode(engine, data)` plays one row of a gym's data set:
it creates the execution, starts a run whose model is the engine's server,
follows it, has the gym server judge, and returns the run's tokens as AReaL's
tensors; torch's where torch is installed, else numpy's.

    trainer.train(
        workflow="agent_services.cua_workflow.CUAAgentWorkflow",
        workflow_kwargs={
            "tokenizer": path, "processor": path,
            "gbox_mini_agent_base_url": "http://127.0.0.1:3000"})

Promises: a run that fails, hangs or answers garbage is None within
`max_task_time_seconds` and the cleanup's deadline, counted by cause in
`rejected`; the execution is terminated and the run ended on every path, and the
slot is free again. Ids and log-probs are those of the model's replies; a turn
without them rejects the episode, or with `on_missing="fallback"` is made by the
tokenizer and counted in `fallback_turns`. A turn that was sampled from another
distribution than `gconfig`'s is masked and counted in `untrained_tokens`, or
rejects the episode; an episode of such turns alone is rejected. A wrong
argument raises: it would reject every episode.

Where AReaL is installed, the class derives from its `RolloutWorkflow` and each
reward is in its statistics; importing this module then imports AReaL. Nothing
else of this package does, and none of it needs AReaL. JAX is not imported.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import importlib.util
import logging
from typing import Any, Callable, Mapping, Sequence
import weakref

from cua_gyms.genv import execution
from cua_gyms.genv import genv_gym
import numpy as np
from tunix.rl.multi_turn.agents import agent_settings
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import token_sequence
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

from agent_services import tensor_rows
from agent_services.runs import client as client_lib
from agent_services.runs import conversion
from agent_services.runs import event_images
from agent_services.runs import run_agent

_LOG = logging.getLogger(__name__)
_CLEANUP_S = 15.0
_MODELS_S = 30.0
_TOP_K_OFF = 10**8
"""AReaL's `top_k` that keeps every token."""
_OF_TURNS = (
  "step_start",
  "turn_start",
  "action_executed",
  "step_end",
  "turn_end",
)
_HAS_AREAL = importlib.util.find_spec("areal") is not None
_Base: Any = object
if _HAS_AREAL:
  from areal.api import workflow_api  # type: ignore[import-not-found]

  _Base = workflow_api.RolloutWorkflow

_gates: weakref.WeakKeyDictionary[Any, dict[Any, asyncio.Semaphore]] = (
  weakref.WeakKeyDictionary()
)
"""Event loop -> (run service, limit) -> the slots of its runs."""


class CUAAgentWorkflow(_Base):
  """See the module docstring. Belongs to one event loop at a time.

  Attributes:
    running: Episodes in flight.
    peak: Highest number of episodes that were in flight together.
    accepted: Number of episodes that gave tensors.
    rejected: Numbers of episodes that gave None, by cause.
    fallback_turns: Turns whose tokens were made by the tokenizer.
    untrained_tokens: Number of sampled tokens that are masked, as their
      sampling was not the trainer's.
    place: The constructor's names of the training, step, evaluation or
      baseline, for recorders.
  """

  def __init__(
    self,
    gconfig: object = None,
    tokenizer: Any = None,
    *,
    gbox_mini_agent_base_url: str = "",
    gbox_mini_agent_agent: str = "mai-ui",
    gbox_mini_agent_model: str | Mapping[str, Any] = "",
    gbox_mini_agent_env: Mapping[str, Any] | None = None,
    gym_base_url: str = "",
    gym_id: str = "",
    model_base_url: str = "",
    max_turns: int = 20,
    max_task_time_seconds: float = 1800.0,
    max_turn_time_seconds: float = 180.0,
    max_concurrent_rollouts: int | None = 8,
    consumer_batch_size: int = 1,
    standard_action_space: str = "mobile",
    on_missing: str = "refuse",
    other_sampling: str = "mask",
    turn_discount: float = 1.0,
    processor: Any = None,
    multi_modal: tensor_rows.MultiModal | None = None,
    image_token_id: int | None = None,
    renderer: choice.AnyRenderer | None = None,
    run_options: Mapping[str, Any] | None = None,
    training_id: str | int | None = None,
    step_id: str | int | None = None,
    eval_id: str | int | None = None,
    baseline_id: str | int | None = None,
    global_step: int | None = None,
    batch: int | None = None,
    group_size: int = 1,
    make_recorder: Callable[[Mapping[str, Any]], Any] | None = None,
    make_loader: Callable[[images_lib.ImageStore], Any] | None = None,
    poll_s: float = 3.0,
    timeout_s: float = 30.0,
  ):
    """Args:

      gconfig: AReaL's generation settings: the distribution that its trainer
        scores tokens under, temperature 1 if there are none. They are sent in
        `model.sampling` if `run_options` has `sampling: true`.
      tokenizer: The policy's, or its path; for `on_missing="fallback"` and the
        placeholder's id.
      gbox_mini_agent_base_url: Address of the service; "" =
        $GBOX_MINI_AGENT_BASE_URL.
      gbox_mini_agent_agent: The service's name of the agent.
      gbox_mini_agent_model: Fields of the run's `model`, or its name; "" = the
        first that the model's server lists.
      gbox_mini_agent_env: Further fields of the run's `env`.
      gym_base_url, gym_id: The gym of rows that name none.
      model_base_url: Address of the policy's server as the service reaches it;
        "" = the engine's, the next of several.
      max_turns, max_task_time_seconds, max_turn_time_seconds: Limits of a run.
      max_concurrent_rollouts: Limit of runs in flight at the service, of all
        workflows in the event loop; None = consumer_batch_size.
      consumer_batch_size: AReaL's setting.
      standard_action_space: "mobile" or "pc".
      on_missing: See `conversion.sequences_of`.
      other_sampling: Treatment of turns with other sampling parameters than
        gconfig's, by the service's reports: "mask", "refuse" (the episode is
        rejected) or "train", see `SamplingRule`.
      turn_discount: Factor of a sequence's reward, once for each later sequence
        of the run: a rewritten history makes several.
      processor: A processor of transformers, or its path; the arrays of its
        image processor (pixel_values and, of Qwen's, image_grid_thw) are
        multi_modal_input. One with an `image_break_token_id` (Pixtral) puts
        that between rows of placeholders.
      multi_modal: Replaces `processor`: images' spans -> such a mapping.
      image_token_id: The placeholder's id; None = the processor's or
        tokenizer's.
      renderer: The policy's, for fallbacks with images.
      run_options: Further fields of `POST /runs`.
      training_id, step_id, eval_id, baseline_id, global_step: Where episodes
        belong in a record; see `place`.
      batch: Number of the batch, for the record.
      group_size: Episodes that are played of each row, for the record.
      make_recorder: row -> an `HttpRolloutRecorder`, or None for no record.
      make_loader: store -> a `serving.media.MediaLoader`, for screenshots
        whose addresses are not the service's own; None rejects those.
      poll_s, timeout_s: Interval and deadline of the client's calls.

    Raises:
      ValueError: naming the argument.
    """
    if on_missing not in conversion.ON_MISSING:
      raise ValueError(
        f"on_missing must be one of {', '.join(conversion.ON_MISSING)}; got"
        f" {on_missing!r}"
      )
    limit = max_concurrent_rollouts
    if limit is None:
      limit = consumer_batch_size
    for name, value in (
      ("max_turns", max_turns),
      ("max_concurrent_rollouts", limit),
      ("group_size", group_size),
    ):
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be >= 1, got {value!r}")
    for name, seconds in (
      ("max_task_time_seconds", max_task_time_seconds),
      ("max_turn_time_seconds", max_turn_time_seconds),
    ):
      if not seconds > 0:
        raise ValueError(f"{name} must be > 0 seconds, got {seconds!r}")
    if not 0.0 < turn_discount <= 1.0:
      raise ValueError(f"turn_discount must be in (0, 1], got {turn_discount}")
    if processor is None and multi_modal is None:
      raise ValueError(
        "processor is None, and every episode has screenshots: pass the"
        " policy's processor or its path (AReaL's tokenizer_path), or"
        " multi_modal"
      )
    if eval_id is not None and baseline_id is not None:
      raise ValueError("eval_id and baseline_id: an episode is of one of them")
    settings = agent_settings.RunServiceConfig(
      base_url=gbox_mini_agent_base_url
    )
    self._service_url = http.address(
      settings.url, "gbox_mini_agent_base_url", client_lib.DEFAULT_BASE_URL
    )
    if model_base_url:
      http.address(model_base_url, "model_base_url", "http://127.0.0.1:8000/v1")
    self._token = settings.token
    self._gconfig = gconfig
    self._rule = _rule_of(gconfig, other_sampling)
    if isinstance(tokenizer, str):
      tokenizer = _pretrained("AutoTokenizer", tokenizer)
    if isinstance(processor, str):
      processor = _pretrained("AutoProcessor", processor)
    self._tokenizer = tokenizer
    self._agent = gbox_mini_agent_agent
    model = gbox_mini_agent_model
    self._model: Mapping[str, Any] = (
      {"name": model} if isinstance(model, str) and model else model or {}
    )  # type: ignore[assignment]
    self._env = dict(gbox_mini_agent_env or {})
    self._gym = (gym_base_url, gym_id)
    self._model_url = model_base_url
    self._max_turns = max_turns
    self._task_s = float(max_task_time_seconds)
    self._turn_s = float(max_turn_time_seconds)
    self._most = limit
    self._space = standard_action_space
    self._on_missing = on_missing
    self._discount = turn_discount
    self._processor = processor
    self._multi_modal = multi_modal
    self._image_token_id = image_token_id
    self._renderer = renderer
    self._run_options = dict(run_options or {})
    self.place = {
      "training_id": training_id,
      "step_id": step_id,
      "eval_id": eval_id,
      "baseline_id": baseline_id,
      "global_step": global_step,
    }
    self._batch = batch
    self._group_size = group_size
    self._make_recorder = make_recorder
    self._make_loader = make_loader
    self._poll_s, self._call_s = poll_s, timeout_s
    self._names: dict[str, str] = {}
    self._plays: collections.Counter[str] = collections.Counter()
    self.running = self.peak = self.accepted = self.fallback_turns = 0
    self.untrained_tokens = 0
    self.rejected: collections.Counter[str] = collections.Counter()

  async def arun_episode(
    self, engine: object, data: Mapping[str, Any]
  ) -> dict[str, Any] | None:
    """Plays the task of a row once.

    Args:
      engine: AReaL's; asked for its servers' address and its weights' version
        only where the arguments and replies have none.
      data: A row: `task_id`, and `gym_base_url`, `gym_id`, `instruction` or
        `description`.

    Returns:
      AReaL's tensors, a row for each sequence of the run; None: rejected.

    Raises:
      ValueError: no model's address, or a row that names no task or gym.
    """
    url = self._model_address(engine)
    task = cua_task.CUATask.from_row(data)
    gym = (task.gym_base_url or self._gym[0], task.gym_id or self._gym[1])
    if not all(gym):
      raise ValueError(
        f"the row of task {task.id!r} needs gym_base_url and gym_id, or the"
        " workflow does"
      )
    index = self._plays[task.id]
    self._plays[task.id] += 1
    async with self._slots():
      self.running += 1
      self.peak = max(self.peak, self.running)
      try:
        return await self._episode(
          engine,
          {"env_index_in_group": index % self._group_size, **data},
          task,
          gym,
          url,
        )
      finally:
        self.running -= 1

  # --- an episode -------------------------------------------------------------

  async def _episode(
    self,
    engine: object,
    data: Mapping[str, Any],
    task: cua_task.CUATask,
    gym: tuple[str, str],
    model_url: str,
  ) -> dict[str, Any] | None:
    client = client_lib.RunServiceClient(
      self._service_url,
      token=self._token,
      poll_s=self._poll_s,
      timeout_s=self._call_s,
    )
    genv = genv_gym.make_client({"base_url": gym[0], "gym_id": gym[1]})
    agent = run_agent.RunAgent()
    context: list[execution.GenvExecutionContext] = []
    recorder = self._new_recorder(data)
    cause = ""
    try:
      async with asyncio.timeout(self._task_s):
        context.append(await execution.start_genv_execution(task, genv))
        body = await self._body(task, context[0], model_url)
        await agent.start(client, body, self._task_s)
        end = await agent.finished()
        result = {"answer": end.answer} if end.answer else {}
        reward, success, _ = await execution.evaluate_execution(
          context[0], genv, result
        )
        rows = await self._rows(engine, agent.events, reward, client)
      self.accepted += 1
      _count(reward)
      await self._record(
        recorder, data, task, agent, model_url, reward=reward, success=success
      )
      batch = tensor_rows.collate(rows)
      return tensor_rows.as_torch(batch) if tensor_rows.has_torch() else batch
    except TimeoutError:
      cause = f"timeout: not done within {self._task_s:g} s"
    except (
      http.CallError,
      run_agent.RunFailed,
      conversion.MissingTokens,
      cua_task.UnknownTaskError,
      sampling_rule.OtherSampling,
    ) as error:
      cause = f"{type(error).__name__}: {error}"
    finally:
      await concurrency.to_the_end(self._clean_up(client, genv, agent, context))
    self.rejected[cause.partition(":")[0]] += 1
    _LOG.warning("task %s is rejected: %s", task.id, cause)
    await self._record(recorder, data, task, agent, model_url, error=cause)
    return None

  async def _clean_up(
    self, client: Any, genv: Any, agent: Any, context: list[Any]
  ) -> None:
    """Ends the run and the execution, whatever one of them does."""

    async def terminate() -> None:
      for one in context:
        await execution.terminate_execution(one, genv)

    for what, work in (
      ("run", agent.close()),
      ("execution", terminate()),
      ("gym server's client", genv.aclose()),
      ("service's client", client.aclose()),
    ):
      try:
        await concurrency.with_deadline(work, _CLEANUP_S, f"ending a {what}")
      except Exception as error:  # pylint: disable=broad-except
        _LOG.warning("an episode's %s did not end: %r", what, error)

  async def _body(
    self,
    task: cua_task.CUATask,
    context: execution.GenvExecutionContext,
    model_url: str,
  ) -> dict[str, Any]:
    options = dict(self._run_options)
    model = {"baseUrl": model_url, "provider": "openai", **self._model}
    if not model.get("name"):
      if model_url not in self._names:
        self._names[model_url] = await client_lib.model_name(
          model_url, _MODELS_S, str(model.get("apiKey") or "")
        )
      model["name"] = self._names[model_url]
    if options.pop("sampling", False) and self._gconfig is not None:
      rule = self._rule
      model["sampling"] = {
        "temperature": rule.temperature,
        "top_p": rule.top_p,
        **({"top_k": rule.top_k} if rule.top_k else {}),
      }
      if (most := getattr(self._gconfig, "max_new_tokens", None)) is not None:
        model["sampling"]["max_tokens"] = most
    return {
      "task": task.instruction or task.description or task.name,
      "agent": self._agent,
      "maxSteps": task.max_steps or self._max_turns,
      "maxRunTimeSec": self._task_s,
      "maxStepTimeSec": self._turn_s,
      "model": model,
      "env": {**context.agent_env(), **self._env},
      "standardActionSpace": self._space,
      **options,
    }

  async def _rows(
    self,
    engine: object,
    events: Sequence[Mapping[str, Any]],
    reward: float,
    client: client_lib.RunServiceClient,
  ) -> list[dict[str, Any]]:
    """Returns the run's sequences as AReaL's rows.

    Raises:
      MissingTokens: there are none that can be trained on.
      OtherSampling: Turns of another sampling are refused, or are all.
    """
    try:
      turns = conversion.turns_of(events)
      if not turns:
        raise conversion.MissingTokens("the run has no model_output event")
      store = images_lib.ImageStore()
      placeholder = self._placeholder()
      images = await self._images(turns, client, store)
      placed = {id(turn): refs for turn, refs in zip(turns, images)}
      untrained = self._untrained(turns)
      sequences, fallbacks = conversion.sequences_of(
        turns,
        images,
        placeholder,
        image_break_id=getattr(self._processor, "image_break_token_id", None),
        on_missing=self._on_missing,
        encode=lambda turn: self._encode(turn, placed[id(turn)]),
        version=_version_of(engine),
        untrained=untrained,
      )
    except (conversion.MissingTokens, sampling_rule.OtherSampling):
      raise
    except ValueError as error:
      raise conversion.MissingTokens(str(error)) from None
    self.fallback_turns += fallbacks
    last = len(sequences) - 1
    pixels = self._pixels(store)
    rows = []
    for place, sequence in enumerate(sequences):
      value = reward * self._discount ** (last - place)
      row = tensor_rows.row_of(sequence, value, pixels)
      # AReaL's engines place images' tokens by these.
      is_image = sequence.tokens[None] == placeholder
      row["mm_token_type_ids"] = is_image.astype(np.int64)
      rows.append(row)
    return rows

  def _untrained(self, turns: Sequence[conversion.Turn]) -> dict[int, str]:
    """Returns the reasons, by index, of the turns that are not trained on.

    Raises:
      OtherSampling: The rule refuses them, or no other turn is left.
    """
    reasons = conversion.untrained_of(turns, self._rule, {})
    if len(reasons) == len(turns):
      raise sampling_rule.OtherSampling(
        f"no turn can be trained on: {reasons[0]}; run_options="
        '{"sampling": True} sends gconfig\'s sampling to the service'
      )
    if reasons and not self.untrained_tokens:
      _LOG.warning("a turn is not trained on: %s", next(iter(reasons.values())))
    for index in reasons:
      ids = turns[index].token_ids
      self.untrained_tokens += 0 if ids is None else len(ids)
    return reasons

  async def _images(
    self,
    turns: Sequence[conversion.Turn],
    client: client_lib.RunServiceClient,
    store: images_lib.ImageStore,
  ) -> list[list[trajectory.ImageRef]]:
    loader = self._make_loader(store) if self._make_loader else None
    try:
      pictures = event_images.EventImages(client, store, loader)
      return [await pictures.of(turn) for turn in turns]
    finally:
      if loader is not None:
        await loader.aclose()

  def _placeholder(self) -> int | None:
    """Returns the id of images' placeholders; None for a policy without."""
    if self._image_token_id is not None:
      return self._image_token_id
    for owner in (self._renderer, self._processor):
      token_id = getattr(owner, "image_token_id", None)
      if isinstance(token_id, int):
        return token_id
    convert = getattr(self._tokenizer, "convert_tokens_to_ids", None)
    token_id = convert("<|image_pad|>") if convert is not None else None
    return token_id if isinstance(token_id, int) else None

  def _pixels(
    self, store: images_lib.ImageStore
  ) -> tensor_rows.MultiModal | None:
    if self._multi_modal is not None:
      return self._multi_modal
    if self._processor is None:
      return None
    read = getattr(self._processor, "image_processor", self._processor)

    def make(spans: Sequence[token_sequence.ImageSpan]) -> dict[str, Any]:
      pictures = [store.get(span.image) for span in spans]
      arrays = read(images=pictures, return_tensors="np")
      return {name: np.asarray(value) for name, value in arrays.items()}

    return make

  def _encode(
    self, turn: conversion.Turn, images: Sequence[trajectory.ImageRef]
  ) -> tuple[Sequence[int], Sequence[int]]:
    if self._renderer is not None:
      return event_images.encode_turn(turn, images, self._renderer)
    if self._tokenizer is None or images:
      raise conversion.MissingTokens(
        "a fallback with screenshots needs renderer=, one without needs"
        " tokenizer="
      )
    prompt = self._tokenizer.apply_chat_template(
      [dict(m) for m in turn.messages],
      add_generation_prompt=True,
      tokenize=False,
    )
    plain = lambda text: self._tokenizer.encode(text, add_special_tokens=False)
    return plain(prompt), plain(turn.text)

  # --- around it --------------------------------------------------------------

  def _model_address(self, engine: object) -> str:
    """Returns the policy's server, as its argument or the engine names it.

    Raises:
      ValueError: neither does.
    """
    address: Any = self._model_url or self._model.get("baseUrl")
    for name in ("proxy_base_url", "proxy_addr", "base_url"):
      address = address or getattr(engine, name, None)
    addresses = getattr(engine, "addresses", None)
    if not address and addresses:
      choose = getattr(engine, "choose_server", None)
      address = choose() if choose is not None else addresses[0]
    if not isinstance(address, str) or not address:
      raise ValueError(
        "model_base_url is empty and the engine names no address of its"
        " server; pass model_base_url, e.g. http://127.0.0.1:8000/v1"
      )
    url = address if "://" in address else f"http://{address}"
    url = http.address(url, "model_base_url", "http://127.0.0.1:8000/v1")
    return url if url.endswith("/v1") else f"{url}/v1"

  def _slots(self) -> asyncio.Semaphore:
    """Returns the slots of the service's runs in this event loop.

    AReaL's controller makes a workflow for each row, so they are shared.
    """
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    key = self._service_url, self._most
    if key not in gates:
      gates[key] = asyncio.Semaphore(self._most)
    return gates[key]

  def recorder(self, data: Mapping[str, Any]) -> Any:
    """Returns the recorder of an episode that starts now; None without one."""
    return None if self._make_recorder is None else self._make_recorder(data)

  def _new_recorder(self, data: Mapping[str, Any]) -> Any:
    try:
      return self.recorder(data)
    except Exception as error:  # pylint: disable=broad-except
      # A monitor that is down must not cost an episode.
      _LOG.warning("an episode is not recorded: %r", error)
      return None

  async def _record(
    self,
    recorder: Any,
    data: Mapping[str, Any],
    task: cua_task.CUATask,
    agent: run_agent.RunAgent,
    model: str,
    *,
    reward: float | None = None,
    success: bool | None = None,
    error: str = "",
  ) -> None:
    """Sends the episode to the Training Monitor; a failure is only logged."""
    if recorder is None:
      return

    def send() -> None:
      recorder.start_rollout(
        task.id,
        task.instruction or task.description,
        model,
        "genv",
        recorder.source_type,
        step_id=recorder.step_id,
        eval_id=recorder.eval_id,
        baseline_id=recorder.baseline_id,
        batch=self._batch,
        group_num=data.get("item_idx"),
        env_index=data["env_index_in_group"],
        max_turns=self._max_turns,
      )
      # Services count their steps from 0 or from 1; turns are counted from 1.
      turns: dict[Any, int] = {}
      for event in agent.events:
        kind = event.get("type")
        if kind not in _OF_TURNS:
          continue
        turn = turns.setdefault(event.get("step"), len(turns) + 1)
        if kind in ("step_start", "turn_start"):
          recorder.start_turn(turn)
        elif kind in ("step_end", "turn_end"):
          recorder.end_turn(turn)
        else:
          action = event.get("action") or {}
          recorder.record_action(turn, str(action.get("name")), action)
      recorder.record_validation(success=success)
      if error:
        recorder.update_status("failed", error_message=error)
      else:
        recorder.complete_rollout(
          reward=reward, task_success=success, num_turns=len(turns)
        )

    try:
      await concurrency.acall(
        send, seconds=_CLEANUP_S, what="recording an episode"
      )
    except Exception as error:  # pylint: disable=broad-except
      # A monitor that is down must not cost an episode.
      _LOG.warning("task %s is not recorded: %r", task.id, error)


def _version_of(engine: object) -> int:
  """Returns the engine's weights' version; 0 where it has none."""
  ask = getattr(engine, "get_version", None)
  version = ask() if callable(ask) else 0
  return version if isinstance(version, int) and version >= 0 else 0


def _rule_of(gconfig: object, other: str) -> sampling_rule.SamplingRule:
  """The distribution of AReaL's generation settings, as a rule.

  Raises:
    ValueError: A setting is out of range, or `other` is no treatment.
  """

  def field(name: str, default: float) -> float:
    return getattr(gconfig, name, default)

  top_k = int(field("top_k", 0))
  return sampling_rule.SamplingRule(
    temperature=0.0
    if field("greedy", False)
    else float(field("temperature", 1.0)),
    top_p=float(field("top_p", 1.0)),
    top_k=0 if top_k >= _TOP_K_OFF else max(0, top_k),
    other=other,
  )


def _count(reward: float) -> None:
  """Adds an episode's reward to AReaL's statistics, as its workflows do."""
  if _HAS_AREAL:
    from areal.infra import workflow_context  # type: ignore[import-not-found]  # pylint: disable=g-import-not-at-top
    from areal.utils import stats_tracker  # type: ignore[import-not-found]  # pylint: disable=g-import-not-at-top

    stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)


@functools.lru_cache(maxsize=8)
def _pretrained(kind: str, path: str) -> Any:
  """Returns a tokenizer or processor of transformers, loaded once."""
  import transformers  # pylint: disable=g-import-not-at-top

  return getattr(transformers, kind).from_pretrained(path)
