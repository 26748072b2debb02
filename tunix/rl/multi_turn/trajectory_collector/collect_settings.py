"""Declares the collector's settings: groups, episodes in flight, deadlines."""

from __future__ import annotations

from typing import Iterator

from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.core import settings


@settings.settings
class Deadlines:
  """Longest time each call of an episode may take."""

  reset: float = settings.setting(
    default=30.0,
    doc="Starting a task, and building the pair when its factory is async.",
    unit="s",
    gt=0,
  )
  model: float = settings.setting(
    default=120.0, doc="One completion, compilation included.", unit="s", gt=0
  )
  step: float = settings.setting(
    default=30.0, doc="The actions of a turn.", unit="s", gt=0
  )
  evaluate: float = settings.setting(
    default=30.0, doc="The gym's verdict and the final reward.", unit="s", gt=0
  )
  close: float = settings.setting(
    default=10.0,
    doc="Closing a gym, and releasing the policy's session, each.",
    unit="s",
    gt=0,
  )
  turn: float = settings.setting(
    default=180.0,
    doc="Model call and step of one turn together.",
    unit="s",
    gt=0,
  )
  episode: float = settings.setting(
    default=600.0,
    doc="All turns of an episode; its reset is not counted.",
    unit="s",
    gt=0,
  )

  def problems(self) -> Iterator[str]:
    if self.turn > self.episode:
      yield (
        f"turn={self.turn} s exceeds episode={self.episode} s; lower the first"
      )
    slowest = max(self.model, self.step)
    if slowest > self.turn:
      yield (
        f"turn={self.turn} s is shorter than one call in it may take"
        f" ({slowest} s: model and step); raise the first or lower those"
      )


@settings.settings
class CollectConfig:
  """Groups of episodes of one task, and how long anything may take."""

  group_size: int = settings.setting(
    default=8, doc="Episodes of one task that are compared.", ge=1, le=65536
  )
  min_valid: int = settings.setting(
    default=4,
    doc="A group with fewer episodes that the policy decided (and not a"
    " broken gym) is dropped and its task tried again.",
    ge=1,
  )
  max_requeues: int = settings.setting(
    default=2, doc="How often a dropped group's task is tried again.", ge=0
  )
  gamma: float = settings.setting(
    default=1.0,
    doc="Discount a turn, of the returns in trajectories and of turn_returns.",
    ge=0,
    le=1,
  )
  max_reward: float = settings.setting(
    default=1e6,
    doc="Largest absolute reward of a turn, and of an episode. An episode"
    " with a larger one, or one that is not finite, is invalid (env_error,"
    " fault RewardError).",
    gt=0,
    le=reward_range.MAX_REWARD,
  )
  part_size: int = settings.setting(
    default=0,
    doc="Valid episodes after which a part of a group goes to the learner;"
    " the rest of the group is compared with their rewards when it comes."
    " Fast members then do not grow stale beside slow ones. For advantages"
    " that compare whole episodes; an update takes as many parts as make"
    " learner.groups_per_step groups. 0 = whole groups.",
    unit="episodes",
    ge=0,
  )
  expert_share: float = settings.setting(
    default=0.0,
    doc="Share of the groups without a success to which the gym's oracle adds"
    " one: it plays the task once, in the policy's own words where these do"
    " what it would do. 0 = none. For gyms with an oracle.",
    ge=0,
    le=1,
  )
  concurrency: int = settings.setting(
    default=96,
    doc="Episodes in flight. More than the engine's slots keeps it busy while"
    " gyms work.",
    ge=1,
    le=100_000,
  )
  deadlines: Deadlines = settings.setting(
    default=Deadlines(), doc="Longest time each call of an episode may take."
  )

  @property
  def parts(self) -> int:
    """Parts of a group."""
    return self.group_size // self.part_size if self.part_size else 1

  def problems(self) -> Iterator[str]:
    size, valid, part = self.group_size, self.min_valid, self.part_size
    if part and (size % part or part < valid):
      yield (
        f"part_size={part} must divide group_size={size} and be >="
        f" min_valid={valid}, the episodes that the first part compares; set"
        " part_size=0 or change them"
      )
    if valid > size:
      yield (
        f"min_valid={valid} exceeds group_size={size}, so every group would"
        " be dropped; set "
        + (
          f"min_valid={max(2, size // 2)} or a larger group"
          if size > 1
          else "group_size=4, or min_valid=1 for an advantage that compares no"
          " episodes"
        )
      )
