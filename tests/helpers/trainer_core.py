"""A trainer's event types: the framework's, else the monitor package's copy."""

try:
  from tunix.rl.multi_turn.core import events
  from tunix.rl.multi_turn.core import images
  from tunix.rl.multi_turn.core import monitor_settings
  from tunix.rl.multi_turn.core import trajectory
  from tunix.rl.multi_turn.core.statistics import success_rates
except ModuleNotFoundError:
  from training_monitor.core import events  # noqa: F401
  from training_monitor.core import images  # noqa: F401
  from training_monitor.core import monitor_settings  # noqa: F401
  from training_monitor.core import trajectory  # noqa: F401
  from training_monitor.core.statistics import success_rates  # noqa: F401
