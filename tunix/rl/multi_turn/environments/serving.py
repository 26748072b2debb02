"""What the commands that serve HTTP share: the address and the token.

The loopback interface unless told otherwise; any other address needs a token.
"""

from __future__ import annotations

import ipaddress
import os
import pathlib
import socket
from typing import Any

import yaml


def listen(host: str, port: int) -> socket.socket:
  """The address, taken before anything slow begins; `port` 0 is any free one.

  Raises:
    ValueError: it cannot be had.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  listening = socket.socket(family)
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listening.bind((host, port))
  except (OSError, OverflowError) as error:
    listening.close()
    raise ValueError(
        f"cannot listen at --host={host} --port={port}: {error}; choose"
        " another port (0: any that is free)"
    ) from None
  return listening


def is_loopback(host: str) -> bool:
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def token(file: pathlib.Path | None, host: str, variable: str) -> str:
  """The token of `file`, else of the environment; "" for none.

  Raises:
    ValueError: an empty file, or none where the address needs one.
    OSError: the file cannot be read.
  """
  found = os.environ.get(variable, "")
  if file is not None:
    found = file.read_text(encoding="utf-8").strip()
    if not found:
      raise ValueError(f"--token-file={file} is empty")
  if not found and not is_loopback(host):
    raise ValueError(
        f"--host={host} can be reached from elsewhere, which needs a token:"
        f" give --token-file, or set {variable}; or leave --host at 127.0.0.1"
    )
  return found


def yaml_object(text: str, name: str) -> dict[str, Any]:
  """A command's option that is an object.

  Raises:
    ValueError: it is none.
  """
  try:
    data = yaml.safe_load(text)
  except yaml.YAMLError:
    data = None
  if not isinstance(data, dict):
    raise ValueError(f"{name}={text}: write an object such as '{{width: 256}}'")
  return data
