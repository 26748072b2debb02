"""Makes parts of the ingest protocol from episodes.

Counts and flags are the episode's own records; nothing is computed twice. Turns
are numbered from 1.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.monitor.client import live_turns
from tunix.rl.multi_turn.monitor.client import task_rows

Status = trajectory_lib.TrajectoryStatus
_CANCELLED = frozenset({Status.CANCELLED})
_ANSWERS = frozenset({"answer", "terminate"})
_VERDICT_STAGES = frozenset({"evaluate", "reward"})
_DECIDED = frozenset({Status.SUCCEEDED, Status.FAILED})


@dataclasses.dataclass
class RunningEpisode:
  """An episode before it ends.

  Attributes:
    rollout_id: its name at the monitor.
    source: source_type and the id that goes with it.
    started: seconds since the epoch.
    turns: (end, seconds by stage) of each turn so far.
    faults: contained failures.
    fields: columns that are known from the beginning.
    image: the screen after the last turn; None where it was not sent.
  """

  rollout_id: str
  source: dict[str, Any]
  started: float
  turns: list[tuple[float, Mapping[str, float]]] = dataclasses.field(
      default_factory=list
  )
  faults: list[dict[str, str]] = dataclasses.field(default_factory=list)
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)
  image: trajectory_lib.ImageRef | None = None


def rollout_status(status: Status) -> str:
  """The database's status of an ended episode."""
  if status.is_policy_outcome:
    return "completed"
  return "cancelled" if status in _CANCELLED else "failed"


def begun(
    running: RunningEpisode, task: Mapping[str, Any], world: task_rows.World
) -> dict[str, Any]:
  """The part of an episode's start."""
  name = running.rollout_id
  return {
      "tasks": [{
          "client_id": task["client_id"], "task_id": task["task_id"],
          "source_type": task["source_type"],
      }],
      "rollouts": [{
          "client_id": name, "rollout_id": name,
          "task_id": task["client_id"], **running.source, **running.fields,
          "status": "env_creation", "current_phase": "env_creation",
          "start_time": running.started,
      }],
      "environments": [{
          **task_rows.environment(name, world),
          "status": "creating", "creation_time": running.started,
      }],
  }  # pyformat: disable


def ended(
    running: RunningEpisode,
    episode: trajectory_lib.Trajectory,
    time: float,
    task: Mapping[str, Any],
    world: task_rows.World,
    max_turns: int | None,
    verdict: task_rows.Verdict = task_rows.Verdict(),
) -> dict[str, list[dict[str, Any]]]:
  """Rows of an episode that has ended.

  Args:
    running: what is known of it from before.
    episode: as it ended.
    time: when, seconds since the epoch.
    task: as `task_part` makes it.
    world: where it was played.
    max_turns: of a task without a limit of its own.
    verdict: how the task's success is decided.
  """
  name = running.rollout_id
  turns = _turn_times(running, episode, time)
  info = _last_info(episode)
  rollout = {
      "client_id": name, "rollout_id": name, "task_id": task["client_id"],
      **running.source, **running.fields,
      **_times(running, episode, turns, time),
      **_outcome(episode, info), **_counts(episode, running),
      "status": rollout_status(episode.status),
      "current_phase": "cleanup",
      "status_message": episode.status.value,
      "error_message": episode.error,
      "max_turns": (
          episode.task.get("max_turns")
          if isinstance(episode.task, Mapping)
          else None
      ) or max_turns,
      "errors": _errors(episode, running),
      "trajectory_path": world.trajectories or None,
      "summary_json": {
          "trajectory_status": episode.status.value,
          "metrics": dict(episode.metrics),
          "policy_versions": episode.versions,
          "tokens": sum(len(s) for s in episode.sequences),
          "sampled_tokens": episode.num_sampled,
          "sequences": len(episode.sequences),
      },
  }  # pyformat: disable
  broken = episode.status is Status.ENV_ERROR
  part: dict[str, list[dict[str, Any]]] = {
      "tasks": [dict(task)],
      "validators": [task_rows.validator(task["client_id"], world, verdict)],
      "rollouts": [rollout],
      "environments": [{
          **task_rows.environment(name, world),
          "status": "error" if broken else "terminated",
          "creation_time": running.started, "termination_time": time,
          "error_message": episode.error if broken else None,
      }],
      "turns": [], "actions": [], "observations": [], "validations": [],
  }  # pyformat: disable
  sampled = _sampled(episode)
  before = _first_image(episode)
  seen = 0
  for index, (step, (start, end, seconds)) in enumerate(
      zip(episode.steps, turns)
  ):
    messages, seen = _new_messages(step, seen)
    rows = _turn_rows(
        name, index, step, (start, end, seconds), before,
        sampled.get(index, _NO_TOKENS), messages,
    )  # pyformat: disable
    for kind, found in rows.items():
      part[kind] += found
    after = live_turns.image_of(step.observation)
    before = after if after is not None else before
  failure = _verdict_failure(episode, running)
  if "success" in info or "evaluation" in info or failure is not None:
    evaluation = info.get("evaluation") or {}
    part["validations"].append({
        "client_id": f"{name}:validation", "rollout_id": name,
        "validator_id": f"{task['client_id']}:validator",
        "validation_time": rollout["validation_time"],
        "validation_query": verdict.query or f"{world.name}.evaluate",
        "expected_result": verdict.expected or "success",
        "success": bool(info.get("success")) and failure is None,
        "actual_result": str(evaluation.get("score", "")) or None,
        "execution_time": episode.metrics.get("seconds_evaluate"),
        "error_message": failure,
        "details_json": trajectory_lib.encode(evaluation),
    })  # pyformat: disable
  return part


def _verdict_failure(
    episode: trajectory_lib.Trajectory, running: RunningEpisode
) -> str | None:
  """Why there is no verdict; None where there is one, or none was sought."""
  if episode.status.is_policy_outcome:
    return None
  for fault in running.faults:
    if fault["stage"] in _VERDICT_STAGES:
      return f"{fault['kind']}: {fault['message']}"
  return None


def live_turn(
    running: RunningEpisode, event: events.TurnFinished
) -> tuple[dict[str, list[dict[str, Any]]],
           dict[str, trajectory_lib.ImageRef]]:  # pyformat: disable
  """Rows of a turn of an episode that goes on, and their screenshots.

  The rows of its end have the same ids and more in them. ({}, {}) of a turn
  too short to be watched.
  """
  step = live_turns.shown(event)
  before, running.image = running.image, None
  if step is None:
    return {}, {}
  images = live_turns.images_of(step)
  before = live_turns.first_image(step) or before
  running.image = live_turns.image_of(step.observation) or before
  start = max(running.started, event.time - sum(event.seconds.values()))
  rows = _turn_rows(
      running.rollout_id, event.turn, step,
      (start, max(start, event.time), event.seconds), before, _NO_TOKENS, None,
  )  # pyformat: disable
  return rows, images


def _turn_rows(
    name: str, index: int, step: trajectory_lib.Step,
    time: tuple[float, float, Mapping[str, float]],
    before: trajectory_lib.ImageRef | None, tokens: _Tokens,
    messages: list[Any] | None,
) -> dict[str, list[dict[str, Any]]]:  # pyformat: disable
  """Rows of the turn number `index`, from 0.

  Args:
    name: of the rollout.
    index: of the turn.
    step: the turn.
    time: (start, end, seconds by stage).
    before: the screen that the policy saw.
    tokens: of the turn.
    messages: that were new to the model.
  """
  start, end, seconds = time
  turn = f"{name}:turn:{index + 1}"
  after = live_turns.image_of(step.observation)
  return {
      "turns": [{
          "client_id": turn, "rollout_id": name, "turn": index + 1,
          "start_time": start, "end_time": end, "turn_time": end - start,
          "reward": float(step.reward), "episode_done": bool(step.done),
          "metrics_json": _turn_metrics(step, seconds, tokens),
      }],
      "actions": _actions(turn, step, tokens),
      # In this order, also where the first one's screen is known later.
      "observations": [
          {
              "client_id": f"{turn}:before", "turn_id": turn,
              "obs_type": "screenshot_before", "screenshot_uri": _uri(before),
              "model_input_json": messages,
          },
          {
              "client_id": f"{turn}:after", "turn_id": turn,
              "obs_type": "screenshot_after" if after is not None else "text",
              "screenshot_uri": _uri(after),
              "text_content": _text(step.observation),
          },
      ],
  }  # pyformat: disable


def images_of(
    episode: trajectory_lib.Trajectory,
) -> dict[str, trajectory_lib.ImageRef]:
  """The screenshots that `ended` refers to, by hash."""
  found = [_first_image(episode)]
  found += [live_turns.image_of(step.observation) for step in episode.steps]
  return {ref.sha256: ref for ref in found if ref is not None}


# --- times --------------------------------------------------------------------


def _turn_times(
    running: RunningEpisode, episode: trajectory_lib.Trajectory, end: float
) -> list[tuple[float, float, Mapping[str, float]]]:
  """(start, end, seconds by stage) of each turn; never before the last one."""
  found = []
  last = running.started
  for _, known in itertools.zip_longest(
      episode.steps, running.turns[: len(episode.steps)]
  ):
    finish, seconds = known or (end, {})
    finish = max(last, min(finish, end) if end > last else last)
    start = max(last, finish - sum(seconds.values()))
    found.append((start, finish, seconds))
    last = finish
  return found


def _times(
    running: RunningEpisode, episode: trajectory_lib.Trajectory,
    turns: Sequence[Any], end: float,
) -> dict[str, Any]:  # pyformat: disable
  """When each stage had ended, as far as it was measured.

  The verdict of a gym is part of the last turn, which then ends the task when
  it begins; another one comes after that turn.
  """
  end = max(end, running.started)
  spent = episode.metrics
  first = turns[0][0] if turns else None
  last = turns[-1][1] if turns else None
  created = ready = None
  if "seconds_reset" in spent:
    created = min(running.started + spent["seconds_reset"], first or end)
    if "seconds_agent_init" in spent:
      ready = min(created + spent["seconds_agent_init"], first or end)
  judged = spent.get("seconds_evaluate")
  verdict = None
  if last is not None and judged is not None:
    if "evaluation" in _last_info(episode):
      verdict, last = last, max(turns[-1][0], last - judged)
    else:
      verdict = min(last + judged, end)
  return {
      "start_time": running.started, "end_time": end,
      "env_creation_time": created, "agent_init_time": ready,
      "task_start_time": first, "task_end_time": last,
      "validation_time": verdict, "rollout_time": end - running.started,
  }  # pyformat: disable


# --- outcome and counts -------------------------------------------------------


def _last_info(episode: trajectory_lib.Trajectory) -> Mapping[str, Any]:
  return episode.steps[-1].info if episode.steps else {}


def _gui_actions(step: trajectory_lib.Step) -> list[dict[str, Any]]:
  return [
      dict(a) for a in step.info.get("gui_actions") or () if "kind" in a
  ]


def _outcome(
    episode: trajectory_lib.Trajectory, info: Mapping[str, Any]
) -> dict[str, Any]:
  success = episode.status is Status.SUCCEEDED
  claims = [
      a for step in episode.steps for a in _gui_actions(step)
      if a["kind"] in _ANSWERS
  ]  # pyformat: disable
  claimed = None
  if claims:
    # An answer claims success, unless it claims failure.
    claimed = claims[-1].get("success") is not False
  won = [n for n, s in enumerate(episode.steps, 1) if s.info.get("success")]
  paid = [n for n, s in enumerate(episode.steps, 1) if s.reward > 0]
  first = (won or paid or [None])[0]
  return {
      "task_completed": episode.status in _DECIDED,
      "task_success": success,
      "agent_reported_success": claimed,
      "validation_passed": (
          bool(info["success"]) if "success" in info else None
      ),
      "ran_out_of_turns": episode.status is Status.MAX_TURNS,
      "attempted_completion": bool(claims),
      "turn_first_success": first,
      "turn_task_completed": (
          episode.num_turns if episode.status in _DECIDED else None
      ),
      "num_turns": episode.num_turns,
      "current_turn": episode.num_turns,
      "reward": float(episode.reward),
  }


def _counts(
    episode: trajectory_lib.Trajectory, running: RunningEpisode
) -> dict[str, int]:
  actions = [a for step in episode.steps for a in _gui_actions(step)]
  unparsed = named = argued = 0
  for step in episode.steps:
    kinds = collections.Counter(step.info.get("invalid_kinds") or ())
    if step.info.get("parse_errors") or kinds[trajectory_lib.NO_CALL]:
      unparsed += 1
      continue
    untyped = len(step.info.get("invalid_actions") or ()) - kinds.total()
    named += kinds[trajectory_lib.TOOL_NAME]
    argued += kinds[trajectory_lib.TOOL_ARGUMENTS] + max(0, untyped)
  failed = episode.error is not None and not episode.status.is_policy_outcome
  return {
      "num_total_actions": len(actions),
      "consecutive_repeated_actions": sum(
          a == b for a, b in zip(actions, actions[1:])
      ),
      "parse_errors": unparsed,
      "tool_name_errors": named,
      "tool_arg_errors": argued,
      "runtime_errors": max(len(running.faults), int(failed)),
  }


def _errors(
    episode: trajectory_lib.Trajectory, running: RunningEpisode
) -> list[dict[str, Any]]:
  found: list[dict[str, Any]] = list(running.faults)
  if episode.error and not found:
    found.append({"kind": episode.status.value, "message": episode.error})
  for number, step in enumerate(episode.steps, 1):
    for kind in ("parse_errors", "invalid_actions"):
      found += [
          {"kind": kind, "turn": number, "message": str(text)}
          for text in step.info.get(kind) or ()
      ]
  return found


# --- turns --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tokens:
  """A turn's tokens.

  Attributes:
    ids: sampled.
    logprobs: nats, of each.
    versions: [version, how many in a row] of them.
    entropies: nats, float32 of each; None where the sampler has none.
    prompt: tokens that the turn added to the prompt, [id, how many in a
      row]: screenshots are long runs of one id.
  """

  ids: list[int]
  logprobs: list[float]
  versions: list[list[int]]
  entropies: np.ndarray | None = None
  prompt: list[list[int]] | None = None


_NO_TOKENS = _Tokens([], [], [])


def _sampled(episode: trajectory_lib.Trajectory) -> dict[int, _Tokens]:
  """Turn -> its tokens; each sampled one is in one sequence."""
  sampled: dict[int, list[tuple[Any, slice]]] = {}
  prompts: dict[int, list[list[int]]] = {}
  for sequence in episode.sequences:
    before: dict[int, list[list[int]]] = {}
    for turn, chosen, part in _stretches(sequence):
      if chosen:
        sampled.setdefault(turn, []).append((sequence, part))
        prompts.setdefault(turn, []).extend(before.pop(turn, ()))
      else:
        before.setdefault(turn, []).extend(_runs(sequence.tokens[part]))
  found = {}
  for turn, parts in sampled.items():
    silent = any(s.entropies is None for s, _ in parts)
    found[turn] = _Tokens(
        _joined(parts, "tokens").tolist(),
        _joined(parts, "logprobs").tolist(),
        _runs(_joined(parts, "versions")),
        None if silent else _joined(parts, "entropies"),
        prompts[turn],
    )
  return found


def _joined(parts: Iterable[tuple[Any, slice]], name: str) -> np.ndarray:
  return np.concatenate([getattr(s, name)[part] for s, part in parts])


def _stretches(sequence: Any) -> Iterator[tuple[int, bool, slice]]:
  """(turn, whether sampled, where) of tokens in a row that agree in both."""
  key = 2 * sequence.turn_ids.astype(np.int64) + sequence.loss_mask
  cuts = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)]
  for start, stop in zip(cuts, cuts[1:]):
    if stop > start:
      turn, sampled = divmod(int(key[start]), 2)
      yield turn, bool(sampled), slice(start, stop)


def _runs(values: np.ndarray) -> list[list[int]]:
  """[value, how many in a row] of integers."""
  cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]
  cuts.append(len(values))
  return [
      [value, stop - start]
      for value, start, stop in zip(values[cuts[:-1]].tolist(), cuts, cuts[1:])
  ] if len(values) else []


def _turn_metrics(
    step: trajectory_lib.Step, seconds: Mapping[str, float], tokens: _Tokens
) -> dict[str, Any]:
  info = {
      k: v for k, v in step.info.items() if k not in ("gui_actions", "gym")
  }  # pyformat: disable
  return {
      "seconds": dict(seconds),
      "thought": step.thought,
      "model_response": step.model_response,
      "mc_return": float(step.mc_return),
      "policy_versions": tokens.versions,
      "prompt_tokens": tokens.prompt,
      "entropies": tokens.entropies,
      "sampled_tokens": len(tokens.ids),
      "mean_logprob": (
          sum(tokens.logprobs) / len(tokens.logprobs)
          if tokens.logprobs
          else None
      ),
      "info": _writable(info),
  }


def _actions(
    turn: str, step: trajectory_lib.Step, tokens: _Tokens
) -> list[dict[str, Any]]:
  """A row an action; the first one has the turn's tokens.

  A turn in which nothing could be done has one row all the same.
  """
  calls = (
      step.action.tool_calls
      if isinstance(step.action, trajectory_lib.Action)
      else []
  )
  done = _gui_actions(step)
  rows: list[dict[str, Any]] = []
  for index in range(max(len(done), len(calls))):
    call = calls[index] if index < len(calls) else None
    gui = done[index] if index < len(done) else None
    rows.append({
        "action_type": gui["kind"] if gui else "invalid",
        "tool_name": call.name if call else None,
        # The executed action, in pixels; else the requested one.
        "tool_args": (
            {k: v for k, v in gui.items() if k != "kind"}
            if gui
            else _writable(call.arguments)
        ),
        "action_json": _writable(call.to_json()) if call else None,
    })
  if not rows:
    kind = "parse_error" if step.info.get("parse_errors") else "text"
    rows.append({"action_type": kind})
  for index, row in enumerate(rows):
    row |= {"client_id": f"{turn}:action:{index}", "turn_id": turn}
  if tokens.ids:
    rows[0] |= {
        "tokens": tokens.ids, "logprobs": tokens.logprobs,
        "num_tokens": len(tokens.ids),
    }  # pyformat: disable
  return rows


def _new_messages(
    step: trajectory_lib.Step, seen: int
) -> tuple[list[Any] | None, int]:
  """Messages that this turn's model call had and the one before had not."""
  messages = list(step.chat_completions)
  while messages and messages[-1].get("role") == "assistant":
    messages.pop()  # The reply, which `chat_completions` ends with.
  new = messages[seen:] if seen <= len(messages) else messages
  return (_writable(new) or None), len(step.chat_completions)


# --- screenshots --------------------------------------------------------------


def _first_image(
    episode: trajectory_lib.Trajectory,
) -> trajectory_lib.ImageRef | None:
  """The policy's input before its first turn."""
  if not episode.steps:
    return None
  return live_turns.first_image(episode.steps[0]) or next(
      (span.image for s in episode.sequences[:1] for span in s.images), None
  )


def _text(observation: Any) -> str | None:
  if isinstance(observation, str):
    return observation
  if not isinstance(observation, Mapping):
    return None
  texts = [
      str(observation[k])
      for k in ("question", "instruction", "text")
      if observation.get(k)
  ]
  outputs = observation.get("tool_outputs") or {}
  texts += [f"{k}: {v}" for k, v in outputs.items()]
  return "\n".join(texts) or None


def _uri(image: trajectory_lib.ImageRef | None) -> str | None:
  return None if image is None else f"sha256:{image.sha256}"


def _writable(value: Any) -> Any:
  """JSON values, with text for the rest."""
  try:
    return trajectory_lib.encode(value)
  except TypeError:
    if isinstance(value, Mapping):
      return {str(k): _writable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
      return [_writable(v) for v in value]
    return str(value)
