"""Judges answers by reward functions with names; see `reward_registry`."""

from tunix.rl.multi_turn.rewards.reward_registry import _REGISTRY
from tunix.rl.multi_turn.rewards.reward_registry import as_reward
from tunix.rl.multi_turn.rewards.reward_registry import checked
from tunix.rl.multi_turn.rewards.reward_registry import combine_rewards
from tunix.rl.multi_turn.rewards.reward_registry import evaluate
from tunix.rl.multi_turn.rewards.reward_registry import evaluate_async
from tunix.rl.multi_turn.rewards.reward_registry import get_reward_fn
from tunix.rl.multi_turn.rewards.reward_registry import register
from tunix.rl.multi_turn.rewards.reward_registry import reward_names
from tunix.rl.multi_turn.rewards.reward_registry import RewardOutput
from tunix.rl.multi_turn.rewards.reward_registry import unregister
from tunix.rl.multi_turn.rewards.specs import EpisodeOutput
from tunix.rl.multi_turn.rewards.specs import EpisodeReward
from tunix.rl.multi_turn.rewards.specs import plan
from tunix.rl.multi_turn.rewards.specs import RewardPlan

from tunix.rl.multi_turn.rewards import functions  # isort: skip (registers)
from tunix.rl.multi_turn.rewards import turns  # isort: skip (registers)
