"""The decoder of published models, the table of their families, checkpoints."""
