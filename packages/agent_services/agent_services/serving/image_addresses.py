"""Finds where a request to a model's server names images by address.

`examine` parses a body as strictly as any server behind could, and lists the
places of images whose address is to be replaced. Every other address is
refused, wherever it stands, unless that place holds text for the model or a
schema: the fields of text are listed here, and no other is trusted.

Promises: `{"url": "\\u0068ttp://…"}`, a key written twice, `NaN`, half a
surrogate pair, a BOM or UTF-16 have one meaning, that of the parsed value, or
are refused; a body becomes few more than `MOST_VALUES` values, and has at most
`MOST_WALKED` lists and objects and as many texts, counted by its commas,
brackets and quotation marks before it is parsed.

Does not fetch, or look into data URLs.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any
import unicodedata
from urllib import parse as urllib_parse

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.net import json_models

from agent_services.serving import errors

MOST_VALUES = 2_000_000
"""Values of one body: a list of token ids is well below, and each value costs
up to 100 bytes of memory."""
MOST_WALKED = 200_000
"""Lists and objects of one body, and texts: each takes up to 4 microseconds."""

# Text for the model or its reader: a string here, or a list of strings, is not
# an address to any server. Objects below these keys are examined.
_TEXT = frozenset({
    "bad_words", "content", "description", "ebnf", "input", "instructions",
    "output", "prompt", "reasoning", "reasoning_content", "refusal", "regex",
    "stop", "suffix", "system", "text", "thinking", "title",
})  # fmt: skip
# Schemas, calls of tools and notes, where requests have them: no server looks
# for media in these.
_MESSAGE = r"(messages|input)\[\d+\](\[\d+\])?"
_UNREAD = re.compile(
  r"function_call|functions|metadata|response_format|text\.format\.schema"
  r"|(sampling_params(\[\d+\])?\.)?"
  r"(guided_json|json_schema|structured_outputs)"
  rf"|({_MESSAGE}\.)?tools\[\d+\](\.tools\[\d+\])?\."
  r"(function|input_schema|parameters)"
  r"|tool_choice\.function"
  rf"|{_MESSAGE}\.(annotations|arguments|function_call"
  r"|tool_calls\[\d+\]\.function"
  r"|content\[\d+\](\.content\[\d+\])?\.(annotations|citations))"
)
# The input of a tool's call in Anthropic's messages.
_TOOL_INPUT = re.compile(rf"{_MESSAGE}\.content\[\d+\]\.input")
_IMAGES = frozenset({"image", "image_data", "image_url"})
_OTHER_MEDIA = frozenset({
    "audio", "audio_data", "audio_url", "file_url", "video", "video_data",
    "video_url",
})  # fmt: skip
# These make vLLM and SGLang call a machine that the request names.
_PEERS = frozenset(
  {"bootstrap_host", "ec_transfer_params", "kv_transfer_params"}
)
_BARE = (
  ("iVBORw0KGgo", "png"),
  ("/9j/", "jpeg"),
  ("R0lGOD", "gif"),
  ("UklGR", "webp"),
)
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_ADDRESS = re.compile(
  r"[a-z][a-z0-9+.-]*:[\\/]{2}|[\\/]{2}"
  r"|(https?|ftps?|file|s3|gs|hf|oss|tos|wss?):",
  re.I,
)
_INVISIBLE = re.compile(
  r"[\s\x00-\x20\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
  r"\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff"
  r"\uffa0\ufff0-\uffff]*"
)


# Routes that carry prompts.
_ROUTES = (
    "chat/completions", "chat/completions/batch", "completions", "responses",
    "messages", "generate", "chat/completions/render", "completions/render",
    "responses/render", "messages/render", "messages/count_tokens",
    "embeddings", "pooling", "tokenize",
)  # fmt: skip
# The shortest prefix: completions end as those of chats do.
_ROUTE = re.compile(rf"(.*?)/({'|'.join(_ROUTES)})/?", re.S)
_PREFIX = re.compile(r"(/sessions/[^/]+|/[^/]+)?(/v1)?")


@dataclasses.dataclass(frozen=True)
class Place:
  """An image's address: `holder[key]`, at `where` in the body."""

  holder: Any
  key: Any
  where: str


def examine(body: bytes, path: str) -> tuple[Any, list[Place]]:
  """Returns the parsed body and the places of images to be replaced.

  Args:
    body: Bytes of a request.
    path: Decoded path of its address. On a route that is not known to carry
      prompts, no place is text, and no image is replaced.

  Raises:
    ApiError: The body is no JSON, is too large to parse, or has an address
      that would reach the server behind; names its place.
  """
  for kind, count, most in (
    ("values by its commas and brackets", json_text.parts(body), MOST_VALUES),
    ("lists and objects", body.count(b"[") + body.count(b"{"), MOST_WALKED),
    ("texts by its quotation marks", body.count(b'"') // 2, MOST_WALKED),
  ):
    if count > most:
      raise errors.ApiError(
        413,
        f"the body holds more than {most:,} {kind}; send fewer",
        code="request_too_large",
      )
  try:
    value = json_models.parse(body)
  except ValueError as error:
    raise errors.invalid(
      None,
      f"the body is not JSON: {error}; send JSON in UTF-8 (RFC 8259),"
      " without NaN, halves of surrogate pairs and a byte order mark",
      "invalid_json",
    ) from None
  places: list[Place] = []
  match = _ROUTE.fullmatch(path)
  carries_prompts = match is not None and bool(_PREFIX.fullmatch(match[1]))
  if not carries_prompts:
    _refuse_addresses(value, "")
  _walk(value, "", places)
  if places and not carries_prompts:
    raise _not_allowed(places[0].where)
  return value, places


def _walk(value: object, where: str, places: list[Place]) -> None:
  if isinstance(value, str):
    _refuse(value, where)
  elif isinstance(value, list):
    for index, item in enumerate(value):
      if isinstance(item, (str, list, dict)):  # Most items are token ids.
        _walk(item, f"{where}[{index}]", places)
  elif isinstance(value, dict):
    _walk_object(value, where, places)


def _walk_object(
  value: dict[str, Any], where: str, places: list[Place], skip: str = ""
) -> None:
  """Handles all fields but `skip`."""
  for key, item in value.items():
    path = _below(where, key)
    _refuse(key, path)
    if key != skip or not skip:
      _walk_field(value, key, item, path, places)


def _walk_field(
  holder: dict[str, Any], key: str, item: object, path: str, places: list[Place]
) -> None:
  """Handles one field of an object.

  Images stand in OpenAI's chat and Responses (`image_url`, a text or an object
  with `url`), Anthropic's messages (`source` of type url), vLLM's
  `/inference/v1/generate` (`content_parts`: `url` beside the type) and SGLang's
  `/generate` (`image_data`: an address, an object with `url`, or lists) and
  embeddings (`image`).
  """
  if key in _PEERS and item is not None:
    raise errors.invalid(
      path,
      f"{path} makes the server call another machine and is not passed on;"
      " omit it",
      "peer_not_allowed",
    )
  if _UNREAD.fullmatch(path):
    return
  # At the top, `input` is a conversation, whatever `type` says beside it.
  if holder.get("type") == "tool_use" and _TOOL_INPUT.fullmatch(path):
    return
  if key in _TEXT:
    if isinstance(item, list):
      for index, part in enumerate(item):
        if not isinstance(part, str):
          _walk(part, f"{path}[{index}]", places)
    elif not isinstance(item, str):
      _walk(item, path, places)
  elif key in _IMAGES:
    _images(holder, key, path, places)
  elif key == "source" and isinstance(item, dict) and "url" in item:
    _images(item, "url", f"{path}.url", places)
    _walk_object(item, path, places, "url")
  elif key == "content_parts" and isinstance(item, list):
    for index, part in enumerate(item):
      _flat_part(part, f"{path}[{index}]", places)
  elif key in _OTHER_MEDIA:
    _only_data(item, path, places)
  elif key == "input_audio" and isinstance(item, dict):
    name = item.get("format") or ""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.+-]*", name):
      raise errors.invalid(
        f"{path}.format",
        f"{path}.format={str(name)[:60]!r} must be the name of a format, such"
        " as wav",
        "invalid_value",
      )
    _walk(item, path, places)
  else:
    _walk(item, path, places)


def _flat_part(part: object, where: str, places: list[Place]) -> None:
  """Handles one of vLLM's parts, which have their address beside the type."""
  if not isinstance(part, dict) or "url" not in part:
    _walk(part, where, places)
    return
  if part.get("type") == "image_url":
    _images(part, "url", f"{where}.url", places)
  else:
    _only_data(part["url"], f"{where}.url", places)
  _walk_object(part, where, places, "url")


def _images(holder: Any, key: Any, where: str, places: list[Place]) -> None:
  """Collects the places of an address, an object with `url`, or lists."""
  value = holder[key]
  if isinstance(value, str):
    if value[:5].lower() == "data:":
      return
    # A server may read bare base64 as the name of a file.
    kind = next((k for head, k in _BARE if value.startswith(head)), "")
    if kind and _BASE64.fullmatch(value):
      holder[key] = f"data:image/{kind};base64,{value}"
    else:
      places.append(Place(holder, key, where))
  elif isinstance(value, list):
    for index in range(len(value)):
      _images(value, index, f"{where}[{index}]", places)
  elif isinstance(value, dict):
    if "url" in value:
      _images(value, "url", f"{where}.url", places)
    _walk_object(value, where, places, "url")


def _only_data(value: object, where: str, places: list[Place]) -> None:
  """Refuses every text but a data URL in another medium's place."""
  if isinstance(value, str):
    if value[:5].lower() != "data:":
      raise errors.invalid(
        where,
        f"{where}: only images are fetched; send this one as a data URL",
        "media_not_supported",
      )
  elif isinstance(value, list):
    for index, item in enumerate(value):
      _only_data(item, f"{where}[{index}]", places)
  elif isinstance(value, dict):
    if "url" in value:
      _only_data(value["url"], f"{where}.url", places)
    _walk_object(value, where, places, "url")


def _refuse_addresses(value: object, where: str) -> None:
  """Refuses any address below `value`, keys included."""
  if isinstance(value, str):
    _refuse(value, where)
  elif isinstance(value, list):
    for index, item in enumerate(value):
      _refuse_addresses(item, f"{where}[{index}]")
  elif isinstance(value, dict):
    for key, item in value.items():
      path = _below(where, key)
      _refuse(key, path)
      _refuse_addresses(item, path)


def _refuse(text: str, where: str) -> None:
  if is_address(text):
    raise _not_allowed(where)


def _not_allowed(where: str) -> errors.ApiError:
  return errors.invalid(
    where or None,
    f"{where or 'the body'}: an address in this place is not passed on, as"
    " the server behind may fetch it; send an image as image_url of a"
    " message, or omit it",
    "address_not_allowed",
  )


def is_address(text: str) -> bool:
  """Whether a lenient reader may take the text for an address.

  Invisible characters in front, capitals, wide letters and percent-encoding
  count as they do for browsers and for `requests`.
  """
  for _ in range(3):  # `%2568` is `h`, decoded twice.
    match = _INVISIBLE.match(text)
    start = match.end() if match else 0
    head = text[start : start + 512]
    # Browsers drop tabs and line breaks inside, too.
    bare = re.sub(r"[\t\r\n]", "", head)[:64]
    if _ADDRESS.match(unicodedata.normalize("NFKC", bare)):
      return True
    if "%" not in head:
      return False
    text = urllib_parse.unquote(text[start:])
  return False


def _below(where: str, key: str) -> str:
  """Returns the path of a field, short whatever the keys are."""
  return (f"{where}.{key[:60]}" if where else key[:60])[:400]
