"""Policies; all published families share the decoder and table of `qwen`."""
