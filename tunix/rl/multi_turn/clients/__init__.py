"""Provides policy clients: outside engines, scripts, records and replays."""

from tunix.rl.multi_turn.core import registry

__getattr__ = registry.lazy_attributes(
  __name__, record_replay="ReplayClient", scripted_client="ScriptedClient"
)
