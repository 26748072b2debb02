"""A run as a notebook sees it: its metrics, evaluations, episodes, curves.

    run = mt.load("runs/desktop-20260101-120000-3fa2b1")
    run.metrics["reward_mean"].rolling(10).mean().plot()
    run.watch(run.episodes.where(split="eval")[-1])

Promises: everything is read from the run directory when it is asked for, so a
run that trains elsewhere shows its present state; nothing there is changed; no
JAX is imported. A run that was cut off shows what it has.
"""

from __future__ import annotations

import dataclasses
import html
import pathlib
from typing import Any, Sequence

from tunix.rl.multi_turn.api import episodes as episodes_lib
from tunix.rl.multi_turn.api import html as html_lib
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.reporting import evaluation_journal
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import publishing
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import run_data

_CARDS_A_ROW = 3
_EVALUATION = "evaluation.json"
_CARD_PX, _CURVE_PX, _EVALUATION_PX, _HEAD_PX = 190, 400, 400, 190


class Evaluations(dict[str, dict[str, Any]]):
  """Name -> figures of an evaluation, in the order they were made."""

  def __init__(self, run: run_data.RunDirectory):
    super().__init__(run.evaluations)
    self._run = run

  def _repr_html_(self) -> str:
    if not self:
      return "<p>no evaluation yet</p>"
    height = _EVALUATION_PX + 34 * len(self)
    return html_lib.framed(
      "evaluations", [report.evaluations(self._run)], height
    )

  def __repr__(self) -> str:
    lines = []
    for name, figures in self.items():
      rate = success_rates.text_of(figures)
      lines.append(f"{name}: {rate} of {figures.get('episodes', 0)}")
    return "\n".join(lines) or "no evaluation yet"


class Run:
  """A run directory; see the module docstring."""

  def __init__(self, directory: str | pathlib.Path):
    """Raises FileNotFoundError: `directory` holds no run."""
    self.directory = pathlib.Path(directory)
    self._read()

  def _read(self) -> run_data.RunDirectory:
    return run_data.load(self.directory)

  # --- what is recorded -------------------------------------------------------

  @property
  def summary(self) -> dict[str, Any]:
    """summary.json: counts of episodes, groups and faults, evaluations."""
    return files.read_json(self.directory / "summary.json")

  @property
  def name(self) -> str:
    return self.summary.get("run_name") or self.directory.name

  @property
  def status(self) -> str:
    """running, completed, interrupted or failed; unfinished if it was cut off
    before it wrote one."""
    return str(self.summary.get("status", "unfinished"))

  @property
  def error(self) -> str | None:
    """Why it failed."""
    return self.summary.get("error")

  @property
  def notes(self) -> tuple[str, ...]:
    """Notes about the run's end, e.g. that nothing was learned."""
    return tuple(self.summary.get("notes") or ())

  @property
  def config(self) -> dict[str, Any]:
    """Settings of config.yaml, each under its section; {} without the file."""
    path = self.directory / "config.yaml"
    if not path.exists():
      return {}
    parsed = yaml_text.parse(path.read_text(encoding="utf-8"))
    return parsed if isinstance(parsed, dict) else {}

  @property
  def step(self) -> int:
    """Updates that its metrics tell of."""
    last = self._metric_lines()[-1:]
    return int(last[0]["step"]) if last else 0

  @property
  def metrics(self) -> Any:
    """One row an update: a pandas DataFrame by `step` where pandas is
    installed, else a list of dicts. docs/metrics.md says what they mean."""
    lines = self._metric_lines()
    try:
      import pandas  # pylint: disable=g-import-not-at-top
    except ImportError:
      return lines
    frame = pandas.DataFrame(lines)
    return frame.set_index("step") if lines else frame

  def _metric_lines(self) -> list[dict[str, Any]]:
    lines = [
      line
      for line in files.read_lines(self.directory / "metrics.jsonl")
      if isinstance(line.get("step"), (int, float))
    ]
    return sorted(lines, key=lambda line: line["step"])

  @property
  def evaluations(self) -> Evaluations:
    return Evaluations(self._read())

  @property
  def episodes(self) -> episodes_lib.Episodes:
    """The episodes that the run kept (report.episodes), in order of time."""
    return episodes_lib.Episodes.read(self._read())

  @property
  def policy(self) -> pathlib.Path:
    """The directory of the trained policy.

    Raises:
      FileNotFoundError: the run has not saved it yet.
    """
    path = self.directory / "policy"
    if not path.is_dir():
      raise FileNotFoundError(
        f"{self.directory} has no policy yet: it is {self.status}, and the"
        " policy is saved when training ends"
      )
    return path

  def resume(self, **settings: Any) -> Any:
    """Trains on from the newest checkpoint, as `train(resume=…, **settings)`.

    Returns:
      the run, training.

    Raises:
      ConfigError: it cannot be resumed, or another process has it.
    """
    from tunix.rl.multi_turn.api import training  # pylint: disable=g-import-not-at-top

    return training.train(resume=str(self.directory), **settings)

  # --- to look at -------------------------------------------------------------

  def plot(self, *names: str) -> html_lib.Shown:
    """Reward and success by update; or the metrics that are named.

    Raises:
      ValueError: a metric that the run does not have; names the nearest.
    """
    run = self._read()
    if not names:
      text = html_lib.framed(run.name, [report.training_curve(run)], _CURVE_PX)
      return html_lib.Shown(
        text or "<p>no update yet</p>", f"curves of {run.name}"
      )
    measured = sorted({k for line in run.metrics for k in line} - {"step"})
    for name in names:
      if name not in measured:
        near = [k for k in measured if k.startswith(f"{name}_")][:3]
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        hint = hint or registry.did_you_mean(name, measured)
        raise ValueError(f"{run.name} has no metric {name!r}{hint}")
    rows = -(-len(names) // _CARDS_A_ROW)
    return html_lib.Shown(
      html_lib.framed(
        run.name, [report.readings(run, names)], 60 + _CARD_PX * rows
      ),
      f"{', '.join(names)} of {run.name}",
    )

  def watch(
    self, episode: int | episodes_lib.Episode = -1, width: int = 480
  ) -> html_lib.Shown:
    """An episode, turn by turn.

    Args:
      episode: one of `episodes`, or its place among them.
      width: Width of a screenshot, px.

    Raises:
      IndexError: no such episode.
      TypeError: no episode, and no number.
    """
    if isinstance(episode, int):
      episodes = self.episodes
      if not -len(episodes) <= episode < len(episodes):
        raise IndexError(
          f"{self.name} has {len(episodes)} kept episodes, none at {episode}"
        )
      episode = episodes[episode]
    if not isinstance(episode, episodes_lib.Episode):
      raise TypeError(
        f"episode={episode!r}: give one of run.episodes, or its place among"
        " them: -1 is the last"
      )
    return episode.film(width)

  def report(self) -> pathlib.Path:
    """Writes report.html anew, and returns its path."""
    return report.build_report(self.directory)

  def monitor(self, height: int = 800) -> html_lib.Shown:
    """The Training Monitor's page of the run, in the cell.

    Raises:
      RuntimeError: the run has none, or it is gone.
    """
    address = self.summary.get("monitor_url")
    if not address:
      raise RuntimeError(
        f"{self.name} has no Training Monitor: train with"
        " monitor={'embedded': True}, or monitor={'url': …} of a server"
      )
    source = html.escape(str(address), quote=True)
    return html_lib.Shown(
      f'<iframe src="{source}" title="Training Monitor"'
      f' style="border:0;width:100%;height:{height}px"></iframe>',
      str(address),
    )

  # --- to give away -----------------------------------------------------------

  def push_to_hub(
    self,
    repo: str,
    content: publishing.Content = "policy",
    *,
    private: bool | None = None,
    license: str = "",  # pylint: disable=redefined-builtin
    base_model: str = "",
    token: str | None = None,
  ) -> str:
    """Puts the policy, or the kept episodes, on the Hugging Face Hub.

    Args:
      repo: owner/name; made where it is absent.
      content: policy or episodes.
      private: whether a new repository is; None: as the owner's default. True
        refuses one that exists and is public.
      license: License on the card, by the Hub's identifier.
      base_model: Trained model, for the card.
      token: None: HF_TOKEN's, or that of `hf auth login`.

    Returns:
      the address of the repository.

    Raises:
      PublishError: the run has nothing of it; the Hub refuses, or does not
        answer.
    """
    return publishing.push(
      self.directory,
      content,
      repo,
      private=private,
      token=token,
      license=license,
      base_model=base_model,
    )

  def save_for_hub(
    self,
    folder: str | pathlib.Path,
    content: publishing.Content = "policy",
    *,
    license: str = "",  # pylint: disable=redefined-builtin
    base_model: str = "",
  ) -> pathlib.Path:
    """Writes what `push_to_hub` would send to an absent or empty folder.

    Raises:
      PublishError: the run has nothing of it, or the folder is in use.
    """
    return publishing.save(
      self.directory, content, folder, license=license, base_model=base_model
    )

  def __repr__(self) -> str:
    total = (self.config.get("learner") or {}).get("steps")
    of = f"/{total}" if total is not None else ""
    parts = [self.name, self.status, f"step {self.step}{of}", *self.notes]
    rates = list(Evaluations(self._read()).items())
    if rates:
      name, figures = rates[-1]
      parts.append(f"success {figures['success_rate']:.3f} ({name})")
    return f"Run({', '.join(parts)})"

  def _repr_html_(self) -> str:
    run = self._read()
    # A run of this process may not have written its summary yet.
    run = dataclasses.replace(
      run, summary={**run.summary, "status": self.status}
    )
    parts: Sequence[str] = [
      report.heading(run),
      report.tiles(run),
      report.training_curve(run),
    ]
    height = _HEAD_PX + (_CURVE_PX if run.metrics else 0)
    return html_lib.framed(run.name, parts, height)


class EvaluationRun(Run):
  """The directory of an evaluation (`mt.evaluate`, the command `evaluate`)."""

  @property
  def _content(self) -> dict[str, Any]:
    return files.read_json(self.directory / _EVALUATION)

  @property
  def results(self) -> dict[str, Any]:
    """Rates with their intervals, by mode and by family; docs/evaluation.md."""
    return self._content.get("results") or {}

  @property
  def success_rate(self) -> float | None:
    """None where no episode was valid."""
    return self.results.get("success_rate")

  @property
  def interval(self) -> tuple[float, float] | None:
    """Of `success_rate`, 95 %."""
    bounds = self.results.get("interval")
    return None if bounds is None else (bounds[0], bounds[1])

  @property
  def error(self) -> str | None:
    """Why it failed."""
    return self._content.get("error")

  @property
  def digest(self) -> dict[str, Any]:
    """The gym's summary of the episodes; {} for a gym that makes none."""
    return self._content.get("digest") or {}

  @property
  def outcomes_by_key(
    self,
  ) -> dict[evaluation_journal.Key, evaluation_journal.Outcome]:
    """By (mode, place of the task, its id, attempt), in order of time."""
    return dict(evaluation_journal.load(self.directory))

  @property
  def outcomes(self) -> Any:
    """One row an episode: a pandas DataFrame where pandas is installed, else a
    list of dicts."""
    by_key = self.outcomes_by_key
    rows = [dataclasses.asdict(by_key[key]) for key in sorted(by_key)]
    try:
      import pandas  # pylint: disable=g-import-not-at-top
    except ImportError:
      return rows
    return pandas.DataFrame(rows)

  def resume(self, **settings: Any) -> EvaluationRun:
    """Plays what is missing, as `evaluate(directory, **settings)`."""
    from tunix.rl.multi_turn.api import evaluating  # pylint: disable=g-import-not-at-top

    return evaluating.evaluate(self.directory, **settings)

  def __repr__(self) -> str:
    content = self._content
    rate, interval = self.success_rate, self.interval
    rate_text = "no rate"
    if rate is not None and interval is not None:
      low, high = interval
      rate_text = f"success {rate:.3f} [{low:.3f}, {high:.3f}]"
    return (
      f"EvaluationRun({self.name}, {self.status}, {rate_text},"
      f" {content.get('played', 0)} of {content.get('planned', 0)} episodes)"
    )

  def _repr_html_(self) -> str:
    run = self._read()
    parts = [report.heading(run), report.evaluations(run)]
    return html_lib.framed(
      run.name, parts, _EVALUATION_PX + 100 + 34 * len(run.evaluations)
    )


def load(directory: str | pathlib.Path | Run) -> Run:
  """A run or evaluation that was made, or is being made by another process.

  Args:
    directory: Its path, e.g. runs/desktop-20260101-120000-3fa2b1; or a run,
      which
      is read anew.

  Returns:
    an `EvaluationRun` for the directory of an evaluation.

  Raises:
    FileNotFoundError: it holds no run.
    TypeError: it is no directory's name.
  """
  if isinstance(directory, Run):
    directory = directory.directory
  if not isinstance(directory, (str, pathlib.PurePath)):
    raise TypeError(f"directory={directory!r}: give runs/<name>, or a run")
  if (pathlib.Path(directory) / _EVALUATION).is_file():
    return EvaluationRun(directory)
  return Run(directory)
