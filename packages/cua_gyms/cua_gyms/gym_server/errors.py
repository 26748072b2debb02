"""Errors that the gym server answers with: `{"detail": …, "code": …}`."""

from __future__ import annotations


class ApiError(Exception):
  """A failed request.

  Attributes:
    status: HTTP status.
    detail: Message for people.
    code: short, stable, for programs: see the table in docs/gym_server.md.
    retry_after_s: seconds until the same request may succeed; None: never.
  """

  def __init__(
    self,
    status: int,
    detail: str,
    *,
    code: str,
    retry_after_s: float | None = None,
  ):
    super().__init__(detail)
    self.status = status
    self.detail = detail
    self.code = code
    self.retry_after_s = retry_after_s

  def body(self) -> dict[str, str]:
    return {"detail": self.detail, "code": self.code}

  def headers(self) -> dict[str, str]:
    out = {}
    if self.retry_after_s is not None:
      # The header holds whole seconds; 0 would make clients spin.
      out["retry-after"] = str(max(1, round(self.retry_after_s)))
    if self.status in (408, 413) or self.code == "no_memory":
      # The rest of the body stays unread.
      out["connection"] = "close"
    return out


def invalid(detail: str) -> ApiError:
  """Returns a 422: the request violates the protocol."""
  return ApiError(422, detail, code="invalid_request")
