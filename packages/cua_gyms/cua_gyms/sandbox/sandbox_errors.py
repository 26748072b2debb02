"""Defines the errors of desktops, by type.

A `DesktopError` is the environment's failure: the collector leaves the episode
out of training. Settings that cannot be are plain `ValueError`s.
"""


class DesktopError(RuntimeError):
  """A desktop could not be made, or has ended."""


class ProgramsNotFound(DesktopError):
  """Programs that a desktop needs are not installed."""


class IsolationUnavailable(DesktopError):
  """This machine lacks the isolation asked for."""


class LaunchError(DesktopError):
  """The X server or the window manager did not come up."""


class AppNotShown(DesktopError):
  """An application did not show its window in time."""


class DesktopLost(DesktopError):
  """The desktop ended, or no longer answers, in the middle of an episode."""
