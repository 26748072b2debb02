"""Warm start: clones demonstrations before reinforcement learning."""
