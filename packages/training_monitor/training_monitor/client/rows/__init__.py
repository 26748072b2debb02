"""Rows of the monitor, made of the events of a run."""
