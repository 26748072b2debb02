"""Lets the processes of one run agree on small values.

Every process of a run goes through the same steps in the same order; at each
`gather` all of them give a value and get everyone's. Values travel through the
coordination service that JAX's processes share, over the hosts' network and not
through the devices: a host that waits for a slow one leaves its devices free.

Beside the steps, a process can `announce` something at any time, which the
others find without waiting: that it was asked to stop, or that it failed.

Promises: what is gathered is the same in every process; a process that is at
another step, or does not come within the deadline, is an error that names it;
who waits for a process that has announced its failure raises within seconds.

Does not: move arrays or images (a value passes through one host), or outlive
the death of a process: JAX ends the others.
"""

from __future__ import annotations

import json
import time
from typing import Any, Callable, Protocol, Sequence, TypeVar

_CHUNK = 1 << 20
"""Bytes of a message; the service's own limit is 4 MiB."""
_SLICE_S = 1.0
_NOTES = "tunix/notes"
FAILED, STOP, ENDED = "failed", "stop", "ended"
"""Notes: the process failed by itself; it was asked to stop; it ends because
another one failed."""
T = TypeVar("T")


class PeerError(RuntimeError):
  """Another process could not do what all have to do.

  Attributes:
    kind: class of its error.
  """

  def __init__(self, message: str, kind: str):
    super().__init__(message)
    self.kind = kind


class PeerEnded(PeerError):
  """Another process failed by itself; nothing can be exchanged any more."""


class Store(Protocol):
  """The part of JAX's coordination client that is used."""

  def key_value_set_bytes(self, key: str, value: bytes) -> None: ...

  def blocking_key_value_get_bytes(
    self, key: str, timeout_ms: int
  ) -> bytes: ...

  def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...

  def key_value_delete(self, key: str) -> None: ...


class Peers:
  """The processes of a run; this class by itself is a run of one.

  Attributes:
    index: Number of this process.
    count: Number of processes.
    parted: whether this process, or one that it waited for, failed by itself:
      the processes can take no further step together.
  """

  index = 0
  count = 1
  parted = False
  _shared: BaseException | None = None  # The last error that all have.

  @property
  def first(self) -> bool:
    """Whether this process writes what all share."""
    return self.index == 0

  def gather(self, what: str, value: object) -> list[Any]:
    """Every process's value, in the order of the processes.

    Args:
      what: names the step; equal in all processes.
      value: JSON.

    Raises:
      RuntimeError: a process is at another step.
      TimeoutError: one did not come in time.
    """
    del what
    return [value]

  def together(
    self,
    what: str,
    work: Callable[[], Any],
    same: Sequence[type[Exception]] = (),
  ) -> list[Any]:
    """Does `work` in every process; what it returned (JSON) in each.

    Args:
      what, work: The step, and what each process does in it.
      same: Errors that are the same in every process.

    Raises:
      Exception: The failure of this process's work, or one of `same`.
      PeerError: another process's work failed.
    """
    if self.count == 1:
      return [work()]
    value, error = None, None
    try:
      value = work()
    except BaseException as failure:  # pylint: disable=broad-except
      error = failure
    kind, text = type(error).__name__, " ".join(str(error).split())[:500]
    outcomes = self.gather(what, [value, kind, text] if error else [value])
    if error is not None:
      self._shared = error
      raise error
    for process, (_, *failed) in enumerate(outcomes):
      if failed:
        kind, text = failed
        text = f"process {process}: {kind}: {text}"
        own = [cls for cls in same if cls.__name__ == kind]
        self._shared = own[0](text) if own else PeerError(text, kind)
        raise self._shared
    return [one[0] for one in outcomes]

  def part(self, error: BaseException) -> bool:
    """Announces an error that the others do not have, and would wait for.

    Returns:
      `parted`: False where all have the error, and can still end together.
    """
    cause: BaseException | None = error
    visited: set[int] = set()  # An error may be in its own context.
    while cause not in (None, self._shared) and id(cause) not in visited:
      visited.add(id(cause))
      cause = cause.__cause__ or cause.__context__
    if cause is not self._shared:
      cause = None
    if self.count > 1 and cause is None and not self.parted:
      self.parted = True
      text = " ".join(str(error).split())[:500]
      self.announce(FAILED, f"{type(error).__name__}: {text}")
    return self.parted

  def announce(self, what: str, text: str = "") -> None:
    """Leaves a note for the others; the first of a kind stays."""

  def announced(self, what: str) -> dict[int, str]:
    """The notes of other processes, by process; does not wait for any."""
    del what
    return {}

  def share(self, things: Sequence[T]) -> Sequence[T]:
    """This process's part: every `count`-th, from the `index`-th on."""
    return things[self.index :: self.count]

  def number(self, place: int) -> int:
    """Place among all things of that in this process's share."""
    return place * self.count + self.index

  def any(self, what: str, flag: bool) -> bool:
    """Whether the flag is set in some process."""
    return any(self.gather(what, bool(flag)))

  def of_first(self, what: str, value: object) -> Any:
    """The value of process 0."""
    return self.gather(what, value if self.first else None)[0]


class StorePeers(Peers):
  """Several processes that meet in a key-value store."""

  def __init__(
    self, store: Store, index: int, count: int, deadline_s: float = 3600.0
  ):
    """Args:

    store: Store that all processes share.
    index: Number of this process.
    count: Number of processes.
    deadline_s: how long a process waits for the others.
    """
    self.index, self.count = index, count
    self._store = store
    self._deadline_s = deadline_s
    self._step = 0
    self._mine: list[str] = []
    self._noted: set[str] = set()

  def announce(self, what: str, text: str = "") -> None:
    if what not in self._noted:
      self._noted.add(what)
      key = f"{_NOTES}/{what}/{self.index}"
      self._store.key_value_set_bytes(key, f"{text} ".encode())

  def announced(self, what: str) -> dict[int, str]:
    entries = self._store.key_value_dir_get_bytes(f"{_NOTES}/{what}/")
    notes = {
      int(key.rpartition("/")[2]): text.decode(errors="replace").strip()
      for key, text in entries
    }
    notes.pop(self.index, None)
    return notes

  def gather(self, what: str, value: object) -> list[Any]:
    data = json.dumps([what, value]).encode()
    chunks = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
    prefix = f"tunix/{self._step}"
    self._step += 1
    older, self._mine = self._mine, []
    for i, chunk in enumerate(chunks):
      last = i == len(chunks) - 1
      key = f"{prefix}/{self.index}/{i}"
      self._store.key_value_set_bytes(key, (b"." if last else b"+") + chunk)
      self._mine.append(key)
    values = []
    due = time.monotonic() + self._deadline_s
    for peer in range(self.count):
      if peer == self.index:
        values.append(json.loads(data)[1])
        continue
      at, entry = json.loads(self._read(f"{prefix}/{peer}", peer, what, due))
      if at != what:
        raise RuntimeError(
          f"process {self.index} is at {what!r} where process {peer} is at"
          f" {at!r}; all processes of a run need the same configuration"
        )
      values.append(entry)
    # A process that has come here has read everything of the step before.
    for key in older:
      self._store.key_value_delete(key)
    return values

  def _read(self, prefix: str, peer: int, what: str, due: float) -> bytes:
    parts: list[bytes] = []
    while True:
      seconds_left = due - time.monotonic()
      if seconds_left <= 0:
        raise TimeoutError(
          f"process {peer} did not come to {what!r} within"
          f" {self._deadline_s:g} s; look at its log"
        )
      try:
        part = self._store.blocking_key_value_get_bytes(
          f"{prefix}/{len(parts)}", int(1000 * min(seconds_left, _SLICE_S)) + 1
        )
      except Exception as error:  # pylint: disable=broad-except
        # JAX has one class for all of the service's errors.
        if "DEADLINE_EXCEEDED" not in str(error):
          raise
        for failed, text in self.announced(FAILED).items():
          self.parted = True
          raise PeerEnded(
            f"process {failed} failed: {text}", text.partition(":")[0]
          ) from None
        continue
      parts.append(part[1:])
      if part[:1] == b".":
        return b"".join(parts)


ALONE = Peers()
