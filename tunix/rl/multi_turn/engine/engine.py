"""Samples completions for many episodes in one batch, in the process.

`RolloutEngine` is a `PolicyClient`. JAX runs in the engine's own thread; any
number of event loops may await completions.

Promises:
- A prompt that extends its session's tokens is prefilled from where it
  differs, images included, and so is one that begins as another session's
  does: keys and values lie in pages that sequences share or copy. More sessions
  than there is room for is no error: requests wait in order, idle sessions lose
  their pages, and the latest requests are preempted; the engine computes all of
  it again later.
- Equal (prompt, seed, weights) give equal tokens whichever requests share the
  batch, up to the rounding of differently shaped programs. In lockstep mode
  equal batches in equal order give results equal to the bit, whenever their
  requests and releases arrive; without a session from before, a batch depends
  on nothing that ran before it. Without a seed, no two requests share random
  numbers.
- Log-probs are of the distribution sampled from; the end-of-turn token is
  kept, as the last token; banned tokens are never sampled.
- New weights take effect between two decode calls (or between completions,
  by `update_policy`); each token carries its weights' version.
- A bad request fails alone. A device failure fails the running requests with an
  `EngineError` and the engine keeps running; after several failures in a row
  `healthy` is False, and every request is refused at once.
- After `warm_up` nothing is compiled again, except for features that the config
  does not name; `stats()` counts both.

Does not tokenize, render, or serve HTTP.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from typing import Any, Callable, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import constrained_decoding
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import page_layout
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.engine import scheduler as scheduler_lib
from tunix.rl.multi_turn.engine import vision_cache
from tunix.rl.multi_turn.policy import base

_LOG = logging.getLogger(__name__)
_MAX_FAILURES = 3  # Device failures in a row that the engine recovers from.

EngineError = requests_lib.EngineError


# --- commands to the engine's thread -----------------------------------------


_MOST_WAITS = 10  # Of `admission_wait_s`, from a round's oldest request on.


class RoundTimer:
  """Times the rounds of a scheduler.

  Attributes:
    last_arrival: `time.monotonic()` of the newest request.
    paused: no round starts.
  """

  def __init__(
    self, scheduler: scheduler_lib.Scheduler, config: config_lib.EngineConfig
  ):
    self.last_arrival = 0.0
    self.paused = False
    self._scheduler = scheduler
    self._config = config
    self._lockstep = config.is_lockstep

  def wait_time(self) -> float | None:
    """Seconds until the next round may start; None: not before news."""
    slots = self._scheduler.slots
    if self.paused:
      return None
    if self._scheduler.busy:
      return 0.0
    if not slots.waiting:
      return None
    now = time.monotonic()
    if not self._lockstep:
      # Where a session is new, more of them may be about to open.
      enough = slots.size
      if all(slots.sessions[r.session].length for r in slots.waiting):
        enough = min(enough, len(slots.sessions))
      if len(slots.waiting) >= enough:
        return 0.0
      # While they keep coming: those of one round often answer together.
      wait = self._config.admission_wait_s
      latest = slots.waiting[0].submitted + _MOST_WAITS * wait
      return min(latest, self.last_arrival + wait) - now
    if self._batch_waits():
      return 0.0
    if all(s.request is not None for s in slots.sessions.values()):
      return 0.0
    return self.last_arrival + self._config.max_wait_s - now

  def start_lockstep_batch(self) -> None:
    """Makes the waiting requests the next batch, in session order."""
    scheduler = self._scheduler
    slots = scheduler.slots
    if scheduler.busy or self._batch_waits():
      return
    if any(s.request is None for s in slots.sessions.values()):
      scheduler.counters.lockstep_timeouts += 1
    batch = sorted(slots.waiting, key=lambda r: slots.sessions[r.session].order)
    slots.start_batch(batch)

  def _batch_waits(self) -> bool:
    """Returns whether requests of the present batch still wait."""
    slots = self._scheduler.slots
    return any(r in slots.waiting for r in slots.batch or ())


@dataclasses.dataclass(frozen=True)
class _Open:
  session: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Submit:
  request: requests_lib.Request


@dataclasses.dataclass(frozen=True, eq=False)
class _Cancel:
  request: requests_lib.Request


@dataclasses.dataclass(frozen=True)
class _Release:
  session: str


@dataclasses.dataclass(frozen=True, eq=False)
class _SetWeights:
  version: int
  params: scheduler_lib.Weights
  future: concurrent.futures.Future[int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Pause:
  future: concurrent.futures.Future[None]


@dataclasses.dataclass(frozen=True)
class _Resume:
  pass


_Command = _Open | _Submit | _Cancel | _Release | _SetWeights | _Pause | _Resume


def _by_device(tree: object) -> dict[jax.Device, int]:
  bytes_of: dict[jax.Device, int] = {}
  for array in jax.tree.leaves(tree):
    for shard in array.addressable_shards:
      bytes_of[shard.device] = bytes_of.get(shard.device, 0) + shard.data.nbytes
  return bytes_of


class RolloutEngine:
  """The in-process `PolicyClient`; see the module docstring.

  Use it as a context manager, or call `close`.
  """

  def __init__(
    self,
    model: base.Policy,
    processor: base.Processor,
    image_store: images_lib.ImageStore,
    config: config_lib.EngineConfig = config_lib.EngineConfig(),
    *,
    image_sizes: Sequence[tuple[int, int]] = (),
    banned_token_ids: Sequence[int] = (),
    seed: int = 0,
    version: int = 0,
  ):
    """Args:

      model: a flax nnx policy; its parameters are copied now, later ones come
        through `update_weights`.
      processor: the policy's host side.
      image_store: holds the images that prompts refer to.
      config: the settings.
      image_sizes: (width, height) in pixels of the screenshots to come.
      banned_token_ids: never sampled; the image placeholder must be here.
      seed: Seed of the engine's own randomness, for requests without a seed.
      version: Version of the model's present parameters, >= 0.

    Raises:
      ValueError: a setting does not go together with the policy.
    """
    self.config = config
    self._processor = processor
    config = page_layout.sized(device_state.cache_shapes(model), config)
    shards = device_state.shards_of(model)
    self._buckets = buckets_lib.choose(
      processor,
      config,
      image_sizes,
      shards,
      parameters=device_state.count_parameters(model),
    )
    self._lockstep = config.is_lockstep
    sizes = cache_memory.sizes(processor, config, self._buckets, shards)
    self._state = device_state.DeviceState(
      model,
      processor,
      pages=sizes.pages,
      page_size=self._buckets.page_size,
      vision_tokens=sizes.vision_tokens,
      weights=config.weights,
    )
    if not self._state.copies_pages:
      self._buckets = dataclasses.replace(self._buckets, copies=())
    layout = self._state.layout
    if layout is not None and layout.keeps_state:
      if config.drafts == "true":
        raise ValueError(
          "engine.drafts=true: a policy with recurrent layers cannot take back"
          " a wrong draft; use engine.drafts=auto or false"
        )
      self._buckets = dataclasses.replace(self._buckets, drafts=0)
    self._programs = programs_lib.Programs(
      self._state, banned_token_ids=banned_token_ids, entropies=config.entropies
    )
    self._scheduler = scheduler_lib.Scheduler(
      self._programs,
      vision_cache.PatchCache(
        image_store, processor, config.patch_cache_mib << 20
      ),
      self._buckets,
      config,
      seed=seed,
      version=version,
    )
    self._rounds = RoundTimer(self._scheduler, config)
    self._warm: frozenset[programs_lib.Variant] | None = None
    self._inbox: collections.deque[_Command] = collections.deque()
    self._wake = threading.Condition()
    self._thread: threading.Thread | None = None
    self._closed = False
    self._fatal: BaseException | None = None
    self._failures = 0

  @property
  def context_length(self) -> int:
    """Tokens that a sequence may have, sampled ones included."""
    return self.config.context_length

  # --- PolicyClient ----------------------------------------------------------

  def open_session(self, session: str) -> None:
    """Opens a session, so that lockstep waits for it. Thread-safe."""
    self._post(_Open(session))

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
    on_tokens: Callable[[np.ndarray], None] | None = None,
    priority: int = 0,
    stop_when: constrained_decoding.StopWhen | None = None,
    grammar: constrained_decoding.Grammar | None = None,
  ) -> policy_client.Completion:
    """Samples one completion; cancelling the await frees its slot.

    Args:
      prompt: tokens and images.
      sampling: how to sample.
      session: the session whose cache the prompt extends.
      on_tokens: called on the awaiting loop with int32[S] of new tokens, a
        few at a time, before this returns the completion of them all.
      priority: the lower is served first, and preempted last.
      stop_when: ends the completion at one of the sampled tokens.
      grammar: allows the tokens that may come next, a token a decode call;
        log-probs are of the distribution over these.

    Raises:
      ContextLimitError: the prompt leaves no room to sample.
      ValueError: the request is wrong; the message names the field.
      EngineError: the engine failed or is closed.
    """
    requests_lib.check(
      prompt,
      sampling,
      context_length=self.context_length,
      vocabulary=self._state.vocabulary,
      processor=self._processor,
    )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[policy_client.Completion] = loop.create_future()
    request = requests_lib.Request(
      session,
      prompt,
      sampling,
      loop,
      future,
      on_tokens,
      priority,
      stop_when,
      grammar,
    )
    self._post(_Submit(request))
    try:
      return await future
    except asyncio.CancelledError:
      self._post(_Cancel(request), quiet=True)
      raise

  async def release(self, session: str) -> None:
    """Forgets the session and its pages. Unknown ids are fine."""
    self._post(_Release(session), quiet=True)

  # --- weights ---------------------------------------------------------------

  @property
  def version(self) -> int:
    """Version of the weights in use. Lags `update_weights` by a decode call;
    await the future that returns to be sure."""
    return self._scheduler.version

  def update_weights(
    self, version: int, params: device_state.Params
  ) -> concurrent.futures.Future[int]:
    """Hands over new weights. Thread-safe, does not wait.

    Requests submitted after this call are served with these weights or newer
    ones.

    Args:
      version: recorded for each token they sample, >= 0.
      params: nnx module, nnx.State (full, or Param only) or its pure dict.
        The engine does not copy buffers that are on its device already: the
        publisher must first copy the ones that it will donate or delete.

    Returns:
      A future of the version, done when the engine has received them.

    Raises:
      ValueError: the parameters do not fit the policy.
    """
    if version < 0:
      raise ValueError(f"version must be >= 0, got {version}")
    prepared = self._state.prepare(params)
    received: concurrent.futures.Future[int] = concurrent.futures.Future()
    self._post(_SetWeights(version, prepared, received))
    return received

  # --- life cycle ------------------------------------------------------------

  def pause(self) -> concurrent.futures.Future[None]:
    """Stops sampling until `resume`; requests wait, none fails. Thread-safe.

    Returns:
      A future, done when the device is at rest.
    """
    at_rest: concurrent.futures.Future[None] = concurrent.futures.Future()
    self._post(_Pause(at_rest))
    return at_rest

  def resume(self) -> None:
    """Ends a `pause`: sampling resumes where it stopped."""
    self._post(_Resume())

  def warm_up(
    self, progress: Callable[[int, int, str], None] | None = None
  ) -> float:
    """Compiles every shape, two at a time; returns the seconds it took.

    Args:
      progress: called with (done, total, what) from this thread.
    """
    started = time.monotonic()
    variants = self._buckets.variants(self.config.features)
    with concurrent.futures.ThreadPoolExecutor(2, "engine-compile") as pool:
      futures = {pool.submit(self._programs.compile, v): v for v in variants}
      finished = concurrent.futures.as_completed(futures)
      for count, future in enumerate(finished, 1):
        future.result()
        if progress is not None:
          v = futures[future]
          what = f"{v.kind} {v.rows}x{v.tokens}" + " drafts" * bool(v.drafts)
          for feature, on in zip(config_lib.FEATURES, v.features):
            what += f" {feature}" * on
          if v.window:
            what += f" window {v.window}"
          progress(count, len(variants), what)
    self._warm = self._programs.compiled
    return time.monotonic() - started

  @property
  def healthy(self) -> bool:
    """False when closed, or failed beyond recovery."""
    return not self._closed and self._fatal is None

  @property
  def vocabulary(self) -> int:
    """Tokens that the policy knows."""
    return self._state.vocabulary

  @property
  def weight_bytes(self) -> int:
    """Bytes of the engine's own weights, on all devices together."""
    return sum(x.nbytes for x in self._state.params)

  @property
  def cache_tokens(self) -> int:
    """Tokens whose keys and values fit the KV cache."""
    pages = sum(pool.capacity for pool in self._scheduler.pools)
    return pages * self._state.page_size

  @property
  def cache_bytes(self) -> int:
    """Bytes of the KV cache, all its shards together."""
    return sum(x.nbytes for x in jax.tree.leaves(self._state.cache))

  @property
  def device_bytes(self) -> dict[str, int]:
    """Bytes of weights, KV cache and vision pool on the fullest device."""
    state = self._state
    return {
      name: max(_by_device(tree).values(), default=0)
      for name, tree in (
        ("weights", state.params),
        ("kv_cache", state.cache),
        ("vision_pool", state.pool),
      )
    }

  def stats(self) -> dict[str, float]:
    """Returns a snapshot of counters and gauges; seconds are wall seconds."""
    scheduler = self._scheduler
    counters = scheduler.counters.to_dict()
    pools = scheduler.pools
    pages = sum(pool.capacity for pool in pools)
    places = max(1, counters["decode_places"])
    compiled = self._programs.compiled
    late = compiled - (compiled if self._warm is None else self._warm)
    on_demand = sum(
      not buckets_lib.announced(v, self.config.features) for v in late
    )
    return {
      **counters,
      "batch_occupancy": (
        counters["decode_tokens"] - counters["accepted_tokens"]
      )
      / places,
      "waiting": len(scheduler.slots.waiting),
      "active": sum(r is not None for r in scheduler.slots.requests),
      "sessions": len(scheduler.slots.sessions),
      "pages": pages,
      "pages_held": pages - sum(pool.available for pool in pools),
      "shared_tokens": sum(pool.adopted for pool in pools),
      "version": scheduler.version,
      "compile_count": self._programs.compile_count,
      "compile_seconds": self._programs.compile_seconds,
      "compiles_after_warm_up": len(late) - on_demand,
      "compiles_on_demand": on_demand,
    }

  def close(self, timeout_s: float = 30.0) -> None:
    """Fails pending requests and ends the thread. Idempotent.

    Raises:
      TimeoutError: the thread is stuck in a device call; it is a daemon, and
        pending requests have failed all the same.
    """
    with self._wake:
      self._closed = True
      thread = self._thread
      self._wake.notify_all()
    if thread is None or thread is threading.current_thread():
      return
    thread.join(timeout_s)
    if thread.is_alive():
      self._fail_all(EngineError("the engine was closed"))
      raise TimeoutError(
        f"the engine's thread did not end within {timeout_s} s; a device call"
        " is stuck"
      )

  def __enter__(self) -> RolloutEngine:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.close()

  # --- the engine's thread ---------------------------------------------------

  def _post(self, command: _Command, quiet: bool = False) -> None:
    """Leaves a command for the thread; starts that if need be.

    Raises:
      EngineError: the engine is closed or has failed; not if `quiet`.
    """
    with self._wake:
      if self._closed or self._fatal is not None:
        if quiet:
          return
        if self._closed:
          raise EngineError("the engine is closed")
        raise EngineError(
          "the engine has failed for good at"
          f" {type(self._fatal).__name__}: {self._fatal}"
        ) from self._fatal
      self._inbox.append(command)
      if self._thread is None:
        self._thread = threading.Thread(
          target=self._run, name="rollout-engine", daemon=True
        )
        self._thread.start()
      self._wake.notify_all()

  def _run(self) -> None:
    reason: BaseException = EngineError("the engine was closed")
    counters = self._scheduler.counters
    try:
      while True:
        with self._wake:
          counters.enter("idle")
          while not (self._inbox or self._closed):
            wait = self._rounds.wait_time()
            if wait is not None and wait <= 0:
              break
            self._wake.wait(wait)
          counters.enter("host")
          if self._closed:
            return
          commands = list(self._inbox)
          self._inbox.clear()
        for command in commands:
          self._execute(command)
        self._deliver()
        wait = self._rounds.wait_time()
        if wait is not None and wait <= 0:
          self._step()
    except BaseException as error:  # pylint: disable=broad-except
      _LOG.exception("the rollout engine has failed for good")
      reason = EngineError(
        f"the engine has failed for good at {type(error).__name__}: {error}"
      )
      reason.__cause__ = error
      self._fatal = error
    finally:
      counters.enter(None)
      self._fail_all(reason)

  def _execute(self, command: _Command) -> None:
    scheduler = self._scheduler
    match command:
      case _Submit(request):
        self._rounds.last_arrival = time.monotonic()
        scheduler.counters.requests += 1
        try:
          scheduler.slots.enqueue(request)
        except ValueError as error:
          request.outcome = error
          scheduler.counters.failed += 1
          requests_lib.deliver([request])
      case _Cancel(request):
        scheduler.cancel(request)
      case _Open(session):
        scheduler.slots.open(session)
      case _Release(session):
        scheduler.release(session)
      case _Pause(future):
        self._rounds.paused = True
        requests_lib.settle(future, None)
      case _Resume():
        self._rounds.paused = False
      case _SetWeights(version, params, future):
        scheduler.set_weights(version, params)
        requests_lib.settle(future, version)

  def _step(self) -> None:
    scheduler = self._scheduler
    try:
      if self._lockstep:
        self._rounds.start_lockstep_batch()
      scheduler.step()
      self._failures = 0
    except Exception as error:  # pylint: disable=broad-except
      self._failures += 1
      _LOG.exception("a round of the rollout engine failed")
      if self._failures >= _MAX_FAILURES:
        raise
      scheduler.recover(error)
    self._deliver()

  def _deliver(self) -> None:
    finished = self._scheduler.take_done()
    if finished:
      requests_lib.deliver(finished)

  def _fail_all(self, error: BaseException) -> None:
    """Fails every request that has no outcome yet."""
    slots = self._scheduler.slots
    with self._wake:
      commands = list(self._inbox)
      self._inbox.clear()
    pending = [*slots.waiting, *slots.active]
    pending += [c.request for c in commands if isinstance(c, _Submit)]
    for request in pending:
      if request.outcome is None:
        request.outcome = error
    requests_lib.deliver(pending)
    for command in commands:
      if isinstance(command, (_SetWeights, _Pause)):
        requests_lib.settle(command.future, error)
