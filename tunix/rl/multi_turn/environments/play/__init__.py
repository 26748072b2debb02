"""Lets a person, an oracle or a script play tasks, and records them."""
