"""Evaluates from a notebook or a script: what `evaluate` does, as a call.

    found = mt.evaluate("runs/desktop-…", attempts=4)
    found.success_rate, found.interval
    found.outcomes        # an episode a row

Promises: settings, checks, episodes and directory are those of the command, so
an evaluation that was begun by one is continued by the other. The call returns
when the evaluation has ended; the notebook's stop button (or Ctrl-C) ends it
with the episodes that it has.
"""

from __future__ import annotations

import pathlib
from typing import Any, Mapping, Sequence, TYPE_CHECKING

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import evaluate as evaluate_lib
from tunix.rl.multi_turn.api import cell as cell_lib
from tunix.rl.multi_turn.api import runs
from tunix.rl.multi_turn.api import training

if TYPE_CHECKING:  # It needs JAX.
  from tunix.rl.multi_turn.run.evaluations import evaluator


def evaluate(
  policy: object = None,
  tasks: str | Sequence[str] | None = None,
  *,
  config: str | pathlib.Path | Mapping[str, Any] | None = None,
  **settings: Any,
) -> runs.EvaluationRun:
  """Measures the success of a policy, or of a server's model.

  Args:
    policy: a run, its directory, a policy's directory, the directory of an
      evaluation that is continued, the name of a policy, or the address of an
      OpenAI-compatible server; None: as the settings say.
    tasks: families, or a file of tasks (`.jsonl`); None: those of the run, or
      of the gym.
    config: a YAML file, or a mapping as one would hold.
    **settings: Settings as of `train`, and those of the section `evaluate`.

  Returns:
    the evaluation, `completed`, or `interrupted` by the user.

  Raises:
    ConfigError: lists every problem of the settings, or what cannot be built.
    BusyError: this process trains or plays something else.
    RuntimeError: the evaluation failed, or no episode of it was valid.
  """
  argv = arguments(policy, tasks, config, settings)
  evaluation = _played(argv, "an evaluation is running")
  return runs.EvaluationRun(evaluation.directory)


def play(argv: Sequence[str], choose: evaluator.Choose) -> evaluator.Evaluation:
  """Plays the chosen tasks by an evaluation's settings; returns it, ended.

  Raises:
    As `evaluate`.
  """
  return _played(argv, "an episode is being played", choose)


def arguments(
  policy: object,
  tasks: str | Sequence[str] | None,
  config: str | pathlib.Path | Mapping[str, Any] | None,
  settings: Mapping[str, Any],
) -> list[str]:
  """The command line of `evaluate` that says the same.

  Raises:
    ConfigError: a value that no command line can say.
  """
  values: dict[str, Any] = dict(settings)
  first: list[str] = []
  if isinstance(policy, runs.Run):
    policy = policy.directory
  if isinstance(policy, (str, pathlib.PurePath)):
    text = str(policy)
    if text == "oracle":
      raise config_lib.ConfigError(
        [
          "policy='oracle': an oracle is not measured; play an episode by it"
          " with mt.play, or give a run or a policy"
        ]
      )
    if text.startswith(("http://", "https://")):
      values["server"] = text
    elif pathlib.Path(text).expanduser().is_dir():
      # Absolute: a word of a command line that is no key=value.
      first = [str(pathlib.Path(text).expanduser().absolute())]
    else:
      values["policy"] = text
  elif policy is not None:
    raise config_lib.ConfigError(
      [
        f"policy={policy!r}: give a run, a directory, a policy's name or a"
        " server's address"
      ]
    )
  if isinstance(tasks, str) and tasks.endswith(".jsonl"):
    values |= {"task_source.source": "jsonl", "task_source.path": tasks}
  elif tasks is not None:
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if wrong := [one for one in names if not isinstance(one, str)]:
      raise config_lib.ConfigError(
        [
          f"tasks={wrong[0]!r} is no family of tasks; give their names, or a"
          " file of tasks (*.jsonl); play() takes a task itself"
        ]
      )
    values["tasks"] = names
  argv = training.arguments(config, values)
  if cell_lib.current() is not None and not training.sets(
    argv, "report.progress"
  ):
    argv.append("report.progress=none")  # The cell shows it.
  return [*first, *argv]


def _played(
  argv: Sequence[str], what: str, choose: evaluator.Choose | None = None
) -> evaluator.Evaluation:
  place = cell_lib.take(what)
  try:
    config = config_lib.load_evaluation(argv)
    if config.run.dry_run:
      raise config_lib.ConfigError(
        [
          "run.dry_run=true: the command prints what would be played; leave it"
          " out"
        ]
      )
    evaluation = evaluate_lib.build(config, choose)
    if (cell := cell_lib.current()) is not None:
      cell.follow(evaluation)
    quiet = cell is not None or choose is not None
    status = evaluate_lib.run_to_end(evaluation, quiet=quiet)
  finally:
    place.release()
  result = runs.EvaluationRun(evaluation.directory)
  if status not in (0, evaluate_lib.INTERRUPTED) or (
    result.status == "completed" and result.success_rate is None
  ):
    again = f"; continue it with evaluate({str(evaluation.directory)!r})"
    raise RuntimeError(
      f"{result.name} failed: {result.error or _reason(result)}"
      + (again if choose is None else "")
    )
  return evaluation


def _reason(evaluation: runs.EvaluationRun) -> str:
  outcomes = evaluation.outcomes_by_key.values()
  errors = [one.error for one in outcomes if one.error]
  return "no episode was valid: gym or server broke each of them" + (
    f", the last one by {errors[-1]}" if errors else ""
  )
