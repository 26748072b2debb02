"""Requests, sessions, and the slots of the KV cache they hold.

Promises: a slot belongs to at most one session; `cached[slot]` tokens of
`tokens[slot]` have valid keys and values, and no more; a session that is
evicted loses nothing but time. Waiting requests are served first come first
served, and none waits while an idle session holds a slot.

Host side only (numpy); not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from typing import Any, Callable, Sequence

import numpy as np
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn import trajectory


@dataclasses.dataclass(eq=False)
class Request:
  """One `generate` call on its way through the engine."""

  session: str
  prompt: policy_client.TokenPrompt
  sampling: policy_client.SamplingParams
  loop: asyncio.AbstractEventLoop | None = None
  future: asyncio.Future[policy_client.Completion] | None = None
  on_tokens: Callable[[np.ndarray], None] | None = None
  submitted: float = dataclasses.field(default_factory=time.monotonic)
  # Filled in by the scheduler.
  slot: int | None = None
  admitted: float = 0.0
  length: int = 0  # Prompt and sampled tokens so far.
  positions: np.ndarray | None = None  # int32[., 3] from `positions_from` on,
  positions_from: int = 0  # with one entry past the prompt.
  prefilled: int = 0
  reused: int = 0
  outcome: policy_client.Completion | BaseException | None = None

  @property
  def sampled(self) -> int:
    return self.length - len(self.prompt)


@dataclasses.dataclass(eq=False)
class Session:
  """A growing token sequence; `slot` is None while it holds no cache.

  `spans` are the images of the cached tokens, None when the slot's cache is
  not (yet) this session's.
  """

  name: str
  order: int
  slot: int | None = None
  request: Request | None = None
  spans: tuple[trajectory.ImageSpan, ...] | None = None
  length: int = 0  # Tokens seen in its last request, for statistics.
  last_used: int = 0


def common_prefix(
    old_T: np.ndarray,
    old_spans: Sequence[trajectory.ImageSpan],
    new_T: np.ndarray,
    new_spans: Sequence[trajectory.ImageSpan],
) -> int:
  """Leading tokens that two sequences share, same pixels included."""
  n = min(len(old_T), len(new_T))
  differ = np.flatnonzero(old_T[:n] != new_T[:n])
  n = int(differ[0]) if len(differ) else n
  for i in range(max(len(old_spans), len(new_spans))):
    old = old_spans[i] if i < len(old_spans) else None
    new = new_spans[i] if i < len(new_spans) else None
    if old == new:
      continue
    return min([n] + [s.offset for s in (old, new) if s is not None])
  return n


class SlotTable:
  """Who holds which slot, and what is cached there."""

  def __init__(self, slots: int, context_length: int, margin: int):
    """Args:

      slots: rows of the KV cache.
      context_length: tokens of a sequence.
      margin: steps of a decode call, which may write past the context.
    """
    self.size = slots
    width = context_length + margin
    self.tokens = np.zeros((slots, width), np.int32)
    self.logprobs = np.zeros((slots, width), np.float32)
    self.versions = np.zeros((slots, width), np.int32)
    self.requests: list[Request | None] = [None] * slots
    self.sessions: dict[str, Session] = {}
    self.waiting: collections.deque[Request] = collections.deque()
    self.evictions = 0
    self._owner: list[Session | None] = [None] * slots
    self._free = list(range(slots - 1, -1, -1))
    self._clock = 0
    self._opened = 0

  @property
  def active(self) -> list[Request]:
    return [r for r in self.requests if r is not None]

  def open(self, name: str) -> Session:
    """The session of that name, made when it does not exist."""
    session = self.sessions.get(name)
    if session is None:
      session = Session(name, self._opened)
      self._opened += 1
      self.sessions[name] = session
    return session

  def enqueue(self, request: Request) -> None:
    """Puts a request at the end of the queue.

    Raises:
      ValueError: its session has a request under way.
    """
    session = self.open(request.session)
    if session.request is not None:
      raise ValueError(
          f"session {request.session!r} already has a request under way; a"
          " session is one sequence, await its completion first"
      )
    session.request = request
    self.waiting.append(request)

  def place(self, request: Request) -> int | None:
    """A slot for the queue's `request`, evicting if need be, or None.

    The victim is the session idle for longest; else one whose own request
    came after this one, so that nobody waits for ever.
    """
    session = self.sessions[request.session]
    if session.slot is None:
      if self._free:
        slot = self._free.pop()
      else:
        victim = self._victim(request)
        if victim is None:
          return None
        slot = victim.slot
        self._take_slot(victim)
        self._free.remove(slot)
        self.evictions += 1
      session.slot = slot
      session.spans = None
      self._owner[slot] = session
    self.waiting.remove(request)
    self.requests[session.slot] = request
    request.slot = session.slot
    return session.slot

  def finish(self, request: Request) -> None:
    """Ends a request, waiting or active; its session keeps its slot."""
    session = self.sessions.get(request.session)
    if session is not None and session.request is request:
      session.request = None
      self._clock += 1
      session.last_used = self._clock
    if request.slot is not None:
      if self.requests[request.slot] is request:
        self.requests[request.slot] = None
    elif request in self.waiting:
      self.waiting.remove(request)

  def release(self, name: str) -> Request | None:
    """Forgets a session; returns the request that was under way, if any."""
    session = self.sessions.pop(name, None)
    if session is None:
      return None
    request = session.request
    if request is not None:
      self.finish(request)
    if session.slot is not None:
      self._take_slot(session)
    return request

  def _take_slot(self, session: Session) -> None:
    self._owner[session.slot] = None
    self._free.append(session.slot)
    session.slot = None
    session.spans = None

  def _victim(self, request: Request) -> Session | None:
    holders = [s for s in self._owner if s is not None]
    idle = [s for s in holders if s.request is None]
    if idle:
      return min(idle, key=lambda s: s.last_used)
    place = {id(r): i for i, r in enumerate(self.waiting)}
    mine = place[id(request)]
    later = [
        (place[id(s.request)], s)
        for s in holders
        if place.get(id(s.request), -1) > mine
    ]
    return max(later, key=lambda x: x[0])[1] if later else None


def bucket(buckets: Sequence[int], need: int) -> int:
  """The smallest of the ascending buckets that holds `need`, else the last."""
  for size in buckets:
    if size >= need:
      return size
  return buckets[-1]


@dataclasses.dataclass
class Counters:
  """What the engine has done; all grow only. Seconds are wall seconds."""

  requests: int = 0
  completed: int = 0
  failed: int = 0
  cancelled: int = 0
  prompt_tokens: int = 0
  unique_prompt_tokens: int = 0
  prefilled_tokens: int = 0
  prefill_calls: int = 0
  prefill_places: int = 0  # Rows x tokens computed, padding included.
  decode_tokens: int = 0
  decode_steps: int = 0
  decode_calls: int = 0
  decode_places: int = 0  # Rows x steps computed.
  images_encoded: int = 0
  vision_cache_hits: int = 0
  weight_updates: int = 0
  lockstep_timeouts: int = 0
  recoveries: int = 0
  seconds_vision: float = 0.0
  seconds_prefill: float = 0.0
  seconds_decode: float = 0.0
  seconds_host: float = 0.0
  seconds_idle: float = 0.0

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)
