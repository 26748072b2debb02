"""Declares the bounds of the rollout buffer service.

Does not declare what a rollout asks for: `requests.Start` does.
"""

from __future__ import annotations

from typing import Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting


@settings.settings
class BufferLimits:
  """Bounds of the service. Those of items and bytes are each buffer's own."""

  max_items: int = setting(
    default=1_000_000,
    doc="Items that a buffer holds; a further write is answered with 429.",
    unit="items",
    ge=1,
  )
  max_gib: float = setting(
    default=64.0,
    doc="Bytes that a buffer holds; a further write is answered with 429.",
    unit="GiB",
    gt=0,
  )
  item_mib: int = setting(
    default=64, doc="Largest body of a write.", unit="MiB", ge=1, le=1024
  )
  read_mib: int = setting(
    default=192,
    doc="A read returns whole groups up to this size, the first one in any"
    " case; the rest is the next read's.",
    unit="MiB",
    ge=1,
    le=2048,
  )
  queue_mib: int = setting(
    default=128,
    doc="Writes that wait for the disk; a further one is answered with 429.",
    unit="MiB",
    ge=1,
  )
  max_buffers: int = setting(default=64, doc="Named buffers.", ge=1)
  remembered_uids: int = setting(
    default=1_000_000,
    doc="Uids of delivered items that a buffer remembers, so that a write"
    " that is repeated late is no second item.",
    unit="items",
    ge=0,
  )
  max_megapixels: int = setting(
    default=512,
    doc="Screens that the generator `desktop` of a start plays on, together;"
    " a start beyond it is refused.",
    unit="megapixels",
    ge=1,
    le=65_536,
  )
  group_size: int = setting(
    default=16,
    doc="Members of a group in a buffer without a /start_rollout.",
    ge=1,
  )
  group_rules: Literal["normalized", "raw"] = setting(
    default="normalized",
    doc="Rules of such a buffer's groups. raw: any whole group is read as it"
    " was written.",
  )
  max_lease: float = setting(
    default=86_400.0, doc="Longest lease of a read.", unit="s", gt=0
  )
  max_wait: float = setting(
    default=600.0,
    doc="Longest time that /buffer/read waits for items.",
    unit="s",
    gt=0,
  )
  hook_timeout: float = setting(
    default=60.0,
    doc="Deadline of a call of a generator's hook.",
    unit="s",
    gt=0,
  )
  rollout_timeout: float = setting(
    default=604_800.0,
    doc="A generator's process is ended after this long.",
    unit="s",
    gt=0,
  )
  stop_grace: float = setting(
    default=3.0,
    doc="A generator's process that is to end is killed after this long.",
    unit="s",
    ge=0,
  )
