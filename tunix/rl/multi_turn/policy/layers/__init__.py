"""Layers that several families share, and their kernels."""
