"""Decides what the payload of a start may choose, from what the operator lists.

The payload is anyone's who reaches the service. It names a gym, a gym's
settings, files and addresses; the generator that gets it runs with the rights
of the service's user.

Promises: a gym and its settings are those of the command line; a file resolves,
links and `..` included, to one below a listed folder or of this package; an
address is of this machine or of a listed host. An error names the key, the
value and the option that would allow it.

Does not check further keys of an operator's own generator, which checks them
itself.
"""

from __future__ import annotations

import pathlib
from typing import Any, Mapping
import urllib.parse

from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_models

FILES = ("input_file", "tokenizer_path")
ADDRESSES = ("remote_engine_url", "remote_buffer_url")
GUARDED = (*FILES, *ADDRESSES)
"""Keys whose values name files and addresses."""
ALLOWED = "operator_allows"
"""Key under which the generator finds the operator's lists."""
_FRAMEWORK = pathlib.Path(http_server.__file__).resolve().parents[1]
"""Its files, the tokenizers of its policies among them, are public."""


@settings_lib.settings
class Rights:
  """Choices that the payload of a start may make."""

  gyms: tuple[str, ...] = settings_lib.setting(
    default=("desktop",),
    doc="Gyms that a start may play: registered names, or paths"
    " package.module:attribute.",
  )
  client_settings: tuple[str, ...] = settings_lib.setting(
    default=(), doc="Settings of gyms that a start may choose (gym_settings)."
  )
  input_roots: tuple[str, ...] = settings_lib.setting(
    default=(),
    doc="Folders below which a start's input_file and tokenizer_path lie;"
    " none: a start that needs a file is refused.",
  )
  allow_hosts: tuple[str, ...] = settings_lib.setting(
    default=(),
    doc="Hosts, each with :PORT or for any port, of a start's"
    " remote_engine_url and remote_buffer_url, besides this machine's"
    " loopback interface.",
  )

  def check(
    self, payload: Mapping[str, Any], reads: tuple[str, ...], own_url: str
  ) -> None:
    """Refuses what the operator did not list.

    Args:
      payload: The start's.
      reads: Keys of `GUARDED` that the generator uses.
      own_url: Address of the service.

    Raises:
      ValueError: naming the key, the value and the option.
    """
    gym = payload.get("gym")
    if gym is not None and gym not in self.gyms:
      raise ValueError(
        f"gym={json_models.short(gym)} is not played here; choose one of"
        f" {', '.join(self.gyms) or 'none'}, or start the service with"
        " --gyms to list it"
      )
    settings = payload.get("gym_settings")
    if settings is not None and not isinstance(settings, Mapping):
      raise ValueError(
        f"gym_settings={json_models.short(settings)} must be an object"
      )
    for name in settings or ():
      if name not in self.client_settings:
        raise ValueError(
          f"gym_settings.{name} is not a client's to set; choose from"
          f" {', '.join(self.client_settings) or 'none'}, or start the"
          " service with --client-settings to list it"
        )
    for key in reads:
      value = payload.get(key)
      if not value:
        continue
      if key in FILES:
        self._check_file(key, value)
      else:
        self._check_address(key, value, own_url)

  def _check_file(self, key: str, value: object) -> None:
    if not isinstance(value, str) or "\0" in value:
      raise ValueError(
        f"{key}={json_models.short(value)} must be the path of a file"
      )
    try:
      path = pathlib.Path(value).resolve()
      roots = [pathlib.Path(root).resolve() for root in self.input_roots]
      roots.append(_FRAMEWORK)
    except (OSError, RuntimeError) as error:  # A loop of links.
      raise ValueError(
        f"{key}={json_models.short(value)} cannot be resolved: {error}"
      ) from None
    if not any(path.is_relative_to(root) for root in roots):
      listed = ", ".join(self.input_roots) or "none is listed"
      raise ValueError(
        f"{key}={json_models.short(value)} is outside of the folders that"
        f" this service reads ({listed}); move it there, or start the service"
        " with --input-roots to list its folder"
      )

  def _check_address(self, key: str, value: object, own_url: str) -> None:
    http.address(value, key, "http://127.0.0.1:8000")
    host, port = _place(str(value))
    if http_server.is_loopback(host) or (host, port) == _place(own_url):
      return
    shown = f"[{host}]" if ":" in host else host
    if not {shown, f"{shown}:{port}"} & {h.lower() for h in self.allow_hosts}:
      raise ValueError(
        f"{key}={json_models.short(value)}: host {host!r} is not one that"
        " this service calls; use its own machine"
        f" ({', '.join(['127.0.0.1', *self.allow_hosts])}), or start the"
        " service with --allow-hosts to list it"
      )


def _place(url: str) -> tuple[str, int]:
  """(host, port) of an address."""
  parts = urllib.parse.urlsplit(url)
  port = parts.port or {"https": 443}.get(parts.scheme, 80)
  return (parts.hostname or "").lower(), port
