"""Defines errors in the shape that OpenAI's clients understand."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
  """An error answer to a request.

  Attributes:
    status: HTTP status.
    code: Short, stable code for programs.
    param: Path of the wrong field, if a field is wrong.
    details: Fields that only some clients look for; None: no such object.
    retry_after_s: Seconds after which the same request may succeed; None: the
      answer asks clients not to repeat it.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    details: dict[str, Any] | None = None,
    retry_after_s: float | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.message = message
    self.code = code
    self.param = param
    self.details = details
    self.retry_after_s = retry_after_s

  @property
  def type(self) -> str:
    if self.status == 401:
      return "authentication_error"
    if self.status == 429:
      return "rate_limit_error"
    return "server_error" if self.status >= 500 else "invalid_request_error"

  def body(self) -> dict[str, Any]:
    error: dict[str, Any] = {
      "message": _whole(self.message),
      "type": self.type,
      "param": None if self.param is None else _whole(self.param),
      "code": self.code,
    }
    if self.details is not None:
      error["details"] = self.details
    return {"type": "error", "error": error}  # Where Anthropic's clients look.

  def headers(self) -> dict[str, str]:
    if self.retry_after_s is None:
      # Else clients repeat 409 and 5xx by themselves, and sample once more.
      return {"x-should-retry": "false"}
    return {"retry-after": f"{self.retry_after_s:g}"}


def _whole(text: str) -> str:
  """Returns the text with halves of surrogate pairs escaped: they have no
  UTF-8."""
  return text.encode(errors="backslashreplace").decode()


def invalid(
  param: str | None, message: str, code: str = "invalid_value"
) -> ApiError:
  """Returns the error of a request whose field `param` has to change."""
  return ApiError(400, message, code=code, param=param)
