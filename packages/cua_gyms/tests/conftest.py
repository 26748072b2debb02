"""Settings of the gyms' tests, which are those of the framework's."""

from suite import *  # noqa: F403
