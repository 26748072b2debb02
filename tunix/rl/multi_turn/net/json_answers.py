"""Answers of JSON whose texts came from anywhere.

    return json_answers.Json({"reason": reason}, status)

Promises: half a surrogate pair, which pages and programs may put into a text
and UTF-8 does not have, becomes "?" and fails no answer. NaN is a `ValueError`:
the caller keeps it out.
"""

from __future__ import annotations

import json

from starlette import responses


class Json(responses.JSONResponse):
  """See the module docstring; the arguments are `JSONResponse`'s."""

  def render(self, content: object) -> bytes:
    text = json.dumps(
      content, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.encode("utf-8", "replace")
