"""Builds what a run with recorded episodes trains from."""

from __future__ import annotations

import functools
import logging
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import completion_checks
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner import packing
from tunix.rl.multi_turn.run.recorded_data import buffer_loop
from tunix.rl.multi_turn.run.recorded_data import files
from tunix.rl.multi_turn.run.recorded_data import offline_queue
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client

_LOG = logging.getLogger(__name__)
ConfigError = config_lib.ConfigError


def make_reader(run: Any, section: str) -> reader_lib.EpisodeReader:
  """The reader of a run's policy; `section` is "buffer" or "offline".

  Raises:
    ConfigError: the loss mask type is none of this policy's.
  """
  settings = getattr(run.config, section)
  about = run.policy.model.config
  try:
    return reader_lib.EpisodeReader(
        run.policy.renderer,
        run.policy.tokenizer,
        run.images,
        parser=run.config.agent.parser,
        loss_mask_type=settings.loss_mask_type,
        missing_logprobs=settings.missing_logprobs,
        setting=section,
        vocabulary=completion_checks.Vocabulary(
            about.vocab_size, frozenset(about.banned_token_ids)
        ),
    )
  except (ValueError, ImportError) as error:
    raise ConfigError([
        f"{section}.loss_mask_type={settings.loss_mask_type}: {error}"
    ]) from None


def make_groups(run: Any) -> files.RecordedGroups:
  """The groups of `offline.path`.

  Raises:
    ConfigError: it cannot be read, or holds no episode for this policy.
  """
  settings = run.config.offline
  try:
    groups = files.RecordedGroups(
        settings.path,
        make_reader(run, "offline"),
        run.images,
        split=settings.split,
        oldest_version=settings.oldest_version,
    )
    groups[0]  # What holds for one, such as missing log-probs, is told early.
  except OSError as error:
    raise ConfigError([
        f"offline.path={settings.path}: {error.strerror or error}"
        + (f" ({error.filename})" if error.filename else "")
    ]) from None
  except ValueError as error:
    raise ConfigError([f"offline.path={settings.path}: {error}"]) from None
  _LOG.info("%s: %s", settings.path, files.describe(groups))
  return groups


def make_offline(
    run: Any,
    groups_per_step: int,
    state: Mapping[str, Any] | None,
    consumed: Sequence[int],
) -> offline_queue.OfflineQueue:
  """The queue of a run with `rollout.via=offline`.

  Args:
    run: of the configuration.
    groups_per_step: of the learner.
    state, consumed: of the checkpoint that it resumes from, if any.

  Raises:
    ConfigError: the data is not the checkpoint's.
  """
  settings = run.config.offline
  queue = offline_queue.OfflineQueue(
      run.recorded,
      groups_per_step,
      seed=run.config.run.seed,
      epochs=settings.epochs,
      shuffle=settings.shuffle,
  )
  if state:
    try:
      queue.load_state_dict(state, consumed)
    except ValueError as error:
      raise ConfigError([f"offline.path={settings.path}: {error}"]) from None
  return queue


def make_buffer_loop(
    run: Any,
    queue: buffer_loop.LeasedQueue,
    observers: Any,
    state: Mapping[str, Any] | None,
    consumed: Sequence[int],
) -> buffer_loop.BufferLoop:
  """The loop of a run with `rollout.via=buffer`; arguments as above."""
  config = run.config
  settings = config.buffer
  loop = buffer_loop.BufferLoop(
      functools.partial(
          client.BufferClient, settings.url, buffer=settings.name
      ),
      make_reader(run, "buffer"),
      queue,
      settings,
      batch_size=config.collect.group_size * config.learner.groups_per_step,
      group_size=config.collect.group_size,
      raw=config.algorithm.advantage != "reward",
      min_valid=config.collect.min_valid,
      payload=functools.partial(start_payload, run)
      if settings.start
      else None,
      observers=observers,
  )
  if run.resuming:
    stored = () if run.store is None else run.store.load()
    loop.load_state_dict(state or {}, consumed, stored)
  return loop


def start_payload(run: Any, skip: Sequence[str]) -> dict[str, Any]:
  """The body of `/start_rollout` for a run.

  Generators sample from the run's own server, with `remote_engine_key` as
  their bearer token; `image_token_id` stands for images in its prompts;
  `trainer` holds all settings of the run. Groups come with the rewards that
  their episodes got: the learner compares them.
  """
  config, sampling = run.config, run.config.sampling
  most = sampling.max_new_tokens
  url, key = run.policy_server
  image = run.policy.renderer.image_token_id
  return {
      "num_process": str(config.collect.concurrency),
      "num_epoch": str(config.buffer.num_epoch),
      "remote_engine_url": url,
      "remote_engine_key": key,
      "remote_buffer_url": config.buffer.url,
      "task_type": config.buffer.task_type,
      "input_file": config.buffer.input_file or config.task_source.path,
      "num_repeat_per_sample": str(config.collect.group_size),
      "max_tokens": str(most),
      "sampling_params": {
          "max_tokens": most,
          "temperature": sampling.temperature,
          "top_p": sampling.top_p,
          **({"top_k": sampling.top_k} if sampling.top_k else {}),
          **({"min_p": sampling.min_p} if sampling.min_p else {}),
      },
      "tokenizer_path": run.tokenizer_path,
      "skip_instance_ids": list(skip),
      "group_rules": "raw",
      "model": config.policy.name,
      **({} if image is None else {"image_token_id": image}),
      "trainer": config.to_dict(),
      **config.buffer.options,
  }


def fill_logprobs(
    learner: learner_lib.Learner,
    groups: Sequence[trajectory_lib.TrajectoryGroup],
) -> list[trajectory_lib.TrajectoryGroup]:
  """The groups of an update, with the learner's log-probs where none were
  recorded; sequences longer than a row are left as they are."""
  length = learner.config.row_length

  def score(
      sequences: Sequence[trajectory_lib.TokenSequence],
  ) -> list[Any]:
    fitting = [s for s in sequences if packing.used_length(s) <= length]
    found = {
        id(s): scored
        for s, scored in zip(
            fitting, learner.sequence_logprobs(fitting), strict=True
        )
    }
    return [found.get(id(s), s.logprobs) for s in sequences]

  return reader_lib.fill_logprobs(groups, score, learner.version)
