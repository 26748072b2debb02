"""The sessions of a proxy, by their ids and by their keys.

Promises: ids and keys cannot be guessed; how many sessions are held is bounded,
and one that nobody uses any more is ended, and dropped later.

Does not lock: a store belongs to one event loop.
"""

from __future__ import annotations

import functools
import secrets
import time
from typing import Any, Callable

from tunix.rl.multi_turn.serving import interactions

Session = interactions.Session
InteractionError = interactions.InteractionError

KEY_PREFIX = "tunix-"
"""What sessions' keys begin with, to be told from a server's token."""


class SessionStore:
  """The sessions of a proxy.

  Idle for `timeout_s`, a session is ended by the next `sweep`; ended and idle
  for that long, it is dropped. All that are held count as `max_sessions`.
  """

  def __init__(
      self,
      renderer: Any,
      max_sessions: int = 256,
      timeout_s: float = 3600.0,
      max_interactions: int = 1024,
      clock: Callable[[], float] = time.monotonic,
  ):
    if min(max_sessions, max_interactions) < 1 or not timeout_s > 0:
      limits = f"{max_sessions=}, {max_interactions=}, {timeout_s=}"
      raise ValueError(f"limits must be positive, got {limits}")
    self._new_session = functools.partial(
        Session, renderer, max_interactions=max_interactions, clock=clock
    )
    self._max_sessions = max_sessions
    self._timeout_s = timeout_s
    self._clock = clock
    self._sessions: dict[str, Session] = {}
    self._by_key: dict[str, Session] = {}
    self._by_request: dict[str, Session] = {}
    self._request_of: dict[str, str] = {}

  def __len__(self) -> int:
    return len(self._sessions)

  def start(self, task_id: str = "", request: str = "") -> Session:
    """A session whose id and key nobody can guess.

    Args:
      task_id: of its client.
      request: names the call: as long as the session is held, another call of
        that name gives the same one. "" names none.
    """
    if (known := self._by_request.get(request)) is not None:
      if known.task_id != task_id:
        raise InteractionError(
            "request_differs",
            f"the same request started a session of task {known.task_id!r}, not"
            f" of {task_id!r}; name this one otherwise",
        )
      return known
    if len(self) >= self._max_sessions:
      raise InteractionError(
          "capacity", f"{len(self)} sessions are held; drop ended ones or wait"
      )
    session = self._new_session(
        secrets.token_urlsafe(18),
        KEY_PREFIX + secrets.token_urlsafe(32),
        task_id,
    )
    self._sessions[session.id] = self._by_key[session.key] = session
    if request:
      self._by_request[request] = session
      self._request_of[session.id] = request
    return session

  def get(self, session_id: str) -> Session:
    if session_id not in self._sessions:
      raise InteractionError(
          "unknown_session", f"no session {session_id!r}, or not any more"
      )
    return self._sessions[session_id]

  def by_key(self, key: str) -> Session:
    if key not in self._by_key:  # What may be a secret is not repeated.
      raise InteractionError("unknown_session", "no session has this key")
    return self._by_key[key]

  def end(self, session_id: str) -> None:
    self.get(session_id).end()

  def drop(self, session_id: str) -> None:
    """Ends and forgets a session. Unknown ids are fine."""
    session = self._sessions.pop(session_id, None)
    if session is not None:
      session.end()
      del self._by_key[session.key]
      self._by_request.pop(self._request_of.pop(session_id, ""), None)

  def sweep(self, now: float | None = None) -> list[str]:
    """Ends, later drops, what was idle; returns the ids that it ended."""
    now = self._clock() if now is None else now
    idle = lambda s: not s.busy and now - s.last_active >= self._timeout_s
    ended = []
    for session in list(filter(idle, self._sessions.values())):
      if session.ended:
        self.drop(session.id)
      else:
        session.end()
        session.last_active = now
        ended.append(session.id)
    return ended
