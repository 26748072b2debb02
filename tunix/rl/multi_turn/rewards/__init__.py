"""Judges answers by reward functions with names; see `registry`."""

from tunix.rl.multi_turn.rewards.registry import as_reward
from tunix.rl.multi_turn.rewards.registry import combine_rewards
from tunix.rl.multi_turn.rewards.registry import evaluate
from tunix.rl.multi_turn.rewards.registry import evaluate_async
from tunix.rl.multi_turn.rewards.registry import get_reward_fn
from tunix.rl.multi_turn.rewards.registry import make_reward
from tunix.rl.multi_turn.rewards.registry import register
from tunix.rl.multi_turn.rewards.registry import reward_names
from tunix.rl.multi_turn.rewards.registry import RewardOutput
from tunix.rl.multi_turn.rewards.registry import unregister

from tunix.rl.multi_turn.rewards import functions  # isort: skip (registers)
