"""Plays in a terminal: draws screenshots in colour, reads actions as words."""

from __future__ import annotations

import shlex
import shutil
from typing import Callable, TextIO

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.play import session as session_lib

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
HELP = """\
  click X Y | double X Y | right X Y | move X Y | drag X Y X2 Y2
  scroll X Y DY | type TEXT | key CTRL+A | wait | answer TEXT | done
  help (the oracle's next action) | quit"""


class Quit(Exception):
  """The player leaves."""


def picture(pixels: np.ndarray, columns: int) -> str:
  """uint8[H, W, 3] as text, two pixels a character, in 24-bit colour."""
  height, width = pixels.shape[:2]
  columns = min(columns, width)
  rows = max(2, round(height * columns / width) // 2 * 2)
  small = np.asarray(Image.fromarray(pixels).resize((columns, rows)))
  lines = []
  for y in range(0, rows, 2):
    cells = (
      "\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m▀".format(*top, *below)
      for top, below in zip(small[y].tolist(), small[y + 1].tolist())
    )
    lines.append("".join(cells) + "\x1b[0m")
  return "\n".join(lines)


def parse(line: str) -> Action:
  """Parses an action in words; see `HELP`.

  Raises:
    ValueError: naming the word and its arguments.
  """
  word, _, arguments = line.strip().partition(" ")
  word = word.lower()
  if word in ("type", "answer"):
    return Action(Kind(word), text=arguments)
  if word in ("done", "terminate"):
    return Action(Kind.TERMINATE)
  if word == "wait":
    return Action(Kind.WAIT)
  if word == "key":
    keys = tuple(k for k in arguments.strip().lower().split("+") if k)
    return Action(Kind.KEY, keys=keys)
  counts = {
    "click": 2,
    "double": 2,
    "right": 2,
    "move": 2,
    "drag": 4,
    "scroll": 3,
  }
  if word not in counts:
    raise ValueError(f"{word!r} is not an action; write one of\n{HELP}")
  try:
    numbers = [float(n) for n in shlex.split(arguments)]
  except ValueError:
    numbers = []
  if len(numbers) != counts[word]:
    raise ValueError(f"{word} needs {counts[word]} numbers, got {arguments!r}")
  x, y = numbers[:2]
  if word == "move":
    return Action(Kind.MOVE, x=x, y=y)
  if word == "drag":
    return Action(Kind.DRAG, x=x, y=y, x2=numbers[2], y2=numbers[3])
  if word == "scroll":
    return Action(Kind.SCROLL, x=x, y=y, dy=numbers[2])
  return Action(
    Kind.CLICK,
    x=x,
    y=y,
    button="right" if word == "right" else "left",
    count=2 if word == "double" else 1,
  )


async def play(
  session: session_lib.Session,
  task: base.Task,
  *,
  read: Callable[[str], str] = input,
  out: TextIO,
) -> base.Evaluation:
  """Plays one task to its end; returns its evaluation.

  Raises:
    Quit: the player left; this task is not recorded.
  """
  await session.start(task)
  print(f"\n{session.task.task_id}: {session.task.instruction}", file=out)
  print(HELP, file=out)
  while session.evaluation is None:
    _show(session, out)
    try:
      line = read("> ").strip()
    except EOFError:
      raise Quit() from None
    if line in ("quit", "exit"):
      raise Quit()
    try:
      if line == "help":
        action = await session.next_right()
        shown = action.to_json() if action else "the episode is over"
        print(f"  {shown}", file=out)
      else:
        await session.act(parse(line))
    except (ValueError, RuntimeError, LookupError) as error:
      print(f"{type(error).__name__}: {error}", file=out)
  verdict = session.evaluation
  outcome = "solved" if verdict.success else "not solved"
  print(f"{outcome}, score {verdict.score:g}", file=out)
  return verdict


def _show(session: session_lib.Session, out: TextIO) -> None:
  pixels = session.seen.pixels
  if out.isatty():
    print(picture(pixels, shutil.get_terminal_size().columns), file=out)
  height, width = pixels.shape[:2]
  print(f"[{width}x{height}] {session.seen.text}".rstrip(), file=out)
