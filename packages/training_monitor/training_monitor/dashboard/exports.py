"""Exports a rollout as a file.

json  the rows of the database
atif  Harbor's Agent Trajectory Interchange Format, version 1.7
      (github.com/laude-institute/harbor, docs/rfcs/0001-trajectory-format)
html  a page that needs no server: pictures are in it, no script is
webp  the screens as an animation, with the actions drawn on them
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import io
import math
import pathlib
import re
from typing import Any, Mapping, Sequence

import jinja2
import orjson
from PIL import Image as pillow
from PIL import ImageDraw

from training_monitor.core import click_overlay
from training_monitor.dashboard import page_request
from training_monitor.dashboard import pictures
from training_monitor.dashboard import text
from training_monitor.server import errors
from training_monitor.server import screenshots as screenshots_lib

FORMATS = ("json", "atif", "html", "webp")
ATIF_VERSION = "ATIF-v1.7"
_HERE = pathlib.Path(__file__).parent
_MAX_FRAMES = 300
_ANIMATION_PIXELS = 80_000_000
"""Of all frames of an animation together, which are in memory at once: a
quarter of a gigabyte. Longer ones have smaller frames."""
_EMBEDDED_BYTES = 256 << 20
"""Of all screenshots inside a file."""
_LARGEST_FRAME = 1280
_FRAME_MS = 900
_RED, _WHITE = (224, 32, 42), (255, 255, 255)


@dataclasses.dataclass(frozen=True)
class StoredImage:
  """A stored screenshot: its hash, kind, size in pixels and file."""

  sha: str
  media_type: str
  width: int
  height: int
  path: pathlib.Path

  @property
  def missing(self) -> bool:
    return False

  def data_url(self) -> str:
    data = base64.b64encode(self.path.read_bytes()).decode()
    return f"data:{self.media_type};base64,{data}"


def hashes_of(turn: Mapping[str, Any]) -> list[str]:
  """Returns the hashes of a turn's screenshots, in order."""
  candidates = [
    (o["screenshot_uri"] or "").removeprefix("sha256:")
    for o in turn["observations"]
  ]
  return [sha for sha in candidates if screenshots_lib.SHA.fullmatch(sha)]


def make(
  name: str,
  rollout: Mapping[str, Any],
  training: Mapping[str, Any],
  images: Mapping[str, StoredImage],
) -> page_request.File:
  """Returns a file of a rollout.

  Args:
    name: one of FORMATS.
    rollout: Answer of `Queries.rollout`, with the `turns` of `Queries.turns`.
    training: its run.
    images: screenshots by hash; missing ones are left out.

  Raises:
    ApiError: 404, there is nothing to make an animation of.
  """
  stem = re.sub(r"[^A-Za-z0-9._-]+", "-", rollout["rollout_id"])[-80:]
  stem = stem.strip("-.")
  if name == "json":
    data, kind, suffix = _json(rollout), "application/json", "json"
  elif name == "atif":
    _check_size(rollout, images)
    data = _json(atif(rollout, training, images))
    kind, suffix = "application/json", "atif.json"
  elif name == "html":
    _check_size(rollout, images)
    data, kind = page(rollout, training, images).encode(), "text/html"
    suffix = "html"
  else:
    data, kind, suffix = animation(rollout, images), "image/webp", "webp"
  return page_request.File(data, kind, f"{stem or 'rollout'}.{suffix}")


def _check_size(
  rollout: Mapping[str, Any], images: Mapping[str, StoredImage]
) -> None:
  """Raises ApiError 413 if too much would be inside a file."""
  total = 0
  for sha in (h for turn in rollout["turns"] for h in hashes_of(turn)):
    if sha in images:
      total += images[sha].path.stat().st_size
  if total > _EMBEDDED_BYTES:
    raise errors.ApiError(
      413,
      f"the screenshots are {total >> 20} MB, and a file holds"
      f" {_EMBEDDED_BYTES >> 20}; take the format json, and the screenshots"
      " by their hashes from /api/v1/screenshots",
    )


def _json(value: object) -> bytes:
  return orjson.dumps(
    value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
  )


# --- ATIF -------------------------------------------------------------------


def atif(
  rollout: Mapping[str, Any],
  training: Mapping[str, Any],
  images: Mapping[str, StoredImage],
) -> dict[str, Any]:
  """Returns the rollout as an ATIF trajectory.

  The task is the user's message, with the first screenshot; a turn is a step
  of the agent, its effect the observation. Screenshots are inside as data
  URLs, so that the file is whole.
  """
  task = rollout["task"]
  first = next((h for t in rollout["turns"] for h in hashes_of(t)[:1]), None)
  instruction: Any = task["description"] or task["task_id"]
  if first is not None and first in images:
    instruction = [{"type": "text", "text": instruction}, _part(images[first])]
  steps: list[dict[str, Any]] = [
    _without_none(
      {
        "step_id": 1,
        "source": "user",
        "message": instruction,
        "timestamp": rollout["start_time"],
      }
    )
  ]
  sampled = 0
  for turn in rollout["turns"]:
    step, count = _atif_step(turn, len(steps) + 1, images)
    steps.append(step)
    sampled += count
  return {
      "schema_version": ATIF_VERSION,
      "session_id": rollout["rollout_id"],
      "agent": _without_none({
          "name": "tunix-multi-turn", "version": _version(),
          "model_name": rollout["model_path"] or training["model_name"],
      }),
      "steps": steps,
      "final_metrics": {
          "total_completion_tokens": sampled, "total_steps": len(steps),
          "extra": _without_none({
              "reward": rollout["reward"], "success": rollout["task_success"],
              "status": rollout["status_message"] or rollout["status"],
          }),
      },
      "extra": _without_none({
          "run": training["run_name"], "task_id": task["task_id"],
          "group": rollout["group"], "attempt": rollout["env_index"],
          "error": rollout["error_message"],
          "validations": [
              _without_none({
                  "success": bool(v["success"]), "details": v["details_json"],
              })
              for v in rollout["validations"]
          ],
      }),
  }  # fmt: skip


def _atif_step(
  turn: Mapping[str, Any], number: int, images: Mapping[str, StoredImage]
) -> tuple[dict[str, Any], int]:
  metrics = (
    turn["metrics_json"] if isinstance(turn["metrics_json"], dict) else {}
  )
  raw = turn.get("raw") or {}
  calls, ids, logprobs = [], None, None
  for index, action in enumerate(turn["actions"]):
    if isinstance(action["tokens"], list):
      ids, logprobs = action["tokens"], action["logprobs"]
    if action["action_type"] in ("parse_error", "summary", "text"):
      continue
    arguments = action["tool_args"]
    calls.append(
      _without_none(
        {
          "tool_call_id": f"call_{turn['turn']}_{index}",
          "function_name": action["tool_name"] or action["action_type"] or "?",
          "arguments": arguments if isinstance(arguments, dict) else {},
          "extra": {"action": action["action_type"]}
          if action["tool_name"] and action["action_type"]
          else None,
        }
      )
    )
  content: list[dict[str, Any]] = [
    {"type": "text", "text": o["text_content"]}
    for o in turn["observations"]
    if o["text_content"]
  ]
  content += [_part(images[h]) for h in hashes_of(turn)[1:] if h in images]
  seconds = metrics.get("seconds")
  step = _without_none({
      "step_id": number, "source": "agent", "timestamp": turn["end_time"],
      "message": str(
          metrics.get("model_response") or raw.get("model_response") or ""
      ),
      "reasoning_content": metrics.get("thought") or None,
      "tool_calls": calls or None,
      "observation": {"results": [_without_none({
          # One screenshot answers all calls of a turn; one call is named.
          "source_call_id": calls[0]["tool_call_id"]
          if len(calls) == 1 else None,
          "content": content,
      })]} if content else None,
      "metrics": _without_none({
          "completion_tokens": len(ids) if ids else None,
          "completion_token_ids": ids,
          "logprobs": logprobs if isinstance(logprobs, list) else None,
          "extra": _without_none({
              "policy_versions": metrics.get("policy_versions") or None,
              "entropies": metrics.get("entropies") or None,
          }) or None,
      }) or None,
      "extra": _without_none({
          "reward": turn["reward"], "seconds": seconds or None,
      }) or None,
  })  # fmt: skip
  return step, len(ids or ())


def _part(image: StoredImage) -> dict[str, Any]:
  return {
    "type": "image",
    "source": {"media_type": image.media_type, "path": image.data_url()},
  }


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in fields.items() if v is not None}


def _version() -> str:
  try:
    return importlib.metadata.version("tunix-multi-turn")
  except importlib.metadata.PackageNotFoundError:
    return "0"


# --- a page -----------------------------------------------------------------


def page(
  rollout: Mapping[str, Any],
  training: Mapping[str, Any],
  images: Mapping[str, StoredImage],
) -> str:
  """Returns HTML with everything inside and nothing that runs."""
  style = (_HERE / "templates" / "export.css").read_text(encoding="utf-8")
  digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters.update(
    visible=text.visible,
    plain=text.plain,
    number=text.number,
    clock=text.clock,
    seconds=text.seconds,
  )
  turns = []
  for turn in rollout["turns"]:
    metrics = (
      turn["metrics_json"] if isinstance(turn["metrics_json"], dict) else {}
    )
    gestures = [pictures.gesture(a) for a in turn["actions"]]
    shown = [images[h] for h in hashes_of(turn) if h in images]
    turns.append(
      {
        "turn": turn["turn"],
        "metrics": metrics,
        "gestures": gestures,
        "reward": turn["reward"],
        "image": shown[0] if shown else None,
        "overlay": pictures.overlay(gestures, shown[0].width, shown[0].height)
        if shown
        else "",
        "after": shown[-1] if len(shown) > 1 else None,
        "actions": turn["actions"],
        "reply": [
          o["text_content"] for o in turn["observations"] if o["text_content"]
        ],
      }
    )
  return environment.get_template("export.html").render(
    rollout=rollout,
    training=training,
    turns=turns,
    style=jinja2.utils.markupsafe.Markup(style),
    digest=digest,
  )


# --- an animation -------------------------------------------------------------


def animation(
  rollout: Mapping[str, Any], images: Mapping[str, StoredImage]
) -> bytes:
  """Returns an animation: each turn's screen with its action, then the last."""
  plan: list[tuple[StoredImage, Sequence[click_overlay.Gesture], str]] = []
  for turn in rollout["turns"][:_MAX_FRAMES]:
    shown = [images[h] for h in hashes_of(turn) if h in images]
    gestures = [pictures.gesture(a) for a in turn["actions"]]
    if shown:
      labels = ", ".join(
        g.label + (f" {g.text!r}" if g.text else "") for g in gestures
      )
      plan.append((shown[0], gestures, f"{turn['turn']}  {labels}"))
    if turn is rollout["turns"][-1] and len(shown) > 1:
      outcome = rollout["status_message"] or rollout["status"]
      plan.append((shown[-1], (), f"{outcome}, reward {rollout['reward']}"))
  if not plan:
    raise errors.ApiError(
      404, "no screenshot of this rollout is here: nothing to animate"
    )
  size = _frame_size(plan[0][0], len(plan))
  frames = [
    _frame(image, gestures, label, size) for image, gestures, label in plan
  ]
  file = io.BytesIO()
  frames[0].save(
    file,
    "WEBP",
    save_all=True,
    append_images=frames[1:],
    loop=0,
    duration=[_FRAME_MS] * (len(frames) - 1) + [3 * _FRAME_MS],
    quality=80,
    method=2,
  )
  return file.getvalue()


def _frame_size(image: StoredImage, count: int) -> tuple[int, int]:
  """Returns a frame's size, by which text is legible and files stay small."""
  larger = max(image.width, image.height)
  scale = (
    _LARGEST_FRAME / larger
    if larger > _LARGEST_FRAME
    else max(1, 480 // larger)
  )
  pixels = image.width * image.height * scale**2 * count
  scale *= min(1.0, math.sqrt(_ANIMATION_PIXELS / pixels))
  return (
    max(1, round(image.width * scale)),
    max(1, round(image.height * scale)),
  )


def _frame(
  image: StoredImage,
  gestures: Sequence[click_overlay.Gesture],
  label: str,
  size: tuple[int, int],
) -> pillow.Image:
  with pillow.open(image.path) as opened:
    smooth = opened.width > size[0]
    frame = opened.convert("RGB").resize(
      size, pillow.Resampling.LANCZOS if smooth else pillow.Resampling.NEAREST
    )
  pen = ImageDraw.Draw(frame)
  sx, sy = size[0] / image.width, size[1] / image.height
  for mark in click_overlay.marks(gestures, image.width, image.height):
    for colour, width in ((_WHITE, 5), (_RED, 3)):
      if mark.ring is not None:
        x, y = mark.ring
        draw = pen.rectangle if mark.square else pen.ellipse
        for r in mark.radii:
          draw(
            ((x - r) * sx, (y - r) * sy, (x + r) * sx, (y + r) * sy),
            outline=colour,
            width=width,
          )
      for line in (mark.line, mark.head):
        if line is not None:
          pen.line(
            [(x * sx, y * sy) for x, y in line], fill=colour, width=width
          )
  caption = label.encode("ascii", "replace").decode()[:120]
  pen.rectangle((0, size[1] - 16, size[0], size[1]), fill=(20, 24, 32))
  pen.text((6, size[1] - 14), caption, fill=_WHITE)
  return frame
