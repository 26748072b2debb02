"""From groups of trajectories to packed batches."""
