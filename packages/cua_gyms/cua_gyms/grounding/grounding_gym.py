"""Implements the `grounding` gym: each task ends with its first action.

An action that points (click, move, long press; where a drag or swipe begins)
hits or misses the target's box; any other action, and a completion that the
grammar cannot read, is a miss without a point. The evaluation's details hold
the point, the box and the screen, which `accuracy` reads.
"""

from __future__ import annotations

from typing import Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

from cua_gyms.grounding import targets

_Kind = gui_action.GuiActionKind
_INSTRUCTION = "Click on {}."
_ACTION = "Click on the element that this leads to: {}"


class GroundingTasks:
  """Makes tasks of one click.

  Drawn targets have a family for each kind, files one for each platform or
  group.
  """

  def __init__(
    self,
    families: Sequence[str] | None = None,
    *,
    path: str = "",
    sizes: Sequence[str] = (),
    count: int = 0,
    width: int = 1920,
    height: int = 1080,
  ):
    """Args:

    families: Families to offer; None for all.
    path: Folder of a local copy of ScreenSpot, -v2 or -Pro; "" draws.
    sizes: Screens to draw on, such as 1280x720; () for those of
      `targets.SIZES` that width x height hold.
    count: Targets drawn for each size, 0 for `targets.COUNT`; of files, how
      many in all, evenly spaced, 0 for every one.
    width, height: Size of the largest screen, in pixels.
    """
    if count < 0:
      raise ValueError(f"count={count} must be >= 0")
    self._eval: dict[str, list[base.Task]] = {}
    self._sizes = tuple(sizes) or targets.sizes_within(width, height)
    self._drawn = not path
    if path:
      self._read(path, count)
    else:
      for text in self._sizes:
        targets.parse_size(text)
      kinds = tuple(targets.KINDS)
      for text in self._sizes:
        for place in range(count or targets.COUNT):
          kind = kinds[place % len(kinds)]
          number = seeds.eval_seed(
            kind, place // len(kinds), 0, seeds.EVAL_SEEDS_FROM
          )
          self._add(_drawn_task(text, kind, number))
    for family in families or ():
      if family not in self._eval:
        raise ValueError(
          registry.unknown_name("family of targets", family, self._eval)
        )
    self._families = tuple(families or self._eval)

  def _read(self, path: str, count: int) -> None:
    rows = targets.read_files(path)
    step = max(1.0, len(rows) / count) if count else 1.0
    chosen = {int(i * step) for i in range(count or len(rows))}
    for place in sorted(chosen):
      if place < len(rows):
        row = rows[place]
        self._add(
          base.Task(
            task_id=f"grounding/{row.name}",
            family=row.family,
            instruction=_ACTION.format(row.words),
            max_turns=1,
            params={"place": place},
          )
        )

  def _add(self, task: base.Task) -> None:
    self._eval.setdefault(task.family, []).append(task)

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """Returns a drawn target of no evaluation; files are only measured."""
    if not self._drawn:
      return self.eval_task(family, index)
    number = seeds.train_seed(family, index, seed, seeds.EVAL_SEEDS_FROM)
    return _drawn_task(self._sizes[index % len(self._sizes)], family, number)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """Returns the `index`-th target; the list begins again at its end."""
    del seed
    return self._eval[family][index % len(self._eval[family])]

  def eval_tasks(self) -> dict[str, list[base.Task]]:
    """Returns all targets by family."""
    return {family: list(self._eval[family]) for family in self._families}


def _drawn_task(size: str, kind: str, seed: int) -> base.Task:
  return base.Task(
    task_id=f"grounding/{size}/{kind}/{seed}",
    family=kind,
    seed=seed,
    max_turns=1,
    params={"size": size},
  )


class GroundingGym:
  """Shows one target; its first action ends the episode."""

  def __init__(self, *, path: str = "", width: int = 1920, height: int = 1080):
    """Args:

    path: As of `GroundingTasks`.
    width, height: Size of the largest screen, in pixels.
    """
    self._path = path
    self._pixels = width * height
    self._target: targets.Target | None = None
    self._point: tuple[float, float] | None = None

  def start(self, task: base.Task) -> base.Observation:
    """Shows the task's target.

    Raises:
      ValueError: The task is of another source, or its screen is too large.
      OSError: The image is missing or damaged.
    """
    self._point = None
    if self._path:
      rows = targets.read_files(self._path)
      place = task.params.get("place")
      if not isinstance(place, int) or not 0 <= place < len(rows):
        raise ValueError(
          f"task {task.task_id}: params.place={place!r} is none of the"
          f" {len(rows)} targets of {self._path}"
        )
      target = rows[place].read()
    else:
      size = targets.parse_size(str(task.params.get("size")))
      if size[0] * size[1] > self._pixels:
        raise ValueError(
          f"task {task.task_id}: a screen of {size[0]}x{size[1]} is larger"
          " than gym.width and gym.height hold"
        )
      if task.family not in targets.KINDS:
        raise ValueError(
          registry.unknown_name("kind of target", task.family, targets.KINDS)
        )
      target = targets.drawn(*size, task.family, task.seed)
    self._target = target
    return base.Observation(
      target.screenshot, _INSTRUCTION.format(target.words)
    )

  def act(self, action: gui_action.GuiAction) -> base.Observation:
    if action.x is not None and action.y is not None:
      self._point = float(action.x), float(action.y)
    return base.Observation(self.target.screenshot, done=True)

  def evaluate(self) -> base.Evaluation:
    target = self.target
    hit = self._point is not None and target.holds(*self._point)
    return base.Evaluation(
      float(hit),
      hit,
      {
        "point": self._point and list(self._point),
        "box": list(target.box),
        "screen": list(target.screen),
        "kind": target.kind,
        "words": target.words,
        "source": target.source,
      },
    )

  def close(self) -> None:
    self._target = None

  @property
  def target(self) -> targets.Target:
    """The target on the screen."""
    if self._target is None:
      raise RuntimeError("no target is shown; call start(task) first")
    return self._target


def oracle_action(gym: GroundingGym) -> gui_action.GuiAction:
  """A click on the middle of the target."""
  x1, y1, x2, y2 = gym.target.box
  return gui_action.GuiAction(_Kind.CLICK, x=(x1 + x2) / 2, y=(y1 + y2) / 2)


def describe(gym: GroundingGym, x: float, y: float) -> str | None:
  """The target's words where a pixel lies in its box."""
  return gym.target.words if gym.target.holds(x, y) else None
