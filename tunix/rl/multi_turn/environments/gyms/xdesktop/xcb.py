"""Makes the two calls to libxcb that xcffib lacks, or has in part.

Descriptors cannot be sent with it, which sharing memory takes. And its
`Connection(auth=…)` frees the credentials before libxcb reads them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

try:
  import xcffib
except ImportError as error:
  raise ImportError(
      f"the xdesktop gym needs xcffib ({error}): pip install"
      " 'tunix-multi-turn[xdesktop]', and sudo make desktop"
  ) from None


class _Auth(ctypes.Structure):
  _fields_ = [
      ("name_length", ctypes.c_int), ("name", ctypes.c_char_p),
      ("data_length", ctypes.c_int), ("data", ctypes.c_char_p),
  ]  # pyformat: disable


@functools.lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
  library = ctypes.CDLL("libxcb.so.1")
  library.xcb_connect_to_fd.argtypes = (ctypes.c_int, ctypes.POINTER(_Auth))
  library.xcb_connect_to_fd.restype = ctypes.c_void_p
  library.xcb_send_fd.argtypes = (ctypes.c_void_p, ctypes.c_int)
  library.xcb_send_fd.restype = None
  return library


def connect(fd: int, name: bytes, data: bytes) -> xcffib.Connection:
  """A connection over the socket `fd`, which becomes libxcb's to close.

  Args:
    fd: a connected stream socket.
    name, data: the credentials for the server.

  Raises:
    xcffib.ConnectionException: the server refused.
  """
  auth = _Auth(len(name), name, len(data), data)
  return xcffib.wrap(_library().xcb_connect_to_fd(fd, ctypes.byref(auth)))


def send_fd(connection: Any, fd: int) -> None:
  """Sends `fd` with the next request; libxcb closes it then."""
  pointer = int(xcffib.ffi.cast("uintptr_t", connection._conn))  # pylint: disable=protected-access
  _library().xcb_send_fd(pointer, fd)
