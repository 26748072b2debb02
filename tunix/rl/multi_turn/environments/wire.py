"""What genv's messages hold: screenshots, actions, observations, verdicts.

Both ends of the protocol read and write with the functions here. Promises: a
screenshot arrives with the pixels it left with (PNG); a value of the wrong
type, out of range or unknown is refused with its field's name (`WireError`).

Actions come in two vocabularies: `GuiAction`'s own JSON, in pixels
(`{"kind": "click", "x": 12, "y": 30}`), and genv's five (`tap`, `swipe`,
`type`, `key`, `long_press`), in fractions of the screen
(`{"name": "tap", "args": {"x_norm": 0.5, "y_norm": 0.25}}`).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import math
from typing import Any, Mapping

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base

Kind = gui_action.GuiActionKind

MAX_TEXT = 16_384
MAX_KEYS = 8
MAX_PIXELS = 8_192 * 8_192
"""Of a picture that is read: 200 MB when it is decoded, as a bomb may be."""
# Others, such as EPS, are read by programs of this machine.
_FORMATS = ("PNG", "JPEG", "WEBP")
_FAR = 1e6  # Pixels; nothing on a screen is farther away.
_LONGEST_S = 3_600.0

_NUMBERS = ("x", "y", "x2", "y2", "dx", "dy", "duration")
_FIELDS = tuple(f.name for f in dataclasses.fields(gui_action.GuiAction))
_SYSTEM_KEYS = ("home", "back", "menu", "enter")
_GENV = {
    "tap": ("x_norm", "y_norm"),
    "swipe": ("x_norm", "y_norm", "x2_norm", "y2_norm", "duration_ms"),
    "type": ("text",),
    "key": ("key",),
    "long_press": ("x_norm", "y_norm", "duration_ms"),
}


class WireError(ValueError):
  """A message is not what the protocol says; names the field."""


# --- pictures -----------------------------------------------------------------


def to_png(pixels: np.ndarray) -> bytes:
  """uint8[H, W, 3] as PNG, made for speed and not for size."""
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "png", compress_level=1)
  return out.getvalue()


def from_png(data: bytes, what: str = "screenshot") -> np.ndarray:
  """uint8[H, W, 3] of a picture file: PNG, JPEG or WebP.

  Raises:
    WireError: no such picture, or one larger than `MAX_PIXELS`, which is not
      decoded.
  """
  try:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
      if picture.width * picture.height > MAX_PIXELS:
        raise WireError(
            f"{what} has {picture.width}x{picture.height} pixels, more than"
            f" the {MAX_PIXELS} that are read"
        )
      return np.asarray(picture.convert("RGB"))
  except WireError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Decoders raise what they like for bytes that are no picture.
    raise WireError(f"{what} is no picture: {error}") from error


def from_numbers(
    pixels: np.ndarray, what: str = "screenshot"
) -> np.ndarray:
  """uint8[H, W, 3] of whole numbers in [H, W, 3 or 4].

  Raises:
    WireError: they are no picture.
  """
  right = pixels.ndim == 3 and pixels.shape[2] in (3, 4) and pixels.size
  right = right and pixels.dtype.kind in "iu"
  if not right or pixels.min() < 0 or pixels.max() > 255:
    raise WireError(
        f"{what} must be whole numbers from 0 to 255 in [H, W, 3], got"
        f" {pixels.dtype}{list(pixels.shape)}"
    )
  return np.ascontiguousarray(pixels[:, :, :3], dtype=np.uint8)


def screenshot_to_json(pixels: np.ndarray) -> dict[str, Any]:
  return {
      "format": "png",
      "width": int(pixels.shape[1]),
      "height": int(pixels.shape[0]),
      "data": base64.b64encode(to_png(pixels)).decode("ascii"),
  }


def screenshot_from_json(data: Any, what: str = "screenshot") -> np.ndarray:
  """The pixels of `screenshot_to_json`'s form.

  Raises:
    WireError: not of that form.
  """
  text = data.get("data") if isinstance(data, Mapping) else data
  if not isinstance(text, str):
    raise WireError(
        f"{what} must be an object with 'data', a picture in base64; got"
        f" {_short(data)}"
    )
  if text.startswith("data:"):
    text = text.partition(",")[2]
  try:
    raw = base64.b64decode(text, validate=True)
  except (binascii.Error, ValueError) as error:
    raise WireError(f"{what}.data is not base64: {error}") from None
  return from_png(raw, what)


# --- observations and verdicts ------------------------------------------------


def observation_to_json(
    seen: base.Observation, *, picture: Mapping[str, Any] | None
) -> dict[str, Any]:
  """`picture` is `screenshot_to_json`'s, or None to leave it out."""
  data: dict[str, Any] = {
      "instruction": seen.instruction,
      "text": seen.text,
      "done": bool(seen.done),
      "info": jsonable(seen.info),
  }
  if picture is not None:
    data["screenshot"] = dict(picture)
  return data


def observation_from_json(data: Any) -> base.Observation:
  """Raises:

    WireError: no observation with a screenshot.
  """
  if not isinstance(data, Mapping):
    raise WireError(f"observation must be an object, got {_short(data)}")
  info = data.get("info")
  if info is not None and not isinstance(info, Mapping):
    raise WireError(f"observation.info must be an object, got {_short(info)}")
  return base.Observation(
      screenshot_from_json(data.get("screenshot"), "observation.screenshot"),
      instruction=str(data.get("instruction") or ""),
      text=str(data.get("text") or ""),
      done=data.get("done") is True,
      info=info or {},
  )


def reward_of(reply: Any) -> tuple[float, bool]:
  """(score, success) of an evaluate reply, current or legacy.

  The score is `result.score`, else the weighted mean of the validators, else
  a top-level `reward` or `score`, else 1 or 0 by `success`. What is absent or
  null falls through; a zero is a score.

  Raises:
    WireError: none of them is there, or the score is no finite number.
  """
  if not isinstance(reply, Mapping):
    raise WireError(f"an evaluation must be an object, got {_short(reply)}")
  result = reply.get("result")
  result = result if isinstance(result, Mapping) else {}
  success = result.get("success")
  if success is None:
    success = reply.get("success")
  candidates = [
      ("result.score", result.get("score")),
      ("result.validators", _weighted(result.get("validators"))),
      ("reward", reply.get("reward")),
      ("score", reply.get("score")),
  ]
  for name, value in candidates:
    if value is not None:
      score = number(value, name)
      return score, bool(score >= 1.0 if success is None else success)
  if success is None:
    raise WireError(
        "an evaluation needs result.score, result.validators, reward, score or"
        f" success; got {_short(reply)}"
    )
  return float(bool(success)), bool(success)


def _weighted(validators: Any) -> float | None:
  if not isinstance(validators, (list, tuple)) or not validators:
    return None
  total = weights = 0.0
  for i, one in enumerate(validators):
    if not isinstance(one, Mapping):
      raise WireError(f"result.validators[{i}] must be an object")
    weight = one.get("weight")
    weight = 1.0 if weight is None else number(
        weight, f"result.validators[{i}].weight"
    )
    score = one.get("score")
    if score is None:
      score = float(bool(one.get("pass")))
    total += weight * number(score, f"result.validators[{i}].score")
    weights += weight
  return total / weights if weights else None


# --- actions ------------------------------------------------------------------


def action_from_json(
    data: Any, width: int, height: int
) -> gui_action.GuiAction:
  """An action of either vocabulary, in pixels of a `width` x `height` screen.

  Raises:
    WireError: naming the field and what it may be.
  """
  if not isinstance(data, Mapping):
    raise WireError(f"action must be an object, got {_short(data)}")
  if "kind" in data:
    return _own(data)
  if "name" in data:
    return _genv(data, width, height)
  raise WireError(
      "action needs 'kind' (one of"
      f" {', '.join(k.value for k in Kind)}) or 'name' (one of"
      f" {', '.join(_GENV)})"
  )


def _own(data: Mapping[str, Any]) -> gui_action.GuiAction:
  unknown = sorted(str(k) for k in data if k not in _FIELDS)
  if unknown:
    raise WireError(
        f"action takes no {unknown[0]!r}; known: {', '.join(_FIELDS)}"
    )
  fields: dict[str, Any] = {}
  for name, value in data.items():
    if value is None and name != "kind":
      continue
    what = f"action.{name}"
    if name in _NUMBERS:
      value = number(value, what)
      limit = _LONGEST_S if name == "duration" else _FAR
      if abs(value) > limit or (name == "duration" and value < 0):
        raise WireError(f"{what}={value:g} is out of range (up to {limit:g})")
    elif name == "count":
      if isinstance(value, bool) or not isinstance(value, int):
        raise WireError(f"{what} must be 1, 2 or 3, got {_short(value)}")
    elif name == "success":
      if not isinstance(value, bool):
        raise WireError(f"{what} must be true or false, got {_short(value)}")
    elif name == "keys":
      if not isinstance(value, (list, tuple)) or len(value) > MAX_KEYS:
        raise WireError(
            f"{what} must be a list of up to {MAX_KEYS} key names, got"
            f" {_short(value)}"
        )
      value = tuple(_text(k, what, 64) for k in value)
    else:
      value = _text(value, what, MAX_TEXT)
    fields[name] = value
  try:
    return gui_action.GuiAction(**fields)
  except ValueError as error:
    raise WireError(f"action: {error}") from None


def _genv(
    data: Mapping[str, Any], width: int, height: int
) -> gui_action.GuiAction:
  name = data["name"]
  if not isinstance(name, str) or name not in _GENV:
    raise WireError(
        f"action.name must be one of {', '.join(_GENV)}; got {_short(name)}"
    )
  args = data.get("args")
  if args is None:
    args = {k: v for k, v in data.items() if k != "name"}
  if not isinstance(args, Mapping):
    raise WireError(f"action.args must be an object, got {_short(args)}")
  unknown = sorted(str(k) for k in args if k not in _GENV[name])
  if unknown:
    raise WireError(
        f"action {name!r} takes no {unknown[0]!r}; known:"
        f" {', '.join(_GENV[name])}"
    )

  def pixel(axis: str, size: int) -> float:
    share = number(args.get(axis), f"action.{axis}")
    if not 0 <= share <= 1:
      raise WireError(f"action.{axis} must be in [0, 1], got {share:g}")
    return min(share * size, size - 1.0)

  if name == "type":
    return gui_action.GuiAction(
        Kind.TYPE, text=_text(args.get("text"), "action.text", MAX_TEXT)
    )
  if name == "key":
    key = args.get("key")
    if key not in _SYSTEM_KEYS:
      raise WireError(
          f"action.key must be one of {', '.join(_SYSTEM_KEYS)}; got"
          f" {_short(key)}"
      )
    return gui_action.GuiAction(Kind.SYSTEM_BUTTON, text=key)
  x, y = pixel("x_norm", width), pixel("y_norm", height)
  if name == "tap":
    return gui_action.GuiAction(Kind.CLICK, x=x, y=y)
  duration = None
  if args.get("duration_ms") is not None:
    duration = number(args["duration_ms"], "action.duration_ms") / 1000
    if not 0 <= duration <= _LONGEST_S:
      raise WireError(
          f"action.duration_ms must be in [0, {_LONGEST_S * 1000:g}], got"
          f" {duration * 1000:g}"
      )
  if name == "long_press":
    return gui_action.GuiAction(Kind.LONG_PRESS, x=x, y=y, duration=duration)
  return gui_action.GuiAction(
      Kind.SWIPE, x=x, y=y, x2=pixel("x2_norm", width),
      y2=pixel("y2_norm", height), duration=duration,
  )  # pyformat: disable


# --- values -------------------------------------------------------------------


def jsonable(value: Any) -> Any:
  """`value` as JSON can hold it; what it cannot becomes its text.

  Numbers that JSON does not have (nan, infinities) become null.
  """
  if value is None or isinstance(value, (bool, str, int)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, Mapping):
    return {str(k): jsonable(v) for k, v in value.items()}
  if isinstance(value, (list, tuple, set, frozenset)):
    return [jsonable(v) for v in value]
  if isinstance(value, np.generic):
    return jsonable(value.item())
  if isinstance(value, np.ndarray):
    return f"<array {value.dtype}{list(value.shape)}>"
  return str(value)


def number(value: Any, what: str) -> float:
  """Raises:

    WireError: no finite number.
  """
  try:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise WireError(f"{what} must be a number, got {_short(value)}")
    found = float(value)
  except OverflowError:
    found = math.inf
  if not math.isfinite(found):
    raise WireError(f"{what} must be finite, got {_short(value)}")
  return found


def _text(value: Any, what: str, limit: int) -> str:
  if not isinstance(value, str):
    raise WireError(f"{what} must be a string, got {_short(value)}")
  if len(value) > limit:
    raise WireError(
        f"{what} has {len(value)} characters, more than the {limit} that a"
        " message may have"
    )
  try:
    value.encode()
  except UnicodeEncodeError as error:
    # Nothing that is written or shown later could hold it.
    raise WireError(
        f"{what} has half a surrogate pair at character {error.start}"
    ) from None
  return value


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + "..."
