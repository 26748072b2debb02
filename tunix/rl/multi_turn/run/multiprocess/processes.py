"""Joins the processes that make one run, one a host.

JAX's coordination service brings them together: `processes.coordinator`, or
what JAX finds out by itself (TPU metadata, SLURM, MPI, JobSet). From then on
`jax.devices()` are the devices of all, and every process must run the same
programs in the same order.

Does not decide what each process does; see `training` and `evaluation`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from typing import Any

import jax
from jax._src import distributed
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.run import before_jax
from tunix.rl.multi_turn.run.multiprocess import peer_watch
from tunix.rl.queue import admission

ProcessesConfig = run_sections.ProcessesConfig
_AFTER_S = 30  # JAX aborts the process when this much more has passed.
_NOTED_S = 5.0
_OWN = ("host", "port", "public_url")
"""Of `rollout`: of a server that each process has on its own machine."""
_ADDRESS, _COUNT, _INDEX = (
  before_jax.ADDRESS,
  "JAX_NUM_PROCESSES",
  "JAX_PROCESS_ID",
)


def join(config: ProcessesConfig) -> peers_lib.Peers:
  """This process among those of the run; to be called before JAX is used.

  Raises:
    ConfigError: the others cannot be found, or did not come.
  """
  address = config.coordinator or os.environ.get(_ADDRESS, "")
  if not address:
    for name in ("count", "index"):
      if (value := getattr(config, name)) > 0:
        raise config_lib.ConfigError(
          [
            f"processes.{name}={value} needs processes.coordinator=host:port"
            " of process 0, or auto"
          ]
        )
    return peers_lib.ALONE
  auto = address == "auto"
  late = threading.Timer(config.join_s, _give_up, (address, config.join_s))
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
      coordinator_address=None if auto else address,
      num_processes=config.count or _number(_COUNT),
      process_id=_number(_INDEX) if config.index < 0 else config.index,
      cluster_detection_method=None if auto else "deactivate",
      initialization_timeout=int(config.join_s) + _AFTER_S,
      heartbeat_timeout_seconds=int(config.heartbeat_s),
    )
  except (ValueError, TypeError, RuntimeError) as error:
    text = " ".join(str(error).split())
    if auto:
      text += " JAX found no TPU pod, SLURM, MPI or JobSet; give host:port"
    raise config_lib.ConfigError(
      [
        f"processes.coordinator={address}: {text[:300]}; start every process"
        " with the same processes.coordinator and processes.count, and its own"
        " processes.index from 0 on"
      ]
    ) from None
  finally:
    late.cancel()
  # The only door to the service beside the devices' collectives.
  client: Any = distributed.global_state.client
  return peers_lib.StorePeers(
    client, jax.process_index(), jax.process_count(), config.step_s
  )


def _give_up(address: str, seconds: float) -> None:
  """Ends the process with a line, where JAX would abort it with a stack."""
  print(
    f"error: processes.coordinator={address}: not all processes came within"
    f" processes.join_s={seconds:g} s; start process 0 at that address and"
    " the others with the same processes.count",
    file=sys.stderr,
    flush=True,
  )
  os._exit(2)


def agreed(
  processes: peers_lib.Peers, config: config_lib.TrainConfig
) -> config_lib.TrainConfig:
  """The configuration with the name that process 0 gives the run."""
  name = processes.of_first("name", config.run.name)
  run = dataclasses.replace(config.run, name=name)
  return dataclasses.replace(config, run=run)


def check(processes: peers_lib.Peers, config: config_lib.TrainConfig) -> None:
  """Refuses processes that are configured differently.

  Raises:
    ConfigError: naming the keys.
  """
  if processes.count == 1:
    return
  if config.rollout.via == "external":
    raise config_lib.ConfigError(
      [
        f"rollout.via=external with {processes.count} processes: each would"
        " load its weights into the same server; use in_process"
      ]
    )
  if not config.collects:
    raise config_lib.ConfigError(
      [
        f"rollout.via={config.rollout.via} with {processes.count} processes:"
        " each would train on the same episodes; use one process"
      ]
    )
  if config.queue.path not in ("", admission.AUTO):
    raise config_lib.ConfigError(
      [
        f"queue.path={config.queue.path} with {processes.count} processes: each"
        " needs a file of its own; leave it at auto"
      ]
    )
  own = dataclasses.replace(config, processes=ProcessesConfig()).to_dict()
  for key in _OWN:
    own["rollout"].pop(key)
  digests = processes.gather("configuration", own)
  problems = []
  for process, other in enumerate(digests):
    if different := _different(digests[0], other):
      problems.append(
        f"process {process} has {', '.join(different[:5])}; start all with"
        " the same configuration"
      )
  if problems:
    raise config_lib.ConfigError(problems)


def _different(one: object, other: object, key: str = "") -> list[str]:
  if isinstance(one, dict) and isinstance(other, dict):
    return [
      name
      for part in {**one, **other}
      for name in _different(
        one.get(part), other.get(part), f"{key}.{part}".lstrip(".")
      )
    ]
  return [] if one == other else [f"{key}={other} (process 0: {one})"]


def leave(processes: peers_lib.Peers, status: int = 0) -> None:
  """Parts from the others once all are here; call it last.

  Args:
    processes: Processes of the run.
    status: Exit status of this process where some have parted: they
      will not come.
  """
  if processes.count == 1:
    return
  if not processes.parted:
    jax.distributed.shutdown()
    return
  due = time.monotonic() + peer_watch.GRACE_S + _NOTED_S
  if not processes.first:
    processes.announce(peers_lib.ENDED)
  # The notes are kept by process 0: JAX aborts who cannot reach it.
  while processes.first and time.monotonic() < due:
    if len(processes.announced(peers_lib.ENDED)) == processes.count - 1:
      break
    time.sleep(0.1)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _number(name: str) -> int | None:
  text = os.environ.get(name, "")
  if text and not text.isdigit():
    raise config_lib.ConfigError([f"${name}={text!r} is not a number"])
  return int(text) if text else None
