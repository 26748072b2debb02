"""Compiles a run's programs for a TPU slice, and counts what they send.

XLA's TPU compiler, which ships in libtpu, runs on any x86 Linux. It is given
the learner's and the engine's own programs with shapes in place of arrays. What
devices send one another is read from a compiled program's HLO text: an
instruction inside a loop counts as often as the loop runs, where the compiler
knows that number, else once.

Does not: execute anything, count what crosses between hosts and devices, or
find libtpu in other places than an installed package, $TPU_LIBRARY_PATH, and
`.venv-tpu` of a clone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
import time
from typing import Any, Callable, cast, Iterator

from flax import nnx
import jax
from jax.experimental import topologies
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import programs as engine_programs
from tunix.rl.multi_turn.planning import chips
from tunix.rl.multi_turn.planning import compiled_update
from tunix.rl.multi_turn.planning import planned_run
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import cached_attention

_CLONE = pathlib.Path(__file__).parents[4] / ".venv-tpu/libtpu/libtpu.so"
_KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_BYTES = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "bf16": 2,
  "f16": 2,
  "f32": 4,
  "s32": 4,
  "u32": 4,
  "s16": 2,
  "u16": 2,
  "s64": 8,
  "u64": 8,
}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OP = re.compile(r" = (.*?) (" + "|".join(_KINDS) + r")(-start)?\(")
_CALLED = re.compile(
  r"(?:to_apply|calls|body|condition)=(%?[\w.\-]+)"
  r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TRIPS = re.compile(r"known_trip_count[^0-9]*(\d+)")


def find_compiler() -> str:
  """Path of libtpu, made known to JAX; "" where there is none."""
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  # No chip is opened, so that several plans may be made at a time.
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  path = os.environ.get("TPU_LIBRARY_PATH", "")
  if not path and _CLONE.is_file():
    path = os.environ["TPU_LIBRARY_PATH"] = str(_CLONE)
  if not path and importlib.util.find_spec("libtpu"):
    return "libtpu"
  return path if pathlib.Path(path).is_file() else ""


def devices_of(topology: chips.Topology) -> tuple[list[Any], list[Any]]:
  """Returns descriptions of a slice's chips and of one host's chips.

  Raises:
    ValueError: the compiler knows no such slice.
  """
  chip = topology.chip
  try:
    all_chips, host = (
      list(topologies.get_topology_desc(name, platform="tpu").devices)
      for name in (topology.name, f"{chip.name}:{chip.host_topology}")
    )
  except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
    text = " ".join(str(error).split())
    raise ValueError(
      f"topology={topology.name}: libtpu gives no such slice"
      f" ({text[:200]}); choose a published one, or --analytic"
    ) from None
  return all_chips, host


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
  return round(
    {
      "all-gather": size * share,
      "all-reduce": 2 * size * share,
      "reduce-scatter": size * (group - 1),
      "all-to-all": size * share,
      "collective-permute": size,
    }[kind]
  )


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A program's figures; bytes are those of a device.

  Attributes:
    arguments, outputs, temporary: of its memory; outputs that reuse no
      argument.
    sent: kind -> `Sent`.
    seconds: Time that compiling took.
    refused: the compiler's reason where the program does not fit; figures are
      0 then.
  """

  arguments: int = 0
  outputs: int = 0
  temporary: int = 0
  sent: dict[str, Sent] = dataclasses.field(default_factory=dict)
  seconds: float = 0.0
  refused: str = ""

  @property
  def received(self) -> int:
    """Bytes that a device receives over its links."""
    return sum(sent.received for sent in self.sent.values())


def compile_all(run: planned_run.PlannedRun) -> Iterator[tuple[str, Compiled]]:
  """(name, figures) of the run's programs, as each is compiled."""
  with compiling.compile_for("tpu"):
    update = compiled_update.programs(
      run.model,
      run.processor,
      run.config.learner,
      run.config.algorithm,
      sampling=run.config.sampling,
      mesh=run.mesh,
      image_patches=run.image_patches,
    )
    yield "accumulate", _compile(lambda: update.accumulate, run.mesh)
    yield "apply", _compile(update.apply, run.mesh)
    if not planned_run.has_engine(run.config):
      return
    chosen = run.buckets
    variant = engine_programs.Variant
    window = chosen.windows[-1]
    engine = _engine(run)
    layout = engine.state.layout
    drafts = chosen.drafts * (layout is None or not layout.keeps_state)
    for name, call in {
      "decode": variant("decode", chosen.decode_rows[-1], chosen.steps, window),
      **(
        {
          "decode with drafts": variant(
            "decode", chosen.decode_rows[-1], chosen.drafted, window, drafts
          )
        }
        if drafts
        else {}
      ),
      "prefill": variant(
        "prefill", chosen.prefill_rows[-1], chosen.tokens[-1], window
      ),
      **(
        {"encode": variant("encode", chosen.images[-1], chosen.patches[-1])}
        if chosen.patches
        else {}
      ),
    }.items():
      lower = functools.partial(engine.lower, call)
      yield name, _compile(lower, run.engine_mesh)
    yield "weight copy", _compile(lambda: _copy(run), run.mesh)


def _engine(run: planned_run.PlannedRun) -> engine_programs.Programs:
  sizes = cache_memory.sizes(
    run.processor,
    run.engine_config,
    run.buckets,
    cached_attention.row_shards(run.engine_mesh),
  )
  state = device_state.DeviceState(
    run.engine_model,
    run.processor,
    pages=sizes.pages,
    page_size=run.buckets.page_size,
    vision_tokens=sizes.vision_tokens,
    weights=run.config.engine.weights,
    mesh=run.engine_mesh,
  )
  return engine_programs.Programs(
    state,
    banned_token_ids=run.model.config.banned_token_ids,
    entropies=run.config.engine.entropies,
  )


def _copy(run: planned_run.PlannedRun) -> jax.stages.Lowered:
  """The parameters' way from the learner's mesh to every host's engine."""
  mesh, hosts = run.mesh, run.topology.hosts
  variables = jax.tree.leaves(
    nnx.state(run.model, nnx.Param),
    is_leaf=lambda v: isinstance(v, nnx.Variable),
  )
  shapes = [
    jax.ShapeDtypeStruct(
      v.shape, v.dtype, sharding=sharding.parameter_sharding(v, mesh)
    )
    for v in variables
  ]
  if hosts == 1:
    places = [x.sharding for x in shapes]
  else:
    # As `sharding.HostCopies`: each host has a whole copy. A program keeps its
    # arguments' order of chips, so that of the mesh stands for the hosts'.
    local = tuple(run.engine_mesh.shape[axis] for axis in sharding.AXES)
    everywhere = jax.sharding.Mesh(
      mesh.devices.reshape(hosts, *local), ("process", *sharding.AXES)
    )
    places = [
      jax.sharding.NamedSharding(
        everywhere, sharding.parameter_sharding(v, run.engine_mesh).spec
      )
      for v in variables
    ]
  return jax.jit(lambda *x: x, out_shardings=tuple(places)).lower(*shapes)


def _compile(
  lower: Callable[[], jax.stages.Lowered], mesh: jax.sharding.Mesh
) -> Compiled:
  started = time.perf_counter()
  try:
    # Kernels ask which TPU they are for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      compiled = lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return Compiled(
      refused=" ".join(str(error).split())[:400],
      seconds=time.perf_counter() - started,
    )
  memory: Any = compiled.memory_analysis()
  return Compiled(
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes - memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
    collectives(cast(str, compiled.as_text()), mesh.size),
    time.perf_counter() - started,
  )
