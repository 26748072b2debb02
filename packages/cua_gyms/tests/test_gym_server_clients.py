"""Clients of genv's protocol that are not ours find their tasks and verdicts.

The readers below do what loaders of that protocol do with a list row: the id
is the first of task_id, id and meta.id; the number is task_number or
meta.number; a name is compared with `name`, else meta.displayName; a row
without a top-level description is completed by its task; and an identifier
that matches nothing becomes the first task, without a word.
"""

import random
import re

from cua_gyms import genv
from cua_gyms.gym_server import catalog
import gym_servers
import httpx
import pytest
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.task_sources import cua_task

NAMES = {
    "task_id", "id", "name", "task_name", "display_name", "task_number",
    "number", "seed_id", "difficulty", "tags", "meta",
}  # fmt: skip
LONG = {"description", "instruction", "env_config", "evaluation"}


@pytest.fixture(scope="module", name="http")
def _http():
  spec = gym_servers.desktop(
    train_tasks=4, eval_tasks=2, settings={"difficulty": 1}
  )
  with gym_servers.serving(spec) as (url, _):
    with httpx.Client(base_url=url + "/api/v1/desktop", timeout=30) as client:
      yield client


class Loader:
  """Reads a list as the module docstring describes."""

  def __init__(self, http, shape):
    self.http = http
    self.rows = {}
    reply = http.get("/tasks", params={"shape": shape} if shape else {}).json()
    for row in reply["tasks"]:
      if (row_id := self.id_of(row)) is not None:
        self.rows[row_id] = row

  @staticmethod
  def id_of(row):
    meta = row.get("meta") or {}
    ids = (row.get("task_id"), row.get("id"), meta.get("id"))
    return next((i for i in ids if isinstance(i, str) and i), None)

  @staticmethod
  def number_of(row):
    return row.get("task_number") or (row.get("meta") or {}).get("number")

  def split(self, eval_numbers):
    held_out = [
      i
      for i, row in self.rows.items()
      if (number := self.number_of(row)) and int(number) in eval_numbers
    ]
    return sorted(set(self.rows) - set(held_out)), sorted(held_out)

  def cut(self, ratio, seed=42):
    order = list(self.rows)
    random.Random(seed).shuffle(order)
    return order[: int(len(order) * ratio)], order[int(len(order) * ratio) :]

  def tagged(self, *tags):
    return [
      i
      for i, row in self.rows.items()
      if {t.lower() for t in row.get("tags") or ()} & set(tags)
    ]

  def pick(self, hint):
    names, numbers = {}, {}
    for row_id, row in self.rows.items():
      meta = row.get("meta") or {}
      names[row.get("name") or meta.get("displayName")] = row_id
      numbers[meta.get("number")] = row_id
    for where in (dict(zip(self.rows, self.rows)), names, numbers):
      if hint in where:
        return where[hint]
    digits = re.search(r"\d+", hint)
    for number, row_id in numbers.items():
      if digits and number and int(number) == int(digits[0]):
        return row_id
    return next(iter(self.rows))

  def full(self, identifier):
    row = self.rows[identifier]
    if not (row.get("description") or {"env_config", "evaluation"} & set(row)):
      # As their clients write it: nothing is quoted.
      reply = self.http.get(f"/tasks/{identifier}")
      assert reply.status_code == 200, reply.text
      row = {**row, **reply.json()}
    return row


SHAPES = (None, *catalog.SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_carries_every_name_in_each_shape(http, shape):
  loader = Loader(http, shape)
  params = {"bare": "true", "shape": shape or catalog.SHAPES[0]}
  bare = http.get("/tasks", params=params).json()
  assert bare == [*loader.rows.values()] and len(bare) == 12
  for row in loader.rows.values():
    assert NAMES <= set(row)
    assert (LONG <= set(row)) is (shape == "flat")
    assert row["difficulty"] == "medium" and "medium" in row["tags"]
    assert set(row["meta"]) == {
      "id",
      "number",
      "name",
      "displayName",
      "description",
    }
    assert row["meta"]["description"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_loader_finds_the_held_out_tasks(http, shape):
  loader = Loader(http, shape)
  train, held_out = loader.split(range(9, 13))
  assert (len(train), len(held_out)) == (8, 4)
  assert {loader.rows[i]["split"] for i in held_out} == {"eval"}
  assert {loader.rows[i]["split"] for i in train} == {"train"}
  train, held_out = loader.cut(0.75)
  assert (len(train), len(held_out)) == (9, 3)
  assert not set(train) & set(held_out)
  assert loader.tagged("eval") == list(loader.rows)[8:]
  assert len(loader.tagged("medium")) == 12 and not loader.tagged("hard")


@pytest.mark.parametrize("shape", SHAPES)
def test_each_name_of_a_task_leads_a_loader_to_that_task(http, shape):
  loader = Loader(http, shape)
  for identifier, row in loader.rows.items():
    for hint in (
      identifier,
      row["name"],
      row["display_name"],
      row["task_number"],
      row["meta"]["displayName"],
      row["number"].lstrip("0"),
    ):
      assert loader.pick(hint) == identifier, hint


@pytest.mark.parametrize("shape", SHAPES)
def test_each_name_of_a_row_leads_the_server_to_that_task(http, shape):
  loader = Loader(http, shape)
  for identifier, row in loader.rows.items():
    for name in (
        identifier, row["id"], row["name"], row["seed_id"], row["number"],
        row["meta"]["id"], row["meta"]["displayName"], row["meta"]["name"],
        row["task_name"],
        # As a person writes the name.
        row["name"].replace("-", " ").capitalize(), row["name"].upper(),
    ):  # fmt: skip
      params = {"shape": shape} if shape else {}
      response = http.get(f"/tasks/{name}", params=params)
      assert response.status_code == 200, (name, response.text)
      assert response.json()["task_id"] == identifier, name
      assert LONG <= set(response.json())


def test_a_summary_is_completed_and_played_to_a_reward(http):
  loader = Loader(http, None)
  _, held_out = loader.split(range(9, 11))
  for identifier in held_out:
    row = loader.full(identifier)
    assert row["env_config"]["seed"] >= 0 and row["evaluation"]["validators"]
    created = http.post(f"/tasks/{identifier}", json={"options": {}}).json()
    at = f"/executions/{created['execution_id']}"
    verdict = http.post(at + "/evaluate", json={"answer_text": "?"}).json()
    assert (verdict["success"], verdict["score"], verdict["reward"]) == (
      False,
      0.0,
      0.0,
    )
    own = desktop.DesktopGym()
    own.start_sync(
      desktop.DesktopTasks(difficulty=1).eval_task(
        row["family"], int(row["name"].rpartition("-")[2]), 0
      )
    )
    while (action := desktop.oracle_action(own)) is not None:
      reply = http.post(at + "/step", json={"action": action.to_json()})
      assert reply.status_code == 200, reply.text
      own.act_sync(action)
    verdict = http.post(at + "/evaluate", json={}).json()
    assert verdict["success"] is True
    assert verdict["score"] == verdict["reward"] == 1.0
    assert verdict["reward"] == verdict["result"]["score"]
    for part in ("result", "score", "reward"):
      # Whichever of them a client reads.
      alone = {"success": True, part: verdict[part]}
      assert wire.reward_of(alone) == (1.0, True)
    assert http.post(at + "/terminate").status_code == 200


@pytest.mark.parametrize("shape", catalog.SHAPES)
async def test_our_own_client_has_the_same_tasks_in_each_shape(shape):
  spec = gym_servers.desktop(train_tasks=1, eval_tasks=1, shape=shape)
  with gym_servers.serving(spec) as (url, _):
    client = genv.GenvClient(url, "desktop")
    try:
      tasks = await client.list_tasks(full=True)
    finally:
      await client.aclose()
  own = catalog.Catalog(spec)
  assert [t.id for t in tasks] == [e.task.task_id for e in own.entries]
  for task, entry in zip(tasks, own.entries):
    assert task.to_task().params["difficulty"] == 0
    assert (task.seed, task.max_steps) == (
      entry.task.seed,
      3 + (task.family == "enter-text"),
    )
    assert (task.instruction, task.number) == (
      entry.task.instruction,
      entry.number,
    )
    assert task.difficulty == "easy" and task.family == entry.task.family


def test_a_row_of_a_list_alone_is_a_summary_wherever_its_text_stands():
  meta = {"id": "a", "displayName": "A", "description": "Do a."}
  assert cua_task.CUATask.from_row({"meta": meta}).is_summary
  full = {"meta": meta, "env_config": {"seed": 3}}
  assert not cua_task.CUATask.from_row(full).is_summary


def test_a_client_cannot_create_a_gym_and_hears_why(http):
  reply = http.post(str(http.base_url.copy_with(path="/api/v1/gyms")), json={})
  assert reply.status_code == 405
  assert reply.json()["code"] == "method_not_allowed"
  assert "GET /api/v1/gyms" in reply.json()["detail"]
  assert "createGym" in reply.json()["detail"]
  assert "GET" in reply.headers["allow"]
