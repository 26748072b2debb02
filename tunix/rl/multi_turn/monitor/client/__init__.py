"""What a training process holds: a spool, and ways to fill it."""
