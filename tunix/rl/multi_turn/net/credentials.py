"""Finds and masks credentials in settings and texts.

A run's settings are written to config.yaml, the report, the monitor and the
trackers, so that none may hold a password or a token: `of_settings` finds those
in addresses and in options whose name says so. `masked` is for texts that may
quote an address: errors, warnings, tracebacks.

Does not: recognise a secret in the path of an address, or in free text.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Iterator, Mapping

MASK = "***"
_SCHEME = r"(?:[a-zA-Z][a-zA-Z0-9+.\-]*)?://"
# Up to the last @ before the path: a password may hold one itself.
_USER = re.compile(rf"({_SCHEME})([^\s/?#'\"]*)@")
_WORDS = (
  r"token|secret|passw|pwd|api[_\-]?key|access[_\-]?key|credential|bearer"
)
_PARAMETER = re.compile(
  rf"([?&;#]((?:[\w.\-]*(?:{_WORDS}|auth)[\w.\-]*)|sig|signature|key)=)"
  r"([^\s&;#'\"]+)",
  re.I,
)
_OPTION = re.compile(rf"^[\w\-]*(?:{_WORDS})[\w\-]*$", re.I)
# Where the secret lies, and the tokens of language models.
_HARMLESS = re.compile(
  r"(?:_|^)(?:file|path|variable|env)$|tokens|tokeni[sz]|token_id", re.I
)


@dataclasses.dataclass(frozen=True)
class Credential:
  """A secret within settings.

  Attributes:
    key: dotted key of the setting.
    shown: its value, masked.
    what: kind of the secret, for people.
    secrets: the texts that must not be shown.
  """

  key: str
  shown: str
  what: str
  secrets: tuple[str, ...]


def masked(text: str) -> str:
  """`text` with each address's user, password and secret parameters masked."""
  text = _USER.sub(
    lambda match: f"{match[1]}{MASK}@" if _is_secret(match) else match[0], text
  )
  return _PARAMETER.sub(rf"\1{MASK}", text)


def _is_secret(match: re.Match[str]) -> bool:
  """Whether the part of an address before its @ holds one."""
  user, _, password = match[2].partition(":")
  return bool(password) or bool(user) and match[1].lower().startswith("http")


def of_settings(value: object, key: str = "") -> Iterator[Credential]:
  """The credentials within settings.

  A user alone is one in an http(s) address only: postgresql://user@host/name
  holds no secret.

  Args:
    value: settings as nested plain values.
    key: dotted key of `value`.
  """
  if isinstance(value, Mapping):
    for name, inner in value.items():
      yield from of_settings(inner, f"{key}.{name}" if key else str(name))
  elif isinstance(value, (list, tuple)):
    for inner in value:
      yield from of_settings(inner, key)
  elif isinstance(value, str) and value:
    yield from _of_text(value, key)


def _of_text(text: str, key: str) -> Iterator[Credential]:
  for match in filter(_is_secret, _USER.finditer(text)):
    _, _, password = match[2].partition(":")
    what = "a password" if password else "a user or token"
    secrets = tuple(filter(None, (match[2], password)))
    yield Credential(key, masked(text), what, secrets)
    return
  if "://" in text and (parameter := _PARAMETER.search(text)):
    what = f"the parameter {parameter[2]}"
    yield Credential(key, masked(text), what, (parameter[3],))
    return
  name = key.rpartition(".")[2]
  if _OPTION.match(name) and not _HARMLESS.search(name):
    yield Credential(key, MASK, "a secret", (text,))
