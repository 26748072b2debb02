"""Draws the rooms and the imports between them: docs/images/rooms.svg.

    python scripts/rooms_picture.py

Rooms stand on their floors (`[tool.importlinter]` in pyproject.toml), each with
its lines of code; a line between two is an import, thicker for more of them.
"""

import ast
import collections
import tomllib

import budgets

ROOT = budgets.ROOT
FRAMEWORK = "tunix/rl/multi_turn"
SERVICES = ("training_monitor", "cua_gyms", "agent_services")
WIDTH, FLOOR, BOX, HIGH = 980, 84, 150, 44
COLORS = ("#2563c9", "#c2611a", "#1a7f4b", "#8a3ffc", "#b42318", "#0e7490")


def room_of(module: str) -> str:
  """Returns the room or package of a module's dotted name, "" for others."""
  parts = module.split(".")
  if parts[0] in SERVICES:
    carried = parts[0] == SERVICES[0] and parts[1:2] in (["core"], ["net"])
    return "" if carried else parts[0]
  if parts[:3] == ["tunix", "rl", "queue"]:
    return "queue"
  return (parts[3:] or [""])[0] if parts[:3] == FRAMEWORK.split("/") else ""


def imports() -> tuple[collections.Counter, collections.Counter]:
  """Counts lines of code by room, and imports by (importer, imported)."""
  lines, edges = collections.Counter(), collections.Counter()
  for folder in ("tunix/rl", *(f"packages/{p}/{p}" for p in SERVICES)):
    for path in (ROOT / folder).rglob("*.py"):
      below = ROOT if folder == "tunix/rl" else (ROOT / folder).parent
      own = room_of(".".join(path.relative_to(below).with_suffix("").parts))
      text = path.read_text(encoding="utf-8")
      lines[own] += budgets.code_lines(text)
      for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level:
          names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
          names = [alias.name for alias in node.names]
        edges.update((own, room) for room in map(room_of, names) if room)
  return lines, edges


def draw() -> str:
  """Returns the picture as SVG."""
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
  floors = [list(SERVICES), *(layer.split(" | ") for layer in layers)]
  next(f for f in floors if "trajectory_collector" in f).append("queue")
  lines, edges = imports()
  places = {
    # Floors of one room swerve, so that lines pass beside them.
    room: (
      WIDTH * (i + 0.5) / len(floor) + (len(floor) == 1) * 120 * (-1) ** level,
      10 + FLOOR * level,
    )
    for level, floor in enumerate(floors)
    for i, room in enumerate(floor)
  }
  high = FLOOR * len(floors)
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}"'
    ' font-family="system-ui, sans-serif" font-size="13" text-anchor="middle">',
    f'<rect width="{WIDTH}" height="{high}" fill="#fff"/>',
  ]
  for (own, other), count in sorted(edges.items()):
    if own != other and own in places and other in places:
      (x, y), (a, b) = places[own], places[other]
      color = COLORS[sorted(places).index(own) % len(COLORS)]
      parts.append(
        f'<path d="M{x:.0f} {y + HIGH}C{x:.0f} {y + HIGH + 40:.0f} {a:.0f}'
        f' {b - 40:.0f} {a:.0f} {b:.0f}" fill="none" stroke="{color}"'
        f' stroke-opacity=".45" stroke-width="{0.6 + count**0.5 / 4:.1f}">'
        f"<title>{own} imports {other}: {count}</title></path>"
      )
  for room, (x, y) in places.items():
    parts.append(
      f'<rect x="{x - BOX / 2:.0f}" y="{y}" width="{BOX}" height="{HIGH}"'
      f' rx="7" fill="#f2f6fc" stroke="#475467"/><text x="{x:.0f}"'
      f' y="{y + 19}" font-weight="600">{room}</text><text x="{x:.0f}"'
      f' y="{y + 35}" font-size="11">{lines[room]:,} lines</text>'
    )
  return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
  (ROOT / "docs/images/rooms.svg").write_text(draw(), encoding="utf-8")
