"""Provides policy clients: outside engines, scripts, records and replays."""

from tunix.rl.multi_turn.clients.record_replay import ReplayClient
from tunix.rl.multi_turn.clients.scripted_client import ScriptedClient
