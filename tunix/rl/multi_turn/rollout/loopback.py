"""An ASGI application served on the loopback interface by a thread.

For agents of the same machine: a run that trains on what they do, notebooks,
tests. Promises: when `start` returns, the server answers; when `close` returns,
its thread has ended or its deadline is over.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

_START_S = 30.0
SERVER_OPTIONS = dict(
    log_level="warning",
    # An agent may think for long between two turns; and a client that reuses a
    # connection should be the one that gives it up.
    timeout_keep_alive=300,
    timeout_graceful_shutdown=5,
)
"""Of uvicorn, here and in the command."""


class LoopbackServer:
  """See the module docstring. Use it as a context manager."""

  def __init__(self, asgi: Any, *, host: str = "127.0.0.1", port: int = 0):
    """Args:

      asgi: the application.
      host: an address of this machine only.
      port: 0 takes one that is free.

    Raises:
      ImportError: uvicorn is not installed.
      OSError: the address is taken.
    """
    try:
      import uvicorn  # pylint: disable=g-import-not-at-top
    except ImportError as error:
      raise ImportError(
          "serving needs uvicorn; pip install 'tunix-multi-turn[serve]'"
      ) from error
    self._socket = socket.socket()
    try:
      self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      self._socket.bind((host, port))
    except OSError:
      self._socket.close()
      raise
    self.port: int = self._socket.getsockname()[1]
    self.url = f"http://{host}:{self.port}"
    self._server = uvicorn.Server(
        # The logging of the program around it stays as it is.
        uvicorn.Config(asgi, log_config=None, **SERVER_OPTIONS)
    )
    self._thread = threading.Thread(
        target=self._server.run,
        kwargs={"sockets": [self._socket]},
        name="tunix-loopback",
        daemon=True,
    )

  def start(self) -> LoopbackServer:
    """Serves from now on.

    Raises:
      TimeoutError: it did not start.
    """
    self._thread.start()
    deadline = time.monotonic() + _START_S
    while not self._server.started:
      if not self._thread.is_alive() or time.monotonic() > deadline:
        self.close()
        raise TimeoutError(
            f"the server at {self.url} did not start within {_START_S:g} s"
        )
      time.sleep(0.005)
    return self

  def close(self, timeout_s: float = 15.0) -> None:
    """Ends what is running, and the thread. Idempotent."""
    self._server.should_exit = True
    if self._thread.ident is not None:
      self._thread.join(timeout_s)
    self._socket.close()

  def __enter__(self) -> LoopbackServer:
    return self.start()

  def __exit__(self, *exc_info: Any) -> None:
    self.close()
