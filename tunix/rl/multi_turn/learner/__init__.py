"""Learning from groups of trajectories, in JAX."""
