"""Executions of a gym server."""

from cua_gyms.genv.execution import evaluate_execution
from cua_gyms.genv.execution import GenvExecutionContext
from cua_gyms.genv.execution import start_genv_execution
from cua_gyms.genv.execution import terminate_execution

__all__ = [
  "evaluate_execution",
  "GenvExecutionContext",
  "start_genv_execution",
  "terminate_execution",
]
