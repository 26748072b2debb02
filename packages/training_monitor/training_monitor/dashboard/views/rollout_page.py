"""Renders a rollout turn by turn: screens, thoughts, actions, tokens."""

from __future__ import annotations

import threading
from typing import Any, Literal, Mapping, Sequence

import sqlalchemy as sa

from training_monitor.dashboard import annotations as annotations_lib
from training_monitor.dashboard import exports
from training_monitor.dashboard import page_request
from training_monitor.dashboard import pictures
from training_monitor.dashboard import text
from training_monitor.dashboard import token_text
from training_monitor.dashboard import token_view
from training_monitor.dashboard.views import step_page
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.schema import vocabulary
from training_monitor.server import errors
from training_monitor.server import query as query_lib
from training_monitor.server import screenshots as screenshots_lib

_MOST_TURNS = 1000
_FEW_TURNS = 50
_MOST_EXPORTS = 2
_EXPORT_WAIT_S = 10.0
Row = dict[str, Any]


class RolloutQuery(query_lib.PageQuery):
  """A rollout's page.

  Attributes:
    turn: the one that is shown, from 1; without it the first one, or the
      newest one while the rollout runs.
    heat: colours tokens.
    size: "real" shows a pixel of the screen as one of the page.
  """

  turn: query_lib.Id | None = None
  heat: str = ""
  size: Literal["fit", "real"] = "fit"


class RolloutPages(page_request.RunTab):
  """See the module docstring."""

  def __init__(
    self,
    *sources: Any,
    files: screenshots_lib.ScreenshotFiles,
    texts: token_text.TokenTexts,
  ):
    super().__init__(*sources)
    self._files = files
    self._token_view = token_view.TokenView(texts)
    self._exporting = threading.BoundedSemaphore(_MOST_EXPORTS)

  def rollout(self, request: page_request.PageRequest) -> page_request.Page:
    asks = request.read(RolloutQuery)
    rollout = self._queries.rollout(request.project, str(request.id()))
    run = self._head(request.project, rollout["training_id"])
    with database.reading(self._engine) as connection:
      turns = strip(connection, rollout["id"])
      annotations_lib.add(connection, turns, "id")
      members = self._group(connection, rollout)
    place = next(
      (n for n, m in enumerate(members) if m["id"] == rollout["id"]), 0
    )
    rollout["advantage"] = members[place]["advantage"] if members else None
    running = rollout["status"] not in vocabulary.FINISHED["rollout"]
    requested_turn = asks.turn or (len(turns) if running else 1)
    number = min(max(1, requested_turn), max(1, len(turns)))
    turn = self._turn(request.project, rollout, turns, number)
    view: Row = {}
    if turn is not None:
      view = self._token_view.of(rollout, turn, asks.heat)
    return page_request.Page("rollout.html", {
        "run": run, "tab": "rollout", "rollout": rollout, "strip": turns,
        "turn": turn, "number": number, "view": view, "members": members,
        "running": running, "follows": running and asks.turn is None,
        "real": asks.size == "real",
        "crops": [] if turn is None else pictures.crops(
            turn["gestures"], turn["images"]
        ),
        "changed": not (turns and turns[number - 1]["unchanged"]),
        "otherwise": _otherwise(members, place), "place": place,
        "advantage_kind": step_page.advantage_kind(run),
        "source": self._source(rollout, run),
        "errors_shown": rollout["errors"] if isinstance(
            rollout["errors"], list) else [],
        # Without a picture there is nothing to animate.
        "formats": [
            name for name in exports.FORMATS
            if name != "webp" or any(s["before"] or s["after"] for s in turns)
        ],
    })  # fmt: skip

  def export(self, request: page_request.PageRequest) -> page_request.File:
    name = request.where["format"]
    if name not in exports.FORMATS:
      raise errors.ApiError(
        404, f"format={name[:30]!r}: give one of {', '.join(exports.FORMATS)}"
      )
    rollout = self._queries.rollout(request.project, str(request.id()))
    rollout["turns"] = self._queries.turns(request.project, str(request.id()))[
      "items"
    ]
    training = self._queries.one(
      request.project, "training", rollout["training_id"]
    )
    hashes = sorted(
      {sha for turn in rollout["turns"] for sha in exports.hashes_of(turn)}
    )
    images = self._images(hashes)
    if name == "json":
      return exports.make(name, rollout, training, images)
    # Images take many times a page's memory: a few files at a time.
    if not self._exporting.acquire(timeout=_EXPORT_WAIT_S):
      raise errors.ApiError(503, "other files are being made; try again soon")
    try:
      return exports.make(name, rollout, training, images)
    finally:
      self._exporting.release()

  # --- parts ----------------------------------------------------------------

  def _group(self, connection: sa.Connection, rollout: Row) -> list[Row]:
    """Returns the rollout's group, itself included."""
    r = tables.rollout
    kind = rollout["source_type"]
    condition = sa.and_(
      r.c.source_type == kind,
      r.c[f"{kind}_id"] == rollout[f"{kind}_id"],
      r.c.task_id == rollout["task_id"],
    )
    if rollout["group"] is not None:
      condition = sa.and_(condition, r.c.group == rollout["group"])
    members = step_page.members_of(connection, condition, 256)
    if not any(m["id"] == rollout["id"] for m in members):
      members = step_page.members_of(connection, r.c.id == rollout["id"], 1)
    return members

  def _source(self, rollout: Row, run: Row) -> Row:
    kind = rollout["source_type"]
    id_ = rollout[f"{kind}_id"]
    t = tables.metadata.tables[kind]
    if kind == "step":
      with database.reading(self._engine) as connection:
        step = connection.execute(
          sa.select(t.c.step).where(t.c.id == id_)
        ).scalar_one()
      return {"name": f"step {step}", "path": f"/runs/{run['id']}/steps/{step}"}
    return {"name": f"{kind} {id_}", "path": f"/runs/{run['id']}/{kind}/{id_}"}

  def _turn(
    self, project: int, rollout: Row, strip: Sequence[Row], number: int
  ) -> Row | None:
    if not strip:
      return None
    turn = self._queries.turn(
      project, str(rollout["id"]), strip[number - 1]["id"]
    )
    return described(turn, self._images(exports.hashes_of(turn)))

  def _images(self, hashes: Sequence[str]) -> dict[str, exports.StoredImage]:
    s = tables.screenshot
    with database.reading(self._engine) as connection:
      rows = list(
        connection.execute(sa.select(s).where(s.c.sha256.in_(hashes)))
      )
    images = {
      row.sha256: exports.StoredImage(
        row.sha256,
        row.media_type,
        row.width,
        row.height,
        self._files.path(row.sha256, row.media_type),
      )
      for row in rows
    }
    return {sha: i for sha, i in images.items() if i.path.exists()}


def _otherwise(members: Sequence[Row], place: int) -> int | None:
  """Returns the nearest attempt of the group that ended otherwise."""
  if not members:
    return None
  won = bool(members[place]["task_success"])
  candidates = [
    (abs(n - place), m["id"])
    for n, m in enumerate(members)
    if m["status"] == "completed" and bool(m["task_success"]) != won
  ]
  return min(candidates)[1] if candidates else None


def strip(
  connection: sa.Connection, rollout: int, most: int = _MOST_TURNS
) -> list[Row]:
  """Returns the first turns of a rollout, small: screens, actions, reward.

  `unchanged` of a turn: its actions left the screen as it was.
  """
  t, o, a = tables.turn, tables.obs, tables.action
  turns = {
    row.id: {
      "id": row.id,
      "turn": row.turn,
      "reward": row.reward,
      "seconds": row.turn_time,
      "before": None,
      "after": None,
      "actions": [],
    }
    for row in connection.execute(
      sa.select(t.c.id, t.c.turn, t.c.reward, t.c.turn_time)
      .where(t.c.rollout_id == rollout)
      .order_by(t.c.turn)
      .limit(most)
    )
  }
  own_turns: Any = list(turns)
  if len(turns) > _FEW_TURNS:
    own_turns = sa.select(t.c.id).where(t.c.rollout_id == rollout)
  for id_, uri in connection.execute(
    sa.select(o.c.turn_id, o.c.screenshot_uri)
    .where(o.c.turn_id.in_(own_turns), o.c.screenshot_uri.is_not(None))
    .order_by(o.c.id)
  ):
    sha = uri.removeprefix("sha256:")
    if id_ in turns and screenshots_lib.SHA.fullmatch(sha):
      key = "before" if turns[id_]["before"] is None else "after"
      turns[id_][key] = sha
  for row in connection.execute(
    sa.select(a.c.turn_id, a.c.action_type, a.c.tool_name, a.c.tool_args)
    .where(a.c.turn_id.in_(own_turns))
    .order_by(a.c.id)
  ):
    if row.turn_id in turns:
      turns[row.turn_id]["actions"].append(
        pictures.gesture(
          {
            **row._mapping,  # pylint: disable=protected-access
            "tool_args": text.read_json(row.tool_args),
          }
        )
      )
  sizes = _sizes(connection, [one["before"] for one in turns.values()])
  for one in turns.values():
    one["size"] = sizes.get(one["before"])
    acts = all(action.label != "summary" for action in one["actions"])
    one["unchanged"] = (
      acts and one["before"] is not None and one["before"] == one["after"]
    )
  return list(turns.values())


def _sizes(
  connection: sa.Connection, hashes: Sequence[str | None]
) -> dict[str | None, tuple[int, int]]:
  """Returns (width, height) of screenshots, px."""
  s = tables.screenshot
  return {
    row.sha256: (row.width, row.height)
    for row in connection.execute(
      sa.select(s.c.sha256, s.c.width, s.c.height).where(
        s.c.sha256.in_({h for h in hashes if h})
      )
    )
  }


def described(turn: Row, images: Mapping[str, Any]) -> Row:
  """Adds the values that the page shows to a turn."""
  metrics = turn["metrics_json"]
  turn["metrics"] = metrics if isinstance(metrics, dict) else {}
  raw = turn.get("raw") or {}
  recorded = turn["metrics"]
  turn["thought"] = recorded.get("thought") or raw.get("thinking")
  turn["response"] = recorded.get("model_response") or raw.get("model_response")
  spent = recorded.get("seconds")
  turn["seconds"] = {
    str(k): v
    for k, v in (spent.items() if isinstance(spent, dict) else ())
    if isinstance(v, (int, float))
  }
  turn["images"] = [
    images.get(sha) or {"sha": sha, "missing": True}
    for sha in exports.hashes_of(turn)
  ]
  turn["links"] = [
    uri
    for o in turn["observations"]
    if str(uri := o["screenshot_uri"]).startswith(("https://", "http://"))
  ]
  turn["gestures"] = [pictures.gesture(a) for a in turn["actions"]]
  turn["messages"] = [
    m
    for o in turn["observations"]
    for m in (
      o["model_input_json"]
      if isinstance(o["model_input_json"], list)
      else [o["model_input_json"]]
      if o["model_input_json"]
      else []
    )
  ]
  turn["reply"] = [
    o["text_content"] for o in turn["observations"] if o["text_content"]
  ]
  info = recorded.get("info")
  turn["info"] = info if isinstance(info, dict) else {}
  return turn
