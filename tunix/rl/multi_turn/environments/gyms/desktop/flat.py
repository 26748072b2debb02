"""Flattens `DesktopEnv` for libraries that know arrays only: Stable-Baselines3.

    env = gymnasium.make("TunixDesktopFlat/click-button-v0")
    stable_baselines3.PPO("CnnPolicy", env)

Observation: uint8[height + band, width, 3], the screenshot with the instruction
written below it. Action: whole numbers, `MultiDiscrete([kinds, columns, rows,
columns, rows, texts])`: an index into `env.ACTION_KINDS`, the cell of the
position, the cell of the target, an index into `texts` and then the
instruction's words. A drag ends at the target; a scroll moves by twice the way
from the grid's middle to the target, a screen at most; parts that a kind does
not use are ignored. With `clicks=True` the action is `Discrete(columns *
rows)`: a click into a cell, counted row by row.

Promises: the oracle's solution of every family can be expressed at the default
size, grid and difficulty (a test plays it). Answers of three figures, as higher
difficulties ask for, have to be among `texts`.

Does not change rewards, ends or seeds.
"""

from __future__ import annotations

import string
from typing import Any, Sequence

import gymnasium
import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms.desktop import env as env_lib
from tunix.rl.multi_turn.environments.gyms.desktop import font

TEXTS = (
  "enter",
  "tab",
  "backspace",
  "ctrl+a",
  "ctrl+c",
  "ctrl+v",
  *(str(n) for n in range(100)),
)
"""Keys and numbers, which an instruction need not name."""
WORDS = 24
"""Words of an instruction that an action can name."""
_MARGIN = 2  # Pixels around the written instruction.


class FlatDesktop(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
  """Arrays in, arrays out; see the module docstring."""

  def __init__(
    self,
    env: gymnasium.Env,
    *,
    columns: int = 64,
    rows: int = 48,
    texts: tuple[str, ...] = TEXTS,
    lines: int = 4,
    clicks: bool = False,
  ):
    """Args:

      env: a `DesktopEnv`, or a wrapper of one that keeps its spaces.
      columns, rows: Size of the grid that positions are chosen from.
      texts: Texts to type, press or answer, beside the instruction's words.
      lines: Number of lines of the written instruction.
      clicks: Whether a click into a cell is the only action.

    Raises:
      TypeError: `env` is no DesktopEnv.
      ValueError: no cell, or no line.
    """
    gymnasium.utils.RecordConstructorArgs.__init__(
      self, columns=columns, rows=rows, texts=texts, lines=lines, clicks=clicks
    )
    gymnasium.Wrapper.__init__(self, env)
    if not isinstance(env.unwrapped, env_lib.DesktopEnv):
      raise TypeError(
        f"FlatDesktop wraps a DesktopEnv, got {type(env.unwrapped).__name__}"
      )
    for name, value in (("columns", columns), ("rows", rows), ("lines", lines)):
      if value < 1:
        raise ValueError(f"{name}={value} must be a whole number >= 1")
    self._grid = np.array([columns, rows])
    self._half = np.maximum(1, self._grid // 2)  # Cells that scroll a screen.
    self._texts = tuple(texts)
    self._lines = lines
    self._words: tuple[str, ...] = ()
    self._band: np.ndarray | None = None
    gym = env.unwrapped.gym
    self._size = gym.width, gym.height
    height = gym.height + lines * font.LINE + 2 * _MARGIN
    spaces = gymnasium.spaces
    self.observation_space = spaces.Box(
      0, 255, (height, gym.width, 3), np.uint8
    )
    self.action_space = (
        spaces.Discrete(columns * rows) if clicks
        else spaces.MultiDiscrete([
            len(env_lib.ACTION_KINDS), columns, rows, columns, rows,
            len(self._texts) + WORDS,
        ])
    )  # fmt: skip

  def reset(self, *, seed: int | None = None, options: dict | None = None):
    """As `DesktopEnv.reset`.

    Raises:
      ValueError: the instruction does not fit into its lines.
    """
    observation, info = self.env.reset(seed=seed, options=options)
    self._words = _words(observation["instruction"])
    self._band = self._written(observation["instruction"])
    return self._picture(observation), info

  def step(self, action):
    observation, *outcome = self.env.step(self.decode(action))
    return self._picture(observation), *outcome

  def decode(self, action) -> dict[str, Any]:
    """Returns a flat action as one of `DesktopEnv`.

    Raises:
      ValueError: outside the action space.
    """
    if not self.action_space.contains(action):
      raise ValueError(f"action {action!r} is not in {self.action_space}")
    columns, rows = self._grid
    parts: Sequence[int]
    if np.ndim(action) == 0:
      row, column = divmod(int(action), int(columns))
      kind, parts = env_lib.ACTION_KINDS.index("click"), (column, row) * 2
      text = ""
    else:
      kind, *parts, index = (int(a) for a in action)
      text = self._text(index)
    cells = np.array(parts, np.float32).reshape(2, 2)
    middles = ((cells + 0.5) / self._grid).astype(np.float32)
    return {
      "kind": np.int64(kind),
      "position": middles[0],
      "target": middles[1],
      "scroll": ((cells[1] - self._grid // 2) / self._half).astype(np.float32),
      "text": text,
    }

  def encode(self, action: gui_action.GuiAction) -> np.ndarray:
    """A GuiAction as the nearest flat one, scrolling rounded up: int64[6].

    Raises:
      ValueError: the space has no such kind or text; or, with `clicks`, it is
        no click.
    """
    if isinstance(self.action_space, gymnasium.spaces.Discrete):
      raise ValueError("encode() needs an env with clicks=False")
    full = env_lib.encode_action(action, *self._size)
    start = self._cell(full["position"])
    end = self._cell(full["target"])
    if action.kind is gui_action.GuiActionKind.SCROLL:
      # As far at least: a smaller rest might be less than a cell.
      way = full["scroll"] * self._half
      way = (np.sign(way) * np.ceil(np.abs(way) - 1e-3)).astype(int)
      end = np.clip(self._grid // 2 + way, 0, self._grid - 1)
    index = 0
    if full["text"]:
      choices = (*self._texts, *self._words)
      if full["text"] not in choices:
        raise ValueError(
          f"the flat action space has no text {full['text']!r}: it is"
          " neither among `texts` nor a word of the instruction"
        )
      index = choices.index(full["text"])
    return np.array([full["kind"], *start, *end, index], np.int64)

  def _cell(self, fractions: np.ndarray) -> np.ndarray:
    cell = (fractions * self._grid).astype(int)
    return np.clip(cell, 0, self._grid - 1)

  def _text(self, index: int) -> str:
    if index < len(self._texts):
      return self._texts[index]
    index -= len(self._texts)
    return self._words[index] if index < len(self._words) else ""

  def _picture(self, observation: dict[str, Any]) -> np.ndarray:
    return np.concatenate([observation["screenshot"], self._band])

  def _written(self, instruction: str) -> np.ndarray:
    """uint8[band, width, 3]: the instruction, black on white."""
    width = self._size[0] - 2 * _MARGIN
    rows: list[str] = []
    for word in instruction.split():
      longer = f"{rows[-1]} {word}" if rows else word
      if rows and font.text_width(longer) <= width:
        rows[-1] = longer
      else:
        rows.append(word)
    if len(rows) > self._lines or any(
      font.text_width(row) > width for row in rows
    ):
      raise ValueError(
        f"lines={self._lines}: the instruction {instruction!r} does not fit"
        f" below a screenshot {self._size[0]} pixels wide; give more lines,"
        " or a wider screen"
      )
    height = self._lines * font.LINE + 2 * _MARGIN
    band = Image.new("RGB", (self._size[0], height), "white")
    for i, row in enumerate(rows):
      at = _MARGIN, _MARGIN + i * font.LINE
      band.paste((0, 0, 0), at, font.text_mask(row))
    return np.asarray(band)


def _words(instruction: str) -> tuple[str, ...]:
  """Returns the instruction's words without the punctuation around them."""
  words = (w.strip(string.punctuation) for w in instruction.split())
  return tuple(w for w in words if w)[:WORDS]


def make_flat(
  family: str = "click-button",
  *,
  columns: int = 64,
  rows: int = 48,
  texts: tuple[str, ...] = TEXTS,
  lines: int = 4,
  clicks: bool = False,
  **settings: Any,
) -> FlatDesktop:
  """Returns a flattened `DesktopEnv`; `settings` are that one's."""
  return FlatDesktop(
    env_lib.DesktopEnv(family, **settings),
    columns=columns,
    rows=rows,
    texts=texts,
    lines=lines,
    clicks=clicks,
  )
