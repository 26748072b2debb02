"""Checks cores, memory, disk and versions. Imports no JAX."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import pathlib
import platform
import re
import shutil
import sys
from typing import Iterator, Sequence

from packaging import requirements
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import moved_rooms
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.doctor import finding
from tunix.rl.multi_turn.net import worker_pool
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.run import packages

Finding = finding.Finding
human = memory_limits.human
PACKAGE = "tunix-multi-turn"
LEAST_CORES = 2
LEAST_MEMORY = 2 << 30
LEAST_DISK, SOME_DISK = 512 << 20, 5 << 30
COPIES_ON_A_CPU = 5
COPIES_WITH_AN_ADAPTER = 2
"""Of the parameters: themselves, the engine's, gradients, Adam's moments."""
_CPU_MAX = pathlib.Path("/sys/fs/cgroup/cpu.max")
_CONSTRAINTS = pathlib.Path(__file__).resolve().parents[4] / "constraints.txt"


def cores() -> Iterator[Finding]:
  """Cores that this process may use, and its cgroup's share of them."""
  count = float(worker_pool.usable_cores())
  how = f"{count:.0f} cores ({platform.machine()})"
  try:
    quota, period = _CPU_MAX.read_text(encoding="ascii").split()
    if quota != "max":
      count = min(count, int(quota) / int(period))
      how += f", {count:.1f} of them by its cgroup"
  except (OSError, ValueError):
    pass  # No cgroup of version 2: all of them.
  if count >= LEAST_CORES:
    yield Finding("cores", "ok", how)
  else:
    yield Finding(
      "cores",
      "warn",
      how,
      "gyms and the learner share one core; give the machine or container"
      f" {LEAST_CORES} or more",
    )


def available_bytes() -> int:
  """Memory of this machine, or its cgroup, that is not in use."""
  free = memory_limits.host_bytes()
  try:
    text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
  except OSError:
    return free
  match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
  return min(free, int(match[1]) << 10) if match else free


def memory(
  weights: int | None, on_cpu: bool, adapter: bool = False
) -> Iterator[Finding]:
  """Free memory against the policy's weights.

  Args:
    weights: bytes; None where they are not known.
    on_cpu: whether the policy computes in this memory.
    adapter: only an adapter has gradients and moments.
  """
  free = available_bytes()
  how = f"{human(free)} free of {human(memory_limits.host_bytes())}"
  copies = COPIES_WITH_AN_ADAPTER if adapter else COPIES_ON_A_CPU
  need = (weights or 0) * (copies if on_cpu else 1)
  if weights:
    how += f"; weights of {human(weights)}"
  if free < need:
    yield Finding(
      "memory",
      "fail" if on_cpu else "warn",
      how,
      f"training takes {human(need)} at least; end other programs, choose a"
      " smaller policy.name, or see --dry-run of train",
    )
  elif free < LEAST_MEMORY:
    yield Finding(
      "memory",
      "warn",
      how,
      f"below {human(LEAST_MEMORY)}; end other programs, or lower"
      " engine.slots and collect.concurrency",
    )
  else:
    yield Finding("memory", "ok", how)


def disk(
  config: config_lib.TrainConfig, weights: int | None
) -> Iterator[Finding]:
  """Room where the run writes; preflight finds what cannot be written."""
  place = pathlib.Path(os.path.abspath(config.run_dir))
  while not place.is_dir():
    place = place.parent
  free = shutil.disk_usage(place).free
  how = f"{human(free)} free at {place}"
  # A checkpoint holds parameters, their masters and two moments; policy/ one.
  need = (weights or 0) * (4 * config.checkpoint.keep + 1)
  fix = "free some, or choose a run.dir on another disk"
  if free < max(LEAST_DISK, need):
    if need > free:
      fix = (
        f"checkpoints take about {human(need)} with checkpoint.keep="
        f"{config.checkpoint.keep}; {fix}, or lower it"
      )
    yield Finding("disk", "fail" if free < LEAST_DISK else "warn", how, fix)
  elif free < SOME_DISK:
    yield Finding("disk", "warn", how, fix)
  else:
    yield Finding("disk", "ok", how)


# --- versions -----------------------------------------------------------------


def extras_of(config: config_lib.TrainConfig) -> tuple[str, ...]:
  """Extras of this package that the run's settings need, its gym's left out."""
  extras: set[str] = set()
  if config.monitor.on:
    extras.add("monitor")
  if config.rollout.via in ("proxy", "hosts", "buffer") or config.fleet.away:
    extras |= {"serve", "client"}
  if config.rollout.via in ("proxy", "buffer") or config.fleet.away:
    extras.add("services")
  if config.fleet.via == "ray":
    extras.add("ray")
  if config.tracking.mlflow or config.tracking.wandb != "off":
    extras.add("tracking")
  name = config.policy.name
  if name in policy_settings.PRETRAINED or policy_settings.is_gguf(name):
    extras.add("pretrained")
  return tuple(sorted(extras))


def versions(extras: Sequence[str]) -> Iterator[Finding]:
  """Python and the packages that are needed, by this package's metadata.

  Args:
    extras: Extras of this package, whose packages are needed, too.
  """
  here = f"Python {platform.python_version()} at {sys.executable}"
  try:
    needed = metadata.requires(PACKAGE) or []
  except metadata.PackageNotFoundError:
    yield Finding(
      "versions",
      "warn",
      here,
      "this is a clone that is not installed, so its packages are not"
      " checked; run make install, or pip install -c constraints.txt -e .",
    )
    return
  missing, wrong, there = [], [], {}
  for text in needed:
    one = requirements.Requirement(text)
    environments = [{"extra": extra} for extra in ("", *extras)]
    if one.marker and not any(map(one.marker.evaluate, environments)):
      continue
    try:
      version = metadata.version(one.name)
    except metadata.PackageNotFoundError:
      missing.append(str(one).partition(";")[0].strip())
      continue
    there[_key(one.name)] = version
    if not one.specifier.contains(version, prereleases=True):
      wrong.append(f"{one.name} {version}, which must be {one.specifier}")
  what = PACKAGE + (f"[{','.join(extras)}]" if extras else "")
  install = f"pip install '{what}'"
  if _CONSTRAINTS.is_file():
    install = (
      f"{shell_hints.python()} -m pip install -c {_CONSTRAINTS} -e"
      f" '{_CONSTRAINTS.parent}{what[len(PACKAGE) :]}'"
    )
    names = [packages.PACKAGES[e] for e in extras if e in packages.PACKAGES]
    for name in names:
      for one in (*moved_rooms.NEEDS.get(name, ()), name):
        install += f" -e '{_CONSTRAINTS.parent / 'packages' / one}'"
  if missing or wrong:
    problems = [f"not installed: {', '.join(missing)}"] if missing else []
    yield Finding("versions", "fail", "; ".join([*problems, *wrong]), install)
    return
  yield from _as_tested(here, there, install)


def _as_tested(here: str, there: dict[str, str], install: str):
  """Compares with constraints.txt, where this is a clone."""
  about = f"{here}, {len(there)} packages as required"
  if not _CONSTRAINTS.is_file():
    yield Finding("versions", "ok", about)
    return
  pins = dict(
    line.strip().split("==")
    for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    if "==" in line
  )
  other = [
    f"{name} {there[_key(name)]} (tested: {pin})"
    for name, pin in pins.items()
    if there.get(_key(name), pin).partition("+")[0] != pin
  ]
  if other:
    yield Finding(
      "versions",
      "warn",
      f"{here}; {', '.join(other)}",
      f"to have what is tested: {install}",
    )
  else:
    yield Finding("versions", "ok", f"{about}, each as tested")


def _key(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()
