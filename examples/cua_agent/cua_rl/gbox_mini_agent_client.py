"""The client of an agent service."""

from agent_services.runs.client import model_name
from agent_services.runs.client import RunServiceClient
from agent_services.runs.client import RunServiceError

__all__ = ["model_name", "RunServiceClient", "RunServiceError"]
