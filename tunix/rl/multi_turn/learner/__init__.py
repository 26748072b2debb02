"""Trains policies on groups of trajectories, in JAX."""
