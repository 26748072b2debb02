"""TinyVL, the shipped policy of two million parameters."""
