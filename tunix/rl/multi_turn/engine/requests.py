"""Follows requests from arrival to outcome, with their sessions and slots.

`check` refuses a bad request, `SlotTable` queues requests and gives them slots
(rows of the running batch), `deliver` and `settle` hand outcomes to the threads
that await them.

Promises: a slot belongs to at most one request, and to it only while it runs;
waiting requests are served by priority, then first come first served; a
preempted request loses nothing but time. Delivering an outcome that is no
longer awaited is no error.

Host side only (numpy). `SlotTable` is not thread-safe: the engine's thread owns
it.
"""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import constrained_decoding
from tunix.rl.multi_turn.engine import kv_cache
from tunix.rl.multi_turn.engine import page_pool
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.policy import base

_MESSAGE_HEAD = 8  # Tokens between a message's end and an image of the next.


MOST_PREFIXES = 1 << 19

_PREFIX_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: np.ndarray) -> np.ndarray:
  """Returns each uint64 with its bits stirred (the finaliser of splitmix64)."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


class KnownPrefixes:
  """The prefixes of all sequences added so far."""

  def __init__(self) -> None:
    self._known: set[int] = set()

  def clear(self) -> None:
    """Forgets all: other weights make other keys and values."""
    self._known.clear()

  def add(
    self, tokens: np.ndarray, spans: Sequence[trajectory.ImageSpan]
  ) -> int:
    """Returns the length of the longest prefix added before; adds all prefixes.

    Args:
      tokens: int32[T].
      spans: Images; the ones within the tokens count.
    """
    n = len(tokens)
    ids = page_pool.content_ids(tokens, spans, 0, n)
    # A prefix's name is the sum of its tokens', each bound to its place.
    places = np.arange(1, n + 1, dtype=np.uint64) * _PREFIX_STEP
    names = _mixed(np.cumsum(_mixed(_mixed(ids) + places)))
    # All prefixes of a known prefix are known, so the longest one is found by
    # halving.
    low, high = 0, n
    while low < high:
      middle = (low + high) // 2
      if int(names[middle]) in self._known:
        low = middle + 1
      else:
        high = middle
    if len(self._known) + n - low > MOST_PREFIXES:
      self._known.clear()
      self._known.update(names[:low].tolist())
    self._known.update(names[low:].tolist())
    return low


class EngineError(RuntimeError):
  """The engine, not the request, failed; the message names the cause."""


class Preempted(NamedTuple):
  """State of a preempted request.

  Attributes:
    row: its `DECODE_ROW`.
    tokens: int32, prompt and sampled tokens.
    sampled: log-probs and the other arrays of `SlotTable.sampled`.
  """

  row: np.void
  tokens: np.ndarray
  sampled: tuple[np.ndarray, ...]


@dataclasses.dataclass(eq=False)
class Request:
  """One `generate` call on its way through the engine.

  Attributes:
    session, prompt, sampling, on_tokens, priority, stop_when, grammar: as of
      `RolloutEngine.generate`.
    loop, future: deliver the outcome.
    submitted, admitted: `time.monotonic()`.
    number: Number in the order of arrival.
    slot: Slot while it runs.
    length: prompt and sampled tokens so far.
    positions: int32[., 3], rotary positions from `positions_from` to one past
      the prompt.
    prefilled, reused: prompt tokens computed, and found in the cache.
    preempted: state to resume from; None unless preempted.
    details: Details of its decode calls, each array [sampled tokens, …].
    outcome: its completion or error.
  """

  session: str
  prompt: policy_client.TokenPrompt
  sampling: policy_client.SamplingParams
  loop: asyncio.AbstractEventLoop | None = None
  future: asyncio.Future[policy_client.Completion] | None = None
  on_tokens: Callable[[np.ndarray], None] | None = None
  priority: int = 0  # The lower is served first.
  stop_when: constrained_decoding.StopWhen | None = None
  grammar: constrained_decoding.Grammar | None = None
  submitted: float = dataclasses.field(default_factory=time.monotonic)
  # Filled in by the scheduler.
  number: int = 0
  slot: int | None = None
  admitted: float = 0.0
  length: int = 0
  positions: np.ndarray | None = None
  positions_from: int = 0
  prefilled: int = 0
  reused: int = 0
  preempted: Preempted | None = None
  details: list[tuple[np.ndarray, ...]] = dataclasses.field(
    default_factory=list
  )
  outcome: policy_client.Completion | BaseException | None = None

  @property
  def sampled(self) -> int:
    """Tokens sampled so far."""
    return max(0, self.length - len(self.prompt))

  @functools.cached_property
  def head(self) -> int:
    """Leading tokens that prompts of other tasks probably have, too: a system
    message, which ends as a completion would, and the beginning of the next
    message where an image follows. 0: there is none."""
    images = self.prompt.images
    text = self.prompt.tokens[: images[0].offset if images else None]
    ends = np.isin(text, self.sampling.stop_token_ids).nonzero()[0]
    if not len(ends):
      return 0
    end = int(ends[0]) + 1
    return len(text) if images and len(text) - end <= _MESSAGE_HEAD else end

  @property
  def detailed(self) -> bool:
    """Whether it asks for log-probs of more than the sampled tokens."""
    return bool(self.sampling.top_logprobs or self.sampling.raw_logprobs)

  @property
  def penalized(self) -> bool:
    """Whether its sampled tokens lower their own logits."""
    sampling = self.sampling
    return bool(sampling.frequency_penalty or sampling.presence_penalty)

  @property
  def is_constrained(self) -> bool:
    """Whether a grammar or a stop condition reads its tokens."""
    return self.grammar is not None or self.stop_when is not None

  @property
  def turn(self) -> tuple[int, int]:
    """Order of service: the smallest first."""
    return self.priority, self.number


@dataclasses.dataclass(eq=False)
class Session:
  """A growing token sequence and its cache."""

  name: str
  order: int
  sequence: kv_cache.CachedSequence
  shard: int = 0  # Of the cache, whose pages the sequence takes.
  request: Request | None = None
  length: int = 0  # Tokens that its cache has held, for statistics.
  last_used: int = 0


class SlotTable:
  """Queues requests, gives them slots, and keeps the slots' tokens.

  Each shard of the cache has as many slots as any other; a session that has
  pages runs in their shard.

  Attributes:
    size: requests that run at a time.
    pools: Pools of the cache's pages, one a shard.
    rows: Rows of the type `programs.DECODE_ROW`, one a slot.
    start, remaining: Views of the rows' fields, to read single ones fast.
    tokens: int32[slots, width], prompt and sampled tokens.
    logprobs, versions, entropies: of the sampled ones; entropies may be None.
    requests: those that run, by slot.
    sessions: Sessions by name.
    waiting: Requests without a slot, in order of service.
    batch: In lockstep the requests that may be served; None: any.
  """

  def __init__(
    self,
    slots: int,
    width: int,
    pools: Sequence[page_pool.PagePool],
    share: bool,
    entropies: bool = False,
  ):
    """Args:

    slots: requests that run at a time, a multiple of the pools.
    width: tokens of a slot.
    pools: Pools of the cache's pages, one a shard.
    share: whether sessions share pages.
    entropies: whether sampled tokens come with their entropies.
    """
    self.size = slots
    self.pools = pools
    self._share = share
    self.rows = np.zeros(slots, programs_lib.DECODE_ROW)
    self.start, self.remaining = self.rows["start"], self.rows["remaining"]
    self.tokens = np.zeros((slots, width), np.int32)
    self.logprobs = np.zeros((slots, width), np.float32)
    self.versions = np.zeros((slots, width), np.int32)
    self.entropies = np.zeros((slots, width), np.float32) if entropies else None
    self.requests: list[Request | None] = [None] * slots
    self.sessions: dict[str, Session] = {}
    self.waiting: list[Request] = []
    self.batch: list[Request] | None = None
    self._released: list[Session] = []  # That keep their pages until a batch.
    each = slots // len(pools)
    self._free = [
      list(range((s + 1) * each - 1, s * each - 1, -1))
      for s in range(len(pools))
    ]
    self._clock = itertools.count(1)
    self._opened = itertools.count()
    self._arrived = itertools.count()

  @property
  def sampled(self) -> tuple[np.ndarray, ...]:
    """The arrays beside `tokens`, each [slots, width]."""
    arrays = (self.logprobs, self.versions)
    return arrays if self.entropies is None else (*arrays, self.entropies)

  @property
  def active(self) -> list[Request]:
    return [r for r in self.requests if r is not None]

  @property
  def has_room(self) -> bool:
    return any(self._free)

  def shard(self, request: Request) -> int:
    """Returns the shard of the request's session."""
    return self.sessions[request.session].shard

  def shards_for(self, request: Request) -> list[int]:
    """Shards that may serve a waiting request, the best first.

    A session with pages has its own only. A new one goes where the fewest
    requests run, then where the fewest sessions have pages.
    """
    session = self.sessions[request.session]
    if session.sequence.cached:
      return [session.shard]
    if len(self.pools) == 1:
      return [0]
    cached_sessions = [0] * len(self.pools)
    for other in self.holders:
      cached_sessions[other.shard] += bool(other.sequence.pages)
    return sorted(
      range(len(self.pools)),
      key=lambda s: (-len(self._free[s]), cached_sessions[s], s),
    )

  def has_slot(self, shard: int) -> bool:
    return bool(self._free[shard])

  def move(self, session: Session, shard: int) -> None:
    """Gives a session without pages another shard."""
    if session.shard != shard:
      session.shard = shard
      session.sequence.move(self.pools[shard])

  def open(self, name: str) -> Session:
    """Returns the session of that name, made when it does not exist."""
    session = self.sessions.get(name)
    if session is None:
      session = Session(
        name,
        next(self._opened),
        kv_cache.CachedSequence(self.pools[0], self._share),
      )
      self.sessions[name] = session
    return session

  def sequence(self, request: Request) -> kv_cache.CachedSequence:
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

  def start_batch(self, order: list[Request]) -> None:
    """Serves the waiting requests, all in this order, before any other.

    No slot is taken. What ran before leaves no trace in which slot a request
    gets, nor do clients in when released sessions' pages go.
    """
    self.clear_released()
    for free in self._free:
      free.sort(reverse=True)
    self.batch = order
    numbers = sorted(r.number for r in order)
    for request, number in zip(order, numbers, strict=True):
      request.number = number
    self.waiting = sorted(order, key=lambda r: r.turn)

  def place(self, request: Request) -> int:
    """Gives the queue's `request` a slot of its session's shard; there must
    be one."""
    self.waiting.remove(request)
    request.slot = slot = self._free[self.shard(request)].pop()
    self.requests[slot] = request
    return slot

  def restore(self, request: Request) -> None:
    """Fills a preempted request's slot with its state."""
    assert request.preempted is not None
    row, tokens, sampled = request.preempted
    slot, n = request.slot, len(tokens)
    self.rows[slot] = row
    self.tokens[slot, :n] = tokens
    for array, values in zip(self.sampled, sampled):
      array[slot, :n] = values
    request.preempted = None

  def preempt(self, request: Request) -> None:
    """Puts a running request back into the queue, with its state."""
    slot, n = request.slot, request.length
    assert slot is not None
    request.preempted = Preempted(
      self.rows[slot].copy(),
      self.tokens[slot, :n].copy(),
      tuple(array[slot, :n].copy() for array in self.sampled),
    )
    self._leave(request)
    bisect.insort(self.waiting, request, key=lambda r: r.turn)
    self.sequence(request).clear()

  def completion(
    self, request: Request, stopped: bool
  ) -> policy_client.Completion:
    """Returns the completion of a running request."""
    span = slice(len(request.prompt), request.length)
    more: dict[str, Any] = {}
    if request.detailed:
      raw, tops, top_logprobs = (
        np.concatenate(arrays)[: request.sampled]
        for arrays in zip(*request.details)
      )
      k = request.sampling.top_logprobs
      if k:
        more = {"top_tokens": tops[:, :k], "top_logprobs": top_logprobs[:, :k]}
      if request.sampling.raw_logprobs:
        more["raw_logprobs"] = raw
    if self.entropies is not None:
      more["entropies"] = self.entropies[request.slot, span]
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
      **more,
    )

  def finish(self, request: Request) -> None:
    """Ends a request, waiting or active; its session keeps its cache."""
    session = self.sessions.get(request.session)
    if session is not None and session.request is request:
      session.request = None
      session.last_used = next(self._clock)
    if request.slot is not None:
      self.remaining[request.slot] = 0
      self._leave(request)
      if session is not None and session.sequence.outdated:
        session.sequence.outdate()  # No other request reads older weights.
        session.length = 0
      elif session is not None:
        session.sequence.rest()
    elif request in self.waiting:
      self.waiting.remove(request)

  def release(self, name: str) -> None:
    """Forgets a session, whose request has ended.

    In lockstep its pages go before the next batch: a running one must not
    depend on when clients release sessions.
    """
    session = self.sessions.pop(name, None)
    if session is None:
      return
    if self.batch is None:
      session.sequence.clear()
      return
    self._released.append(session)
    if not self.sessions:
      self.clear_released()

  def clear_released(self) -> None:
    """Drops the pages of released sessions, in an order of their own."""
    for session in sorted(self._released, key=lambda s: s.order):
      session.sequence.clear()
    self._released.clear()

  @property
  def holders(self) -> list[Session]:
    """Sessions that may have pages."""
    return [*self.sessions.values(), *self._released]

  def victim(self, request: Request) -> Session | None:
    """Returns the session whose cache makes room for `request`, or None.

    That is the session of its shard that has been idle for longest, else the
    session of the last request in the queue.
    """
    shard = self.shard(request)
    near = [s for s in self.holders if s.sequence.pages and s.shard == shard]
    # In lockstep a request for the next batch may have come, or not yet.
    idle = [
      s
      for s in near
      if s.request is None
      or (self.batch is not None and s.request not in self.batch)
    ]
    if idle:
      return min(idle, key=lambda s: s.last_used)
    waiting = [
      (r.turn, s)
      for s in near
      if s not in idle
      and (r := s.request) is not None
      and r is not request
      and r.slot is None
    ]
    return max(waiting, key=lambda pair: pair[0], default=(None, None))[1]

  def _leave(self, request: Request) -> None:
    assert request.slot is not None
    self.requests[request.slot] = None
    self._free[request.slot * len(self.pools) // self.size].append(request.slot)
    request.slot = None


@dataclasses.dataclass
class Counters:
  """Counts the engine's work; all only grow. Seconds are wall seconds.

  Each second of the engine's thread is booked on one part, the part in progress
  up to the moment of a reading.
  """

  requests: int = 0
  completed: int = 0
  failed: int = 0
  cancelled: int = 0
  prompt_tokens: int = 0
  unique_prompt_tokens: int = 0  # To prefill if nothing were done twice.
  prefilled_tokens: int = 0
  recomputed_tokens: int = 0  # Prefilled again because of new weights.
  copied_pages: int = 0
  prefill_calls: int = 0
  prefill_places: int = 0  # Rows x tokens computed, padding included.
  decode_tokens: int = 0
  mixed_tokens: int = 0  # Sampled with keys and values of older weights.
  decode_steps: int = 0
  decode_calls: int = 0
  decode_places: int = 0  # Rows x steps computed.
  drafted_tokens: int = 0  # Guessed, whether or not they were right.
  accepted_tokens: int = 0  # Drafts that were right, each a step saved.
  surplus_tokens: int = 0  # Sampled beyond the end of a stop string.
  images_encoded: int = 0
  vision_cache_hits: int = 0
  weight_updates: int = 0
  lockstep_timeouts: int = 0
  recoveries: int = 0
  evictions: int = 0  # Idle or waiting sessions that lost their pages.
  preemptions: int = 0  # Running requests that did.
  seconds_vision: float = 0.0
  seconds_prefill: float = 0.0
  seconds_decode: float = 0.0
  seconds_host: float = 0.0
  seconds_idle: float = 0.0

  def __post_init__(self) -> None:
    self._lock = threading.Lock()
    self._part: str | None = None
    self._since = 0.0

  def enter(self, part: str | None) -> str | None:
    """Books the time from now on on `part`; returns the part before it.

    Args:
      part: Name behind `seconds_`; None books on none.
    """
    with self._lock:
      self._book()
      before, self._part = self._part, part
      return before

  @contextlib.contextmanager
  def spending(self, part: str) -> Iterator[None]:
    """Books the time of a block on `part`, an inner block's on its own."""
    before = self.enter(part)
    try:
      yield
    finally:
      self.enter(before)

  def _book(self) -> None:
    now = time.perf_counter()
    if self._part is not None:
      name = f"seconds_{self._part}"
      setattr(self, name, getattr(self, name) + now - self._since)
    self._since = now

  def to_dict(self) -> dict[str, Any]:
    with self._lock:
      self._book()
      return dataclasses.asdict(self)


# --- arrival and outcome -----------------------------------------------------


def check(
  prompt: policy_client.TokenPrompt,
  sampling: policy_client.SamplingParams,
  *,
  context_length: int,
  vocabulary: int,
  processor: base.Processor,
) -> None:
  """Refuses a request that the policy cannot read or the engine not sample.

  Args:
    prompt: tokens and images.
    sampling: how to sample.
    context_length: tokens of a sequence, sampled ones included.
    vocabulary: tokens that the policy knows.
    processor: the policy's host side.

  Raises:
    ContextLimitError: the prompt leaves no room to sample.
    ValueError: naming the field.
  """
  n = len(prompt)
  if n < 1:
    raise ValueError("prompt.tokens is empty; give at least one token")
  if n >= context_length:
    raise policy_client.ContextLimitError(
      f"prompt of {n} tokens leaves no room to sample in the context of"
      f" {context_length}; shorten the history or raise"
      " context_length"
    )
  low, high = int(prompt.tokens.min()), int(prompt.tokens.max())
  if low < 0 or high >= vocabulary:
    raise ValueError(
      f"prompt.tokens holds id {low if low < 0 else high}, outside of the"
      f" policy's vocabulary [0, {vocabulary})"
    )
  most = programs_lib.MAX_STOP_TOKENS
  if len(sampling.stop_token_ids) > most:
    raise ValueError(
      f"stop_token_ids has {len(sampling.stop_token_ids)} entries, the"
      f" engine takes at most {most}"
    )
  for token in sampling.stop_token_ids:
    if not 0 <= token < vocabulary:
      raise ValueError(
        f"stop_token_ids holds {token}, outside of the policy's vocabulary"
        f" [0, {vocabulary})"
      )
  for span in prompt.images:
    image = span.image
    tokens = processor.num_image_tokens(image.width, image.height)
    shown = int(span.numbers(prompt.tokens).max(initial=-1)) + 1
    if tokens != shown:
      raise ValueError(
        f"an image of {image.width}x{image.height} becomes {tokens} tokens;"
        f" the prompt holds {shown} placeholders for it at token"
        f" {span.offset}"
      )


def deliver(requests: Sequence[Request]) -> None:
  """Hands outcomes to the event loops that await them."""
  by_loop: dict[asyncio.AbstractEventLoop | None, list[Request]] = {}
  for request in requests:
    by_loop.setdefault(request.loop, []).append(request)
  for loop, group in by_loop.items():
    try:
      if loop is not None:
        loop.call_soon_threadsafe(_set_outcomes, group)
    except RuntimeError:  # The loop was closed; nothing awaits any more.
      pass


def _set_outcomes(requests: Sequence[Request]) -> None:
  for request in requests:
    if request.future is None or request.future.done():
      continue
    if isinstance(request.outcome, BaseException):
      request.future.set_exception(request.outcome)
    elif request.outcome is not None:
      request.future.set_result(request.outcome)


def settle(future: concurrent.futures.Future[Any], outcome: object) -> None:
  """Sets a future's result or exception, unless it was cancelled."""
  if not future.set_running_or_notify_cancel():
    return
  if isinstance(outcome, BaseException):
    future.set_exception(outcome)
  else:
    future.set_result(outcome)
