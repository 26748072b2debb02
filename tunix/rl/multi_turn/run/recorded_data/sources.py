"""Builds what a run with recorded episodes trains from."""

from __future__ import annotations

import argparse
import functools
import logging
from typing import Any, Mapping, Sequence, TYPE_CHECKING
import urllib.parse

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.run import refusals
from tunix.rl.multi_turn.run.recorded_data import buffer_loop
from tunix.rl.multi_turn.run.recorded_data import feeding
from tunix.rl.multi_turn.run.recorded_data import files
from tunix.rl.multi_turn.run.recorded_data import function_loop
from tunix.rl.multi_turn.run.recorded_data import offline_feed
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import completion_checks
from tunix.rl.multi_turn.trajectory_collector import sampling_rule
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples
from tunix.rl.queue import group_queue

if TYPE_CHECKING:
  from tunix.rl.multi_turn.run import run

_LOG = logging.getLogger(__name__)
ConfigError = config_lib.ConfigError


def make_reader(run: run.Run, section: str) -> reader_lib.EpisodeReader:
  """The reader of a run's policy; `section` is "buffer" or "offline".

  Raises:
    ConfigError: the loss mask type is none of this policy's.
  """
  settings = getattr(run.config, section)
  about = run.policy.model.config
  mask_type = settings.loss_mask_type
  with refusals.refused(
    f"{section}.loss_mask_type={mask_type}", ValueError, ImportError
  ):
    return reader_lib.EpisodeReader(
      run.policy.renderer,
      mask_tokenizer(run) if mask_type else None,
      run.images,
      parser=run.config.agent.parser,
      loss_mask_type=mask_type,
      missing_logprobs=settings.missing_logprobs,
      setting=section,
      vocabulary=completion_checks.Vocabulary(
        about.vocab_size, frozenset(about.banned_token_ids)
      ),
      rule=sampling_rule.SamplingRule(
        **sampling_rule.fields_of(run.config.sampling),
        other=run.config.rollout.other_sampling,
      ),
    )


def mask_tokenizer(run: run.Run) -> Any:
  """The tokenizer that a loss mask type is made with.

  It is transformers', which has the policy's chat template; that of a policy
  without a directory has none.
  """
  if not run.tokenizer_path:
    return run.policy.tokenizer
  return rollout.tokenizer_of(
    argparse.Namespace(hf_checkpoint=run.tokenizer_path)
  )


def make_groups(run: run.Run) -> files.RecordedGroups:
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
    groups[0]  # Reports early what holds for all, such as missing log-probs.
  except OSError as error:
    raise ConfigError(
      [
        f"offline.path={settings.path}: {error.strerror or error}"
        + (f" ({error.filename})" if error.filename else "")
      ]
    ) from None
  except ValueError as error:
    raise ConfigError([f"offline.path={settings.path}: {error}"]) from None
  _LOG.info("%s: %s", settings.path, files.describe(groups))
  return groups


def make_offline(
  run: run.Run,
  queue: group_queue.GroupQueue,
  state: Mapping[str, Any] | None,
  consumed: Sequence[int],
) -> offline_feed.OfflineFeed:
  """The loop of a run with `rollout.via=offline`.

  Args:
    run: Run that trains on the data.
    queue: Queue with `offline_feed.queue_config`.
    state, consumed: of the checkpoint that it resumes from, if any.

  Raises:
    ConfigError: the data is not the checkpoint's.
  """
  settings = run.config.offline
  assert run.recorded is not None
  feed = offline_feed.OfflineFeed(
    run.recorded,
    queue,
    seed=run.config.run.seed,
    epochs=settings.epochs,
    shuffle=settings.shuffle,
  )
  if state:
    with refusals.refused(f"offline.path={settings.path}", ValueError):
      feed.load_state_dict(state, consumed)
  return feed


def make_buffer_loop(
  run: Any,
  queue: group_queue.GroupQueue,
  observers: Any,
  state: Mapping[str, Any] | None,
  consumed: Sequence[int],
) -> buffer_loop.BufferLoop | function_loop.FunctionLoop:
  """The loop of a run with `rollout.via=buffer`; arguments as above."""
  config = run.config
  settings = config.buffer
  parts = make_reader(run, "buffer"), queue
  options = dict(min_valid=config.collect.min_valid, observers=observers)
  loop: Any
  if settings.makes_rollouts:
    loop = function_loop.FunctionLoop(
      registry.import_function(settings.function or data_sections.OWN_FUNCTION),
      rollout_arguments(run),
      run.policy.tokenizer.decode,
      *parts,
      **options,
    )
  else:
    loop = buffer_loop.BufferLoop(
      functools.partial(
        client.BufferClient, settings.url, buffer=settings.name
      ),
      settings,
      *parts,
      batch_size=config.collect.group_size * config.learner.groups_per_step,
      group_size=config.collect.group_size,
      raw=config.algorithm.advantage != "reward",
      payload=functools.partial(start_payload, run) if settings.start else None,
      **options,
    )
  if run.resuming:
    stored = () if run.store is None else run.store.load()
    loop.load_state_dict(state or {}, consumed, stored)
  return loop


def rollout_arguments(run: run.Run) -> argparse.Namespace:
  """The run's settings as the arguments of the protocol's trainer.

  Generators sample from the run's own server, with `remote_engine_key` as
  their bearer token; `image_token_id` stands for images in its prompts;
  `trainer` holds all settings of the run.
  """
  config = run.config
  url, key = run.policy_server
  image = run.policy.renderer.image_token_id
  args = {
    flag: loader.value_of(config, path)
    for flag, path in data_sections.ROLLOUT_FLAGS.items()
  }
  server = urllib.parse.urlsplit(url)
  args |= {
    "prompt_data": config.buffer.input_file or config.task_source.path,
    "loss_mask_type": config.buffer.loss_mask_type or "qwen",
    "buffer_filter_path": config.buffer.filter or None,
    "rollout_top_k": config.sampling.top_k,
    "rollout_min_p": config.sampling.min_p,
    "fetch_interval_s": config.buffer.poll_s,
    "remote_engine_url": url,
    "remote_engine_key": key,
    "sglang_router_ip": server.hostname,
    "sglang_router_port": server.port,
    "hf_checkpoint": run.tokenizer_path,
    **({} if run.tokenizer_path else {"tokenizer": run.policy.tokenizer}),
    "group_rules": "normalized" if config.buffer.normalized else "raw",
    "model": config.policy.name,
    "trainer": config.to_dict(),
    "start_options": config.buffer.options,
    "use_wandb": False,
  }
  if image is not None:
    args["image_token_id"] = image
  return argparse.Namespace(**args)


def start_payload(run: run.Run, skip: Sequence[str]) -> dict[str, Any]:
  """The body of `/start_rollout` for a run that skips instances."""
  return client.start_payload(
    run.config.buffer.url, rollout_arguments(run), {"0": list(skip)}
  )


def prepared(
  learner: learner_lib.Learner, groups: Sequence[trajectory_lib.TrajectoryGroup]
) -> list[trajectory_lib.TrajectoryGroup]:
  """The groups of an update in the order of their instances, log-probs filled
  in; see `fill_logprobs`."""
  ordered = sorted(
    groups, key=lambda g: samples.natural_key(feeding.instance_of(g))
  )
  return fill_logprobs(learner, ordered)


def fill_logprobs(
  learner: learner_lib.Learner, groups: Sequence[trajectory_lib.TrajectoryGroup]
) -> list[trajectory_lib.TrajectoryGroup]:
  """The groups of an update, with the learner's log-probs where none were
  recorded; sequences longer than a row keep theirs."""
  length = learner.config.row_length

  def score(sequences: Sequence[trajectory_lib.TokenSequence]) -> list[Any]:
    fitting = [s for s in sequences if packing.used_length(s) <= length]
    logprobs_of = {
      id(s): scored
      for s, scored in zip(
        fitting, learner.sequence_logprobs(fitting), strict=True
      )
    }
    return [logprobs_of.get(id(s), s.logprobs) for s in sequences]

  return reader_lib.fill_logprobs(groups, score, learner.version)
