"""Plans a run on a TPU slice or GPU machine: does it fit, how fast may it be.

    python -m tunix.rl.multi_turn.plan [config.yaml] topology=v5e:16x16 \\
        [key=value ...] [--json] [--analytic]

Compiles the run's own programs (update, prefill, decode, image encoder, the
weights' way to the engines) with libtpu and reports memory of a device by part,
collectives and their bytes, operations, a roofline of each program, and, where
it does not fit, settings with which it would; where it does, those that spend
the rest on speed. `policy.name` may be a published size, whose weights need not
be there.

Without libtpu, with --analytic, or for GPUs (topology=h100:8, h200:8), memory
and network are predicted, which takes seconds instead of minutes. A roofline is
a bound and no measurement: no program is faster; a real one is slower.

Exit status: 0 it fits, 1 it does not, 2 the configuration is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any, Callable, Iterator, Sequence

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):
  print(__doc__)  # Before the seconds that JAX takes.
  sys.exit(0)

# Shapes need no accelerator, and libtpu would look for one.
os.environ["JAX_PLATFORMS"] = "cpu"

from tunix.rl.multi_turn import config as config_lib  # noqa: E402
from tunix.rl.multi_turn.planning import chips  # noqa: E402
from tunix.rl.multi_turn.planning import dry_run  # noqa: E402
from tunix.rl.multi_turn.planning import planned_run  # noqa: E402
from tunix.rl.multi_turn.planning import tpu_compiler  # noqa: E402
from tunix.rl.multi_turn.planning import update_memory  # noqa: E402
from tunix.rl.multi_turn.policy import memory_limits  # noqa: E402

human = memory_limits.human

ASSUMPTIONS = (
  "matrix products at the chip's peak, memory and links at theirs, and all"
  " three at a time",
  "every row of a call full; each token of a row attends to half of it, and"
  " of a decode step to the whole window",
  "no time for the gym, the host, or waiting",
)


def split(argv: Sequence[str]) -> tuple[str, bool, bool, list[str]]:
  """(topology, --json, --analytic, the other arguments).

  Raises:
    ConfigError: no topology.
  """
  arguments, topology = [], ""
  for argument in argv:
    key, _, value = argument.partition("=")
    if key == "topology":
      topology = value
    elif argument not in ("--json", "--analytic"):
      arguments.append(argument)
  if not topology:
    raise config_lib.ConfigError(
      [
        "topology= is missing; name the slice, for example topology=v5e:16x16"
        f" (chips: {', '.join(chips.CHIPS)})"
      ]
    )
  return topology, "--json" in argv, "--analytic" in argv, arguments


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run on a slice, predicted or compiled.

  Attributes:
    run: its shapes.
    how: "compiled" or "predicted".
    parts: part -> bytes of a device.
    predicted: the same, predicted.
    programs: name -> figures of the compiler.
    works: name -> the program's work.
  """

  run: planned_run.PlannedRun
  how: str
  parts: dict[str, int]
  predicted: dict[str, int]
  programs: dict[str, tpu_compiler.Compiled]
  works: dict[str, planned_run.Work]

  @property
  def total(self) -> int:
    return planned_run.total(self.parts)

  @property
  def gathers_whole(self) -> bool:
    """Whether an update gathers a whole embedding, or logits as large."""
    update = self.programs.get("accumulate", tpu_compiler.Compiled())
    gathered = update.sent.get("all-gather")
    sizes = update_memory.Sizes.of(self.run.model.config)
    embedding = sizes.vocabulary * sizes.width
    return gathered is not None and gathered.largest_elements >= embedding

  @property
  def fits(self) -> bool:
    refused = any(program.refused for program in self.programs.values())
    return not refused and self.total <= self.run.topology.chip.memory

  def rates(self) -> dict[str, dict[str, Any]]:
    """Program -> seconds by resource, the bound, and tokens a second a chip."""
    chip = self.run.topology.chip
    by_program = {}
    for name, work in self.works.items():
      ici = None
      compiled = self.programs.get(name)
      if compiled is not None and not compiled.refused:
        ici = compiled.received
      seconds = work.seconds(chip, ici)
      bound = max(seconds, key=seconds.__getitem__)
      by_program[name] = {
        "flops": work.flops * work.devices,
        "seconds": seconds,
        "bound": bound,
        "tokens_per_second_per_chip": (
          work.tokens / seconds[bound] / work.devices
        ),
      }
    return by_program


def make(
  run: planned_run.PlannedRun,
  compiling: bool,
  report: Callable[..., Any] | None = None,
) -> Plan:
  """Predicts a run's memory; compiles its programs, too, if asked.

  Args:
    run: Run, with real meshes where its programs are compiled.
    compiling: compiles them.
    report: called with a line about each program.
  """
  predicted = planned_run.memory(run)
  works = planned_run.works(run)
  if not compiling:
    return Plan(run, "predicted", predicted, predicted, {}, works)
  programs = {}
  for name, compiled in tpu_compiler.compile_all(run):
    programs[name] = compiled
    if report is not None:
      report(f"compiled {name} in {compiled.seconds:.0f} s")
  parts = {
    name: size for name, size in predicted.items() if "temporary" not in name
  }
  for name, compiled in programs.items():
    turn = "update" if name in ("accumulate", "apply") else "rollout"
    key = f"{turn}, temporary"
    size = compiled.temporary + compiled.outputs
    parts[key] = max(parts.get(key, 0), size)
  return Plan(run, "compiled", parts, predicted, programs, works)


# --- settings to turn --------------------------------------------------------


def knobs(config: config_lib.TrainConfig, name: str) -> Iterator[list[str]]:
  """Settings that save memory, each kind by itself, the least harmful first.

  Args:
    config: Settings of the run.
    name: Name of its policy.
  """
  learner, engine, mesh = config.learner, config.engine, config.mesh
  remat = config.policy.config.get("remat", "")
  if remat in ("none", "dots"):
    yield ["policy.config.remat=block"]
  if learner.logit_chunk > 256:
    yield ["learner.logit_chunk=256"]
  if config.algorithm.kl_coef and learner.reference_on == "device":
    yield ["learner.reference_on=host"]
  if config.eval.beside:
    yield ["eval.beside=false"]
  if planned_run.has_engine(config):
    if engine.weights != "int8" and "tiny_vl" != name:
      yield ["engine.weights=int8", "algorithm.importance=tis"]
    for factor in (2, 4, 8, 16):
      if engine.slots >= factor:
        yield [f"engine.slots={engine.slots // factor}"]
  if mesh.data > 1:
    yield ["mesh.data=1", f"mesh.fsdp={mesh.fsdp * mesh.data}"]
  if mesh.fsdp % 2 == 0:
    # A dimension that the devices do not divide is not split at all.
    yield [f"mesh.data={mesh.data * 2}", f"mesh.fsdp={mesh.fsdp // 2}"]
  for factor in (2, 4):
    if mesh.fsdp % factor == 0:
      rows = max(1, learner.rows // factor)
      yield [
        f"mesh.fsdp={mesh.fsdp // factor}",
        f"mesh.sequence={mesh.sequence * factor}",
        f"learner.rows={rows}",
      ]
  for factor in (2, 4):
    length = learner.row_length // factor
    context = min(engine.context_length, length)
    yield [
      f"learner.row_length={length}",
      *(
        [f"engine.context_length={context}"]
        if context < engine.context_length
        else []
      ),
    ]
  if not config.policy.lora_rank:
    if not learner.freeze_vision:
      yield ["learner.freeze_vision=true"]
    yield ["policy.lora_rank=16"]


def fixes(
  arguments: Sequence[str], run: planned_run.PlannedRun
) -> list[tuple[list[str], int]]:
  """Settings and the predicted total with them, those that fit first.

  Each is planned as a run of its own; one that the configuration refuses is
  left out, and so is one that saves next to nothing. Where none suffices
  alone, they are added up, those that save most first.
  """
  totals: list[tuple[list[str], int]] = []
  room = run.topology.chip.memory
  now = planned_run.total(planned_run.memory(run))

  def attempt(settings: list[str]) -> int | None:
    again = _again(arguments, run, settings)
    return planned_run.total(planned_run.memory(again)) if again else None

  for settings in knobs(run.config, run.name):
    total = attempt(settings)
    if total is not None and total < 0.99 * now:
      totals.append((settings, total))
  # Of fitting settings the first, the least harmful; else the one that saves
  # most.
  totals.sort(key=lambda pair: pair[1] if pair[1] > room else 0)
  if totals and totals[0][1] > room:
    together: dict[str, str] = {}
    for settings, _ in totals:
      for setting in settings:
        together.setdefault(setting.partition("=")[0], setting)
      total = attempt(list(together.values()))
      if total is not None and total <= room:
        totals.insert(0, (list(together.values()), total))
        break
  return totals


def spending(
  arguments: Sequence[str], run: planned_run.PlannedRun
) -> list[tuple[list[str], int, float]]:
  """Settings that make updates faster with memory to spare, fastest first.

  Returns:
    The settings that fit, the predicted total with them, and the
    bound of tokens a second over the present one.
  """
  faster = []
  now = planned_run.works(run)["accumulate"].seconds(run.topology.chip)
  for remat in ("none", "dots"):
    settings = [f"policy.config.remat={remat}"]
    again = _again(arguments, run, settings)
    if again is None:
      continue
    total = planned_run.total(planned_run.memory(again))
    seconds = planned_run.works(again)["accumulate"].seconds(run.topology.chip)
    gain = max(now.values()) / max(seconds.values())
    if total <= run.topology.chip.memory and gain > 1.01:
      faster.append((settings, total, gain))
  return sorted(faster, key=lambda one: (-one[2], one[1]))


def _again(
  arguments: Sequence[str], run: planned_run.PlannedRun, settings: list[str]
) -> planned_run.PlannedRun | None:
  """The run with further settings; None where they are refused."""
  try:
    config, name, _ = planned_run.load([*arguments, *settings], run.topology)
    return planned_run.PlannedRun.of(config, name, run.topology)
  except (ValueError, config_lib.ConfigError):
    return None


# --- how it is printed --------------------------------------------------------


def as_dict(
  plan: Plan,
  turned: Sequence[tuple[list[str], int]],
  spent: Sequence[tuple[list[str], int, float]],
) -> dict[str, Any]:
  """The plan for programs."""
  run, chip = plan.run, plan.run.topology.chip
  return {
    "policy": run.name,
    "topology": run.topology.name,
    "devices": run.topology.devices,
    "hosts": run.topology.hosts,
    "mesh": dict(run.mesh.shape),
    "engine_mesh": dict(run.engine_mesh.shape),
    "how": plan.how,
    "fits": plan.fits,
    "memory": plan.parts,
    "predicted": plan.predicted,
    "total": plan.total,
    "gathers_whole": plan.gathers_whole,
    "predicted_total": planned_run.total(plan.predicted),
    "available": chip.memory,
    "programs": {
      name: dataclasses.asdict(program) | {"received": program.received}
      for name, program in plan.programs.items()
    },
    "roofline": plan.rates(),
    "chip": dataclasses.asdict(chip),
    "assumptions": list(ASSUMPTIONS),
    "fixes": [
      {"settings": settings, "total": total} for settings, total in turned
    ],
    "faster": [
      {"settings": settings, "total": total, "update": gain}
      for settings, total, gain in spent
    ],
  }


def _figures(value: float) -> str:
  """Three figures, and never an exponent of a large number."""
  return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def text_of(
  plan: Plan,
  chosen: Sequence[str],
  turned: Sequence[tuple[list[str], int]],
  spent: Sequence[tuple[list[str], int, float]],
) -> str:
  """The plan for people."""
  run, chip = plan.run, plan.run.topology.chip
  show = lambda mesh: ", ".join(f"{k}={v}" for k, v in mesh.shape.items())
  shape, via = run.shape, run.config.rollout.via
  engine = f"none on these chips (rollout.via={via})"
  if planned_run.has_engine(run.config):
    buckets = run.buckets
    engine = (
      f"{show(run.engine_mesh)} on each host; {buckets.decode_rows[-1]} rows"
      f" x {buckets.windows[-1]} tokens"
    )
  lines = [
    f"{run.name} on {run.topology.name}: {run.topology.devices} chips,"
    f" {run.topology.hosts} hosts",
    f"  learner  {show(run.mesh)}; {shape.rows} rows x {shape.row_length}"
    f" tokens, {shape.patches} patches and {shape.targets} sampled tokens a"
    " shard",
    f"  engine   {engine}",
  ]
  if chosen:
    lines.append(f"  chosen   {' '.join(chosen)}")
  lines += ["", f"memory of a device, {plan.how}"]
  rows = [["part", plan.how]]
  rows += [[name, human(size)] for name, size in plan.parts.items()]
  rows.append(["at a time", human(plan.total)])
  rows.append(["the chip has", human(chip.memory)])
  if plan.how == "compiled":
    rows[0].append("predicted")
    totals = [planned_run.total(plan.predicted), chip.memory]
    sizes = [plan.predicted.get(name) for name in plan.parts] + totals
    for row, size in zip(rows[1:], sizes):
      row.append("" if size is None else human(size))
  lines += dry_run.aligned(rows)
  for name, program in plan.programs.items():
    if program.refused:
      lines.append(f"  {name} was refused: {program.refused}")
  if plan.programs:
    lines += ["", "collectives, received by a device in one call"]
    lines += dry_run.aligned([
        ["program", "kind", "runs", "bytes", "largest"],
        *(
            [name, kind, str(sent.runs), human(sent.received),
             human(sent.largest)]
            for name, program in plan.programs.items()
            for kind, sent in program.sent.items()
        ),
    ])  # fmt: skip
    if plan.gathers_whole:
      lines.append("  the update gathers a whole embedding, or its logits")
  lines += ["", "roofline: no call is faster"]
  kinds = ("compute", "memory", "network")
  rates = [["program", "TFLOP", *kinds, "tokens/s/chip"]]
  for name, rate in plan.rates().items():
    rates.append(
      [
        name,
        _figures(rate["flops"] / 1e12),
        *(
          f"{_figures(1e3 * rate['seconds'][kind])} ms"
          + "*" * (kind == rate["bound"])
          for kind in kinds
        ),
        f"{rate['tokens_per_second_per_chip']:.0f}",
      ]
    )
  lines += dry_run.aligned(rates)
  lines.append(
    f"  {chip.name}: {chip.flops / 1e12:g} TFLOP/s, memory"
    f" {chip.hbm / 1e9:g} GB/s, links {chip.ici / 1e9:g} GB/s; * bounds it."
  )
  lines += [f"  Assumed: {text}." for text in ASSUMPTIONS]
  lines.append("")
  if plan.fits:
    spare = chip.memory - plan.total
    lines.append(f"fits, {human(spare)} of a device to spare ({plan.how})")
    if spent:
      lines.append("  for speed, each planned anew (predicted):")
    lines += [
      f"    {' '.join(settings)}: {human(total)}, the update's bound"
      f" {gain:.2f}x as fast"
      for settings, total, gain in spent
    ]
    return "\n".join(lines)
  lines.append(
    f"does not fit: {human(plan.total)} of {human(chip.memory)} a device"
  )
  lines.append("  to turn, each planned anew (predicted):")
  for settings, total in turned:
    verdict = "fits" if total <= chip.memory else "does not"
    lines.append(f"    {' '.join(settings)}: {human(total)}, {verdict}")
  lines.append("    a larger topology")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  if not argv or {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  note = lambda text: print(text, file=sys.stderr, flush=True)
  try:
    name, as_json, analytic, arguments = split(argv)
    topology = chips.Topology.of(name)
    analytic = analytic or topology.chip.gpu
    compiler = "" if analytic else tpu_compiler.find_compiler()
    config, policy, chosen = planned_run.load(arguments, topology)
    devices, host = None, None
    if compiler:
      devices, host = tpu_compiler.devices_of(topology)
    elif not analytic:
      note(
        "libtpu is not installed (pip install libtpu, or make tpu-plan):"
        " everything below is predicted"
      )
    run = planned_run.PlannedRun.of(config, policy, topology, devices, host)
    plan = make(run, bool(compiler), note)
    turned = [] if plan.fits else fixes(arguments, run)
    spent = spending(arguments, run) if plan.fits else []
  except config_lib.ConfigError as error:
    note(f"error: {error}")
    return 2
  except (ValueError, OSError) as error:
    note(f"error: {error}")
    return 2
  if as_json:
    print(json.dumps(as_dict(plan, turned, spent), indent=2))
  else:
    print(text_of(plan, chosen, turned, spent))
  return 0 if plan.fits else 1


if __name__ == "__main__":
  sys.exit(main())
