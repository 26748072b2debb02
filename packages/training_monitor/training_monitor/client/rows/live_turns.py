"""Selects what the dashboard shows of a turn while its episode still runs.

Promises: a turn long enough to be watched, of `WATCHED_S` or longer, has its
screenshots, texts and actions; a shorter one comes with its episode's end, so
that short episodes cost nothing more. What is sent of a turn does not grow with
the turns before it.

Does not: have tokens, which come with the episode's end.
"""

from __future__ import annotations

import dataclasses
from typing import Mapping

from training_monitor.client import event_types
from training_monitor.core import events
from training_monitor.core import trajectory as trajectory_lib

WATCHED_S = 0.5
_LONGEST = 20_000


def is_watched(event: events.TurnFinished) -> bool:
  """Returns whether the turn is shown before its episode ends."""
  return event.step is not None and sum(event.seconds.values()) >= WATCHED_S


def shown(event: events.TurnFinished) -> trajectory_lib.Step | None:
  """Returns the turn without the conversation before it; None if short.

  The first turn keeps the screenshot that the episode began with.
  """
  step = event.step
  if step is None or not is_watched(event):
    return None
  first = None if event.turn else first_image(step)
  observation = step.observation
  if isinstance(observation, Mapping):
    observation = {
      k: v
      for k, v in observation.items()
      if isinstance(v, str)
      or event_types.is_a(v, trajectory_lib.ImageRef)
      or k == "tool_outputs"
    }
  elif not isinstance(observation, str):
    observation = None
  return dataclasses.replace(
    step,
    chat_completions=[]
    if first is None
    else [{"role": "user", "content": [{"type": "image", "image": first}]}],
    observation=observation,
    thought=step.thought[:_LONGEST],
    model_response=step.model_response[:_LONGEST],
    info=dict(step.info),
  )


def first_image(step: trajectory_lib.Step) -> trajectory_lib.ImageRef | None:
  """Returns the first screenshot among a turn's messages."""
  for message in step.chat_completions:
    content = message.get("content")
    for part in content if isinstance(content, (list, tuple)) else ():
      if isinstance(part, Mapping) and event_types.is_a(
        part.get("image"), trajectory_lib.ImageRef
      ):
        return part["image"]
  return None


def image_of(observation: object) -> trajectory_lib.ImageRef | None:
  """Returns the screenshot of an observation."""
  if isinstance(observation, Mapping):
    image = observation.get("screenshot")
    if event_types.is_a(image, trajectory_lib.ImageRef):
      return image
  return None


def images_of(
  step: trajectory_lib.Step | None,
) -> dict[str, trajectory_lib.ImageRef]:
  """Returns the screenshots of a turn that is shown, by hash."""
  if step is None:
    return {}
  refs = (first_image(step), image_of(step.observation))
  return {ref.sha256: ref for ref in refs if ref is not None}
