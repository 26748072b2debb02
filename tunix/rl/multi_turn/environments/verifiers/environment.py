"""Plays unmodified environments of the package verifiers (0.1 and 0.4).

`environment=verifiers` names the module of one, whose `load_environment` makes
it, or a taskset of 0.4. It runs in a process of an environment of its own
(`make verifiers`, `make verifiers4`), since what that package asks for does not
go together with this one. There it drives the episode: its prompts, tools and
turns reach the policy through the run's server, as those of any other agent,
and its rubric rewards them.

An episode is one step here: `clients.verifiers_agent` hands the session of the
server over, and acts with the name of what it handed over.

Promises: a rollout or a rubric that fails is an error of the environment, not a
reward of 0; keys reach the process by a pipe and no trajectory.

Does not support rewards that compare the rollouts of a group.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import json
import pathlib
import threading
import time
from typing import Any, Mapping, Sequence
import uuid
import weakref

from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.environments import options
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import line_process

_FAMILY = "verifiers"


@dataclasses.dataclass(frozen=True, eq=False)
class PolicySession:
  """A session of the run's server.

  Attributes:
    base_url: Address of its OpenAI API.
    api_key: Key of the session.
    model: Name of the policy at the server.
    sampling: Arguments of a completion.
    timeout_s: Deadline of one request.
  """

  base_url: str
  api_key: str = dataclasses.field(repr=False)
  model: str
  sampling: Mapping[str, Any]
  timeout_s: float


_HANDED_OVER: weakref.WeakValueDictionary[str, PolicySession] = (
  weakref.WeakValueDictionary()
)


def hand_over(session: PolicySession) -> str:
  """Names a session for one step, as long as the caller keeps it."""
  name = uuid.uuid4().hex
  _HANDED_OVER[name] = session
  return name


class VerifiersEnvironment(base_env.BaseEnv):
  """One row of an environment of verifiers. Its only step plays all of it."""

  def __init__(
    self,
    task: Mapping[str, Any],
    *,
    module: str,
    args: Mapping[str, Any] | None = None,
    path: str = "",
    python: str = ".venv-verifiers/bin/python",
    success_at: float = 1.0,
    start_s: float = 120.0,
    episode_s: float = 280.0,
  ):
    """Args:

      task: Mapping with `split` ("train" or "eval"), `index` and `seed`.
      module: Module with `load_environment`, with dashes or underscores.
      args: Arguments of `load_environment`, JSON values.
      path: Directory that the module is in, where it is not installed.
      python: interpreter of the environment that has verifiers.
      success_at: the reward from which an episode is solved.
      start_s: Deadline of importing verifiers and loading the environment.
      episode_s: Deadline of a rollout and its rewards.

    Raises:
      ValueError: naming the argument.
    """
    for key in ("split", "index", "seed"):
      if key not in task:
        raise ValueError(
          f"the task needs {key!r}; set task_source.source=generated"
        )
    if not isinstance(module, str) or not module:
      raise ValueError(f"module={module!r} must name a module")
    # Not resolved: an interpreter's link says which environment it is of.
    where = pathlib.Path(python).expanduser().absolute()
    if not where.is_file():
      raise ValueError(
        f"python={python}: no such file; run `make verifiers`, or name the"
        " interpreter of an environment with verifiers<0.2"
      )
    folder = str(pathlib.Path(path).expanduser().absolute()) if path else ""
    if folder and not pathlib.Path(folder).is_dir():
      raise ValueError(f"path={path} is no directory; name the module's")
    options.check_seconds({"start_s": start_s, "episode_s": episode_s})
    self._request = {"module": module, "args": dict(args or {}), "path": folder}
    try:
      json.dumps(self._request)
    except (TypeError, ValueError) as error:
      raise ValueError(f"args={args!r} must be JSON: {error}") from None
    self._python = str(where)
    self._task = {key: task[key] for key in ("split", "index", "seed")}
    self._success_at = success_at
    self._start_s, self._episode_s = start_s, episode_s
    self._worker: Worker | None = None

  async def reset(self) -> base_env.ResetResult:
    """Loads the environment where it is not loaded yet.

    Raises:
      VerifiersError: the environment cannot be loaded.
    """
    self._worker = await concurrency.acall(
      shared_worker,
      self._python,
      self._request,
      self._start_s,
      what="starting verifiers",
    )
    split, index = self._task["split"], self._task["index"]
    name = self._request["module"]
    return {"question": f"{name}, {split} {index}"}, {}

  async def step(self, action: object) -> base_env.StepResult:
    """Plays the rollout with the session that `action` names.

    Raises:
      VerifiersError: the rollout or its rubric failed.
      ValueError: no session of that name.
    """
    session = _HANDED_OVER.pop(str(getattr(action, "action", action)), None)
    if session is None or self._worker is None:
      raise ValueError(
        "an environment of verifiers asks the policy itself; set"
        " rollout.via=proxy and"
        " rollout.agent=tunix.rl.multi_turn.clients.verifiers_agent:play"
      )
    result = await self._worker.play(
      {**self._task, **vars(session)}, self._episode_s
    )
    reward = float(result["reward"])
    info = {**result, "success": reward >= self._success_at}
    return {}, reward, True, info

  def close(self) -> None:
    """Does nothing: the process plays the next episode."""


class VerifiersTasks:
  """Rows of the environment, drawn where they are: a `gyms.base.TaskSet`.

  Training rows are shuffled anew in each pass. Without a list for evaluation,
  every fifth row is held out.
  """

  def __init__(self, families: Sequence[str] | None = None):
    """`families`: none, or "verifiers", the only one.

    Raises:
      ValueError: another.
    """
    if wrong := set(families or ()) - {_FAMILY}:
      raise ValueError(f"{min(wrong)!r} is no family; leave it at {_FAMILY}")

  def families(self) -> tuple[str, ...]:
    return (_FAMILY,)

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return _task(family, "train", index, seed)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return _task(family, "eval", index, seed)


def _task(family: str, split: str, index: int, seed: int) -> base.Task:
  return base.Task(
    task_id=f"{family}/{split}/{index}/{seed}",
    family=family,
    seed=seed,
    params={"split": split, "index": index, "seed": seed},
  )


_WORKER = pathlib.Path(__file__).parent / "worker.py"
_RETRY_S = 30.0  # Between two starts, the first of which failed.


class VerifiersError(line_process.WorkerError):
  """The environment, or the process that it runs in, failed."""


class Worker(line_process.Worker):
  """One process, which plays episodes of one environment at a time or more."""

  def __init__(self, python: str, request: Mapping[str, Any], start_s: float):
    """Starts the process and waits until its environment is loaded.

    Args:
      python: Interpreter of the environment that has verifiers.
      request: Mapping with `module`, `args` and `path`.
      start_s: Deadline of the start.

    Raises:
      VerifiersError: the process cannot start, or cannot load the environment.
    """
    super().__init__(
      [python, "-u", str(_WORKER)],
      request["module"],
      request,
      start_s,
      late="environment.options.episode_s and collect.deadlines.step",
      error=VerifiersError,
    )


_SHARED: dict[str, Worker] = {}
_FAILED: dict[str, tuple[float, str]] = {}  # When a start failed, and why.
_STARTING: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)


def shared_worker(
  python: str, request: Mapping[str, Any], start_s: float
) -> Worker:
  """Returns the worker of that environment, started unless it runs. Blocks.

  A start that failed is tried again half a minute later; until then its error
  is raised at once, so that a run with a wrong module ends soon.

  Raises:
    VerifiersError: see `Worker`.
  """
  key = json.dumps([python, request], sort_keys=True)
  with _STARTING[key]:
    worker = _SHARED.get(key)
    if worker is not None and worker.alive:
      return worker
    when, why = _FAILED.get(key, (0.0, ""))
    if why and time.monotonic() < when + _RETRY_S:
      raise VerifiersError(why)
    try:
      worker = _SHARED[key] = Worker(python, request, start_s)
    except VerifiersError as error:
      _FAILED[key] = time.monotonic(), str(error)
      raise
    return worker


@atexit.register
def close_workers() -> None:
  """Ends all shared workers."""
  while _SHARED:
    _SHARED.popitem()[1].end("this process ends")
