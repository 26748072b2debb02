"""`IngestClient`: sends a program's items to the monitor.

The names are those of the ingest protocol's clients, so that a training script
written for one works here. The difference: nothing waits for the server. A
`post_…` puts its item into a spool and returns its client id at once, which
serves wherever an id does (`training_id`, `step_id`, …), before the server has
received it.

Promises: those of `sender`.
"""

from __future__ import annotations

import atexit
import collections
import copy
import dataclasses
import functools
import logging
import os
import pathlib
from typing import Any, Mapping
import uuid

from training_monitor.client import sender as sender_lib
from training_monitor.core import monitor_settings as settings_lib

_LOG = logging.getLogger(__name__)
SPOOL_VARIABLE = "TUNIX_MONITOR_SPOOL"
Reference = str | int
_PLURALS = {
    "task": "tasks", "validator": "validators", "baseline": "baselines",
    "eval": "evals", "step": "steps", "rollout": "rollouts",
    "environment": "environments", "turn": "turns", "action": "actions",
    "observation": "observations", "validation": "validations",
}  # fmt: skip
_PARENTS = {
  "training_id": "training",
  "baseline_id": "baseline",
  "eval_id": "eval",
  "step_id": "step",
  "turn_id": "turn",
  "env_id": "environment",
  "validator_id": "validator",
}
_LEAVES = frozenset({"action", "observation", "validation"})
"""Kinds that nothing refers to."""
_MOST_LOCAL = 200_000


class IngestClient:
  """A project's client. Thread-safe; close it, or leave that to the exit."""

  def __init__(
    self,
    base_url: str,
    token: str = "",
    timeout_seconds: float = 120,
    *,
    spool_dir: str | pathlib.Path | None = None,
    name: str = "",
    target: str = "",
    config: settings_lib.MonitorConfig = settings_lib.MonitorConfig(),
  ):
    """Args:

      base_url: Address of the server, http(s)://host:port.
      token: Token of the project; "" for a local server without tokens.
      timeout_seconds: Deadline of each request.
      spool_dir: keeps undelivered items; spools that ended processes left
        there for the same server are delivered, too. None:
        $TUNIX_MONITOR_SPOOL, else a folder of the user's cache.
      name: Name of this process's spool; "" makes one up.
      target: identifies the server in its spools; "" takes the URL.
      config: its limits: `max_pending`, `spool_mb` and `heartbeat_s`.

    Raises:
      ValueError: `base_url` is not a URL.
      OSError: the spool cannot be opened.
    """
    self.base_url = base_url.rstrip("/")
    self._local: collections.OrderedDict[tuple[str, Any], Reference] = (
      collections.OrderedDict()
    )
    self.sender = sender_lib.Sender(
      base_url,
      token,
      spool_dir or default_spool_dir(),
      dataclasses.replace(config, timeout_s=float(timeout_seconds)),
      name=name or uuid.uuid4().hex,
      target=target,
      on_reply=_log_ignored,
    )
    atexit.register(self.close)

  # --- items ----------------------------------------------------------------

  def post_training(
    self,
    payload: Mapping[str, Any] | None = None,
    client_id: Reference | None = None,
    **fields: Any,
  ) -> Reference | None:
    """Posts a training, or changes of it.

    Args:
      payload: fields of the training. `training_id` names one that is known.
      client_id: its own; its run name by default.
      **fields: more fields.

    Returns:
      Its client id; None when it was dropped.
    """
    item = copy.copy({**(payload or {}), **fields})
    training_id = item.pop("training_id", None)
    reference = client_id or item.get("client_id") or training_id
    if reference is None:
      name = str(item.get("run_name") or uuid.uuid4().hex)
      plain = name.encode("utf-8", "replace").decode().replace("\0", "")
      reference = f"training-{plain}"[:400]
    if isinstance(reference, int):
      item["id"] = reference
    else:
      item["client_id"] = reference
    self.sender.shipper.training = reference
    return reference if self.sender.put({"training": item}) else None

  def post_task(self, payload, client_id=None) -> Reference | None:
    return self._post("task", payload, client_id or payload.get("task_id"))

  def post_rollout(self, payload, client_id=None) -> Reference | None:
    return self._post(
      "rollout", payload, client_id or payload.get("rollout_id")
    )

  def _post(
    self,
    kind: str,
    payload: Mapping[str, Any],
    client_id: Reference | None = None,
  ) -> Reference | None:
    """Puts an item into the spool.

    Args:
      kind: Kind of the item.
      payload: its fields; a None leaves its column alone. Its values must not
        change afterwards.
      client_id: its own; None makes one up.

    Returns:
      Its client id; None when it was dropped.
    """
    item = dict(payload)
    client_id = client_id or item.get("client_id") or uuid.uuid4().hex
    item["client_id"] = client_id
    accepted = self.sender.put({_PLURALS[kind]: [item]})
    return client_id if accepted else None

  post_validator = functools.partialmethod(_post, "validator")
  post_environment = functools.partialmethod(_post, "environment")
  post_step = functools.partialmethod(_post, "step")
  post_baseline = functools.partialmethod(_post, "baseline")
  post_eval = functools.partialmethod(_post, "eval")
  post_turn = functools.partialmethod(_post, "turn")
  post_action = functools.partialmethod(_post, "action")
  post_observation = functools.partialmethod(_post, "observation")
  post_validation = functools.partialmethod(_post, "validation")

  # --- for recorders that number things themselves ---------------------------

  def record(
    self, kind: str, local_id: object, payload: Mapping[str, Any]
  ) -> Reference | None:
    """Posts an item that the caller numbers itself.

    Args:
      kind: "training", "task", …, "validation".
      local_id: the caller's id.
      payload: its fields, whose `<parent>_id` are such ids too.

    Returns:
      Its client id; None when it is dropped, as for an item whose parent was
      never posted (counted as `skipped`).
    """
    item = dict(payload)
    for field, parent in self._parents_of(kind, item):
      parent_id = self._local.get((parent, item[field]))
      if parent_id is None:
        self.sender.counters["skipped"] += 1
        return None
      self._local.move_to_end((parent, item[field]))
      item[field] = parent_id
    client_id = self._local.get((kind, local_id)) or item.pop("client_id", None)
    if kind == "training":
      reference = self.post_training(item, client_id)
    elif kind in ("task", "rollout"):
      reference = self._post(kind, item, client_id or item.get(f"{kind}_id"))
    else:
      reference = self._post(kind, item, client_id)
    if reference is not None and kind not in _LEAVES:
      self._local[kind, local_id] = reference
      self._local.move_to_end((kind, local_id))
      if len(self._local) > _MOST_LOCAL:
        self._local.popitem(last=False)
    return reference

  def _parents_of(self, kind: str, item: Mapping[str, Any]):
    for field, parent in _PARENTS.items():
      if item.get(field) is not None and parent != kind:
        yield field, parent
    for parent in ("rollout", "task"):
      field = f"{parent}_id"
      if kind != parent and item.get(field) is not None:
        yield field, parent

  record_training = functools.partialmethod(record, "training")
  record_task = functools.partialmethod(record, "task")
  record_environment = functools.partialmethod(record, "environment")
  record_step = functools.partialmethod(record, "step")
  record_baseline = functools.partialmethod(record, "baseline")
  record_eval = functools.partialmethod(record, "eval")
  record_rollout = functools.partialmethod(record, "rollout")
  record_turn = functools.partialmethod(record, "turn")
  record_action = functools.partialmethod(record, "action")
  record_observation = functools.partialmethod(record, "observation")
  record_validation = functools.partialmethod(record, "validation")

  # --- the other end --------------------------------------------------------

  def flush(self, timeout_s: float = 10.0) -> bool:
    """Waits until every item is durable; False when time ran out."""
    return self.sender.flush(timeout_s)

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until every item is at the server; False if time ran out."""
    return self.sender.drain(timeout_s)

  def close(self, timeout_s: float = 10.0) -> bool:
    """Delivers for `timeout_s`; the spool keeps the rest."""
    atexit.unregister(self.close)
    return self.sender.close(timeout_s)

  def __enter__(self) -> IngestClient:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.close()


def _log_ignored(reply: Mapping[str, Any]) -> None:
  for ignored in reply.get("ignored", ()):
    lost = ignored.get("kept") == "nothing"
    level = logging.WARNING if lost else logging.INFO
    _LOG.log(level, "the monitor ignored a change: %s", ignored)


def default_spool_dir() -> pathlib.Path:
  """Returns the folder of the spools when none is given."""
  named = os.environ.get(SPOOL_VARIABLE)
  if named:
    return pathlib.Path(named).expanduser()
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(cache) / "tunix-multi-turn" / "monitor_spool"
