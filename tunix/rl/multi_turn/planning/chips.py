"""Lists the TPU generations and GPUs that a plan covers, and reads topologies.

Peak rates are those that the vendors publish (cloud.google.com/tpu/docs/v5e,
/v5p, /v6e; NVIDIA's data sheets of the H100 SXM and the H200, dense bfloat16;
read in November 2026). A TPU's memory is what XLA's compiler lets a program
use; a GPU's is 95 % of it, with `XLA_PYTHON_CLIENT_MEM_FRACTION=.95`.

Refuses a chip that is not in the table.
"""

from __future__ import annotations

import dataclasses
import math
import re

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU chip or a GPU, one device of JAX.

  Attributes:
    name: generation, as in a topology's name.
    memory: bytes that a program may use.
    flops: peak bfloat16 operations a second.
    hbm: peak bytes a second of its memory.
    ici: peak bytes a second that a chip receives over its links; half of the
      published figure for both directions.
    host: chips of a host of a multi-host slice; of a GPU, the most that a
      plan covers: one machine.
    host_topology: their topology.
    gpu: Whether it is a GPU, for which libtpu cannot compile.
  """

  name: str
  memory: int
  flops: float
  hbm: float
  ici: float
  host: int = 4
  host_topology: str = "2x2"
  gpu: bool = False


CHIPS = {
  chip.name: chip
  for chip in (
    Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 200e9),
    Chip("v5p", 95 * GIB, 459e12, 2765e9, 600e9, host_topology="2x2x1"),
    Chip("v6e", int(31.25 * GIB), 918e12, 1640e9, 400e9),
    Chip("h100", int(75.6 * GIB), 989e12, 3350e9, 450e9, 8, "8", gpu=True),
    Chip("h200", int(133 * GIB), 989e12, 4800e9, 450e9, 8, "8", gpu=True),
  )
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice.

  Attributes:
    name: Topology, such as "v5e:16x16" or "h100:8".
    chip: Generation of its chips.
    devices: Number of chips.
    hosts: Number of machines.
  """

  name: str
  chip: Chip
  devices: int
  hosts: int

  @classmethod
  def of(cls, name: str) -> Topology:
    """Reads a topology's name.

    Raises:
      ValueError: no such chip, or no such shape of its chips.
    """
    generation, _, shape = name.partition(":")
    chip = CHIPS.get(generation)
    if chip is None:
      raise ValueError(
        f"topology={name}: chip {generation!r} is not known; write one of"
        f" {', '.join(CHIPS)}, for example v5e:16x16"
      )
    sides = chip.host_topology.count("x") + 1
    if not re.fullmatch("x".join([r"[1-9]\d*"] * sides), shape):
      raise ValueError(
        f"topology={name}: {generation} takes {sides} whole numbers joined"
        f" by x; write for example {generation}:{'x'.join(['4'] * sides)}"
      )
    devices = math.prod(map(int, shape.split("x")))
    if chip.gpu and devices > chip.host:
      raise ValueError(
        f"topology={name}: a plan covers one machine of up to {chip.host}"
        f" GPUs; write {generation}:{chip.host}"
      )
    # A slice of up to eight v5e or v6e chips may be one machine.
    hosts = max(1, devices // chip.host)
    return cls(name, chip, devices, hosts)
