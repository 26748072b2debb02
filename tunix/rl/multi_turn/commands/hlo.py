"""Counts what a compiled program sends between devices, from its HLO text.

An instruction inside a loop counts as often as the loop runs, where the
compiler knows that number, else once.

Does not: count what crosses between hosts and devices.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
    "collective-permute",
)  # pyformat: disable
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4,
          "s32": 4, "u32": 4, "s16": 2, "u16": 2, "s64": 8, "u64": 8}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OP = re.compile(r" = (.*?) (" + "|".join(KINDS) + r")(-start)?\(")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition)=(%?[\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TRIPS = re.compile(r'known_trip_count[^0-9]*(\d+)')


@dataclasses.dataclass(frozen=True)
class Sent:
  """Collectives of one kind.

  Attributes:
    instructions: Number in the program's text.
    runs: Number of runs, loops counted.
    received: bytes that a device receives in all runs.
    largest: bytes of the largest result.
    largest_elements: its numbers.
  """

  instructions: int = 0
  runs: int = 0
  received: int = 0
  largest: int = 0
  largest_elements: int = 0


def collectives(text: str, devices: int) -> dict[str, Sent]:
  """Kind -> what is sent, of a program's optimised HLO.

  Args:
    text: Result of `jax.stages.Compiled.as_text`.
    devices: Devices of the program: the group of a collective without one.
  """
  bodies, entry = _computations(text)
  times: collections.Counter[str] = collections.Counter()

  def visit(name: str, factor: int) -> None:
    times[name] += factor
    for line in bodies.get(name, ()):
      trips = _TRIPS.search(line)
      many = int(trips.group(1)) if trips and " while(" in line else 1
      for one, several in _CALLED.findall(line):
        for called in re.findall(r"[\w.\-]+", f"{one} {several}"):
          if called in bodies:
            visit(called, factor * many)

  visit(entry, 1)
  totals: dict[str, list[int]] = {}
  for name, lines in bodies.items():
    for line in lines:
      match = _OP.search(line)
      if match is None or not times[name]:
        continue
      kind = match.group(2)
      shapes = _shapes(match.group(1))
      if match.group(3) and len(shapes) > 1 and kind != "all-reduce":
        shapes = shapes[len(shapes) // 2 :][: max(1, len(shapes) // 2)]
      size = sum(count * item for count, item in shapes)
      entry_ = totals.setdefault(kind, [0, 0, 0, 0, 0])
      entry_[0] += 1
      entry_[1] += times[name]
      entry_[2] += times[name] * _received(kind, size, _group(line, devices))
      entry_[3] = max([entry_[3], *(c * item for c, item in shapes)])
      entry_[4] = max([entry_[4], *(c for c, _ in shapes)])
  return {kind: Sent(*values) for kind, values in sorted(totals.items())}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  bodies: dict[str, list[str]] = {}
  entry, lines = "", None
  for line in text.splitlines():
    if lines is None:
      match = _HEAD.match(line)
      if match and not line.startswith("HloModule"):
        lines = bodies[match.group(2)] = []
        entry = match.group(2) if match.group(1) else entry
    elif line.startswith("}"):
      lines = None
    else:
      lines.append(line)
  return bodies, entry


def _shapes(text: str) -> list[tuple[int, int]]:
  """(numbers, bytes a number) of each array of a result; counters left out."""
  return [
      (math.prod(int(n) for n in dims.split(",") if n), _BYTES[dtype])
      for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", text)
      if dtype in _BYTES and dims
  ]


def _group(line: str, devices: int) -> int:
  if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return match.group(1).count(",") + 1
  if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
    return int(match.group(1))
  return devices


def _received(kind: str, size: int, group: int) -> int:
  """Returns the bytes that a device receives for a result, by a ring."""
  share = (group - 1) / group
  return round({
      "all-gather": size * share,
      "all-reduce": 2 * size * share,
      "reduce-scatter": size * (group - 1),
      "all-to-all": size * share,
      "collective-permute": size,
  }[kind])
