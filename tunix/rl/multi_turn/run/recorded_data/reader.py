"""Turns records of elsewhere into episodes that the learner can take.

A record with a token-exact part keeps its tokens. One of text only is written
in the policy's own chat template, screenshots included, or by a loss mask
generator; the end-of-turn token of each reply is trained on.

Promises: an episode without recorded log-probs is refused, or flagged in its
metrics (`records.LOGPROBS_MISSING`) with placeholders in the sequences that
lack one, which `fill_logprobs` replaces before an update; other sequences of
the episode keep what was recorded. `TEXT_ONLY` flags tokens that are not
the sampler's. Ids outside of the policy's vocabulary, banned ones and log-probs
that no sampled token has are refused, and name the item.

Does not: read files, or talk to a service.
"""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import logging
import pathlib
import re
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments import conversations
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import base_renderer as renderer_base
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.trajectory_collector import completion_checks
from tunix.rl.multi_turn.trajectory_collector import loss_mask
from tunix.rl.multi_turn.trajectory_collector import recorded_sequences
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector import sampling_rule
from tunix.rl.multi_turn.trajectory_collector import sequence_builder
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples

_LOG = logging.getLogger(__name__)
TEXT_ONLY = samples.TEXT_ONLY
RECOMPUTED = "logprobs_recomputed"
"""Name in `Trajectory.metrics`: 1 where `fill_logprobs` has filled them in."""
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.I)


class SettingError(ValueError):
  """Data that another setting lets a run use; it names the setting."""


class EpisodeReader:
  """Records to trajectories, for one policy."""

  def __init__(
    self,
    renderer: choice.AnyRenderer,
    tokenizer: renderer_base.Tokenizer,
    images: images_lib.ImageStore,
    *,
    parser: str,
    loss_mask_type: str = "",
    missing_logprobs: str = "refuse",
    setting: str = "offline",
    vocabulary: completion_checks.Vocabulary | None = None,
    rule: sampling_rule.SamplingRule | None = None,
  ):
    """Args:

      renderer, tokenizer: of the policy.
      images: receives screenshots.
      parser: name of the grammar that tool calls are written in.
      loss_mask_type: Type of a text's loss mask; "" uses the renderer.
      missing_logprobs: "refuse" or "recompute".
      setting: section of the settings, for errors.
      vocabulary: Ids that the policy can have sampled; None takes any.
      rule: Distribution of the run, for items with their `sampling_params`;
        None trains on all.

    Raises:
      ValueError: an unknown loss mask type, or one for another tokenizer.
    """
    self._renderer = renderer
    self._images = images
    self._parser = parser
    self._recompute = missing_logprobs == "recompute"
    self._setting = setting
    self._vocabulary = vocabulary
    self._rule = rule
    self._reported: set[str] = set()
    self._generator = None
    if loss_mask_type:
      self._generator = loss_mask.make(loss_mask_type, tokenizer)

  def episode(
    self,
    record: records.Record,
    *,
    version: int = 0,
    directory: pathlib.Path | None = None,
  ) -> trajectory_lib.Trajectory:
    """The episode of a record.

    Args:
      record: Episode that another program wrote.
      version: Version of the weights, if the record has none.
      directory: Base of relative paths of screenshots in messages.

    Raises:
      ValueError: something that is needed is missing; it names the item.
    """
    records.read_images(record.data, self._images)
    sequences = record.sequences
    text_only = not sequences
    if text_only:
      record = dataclasses.replace(
        record, messages=self._with_images(record, directory)
      )
      sequences = self.tokens(record)
    if not self._recompute and not all(s.has_logprobs for s in sequences):
      what = "is text only" if text_only else "lacks log-probs"
      raise SettingError(
        f"item uid={record.uid!r} {what}; set"
        f" {self._setting}.missing_logprobs=recompute, or record them"
      )
    episode = record.trajectory(
      sequences, version=version, placeholder_logprobs=True
    )
    if text_only:
      episode.metrics[TEXT_ONLY] = 1.0
    self._check(f"item uid={record.uid!r}", episode)
    self._mask_other_sampling(record, episode)
    return episode

  def _mask_other_sampling(
    self, record: records.Record, episode: trajectory_lib.Trajectory
  ) -> None:
    """Masks and counts turns of another distribution than the run's.

    Raises:
      ValueError: the rule refuses them, or the item's parameters are unusable.
    """
    params = record.sampling_params
    if self._rule is None or not params:
      return
    name = f"item uid={record.uid!r}"
    turns = sorted(
      {
        turn
        for sequence in episode.sequences
        for turn in sequence.turn_ids[sequence.loss_mask].tolist()
      }
    )
    if len(params) == 1:
      params = params * len(turns)
    if len(params) != len(turns):
      raise ValueError(
        f"{name}: sampling_params has {len(params)} objects for"
        f" {len(turns)} turns; give one a turn, or one for all"
      )
    try:
      reasons = {
        turn: reason
        for turn, fields in zip(turns, params)
        if (reason := self._rule.reason_against(fields))
      }
    except sampling_rule.OtherSampling as error:
      raise ValueError(f"{name}: {error}") from None
    if not reasons:
      return
    before = episode.num_sampled
    episode.sequences = [s.without_turns(reasons) for s in episode.sequences]
    episode.metrics["untrained_tokens"] = float(before - episode.num_sampled)
    for reason in set(reasons.values()) - self._reported:
      self._reported.add(reason)
      _LOG.warning(
        "%s: its tokens are not trained on, as those of later items with"
        " equal parameters: %s; see rollout.other_sampling",
        name,
        reason,
      )

  def _check(self, name: str, episode: trajectory_lib.Trajectory) -> None:
    """Refuses tokens and log-probs that the policy cannot have sampled."""
    if self._vocabulary is None:
      return
    try:
      for sequence in episode.sequences:
        mask = sequence.loss_mask
        completion_checks.check_outside(
          sequence.tokens[mask], sequence.logprobs[mask], self._vocabulary
        )
    except completion_checks.SamplingContractError as error:
      raise ValueError(f"{name}: {error}") from error

  def own(self, episode: trajectory_lib.Trajectory) -> None:
    """Refuses an episode of a run's files as `episode` would.

    Raises:
      SettingError: it lacks log-probs, and may not.
    """
    if not self._recompute and records.LOGPROBS_MISSING in episode.metrics:
      raise SettingError(
        f"episode {episode.trajectory_id!r} was recorded without log-probs;"
        f" set {self._setting}.missing_logprobs=recompute, or leave it out"
      )
    self._check(f"episode {episode.trajectory_id!r}", episode)

  def tokens(
    self, record: records.Record
  ) -> tuple[recorded_sequences.Recorded, ...]:
    """Sequences of an item of text; their log-probs are unknown.

    Raises:
      ValueError: messages that the format has no place for.
    """
    if self._generator is not None:
      return (samples.masked(record, self._generator),)
    try:
      return self._rendered(record.messages)
    except SettingError as error:
      raise SettingError(f"item uid={record.uid!r}: {error}") from None
    except (ValueError, KeyError, TypeError, LookupError) as error:
      raise ValueError(f"item uid={record.uid!r}: {error}") from None

  def _rendered(
    self, messages: Sequence[Mapping[str, Any]]
  ) -> tuple[recorded_sequences.Recorded, ...]:
    builder = sequence_builder.SequenceBuilder(self._renderer)
    replies: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
      message = dict(message)
      if message["role"] != "assistant":
        replies.append(message)
        continue
      if not loss_mask.is_trained(message, index):
        raise SettingError(
          f"message {index} is left out of the loss, which"
          f" {self._setting}.loss_mask_type honours; set it, e.g. to qwen3"
        )
      text, calls = conversations.text_and_calls(
        {**message, "content": records.text_of(message)}
      )
      if calls:
        grammar = tool_parser.make_tool_parser(self._parser, "operator")
        text = grammar.format(calls, text or None)
      tokens_S = demonstrations.completion_ids(self._renderer, text)
      builder.prompt(list(replies))
      text = builder.append(
        policy_client.Completion(
          tokens_S,
          np.zeros(len(tokens_S), np.float32),
          np.zeros(len(tokens_S), np.int32),
          policy_client.FinishReason.STOP,
        )
      )
      replies.append({"role": "assistant", "content": text})
    return tuple(
      recorded_sequences.Recorded(
        tokens=s.tokens,
        loss_mask=s.loss_mask,
        logprobs=np.where(s.loss_mask, np.nan, 0.0).astype(np.float32),
        versions=np.full(len(s), -1, np.int32),
        turn_ids=s.turn_ids,
        images=s.images,
      )
      for s in builder.build()
    )

  def _with_images(
    self, record: records.Record, directory: pathlib.Path | None
  ) -> tuple[Mapping[str, Any], ...]:
    """The messages with a reference in the place of each picture."""
    out = []
    for message in record.messages:
      content = message.get("content")
      if isinstance(content, list):
        parts = []
        for part in content:
          try:
            parts.append(self._part(part, directory))
          except (ValueError, OSError) as error:
            raise ValueError(f"item uid={record.uid!r}: {error}") from None
        message = {**message, "content": parts}
      out.append(message)
    return tuple(out)

  def _part(self, part: Any, directory: pathlib.Path | None) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
      source = part.get("image_url")
      if isinstance(source, Mapping):
        source = source.get("url")
    elif kind == "image":
      source = part.get("image")
    else:
      return part
    if isinstance(source, trajectory_lib.ImageRef):
      return part
    if isinstance(source, Mapping) and "sha256" in source:
      ref = trajectory_lib.ImageRef.from_json(source)
    else:
      pixels = images_lib.decode(_bytes(source, directory))
      ref = self._images.put(pixels)
    return {"type": "image", "image": ref}


def _bytes(source: object, directory: pathlib.Path | None) -> bytes:
  """Of a data URL, or of a file beside the data."""
  if not isinstance(source, str):
    raise ValueError(f"an image must be a data URL or a file, got {source!r}")
  if match := _DATA_URL.match(source):
    try:
      return base64.b64decode(source[match.end() :], validate=True)
    except binascii.Error:
      raise ValueError("an image's data URL is not base64") from None
  if directory is None or "://" in source:
    raise ValueError(
      f"image {source[:80]!r} is not fetched; give a data URL"
      + ("" if directory is None else " or a file beside the data")
    )
  root = directory.resolve()
  path = (root / source).resolve()
  if not path.is_relative_to(root):
    raise ValueError(f"image {source!r} is outside of {root}")
  return path.read_bytes()


def _awaiting(
  member: trajectory_lib.Trajectory,
) -> list[trajectory_lib.TokenSequence]:
  """Sequences of a flagged episode whose log-probs are placeholders."""
  sampled = [s for s in member.sequences if s.num_sampled]
  sequences = [s for s in sampled if recorded_sequences.awaits_logprobs(s)]
  return sequences or sampled  # Queues of earlier versions do not mark them.


def fill_logprobs(
  groups: Sequence[trajectory_lib.TrajectoryGroup],
  score: Callable[
    [Sequence[trajectory_lib.TokenSequence]], Sequence[np.ndarray]
  ],
  version: int,
) -> list[trajectory_lib.TrajectoryGroup]:
  """The groups with log-probs and versions where none were recorded.

  Args:
    groups: Groups of an update.
    score: e.g. `Learner.sequence_logprobs`, of the present weights.
    version: Version of the present weights.
  """
  waiting = [
    sequence
    for group in groups
    for member in group
    if records.LOGPROBS_MISSING in member.metrics
    for sequence in _awaiting(member)
  ]
  if not waiting:
    return list(groups)
  scored = {
    id(sequence): np.minimum(logprobs, 0.0)
    for sequence, logprobs in zip(waiting, score(waiting), strict=True)
  }

  def filled(member: trajectory_lib.Trajectory) -> trajectory_lib.Trajectory:
    if records.LOGPROBS_MISSING not in member.metrics:
      return member
    metrics = dict(member.metrics)
    del metrics[records.LOGPROBS_MISSING]
    metrics[RECOMPUTED] = 1.0
    return dataclasses.replace(
      member,
      metrics=metrics,
      sequences=[
        dataclasses.replace(
          s, logprobs=scored[id(s)], versions=np.where(s.loss_mask, version, -1)
        )
        if id(s) in scored
        else s
        for s in member.sequences
      ],
    )

  return [
    dataclasses.replace(
      g, trajectories=tuple(filled(t) for t in g.trajectories)
    )
    for g in groups
  ]


def diagnosis(group: trajectory_lib.TrajectoryGroup) -> str:
  """Describes how a group's episodes ended, and a setting that may help."""
  ends = collections.Counter(
    t.status.value if t.num_sampled else f"{t.status.value} without a token"
    for t in group
  )
  text = ", ".join(f"{n} {end}" for end, n in ends.most_common())
  text = f"its episodes ended: {text}"
  error = next((t.error for t in group if t.error), "")
  if error:
    text += f" ({error[:200]})"
  cut = trajectory_lib.TrajectoryStatus.CONTEXT_LIMIT
  if any(t.status is cut for t in group):
    return (
      f"{text}. Their prompts may not fit: raise engine.context_length and"
      " learner.row_length, or give shorter tasks"
    )
  return f"{text}. See what its generator writes, and its log in /buffer/stats"
