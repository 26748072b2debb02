"""Finds out whether this machine has a Chromium; starts none."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.environments.gyms.chromium import devtools


def browser(options: Mapping[str, Any]) -> Iterator[str]:
  """`GymSpec.needs` of a gym in a browser."""
  del options
  try:
    devtools.find_browser()
  except devtools.BrowserNotFound as error:
    yield str(error)
