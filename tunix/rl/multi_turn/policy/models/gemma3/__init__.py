"""Gemma 3, with images or as text alone."""
