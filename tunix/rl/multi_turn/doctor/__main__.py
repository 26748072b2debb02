"""Checks this machine for a run, and says what to mend.

    python -m tunix.rl.multi_turn.doctor [config.yaml] [key=value ...] \\
        [--json]

Takes the arguments of `train`: the checks are of that run. Cores, memory, the
disk at run.dir, devices (JAX in a process that is ended after `--timeout`
seconds, 60 unless given), versions, the run's preflight, its gym's programs,
servers that it calls, ports that it binds, tokens. Nothing is compiled, played
or sent.

Exit status: 0 nothing failed, 1 a check failed, 2 the arguments are wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.doctor import devices
from tunix.rl.multi_turn.doctor import finding
from tunix.rl.multi_turn.doctor import machine
from tunix.rl.multi_turn.doctor import outside

TIMEOUT_S = 60.0


def examine(
  argv: Sequence[str], seconds: float = TIMEOUT_S
) -> list[finding.Finding]:
  """All checks of a run, in the order of the table.

  Args:
    argv: the run's command line, as `train` takes it.
    seconds: deadline for JAX.

  Raises:
    ConfigError: it is no run's.
  """
  config = config_lib.load_config(argv)
  facts, why = devices.ask(argv, seconds)
  weights = facts.get("weights")
  on_cpu = facts.get("platform", "cpu") == "cpu"
  return [
    *machine.cores(),
    *machine.memory(weights, on_cpu, config.policy.lora_rank > 0),
    *machine.disk(config, weights),
    *machine.versions(machine.extras_of(config)),
    *devices.devices(config, facts, why),
    *devices.preflight(facts, why),
    *outside.gym(config),
    *outside.servers(config),
    *outside.ports(config),
    *outside.tokens(config),
  ]


def read(argv: Sequence[str]) -> tuple[list[str], bool, float]:
  """(the run's arguments, whether --json, seconds of --timeout).

  Raises:
    ConfigError: no seconds.
  """
  arguments, as_json, seconds = [], False, TIMEOUT_S
  words = iter(argv)
  for word in words:
    name, equals, value = word.partition("=")
    if word == "--json":
      as_json = True
    elif name == "--timeout":
      text = value if equals else next(words, "")
      try:
        seconds = float(text)
      except ValueError:
        seconds = 0.0
      if not 0 < seconds < 1e6:
        raise config_lib.ConfigError(
          [f"--timeout={text}: give a number of seconds > 0"]
        )
    else:
      arguments.append(word)
  return arguments, as_json, seconds


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  if {"-h", "--help"} & set(argv):
    shell_hints.show(__doc__)
    return 0
  try:
    arguments, as_json, seconds = read(argv)
    findings = examine(arguments, seconds)
  except config_lib.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  if as_json:
    print(json.dumps(finding.as_dict(findings), indent=2))
  else:
    print(finding.text_of(findings))
  return 1 if finding.failed(findings) else 0


if __name__ == "__main__":
  sys.exit(main())
