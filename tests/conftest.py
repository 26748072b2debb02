"""Settings of all tests of the framework."""

from suite import *  # noqa: F403
