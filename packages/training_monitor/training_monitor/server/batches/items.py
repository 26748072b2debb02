"""Reads a batch of the ingest protocol, checked and in the database's words.

The body is `training` (an object) and arrays `tasks, validators, baselines,
evals, steps, groups, rollouts, environments, turns, actions, observations,
validations`; or `parts`, an array of such bodies, which is one body with all
that they have. An item names itself by `client_id` and its parents by
`<parent>_id`: a number is the server's id, text is a client id (or a rollout's
or task's own name). Fields that other recorders use are mapped; those that the
database has no column for are kept as raw values, as are those of no known
name, which the answer names.

Promises: reads a body without the database. A value that its field cannot have
is left out and kept as a raw value; an item whose id or reference is wrong is
left out whole, and so is an array of no known name. The answer names each. Only
a body that is no batch, or of which nothing is left, raises. The JSON of
Python's own writer is read, too: NaN and infinities are "unknown", half a
surrogate pair is U+FFFD.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, Callable, Mapping

import orjson

from training_monitor.core import registry
from training_monitor.core import run_tags as tags_lib
from training_monitor.schema import later_views
from training_monitor.schema import progress
from training_monitor.schema import tables
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server.batches import fields

MAX_ITEMS = 20_000
_MAX_FAULTS = 20
MAX_ID = 500
_MAX_NAME = 200
_REST = ("batch", "…")


@dataclasses.dataclass(frozen=True)
class ItemKind:
  """A kind of item, one array of the body.

  Attributes:
    name: Name of the kind and its table, "obs" for observations.
    plural: Name of the array; "training" for the one object.
    parents: column -> kind that it refers to.
    required: columns that a new entity needs and nothing can stand in for.
    raw_fields: Names of fields whose values are stored as raw values.
    readers: field -> (column, its reader), by the column's other names too.
  """

  name: str
  plural: str
  parents: Mapping[str, str]
  required: tuple[str, ...]
  raw_fields: frozenset[str]
  readers: Mapping[str, tuple[str, Callable[[Any], Any]]]


_TIMING = ("avg_turn_time", "estimated_total_time", "estimated_remaining_time")


def _kind(
  name: str,
  plural: str,
  parents: Mapping[str, str] | None = None,
  required: tuple[str, ...] = (),
  aliases: Mapping[str, str] | None = None,
  raw_fields: tuple[str, ...] = (),
) -> ItemKind:
  parents = parents or {}
  table = tables.metadata.tables[name]
  readers = {
    str(c.name): (str(c.name), fields.reader(name, c))
    for c in table.c
    if c.name != "id" and c.name not in parents
  }
  readers |= {alias: readers[c] for alias, c in (aliases or {}).items()}
  return ItemKind(
    name, plural, parents, required, frozenset(raw_fields), readers
  )


KINDS: tuple[ItemKind, ...] = (
    _kind("training", "training", raw_fields=(
        *_TIMING, "project_id", "traceback", "changed_settings",
    )),
    _kind(
        "task", "tasks", required=("task_id",),
        raw_fields=("instruction", "env_config", "evaluation", "seed_id"),
    ),
    _kind(
        "validator", "validators", {"task_id": "task"}, ("validator_type",)
    ),
    _kind(
        "baseline", "baselines", {"training_id": "training"},
        raw_fields=_TIMING,
    ),
    _kind(
        "eval", "evals", {"training_id": "training"}, ("step",),
        raw_fields=_TIMING,
    ),
    _kind(
        "step", "steps", {"training_id": "training"}, ("step",),
        raw_fields=_TIMING,
    ),
    _kind(
        "monitor_group", "groups",
        {
            "step_id": "step", "eval_id": "eval", "baseline_id": "baseline",
            "task_id": "task",
        },
        ("group_num",), {"group": "group_num"},
        later_views.GROUP,
    ),
    _kind(
        "rollout", "rollouts",
        {
            "step_id": "step", "eval_id": "eval", "baseline_id": "baseline",
            "task_id": "task",
        },
        ("rollout_id",),
        {"group_num": "group"},
        ("group_id", "trajectory_data_json", *_TIMING),
    ),
    _kind(
        "environment", "environments", {"rollout_id": "rollout"},
        ("env_type",), raw_fields=("name",),
    ),
    _kind(
        "turn", "turns", {"rollout_id": "rollout"}, ("turn",),
        raw_fields=(
            "model_response", "screen_before", "screen_after", "thinking",
            "text", "action_json", "model_specific_input_json", *_TIMING,
        ),
    ),
    _kind(
        "action", "actions", {"turn_id": "turn"}, (),
        {
            "action_name": "tool_name", "name": "tool_name",
            "action_args": "tool_args", "args": "tool_args",
        },
        ("action_call_id", "call_id", "action_json", "json"),
    ),
    _kind(
        "obs", "observations", {"turn_id": "turn"}, (),
        {"model_input": "model_input_json"}, ("name",),
    ),
    _kind(
        "validation", "validations",
        {"rollout_id": "rollout", "validator_id": "validator"},
        ("success",), raw_fields=("screenshot_uri",),
    ),
)  # fmt: skip
"""In an order in which parents come first."""

BY_NAME = {kind.name: kind for kind in KINDS}
_PART = frozenset({k.plural for k in KINDS} | {"training_id", "project_id"})
_BODY = _PART | {"delivery", "parts"}
_ONCE = ("client_id", "id", "training_id", "status")
"""Fields of a training that a body has at most once."""


class Item:
  """One entity, or a change of it.

  Attributes:
    client_id: the client's own id.
    values: column -> value, in the database's form; parents not among them.
    parents: column -> server id (int) or client id (str).
    raw: field -> the original value, where it differs.
    id: the server's id, where the client gave it.
    environment: Environment of a rollout, sent before the rollout.
    tags: Tags to add to a training.
    path: Place of the item in the body, for errors.
  """

  __slots__ = (
      "client_id", "values", "parents", "raw", "id", "environment", "tags",
      "path",
  )  # fmt: skip

  def __init__(self, path: str):
    self.path = path
    self.client_id: str | None = None
    self.values: dict[str, Any] = {}
    self.parents: dict[str, int | str] = {}
    self.raw: dict[str, str] = {}
    self.id: int | None = None
    self.environment: int | str | None = None
    self.tags: tuple[str, ...] = ()

  def copy(self) -> Item:
    """Returns a copy whose values and raw values can be changed."""
    other = Item(self.path)
    other.client_id = self.client_id
    other.values = self.values.copy()
    other.parents = self.parents
    other.raw = self.raw.copy()
    other.id = self.id
    other.environment = self.environment
    other.tags = self.tags
    return other


@dataclasses.dataclass(frozen=True)
class SpoolRange:
  """The entries of a client's spool that a batch has.

  Attributes:
    spool: the spool's own name.
    first, last: its entries, both included.
    health: counters of the client, JSON text.
  """

  spool: str
  first: int
  last: int
  health: str | None


@dataclasses.dataclass(frozen=True)
class IngestBatch:
  """The items of a request body.

  Attributes:
    items: kind -> its items, in the body's order.
    training: Training of items that name none: an id; "" for the batch's own.
    delivery: Range of a spool, or None.
    size: bytes of the body.
    ignored: Fields of no known name and values that were left out, each once
      a kind of item, as faults.
    refused: Items that were left out, as faults.
  """

  items: Mapping[str, list[Item]]
  training: int | str | None
  delivery: SpoolRange | None
  size: int
  ignored: list[dict[str, Any]]
  refused: list[dict[str, Any]]


class _WrongItem(Exception):
  """An item that cannot be told from others; arguments of its fault."""


class _Faults:
  """Faults of a body, so far.

  Attributes:
    found: Faults for which the body is refused.
    ignored: (kind, field) -> its first fault.
    refused: Items that are left out.
  """

  def __init__(self):
    self.found: list[dict[str, Any]] = []
    self.ignored: dict[tuple[str, str], dict[str, Any]] = {}
    self.refused: list[dict[str, Any]] = []

  def add(self, field: str, value: object, message: str) -> None:
    self.found.append(errors.fault(field, value, message))
    if len(self.found) >= _MAX_FAULTS:
      raise errors.invalid(self.found)

  def ignore(
    self,
    kind: str,
    path: str,
    value: object,
    message: Callable[[], str],
    stored: str,
  ) -> None:
    """Records a value that is not stored as sent, once a kind and field.

    Of very many fields, `_REST` counts those that have no entry; one whose
    value is lost comes before one whose value is a raw value.
    """
    key = (kind, path.rpartition(".")[2])
    if key in self.ignored:
      self.ignored[key]["times"] = self.ignored[key].get("times", 1) + 1
      return
    if len(self.ignored) >= _MAX_FAULTS:
      last = stored == "nothing" and next(
        (
          k
          for k, one in self.ignored.items()
          if k != _REST and one["kept"] != "nothing"
        ),
        None,
      )
      if not last:
        self._count(stored, 1)
        return
      one = self.ignored.pop(last)
      self._count(one["kept"], one.get("times", 1))
    self.ignored[key] = {
      "kind": kind,
      **errors.fault(path, value, message()),
      "kept": stored,
    }

  def _count(self, stored: str, times: int) -> None:
    entry = self.ignored.setdefault(
      _REST,
      {
        "kind": "batch",
        **errors.fault("…", "…", "is one of more fields than an answer names"),
        "kept": stored,
        "times": 0,
      },
    )
    entry["times"] += times
    if stored == "nothing":
      entry["kept"] = stored

  def refuse(self, kind: str, path: str, value: object, message: str) -> None:
    errors.add_refused(
      self.refused, kind, None, errors.fault(path, value, message)
    )


def read(body: bytes) -> IngestBatch:
  """Returns the batch of a request's body.

  Raises:
    ApiError: 400, naming every wrong field.
  """
  data = http_io.parse(body)
  if not isinstance(data, dict):
    raise errors.ApiError(
      400, "the body must be an object with training, tasks, rollouts, …"
    )
  faults = _Faults()
  for key in data:
    if key not in _BODY:
      unknown = functools.partial(_unknown, key, _BODY)
      faults.ignore("batch", key, "…", unknown, "nothing")
  if data.get("parts") is not None:
    data = _joined(data, faults)
  return _batch(data, faults, len(body))


def _joined(data: dict[str, Any], faults: _Faults) -> dict[str, Any]:
  """Joins the parts of a body into one body without parts."""
  parts = data["parts"]
  for key in data.keys() & _PART:
    faults.add(key, "…", "stands beside parts; make it one of them")
  if not isinstance(parts, list):
    faults.add("parts", parts, "give an array of objects")
    parts = []
  joined: dict[str, Any] = {"delivery": data.get("delivery")}
  for index, part in enumerate(parts):
    if not isinstance(part, dict):
      faults.add(f"parts[{index}]", part, "give an object")
      continue
    for key, value in part.items():
      _join(joined, key, value, f"parts[{index}].{key}", faults)
  return joined


def _join(
  joined: dict[str, Any], key: str, value: object, path: str, faults: _Faults
) -> None:
  before = joined.get(key)
  if key not in _PART:
    unknown = functools.partial(_unknown, key, _PART)
    faults.ignore("batch", path, "…", unknown, "nothing")
  elif value is None:
    pass
  elif before is None:
    # Not the part's own: more may come into it.
    joined[key] = value.copy() if isinstance(value, (dict, list)) else value
  elif isinstance(value, list) and isinstance(before, list):
    before.extend(value)
  elif isinstance(value, dict) and isinstance(before, dict):
    for name in _ONCE:
      if name in before and name in value and before[name] != value[name]:
        faults.add(
          f"{path}.{name}",
          value[name],
          f"a part before it has {before[name]!r}; send it in a batch of"
          " its own",
        )
    before.update(value)
  elif before != value:
    faults.add(
      path,
      value,
      "is not that of a part before it; send it in a batch of its own",
    )


def _batch(data: dict[str, Any], faults: _Faults, size: int) -> IngestBatch:
  items: dict[str, list[Item]] = {}
  count = 0
  for kind in KINDS:
    entries = data.get(kind.plural)
    if entries is None:
      continue
    if kind.name == "training":
      entries = [entries]
    if not isinstance(entries, list):
      faults.refuse(kind.name, kind.plural, entries, "give an array of objects")
      continue
    count += len(entries)
    if count > MAX_ITEMS:
      raise errors.ApiError(
        413, f"the batch has more than {MAX_ITEMS} items; send smaller ones"
      )
    if good := _read_all(kind, entries, faults):
      items[kind.name] = good
  training: int | str | None = "" if "training" in items else None
  if data.get("training_id") is not None:
    try:
      training = _reference("training_id", data["training_id"])
    except _WrongItem as error:
      faults.add(*error.args)
  delivery = _delivery(data.get("delivery"), faults)
  ignored = list(faults.ignored.values())
  if faults.found:
    raise errors.invalid(faults.found)
  if faults.refused and delivery is not None:
    raise errors.invalid(faults.refused)
  if not items and (ignored or faults.refused):
    raise errors.invalid([*ignored, *faults.refused])
  return IngestBatch(items, training, delivery, size, ignored, faults.refused)


def _read_all(
  kind: ItemKind, entries: list[Any], faults: _Faults
) -> list[Item]:
  result = []
  single = kind.name == "training"
  for index, data in enumerate(entries):
    path = kind.plural if single else f"{kind.plural}[{index}]"
    try:
      if not isinstance(data, dict):
        raise _WrongItem(path, data, "give an object")
      item = _read(kind, data, path, faults)
    except _WrongItem as error:
      faults.refuse(kind.name, *error.args)
    else:
      if item is not None:
        result.append((data, item))
  if kind.name in ("action", "obs", "validation"):
    _name_the_nameless(result)
  return [item for _, item in result]


def _read(
  kind: ItemKind, data: Mapping[str, Any], path: str, faults: _Faults
) -> Item | None:
  item = Item(path)
  readers, values = kind.readers, item.values
  wrong: list[tuple[str, str, Any, str]] = []
  unknown: list[tuple[str, Any]] = []
  for field, value in data.items():
    if value is None:
      continue
    entry = readers.get(field)
    if entry is not None:
      name, reader = entry
      try:
        value = reader(value)
      except fields.WrongValue as error:
        wrong.append((field, name, value, str(error)))
        continue
      if value.__class__ is fields.Normalised:
        item.raw[name] = value.raw
        value = value.value
        if value is None:
          continue
      values[name] = value
    elif field == "client_id":
      if not _is_name(value):
        raise _WrongItem(
          f"{path}.{field}", value, f"give text of 1 to {MAX_ID} characters"
        )
      item.client_id = value
    elif field in kind.parents:
      if not _is_name(value):
        value = _reference(f"{path}.{field}", value)
      item.parents[field] = value
    elif (kind.name, field) == ("training", "training_id"):
      own = _reference(f"{path}.{field}", value)
      if isinstance(own, str):
        item.client_id = own
      else:
        item.id = own
    elif (kind.name, field) == ("training", "tags"):
      try:
        item.tags = tags_lib.clean_all(value)
      except ValueError as error:
        wrong.append((field, field, value, str(error)))
    elif field == "id":
      item.id = _own_id(f"{path}.{field}", value)
    elif (kind.name, field) == ("rollout", "env_id"):
      item.environment = _reference(f"{path}.{field}", value)
    elif field in kind.raw_fields:
      try:
        item.raw[field] = fields.raw_text(value)
      except fields.WrongValue as error:
        wrong.append((field, field, value, str(error)))
    else:
      unknown.append((field, value))
  if kind.name in _CHECKED:
    wrong += _check(kind, item, data)
  named = item.id is not None or item.client_id is not None
  good = not wrong or named or bool(values) or bool(item.parents)
  if good:
    for field, value in unknown:
      _keep_unknown(kind, item, field, value, faults)
  for field, name, value, why in wrong:
    stored = "nothing"
    if good:
      try:
        item.raw[name] = fields.raw_text(value)
        stored = "a raw value"
      except fields.WrongValue:
        pass  # Too long or too deep, which `why` says.
    message = functools.partial(str, why)
    faults.ignore(kind.name, f"{path}.{field}", value, message, stored)
  return item if good else None


def _keep_unknown(
  kind: ItemKind, item: Item, field: str, value: object, faults: _Faults
) -> None:
  """Keeps a field of no known name as a raw value, for the answer to name."""
  stored, more = "nothing", ""
  named = 0 < len(field) <= _MAX_NAME and "\0" not in field
  if named:
    try:
      item.raw[field] = fields.raw_text(value)
      stored = "a raw value"
    except fields.WrongValue as error:
      more = f"; {error}"

  def message() -> str:
    if not named:
      return f"give a name of 1 to {_MAX_NAME} characters"
    names = [*kind.readers, *kind.parents, *kind.raw_fields, "client_id"]
    names += ["tags"] if kind.name == "training" else []
    return _unknown(field, names) + more

  faults.ignore(kind.name, f"{item.path}.{field}", value, message, stored)


_CHECKED = frozenset({"rollout", "task", "action", "step"})


def _check(
  kind: ItemKind, item: Item, data: Mapping[str, Any]
) -> list[tuple[str, str, Any, str]]:
  """Checks across the fields of an item, and takes out those that are wrong.

  Returns:
    Their (field, column, value, fault).
  """
  values, name = item.values, kind.name
  if name == "rollout":
    item.client_id = item.client_id or values.get("rollout_id")
    if item.client_id:
      values.setdefault("rollout_id", item.client_id)
    values.pop("is_eval", None)  # Derived.
  elif name == "task":
    item.client_id = item.client_id or values.get("task_id")
    if item.client_id:
      values.setdefault("task_id", item.client_id)
  elif name == "action":
    return _check_tokens(item, data)
  elif name == "step":
    wrong = []
    for field, keys in (
      ("rollout_progress", progress.ROLLOUT_PROGRESS_KEYS),
      ("training_progress", progress.TRAINING_PROGRESS_KEYS),
    ):
      if field in values and not _are_counts(values[field], keys):
        why = f"give counts: {{{', '.join(keys)}}}"
        wrong.append((field, field, values.pop(field), why))
    return wrong
  return []


def _check_tokens(
  item: Item, data: Mapping[str, Any]
) -> list[tuple[str, str, Any, str]]:
  sizes = {}
  for field in {"tokens", "logprobs"} & item.values.keys():
    value = data[field]
    if isinstance(value, str):
      value = orjson.loads(item.values[field])
    sizes[field] = len(value)
  if not sizes:
    return []
  count = item.values.setdefault("num_tokens", max(sizes.values()))
  wrong = []
  for field, size in sorted(sizes.items()):
    if size != count:
      del item.values[field]
      why = f"has {size} entries, and must have num_tokens, {count}, as many"
      wrong.append((field, field, data[field], why))
  return wrong


def _are_counts(value: str, keys: tuple[str, ...]) -> bool:
  counts = orjson.loads(value)
  return isinstance(counts, dict) and all(
    k in keys and (v is None or (type(v) is int and v >= 0))
    for k, v in counts.items()
  )


def _name_the_nameless(items: list[tuple[Any, Item]]) -> None:
  """Names items by their content, so that a repeated batch counts once.

  Two equal ones of a batch are two.

  Args:
    items: (what the client sent, its item).
  """
  copies: dict[str, int] = {}
  for data, item in items:
    if item.client_id is not None:
      continue
    digest = hashlib.sha256(
      orjson.dumps(data, option=orjson.OPT_SORT_KEYS)
    ).hexdigest()
    copies[digest] = number = copies.get(digest, -1) + 1
    item.client_id = f"content:{digest}:{number}"


def _is_name(value: object) -> bool:
  """Returns whether a value can be a client id."""
  return (
    isinstance(value, str) and 0 < len(value) <= MAX_ID and "\0" not in value
  )


def _reference(path: str, value: Any) -> int | str:
  if type(value) is int and 0 < value < 1 << 63:
    return value
  if _is_name(value):
    return value
  raise _WrongItem(
    path, value, "give the server's id (a number) or a client id (text)"
  )


def _own_id(path: str, value: object) -> int:
  if type(value) is int and 0 < value < 1 << 63:
    return value
  raise _WrongItem(
    path, value, "give the server's id (a number), or use client_id"
  )


def _delivery(value: object, faults: _Faults) -> SpoolRange | None:
  if value is None:
    return None
  if isinstance(value, dict):
    spool, first, last = (value.get(k) for k in ("spool", "first", "last"))
    if (
      isinstance(spool, str)
      and 0 < len(spool) <= 100
      and "\0" not in spool
      and type(first) is int
      and type(last) is int
      and 0 < first <= last < 1 << 63
    ):
      health = value.get("health")
      try:
        text = None if health is None else fields.json_text(health)
      except fields.WrongValue as error:
        faults.add("delivery.health", health, str(error))
        return None
      return SpoolRange(spool, first, last, text)
  faults.add(
    "delivery", value, "give {spool: text, first: number, last: number}"
  )
  return None


def _unknown(field: str, names: Any) -> str:
  hint = registry.did_you_mean(field[:_MAX_NAME], names)
  return f"there is no such field{hint}"
