"""Formats of tool calls, one a model family."""
