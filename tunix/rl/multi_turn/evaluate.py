"""Measures the success of a policy, or of a server's model, on tasks.

    python -m tunix.rl.multi_turn.evaluate runs/<name> attempts=8

The first word is a run, a policy's directory, an evaluation that is continued,
or `grounding`, which measures where a policy clicks; settings and a YAML file
follow as for `train`. Writes a directory with evaluation.json, episodes.jsonl,
trajectories.jsonl, images/ and report.html; see `run.evaluations.evaluator` and
docs/evaluation.md.

Promises: an interrupt (Ctrl-C) or a failure keeps the episodes that have ended,
and prints the command that resumes the evaluation. The exit status is 0 when
every episode was played and one of them at least was valid, 1 after a failure,
2 where nothing was begun, 130 after an interrupt.
"""

from __future__ import annotations

import sys
from typing import Any, Iterator, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run import before_jax

if __name__ == "__main__":  # Before the seconds that JAX takes.
  _CONFIG = config_lib.load_first(
    sys.argv[1:],
    lambda argv: before_jax.checked_evaluation(
      config_lib.load_evaluation(argv)
    ),
  )

import jax
from tunix.rl.multi_turn.commands import command_module
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.net import credentials
from tunix.rl.multi_turn.policy import compile_cache
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.run import addresses
from tunix.rl.multi_turn.run import disk_full
from tunix.rl.multi_turn.run import interrupts
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run.evaluations import evaluator

Evaluation = evaluator.Evaluation
INTERRUPTED = 130
"""Exit status."""


def main(
  argv: Sequence[str] | None = None,
  config: config_lib.EvaluationConfig | None = None,
) -> int:
  """The command; returns the exit status.

  Args:
    argv: Arguments. None takes the program's.
    config: The configuration where it is loaded already; then `argv` is not
      read.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  try:
    evaluation = build(config or config_lib.load_evaluation(argv))
    config = evaluation.config
    if config.run.dry_run:
      print(evaluation.describe() + addresses.unreachable(config))
      evaluation.subject.close(loop_thread.STOP_TIMEOUT_S)
      return 0
    return run_to_end(evaluation)
  except config_lib.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("interrupted before the evaluation began", file=sys.stderr)
    return INTERRUPTED


def build(
  config: config_lib.EvaluationConfig, choose: evaluator.Choose | None = None
) -> Evaluation:
  """The evaluation of a configuration, not begun; see `Evaluation`.

  Raises:
    ConfigError: lists the parts that cannot be built.
  """
  host_memory.tune()
  compile_cache.enable(config.run.compile_cache)
  return Evaluation(config, choose)


def run_to_end(evaluation: Evaluation, *, quiet: bool = False) -> int:
  """Plays an evaluation and prints its results; returns the exit status.

  In the main thread, Ctrl-C and SIGTERM ask it to stop.

  Args:
    evaluation: Evaluation that has not begun.
    quiet: print failures alone: a notebook's cell shows the rest.

  Raises:
    ConfigError: The subject cannot be evaluated, or its directory not written.
  """
  status, written = 0, None
  try:
    with (
      interrupts.asked(evaluation.stop, "stopping; ended episodes are kept"),
      disk_full.reported_once(),
      evaluation,
    ):
      if not quiet:
        print(f"evaluation: {evaluation.directory}", file=sys.stderr)
      for note in evaluation.notes:
        print(f"note: {note}", file=sys.stderr)
      written = evaluation.run()
  except loop_thread.Interrupted:
    status = INTERRUPTED
  except KeyboardInterrupt:
    print(f"interrupted at once; {_how_to_resume(evaluation)}")
    return INTERRUPTED
  except config_lib.ConfigError:
    raise
  except (evaluator.GaveUp, OSError, RuntimeError, MemoryError) as failure:
    text = credentials.masked(f"{failure}")
    if isinstance(failure, OSError) and disk_full.is_full(failure):
      text = disk_full.describe(evaluation.directory)
    elif isinstance(failure, jax.errors.JaxRuntimeError):
      text = " ".join(text.split())[:300]
    print(f"error: {text}", file=sys.stderr)
    status = 1
  if written is not None:
    if not quiet:
      _show(written)
    for line in _failures(written):
      print(f"error: {line}", file=sys.stderr)
      status = 1
  try:
    page = report.build_report(evaluation.directory, evaluation.config.report)
    if not quiet:
      print(f"report: {page}")
  except OSError as failure:
    print(f"no report: {failure}")
  if status and not quiet:
    print(_how_to_resume(evaluation))
  return status


def _show(written: dict[str, Any]) -> None:
  """Prints the results."""
  results = written["results"]
  print(success_rates.format_table({evaluator.NAME: results}))
  for name, label in (("pass_at_k", "pass@"), ("pass_hat_k", "pass^")):
    table = results.get(name, {})
    if table:
      print(
        "  ".join(
          f"{label}{k} {figures['rate']:.3f}" for k, figures in table.items()
        )
      )
  for line in written.get("digest", {}).get("lines", ()):
    print(line)


def _failures(written: dict[str, Any]) -> Iterator[str]:
  """Why an evaluation that was played to its end is of no use."""
  if written["results"]["success_rate"] is None:
    yield (
      "no episode was valid: gym or server broke each of them; see the errors"
      " in episodes.jsonl"
    )


def _how_to_resume(evaluation: Evaluation) -> str:
  command = shell_hints.command("evaluate", f"resume={evaluation.directory}")
  return f"resume with: {command}"


if __name__ == "__main__":
  sys.exit(main(config=_CONFIG))
sys.modules[__name__].__class__ = command_module.CommandModule
