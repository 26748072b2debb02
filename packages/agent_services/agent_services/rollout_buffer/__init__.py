"""The rollout buffer service: groups of episodes, kept between programs.

`python -m tunix.rl.multi_turn.trajectory_collector.buffer_service` serves it;
docs/rollout_buffer.md describes the protocol.
"""
