"""Reads and writes the image settings of a checkpoint's processor files.

`preprocessor_config.json` is the file of transformers 4 and of most published
checkpoints. transformers 5 writes `processor_config.json` alone, whose section
`image_processor` holds the same fields and wins over the other file there.

Promises: both files are read; a field that a file lacks has the default of
transformers' `Qwen2VLImageProcessor`; of `Glm4vImageProcessor`, whose limits of
an area are of a still taken twice; of `Gemma3ImageProcessor`, whose images have
one size; or of `Idefics3ImageProcessor`, whose tiles have. Two values of one
field are refused, naming both. The files written are read alike by transformers
4 and 5.

Does not: build a processor (see `qwen_vl_inputs`), import JAX or transformers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import types
from typing import Any, Mapping

from tunix.rl.multi_turn.policy.checkpoints import tensor_files

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
VIDEO = "video_preprocessor_config.json"
SECTION = "image_processor"
FILES = (PREPROCESSOR, f"{PROCESSOR}:{SECTION}")

IMAGE_PROCESSORS: tuple[str, ...] = (
  "Qwen2VLImageProcessor",
  "Qwen2VLImageProcessorFast",
  "Qwen2VLImageProcessorPil",
  "Qwen2_5_VLImageProcessor",  # Of transformers before 4.49.
)
"""Values of `image_processor_type` whose images are computed here."""

DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
  {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
  }
)
"""Of transformers' Qwen2VLImageProcessor (5.12.1), for fields not in a file."""

GLM_PROCESSORS: tuple[str, ...] = (
  "Glm4vImageProcessor",
  "Glm4vImageProcessorFast",
  "Glm4vImageProcessorPil",
)
"""Likewise, of GLM-V."""

GLM_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
  {**DEFAULTS, "min_pixels": 112 * 112 // 2, "max_pixels": 28 * 28 * 15000 // 2}
)
"""Of transformers' Glm4vImageProcessor (5.12.1), for one frame."""

GEMMA_PROCESSORS = (
  "Gemma3ImageProcessor",
  "Gemma3ImageProcessorFast",
  "Gemma3ImageProcessorPil",
)
"""Likewise, of Gemma 3."""

GEMMA_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
  {
    "image_size": 224,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
  }
)
"""Of transformers' Gemma3ImageProcessor (5.12.1); the size is a side's."""

TILE_PROCESSORS = tuple(
  f"{family}ImageProcessor{kind}"
  for family in ("Idefics3", "SmolVLM")
  for kind in ("", "Fast", "Pil")
)
"""Likewise, of SmolVLM and Idefics3, whose images are the same."""

TILE_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
  {
    **GEMMA_DEFAULTS,
    "image_size": 364,
    "max_pixels": (4 * 364) ** 2,
    "do_image_splitting": True,
  }
)
"""Of transformers' Idefics3ImageProcessor (5.12.1): the sides of a tile and, as
an area, of `size.longest_edge`."""

_STEPS = {
  "do_resize": (True,),
  "do_rescale": (True,),
  "do_normalize": (True,),
  "rescale_factor": (1 / 255, 0.00392156862745098),
}
_GEMMA_STEPS = {
  **_STEPS,
  "do_pan_and_scan": (False,),
  "resample": (2,),  # Bilinear.
}
_TILE_STEPS = {**_STEPS, "resample": (1,)}  # Lanczos'.
"""The steps that are computed, by field: the values it may have."""

_PLAIN = (
    "patch_size", "merge_size", "temporal_patch_size", "do_resize",
    "do_rescale", "do_normalize", "resample", "rescale_factor",
)  # fmt: skip
_LIMITS = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
_CHANNELS = ("image_mean", "image_std")


@dataclasses.dataclass(frozen=True)
class ImageSettings:
  """Settings as `QwenVLProcessor.from_preprocessor_config` takes them, or
  `gemma3_inputs.processor`.

  Attributes:
    values: Settings by the names of preprocessor_config.json, where limits of
      an image's area are `min_pixels` and `max_pixels`.
    source: the files that they were read from, for people.
    raw: the file's own section, with fields that are not read here.
  """

  values: Mapping[str, Any]
  source: str
  raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(directory: pathlib.Path, family: str) -> ImageSettings | None:
  """Returns the settings of a checkpoint directory; None where no file has any.

  Args:
    directory: Directory of the checkpoint.
    family: `model_type` of its config.json.

  Raises:
    ValueError: a damaged file, an image processor of another kind, or two
      files that contradict each other.
  """
  sections = {}
  file = directory / PREPROCESSOR
  if file.is_file():
    raw = tensor_files.read_json(file)
    sections[PREPROCESSOR] = _section(raw, file, family)
  file = directory / PROCESSOR
  if file.is_file():
    nested = tensor_files.read_json(file).get(SECTION)
    if nested is not None:
      sections[PROCESSOR] = _section(nested, file, family)
  if not sections:
    return None
  glm = _is_glm(family)
  read_from = {
    name: (
      _tiles(raw, directory / name)
      if _is_tiled(family)
      else _square(raw, directory / name)
      if _is_gemma(family)
      else _canonical(raw, directory / name, 1 + glm)
    )
    for name, raw in sections.items()
  }
  if len(sections) == 2:
    _agree(directory, read_from[PREPROCESSOR], read_from[PROCESSOR])
  values: dict[str, Any] = {}
  own: dict[str, Any] = {}
  for name, section in sections.items():
    values |= read_from[name]
    own |= section
  defaults = GLM_DEFAULTS if glm else DEFAULTS
  defaults = GEMMA_DEFAULTS if _is_gemma(family) else defaults
  defaults = TILE_DEFAULTS if _is_tiled(family) else defaults
  return ImageSettings(
    {**defaults, **values}, " and ".join(sections), types.MappingProxyType(own)
  )


def _is_glm(family: str) -> bool:
  return family.startswith("glm4v")


def _is_gemma(family: str) -> bool:
  return family == "gemma3"


def _is_tiled(family: str) -> bool:
  return family in ("smolvlm", "idefics3")


def _section(raw: object, file: pathlib.Path, family: str) -> dict[str, Any]:
  if not isinstance(raw, dict):
    raise ValueError(f"{file}: {SECTION} must be an object, got {raw!r}")
  kind = raw.get("image_processor_type")
  classes = GLM_PROCESSORS if _is_glm(family) else IMAGE_PROCESSORS
  classes = GEMMA_PROCESSORS if _is_gemma(family) else classes
  classes = TILE_PROCESSORS if _is_tiled(family) else classes
  if kind is not None and kind not in classes:
    raise ValueError(
      f"{file} has image_processor_type={kind!r}, whose images are not"
      f" computed here for {family}; one of {', '.join(classes)} is"
    )
  return raw


def _canonical(
  raw: Mapping[str, Any], file: pathlib.Path, frames: int
) -> dict[str, Any]:
  """Returns the fields that a section gives, each under one name.

  Raises:
    ValueError: a limit that is not of whole pixels a frame.
  """
  size = raw.get("size")
  size = size if isinstance(size, Mapping) else {}
  out = {name: raw.get(name) for name in _PLAIN}
  for name, edge in _LIMITS:
    # In transformers min_pixels and max_pixels win over `size`, whose keys had
    # these names before 4.49.
    spellings: tuple[Any, ...] = (raw.get(name), size.get(edge), size.get(name))
    spellings = spellings[1:2] if frames > 1 else spellings
    limit = next((v for v in spellings if v is not None), None)
    if limit is not None and limit % frames:
      raise ValueError(
        f"{file} has size.{edge}={limit}, the pixels of {frames} frames; make"
        f" it a multiple of {frames}"
      )
    out[name] = None if limit is None else limit // frames
  return _given(out | _channels(raw))


def _channels(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Mean and deviation, a number a channel."""
  out = {}
  for name in _CHANNELS:
    value = raw.get(name)
    if isinstance(value, (int, float)):
      value = (value,) * 3
    out[name] = tuple(value) if isinstance(value, list) else value
  return out


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in values.items() if value is not None}


def _square(raw: Mapping[str, Any], file: pathlib.Path) -> dict[str, Any]:
  """Returns the fields that a section of Gemma 3 gives.

  Raises:
    ValueError: a step that is not computed, or a size that is no square.
  """
  _check_steps(raw, file, _GEMMA_STEPS)
  size, side = raw.get("size"), None
  if size is not None:
    size = size if isinstance(size, Mapping) else {"height": size}
    side = size.get("height")
    if size.get("width", side) != side or not isinstance(side, int):
      raise ValueError(
        f"{file} has size={dict(size)}, Gemma 3's images are squares: give"
        " height and width, equal"
      )
  return _given({"image_size": side} | _channels(raw))


def _tiles(raw: Mapping[str, Any], file: pathlib.Path) -> dict[str, Any]:
  """Returns the fields that a section of SmolVLM or Idefics3 gives.

  Raises:
    ValueError: a step that is not computed, or a size without `longest_edge`.
  """
  _check_steps(raw, file, _TILE_STEPS)
  edges = {}
  for name in ("size", "max_image_size"):
    size = raw.get(name)
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    edges[name] = edge
    if size is not None and not isinstance(edge, int):
      raise ValueError(
        f"{file} has {name}={size}, images become tiles by"
        f" {name}.longest_edge; give that"
      )
  edge = edges["size"]
  return _given(
    {
      "image_size": edges["max_image_size"],
      "max_pixels": None if edge is None else edge**2,
      "do_image_splitting": raw.get("do_image_splitting"),
      **_channels(raw),
    }
  )


def _check_steps(
  raw: Mapping[str, Any],
  file: pathlib.Path,
  steps: Mapping[str, tuple[Any, ...]],
) -> None:
  for name, allowed in steps.items():
    value = raw.get(name)
    if value is not None and value not in allowed:
      why = ""
      if name == "do_pan_and_scan":
        why = "; crops beside an image are not made here: set it to false"
      raise ValueError(
        f"{file} has {name}={value}, only {allowed[0]} is computed here{why}"
      )


def _agree(
  directory: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
  for name in old:
    if new.get(name, old[name]) != old[name]:
      raise ValueError(
        f"{directory / PREPROCESSOR} has {name}={old[name]},"
        f" {PROCESSOR} {new[name]}; transformers 4 reads the first and"
        " transformers 5 the second: make them equal, or delete the one"
        " that is out of date"
      )


def check_model(
  settings: ImageSettings, patch_size: int, merge_size: int, image_size: int = 0
) -> None:
  """Refuses settings that contradict config.json's vision_config.

  Raises:
    ValueError: naming the field and both values.
  """
  for name, of_model, want in (
    ("patch_size", "patch_size", patch_size),
    ("merge_size", "spatial_merge_size", merge_size),
    ("image_size", "image_size", image_size),
  ):  # Files of Qwen-VL and of Gemma 3 have different ones of them.
    if settings.values.get(name, want) != want:
      raise ValueError(
        f"{settings.source} has {name}={settings.values[name]},"
        f" config.json vision_config.{of_model}={want}; make them equal"
      )


def write(
  directory: pathlib.Path, values: Mapping[str, Any], family: str
) -> None:
  """Makes a directory's processor files give `values`.

  Files that give them already, and that both transformers read, stay unchanged.
  Else preprocessor_config.json has it, with limits in both spellings, and
  what processor_config.json has of images and video is moved out of it:
  transformers 4 does not read sections.

  Args:
    directory: Directory of a checkpoint, with the processor files of its
      source, if any.
    values: Settings as in `ImageSettings.values`.
    family: `model_type` of the checkpoint.

  Raises:
    ValueError: see `read`.
  """
  current = read(directory, family)
  nested = directory / PROCESSOR
  nested_raw = tensor_files.read_json(nested) if nested.is_file() else {}
  same = current is not None and all(
    current.values.get(name) == value for name, value in values.items()
  )
  if same and SECTION not in nested_raw:
    return
  raw = dict(current.raw) if current else {}
  raw |= {
    name: list(value) if name in _CHANNELS else value
    for name, value in values.items()
  }
  if _is_gemma(family):
    side = raw.pop("image_size")
    raw["size"] = {"height": side, "width": side}
    raw["image_processor_type"] = GEMMA_PROCESSORS[0]
  elif _is_tiled(family):
    raw["max_image_size"] = {"longest_edge": raw.pop("image_size")}
    raw["size"] = {"longest_edge": math.isqrt(raw.pop("max_pixels"))}
    raw["image_processor_type"] = f"{_TILE_CLASS[family]}ImageProcessor"
  elif _is_glm(family):  # Its class has one spelling of the limits.
    raw["size"] = {edge: 2 * raw.pop(name) for name, edge in _LIMITS}
    raw["image_processor_type"] = GLM_PROCESSORS[0]
  else:
    raw["size"] = {edge: values[name] for name, edge in _LIMITS}
    raw["image_processor_type"] = IMAGE_PROCESSORS[0]
  if "processor_class" in nested_raw:
    raw.setdefault("processor_class", nested_raw["processor_class"])
  _replace(directory / PREPROCESSOR, raw)
  video = nested_raw.pop("video_processor", None)
  if video is not None and not (directory / VIDEO).is_file():
    _replace(directory / VIDEO, video)
  if nested_raw.pop(SECTION, None) is not None or video is not None:
    _replace(nested, nested_raw)


def write_length(directory: pathlib.Path, length: int, family: str) -> None:
  """Names the processor of SmolVLM or Idefics3 and the tokens of its tiles.

  Args:
    directory: Directory of a checkpoint.
    length: Vision tokens of a tile, which transformers takes to be 169.
    family: `model_type` of the checkpoint.
  """
  file = directory / PROCESSOR
  raw = tensor_files.read_json(file) if file.is_file() else {}
  named = {"processor_class": f"{_TILE_CLASS[family]}Processor"} | raw
  _replace(file, named | {"image_seq_len": length})


_TILE_CLASS = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}


def _replace(file: pathlib.Path, content: Mapping[str, Any]) -> None:
  part = tensor_files.part(file)
  part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  os.replace(part, file)
