"""Hands new weights over to engines in other processes, as files.

    weights = DiskWeights("/shared/weights", policy_saver(model, tokenizer),
                          [VllmEngine("http://127.0.0.1:8000")], [client])
    LearnerLoop(learner, queue, weights.publish, …)

Each version is a checkpoint in a directory of its own, written under another
name and renamed when all of it is on the disk; then every engine is asked to
load it. An engine never sees half of a checkpoint, and never the same path with
other weights, as some cache by path: each DiskWeights writes into a new folder,
and each version into a new folder in it.

vLLM takes weights in one of two ways (`TRANSFERS`): its workers reload a whole
checkpoint, or it loads a LoRA adapter alone, some hundredth of the bytes. Its
own transfer backends (nccl, ipc and others) need a process group with the
learner and are not used.

With a `Probe` each hand-over proves itself: the engine's log-probs are compared
with the policy's own. A mismatch repeats the hand-over once, then fails it.

Promises: versions arrive in the order of publication; clients record a version
only once all engines sample with it, so that a token's recorded version is
never newer than its weights; an engine that was paused is resumed, also where
loading failed (`wake` resumes one that a killed process left paused). After a
failure `failure` is set: the engine may hold half of the weights, and nothing
may be sampled from it. Every call has a deadline, and `close` ends the one in
progress; no thread of a hand-over holds the process's end. The newest `keep`
versions stay on the disk, also after the run, until a later run on the same
machine has handed over weights of its own (`locked_dir`).

Does not start engines. Needs httpx.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import os
import pathlib
import shutil
import threading
import time
from typing import Any, Callable, Protocol, Sequence

from flax import nnx
from tunix.rl.multi_turn.clients import hand_over_probe
from tunix.rl.multi_turn.clients import locked_dir
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.net import worker_pool
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import lora_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

_LOG = logging.getLogger(__name__)

Save = Callable[[pathlib.Path, Any], None]
"""(new directory, parameters): writes a checkpoint into it."""


class HandOverError(RuntimeError):
  """An engine did not take new weights; names it and the fix."""


TRANSFERS = ("reload", "adapter")
"""Ways into a vLLM server; see the module docstring."""


class Engine(Protocol):
  """An engine in another process.

  Attributes:
    url: Its address.
    transfer: The way that weights take into it.
    advice: What to look at where it samples with other weights.
  """

  url: str
  transfer: str
  advice: str

  def load(self, path: str, version: int) -> None:
    """Returns once the engine samples with the checkpoint at `path`.

    Raises:
      HandOverError: it does not.
    """
    ...

  def wake(self) -> None:
    """Resumes an engine that an earlier run left paused.

    Raises:
      HandOverError: It cannot be reached, or stays paused.
    """
    ...

  def interrupt(self) -> None:
    """Ends the call in progress; further ones fail, but for a resumption."""
    ...


def policy_saver(
  model: base.Policy,
  tokenizer: str | pathlib.Path = "tiny_vl",
  dtype: str = "float32",
  untied: bool = False,
) -> Save:
  """Writes parameters as `checkpoints.checkpoint` does, for `transformers`.

  Args:
    model: A model of the architecture; its own parameters are not written. An
      adapter is merged into the weights written.
    tokenizer: Directory or shipped name whose files are copied.
    dtype: Type of the stored tensors.
    untied: Writes a tied embedding twice. vLLM needs it: a reload of one
      without its own output matrix leaves the old one in place.
  """
  lock = threading.Lock()

  def save(directory: pathlib.Path, params: object) -> None:
    filled = _filled(model, params, lock)
    if isinstance(filled, qwen_text.QwenText) and lora.has_adapter(filled):
      lora.merge(filled)
    checkpoint.save_policy(directory, filled, tokenizer, dtype, untied)

  return save


def _filled(model: Any, params: object, lock: threading.Lock) -> Any:
  """Returns a copy of the model with these parameters."""
  with lock:
    filled = nnx.clone(model)
    state = nnx.state(params) if isinstance(params, nnx.Module) else params
    nnx.update(filled, state)
  return filled


def adapter_saver(model: qwen_text.QwenText, base_model_name: str = "") -> Save:
  """Writes the LoRA adapter alone, as PEFT does; for transfer="adapter".

  Args:
    model: A model of the architecture with an adapter; its own parameters are
      not written.
    base_model_name: Name of the weights that the engine serves.

  Raises:
    ValueError: the model has no adapter.
  """
  lora.need_adapter(model)
  lock = threading.Lock()

  def save(directory: pathlib.Path, params: object) -> None:
    filled = _filled(model, params, lock)
    lora_files.save(directory, filled, base_model_name)

  return save


class DiskWeights:
  """See the module docstring. `close` it at the end."""

  def __init__(
    self,
    directory: str | pathlib.Path,
    save: Save,
    engines: Sequence[Engine],
    clients: Sequence[Any] = (),
    *,
    keep: int = 2,
    seen_at: str = "",
    probes: Sequence[hand_over_probe.Probe] = (),
  ):
    """Args:

      directory: Folder of the versions, on a disk that the engines see.
      save: Function that writes a version.
      engines: Engines that load each version.
      clients: Clients whose `version` is set to the version that the engines
        sample with.
      keep: Number of versions left on the disk, the newest.
      seen_at: The engines' own path of `directory`; "" is the same.
      probes: One for each engine, in order; () compares nothing.

    Raises:
      ValueError: naming the argument.
    """
    if keep < 1:
      raise ValueError(f"keep must be >= 1, got {keep}")
    if not engines:
      raise ValueError("engines is empty; give those that sample")
    if probes and len(probes) != len(engines):
      raise ValueError(
        f"{len(probes)} probes for {len(engines)} engines; give one each"
      )
    self._directory = pathlib.Path(directory).expanduser().absolute()
    self._seen_at = pathlib.PurePosixPath(seen_at or str(self._directory))
    # The directory may be that of other runs too: before this one, or on
    # another machine at the same time.
    self._folder = locked_dir.LockedDir(self._directory)
    self._save = save
    self._engines = list(engines)
    self._clients = list(clients)
    self._keep = keep
    self._probes = list(probes)
    self._thread = worker_pool.WorkerPool(1, idle=None, name="tunix-weights")
    self._jobs: list[worker_pool.Job] = []
    self._lock = threading.Lock()
    self._published = -1
    self._times = 0
    self._written: list[pathlib.Path] = []
    self._cleared = False
    self._closing = False
    self.version = -1
    """Version that all engines sample with; -1 before the first one."""
    self.loading: concurrent.futures.Future[None] | None = None
    """Done when the engines have loaded; None while none is loading."""
    self.on_loading: Callable[[], None] = lambda: None
    """Called, in another thread, when `loading` has changed."""
    self.failure: BaseException | None = None
    """Why the last load failed: engines may hold half of the weights."""

  def publish(
    self, version: int, params: object
  ) -> concurrent.futures.Future[int]:
    """Hands over weights; does not wait.

    Args:
      version: >= 0 and never lower than the one before, recorded for what is
        sampled with them.
      params: a copy that belongs to the receiver, or a module.

    Returns:
      A future of the version, done when all engines sample with it. Its
      exceptions: HandOverError, and what writing raises.

    Raises:
      ValueError: The version is negative or older than the last one.
    """
    if version < 0:
      raise ValueError(f"version must be >= 0, got {version}")
    with self._lock:
      if version < self._published:
        raise ValueError(
          f"version {version} is older than {self._published}, which was"
          " published before; a token's recorded version could be newer than"
          " its weights. Give older weights a new version, or hand them over"
          " by another DiskWeights"
        )
      # The future first: one that is closed has published nothing.
      job = self._thread.submit(lambda: self._hand_over(version, params))
      self._jobs = [j for j in self._jobs if not j.future.done()] + [job]
      self._published = version
    return job.future

  def wake(self) -> None:
    """See `Engine.wake`."""
    for engine in self._engines:
      engine.wake()

  def close(self, timeout_s: float | None = None) -> None:
    """Ends hand-overs: begins no further step of them. Idempotent.

    Args:
      timeout_s: Longest wait for the step in progress, whose call is ended
        then; None: its own deadline.
    """
    self._closing = True
    for job in self._jobs:
      if not job.running:
        self._thread.abandon(job)  # Where it has not begun.
    current = [job.future for job in self._jobs if not job.future.done()]
    if not concurrent.futures.wait(current, timeout_s).not_done:
      self._thread.close()
      self._folder.release()
      return
    for engine in self._engines:
      engine.interrupt()
    urls = ", ".join(engine.url for engine in self._engines)
    if concurrent.futures.wait(current, _INTERRUPTED_S).not_done:
      _LOG.warning("a hand-over to %s does not end; its files stay", urls)
      return
    _LOG.warning("the hand-over to %s was ended half-way", urls)
    self._thread.close()
    self._folder.release()

  def _check_open(self) -> None:
    if self._closing:
      raise HandOverError("the hand-over was ended by close()")

  def _hand_over(self, version: int, params: object) -> int:
    self._check_open()
    path = self._write(version, params)
    engine_path = str(self._seen_at / self._folder.name / path.name)
    loading: concurrent.futures.Future[None] = concurrent.futures.Future()
    self.loading = loading
    self.on_loading()
    try:
      self._check_open()
      self._load(engine_path, version, self._engines)
      self._prove(engine_path, version, params)
      self.failure = None
      self.version = version
      for client in self._clients:
        client.version = version
    except BaseException as error:
      self.failure = error
      raise
    finally:
      self.loading = None
      loading.set_result(None)
      self.on_loading()
    self._forget()
    return version

  def _load(self, path: str, version: int, engines: Sequence[Engine]) -> None:
    pool = worker_pool.WorkerPool(len(engines), name="tunix-load")
    loads = [
      pool.submit(functools.partial(engine.load, path, version)).future
      for engine in engines
    ]
    concurrent.futures.wait(loads)
    pool.close()
    for load in loads:  # All have ended; raises the first failure.
      load.result()

  def _prove(self, path: str, version: int, params: object) -> None:
    """Compares each engine with the weights; repeats a hand-over once."""
    for engine, probe in zip(self._engines, self._probes):
      about = f"{engine.url} (transfer={engine.transfer}, version {version})"
      try:
        self._check_open()
        try:
          difference = probe.check(params)
        except hand_over_probe.ProbeMismatch as error:
          _LOG.warning("%s is handed over again: %s", about, error)
          self._check_open()
          self._load(path, version, [engine])
          difference = probe.check(params)
      except hand_over_probe.ProbeMismatch as error:
        raise HandOverError(
          f"{about} does not sample with the weights that it was given, also"
          f" after a second hand-over: {error}. Check that no other run gives"
          " it weights, and that the server's --dtype and external.dtype are"
          f" the same type; {engine.advice}"
        ) from error
      except HandOverError:
        raise
      except Exception as error:
        raise HandOverError(
          f"{about}: its weights could not be compared with the policy's:"
          f" {type(error).__name__}: {error}. Look into the server's log, and"
          " start it again by the command that `python -m"
          " tunix.rl.multi_turn.clients.vllm` prints"
        ) from error
      _LOG.info("%s: log-probs within %.2g nats", about, difference)

  def _write(self, version: int, params: object) -> pathlib.Path:
    """Writes the checkpoint, whole or not at all; returns its folder."""
    folder = self._folder.make()
    self._times += 1  # A version may be published again.
    final = folder / f"{self._times:06d}-v{version:08d}"
    part = folder / f"{final.name}.part"
    try:
      part.mkdir()
      self._save(part, params)
      for file in sorted(part.rglob("*")):
        if file.is_file():
          _sync(file)
      _sync(part)
      part.rename(final)
      self._written.append(final)
      _sync(folder)
      _sync(self._directory)
    except BaseException:
      shutil.rmtree(part, ignore_errors=True)
      with contextlib.suppress(OSError):
        folder.rmdir()  # Unless there are others in it.
      raise
    return final

  def _forget(self) -> None:
    for old in self._written[: -self._keep]:
      shutil.rmtree(old, ignore_errors=True)
    del self._written[: -self._keep]
    if not self._cleared:  # Now that no engine is to load theirs any more.
      self._cleared = True
      self._folder.delete_ended()


class _PausedEngine(abc.ABC):
  """An engine that is paused while it takes weights, and resumed in any case.

  Requests in flight are cut off and answered with their tokens so far, of the
  old weights; who asked continues from there with the new ones
  (`OpenAIClient`).
  """

  _resume_path = ""

  def __init__(self, url: str, api_key: str, timeout_s: float):
    self.url = _root(url)
    self._http = _Http(self.url, api_key, timeout_s)

  @abc.abstractmethod
  def _pause(self) -> None:
    """Ends the requests in flight; further ones wait."""

  @abc.abstractmethod
  def _take(self, path: str, version: int) -> None:
    """Loads the weights and drops what was computed with older ones."""

  def load(self, path: str, version: int) -> None:
    """See `Engine.load`."""
    about = "It has the weights of before"
    end = ""
    try:
      # Answered or not: it may have paused all the same.
      self._pause()
      about = f"{self.url} may hold half of these weights"
      end = "; restart it before it serves others"
      self._take(path, version)
    except BaseException as error:
      outcome = self._resumed()
      if not isinstance(error, Exception):
        raise
      raise HandOverError(f"{error}. {about} and {outcome}{end}") from error
    if (outcome := self._resumed()) != _RESUMED:
      raise HandOverError(f"{self.url} has the new weights and {outcome}")

  def interrupt(self) -> None:
    self._http.interrupt()

  def _resumed(self) -> str:
    """Resumes the server; says whether it could."""
    for pause_s in _RESUME_AFTER_S:
      ending = self._http.interrupted
      if ending and pause_s:
        break
      time.sleep(pause_s)
      try:
        self._http.post(
          self._resume_path,
          {},
          timeout_s=_END_S if ending else _RESUME_S,
          at_the_end=True,
        )
        return _RESUMED
      except HandOverError as error:
        _LOG.warning("%s", error)
    return f"could not be resumed (POST {self.url}{self._resume_path})"


class VllmEngine(_PausedEngine):
  """A vLLM server with its development endpoints open (`VllmLaunch`).

  Frozen in place, requests with images would have lost their features.
  """

  _resume_path = "/resume"
  advice = (
    "start it with --logprobs-mode processed_logprobs, or use another"
    " external.transfer"
  )

  def __init__(
    self,
    url: str,
    *,
    api_key: str = "",
    timeout_s: float = 600.0,
    transfer: str = "reload",
    adapter: str = "",
  ):
    """Args:

      url: Address of the server, without /v1.
      api_key: Key that is presented as a bearer token; "" for none.
      timeout_s: Deadline of loading, in seconds.
      transfer: One of `TRANSFERS`; the server must have been started for it
        (`VllmLaunch`).
      adapter: The server's name of the adapter, which requests ask for.

    Raises:
      ValueError: naming the argument.
    """
    if transfer not in TRANSFERS:
      raise ValueError(
        f"transfer={transfer!r} must be one of {', '.join(TRANSFERS)}"
      )
    if (transfer == "adapter") != bool(adapter):
      raise ValueError(
        f"transfer={transfer} and adapter={adapter!r}: an adapter is given a"
        " name, and nothing else is"
      )
    super().__init__(url, api_key, timeout_s)
    self.transfer = transfer
    self._adapter = adapter

  def wake(self) -> None:
    # Servers before 0.32, and those that take no weights, do not say.
    answer = self._http.call("GET", "/is_paused", optional=True)
    if not isinstance(answer, dict) or answer.get("is_paused") is not True:
      return
    outcome = self._resumed()
    _LOG.warning(
      "%s was left paused by an earlier run, and %s", self.url, outcome
    )
    if outcome != _RESUMED:
      raise HandOverError(f"{self.url} is paused and {outcome}; restart it")

  def _pause(self) -> None:
    self._http.post("/pause?mode=abort&clear_cache=true")

  def _take(self, path: str, version: int) -> None:
    self._transfer_weights(path)
    # Its answers name it from here on; servers before 0.32 cannot.
    self._http.post(
      "/update_weight_version", {"new_version": str(version)}, optional=True
    )
    answer = self._http.post("/reset_prefix_cache")
    if isinstance(answer, dict) and answer.get("success") is False:
      raise HandOverError(f"{self.url} kept caches computed with older weights")

  def _transfer_weights(self, path: str) -> None:
    if self.transfer == "adapter":
      self._http.post(
        "/v1/load_lora_adapter",
        {"lora_name": self._adapter, "lora_path": path, "load_inplace": True},
      )
    else:
      self._http.post(
        "/collective_rpc",
        {
          "method": "reload_weights",
          "kwargs": {"weights_path": path, "is_checkpoint_format": True},
        },
      )


class SglangEngine(_PausedEngine):
  """An SGLang server."""

  _resume_path = "/continue_generation"
  transfer = "update_weights_from_disk"
  advice = (
    "start it with SGLANG_VLM_CACHE_SIZE_MB=0, or it keeps what an older"
    " vision tower computed of an image"
  )

  def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0):
    super().__init__(url, api_key, timeout_s)

  def wake(self) -> None:
    """Resumes it: it does not say whether it is paused."""
    self._http.post(self._resume_path, {}, optional=True)

  def _pause(self) -> None:
    self._http.post("/pause_generation", {"mode": "abort"})

  def _take(self, path: str, version: int) -> None:
    answer = self._http.post(
      "/update_weights_from_disk",
      {
        "model_path": path,
        "weight_version": str(version),
        "abort_all_requests": False,
        "flush_cache": False,
      },
    )
    if not isinstance(answer, dict) or answer.get("success") is not True:
      reason = answer.get("message") if isinstance(answer, dict) else answer
      raise HandOverError(f"{self.url} did not load {path}: {reason}")
    # Not with the call above: a request that has been answered may not have
    # been put away yet, and then it refuses without waiting.
    self._http.post(f"/flush_cache?timeout={_FLUSH_S}")


_FLUSH_S = 30
"""Seconds that SGLang may take to put cut requests away."""
_RESUMED = "was resumed"
_RESUME_AFTER_S = (0.0, 1.0, 5.0)
_RESUME_S = 30.0
_END_S = 2.0
_INTERRUPTED_S = 2 * _END_S
"""Longest wait for a call that was ended, and the resumption after it."""

_NEEDED = {
  "/v1/load_lora_adapter": (
    "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (--lora-rank)"
  )
}
"""Path -> what a server must be started with to have it."""


class _Http:
  """Calls with a deadline, whose errors name the fix."""

  def __init__(self, url: str, api_key: str, timeout_s: float):
    if not timeout_s > 0:
      raise ValueError(f"timeout_s must be > 0 seconds, got {timeout_s}")
    self._url = url
    self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._calls: set[
      tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]
    ] = set()
    self.interrupted = False

  def interrupt(self) -> None:
    """See `Engine.interrupt`. Thread-safe."""
    with self._lock:
      self.interrupted = True
      for loop, task in self._calls:
        if task is not None:
          loop.call_soon_threadsafe(task.cancel)

  def post(self, path: str, body: object = None, **options: Any) -> Any:
    """See `call`."""
    return self.call("POST", path, body, **options)

  def call(
    self,
    method: str,
    path: str,
    body: object = None,
    optional: bool = False,
    timeout_s: float = math.inf,
    at_the_end: bool = False,
  ) -> Any:
    """Returns the answer's JSON, None for an answer without.

    Args:
      method: Method of HTTP.
      path: Path of the call, with its query.
      body: JSON of the request.
      optional: A server without this path is fine; returns None.
      timeout_s: Deadline, where that of all calls is longer.
      at_the_end: The call is made after `interrupt`, too.
    """
    url = self._url + path
    timeout_s = min(timeout_s, self._timeout_s)
    try:
      return concurrency.drive(
        self._call(method, url, body, timeout_s, at_the_end)
      )
    except asyncio.CancelledError:
      raise HandOverError(f"{url}: the run ended before its answer") from None
    except http.CallError as error:
      answer = error.answer
      if answer is not None and answer.ok:
        return None
      if optional and error.status == 404:
        return None
      if error.late:
        text = f"{url} did not answer within timeout_s={timeout_s:g} s"
      elif answer is None:
        text = f"{url} cannot be reached: {error}"
      elif error.status == 404:
        text = (
          f"{url} is not served; start vLLM as"
          " python -m tunix.rl.multi_turn.clients.vllm prints it, with"
          f" {_NEEDED.get(path, 'VLLM_SERVER_DEV_MODE=1')}"
        )
      else:
        text = f"{url} answered {answer.quoted()}"
      raise HandOverError(text) from error

  async def _call(
    self,
    method: str,
    url: str,
    body: object,
    timeout_s: float,
    at_the_end: bool,
  ) -> Any:
    call = asyncio.get_running_loop(), asyncio.current_task()
    # Under the lock, so that `interrupt` sees each call that it must end.
    with self._lock:
      if not at_the_end:
        if self.interrupted:
          raise asyncio.CancelledError()
        self._calls.add(call)
    calls = http.Http(headers=self._headers, proxies=True)
    try:
      return await calls.json(method, url, timeout_s, body=body)
    finally:
      with self._lock:
        self._calls.discard(call)
      await calls.aclose()


def _root(url: str) -> str:
  if not url.startswith(("http://", "https://")):
    raise ValueError(f"url={url!r} is not a URL; give http://host:port")
  return url.rstrip("/").removesuffix("/v1")


def _sync(path: pathlib.Path) -> None:
  """Returns once the file or folder is on the disk."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
