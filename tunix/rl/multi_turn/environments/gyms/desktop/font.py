"""Holds a proportional bitmap font, so that pixels are equal everywhere.

Capitals are 7 pixels high, descenders go 2 below the base line; a line is
`LINE` pixels. Larger text is the same bitmap enlarged by whole factors with
slants smoothed, never resampled: no dependence on FreeType or on Pillow's
version. Covers printable ASCII; anything else is drawn as a hollow box.
"""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image

ASCENT = 7
LINE = 9

# One glyph a line: the character, then its rows from the top, seven or nine.
_GLYPHS = r"""
! # # # # # . #
" #.# #.# ... ... ... ... ...
# .#.#. .#.#. ##### .#.#. ##### .#.#. .#.#.
$ ..#.. .#### #.#.. .###. ..#.# ####. ..#..
% ##..# ##..# ...#. ..#.. .#... #..## #..##
& .##.. #..#. #.#.. .#... #.#.# #..#. .##.#
' # # . . . . .
( ..# .#. #.. #.. #.. .#. ..#
) #.. .#. ..# ..# ..# .#. #..
* ..... ..#.. #.#.# .###. #.#.# ..#.. .....
+ ..... ..#.. ..#.. ##### ..#.. ..#.. .....
, .. .. .. .. .. .# .# #. ..
- ... ... ... ### ... ... ...
. . . . . . . #
/ ...# ...# ..#. ..#. .#.. #... #...
0 .##. #..# #..# #..# #..# #..# .##.
1 .#. ##. .#. .#. .#. .#. ###
2 .##. #..# ...# ..#. .#.. #... ####
3 ###. ...# ...# .##. ...# ...# ###.
4 ...#. ..##. .#.#. #..#. ##### ...#. ...#.
5 #### #... ###. ...# ...# #..# .##.
6 .##. #... #... ###. #..# #..# .##.
7 #### ...# ...# ..#. ..#. .#.. .#..
8 .##. #..# #..# .##. #..# #..# .##.
9 .##. #..# #..# .### ...# ...# .##.
: . . # . . . #
; .. .. .# .. .. .# .# #. ..
< ...# ..#. .#.. #... .#.. ..#. ...#
= .... .... #### .... #### .... ....
> #... .#.. ..#. ...# ..#. .#.. #...
? .##. #..# ...# ..#. .#.. .... .#..
@ .###. #...# #.### #.#.# #.### #.... .###.
A .###. #...# #...# ##### #...# #...# #...#
B ####. #...# #...# ####. #...# #...# ####.
C .###. #...# #.... #.... #.... #...# .###.
D ####. #...# #...# #...# #...# #...# ####.
E ##### #.... #.... ####. #.... #.... #####
F ##### #.... #.... ####. #.... #.... #....
G .###. #...# #.... #.### #...# #...# .####
H #...# #...# #...# ##### #...# #...# #...#
I ### .#. .#. .#. .#. .#. ###
J ..## ...# ...# ...# ...# #..# .##.
K #...# #..#. #.#.. ##... #.#.. #..#. #...#
L #... #... #... #... #... #... ####
M #...# ##.## #.#.# #.#.# #...# #...# #...#
N #...# ##..# #.#.# #.#.# #..## #...# #...#
O .###. #...# #...# #...# #...# #...# .###.
P ####. #...# #...# ####. #.... #.... #....
Q .###. #...# #...# #...# #.#.# #..#. .##.#
R ####. #...# #...# ####. #.#.. #..#. #...#
S .#### #.... #.... .###. ....# ....# ####.
T ##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..
U #...# #...# #...# #...# #...# #...# .###.
V #...# #...# #...# #...# .#.#. .#.#. ..#..
W #...# #...# #...# #.#.# #.#.# ##.## #...#
X #...# #...# .#.#. ..#.. .#.#. #...# #...#
Y #...# #...# .#.#. ..#.. ..#.. ..#.. ..#..
Z ##### ....# ...#. ..#.. .#... #.... #####
[ ### #.. #.. #.. #.. #.. ###
\ #... #... .#.. .#.. ..#. ...# ...#
] ### ..# ..# ..# ..# ..# ###
^ ..#.. .#.#. #...# ..... ..... ..... .....
_ ..... ..... ..... ..... ..... ..... #####
` #. .# .. .. .. .. ..
a .... .... .##. ...# .### #..# .###
b #... #... ###. #..# #..# #..# ###.
c .... .... .### #... #... #... .###
d ...# ...# .### #..# #..# #..# .###
e .... .... .##. #..# #### #... .###
f .## #.. ### #.. #.. #.. #..
g .... .... .### #..# #..# #..# .### ...# .##.
h #... #... ###. #..# #..# #..# #..#
i # . # # # # #
j .# .. .# .# .# .# .# .# #.
k #... #... #..# #.#. ##.. #.#. #..#
l #. #. #. #. #. #. .#
m ..... ..... ##.#. #.#.# #.#.# #.#.# #.#.#
n .... .... ###. #..# #..# #..# #..#
o .... .... .##. #..# #..# #..# .##.
p .... .... ###. #..# #..# #..# ###. #... #...
q .... .... .### #..# #..# #..# .### ...# ...#
r ... ... #.# ##. #.. #.. #..
s .... .... .### #... .##. ...# ###.
t #.. #.. ### #.. #.. #.. .##
u .... .... #..# #..# #..# #..# .###
v ..... ..... #...# #...# .#.#. .#.#. ..#..
w ..... ..... #.#.# #.#.# #.#.# #.#.# .#.#.
x .... .... #..# #..# .##. #..# #..#
y .... .... #..# #..# #..# #..# .### ...# .##.
z .... .... #### ...# .##. #... ####
{ ..# .#. .#. #.. .#. .#. ..#
| # # # # # # #
} #.. .#. .#. ..# .#. .#. #..
~ ..... ..... .#..# #.#.# #..#. ..... .....
"""


def _parse() -> dict[str, np.ndarray]:
  glyphs = {" ": np.zeros((LINE, 3), bool)}
  for line in _GLYPHS.strip().splitlines():
    char, *rows = line.split(" ")
    glyph = np.zeros((LINE, len(rows[0])), bool)
    for y, row in enumerate(rows):
      glyph[y] = [c == "#" for c in row]
    glyphs[char] = glyph
  return glyphs


_FONT = _parse()
_UNKNOWN = np.pad(np.zeros((5, 2), bool), 1, constant_values=True)
_UNKNOWN = np.pad(_UNKNOWN, ((0, LINE - 7), (0, 0)))
_WIDTHS = {char: glyph.shape[1] + 1 for char, glyph in _FONT.items()}
_UNKNOWN_WIDTH = _UNKNOWN.shape[1] + 1


def text_width(text: str, bold: bool = False) -> int:
  """Width of `text` in unscaled pixels, without the trailing gap."""
  width = sum(_WIDTHS.get(c, _UNKNOWN_WIDTH) for c in text) - 1
  return max(0, width + (len(text) if bold else 0))


def fit(text: str, width: int, tail: bool = False) -> str:
  """The longest start (or end, with `tail`) of `text` that fits `width`."""
  if text_width(text) <= width:
    return text
  step = -1 if tail else 1
  used, count = -1, 0
  for char in text[::step]:
    used += _WIDTHS.get(char, _UNKNOWN_WIDTH)
    if used > width:
      break
    count += 1
  if not count:
    return ""
  return text[-count:] if tail else text[:count]


def _scale2x(bits: np.ndarray) -> np.ndarray:
  p = np.pad(bits, 1)
  north, south = p[:-2, 1:-1], p[2:, 1:-1]
  west, east = p[1:-1, :-2], p[1:-1, 2:]
  out = np.repeat(np.repeat(bits, 2, 0), 2, 1)
  corners = (
    (0, 0, west, north, south, east),
    (0, 1, north, east, west, south),
    (1, 0, south, west, east, north),
    (1, 1, east, south, north, west),
  )
  for dy, dx, a, b, c, d in corners:
    out[dy::2, dx::2] = bits | (a & b & ~c & ~d)
  return out


def enlarge(bits: np.ndarray, factor: int) -> np.ndarray:
  """bool[H, W] -> bool[H * factor, W * factor], steps of slants filled.

  Ink is only ever added: a D must not become an O.
  """
  while factor % 2 == 0:
    bits, factor = _scale2x(bits), factor // 2
  return np.repeat(np.repeat(bits, factor, 0), factor, 1)


@functools.lru_cache(maxsize=8192)
def text_mask(text: str, factor: int = 1, bold: bool = False) -> Image.Image:
  """`L` mask of one line of text, 255 where ink is; `LINE * factor` high."""
  columns = []
  for char in text:
    glyph = _FONT.get(char, _UNKNOWN)
    if bold:
      glyph = np.pad(glyph, ((0, 0), (0, 1)))
      glyph = glyph | np.roll(glyph, 1, axis=1)
    columns.append(np.pad(glyph, ((0, 0), (0, 1))))
  bits = (
    np.concatenate(columns, axis=1)[:, :-1]
    if columns
    else (np.zeros((LINE, 1), bool))
  )
  bits = enlarge(bits, factor)
  return Image.fromarray(np.where(bits, 255, 0).astype(np.uint8))
