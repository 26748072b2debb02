"""What a request is answered with when it cannot be served."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
  """An HTTP status with a reason.

  Attributes:
    status: HTTP status.
    message: what is wrong and what to do.
    faults: every wrong field: {"field", "value", "message"}.
    retry_after_s: when the same request may succeed; None if never.
    extra: more members of the body.
  """

  def __init__(
      self,
      status: int,
      message: str,
      *,
      faults: list[dict[str, Any]] | None = None,
      retry_after_s: float | None = None,
      extra: dict[str, Any] | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.message = message
    self.faults = faults or []
    self.retry_after_s = retry_after_s
    self.extra = extra or {}

  def body(self) -> dict[str, Any]:
    found: dict[str, Any] = {"detail": self.message, **self.extra}
    if self.faults:
      found["errors"] = self.faults
    return found

  def headers(self) -> dict[str, str]:
    found = {}
    if self.retry_after_s is not None:
      found["retry-after"] = f"{self.retry_after_s:g}"
    if self.status == 401:
      found["www-authenticate"] = "Bearer"
    return found


def fault(field: str, value: Any, message: str) -> dict[str, Any]:
  """One wrong field; a long value is cut."""
  shown = value if isinstance(value, (int, float, bool)) else str(value)
  if isinstance(shown, str) and len(shown) > 200:
    shown = shown[:200] + "…"
  return {"field": field, "value": shown, "message": message}


def invalid(faults: list[dict[str, Any]]) -> ApiError:
  """A batch that is refused as a whole, with everything that is wrong."""
  first = faults[0]
  more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
  return ApiError(
      400,
      f"{first['field']}={first['value']!r}: {first['message']}{more}; nothing"
      " of the batch was stored",
      faults=faults,
  )
