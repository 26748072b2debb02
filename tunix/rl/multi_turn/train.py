"""Trains a vision-language policy to use a computer.

    python -m tunix.rl.multi_turn.train [config.yaml] [key=value ...]

Runs the stages in order: random weights are evaluated (unless the policy is a
directory, which brings its own), the warm start is made and evaluated, GRPO
trains, and the result is evaluated, all on the same held-out tasks. The run
directory holds config.yaml, metrics.jsonl, summary.json, trajectories.jsonl,
images/, cloning/ (checkpoints while demonstrations are cloned), warm_start/
(the policy after that), checkpoints/, policy/ (the trained policy) and
report.html.

Promises: an interrupt (Ctrl-C) or a failure saves a checkpoint, leaves a
summary and a report of what happened (the traceback is in traceback.txt), and
prints the command that resumes the run.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import traceback
from typing import Any, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run import before_jax

if __name__ == "__main__":  # Before the seconds that JAX takes.
  _CONFIG, _TASKS = config_lib.load_first(
    sys.argv[1:], lambda argv: before_jax.checked(config_lib.load_config(argv))
  )

import jax
from tunix.rl.multi_turn.commands import command_module
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.net import credentials
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.planning import dry_run
from tunix.rl.multi_turn.policy import compile_cache
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import watchdog
from tunix.rl.multi_turn.run import addresses
from tunix.rl.multi_turn.run import disk_full
from tunix.rl.multi_turn.run import interrupts
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run as run_lib
from tunix.rl.multi_turn.run import training
from tunix.rl.multi_turn.run.evaluations import evaluation
from tunix.rl.multi_turn.run.multiprocess import processes as processes_lib

Run = run_lib.Run
TRACEBACK = "traceback.txt"
_STATUS = {"completed": 0, "failed": 1, "interrupted": 130}


def execute(run: Run) -> tuple[str, str | None]:
  """All stages of a run; returns its status, and its error if it failed."""
  config = run.config
  step, measured = None, {}
  if run.resuming:
    step = resuming.checkpoint_step(config)
    measured = run.processes.of_first(
      "measured", resuming.stages_measured(run.directory)
    )
  run.attach_observers(step)
  run.observers.on_event(
    events.RunStarted(
      config.run.name, config.to_dict(), config_lib.changed(config)
    )
  )
  listed = getattr(run.task_source, "listed", ())
  for start in range(0, len(listed), events.TASKS_LISTED):
    run.observers.on_event(
      events.TasksListed(
        tuple(
          task.to_record()
          for task in listed[start : start + events.TASKS_LISTED]
        )
      )
    )
  details = run.own_directory / TRACEBACK
  details.unlink(missing_ok=True)
  status, error, trace = "completed", None, ""
  try:
    run.warm_up()
    run.processes.together(
      "try rollout.agent", lambda: evaluation.try_outside_agent(run)
    )
    evaluates = config.evaluates
    if evaluates and run.warm_start.clones and "initial" not in measured:
      evaluation.evaluate(run, "initial")
    run.apply_warm_start()
    if evaluates and "warm_start" not in measured:
      evaluation.evaluate(run, "warm_start")
    if config.learner.steps:
      training.Training(run).run()
    if evaluates:
      evaluation.evaluate_last(run)
  except loop_thread.Interrupted:
    status = "interrupted"
  except BaseException as failure:
    text = f"{type(failure).__name__}: {failure}"
    status, error = "failed", credentials.masked(text)
    run.processes.part(failure)
    if disk_full.is_full(failure):
      error = disk_full.describe(run.directory)
    elif isinstance(
      failure,
      (watchdog.RunStopped, peers_lib.PeerError, config_lib.ConfigError),
    ):
      error = str(failure)
    else:
      trace = credentials.masked(traceback.format_exc())
      with contextlib.suppress(OSError):  # Perhaps it is the disk that failed.
        durable.write_text(details, trace)
    if not isinstance(failure, Exception):  # Ctrl-C twice.
      status = "interrupted"
      raise
  finally:
    run.observers.on_event(
      events.RunFinished(status, error, trace, tuple(run.notes))
    )
  return status, error


def prepare(argv: Sequence[str]) -> Run:
  """The run that a command line describes, built and not begun.

  Raises:
    ConfigError: lists every problem.
    PeerError: another process of the run cannot build it.
    SystemExit: after `--help` was printed.
  """
  return build(config_lib.load_config(argv))


def build(config: config_lib.TrainConfig, task_source: Any = None) -> Run:
  """The run of a configuration, not begun; arguments as of `Run`.

  Raises:
    ConfigError: lists the parts that cannot be built.
    PeerError: another process of the run cannot build it.
  """
  host_memory.tune()
  compile_cache.enable(config.run.compile_cache)
  processes = processes_lib.join(config.processes)
  return Run(processes_lib.agreed(processes, config), processes, task_source)


def main(
  argv: Sequence[str] | str | None = None,
  config: config_lib.TrainConfig | None = None,
  task_source: Any = None,
) -> int:
  """The command; returns the exit status.

  Args:
    argv: Arguments, or one text as in a shell. None takes the program's.
    config: The configuration where it is loaded already; then `argv` is not
      read.
    task_source: As `before_jax.checked` returned it with `config`.
  """
  if isinstance(argv, str):
    argv = shlex.split(argv)
  argv = sys.argv[1:] if argv is None else list(argv)
  try:
    run = prepare(argv) if config is None else build(config, task_source)
    if run.config.run.dry_run:
      shown = dry_run.describe(
        run.config,
        run.policy,
        run.episodes,
        run.directory,
        run.engine,
        run.memory,
      )
      print(shown + addresses.unreachable(run.config))
      run.engine.close()
      return 0
    status = run_to_end(run)
    processes_lib.leave(run.processes, status)
    return status
  except config_lib.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except peers_lib.PeerError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    # While it is built; what fails later is the run's own error.
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
      print(
        f"error: there is no memory for this run ({text[:200]}); --dry-run"
        " lists what it takes: lower engine.slots, engine.context_length or"
        " the size of the policy",
        file=sys.stderr,
      )
      return 2
    raise
  except KeyboardInterrupt:
    print("interrupted before the run began", file=sys.stderr)
    return 130


def run_to_end(run: Run, *, quiet: bool = False) -> int:
  """All stages of a run, with what the command prints; its exit status.

  In the main thread, Ctrl-C and SIGTERM ask the run to stop.

  Args:
    run: built.
    quiet: print failures alone: a notebook's cell shows the rest.
  """
  try:
    with (
      interrupts.asked(run.stop, "stopping after this step and saving"),
      disk_full.reported_once(),
      run,
    ):
      if not quiet:
        print(f"run directory: {run.directory}", file=sys.stderr)
        for changed in run.changed:
          print(f"note: {changed}", file=sys.stderr)
      status, error = execute(run)
  except KeyboardInterrupt:
    print(f"interrupted at once; {_how_to_resume(run)}")
    return 130
  if error:
    details = run.own_directory / TRACEBACK
    more = f" (see {details})" if details.exists() else ""
    print(f"error: {error}{more}", file=sys.stderr)
  if not run.processes.first:
    return _STATUS[status]
  summaries = resuming.stages_measured(run.directory)
  if summaries and not quiet:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(success_rates.format_table(summaries, width))
  try:
    page = report.build_report(run.directory, run.config.report)
    if not quiet:
      print(f"report: {page}")
  except OSError as failure:
    print(f"no report: {failure}")
  if run.config.report.progress == "none" and not quiet:
    for note in run.notes:
      print(f"warning: {note}", file=sys.stderr)
  if status != "completed" and not quiet:
    print(f"{status}; {_how_to_resume(run)}")
  return _STATUS[status]


def _how_to_resume(run: Run) -> str:
  command = shell_hints.command("train", f"resume={run.directory}")
  return f"resume with: {command}"


if __name__ == "__main__":
  sys.exit(main(config=_CONFIG, task_source=_TASKS))
sys.modules[__name__].__class__ = command_module.CommandModule
