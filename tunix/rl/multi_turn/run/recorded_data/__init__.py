"""Episodes that the run does not play: a rollout buffer's, or recorded ones.

`rollout.via=buffer` (see `buffer_loop`) and `rollout.via=offline` (see
`offline_feed`).
"""

from tunix.rl.multi_turn.core import registry

__getattr__ = registry.lazy_attributes(
  __name__,
  no_engine="NoEngine",
  offline_feed="queue_config",
  sources="fill_logprobs make_buffer_loop make_groups make_offline prepared",
)
