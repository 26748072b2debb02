"""Requests, sessions, and the rows of the decode table they hold.

Promises: a row belongs to at most one request, and to it only while it runs;
waiting requests are served by priority, then first come first served; one
that is preempted loses nothing but time.

Host side only (numpy); not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
import time
from typing import Any, Callable

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import cached_sequence
from tunix.rl.multi_turn.engine import guidance


@dataclasses.dataclass(eq=False)
class Request:
  """One `generate` call on its way through the engine."""

  session: str
  prompt: policy_client.TokenPrompt
  sampling: policy_client.SamplingParams
  loop: asyncio.AbstractEventLoop | None = None
  future: asyncio.Future[policy_client.Completion] | None = None
  on_tokens: Callable[[np.ndarray], None] | None = None
  priority: int = 0  # The lower is served first.
  stop_when: guidance.StopWhen | None = None
  grammar: guidance.Grammar | None = None
  submitted: float = dataclasses.field(default_factory=time.monotonic)
  # Filled in by the scheduler.
  number: int = 0  # In the order of arrival.
  slot: int | None = None
  admitted: float = 0.0
  length: int = 0  # Prompt and sampled tokens so far.
  positions: np.ndarray | None = None  # int32[., 3] from `positions_from` on,
  positions_from: int = 0  # with one entry past the prompt.
  prefilled: int = 0
  reused: int = 0
  preempted: tuple[np.ndarray, ...] | None = None  # What its rows held.
  # Of its decode calls, each array [sampled tokens, …].
  details: list[tuple[np.ndarray, ...]] = dataclasses.field(
      default_factory=list
  )
  outcome: policy_client.Completion | BaseException | None = None

  @property
  def sampled(self) -> int:
    return max(0, self.length - len(self.prompt))

  @property
  def detailed(self) -> bool:
    return bool(self.sampling.top_logprobs or self.sampling.raw_logprobs)

  @property
  def turn(self) -> tuple[int, int]:
    """Whose turn it is: the smallest."""
    return self.priority, self.number


@dataclasses.dataclass(eq=False)
class Session:
  """A growing token sequence and its cache."""

  name: str
  order: int
  sequence: cached_sequence.CachedSequence
  request: Request | None = None
  length: int = 0  # Tokens seen in its last request, for statistics.
  last_used: int = 0


class SlotTable:
  """Who runs in which row, who waits, and what rows have sampled."""

  def __init__(
      self,
      slots: int,
      width: int,
      new_sequence: Callable[[], cached_sequence.CachedSequence],
      entropies: bool = False,
  ):
    """Args:

      slots: rows, that is, requests that run at a time.
      width: tokens of a row.
      new_sequence: makes a session's empty cache.
      entropies: whether what is sampled comes with its entropy.
    """
    self.size = slots
    self.tokens = np.zeros((slots, width), np.int32)
    self.logprobs = np.zeros((slots, width), np.float32)
    self.versions = np.zeros((slots, width), np.int32)
    self.entropies = (
        np.zeros((slots, width), np.float32) if entropies else None
    )
    self.requests: list[Request | None] = [None] * slots
    self.sessions: dict[str, Session] = {}
    self.waiting: list[Request] = []
    self._new_sequence = new_sequence
    self._free = list(range(slots - 1, -1, -1))
    self._clock = itertools.count(1)
    self._opened = itertools.count()
    self._arrived = itertools.count()

  @property
  def told(self) -> tuple[np.ndarray, ...]:
    """What stands beside the sampled tokens, each [slots, width]."""
    told = (self.logprobs, self.versions)
    return told if self.entropies is None else (*told, self.entropies)

  @property
  def active(self) -> list[Request]:
    return [r for r in self.requests if r is not None]

  @property
  def has_room(self) -> bool:
    return bool(self._free)

  def open(self, name: str) -> Session:
    """The session of that name, made when it does not exist."""
    session = self.sessions.get(name)
    if session is None:
      session = Session(name, next(self._opened), self._new_sequence())
      self.sessions[name] = session
    return session

  def sequence(self, request: Request) -> cached_sequence.CachedSequence:
    return self.sessions[request.session].sequence

  def enqueue(self, request: Request) -> None:
    """Puts a request into the queue.

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
    request.number = next(self._arrived)
    bisect.insort(self.waiting, request, key=lambda r: r.turn)

  def renumber(self, order: list[Request]) -> None:
    """Those that wait are served in this order, which is all of them."""
    numbers = sorted(r.number for r in order)
    for request, number in zip(order, numbers, strict=True):
      request.number = number
    self.waiting = sorted(order, key=lambda r: r.turn)

  def place(self, request: Request) -> int:
    """Gives the queue's `request` a row; there must be one."""
    self.waiting.remove(request)
    request.slot = slot = self._free.pop()
    self.requests[slot] = request
    return slot

  def completion(
      self, request: Request, stopped: bool
  ) -> policy_client.Completion:
    """What a running request has sampled, as its caller is told of it."""
    span = slice(len(request.prompt), request.length)
    told: dict[str, Any] = {}
    if request.detailed:
      raw, tops, top_logprobs = (
          np.concatenate(arrays)[: request.sampled]
          for arrays in zip(*request.details)
      )
      k = request.sampling.top_logprobs
      if k:
        told = {"top_tokens": tops[:, :k], "top_logprobs": top_logprobs[:, :k]}
      if request.sampling.raw_logprobs:
        told["raw_logprobs"] = raw
    if self.entropies is not None:
      told["entropies"] = self.entropies[request.slot, span]
    reason = policy_client.FinishReason
    return policy_client.Completion(
        tokens=self.tokens[request.slot, span],
        logprobs=self.logprobs[request.slot, span],
        versions=self.versions[request.slot, span],
        finish_reason=reason.STOP if stopped else reason.LENGTH,
        metrics={
            "prefilled_tokens": float(request.prefilled),
            "reused_tokens": float(request.reused),
            "queue_seconds": request.admitted - request.submitted,
            "seconds": time.monotonic() - request.submitted,
        },
        **told,
    )

  def displace(self, request: Request) -> None:
    """Puts a running request back to where it stood in the queue."""
    self._leave(request)
    bisect.insort(self.waiting, request, key=lambda r: r.turn)

  def finish(self, request: Request) -> None:
    """Ends a request, waiting or active; its session keeps its cache."""
    session = self.sessions.get(request.session)
    if session is not None and session.request is request:
      session.request = None
      session.last_used = next(self._clock)
    if request.slot is not None:
      self._leave(request)
      if session is not None:
        session.sequence.rest()
    elif request in self.waiting:
      self.waiting.remove(request)

  def release(self, name: str) -> None:
    """Forgets a session, whose request has ended."""
    session = self.sessions.pop(name, None)
    if session is not None:
      session.sequence.clear()

  def victim(self, request: Request) -> Session | None:
    """Whose cache gives room for `request`, if it is not to run short.

    The session idle for longest, else that of the last in the queue.
    """
    holders = [
        s
        for s in self.sessions.values()
        if s.sequence.pages
        and s.request is not request
        and (s.request is None or s.request.slot is None)
    ]
    idle = [s for s in holders if s.request is None]
    if idle:
      return min(idle, key=lambda s: s.last_used)
    return max(holders, key=lambda s: s.request.turn, default=None)

  def _leave(self, request: Request) -> None:
    self.requests[request.slot] = None
    self._free.append(request.slot)
    request.slot = None


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
  surplus_tokens: int = 0  # Sampled beyond the end of a stop string.
  images_encoded: int = 0
  vision_cache_hits: int = 0
  weight_updates: int = 0
  lockstep_timeouts: int = 0
  recoveries: int = 0
  evictions: int = 0  # Resting or waiting sessions that lost their pages.
  preemptions: int = 0  # Running requests that did.
  seconds_vision: float = 0.0
  seconds_prefill: float = 0.0
  seconds_decode: float = 0.0
  seconds_host: float = 0.0
  seconds_idle: float = 0.0

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)
