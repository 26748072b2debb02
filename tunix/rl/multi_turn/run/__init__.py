"""Builds and drives one training run from its configuration."""
