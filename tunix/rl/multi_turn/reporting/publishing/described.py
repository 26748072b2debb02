"""Facts that a card needs and no run knows."""

from __future__ import annotations

import dataclasses
import re

from tunix.rl.multi_turn.reporting.publishing import hub

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
