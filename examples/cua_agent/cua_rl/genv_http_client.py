"""The client of a gym server."""

from cua_gyms.genv.genv_client import GenvClient
from cua_gyms.genv.genv_client import GenvError
from cua_gyms.genv.genv_client import Timeouts

__all__ = ["GenvClient", "GenvError", "Timeouts"]
