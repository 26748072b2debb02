"""Errors of the API: an HTTP status with a reason, and every wrong field."""

from __future__ import annotations

from typing import Any

MAX_REFUSED = 100
"""Items of a batch that an answer names each."""


class ApiError(Exception):
  """An HTTP status with a reason.

  Attributes:
    status: HTTP status.
    message: the fault, and the fix.
    faults: every wrong field: {"field", "value", "message"}.
    retry_after_s: Seconds until the same request may succeed; None if never.
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
    content: dict[str, Any] = {"detail": self.message, **self.extra}
    if self.faults:
      content["errors"] = self.faults
    return content

  def headers(self) -> dict[str, str]:
    extra_headers = {}
    if self.retry_after_s is not None:
      extra_headers["retry-after"] = f"{self.retry_after_s:g}"
    if self.status == 401:
      extra_headers["www-authenticate"] = "Bearer"
    return extra_headers


def fault(field: str, value: object, message: str) -> dict[str, Any]:
  """Returns one wrong field; a long value is cut."""
  try:
    is_number = isinstance(value, float) or (
      isinstance(value, int) and abs(value) < 1 << 63
    )
    shown = value if is_number else str(value)
  except (RecursionError, ValueError):  # Nested, or a number of many digits.
    shown = "a value too deep or long to print"
  if isinstance(shown, str):
    # Half a surrogate pair cannot be written.
    shown = shown[:200].encode(errors="backslashreplace").decode() + (
      "…" if len(shown) > 200 else ""
    )
  field = field.encode(errors="backslashreplace").decode()
  return {"field": field, "value": shown, "message": message}


def add_refused(
  refused: list[dict[str, Any]],
  kind: str,
  client_id: str | None,
  fault_: dict[str, Any],
) -> None:
  """Adds what is left out; of very many, the last entry counts the rest."""
  if len(refused) < MAX_REFUSED:
    refused.append(
      {"kind": kind, "client_id": client_id, **fault_, "kept": "nothing"}
    )
  else:
    refused[-1]["times"] = refused[-1].get("times", 1) + 1


def wrong(faults: list[dict[str, Any]], ending: str = "") -> ApiError:
  """Returns the error for a request with wrong fields."""
  first = faults[0]
  more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
  return ApiError(
    400,
    f"{first['field']}={first['value']!r}: {first['message']}{more}{ending}",
    faults=faults,
  )


def invalid(faults: list[dict[str, Any]]) -> ApiError:
  """Returns the error for a batch with wrong fields."""
  return wrong(faults, "; nothing of the batch was stored")
