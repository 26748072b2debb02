"""Predicts the memory and the speed of a run, here or on other machines."""
