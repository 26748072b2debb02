"""Makes a task set of an AndroidWorld server's suite.

Families are the suite's task types. Of each type's instances the last is held
out and the others train. `gym.options.combinations` (with `suite_seed`) makes
every server build its suite anew, with that number of instances of each type.
"""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http as http_lib

from cua_gyms import machines as machines_lib
from cua_gyms.android_world import android_world_gym as android_world

_CALL_S = 120.0
_SUITE_S = 600.0


def server_tasks(
  families: Sequence[str] | None = None,
  *,
  machines: str | Sequence[str] = android_world.DEFAULT_URL,
  combinations: int = 0,
  suite_seed: int = 0,
) -> seeds.IndexedTasks:
  """Returns the tasks of AndroidWorld servers.

  Args:
    families: task types to offer, none or () for all.
    machines: addresses of servers, one or a list of them.
    combinations, suite_seed: see the module docstring.

  Raises:
    ValueError: an unknown type, or one with a single instance.
    AndroidWorldError: a server cannot be asked.
  """
  urls = machines_lib.addresses(
    machines or android_world.DEFAULT_URL, android_world.DEFAULT_URL
  )
  count, seed = combinations, suite_seed
  if (
    isinstance(count, bool)
    or not isinstance(count, int)
    or count < 0
    or (count == 1)
  ):
    raise ValueError(
      f"gym.options.combinations={count!r} must be 0 (the suite as it is) or"
      " at least 2: one instance is held out"
    )

  async def ask() -> dict[str, int]:
    http = http_lib.Http(android_world.AndroidWorldError)

    async def get(url: str, path: str, seconds: float, **params: Any) -> Any:
      return await http.ask("GET", url + path, seconds, params=params)

    try:
      if count:
        for url in urls:
          await get(
            url,
            "/suite/reinitialize",
            _SUITE_S,
            n_task_combinations=count,
            seed=seed,
          )
      listed = await get(urls[0], "/suite/task_list", _CALL_S, max_index=-1)
      types = listed.get("task_list")
      if not isinstance(types, list):
        raise android_world.AndroidWorldError(
          f"{urls[0]}/suite/task_list answered with no list 'task_list'"
        )
      names = [str(n) for n in types]
      for family in families or ():
        if family not in names:
          wrong = registry.unknown_name("task type", family, names)
          raise ValueError(f"{urls[0]}: {wrong}")
      lengths = {}
      for name in families or names:
        reply = await get(
          urls[0], "/suite/task_length", _CALL_S, task_type=name
        )
        length = reply.get("length")
        if isinstance(length, bool) or not isinstance(length, int):
          raise android_world.AndroidWorldError(
            f"{urls[0]}/suite/task_length of {name!r}: length={length!r} is"
            " no whole number"
          )
        lengths[name] = length
      return lengths
    finally:
      await http.aclose()

  lengths = concurrency.call(
    ask, seconds=_SUITE_S * len(urls) + _CALL_S, what=f"asking {urls[0]}"
  )
  short = [name for name, length in lengths.items() if length < 2]
  if short:
    raise ValueError(
      f"task type {short[0]!r} has {lengths[short[0]]} instances, none to"
      " hold out; set gym.options.combinations to 2 or more"
    )
  make = lambda name, i: base.Task(
    f"android_world/{name}/{i}",
    name,
    seed=i,
    params={"android_world": {"task_type": name, "task_idx": i}},
  )
  return seeds.IndexedTasks(
    {n: [make(n, i) for i in range(k - 1)] for n, k in lengths.items()},
    {n: [make(n, k - 1)] for n, k in lengths.items()},
  )
