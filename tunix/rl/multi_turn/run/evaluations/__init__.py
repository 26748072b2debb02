"""Evaluations of a run: on held-out tasks, by themselves, of other subjects."""
