"""Formats values for a page. Pure functions.

Every text from outside goes through `visible`, which shows each character that
would otherwise hide, reorder or imitate something.
"""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

import markupsafe
import orjson

HIDDEN = re.compile(
  "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # Controls but tab and newline.
  "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e"
  "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # Zero width, bidi, isolates.
  "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
  "\ud800-\udfff"
  "\U000e0000-\U000e0fff]"
)
_LONGEST = 20_000
NOTHING = "–"


def visible(value: object, most: int = _LONGEST) -> markupsafe.Markup:
  """Returns the text as HTML in which no character is invisible.

  Args:
    value: text; anything else as its JSON, None as a dash.
    most: characters shown. A longer text ends in "…"; at the default length
      also in the number of characters cut.
  """
  if value is None:
    return markupsafe.Markup(NOTHING)
  text = value if isinstance(value, str) else dump(value)
  cut = len(text) - most
  text = text[:most]
  parts, last = [], 0
  for match in HIDDEN.finditer(text):
    parts.append(markupsafe.escape(text[last : match.start()]))
    code = f"U+{ord(match.group()):04X}"
    parts.append(markupsafe.Markup(f'<span class="hidden-char">{code}</span>'))
    last = match.end()
  parts.append(markupsafe.escape(text[last:]))
  if cut > 0 and most < _LONGEST:
    parts.append(markupsafe.Markup("…"))  # A name or a line of a table.
  elif cut > 0:
    parts.append(
      markupsafe.Markup(
        f' <span class="faint">… {cut:,} more characters: download the'
        " JSON</span>"
      )
    )
  return markupsafe.Markup("").join(parts)


def plain(value: object, most: int = 300) -> str:
  """Returns the same for attributes and titles: text without markup."""
  text = value if isinstance(value, str) else dump(value)
  if len(text) > most:
    text = text[: most - 1] + "…"
  return HIDDEN.sub(lambda m: f"[U+{ord(m.group()):04X}]", text)


def dump(value: object) -> str:
  """Returns JSON, indented; text for values that JSON lacks."""
  try:
    return orjson.dumps(
      value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str
    ).decode()
  except (TypeError, ValueError):
    return str(value)


def number(value: Any, digits: int = 3) -> str:
  """Returns a number of a few significant digits; a dash for none."""
  if (other := _no_number(value)) is not None:
    return other
  if isinstance(value, int) or float(value).is_integer() and abs(value) < 1e6:
    return f"{int(value):,}"
  size = abs(value)
  if size >= 1e6 or size < 1e-4:
    return f"{value:.{digits - 1}e}"
  if size >= 1000:
    return f"{value:,.0f}"
  return f"{value:.{digits}g}"


def _no_number(value: object) -> str | None:
  """Text for a value that is not a finite number; None for a finite one."""
  if value is None:
    return NOTHING
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return plain(value, 40)  # A client's text in a number's place.
  return None if math.isfinite(value) else str(value)


def percent(value: Any) -> str:
  """Returns a share in [0, 1], with the digits of `success_rates.text_of`."""
  other = _no_number(value)
  return f"{100 * value:.1f} %" if other is None else other


def size(value: Any) -> str:
  """Returns a number of bytes in words."""
  if (other := _no_number(value)) is not None:
    return other
  for unit in ("B", "kB", "MB", "GB"):
    if abs(value) < 1000:
      return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
    value /= 1000
  return f"{value:.1f} TB"


def seconds(value: Any) -> str:
  """Returns a duration in words."""
  if (other := _no_number(value)) is not None:
    return other
  if value < 0:
    return "0 s"
  if value < 1:
    return f"{1000 * value:.0f} ms"
  if value < 100:
    return f"{value:.1f} s"
  minutes, remainder = divmod(round(value), 60)
  if minutes < 100:
    return f"{minutes} min {remainder:02d} s"
  hours, minutes = divmod(minutes, 60)
  if hours < 72:
    return f"{hours} h {minutes:02d} min"
  return f"{hours // 24} d {hours % 24} h"


def moment(value: str | datetime.datetime | None) -> datetime.datetime | None:
  """Returns a time of the database, in UTC."""
  if value is None:
    return None
  if isinstance(value, str):
    try:
      value = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
      return None
  if value.tzinfo is None:
    value = value.replace(tzinfo=datetime.timezone.utc)
  return value.astimezone(datetime.timezone.utc)


def clock(value: str | datetime.datetime | None) -> markupsafe.Markup:
  """Returns a time as a `<time>` element, in UTC."""
  instant = moment(value)
  if instant is None:
    return markupsafe.Markup(NOTHING)
  return markupsafe.Markup('<time datetime="{}">{}</time>').format(
    instant.isoformat(timespec="milliseconds"),
    instant.strftime("%Y-%m-%d %H:%M:%S"),
  )


def between(
  start: str | datetime.datetime | None, end: str | datetime.datetime | None
) -> float | None:
  """Returns seconds from one time to another; to now without the other."""
  first = moment(start)
  if first is None:
    return None
  last = moment(end) or datetime.datetime.now(datetime.timezone.utc)
  return (last - first).total_seconds()


def ago(value: str | datetime.datetime | None) -> markupsafe.Markup:
  """Returns the time since `value`, with the time itself as title."""
  instant, since = moment(value), between(value, None)
  if instant is None or since is None:
    return markupsafe.Markup(NOTHING)
  words = "now" if since < 1 else f"{seconds(since)} ago"
  element = markupsafe.Markup('<time datetime="{0}" title="{0}">{1}</time>')
  return element.format(instant.isoformat(timespec="seconds"), words)


def read_json(value: object) -> Any:
  """Returns a JSON column; None when it is not JSON."""
  if not isinstance(value, (str, bytes)):
    return value
  try:
    return orjson.loads(value)
  except orjson.JSONDecodeError:
    return None


def read_object(value: object) -> dict[str, Any]:
  """Returns a JSON column that should hold an object; {} when it does not."""
  content = read_json(value)
  return content if isinstance(content, dict) else {}
