"""Takes places and secrets out of what a run's files say.

Promises: a published setting or error names no directory and no host of the
machine, no value of an environment, no password or token that `credentials`
knows. A path keeps its last name: `/home/me/models/agent` is `…/agent`.

Does not: change what the policy saw and wrote.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Mapping

from tunix.rl.multi_turn.net import credentials
from tunix.rl.multi_turn.reporting.publishing import hub

_AWAY = "…"
_WHOLE = re.compile(r"(?:~|/|\.\.?[\\/]|[A-Za-z]:[\\/]|\\\\)[^\n]*")
_WITHIN = re.compile(
  r"(?<![\w./\\:~…])(?:~[\w.-]*/|/(?=[^\s/'\"]+/)|(?:\.\./)+|[A-Za-z]:[\\/])"
  r"[^\s'\"`,;:|<>()\[\]{}]*"
)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[^\s'\"`,;<>()\[\]{}]*")
_MACHINE = re.compile(
  r"(?:\d{1,3}(?:\.\d{1,3}){3}|[A-Za-z][\w.-]*(?=:\d\d))(?::\d{2,5})?"
)
_HOSTS = re.compile(r"(?:^|_)(?:host|hosts|hostname|address|coordinator)$")
_ENVIRONMENT = re.compile(r"(?:^|_)env(?:iron|ironment)?$")


_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclasses.dataclass(frozen=True)
class Described:
  """Facts that a card needs and no run knows; raises PublishError.

  Attributes:
    license: identifier of the Hub's list, such as apache-2.0; "" leaves it
      open.
    base_model: the policy's origin on the Hub; "" leaves it open.
  """

  license: str = ""
  base_model: str = ""

  def __post_init__(self):
    if self.license and not _LICENSE.fullmatch(self.license):
      raise hub.PublishError(
        f"license is {self.license!r}; give the Hub's identifier, such as"
        " apache-2.0 or cc-by-4.0"
      )
    if self.base_model:
      hub.check_name(self.base_model, "base_model")


def settings(value: object, name: str = "") -> Any:
  """Plain settings without places and secrets.

  Args:
    value: nested plain values.
    name: Name of the setting that holds them.
  """
  if isinstance(value, Mapping):
    if name and _ENVIRONMENT.search(name):
      return {key: credentials.MASK for key in value}
    return {key: settings(inner, str(key)) for key, inner in value.items()}
  if isinstance(value, (list, tuple)):
    return [settings(inner, name) for inner in value]
  if not isinstance(value, str) or not value:
    return value
  if any(credentials.of_settings({name: value})) and "://" not in value:
    return credentials.MASK
  if _HOSTS.search(name) or _MACHINE.fullmatch(value):
    return _AWAY
  if _WHOLE.fullmatch(value):
    return _last(value)
  return text(value)


def text(value: str) -> str:
  """A text without paths, hosts and passwords of addresses."""
  value = _ADDRESS.sub(
    lambda match: f"{match[1]}://{_AWAY}" if match[1] != "hf" else match[0],
    credentials.masked(value),
  )
  return _WITHIN.sub(lambda match: _last(match[0]), value)


def _last(path: str) -> str:
  last = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
  return f"{_AWAY}/{last}" if last not in ("", ".", "..", "~") else _AWAY
