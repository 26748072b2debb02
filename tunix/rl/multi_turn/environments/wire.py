"""Reads and writes gym messages: screenshots, actions, observations, verdicts.

Both ends of genv's and OpenEnv's protocols use the functions and models here.
Promises: a screenshot arrives with the pixels it left with (PNG); a value of
the wrong type, out of range or unknown raises a `WireError` that names its
field.

Actions come in two vocabularies: `GuiAction`'s own JSON, in pixels
(`{"kind": "click", "x": 12, "y": 30}`), and genv's five (`tap`, `swipe`,
`type`, `key`, `long_press`), in fractions of the screen
(`{"name": "tap", "args": {"x_norm": 0.5, "y_norm": 0.25}}`).
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import Annotated, Any, Literal, Mapping, NotRequired

import numpy as np
from PIL import Image
import pydantic
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import json_models
from typing_extensions import TypedDict

Kind = gui_action.GuiActionKind

MAX_TEXT = 16_384
MAX_KEYS = 8
MAX_PIXELS = 8_192 * 8_192
"""Of a picture that is decoded: 200 MB of pixels."""
# Pillow reads others, such as EPS, with programs of this machine.
_FORMATS = ("PNG", "JPEG", "WEBP")


class WireError(ValueError):
  """A message violates the protocol; names the field."""


# --- screenshots --------------------------------------------------------------


class Screenshot(TypedDict):
  """A picture in JSON: exact pixels, as PNG in base64."""

  format: Literal["png"]
  width: int
  height: int
  data: str


def to_png(pixels: np.ndarray) -> bytes:
  """uint8[H, W, 3] as PNG; favours speed over size."""
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
          f" {MAX_PIXELS}; send a smaller one"
        )
      return np.asarray(picture.convert("RGB"))
  except WireError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Decoders raise all kinds of exceptions for bytes that are no picture.
    raise WireError(f"{what} is not a picture: {error}") from error


def from_numbers(pixels: np.ndarray, what: str = "screenshot") -> np.ndarray:
  """uint8[H, W, 3] of whole numbers in [H, W, 3 or 4].

  Raises:
    WireError: the numbers are not a picture.
  """
  right = pixels.ndim == 3 and pixels.shape[2] in (3, 4) and pixels.size
  right = right and pixels.dtype.kind in "iu"
  if not right or pixels.min() < 0 or pixels.max() > 255:
    raise WireError(
      f"{what} must be whole numbers from 0 to 255 in [H, W, 3], got"
      f" {pixels.dtype}{list(pixels.shape)}"
    )
  return np.ascontiguousarray(pixels[:, :, :3], dtype=np.uint8)


def screenshot_to_json(pixels: np.ndarray) -> Screenshot:
  """uint8[H, W, 3] in JSON's form."""
  return {
    "format": "png",
    "width": int(pixels.shape[1]),
    "height": int(pixels.shape[0]),
    "data": base64.b64encode(to_png(pixels)).decode("ascii"),
  }


def screenshot_from_json(data: object, what: str = "screenshot") -> np.ndarray:
  """uint8[H, W, 3] of a `Screenshot`, a base64 text or a data URI.

  Raises:
    WireError: `data` has another form, or holds no picture.
  """
  return from_png(screenshot_file(data, what), what)


def screenshot_file(data: object, what: str = "screenshot") -> bytes:
  """Decodes the file in a `Screenshot`, a base64 text or a data URI.

  Raises:
    WireError: `data` has another form, or is not base64.
  """
  text = data.get("data") if isinstance(data, Mapping) else data
  if not isinstance(text, str):
    raise WireError(
      f"{what} must be an object with 'data', a picture in base64; got"
      f" {json_models.short(data)}"
    )
  if text.startswith("data:"):
    text = text.partition(",")[2]
  try:
    return base64.b64decode(text, validate=True)
  except (binascii.Error, ValueError) as error:
    raise WireError(f"{what}.data is not base64: {error}") from None


# --- observations and verdicts ------------------------------------------------


class Observation(TypedDict):
  """A gym's answer to a start or a step."""

  instruction: str
  text: str
  done: bool
  info: dict[str, Any]
  screenshot: NotRequired[Screenshot]


def observation_to_json(
  observation: base.Observation, *, picture: Screenshot | None
) -> Observation:
  """`picture` is `screenshot_to_json`'s, or None to leave it out."""
  data: Observation = {
    "instruction": observation.instruction,
    "text": observation.text,
    "done": bool(observation.done),
    "info": jsonable(observation.info),
  }
  if picture is not None:
    data["screenshot"] = picture
  return data


def observation_from_json(data: object) -> base.Observation:
  """Raises:

  WireError: no observation with a screenshot.
  """
  if not isinstance(data, Mapping):
    raise WireError(
      f"observation must be an object, got {json_models.short(data)}"
    )
  info = data.get("info")
  if info is not None and not isinstance(info, Mapping):
    raise WireError(
      f"observation.info must be an object, got {json_models.short(info)}"
    )
  return base.Observation(
    screenshot_from_json(data.get("screenshot"), "observation.screenshot"),
    instruction=str(data.get("instruction") or ""),
    text=str(data.get("text") or ""),
    done=data.get("done") is True,
    info=info or {},
  )


def reward_of(reply: object) -> tuple[float, bool]:
  """(score, success) of an evaluate reply, current or legacy.

  The score is `result.score`, else the weighted mean of the validators, else
  a top-level `reward` or `score`, else 1 or 0 by `success`. An absent or null
  one falls through; a zero is a score.

  Raises:
    WireError: the reply has no score, or one that is not a finite number.
  """
  if not isinstance(reply, Mapping):
    raise WireError(
      f"an evaluation must be an object, got {json_models.short(reply)}"
    )
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
      f" success; got {json_models.short(reply)}"
    )
  return float(bool(success)), bool(success)


def _weighted(validators: object) -> float | None:
  if not isinstance(validators, (list, tuple)) or not validators:
    return None
  total = weights = 0.0
  for i, one in enumerate(validators):
    if not isinstance(one, Mapping):
      raise WireError(f"result.validators[{i}] must be an object")
    weight = one.get("weight")
    weight = (
      1.0
      if weight is None
      else number(weight, f"result.validators[{i}].weight")
    )
    score = one.get("score")
    if score is None:
      score = float(bool(one.get("pass")))
    total += weight * number(score, f"result.validators[{i}].score")
    weights += weight
  return total / weights if weights else None


# --- actions ------------------------------------------------------------------


Text = Annotated[str, pydantic.Field(max_length=MAX_TEXT)]
_Key = Annotated[str, pydantic.Field(max_length=64)]
_Pixels = Annotated[float, pydantic.Field(ge=-1e6, le=1e6)]
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]
_MAX_S = 3_600.0
_DEEPEST = 100  # Levels of a value that is a gym's own.
_STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


@pydantic.with_config(_STRICT)
class _Fields(TypedDict, total=False):
  """The fields of `GuiAction`, as a message may hold them."""

  kind: Annotated[Kind, pydantic.Field(strict=False)]
  x: _Pixels
  y: _Pixels
  x2: _Pixels
  y2: _Pixels
  button: Literal["left", "right", "middle", "back", "forward"]
  count: Annotated[int, pydantic.Field(ge=1, le=3)]
  dx: _Pixels
  dy: _Pixels
  text: Text
  keys: Annotated[list[_Key], pydantic.Field(max_length=MAX_KEYS)]
  duration: Annotated[float, pydantic.Field(ge=0, le=_MAX_S)]
  success: bool


@pydantic.with_config(_STRICT)
class _Tap(TypedDict):
  x_norm: _Share
  y_norm: _Share


@pydantic.with_config(_STRICT)
class _LongPress(_Tap):
  duration_ms: NotRequired[
    Annotated[float, pydantic.Field(ge=0, le=_MAX_S * 1000)]
  ]


@pydantic.with_config(_STRICT)
class _Swipe(_LongPress):
  x2_norm: _Share
  y2_norm: _Share


@pydantic.with_config(_STRICT)
class _Type(TypedDict):
  text: Text


@pydantic.with_config(_STRICT)
class _SystemKey(TypedDict):
  key: Literal["home", "back", "menu", "enter"]


_GENV: dict[str, tuple[Kind, Any]] = {
  "tap": (Kind.CLICK, _Tap),
  "swipe": (Kind.SWIPE, _Swipe),
  "type": (Kind.TYPE, _Type),
  "key": (Kind.SYSTEM_BUTTON, _SystemKey),
  "long_press": (Kind.LONG_PRESS, _LongPress),
}


def _genv_action(
  data: Mapping[str, Any], width: int, height: int
) -> gui_action.GuiAction:
  name, args = data["name"], data.get("args")
  if not isinstance(name, str) or name not in _GENV:
    raise WireError(
      f"action.name={json_models.short(name)} must be one of {', '.join(_GENV)}"
    )
  if args is None:
    args = {k: v for k, v in data.items() if k not in ("name", "args")}
  if not isinstance(args, Mapping):
    raise WireError(
      f"action.args must be an object, got {json_models.short(args)}"
    )
  kind, model = _GENV[name]
  args = json_models.validate(model, _given(args), "action")
  fields: dict[str, Any] = {}
  sizes = {"x": width, "y": height, "x2": width, "y2": height}
  for axis, size in sizes.items():
    if (share := args.get(f"{axis}_norm")) is not None:
      fields[axis] = min(share * size, size - 1.0)
  if "duration_ms" in args:
    fields["duration"] = args["duration_ms"] / 1000
  if kind in (Kind.TYPE, Kind.SYSTEM_BUTTON):
    fields["text"] = args["text" if kind is Kind.TYPE else "key"]
  return gui_action.GuiAction(kind, **fields)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields without those that are null, which means "not given"."""
  return {k: v for k, v in fields.items() if v is not None}


def action_from_json(
  data: object, width: int, height: int
) -> gui_action.GuiAction:
  """Converts an action of either vocabulary to pixels of the screen.

  Raises:
    WireError: names the field and the values allowed.
  """
  if not isinstance(data, Mapping):
    raise WireError(f"action must be an object, got {json_models.short(data)}")
  if "kind" not in data and "name" not in data:
    raise WireError(
      "action needs 'kind' (one of"
      f" {', '.join(k.value for k in Kind)}) or 'name' (one of"
      f" {', '.join(_GENV)})"
    )
  try:
    if "kind" not in data:
      return _genv_action(data, width, height)
    own_fields = {**_given(data), "kind": data["kind"]}
    fields: Any = json_models.validate(_Fields, own_fields, "action")
    return gui_action.GuiAction(**fields)
  except ValueError as error:
    text = str(error)  # `GuiAction` raises without the word "action".
    raise WireError(
      text if text.startswith("action") else f"action: {text}"
    ) from None


def kind_schemas(extra: Mapping[str, Any] | None = None) -> list[Any]:
  """A JSON Schema of each kind of `GuiAction`, with `extra` properties."""
  field_schemas = json_models.adapter(_Fields).json_schema()["properties"]
  field_schemas["keys"]["minItems"] = 1
  variants = []
  for kind in Kind:
    required, optional = gui_action.fields_of(kind)
    if "element" in required:
      continue  # Messages hold no ids: no gym server shows a tree.
    fields = {
      n: s for n, s in field_schemas.items() if n in required or n in optional
    }
    variants.append(
      {
        "type": "object",
        "properties": {
          "kind": {"const": kind.value},
          **fields,
          **(extra or {}),
        },
        "required": ["kind", *sorted(required)],
        "additionalProperties": False,
      }
    )
  return variants


def _action_schema() -> dict[str, Any]:
  """JSON Schema of both vocabularies."""
  genv = []
  for name, (_, args) in _GENV.items():
    genv.append(
      {
        "type": "object",
        "properties": {
          "name": {"const": name},
          "args": json_models.adapter(args).json_schema(),
        },
        "required": ["name", "args"],
      }
    )
  return {"anyOf": [*kind_schemas(), *genv]}


Action = Annotated[dict[str, Any], pydantic.WithJsonSchema(_action_schema())]
"""An action in a message; `action_from_json` checks and converts it."""


# --- values -------------------------------------------------------------------


def jsonable(value: object, levels: int = _DEEPEST) -> Any:
  """Converts `value` to JSON values; other objects become their text.

  Numbers that JSON does not have (nan, infinities) become null, and what nests
  more than `levels` deep "…".
  """
  if value is None or isinstance(value, (bool, str, int)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, (Mapping, list, tuple, set, frozenset)):
    if not levels:
      return "…"
    if isinstance(value, Mapping):
      return {str(k): jsonable(v, levels - 1) for k, v in value.items()}
    return [jsonable(v, levels - 1) for v in value]
  if isinstance(value, np.generic):
    return jsonable(value.item())
  if isinstance(value, np.ndarray):
    return f"<array {value.dtype}{list(value.shape)}>"
  return str(value)


def number(value: object, what: str) -> float:
  """`value` as a float; `what` names it in the error.

  Raises:
    WireError: no finite number.
  """
  try:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise WireError(
        f"{what} must be a number, got {json_models.short(value)}"
      )
    result = float(value)
  except OverflowError:
    result = math.inf
  if not math.isfinite(result):
    raise WireError(f"{what} must be finite, got {json_models.short(value)}")
  return result
