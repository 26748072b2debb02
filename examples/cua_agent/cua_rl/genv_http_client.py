"""The client of a gym server."""

from cua_gyms.genv.client import GenvClient
from cua_gyms.genv.client import GenvError
from cua_gyms.genv.client import Timeouts

__all__ = ["GenvClient", "GenvError", "Timeouts"]
