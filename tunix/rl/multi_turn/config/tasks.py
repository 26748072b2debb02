"""What a run learns: the gym, its tasks, and how the policy sees and acts.

Sections whose fields carry default, meaning, unit and range, and what of them
cannot go together. Loads nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.environments import gyms

_opt = loader.option


@dataclasses.dataclass(frozen=True)
class GymConfig:
  """What the policy learns to use."""

  name: str = _opt(
      "desktop",
      " ".join(f"{n}: {gyms.get(n).doc}." for n in gyms.BUILT_IN),
      choices=gyms.BUILT_IN,
      open_choices=True,
  )
  tasks: tuple[str, ...] = _opt(
      (),
      "Task families to train and evaluate on, each equally often. [] = all"
      " that a gym server or a list has.",
  )
  width: int = _opt(
      128,
      "Screenshot width. Pages of miniwob need 160x210 or more.",
      unit="px",
      at_least=16,
  )
  height: int = _opt(96, "Screenshot height.", unit="px", at_least=16)
  max_turns: int = _opt(
      8, "Turns an episode may take; a task's own limit wins.", at_least=1
  )
  reward: str = _opt(
      "score",
      "What an episode is rewarded with. score: the gym's own score. success:"
      " 1 when the gym calls the task solved, else 0. Or the name of a"
      " registered reward function.",
      choices=("score", "success"),
      open_choices=True,
  )
  options: dict[str, Any] = _opt(
      {},
      "Options of the gym and of its tasks, e.g. gym.options.difficulty=1"
      " (desktop) or gym.options.seconds_per_action=0.2 (miniwob).",
  )


@dataclasses.dataclass(frozen=True)
class TaskSourceConfig:
  """Which tasks a run trains and is evaluated on, and in which order."""

  source: str = _opt(
      "generated",
      "generated: the gym makes them, without end. gym: the list of the gym"
      " server in gym.options. jsonl, huggingface: task_source.path.",
      choices=("generated", "gym", "jsonl", "huggingface"),
  )
  path: str = _opt(
      "", "A file with a JSON object a line; a dataset's directory or name."
  )
  dataset_split: str = _opt("train", "Of a dataset with several.")
  train_ratio: float = _opt(
      0.8,
      "Share of a list that is for training, drawn by task_source.seed, unless"
      " the list itself says what is held out.",
      above=0,
      at_most=1,
  )
  eval_number_range: str = _opt(
      "",
      'Numbers of the tasks that are held out, e.g. "001-032". "" = by'
      " task_source.train_ratio.",
  )
  names: tuple[str, ...] = _opt(
      (), "Ids, names or numbers of a list's tasks. [] = all."
  )
  tags: tuple[str, ...] = _opt(
      (), "Only tasks of a list with one of these tags. [] = all."
  )
  limit: int = _opt(
      0, "Most training tasks of a list. 0 = all.", at_least=0
  )
  eval_limit: int = _opt(
      0, "Most held-out tasks of a list. 0 = all.", at_least=0
  )
  seed: int = _opt(42, "Of the split and the limits.", at_least=0)
  order: str = _opt(
      "in_turn",
      "in_turn: the families one after the other, a list shuffled anew each"
      " time. curriculum: what is neither hopeless nor won already is drawn"
      " more often; of a list each task, else each family by itself.",
      choices=("in_turn", "curriculum"),
  )
  curriculum_floor: float = _opt(
      0.1,
      "Least weight of a task in the curriculum; one that is solved half of"
      " the time has 1.",
      above=0,
      at_most=1,
  )
  curriculum_decay: float = _opt(
      0.7,
      "What a task's success rate keeps when a group of it comes in.",
      at_least=0,
      at_most=0.999,
  )


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """How screenshots become prompts and text becomes actions."""

  parser: str = _opt(
      "computer_use_compact",
      "Grammar of the policy's actions, a registered tool parser.",
      choices=(
          "computer_use_compact",
          "computer_use",
          "computer_use_absolute",
          "qwen",
          "qwen_xml",
          "ui_tars",
          "ui_tars_absolute",
      ),
      open_choices=True,
  )
  system_prompt: str = _opt(
      "desktop_compact",
      'Name of a registered prompt, or a path to a text file. "" = none.',
  )
  max_images: int = _opt(
      0,
      "Newest screenshots kept in the prompt. When an older one is dropped a"
      " new training sequence begins. 0 = keep all.",
      at_least=0,
  )
  on_parse_error: str = _opt(
      "end",
      "end: the episode ends with status parse_error. retry: the error is"
      " shown to the policy as the next message.",
      choices=("end", "retry"),
  )


def gym_spec(name: str) -> gyms.GymSpec:
  """The declaration of a gym.

  One that a module in run.imports has yet to register takes any options.

  Raises:
    ConfigError: a path that leads to no gym.
  """
  if name in gyms.names() or ":" in name:
    try:
      return gyms.get(name)
    except (ImportError, TypeError, ValueError) as error:
      raise loader.ConfigError([f"gym.name={name}: {error}"]) from None
  return gyms.GymSpec(make=lambda **options: None, name=name)


def problems(gym: GymConfig, chosen: TaskSourceConfig) -> Iterator[str]:
  """Values that cannot go together: which fields, why, and what to change."""
  spec = gym_spec(gym.name)
  yield from _source_problems(chosen, spec)
  generated = chosen.source == "generated"
  yield from spec.problems(
      gym.options, gym.width, gym.height, gym.tasks if generated else None
  )
  if len(set(gym.tasks)) != len(gym.tasks):
    yield f"gym.tasks={list(gym.tasks)} names a family twice; name each once"


def _source_problems(
    chosen: TaskSourceConfig, spec: gyms.GymSpec
) -> Iterator[str]:
  file = chosen.source in ("jsonl", "huggingface")
  if file and not chosen.path:
    yield f"task_source.source={chosen.source} needs task_source.path"
  if chosen.path and not file:
    yield (
        f"task_source.path={chosen.path} is not read with"
        f" task_source.source={chosen.source}; set it to jsonl or huggingface"
    )
  if chosen.source == "gym" and spec.task_list is None:
    yield (
        f"task_source.source=gym is the list of a gym server, but"
        f" gym.name={spec.name}; set gym.name=genv, or another source"
    )
  default = TaskSourceConfig()
  for name in ("eval_number_range", "names", "tags", "limit", "eval_limit"):
    value = getattr(chosen, name)
    if chosen.source == "generated" and value != getattr(default, name):
      yield (
          f"task_source.{name}={value} chooses from a list, and"
          " task_source.source=generated has none; set it to gym, jsonl or"
          " huggingface"
      )
