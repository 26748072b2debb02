"""Calls a rollout buffer service: for writers of episodes, and for readers.

Promises: every call ends within its deadline; an answer's form is checked
before it is returned, and its items one by one in `sift`, so that one that
cannot be used costs its own group only; failures are `ClientError` (the network
or the service), `ValueError` (the data) or `TimeoutError`.

A push is one group all the same when it is repeated (its uids), and a read with
a lease returns the same groups. A read without one is made once, and an answer
whose end is lost is lost data.

Does not: repeat a failed call unless it is given a policy, or check items that
it writes (the service does).
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Iterable, Mapping, NamedTuple, Self, Sequence
import uuid

from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.queue import transport

try:
  from aiohttp import ClientError as _NetworkError
except ImportError:  # Callers that catch aiohttp's have it installed.
  _NetworkError = RuntimeError  # type: ignore[assignment, misc]

START_S = 10.0
"""Deadline of `/start_rollout`."""
POLL_S = 3.0
"""Pause between two reads while no group is ready."""
TOKEN_VARIABLE = "TUNIX_BUFFER_TOKEN"
"""Environment variable of the service's bearer token."""
_SECRET = ("token", "key", "secret", "password")
"""Parts of names whose values stay here."""
_SENT = ("image_token_id",)
"""Names with such a part that hold no secret."""
CALL_S = 60.0
WRITE_S = 600.0
"""Deadline of a write, which waits while the buffer is full."""
_READ_S = 100.0
_MOST_UIDS = 10_000  # Of one call.
_LIMIT = 2 << 30


class ClientError(http.CallError, _NetworkError):  # type: ignore[misc, valid-type]
  """The service did not answer, or refused; aiohttp's error if installed."""


class Read(NamedTuple):
  """An answer of `/get_rollout_data`.

  Attributes:
    items: Items of whole groups, not checked; see `sift`.
    meta_info: the service's statistics.
    lease: Id for the acknowledgement; "" where the read is final.
    groups: Number of each item's group; () from a service that does not tell
      it: an instance's items are one group then.
  """

  items: list[Any]
  meta_info: dict[str, Any]
  lease: str = ""
  groups: Sequence[int] = ()


class ReadGroup(NamedTuple):
  """Items of a read that are one group.

  Attributes:
    instance_id: "" where no item tells it.
    uids: Ids of the members.
    places: Positions of the items in the read.
    records: the items; [] where one of them cannot be used.
    problem: why it cannot, with the number of the item; "" else.
  """

  instance_id: str
  uids: frozenset[str]
  places: list[int]
  records: list[records.Record]
  problem: str = ""


class RefusedItemsError(ValueError):
  """Groups of a read that was delivered cannot be used.

  Attributes:
    items: Items of the other groups.
    meta_info: Statistics of the read.
  """

  def __init__(
    self, problem: str, items: list[dict[str, Any]], meta_info: dict[str, Any]
  ):
    super().__init__(problem)
    self.items, self.meta_info = items, meta_info


class BufferClient:
  """Connections to one service; belongs to one event loop.

  A `transport.GroupTransport`: the service acknowledges what it has on its
  disk, and lends each group to one reader.
  """

  def __init__(
    self,
    api_base_url: str,
    *,
    token: str = "",
    buffer: str = "",
    connections: int = 100,
    retry: http.RetryPolicy | None = None,
  ):
    """Args:

      api_base_url: e.g. http://127.0.0.1:8889.
      token: bearer token; by default that of $TUNIX_BUFFER_TOKEN.
      buffer: name of one of the service's buffers; "" is its default.
      connections: open at a time.
      retry: Repeats the calls that may be repeated; None makes them once.

    Raises:
      ValueError: no http(s) address.
    """
    self._url = http.address(
      api_base_url, "the buffer's URL", "http://127.0.0.1:8889"
    )
    self._buffer = {"buffer": buffer} if buffer else {}
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    self._http = http.Http(
      ClientError,
      headers={"authorization": f"Bearer {token}"} if token else {},
      connections=connections,
    )
    self._retry = retry

  async def __aenter__(self) -> Self:
    return self

  async def __aexit__(self, *exc_info: Any) -> None:
    await self.aclose()

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    await self._http.aclose()

  # --- rollouts ---------------------------------------------------------------

  async def start(
    self, payload: Mapping[str, Any], seconds: float = START_S
  ) -> dict[str, Any]:
    """POSTs `/start_rollout`; returns the service's answer.

    Raises:
      ClientError: it did not answer, or refused; as of every call.
    """
    return await self._call("/start_rollout", seconds, body=dict(payload))

  async def stop(self, seconds: float = CALL_S) -> None:
    """Ends the rollout's generator; what is written stays."""
    await self._call("/stop_rollout", seconds, body={})

  async def stats(self, seconds: float = CALL_S) -> dict[str, Any]:
    """Figures of `/buffer/stats`; {} of a service that has none."""
    try:
      answer = await self._call(
        "/buffer/stats", seconds, method="GET", retry=self._retry
      )
    except ClientError as error:
      # Nor one of a buffer that is not made yet.
      if error.status in (404, 405, 501):
        return {}
      raise
    data = answer.get("data")
    if isinstance(data, Mapping):
      data = data.get("data")
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
      return dict(data[0])
    return {}

  # --- writing ----------------------------------------------------------------

  async def push(
    self,
    items: Mapping[str, Any] | list[Mapping[str, Any]],
    seconds: float = WRITE_S,
  ) -> int:
    """Writes an item, or several that are stored together or not at all.

    Returns:
      How many were new; the others had been written before.
    """
    answer = await self._call(
      "/buffer/write",
      seconds,
      body=items,
      headers={"prefer": "return=minimal"},
      retry=self._retry,
    )
    return int(answer.get("new", 0))

  async def known(
    self, uids: Sequence[str], seconds: float = WRITE_S
  ) -> set[str]:
    """Returns the uids that were written already."""
    known_uids: set[str] = set()
    for start in range(0, len(uids), _MOST_UIDS):
      body = {"uids": list(uids[start : start + _MOST_UIDS])}
      answer = await self._call(
        "/buffer/known", seconds, body=body, retry=self._retry
      )
      known_uids.update(answer["known"])
    return known_uids

  # --- reading ----------------------------------------------------------------

  async def read(
    self,
    num: int | None = None,
    seconds: float = _READ_S,
    *,
    retry: http.RetryPolicy | None = None,
    **more: Any,
  ) -> Read | None:
    """One read; None while no group is ready. It is final without a lease.

    Args:
      num: groups or items to take at most, as the service counts `batch_size`;
        None takes all.
      seconds: deadline.
      retry: Repeats the read, which its lease must name then.
      **more: Further keys of the body, but for those that are None.

    Raises:
      ValueError: the answer is none of the protocol's; not of its items.
    """
    body = {"batch_size": num, **more}
    body = {key: value for key, value in body.items() if value is not None}
    path = "/get_rollout_data"
    return unpack(await self._call(path, seconds, body=body, retry=retry))

  async def lease(
    self,
    count: int | None = None,
    *,
    lease_s: float = 600.0,
    lease_id: str = "",
    allowed_items: int | None = None,
    seconds: float = _READ_S,
  ) -> transport.Lease[ReadGroup] | None:
    """Borrows groups; None while none is ready.

    Args:
      count, seconds: `num` and `seconds` of `read`.
      lease_s: seconds within which `acknowledge` must follow, or the groups
        are delivered again.
      lease_id: Id of the lease; a read that is repeated with it returns the
        same groups. "" makes one.
      allowed_items: Items that the generator may have begun since the start,
        where that set a bound.

    Raises:
      ValueError: See `read`.
    """
    batch = await self.read(
      count,
      seconds,
      lease_s=lease_s,
      lease=lease_id or uuid.uuid4().hex,
      allowed_items=allowed_items,
      retry=self._retry,
    )
    return batch and transport.Lease(batch.lease, sift(batch))

  async def acknowledge(self, lease_id: str, seconds: float = CALL_S) -> None:
    """Ends a lease: its groups are safe elsewhere. May be repeated.

    Raises:
      ClientError: Also where the service does not know it any more (404).
    """
    body = {"lease": lease_id}
    await self._call("/buffer/ack", seconds, body=body, retry=self._retry)

  async def release(
    self, lease: transport.Lease[ReadGroup], seconds: float = CALL_S
  ) -> None:
    """Gives the groups of a lease back, to be read again at once."""
    await self._call("/buffer/release", seconds, body={"lease": lease.id})

  async def _call(
    self, path: str, seconds: float, method: str = "POST", **request: Any
  ) -> dict[str, Any]:
    request |= {"params": self._buffer, "limit": _LIMIT}
    return await self._http.ask(method, self._url + path, seconds, **request)


def unpack(answer: Mapping[str, Any]) -> Read | None:
  """An answer of `/get_rollout_data`; None where nothing is ready.

  Raises:
    ValueError: it is none of the protocol's; naming what is wrong.
  """
  if "success" not in answer:
    raise ValueError(
      f"the answer has no field success, but {sorted(answer)[:8]}; is this"
      " the address of a rollout buffer?"
    )
  if not answer["success"]:
    return None
  data = answer.get("data")
  meta: Any = {}
  lease = answer.get("lease") or ""
  groups: Any = []
  if isinstance(data, Mapping):
    meta = data.get("meta_info") or {}
    lease = data.get("lease") or lease
    groups = data.get("groups") or []
    data = data.get("data")
  if not isinstance(data, list):
    raise ValueError(f"data must be a list of items, got {str(data)[:80]!r}")
  if not isinstance(meta, Mapping):
    raise ValueError(f"meta_info must be an object, got {str(meta)[:80]!r}")
  if groups and not (
    isinstance(groups, list)
    and len(groups) == len(data)
    and all(isinstance(number, int) for number in groups)
  ):
    raise ValueError(
      f"groups must be a list with a whole number for each of {len(data)}"
      f" items, got {str(groups)[:80]}"
    )
  if not data:  # Some services call an empty read a success.
    return None
  items = []
  for item in data:
    # A service may wrap each item once more.
    if isinstance(item, Mapping) and isinstance(item.get("data"), Mapping):
      item = item["data"]
    items.append(dict(item) if isinstance(item, Mapping) else item)
  return Read(items, dict(meta), str(lease), groups)


def sift(read: Read) -> list[ReadGroup]:
  """The groups of a read, those that cannot be used among them."""
  together: dict[Any, list[int]] = {}
  for place, item in enumerate(read.items):
    name = _id_of(item, "instance_id")
    key: tuple[Any, ...] = ("instance", name) if name else ("item", place)
    if read.groups:
      key = ("group", read.groups[place])
    together.setdefault(key, []).append(place)
  return [_sifted(read.items, places) for places in together.values()]


def _sifted(items: list[Any], places: list[int]) -> ReadGroup:
  usable: list[records.Record] = []
  problem = ""
  for place in places:
    try:
      usable.append(records.read(items[place]))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
      problem = f"item {place}: {error}"
      usable = []
      break
  uids = (_id_of(items[place], "uid") for place in places)
  names = (_id_of(items[place], "instance_id") for place in places)
  return ReadGroup(
    next((name for name in names if name), ""),
    frozenset(uid for uid in uids if uid),
    places,
    usable,
    problem,
  )


def _id_of(item: object, key: str) -> str:
  value = item.get(key) if isinstance(item, Mapping) else None
  if isinstance(value, bool) or not isinstance(value, (str, int)):
    return ""
  return str(value)


def check(read: Read) -> None:
  """Raises RefusedItemsError for a read with an item that cannot be used."""
  groups = sift(read)
  problems = [group.problem for group in groups if group.problem]
  if problems:
    good = sorted(p for g in groups if not g.problem for p in g.places)
    raise RefusedItemsError(
      "; ".join(problems), [read.items[p] for p in good], read.meta_info
    )


async def get_rollout_data(
  api_base_url: str,
  num: int | None = None,
  timeout: float = 100.0,
  *,
  token: str = "",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Waits for generated data.

  Args:
    api_base_url: Address of the service.
    num: Largest number of items; None takes every ready group.
    timeout: seconds to wait, all polls included.
    token: bearer token; by default that of $TUNIX_BUFFER_TOKEN.

  Returns:
    (items, meta information). Each item has uid, instance_id, messages, reward
    and extra_info.

  Raises:
    ClientError: the service did not answer, or refused.
    RefusedItemsError: an item lacks a field or has a wrong one; it holds the
      items of the groups that can be used, which are delivered once only.
    ValueError: the address is none, or not a rollout buffer's.
    TimeoutError: nothing was ready in time.
  """
  if num is not None and num < 1:
    raise ValueError(f"num must be >= 1 or None, got {num}")
  client = BufferClient(api_base_url, token=token)
  try:
    async with asyncio.timeout(timeout):
      while True:
        result = await client.read(num, timeout)
        if result is not None:
          check(result)
          return result.items, result.meta_info
        await asyncio.sleep(POLL_S)
  except ClientError as error:
    if error.late:
      raise TimeoutError(str(error)) from None
    raise
  except TimeoutError:
    raise TimeoutError(
      f"{api_base_url} had no group ready within {timeout:g} s; is the"
      " rollout started, and are its groups valid? See /buffer/stats"
    ) from None
  finally:
    await client.aclose()


def start_rollout(
  api_base_url: str, args: object, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Starts the service's generation.

  Args:
    api_base_url: Address of the service.
    args: Arguments of the trainer; all are sent but secrets.
    metadata: The data buffer's: instance ids that were trained on, in lists
      by rollout id. The service skips them.

  Returns:
    The service's answer.

  Raises:
    ClientError: it did not answer within 10 s, or refused.
  """
  payload = start_payload(api_base_url, args, metadata)

  async def start() -> dict[str, Any]:
    client = BufferClient(
      api_base_url, token=getattr(args, "rollout_buffer_token", "") or ""
    )
    try:
      return await client.start(payload)
    finally:
      await client.aclose()

  # Also where the caller's own thread runs an event loop.
  return concurrency.call(start, what="starting the rollout")


def start_payload(
  api_base_url: str, args: Any, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
  """The body of `/start_rollout`: the documented keys, then every argument.

  Numbers that the protocol sends as text are text. `args.remote_engine_key` is
  the one secret that is sent; keys of `args.start_options` replace others.

  Raises:
    ValueError: an argument that the service needs is missing.
  """
  values = dict(vars(args) if hasattr(args, "__dict__") else args)
  options = values.pop("start_options", None) or {}
  most = _needed(values, "rollout_max_response_len")
  sampling = {
    "max_tokens": int(most),
    "temperature": float(values.get("rollout_temperature", 1.0)),
    "top_p": float(values.get("rollout_top_p", 1.0)),
  }
  for name in ("top_k", "min_p"):
    if value := values.get(f"rollout_{name}"):
      sampling[name] = value
  payload = {
    "num_process": str(values.get("rollout_num_process") or 100),
    "num_epoch": str(values.get("num_epoch") or 3),
    "remote_engine_url": _engine_url(values),
    "remote_buffer_url": api_base_url,
    "task_type": values.get("rollout_task_type") or "math",
    "input_file": _needed(values, "prompt_data"),
    "num_repeat_per_sample": str(_needed(values, "n_samples_per_prompt")),
    "max_tokens": str(most),
    "sampling_params": sampling,
    "tokenizer_path": values.get("hf_checkpoint") or "",
    "skip_instance_ids": flat_ids(metadata),
  }
  if "remote_engine_key" in values:
    payload["remote_engine_key"] = values["remote_engine_key"]
  for name, value in values.items():
    secret = name not in _SENT and any(part in name for part in _SECRET)
    if name in payload or secret:
      continue
    try:
      json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
      continue  # An object of the trainer's own process.
    payload[name] = value
  return {**payload, **options}


def _needed(values: Mapping[str, Any], name: str) -> Any:
  value = values.get(name)
  if value is None or value == "":
    raise ValueError(
      f"--{name.replace('_', '-')} is missing; the rollout buffer needs it"
    )
  return value


def _engine_url(values: Mapping[str, Any]) -> str:
  if values.get("remote_engine_url"):
    return str(values["remote_engine_url"])
  host, port = values.get("sglang_router_ip"), values.get("sglang_router_port")
  if not (host and port):
    raise ValueError(
      "--remote-engine-url is missing: the OpenAI-compatible server that"
      " generators sample from, e.g. http://127.0.0.1:8000/v1"
    )
  return f"http://{host}:{port}/v1"


def flat_ids(metadata: Mapping[str, Any] | None) -> list[str]:
  """Instance ids of a data buffer's metadata, as text, in order.

  An instance that was finished in two passes is listed twice: a service skips
  one pass for each.
  """
  names: list[str] = []

  def add(values: Iterable[Any]) -> None:
    for value in values:
      if isinstance(value, (list, tuple, set, frozenset)):
        add(value)
      else:
        names.append(str(value))

  for name, value in (metadata or {}).items():
    if not str(name).lstrip("-").isdigit():
      continue  # Other notes of the buffer.
    add(value if isinstance(value, (list, tuple, set)) else [value])
  return names
