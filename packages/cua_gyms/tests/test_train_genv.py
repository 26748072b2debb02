"""Training behind a gym server, and on lists of tasks: the command itself."""

import json
import pathlib

import gym_servers
import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.environments import task_sources
from tunix.rl.multi_turn.environments.gyms import desktop

pytestmark = pytest.mark.timeout(400)
FAMILIES = ("click-color", "enter-text")
NANO = (
  small_runs.NANO,
  "warm_start.source=none",
  "eval.modes=[sampled]",
  "report.images=false",
)
# What is sampled and learned; only the clock may differ.
COMPARED = ("loss", "grad_norm", "entropy", "logprob", "top_token")


def run(tmp_path: pathlib.Path, *overrides: str) -> int:
  return small_runs.run_train(tmp_path, *NANO, *overrides)


@pytest.mark.slow
def test_a_run_behind_a_server_is_the_run_in_process(tmp_path):
  """The same policy, seeds and tasks: equal to the last bit.

  The server's list is played on the server, and on a desktop of the run's own.
  """
  learn = (
    # Random weights hit nothing; entropy gives them something to learn from.
    "algorithm.entropy_coef=0.1",
    "learner.skip_zero_advantage=false",
    "learner.schedule=constant",
    "tasks=[]",
    "steps=2",
  )
  path = tmp_path / "tasks.jsonl"
  with gym_servers.serving(gym_servers.desktop(families=FAMILIES)) as (
    url,
    app,
  ):
    assert run(
        tmp_path, "name=behind", "gym=genv", f"gym.options.base_url={url}",
        "task_source.source=gym", *learn,
    ) == 0  # fmt: skip
    assert app.store.open == 0
    tasks = task_sources.load_tasks_from_config(
      task_sources.TaskSourceConfig(source="gym"), options={"base_url": url}
    )
    rows = [{**t.to_row(), "split": t.split, "gym_id": ""} for t in tasks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert run(
      tmp_path, "name=inside", "task_source.source=jsonl",
      f"task_source.path={path}", *learn,
  ) == 0  # fmt: skip
  own, result = (
    small_runs.metrics_of(tmp_path / n) for n in ("inside", "behind")
  )
  assert len(own) == len(result) == 2
  for one, other in zip(own, result):
    for key in COMPARED:
      assert one[key] == other[key], key
  assert own[0]["loss"] != own[1]["loss"]
  own, result = (
    small_runs.summary_of(tmp_path / n) for n in ("inside", "behind")
  )
  for name in ("warm_start", "final"):
    assert own["eval"][name]["by_task"].keys() == set(FAMILIES)
    assert own["eval"][name]["by_task"] == result["eval"][name]["by_task"]


@pytest.mark.slow
def test_a_list_trains_by_a_curriculum_and_goes_on(tmp_path):
  tasks = desktop.DesktopTasks()
  path = tmp_path / "tasks.jsonl"
  with open(path, "w", encoding="utf-8") as file:
    for family in FAMILIES:
      for i in range(10):
        task = tasks.train_task(family, i, 0)
        row = {**task.to_json(), "number": f"{i:03d}", "tags": ["Mine"]}
        file.write(json.dumps(row) + "\n")
  listed = (
    "task_source.source=jsonl",
    f"task_source.path={path}",
    "tasks=[]",
    "task_source.eval_number_range=008-009",
    "task_source.tags=[mine]",
    "task_source.order=curriculum",
    "task_source.limit=12",
  )
  assert run(tmp_path, "name=l", "steps=1", *listed) == 0
  final = small_runs.summary_of(tmp_path / "l")["eval"]["final"]
  assert sorted(final["by_task"]) == list(FAMILIES)
  directory = tmp_path / "l"
  assert train.main([f"resume={directory}", "steps=2"]) == 0
  assert [m["step"] for m in small_runs.metrics_of(directory)] == [1, 2]
  assert train.main([f"resume={directory}", "task_source.limit=3"]) == 2


@pytest.mark.parametrize(
  "overrides, words",
  [
    (
      [
        "gym=genv",
        "gym.options.base_url=http://127.0.0.1:9",
        "gym.options.timeouts.tasks=0.5",
      ],
      "http://127.0.0.1:9",
    ),
    (["task_source.source=jsonl", "task_source.path=/nowhere"], "/nowhere"),
    (["task_source.source=jsonl"], "task_source.path"),
    (["task_source.source=gym"], "gym.name=genv"),
    (["task_source.limit=3"], "chooses from a list"),
    (["gym=gbox", "tasks=[a]"], "task_source.source=jsonl"),
  ],
)
def test_a_list_that_cannot_be_had_is_refused(
  tmp_path, overrides, words, capsys
):
  assert run(tmp_path, "name=x", *overrides) == 2
  assert words in capsys.readouterr().err


def test_a_family_that_the_server_has_not_is_refused(tmp_path, capsys):
  with gym_servers.serving(gym_servers.desktop(families=FAMILIES)) as (url, _):
    assert run(
        tmp_path, "name=x", "gym=genv", f"gym.options.base_url={url}",
        "tasks=[click-colour]",
    ) == 2  # fmt: skip
  assert "did you mean 'click-color'" in capsys.readouterr().err
