"""Rollout buffer services."""

from buffer_fixtures import *  # noqa: F403
