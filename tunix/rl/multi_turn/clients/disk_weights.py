"""Hands new weights over to engines in other processes, as files.

    weights = DiskWeights("/shared/weights", policy_saver(model, tokenizer),
                          [VllmEngine("http://127.0.0.1:8000")], [client])
    LearnerLoop(learner, queue, weights.publish, …)

Each version is a checkpoint in a directory of its own, written under another
name and renamed when all of it is on the disk; then every engine is asked to
load it. An engine never sees half of a checkpoint, and never the same path with
other weights, as some cache by path: each DiskWeights writes into a new folder,
and each version into a new folder in it.

vLLM takes a checkpoint in one of three ways (`TRANSFERS`): it reloads it by a
call into its workers, which any version since 0.11 does; by its transfer
backend `disk`, which also lets it record the version of the weights itself
(`weight_versions` of its answers); or it takes a LoRA adapter alone, some
hundredth of the bytes.

Promises: versions arrive in the order of publication; requests in flight
continue after the change, where the engine can; clients record a version only
once all engines sample with it, so that a token's recorded version is never
newer than its weights; an engine that failed to load stays paused. Every call
has a deadline. The newest `keep` versions stay on the disk, also after the run,
until a later run on the same machine has handed over weights of its own
(`locked_dir`).

Does not start engines. Needs httpx.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import threading
from typing import Any, Callable, Protocol, Sequence

from flax import nnx
from tunix.rl.multi_turn.clients import locked_dir
from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.policy import checkpoint
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import lora_files
from tunix.rl.multi_turn.policy import qwen_text

Save = Callable[[pathlib.Path, Any], None]
"""(new directory, parameters): writes a checkpoint into it."""


class HandOverError(RuntimeError):
  """An engine did not take new weights; names it and the fix."""


TRANSFERS = ("reload", "disk", "adapter")
"""Ways into a vLLM server; see the module docstring."""


class Engine(Protocol):
  """An engine in another process."""

  url: str

  def load(self, path: str, version: int) -> None:
    """Returns once the engine samples with the checkpoint at `path`.

    Raises:
      HandOverError: it does not.
    """
    ...


def policy_saver(
    model: Any,
    tokenizer: str | pathlib.Path = "tiny_vl",
    dtype: str = "float32",
) -> Save:
  """Writes parameters as `policy.checkpoint` does, for `transformers` to read.

  Args:
    model: of the architecture; its own parameters are not written. An adapter
      is merged into the weights written.
    tokenizer: directory or shipped name whose files are copied.
    dtype: of the stored tensors.
  """
  lock = threading.Lock()

  def save(directory: pathlib.Path, params: Any) -> None:
    with lock:
      filled = nnx.clone(model)
      state = nnx.state(params) if isinstance(params, nnx.Module) else params
      nnx.update(filled, state)
    if isinstance(filled, qwen_text.QwenText) and lora.has_adapter(filled):
      lora.merge(filled)
    checkpoint.save_policy(directory, filled, tokenizer, dtype)

  return save


def adapter_saver(
    model: qwen_text.QwenText, base_model_name: str = ""
) -> Save:
  """Writes the LoRA adapter alone, as PEFT does; for transfer="adapter".

  Args:
    model: of the architecture, with an adapter; its own is not written.
    base_model_name: of the weights that the engine serves.

  Raises:
    ValueError: the model has no adapter.
  """
  lora.need_adapter(model)
  lock = threading.Lock()

  def save(directory: pathlib.Path, params: Any) -> None:
    with lock:
      filled = nnx.clone(model)
      state = nnx.state(params) if isinstance(params, nnx.Module) else params
      nnx.update(filled, state)
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
  ):
    """Args:

      directory: where versions are written; on a disk that the engines see.
      save: writes one.
      engines: load each version.
      clients: their `version` is set to the version engines sample with.
      keep: versions left on the disk, those published last.
      seen_at: `directory` as the engines call it; "" is the same.

    Raises:
      ValueError: naming the argument.
    """
    if keep < 1:
      raise ValueError(f"keep must be >= 1, got {keep}")
    if not engines:
      raise ValueError("engines is empty; give those that sample")
    self._directory = pathlib.Path(directory).expanduser().absolute()
    self._seen_at = pathlib.PurePosixPath(seen_at or str(self._directory))
    # The directory may be that of other runs too: before this one, or on
    # another machine at the same time.
    self._folder = locked_dir.LockedDir(self._directory)
    self._save = save
    self._engines = list(engines)
    self._clients = list(clients)
    self._keep = keep
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "tunix-weights")
    self._lock = threading.Lock()
    self._published = -1
    self._times = 0
    self._written: list[pathlib.Path] = []
    self._cleared = False
    self.version = -1
    """Version that all engines sample with; -1 before the first one."""

  def publish(
      self, version: int, params: Any
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
      ValueError: of the version.
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
      done = self._thread.submit(self._hand_over, version, params)
      self._published = version
    return done

  def close(self) -> None:
    """Waits for hand-overs in progress. Idempotent."""
    self._thread.shutdown(wait=True)
    self._folder.release()

  def _hand_over(self, version: int, params: Any) -> int:
    path = self._write(version, params)
    seen = str(self._seen_at / self._folder.name / path.name)
    workers = len(self._engines)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      loading = [pool.submit(e.load, seen, version) for e in self._engines]
    for done in loading:  # All have ended; raises the first failure.
      done.result()
    self.version = version
    for client in self._clients:
      client.version = version
    self._forget()
    return version

  def _write(self, version: int, params: Any) -> pathlib.Path:
    """The checkpoint, whole or not at all."""
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


class VllmEngine:
  """A vLLM server with its development endpoints open (`VllmLaunch`).

  Requests in flight pause while weights change and continue with the new
  ones; caches computed with the old ones are dropped.
  """

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

      url: without /v1.
      api_key: presented as a bearer token; "" for none.
      timeout_s: of loading.
      transfer: one of `TRANSFERS`; the server must have been started for it
        (`VllmLaunch`).
      adapter: the server's name of the adapter, by which requests ask for it.

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
    self.url = _root(url)
    self._http = _Http(self.url, api_key, timeout_s)
    self._transfer = transfer
    self._adapter = adapter

  def load(self, path: str, version: int) -> None:
    self._http.post("/pause?mode=keep&clear_cache=true")
    try:
      if self._transfer == "disk":
        self._transfer_from_disk(path, version)
      elif self._transfer == "adapter":
        self._http.post(
            "/v1/load_lora_adapter",
            {
                "lora_name": self._adapter,
                "lora_path": path,
                "load_inplace": True,
            },
        )
      else:
        self._http.post(
            "/collective_rpc",
            {
                "method": "reload_weights",
                "kwargs": {"weights_path": path, "is_checkpoint_format": True},
            },
        )
      # Those of frozen requests too: they are computed again.
      answer = self._http.post(
          "/reset_prefix_cache?reset_running_requests=true"
      )
      if isinstance(answer, dict) and answer.get("success") is False:
        raise HandOverError(
            f"{self.url} kept caches computed with older weights"
        )
    except HandOverError as error:
      raise HandOverError(
          f"{error}. {self.url} stays paused, as it may hold half of these"
          " weights; restart it"
      ) from error
    self._http.post("/resume")

  def _transfer_from_disk(self, path: str, version: int) -> None:
    self._http.post("/start_weight_update")
    self._http.post("/update_weights", {"update_info": {"path": path}})
    # From here on its answers name it, for the tokens sampled with it.
    self._http.post("/finish_weight_update", {"weight_version": str(version)})


class SglangEngine:
  """An SGLang server (also sglang-jax, where it has this endpoint)."""

  def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0):
    self.url = _root(url)
    self._http = _Http(self.url, api_key, timeout_s)

  def load(self, path: str, version: int) -> None:
    answer = self._http.post(
        "/update_weights_from_disk",
        {
            "model_path": path,
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
        },
    )
    if not isinstance(answer, dict) or answer.get("success") is not True:
      said = answer.get("message") if isinstance(answer, dict) else answer
      raise HandOverError(f"{self.url} did not load {path}: {said}")


_NEEDED = {
    "/v1/load_lora_adapter": (
        "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (--lora-rank)"
    ),
    "/start_weight_update": (
        "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
        " '{\"backend\":\"disk\"}' (--disk-transfer true)"
    ),
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

  def post(self, path: str, body: Any = None) -> Any:
    """The answer's JSON, None for an answer without."""
    url = self._url + path
    try:
      return concurrency.drive(self._post(url, body))
    except http.CallError as error:
      answer = error.answer
      if answer is not None and answer.ok:
        return None
      if error.late:
        text = f"{url} did not answer within timeout_s={self._timeout_s:g} s"
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

  async def _post(self, url: str, body: Any) -> Any:
    calls = http.Http(headers=self._headers, proxies=True)
    try:
      return await calls.json("POST", url, self._timeout_s, body=body)
    finally:
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
