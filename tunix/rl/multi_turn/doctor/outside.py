"""Checks what a run's settings name outside of it: its gym's programs, servers
that it calls, ports that it binds, tokens.

Does not: send a request, or show a token. Imports no JAX.
"""

from __future__ import annotations

import os
import socket
from typing import Iterator, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import agent_settings
from tunix.rl.multi_turn.core import monitor_settings as monitor_settings
from tunix.rl.multi_turn.doctor import finding
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.reporting import trackers
from tunix.rl.multi_turn.run import addresses

Finding = finding.Finding
TrainConfig = config_lib.TrainConfig


def gym(config: TrainConfig) -> Iterator[Finding]:
  """Programs, packages and keys, as the gym declares them."""
  name = config.gym.name
  if not config.plays:
    return
  if not environment_spec.get(config.environment.name).gym:
    return
  spec = gyms.get(name, "operator")
  check = f"gym {name}"
  try:
    lacking = list(spec.missing(config.gym.options))
    if not lacking:
      dict(spec.options)  # Imports what the gym is made with.
  except ImportError as error:
    lacking = [str(error)]
  for text in lacking:
    what, _, fix = text.partition("; ")
    if not fix:
      what, _, fix = text.partition(": ")
    yield Finding(check, "fail", what, fix or what)
  if not lacking:
    yield Finding(
      check, "ok", "has what it needs" if spec.needs else "needs nothing"
    )


# --- servers that the run calls ----------------------------------------------


def servers(config: TrainConfig) -> Iterator[Finding]:
  """Whether each server takes a connection; nothing is sent to it."""
  for one in addresses.servers(config):
    if one.problem:
      yield Finding(
        "server",
        "fail",
        f"{one.shown}: {one.problem}",
        f"start it, or correct {one.key}; a firewall may be between",
      )
    else:
      yield Finding("server", "ok", f"{one.shown} takes connections")


# --- ports that the run binds -------------------------------------------------


def ports(config: TrainConfig) -> Iterator[Finding]:
  """Whether the run's own servers can bind their ports."""
  bindings = []
  if config.rollout.via in ("proxy", "hosts", "buffer") or config.fleet.away:
    bindings.append(("rollout.port", config.rollout.host, config.rollout.port))
  processes = config.processes
  host, _, port = processes.coordinator.rpartition(":")
  if port.isdigit() and processes.index in (-1, 0) and _is_here(host):
    bindings.append(("processes.coordinator", host, int(port)))
  for key, address, number in bindings:
    shown = f"{key}: {address}:{number or 'any free port'}"
    try:
      http_server.listen(address, number).close()
      yield Finding("port", "ok", f"{shown} is free")
    except ValueError as error:
      why = str(error).partition(": ")[2].partition(";")[0]
      yield Finding(
        "port",
        "fail",
        f"{shown}: {why}",
        f"end the program that has it (ss -ltnp), or change {key}",
      )


def _is_here(host: str) -> bool:
  """Whether the name is one of this machine's; another binds elsewhere."""
  try:
    address = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
      probe.bind((address, 0))
    return True
  except OSError:
    return False


# --- tokens -------------------------------------------------------------------


def tokens(config: TrainConfig) -> Iterator[Finding]:
  """Variables with tokens that the settings call for; none is shown."""
  needs: dict[str, str] = {}
  if config.monitor.url:
    needs[monitor_settings.TOKEN_VARIABLE] = "monitor.url"
  if config.rollout.agent == "run_service":
    needs[agent_settings.RUN_SERVICE_TOKEN_VARIABLE] = "run_service"
  for key, name in _variables(config.to_dict(), ""):
    needs[name] = key
  for name, key in needs.items():
    if os.environ.get(name):
      yield Finding("token", "ok", f"${name} is set, for {key}")
    else:
      yield Finding(
        "token",
        "warn",
        f"${name} is not set, for {key}",
        f"export {name}=… where its server asks for one",
      )
  if config.tracking.wandb == "online":
    if trackers.has_wandb_login():
      yield Finding("token", "ok", "Weights & Biases has a key")
    else:
      yield Finding(
        "token",
        "fail",
        "tracking.wandb=online without a key",
        "run wandb login, set WANDB_API_KEY, or tracking.wandb=offline",
      )


def _variables(value: object, key: str) -> Iterator[tuple[str, str]]:
  """(setting, variable) of settings that name one: api_key_env, token_env."""
  if isinstance(value, Mapping):
    for name, inner in value.items():
      yield from _variables(inner, f"{key}.{name}" if key else str(name))
  elif isinstance(value, (list, tuple)):
    for inner in value:
      yield from _variables(inner, key)
  elif isinstance(value, str) and value and key.endswith("_env"):
    yield key, value
