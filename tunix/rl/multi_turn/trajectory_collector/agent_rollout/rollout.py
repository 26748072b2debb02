"""Makes one rollout of a trainer out of a rollout buffer's data.

Promises: the service is started once for each data buffer, whatever that holds;
errors count against `fetch_trajectory_retry_times`, between two of which a
pause lies; the event loop is never blocked; samples that the service has
delivered are not lost: those that a rollout does not take stay in the data
buffer, also when the rollout fails.

Does not: filter invalid groups (the service does), or evaluate.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Callable, Mapping, Sequence
import weakref

from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector import loss_mask as loss_mask_lib
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import (
  samples as samples_lib,
)

_LOG = logging.getLogger(__name__)
POLL_S = 5.0
"""Pause before each fetch, and after an error."""
PREFIX = "rollout/"
"""Of every name that is logged."""
_FINISHED = "finished_groups"
_started: weakref.WeakSet[Any] = weakref.WeakSet()


async def generate_agent_rollout(
  args: Any,
  rollout_id: int,
  data_buffer: samples_lib.DataBuffer,
  evaluation: bool = False,
) -> list[samples_lib.Sample]:
  """Collects one rollout.

  Args:
    args: Arguments of the trainer, named as its command line names them.
    rollout_id: number of the rollout; also the key of its finished instance
      ids in the data buffer's metadata.
    data_buffer: takes the samples; its metadata names instances to skip.
    evaluation: not supported; evaluate checkpoints by themselves.

  Returns:
    The samples of `rollout_batch_size` groups, group after group, as the data
    buffer's filter chooses them.

  Raises:
    NotImplementedError: `evaluation`.
    ClientError, ValueError, TimeoutError: of the last try, when
      `fetch_trajectory_retry_times` errors are reached.
  """
  if evaluation:
    raise NotImplementedError(
      "evaluation=True: a rollout buffer does not evaluate; evaluate a"
      " checkpoint by itself"
    )
  url = args.agent_rollout_buffer_url
  errors = _Errors(getattr(args, "fetch_trajectory_retry_times", -1))
  if data_buffer not in _started:
    # An argument that is missing is no error that may pass.
    client.start_payload(url, args, data_buffer.get_metadata())
    answer = await errors.until_done(
      lambda: asyncio.to_thread(
        client.start_rollout, url, args, data_buffer.get_metadata()
      )
    )
    _started.add(data_buffer)
    _LOG.info("rollout %d: %s", rollout_id, answer)
  needed = size = args.rollout_batch_size
  while True:
    if len(data_buffer) < needed:
      meta = await _fill(args, url, rollout_id, data_buffer, needed, errors)
      log_raw_info(args, meta, rollout_id)
    chosen = data_buffer.get_samples(size, rollout_id)
    if len(chosen) >= size:
      break
    # The filter passes over the groups that are left. A checkpoint may be taken
    # during the next read, and holds what is in the data buffer.
    needed = len(data_buffer) + size
    data_buffer.put_back(chosen)
  return [sample for group in chosen for sample in group]


async def _fill(
  args: object,
  url: str,
  rollout_id: int,
  data_buffer: samples_lib.DataBuffer,
  size: int,
  errors: _Errors,
) -> list[dict[str, Any]]:
  """Reads until the data buffer has `size` groups; the reads' meta information.

  The service has acknowledged a read when it is answered: each is in the data
  buffer, with the ids it finished, before the next is tried.
  """
  all_meta: list[dict[str, Any]] = []
  token = getattr(args, "rollout_buffer_token", "")
  options: dict[str, Any] = {"token": token} if token else {}
  while len(data_buffer) < size:
    await asyncio.sleep(getattr(args, "fetch_interval_s", POLL_S))
    items, meta = await errors.until_done(lambda: _usable(url, options))
    if meta:
      all_meta.append(meta)
    await asyncio.to_thread(_add, args, data_buffer, items)
    # After the data is safe in the buffer. A rollout that failed before may
    # have left some.
    earlier = data_buffer.get_metadata().get(str(rollout_id), [])
    finished = dict.fromkeys([*earlier, *finished_ids([meta], items)])
    data_buffer.update_metadata({str(rollout_id): list(finished)})
  return all_meta


async def _usable(
  url: str, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """A read without the groups that cannot be used, which are logged.

  Raises:
    RefusedItemsError: nothing else was in it.
    ClientError, ValueError, TimeoutError: see `client.get_rollout_data`.
  """
  try:
    return await client.get_rollout_data(api_base_url=url, **options)
  except client.RefusedItemsError as error:
    if not error.items:
      raise
    _LOG.warning("groups that cannot be used are left out: %s", error)
    return error.items, error.meta_info


class _Errors:
  """Counts a rollout's errors against its limit; -1 is none."""

  def __init__(self, limit: int):
    self._limit = limit
    self._count = 0

  async def until_done(self, call: Callable[[], Any]) -> Any:
    while True:
      try:
        return await call()
      except (http.CallError, ValueError, TimeoutError) as error:
        self._count += 1
        if 0 <= self._limit <= self._count:
          raise
        _LOG.warning(
          "try %d failed, again in %g s: %s", self._count, POLL_S, error
        )
        await asyncio.sleep(POLL_S)


def _add(
  args: object,
  data_buffer: samples_lib.DataBuffer,
  items: Sequence[Mapping[str, Any]],
) -> None:
  generator = None
  if any("tokens" not in i and "sequences" not in i for i in items):
    generator = loss_mask_lib.make(
      getattr(args, "loss_mask_type", None) or "qwen", tokenizer_of(args)
    )
  data_buffer.add_samples(
    [
      [s for item in group for s in samples_lib.make_samples(item, generator)]
      for group in samples_lib.newest_first(items)
    ]
  )


def tokenizer_of(args: object) -> Any:
  """`args.tokenizer`, or that of the directory `args.hf_checkpoint`.

  Raises:
    ValueError: neither.
  """
  tokenizer = getattr(args, "tokenizer", None)
  if tokenizer is not None:
    return tokenizer
  path = getattr(args, "hf_checkpoint", None)
  if not path:
    raise ValueError(
      "--hf-checkpoint is missing: items of text only need its tokenizer"
    )
  import transformers  # pylint: disable=g-import-not-at-top

  try:
    return transformers.AutoTokenizer.from_pretrained(
      path, local_files_only=True
    )
  except (OSError, ValueError) as error:
    raise ValueError(
      f"--hf-checkpoint {path}: no tokenizer: {str(error).splitlines()[0]}"
    ) from None


def finished_ids(
  all_meta_info: Sequence[Mapping[str, Any]],
  items: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
  """Instances that are done: those the service names, and those of items."""
  names: dict[str, None] = {}
  for meta in all_meta_info:
    for name in meta.get(_FINISHED) or ():
      names[str(name)] = None
  for item in items:
    names[str(item["instance_id"])] = None
  return list(names)


def raw_info(all_meta_info: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Totals of the reads' meta information; means are weighed by samples."""
  total = sum(int(m.get("total_samples") or 0) for m in all_meta_info)
  totals: dict[str, float] = {f"{PREFIX}no_filter/total_samples": total}
  weighed = [
    (float(m["avg_reward"]), int(m.get("total_samples") or 0))
    for m in all_meta_info
    if m.get("avg_reward") is not None
  ]
  count = sum(n for _, n in weighed)
  if count:
    mean = sum(r * n for r, n in weighed) / count
    totals[f"{PREFIX}no_filter/avg_reward"] = mean
  return totals


def log_raw_info(
  args: object, all_meta_info: list[dict[str, Any]], rollout_id: int
) -> None:
  """Logs the service's statistics of a rollout, to Weights & Biases too.

  Args:
    args: `use_wandb` logs to the wandb run that is open.
    all_meta_info: Statistics of each read.
    rollout_id: number of the rollout.
  """
  totals = raw_info(all_meta_info)
  _LOG.info("rollout %d: %s", rollout_id, totals)
  if getattr(args, "use_wandb", False):
    import wandb  # pylint: disable=g-import-not-at-top

    if wandb.run is not None:
      wandb.log({**totals, f"{PREFIX}step": rollout_id})
