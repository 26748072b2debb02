"""Predicts a run's memory and speed: dry runs, and slices not at hand."""
