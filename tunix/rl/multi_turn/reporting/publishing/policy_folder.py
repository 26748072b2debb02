"""A run's policy as a model repository: its files, a card, the settings.

Promises: weights are linked where the file system can, not copied; all other
files are copies, to be edited. Links that the policy holds are refused, as they
may lead anywhere. See `public` for what the settings and the card leave out.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
from typing import Any

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.reporting import run_data
from tunix.rl.multi_turn.reporting.publishing import hub
from tunix.rl.multi_turn.reporting.publishing import public
import yaml

_TAGS = ["computer-use", "gui-agent", "reinforcement-learning", "tunix"]
_OWN = ("dir", "resume")
"""Settings of `run` that say where it lay."""
_MARKUP = re.compile(r"[|\\`*\[\]]")
REPLACED = (
  "model.safetensors",
  "model.safetensors.index.json",
  "model-*-of-*.safetensors",
)
"""Files of weights, which an earlier push may have left under other names."""


def write(
  run: run_data.RunDirectory, folder: pathlib.Path, described: public.Described
) -> None:
  """See `publishing.save`."""
  source = run.directory / "policy"
  if not (source / "config.json").is_file():
    status = run.summary.get("status", "unfinished")
    raise hub.PublishError(
      f"{run.directory} has no policy yet: it is {status}, and the policy is"
      " saved when training ends"
    )
  if run.summary.get("status") == "running":
    raise hub.PublishError(
      f"{run.directory} is running, or was killed: its policy is not that of"
      " its evaluations; wait for its end, or resume it"
    )
  for path in sorted(source.iterdir()):
    if path.is_symlink():
      raise hub.PublishError(
        f"{path} is a symbolic link; put the file itself there, or delete it"
      )
    if path.is_file() and path.suffix != ".part" and path.name != "README.md":
      _take(path, folder / path.name)
  text = yaml.safe_dump(settings(run), sort_keys=False, allow_unicode=True)
  (folder / "training_config.yaml").write_text(text, encoding="utf-8")
  config = _config(source / "config.json")
  card = _card(run, config, described)
  (folder / "README.md").write_text(card, encoding="utf-8")


def _config(path: pathlib.Path) -> dict[str, Any]:
  try:
    config = json_text.read(path)
  except ValueError as error:
    raise hub.PublishError(f"{path} is damaged: {error}") from None
  if not isinstance(config, dict):
    raise hub.PublishError(f"{path} is damaged: it holds no object")
  return config


def settings(run: run_data.RunDirectory) -> dict[str, Any]:
  """The run's settings without places and secrets; {} where there are none."""
  try:
    parsed = yaml_text.parse(run.config) if run.config else {}
  except yaml_text.YamlError as error:
    raise hub.PublishError(
      f"{run.directory / 'config.yaml'} {error}; mend or delete it"
    ) from None
  if not isinstance(parsed, dict):
    return {}
  if isinstance(parsed.get("run"), dict):
    for name in _OWN:
      parsed["run"].pop(name, None)
  return public.settings(parsed)


def chosen(settings_: dict[str, Any], section: str, name: str) -> str:
  """A setting as the card's text; "–" where there is none."""
  values = settings_.get(section)
  value = values.get(name) if isinstance(values, dict) else None
  return "–" if value is None else inline(value)


def _take(source: pathlib.Path, target: pathlib.Path) -> None:
  if source.suffix == ".safetensors":
    try:
      os.link(source, target)
      return
    except OSError:  # Another file system, or one without links.
      pass
  shutil.copyfile(source, target)


def _card(
  run: run_data.RunDirectory,
  config: dict[str, Any],
  described: public.Described,
) -> str:
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  sees = any(key.startswith("vision") for key in config)
  data = huggingface_hub.ModelCardData(
    license=described.license or None,
    base_model=described.base_model or None,
    library_name="transformers" if "architectures" in config else "tunix",
    pipeline_tag="image-text-to-text" if sees else "text-generation",
    tags=_TAGS,
    model_name=run.name,
    eval_results=_results(run) or None,
  )
  of = functools.partial(chosen, settings(run))
  origin = described.base_model or of("policy", "name")
  return "\n".join(
    [
      "---",
      data.to_yaml(),
      "---",
      "",
      f"# {inline(run.name)}",
      "",
      "An agent that uses a computer, trained by multi-turn reinforcement"
      " learning with `tunix.rl.multi_turn`.",
      "",
      "| | |",
      "|---|---|",
      f"| policy before training | {origin} |",
      f"| environment | {of('environment', 'name')}, gym {of('gym', 'name')} |",
      f"| agent | {of('agent', 'name')}, parser {of('agent', 'parser')} |",
      f"| updates | {run.summary.get('step', len(run.metrics))} |",
      f"| advantage | {of('algorithm', 'advantage')} |",
      "",
      "All settings: `training_config.yaml`.",
      "",
      *evaluation_table(run),
      "## Use",
      "",
      "    tunix-mt evaluate FOLDER",
      "    tunix-mt train policy=FOLDER",
      "",
      "with the folder that this repository was downloaded to.",
      "",
    ]
  )


def evaluation_table(run: run_data.RunDirectory) -> list[str]:
  """Lines of Markdown: success by evaluation; none without one."""
  if not run.evaluations:
    return []
  lines = [
    "## Evaluation",
    "",
    "| | success | 95 % interval | episodes |",
    "|---|---|---|---|",
  ]
  for name, results in run.evaluations.items():
    low, high = results.get("interval") or (None, None)
    interval = "–" if low is None else f"{low:.3f} to {high:.3f}"
    lines.append(
      f"| {inline(name)} | {results['success_rate']:.3f} | {interval} |"
      f" {results.get('episodes', '–')} |"
    )
  last = list(run.evaluations.values())[-1]
  families = last.get("by_task") or {}
  if families:
    lines += [
      "",
      "Last evaluation by family:",
      "",
      "| family | success |",
      "|---|---|",
    ]
    for name, results in families.items():
      rate = results.get("success_rate")
      shown = "–" if rate is None else f"{rate:.3f}"
      lines.append(f"| {inline(name)} | {shown} |")
  return [*lines, ""]


def inline(value: object) -> str:
  """A text as one line of Markdown that marks nothing up."""
  line = " ".join(str(value).split()).replace("&", "&amp;")
  return _MARKUP.sub(r"\\\g<0>", line.replace("<", "&lt;"))


def _results(run: run_data.RunDirectory) -> list[Any]:
  """The last evaluation in the Hub's own form."""
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  if not run.evaluations:
    return []
  name, figures = list(run.evaluations.items())[-1]
  gym = chosen(settings(run), "gym", "name")
  return [
    huggingface_hub.EvalResult(
      task_type="reinforcement-learning",
      task_name="computer use",
      dataset_type=str(gym),
      dataset_name=str(gym),
      metric_type="success_rate",
      metric_name=f"success rate ({name})",
      metric_value=round(float(figures["success_rate"]), 4),
    )
  ]
