"""Warm start: what a policy imitates before it is rewarded."""
