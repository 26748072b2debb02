"""A run's events as tokens and samples."""

from agent_services.runs.conversion import samples_of
from agent_services.runs.conversion import sequences_of
from agent_services.runs.conversion import Turn
from agent_services.runs.conversion import turns_of

__all__ = ["samples_of", "sequences_of", "Turn", "turns_of"]
