"""Reads the tasks of an OpenEnv server.

With a task API, splits of type "train" are for training and the others are
held out; if there are no others, every fifth task is. A server without that
API is given seeds: even ones to train, odd ones to evaluate.
"""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Mapping, Sequence
import urllib.parse

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http as http_lib

from cua_gyms.genv import genv_gym
from cua_gyms.openenv import openenv_gym as openenv

_MOST = 4096  # Tasks that are read of a split.
_SECONDS = 60.0


class SeededTasks(seeds.SplitTasks):
  """Endless tasks of an environment that knows seeds only."""

  def __init__(self, family: str):
    self._families = (family,)

  def _task(self, family: str, split: str, index: int, seed: int) -> base.Task:
    text = f"{family}/{split}/{index}/{seed}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 2
    number = 2 * number + (split == "eval")
    return base.Task(
      f"{family}/{split}/{number}",
      family,
      seed=number,
      params={"openenv": {"seed": number}},
    )


def server_tasks(
  families: Sequence[str] | None = None,
  *,
  base_url: str = openenv.DEFAULT_BASE_URL,
  token_file: str = "",
) -> base.TaskSet:
  """Asks an OpenEnv server for its tasks.

  Args:
    families: task families the server must have; None or () checks nothing.
      The set returned holds all of the server's families.
    base_url, token_file: see `OpenEnvGym`.

  Raises:
    ValueError: a bad address or token file, or a family the server lacks.
    OpenEnvError: the server does not answer.
  """
  url = base_url or openenv.DEFAULT_BASE_URL
  openenv.Session(url)  # Refuses a bad address.
  token = genv_gym.read_token(token_file)
  # A server's address may be given as that of its sessions.
  url = "http" + url[2:] if url.startswith("ws") else url
  task_set = concurrency.call(
    lambda: _ask(url.rstrip("/"), token),
    seconds=_SECONDS + 5,
    what=f"asking {url}",
  )
  for family in families or ():
    if family not in task_set.families():
      wrong = registry.unknown_name("task family", family, task_set.families())
      raise ValueError(f"{url}: {wrong}")
  return task_set


async def _ask(url: str, token: str) -> Any:
  headers = {"authorization": f"Bearer {token}"} if token else {}
  http = http_lib.Http(headers=headers)

  async def call(method: str, path: str, body: object = None) -> Any:
    try:
      return await http.json(method, url + path, _SECONDS, body=body)
    except http_lib.CallError as error:
      if error.answer is None:
        raise openenv.OpenEnvUnavailableError(
          f"{error}; is that an OpenEnv server?"
        ) from None
      if error.answer.ok:
        raise openenv.OpenEnvError(f"{url}{path}: no JSON") from None
      if error.status in (404, 405, 501):
        return None  # It has no task API, or none for this environment.
      raise openenv.OpenEnvRequestError(str(error)) from None

  try:
    return await _listed(url, call)
  finally:
    await http.aclose()


async def _listed(url: str, call: Callable[..., Any]) -> Any:
  """Returns the tasks that the answers of `call(method, path, body)` name."""
  about = await call("GET", "/metadata")
  name = about.get("name") if isinstance(about, dict) else None
  if not isinstance(name, str) or not name:
    raise openenv.OpenEnvError(f"{url}/metadata names no environment")
  names = await call("GET", "/list_environments")
  address = names[0] if isinstance(names, list) and names else name
  prefix = f"/{urllib.parse.quote(str(address), safe='')}"
  splits = await call("GET", f"{prefix}/splits")
  if not isinstance(splits, list) or not splits:
    return SeededTasks(name)
  train: dict[str, list[base.Task]] = {}
  held_out: dict[str, list[base.Task]] = {}
  for split in splits:
    called = split.get("name") if isinstance(split, dict) else None
    if not isinstance(called, str):
      raise openenv.OpenEnvError(f"{url}: {split!r} is not a split with a name")
    rows = await call(
      "POST",
      f"{prefix}/task_range",
      {"split": called, "start": 0, "stop": _MOST},
    )
    into = train if split.get("type") == "train" else held_out
    listed = rows.get("tasks") if isinstance(rows, dict) else None
    for i, row in enumerate(listed if isinstance(listed, list) else ()):
      task = _task(name, called, i, row)
      into.setdefault(task.family, []).append(task)
  both = train or held_out
  if not both:
    return SeededTasks(name)
  if not train or not held_out:
    train = {
      f: [t for i, t in enumerate(ts) if i % 5 < 4] for f, ts in both.items()
    }
    held_out = {f: ts[4::5] for f, ts in both.items() if len(ts) > 4}
  return seeds.IndexedTasks(train, held_out)


def _task(name: str, split: str, index: int, row: object) -> base.Task:
  row = row if isinstance(row, Mapping) else {}
  family = row.get("family")
  turns = row.get("max_turns")
  return base.Task(
    f"{name}/{split}/{row.get('id', index)}",
    family if isinstance(family, str) and family else name,
    max_turns=turns if isinstance(turns, int) and turns > 0 else None,
    params={"openenv": {"split": split, "index": index}},
  )
