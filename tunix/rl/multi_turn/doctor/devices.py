"""Checks JAX's devices, and a run's preflight, in a process with a deadline.

A driver that hangs, or a TPU that another process holds, hangs a process that
asks JAX; here it is a process that is ended. Imports no JAX itself.
"""

from __future__ import annotations

import glob
import os
import pathlib
import subprocess
import sys
from typing import Any, Iterator, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.doctor import finding
from tunix.rl.multi_turn.net import line_process

Finding = finding.Finding
_HERE = pathlib.Path(__file__).resolve()
PROBE = (sys.executable, str(_HERE.with_name("probe.py")))
ACCELERATORS = {
  "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*"),
  "gpu": ("/dev/nvidia[0-9]*",),
}
"""Extra of this package -> device files of what it drives."""


def ask(
  argv: Sequence[str], seconds: float, command: Sequence[str] = PROBE
) -> tuple[dict[str, Any], str]:
  """(what the probe found, why it found nothing or "").

  Args:
    argv: the run's command line.
    seconds: deadline.
    command: Command of the probe.
  """
  try:
    worker = line_process.Worker(
      command,
      "JAX",
      {"argv": list(argv)},
      seconds,
      # Modules of the user's own are named in run.imports.
      path=os.environ.get("PYTHONPATH", ""),
    )
  except line_process.WorkerError as error:
    return {}, str(error)
  except subprocess.TimeoutExpired:
    return {}, (
      f"JAX has not answered after {seconds:g} s, and its process cannot be"
      " ended"
    )
  worker.end("it has answered")
  return worker.facts, ""


def devices(
  config: config_lib.TrainConfig, facts: dict[str, Any], why: str
) -> Iterator[Finding]:
  """Devices that JAX found against those of the machine and of the mesh."""
  installed = [
    extra
    for extra, patterns in ACCELERATORS.items()
    if any(glob.glob(pattern) for pattern in patterns)
  ]
  if why:
    yield Finding(
      "devices",
      "fail",
      why,
      "a TPU serves one process at a time: end the one that holds it (fuser"
      " -v /dev/accel* /dev/vfio/*); else try JAX_PLATFORMS=cpu, and mend the"
      " driver",
    )
    return
  listed, platform = facts["devices"], facts["platform"]
  how = f"{len(listed)} x {listed[0]['kind']} ({platform}), JAX {facts['jax']}"
  if listed[0]["memory"]:
    how += f", {listed[0]['memory'] / (1 << 30):.1f} GiB each"
  mesh = config.mesh.devices
  if platform == "cpu" and installed and not os.environ.get("JAX_PLATFORMS"):
    extra = installed[0]
    yield Finding(
      "devices",
      "warn",
      f"{how}, and this machine has a {extra.upper()}",
      f"pip install 'tunix-multi-turn[{extra}]' for JAX to use it",
    )
  elif mesh > len(listed) and not _many(config):
    yield Finding(
      "devices",
      "fail",
      f"{how}; the mesh has {mesh}",
      "lower mesh.data, mesh.fsdp, mesh.sequence or mesh.tensor, or start a"
      " process on each host, see docs/pods.md",
    )
  else:
    yield Finding("devices", "ok", how)


def _many(config: config_lib.TrainConfig) -> bool:
  processes = config.processes
  return processes.count > 1 or bool(processes.coordinator)


def preflight(facts: dict[str, Any], why: str) -> Iterator[Finding]:
  """Yields what a run refuses before compiling; see run/preflight.py."""
  if why:
    yield Finding(
      "preflight", "warn", "not checked: it needs JAX", "mend the devices"
    )
    return
  for problem in facts["problems"]:
    text, _, fix = problem.rpartition("; ")
    yield Finding("preflight", "fail", text or problem, fix)
  if not facts["problems"]:
    yield Finding("preflight", "ok", "the run's places and weights")
