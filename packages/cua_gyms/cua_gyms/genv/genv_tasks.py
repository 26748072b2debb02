"""Reads the tasks of a gym server: its list, or its gym's own instances.

`GenvTasks` names instances without end, as the gym behind the server makes
them; the server's list has an end. Both ask the server when they are made.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence
import urllib.parse

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.environments.task_sources import listed
from tunix.rl.multi_turn.environments.task_sources import source
from tunix.rl.multi_turn.net import concurrency

from cua_gyms.genv import genv_client
from cua_gyms.genv import genv_gym

DEFAULT_GYM_ID = "desktop"
_ASK_S = 130.0
_LIST_S = 120.0


class GenvTasks(seeds.SplitTasks):
  """Instances of a gym server's families, beyond its list.

  They are named, not fetched: `<family>@<split>:<index>:<seed>`.
  """

  def __init__(
    self,
    gym_id: str,
    max_turns: Mapping[str, int | None],
    families: Sequence[str] = (),
  ):
    """Args:

      gym_id: Name of the server's gym.
      max_turns: Turn limit of the tasks of each family of the gym.
      families: Families to offer, () for all.

    Raises:
      ValueError: a family that it has not.
    """
    for family in families:
      if family not in max_turns:
        wrong = registry.unknown_name("task family", family, max_turns)
        raise ValueError(f"gym {gym_id!r} of the server: {wrong}")
    self._gym_id = gym_id
    self._max_turns = dict(max_turns)
    self._families = tuple(families) or tuple(max_turns)

  def _task(self, family: str, split: str, index: int, seed: int) -> base.Task:
    name = f"{family}@{split}:{index}:{seed}"
    return base.Task(
      task_id=f"{self._gym_id}/{name}",
      family=family,
      max_turns=self._max_turns.get(family),
      params={"genv": {"identifier": name, "gym_id": self._gym_id}},
    )


def server_tasks(
  families: Sequence[str] | None = None,
  *,
  base_url: str = genv_client.DEFAULT_BASE_URL,
  gym_id: str = DEFAULT_GYM_ID,
  token_file: str = "",
  timeouts: Mapping[str, float] | None = None,
) -> base.TaskSet:
  """Returns the tasks of a gym server.

  Instances of its gym if the server names them; else the tasks of its list,
  split in two.

  Args:
    families: Families to offer, None or () for all.
    base_url, gym_id, token_file, timeouts: see `GenvGym`.

  Raises:
    ValueError: an option that cannot be, or an unknown family.
    GenvError: the server cannot be asked.
  """
  server = _settings(base_url, gym_id, token_file, timeouts)

  async def ask() -> dict[str, Any] | None:
    client = genv_gym.make_client(server)
    try:
      for gym in await client.gyms():
        if gym.get("gym_id") == client.gym_id:
          return gym
      return None
    finally:
      await client.aclose()

  try:
    gym_row = concurrency.call(ask, seconds=_ASK_S, what=f"asking {base_url}")
  except genv_client.GenvUnavailableError as error:
    raise _not_there(server, error) from error
  if (
    gym_row is not None
    and isinstance(gym_row.get("max_turns"), dict)
    and (gym_row.get("instances"))
  ):
    return GenvTasks(gym_id, gym_row["max_turns"], families or ())
  tasks = list_tasks(**server)
  config = source.TaskSourceConfig(source="gym")
  train, held_out = (source.select(tasks, config, s) for s in source.SPLITS)
  return listed.ListedTasks(train, held_out, families or ())


def list_tasks(
  *,
  base_url: str = genv_client.DEFAULT_BASE_URL,
  gym_id: str = DEFAULT_GYM_ID,
  token_file: str = "",
  timeouts: Mapping[str, float] | None = None,
) -> list[cua_task.CUATask]:
  """Returns every task of a server's list, in its order. Blocks.

  Args:
    base_url, gym_id, token_file, timeouts: see `GenvGym`.

  Raises:
    ValueError: an option that cannot be.
    GenvError: the server cannot be asked.
    TimeoutError: the list did not come within timeouts.tasks.
  """
  timeouts = {"tasks": _LIST_S, **(timeouts or {})}
  options_lib.check_seconds(timeouts, "timeouts.")
  server = _settings(base_url, gym_id, token_file, timeouts)
  what = f"the task list of {base_url}"
  seconds = timeouts["tasks"]

  async def ask() -> list[cua_task.CUATask]:
    client = genv_gym.make_client(server)
    try:
      return await concurrency.with_deadline(
        # Later than that of a single call, whose error has more detail.
        client.list_tasks(full=True),
        seconds + 2.0,
        what,
      )
    finally:
      await client.aclose()

  try:
    return concurrency.call(ask, seconds=seconds + 10.0, what=what)
  except genv_client.GenvUnavailableError as error:
    raise _not_there(server, error) from error


def _not_there(
  server: Mapping[str, Any], error: genv_client.GenvError
) -> genv_client.GenvError:
  """Makes the error of a silent server, with the way to start one."""
  parts = urllib.parse.urlsplit(server["base_url"])
  start = shell_hints.command(
    "environments.gym_server",
    server["gym_id"],
    "--port",
    str(parts.port or 5010),
  )
  return genv_client.GenvUnavailableError(
    f"no gym server answers at {server['base_url']} ({error}); start one in"
    f" another terminal with: {start} , or set gym.options.base_url"
  )


def _settings(
  base_url: str,
  gym_id: str,
  token_file: str,
  timeouts: Mapping[str, float] | None,
) -> dict[str, Any]:
  return {
    "base_url": base_url or genv_client.DEFAULT_BASE_URL,
    "gym_id": gym_id or DEFAULT_GYM_ID,
    "token_file": token_file,
    "timeouts": timeouts,
  }
