"""Headless Chromium: the process, its tabs, mouse and keyboard.

Shared by the gyms with web pages (`miniwob`, `browser`).
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from cua_gyms.chromium import devtools


def needs(options: Mapping[str, Any]) -> Iterator[str]:
  """`GymSpec.needs` of a gym in a browser."""
  del options
  try:
    devtools.find_browser()
  except devtools.BrowserNotFound as error:
    yield str(error)
