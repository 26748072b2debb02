"""Plays a gym behind a gym server: `gym.name=genv`.

Each episode is an execution: created at `start`, stepped by `act`, judged by
`evaluate`, terminated by `close` (also when `start` was given up before its
answer came). Promises: a request that the server refuses or loses raises a
`GenvError`, so the episode is the environment's failure and not a reward of 0;
actions are carried out once, however bad the connection.

Needs the step-level API of docs/gym_server.md; an agent service that acts by
itself is given an execution by `genv.execution` instead.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from typing import Any, Mapping
import uuid

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http

from cua_gyms.genv import genv_client

_LOG = logging.getLogger(__name__)
TOKEN_VARIABLE = "TUNIX_GYM_TOKEN"


def read_token(token_file: str = "") -> str:
  """Returns the token of a file, else of $TUNIX_GYM_TOKEN; "" for none.

  Raises:
    ValueError: the file cannot be read.
  """
  if not token_file:
    return os.environ.get(TOKEN_VARIABLE, "")
  try:
    return pathlib.Path(token_file).expanduser().read_text("utf-8").strip()
  except OSError as error:
    raise ValueError(
      f"token_file={token_file}: {error.strerror or error}"
    ) from None


def make_client(settings: Mapping[str, Any]) -> genv_client.GenvClient:
  """Returns a client of the server that a gym's settings name.

  Raises:
    ValueError: a setting that cannot be.
  """
  timeouts = settings.get("timeouts") or {}
  names = {f.name for f in dataclasses.fields(genv_client.Timeouts)}
  if not isinstance(timeouts, Mapping) or set(timeouts) - names:
    raise ValueError(
      f"timeouts={timeouts!r} must be an object with seconds for"
      f" {', '.join(sorted(names))}"
    )
  return genv_client.GenvClient(
    settings.get("base_url") or genv_client.DEFAULT_BASE_URL,
    settings.get("gym_id") or "desktop",
    token=read_token(settings.get("token_file") or ""),
    timeouts=genv_client.Timeouts(**timeouts),
  )


class GenvGym:
  """A gym behind a gym server; see the module docstring.

  Attributes:
    execution_id: Id of the running episode, None without one.
  """

  def __init__(
    self,
    base_url: str = genv_client.DEFAULT_BASE_URL,
    gym_id: str = "desktop",
    *,
    token_file: str = "",
    width: int | None = None,
    height: int | None = None,
    lease_s: float | None = None,
    gym_options: Mapping[str, Any] | None = None,
    timeouts: Mapping[str, float] | None = None,
    client: genv_client.GenvClient | None = None,
  ):
    """Args:

      base_url, gym_id: Address of the server and name of its gym.
      token_file: File with the server's token; without it $TUNIX_GYM_TOKEN.
      width, height: Size that screenshots must have; None takes any.
      lease_s: Seconds without a call after which the server closes an
        execution; None for the server's own.
      gym_options: Settings of the server's gym, those it lets clients set.
      timeouts: deadlines by name, see `client.Timeouts`.
      client: Client to use instead of one made from the settings.

    Raises:
      ValueError: a setting that cannot be.
    """
    self._client = client or make_client(
      {
        "base_url": base_url,
        "gym_id": gym_id,
        "token_file": token_file,
        "timeouts": timeouts,
      }
    )
    self._size = (width, height)
    self._options: dict[str, Any] = {"observe": True}
    if lease_s is not None:
      self._options["lease_s"] = float(lease_s)
    if gym_options:
      self._options["gym"] = dict(gym_options)
    self.execution_id: str | None = None
    self._steps = 0
    self._seen: base.Observation | None = None

  async def start(self, task: base.Task) -> base.Observation:
    await concurrency.to_the_end(self._end())
    where = task.params.get("genv")
    identifier = task.task_id
    if isinstance(where, Mapping) and where.get("identifier"):
      identifier = str(where["identifier"])
    key = uuid.uuid4().hex
    # Before the answer comes, only the key names the execution.
    self.execution_id, self._steps = f"key:{key}", 0
    reply = await self._client.create(identifier, self._options, key)
    self.execution_id = reply["execution_id"]
    shown = reply.get("observation")
    if shown is None:
      shown = await self._screenshot()
    observation = await self._read(shown)
    width, height = observation.size
    expected = self._size[0] or width, self._size[1] or height
    if (width, height) != expected:
      raise genv_client.GenvError(
        f"the screens of {self._client.base_url} are {width}x{height},"
        f" {expected[0]}x{expected[1]} was expected; set gym.width={width}"
        f" gym.height={height}, or serve the gym at the other size"
      )
    self._seen = observation
    info = {**observation.info, "execution_id": self.execution_id}
    return dataclasses.replace(observation, info=info)

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    try:
      reply = await self._client.step(self._id(), action, self._steps + 1)
    except genv_client.GenvRequestError as error:
      if error.status != 422 or self._seen is None:
        raise
      # Nothing was done. It is the policy's own fault, and no failure of the
      # environment that would let it out of a bad episode.
      return dataclasses.replace(
        self._seen, instruction="", text=f"Error: {error.detail}"
      )
    self._steps += 1
    self._seen = await self._read(reply.get("observation"))
    return self._seen

  async def evaluate(self) -> base.Evaluation:
    reply = await self._client.evaluate(self._id())
    try:
      score, success = wire.reward_of(reply)
    except wire.WireError as error:
      raise genv_client.GenvError(
        f"{self._client.base_url} judged execution {self.execution_id}, but"
        f" {error}"
      ) from None
    result = reply.get("result")
    result = result if isinstance(result, Mapping) else {}
    details = result.get("details")
    details = dict(details) if isinstance(details, Mapping) else {}
    if result.get("validators"):
      details["validators"] = result["validators"]
    return base.Evaluation(score, success, details)

  async def close(self) -> None:
    """Terminates the execution; idempotent."""
    # The execution is terminated even if the caller is cancelled.
    await concurrency.to_the_end(self._end(close=True))

  async def _end(self, close: bool = False) -> None:
    execution, self.execution_id = self.execution_id, None
    try:
      if execution is not None:
        await self._client.terminate(execution)
    finally:
      if close:
        await self._client.aclose()

  async def _screenshot(self) -> Any:
    try:
      return await self._client.screenshot(self._id())
    except genv_client.GenvError as error:
      if error.status in (404, 405) and not error.code:
        raise genv_client.GenvError(
          f"{self._client.base_url} has no step-level API (see"
          " docs/gym_server.md); its executions can only be given to an"
          " agent service that acts by itself",
          error.status,
        ) from error
      raise

  def _id(self) -> str:
    if self.execution_id is None:
      raise RuntimeError("no episode is running; call start(task) first")
    return self.execution_id

  async def _read(self, data: object) -> base.Observation:
    try:
      return await http.read(
        lambda: wire.observation_from_json(data),
        _size(data),
        self._client.timeouts.step,
        "an observation",
      )
    except wire.WireError as error:
      raise genv_client.GenvError(f"{self._client.base_url}: {error}") from None


class AttachedGym(GenvGym):
  """Acts on an execution that another program has made and will judge.

  An agent service is given `{gymBaseUrl, gymId, executionId}` and no task list:
  `start` shows the current state of the execution, `act` carries out its steps.
  Does not create, evaluate or terminate the execution: its owner does. The
  evaluation here is empty, with `details["evaluated_by"]`.
  """

  def __init__(
    self, base_url: str, gym_id: str, execution_id: str, **options: Any
  ):
    """Args:

      base_url, gym_id: Address of the gym server and name of its gym.
      execution_id: Id of an execution on which no step was taken yet.
      **options: Further arguments of `GenvGym`.

    Raises:
      ValueError: a value that cannot be.
    """
    super().__init__(base_url, gym_id, **options)
    if not execution_id:
      raise ValueError("execution_id must name an execution, got ''")
    self._attached = execution_id

  async def start(self, task: base.Task) -> base.Observation:
    del task
    if self._steps:
      raise RuntimeError(
        f"execution {self._attached} has been played; create another one"
      )
    self.execution_id = self._attached
    self._seen = await self._read(await self._screenshot())
    return self._seen

  async def evaluate(self) -> base.Evaluation:
    return base.Evaluation(0.0, False, {"evaluated_by": "the caller"})

  async def close(self) -> None:
    """Ends the connections; the execution goes on. Idempotent."""
    self.execution_id = None
    await self._client.aclose()


def _size(data: object) -> int:
  """Characters of an observation's screenshot."""
  shot = data.get("screenshot") if isinstance(data, Mapping) else None
  shot = shot.get("data") if isinstance(shot, Mapping) else shot
  return len(shot) if isinstance(shot, str) else 0
