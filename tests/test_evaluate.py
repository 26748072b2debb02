"""The command that evaluates, with servers over real HTTP."""

import json
import re
import threading

import chat_server
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import evaluate
from tunix.rl.multi_turn.reporting import evaluation_journal
from tunix.rl.multi_turn.run.evaluations import evaluator

ADD = (
  "environment=tool",
  "tasks=add",
  "eval.episodes_per_task=6",
  "eval.modes=[sampled]",
  "collect.concurrency=4",
  "report.progress=none",
)


def run(tmp_path, url, *overrides):
  return evaluate.main([f"server={url}", f"dir={tmp_path}", *ADD, *overrides])


def result_of(directory):
  return json.loads((directory / evaluator.FILE).read_text())


def test_a_server_is_evaluated(tmp_path, capsys):
  with chat_server.serving() as (url, server):
    server.wrong = lambda a, b, seed: seed % 2
    assert run(tmp_path, url, "name=s", "attempts=4") == 0
  data = result_of(tmp_path / "s")
  outcomes = evaluation_journal.load(tmp_path / "s")
  assert data["status"] == "completed" and data["subject"]["model"] == "adder"
  assert data["planned"] == data["played"] == len(outcomes) == 24
  results = data["results"]
  wins = sum(one.success for one in outcomes.values())
  assert results["successes"] == wins and 0 < wins < 24
  assert results["pass_at_k"]["1"]["rate"] == pytest.approx(wins / 24)
  by_task = {}
  for (_, index, _, _), one in outcomes.items():
    by_task.setdefault(index, []).append(one.success)
  assert results["pass_at_k"]["4"]["rate"] == pytest.approx(
    sum(map(any, by_task.values())) / 6
  )
  assert results["pass_hat_k"]["4"]["rate"] == pytest.approx(
    sum(map(all, by_task.values())) / 6
  )
  assert results["spread"]["tokens"]["mean"] == 3
  assert "pass@4" in capsys.readouterr().out
  page = (tmp_path / "s" / "report.html").read_text()
  assert "What is" in page and "pass@4" in page
  lines = (tmp_path / "s" / "trajectories.jsonl").read_text().splitlines()
  assert len(lines) == 24


def test_a_dry_run_describes_a_policy_and_makes_nothing(tmp_path, capsys):
  assert evaluate.main([f"dir={tmp_path}", *ADD, "--dry-run"]) == 0
  stdout = capsys.readouterr().out
  assert re.search(r"KV cache of \d+ tokens, [\d.]+ MiB", stdout)
  assert stdout.endswith("\n\n  6 episodes\n")
  assert not list(tmp_path.iterdir())


def test_an_evaluation_that_a_dying_server_ended_is_resumed(tmp_path, capsys):
  quick = (
    "evaluate.tries=1",
    "evaluate.give_up_after=3",
    "collect.concurrency=1",
  )
  with chat_server.serving() as (url, server):
    server.dies_after = 4
    assert run(tmp_path, url, "name=d", *quick) == 1
    printed = capsys.readouterr()
    assert "3 episodes in a row were broken" in printed.err
    assert f"resume={tmp_path / 'd'}" in printed.out
    assert "Traceback" not in printed.err
    before = evaluation_journal.load(tmp_path / "d")
    valid = {key: one for key, one in before.items() if one.valid}
    assert len(valid) == 3 and result_of(tmp_path / "d")["status"] == "failed"
    server.dies_after, server.bodies = None, []
    assert evaluate.main([f"resume={tmp_path / 'd'}"]) == 0
    played = [b for b in server.bodies if "OK" not in str(b["messages"])]
  assert len(played) == 3
  after = evaluation_journal.load(tmp_path / "d")
  assert len(after) == 6 and all(one.valid for one in after.values())
  assert {key: after[key] for key in valid} == valid
  assert result_of(tmp_path / "d")["results"]["success_rate"] == 1.0


def test_seeds_do_not_depend_on_the_way(tmp_path):
  """More attempts continue an evaluation: those before are not played again."""
  seeds = []
  for way in (("attempts=3",), ("attempts=1", "attempts=3")):
    with chat_server.serving() as (url, server):
      assert run(tmp_path, url, f"name=w{len(way)}", way[0]) == 0
      for more in way[1:]:
        directory = tmp_path / f"w{len(way)}"
        assert evaluate.main([f"resume={directory}", more]) == 0
      seeds.append(sorted(b["seed"] for b in server.bodies))
  one, two = (list(filter(None, numbers)) for numbers in seeds)
  assert len(one) == 18 and one == two


def test_an_interrupt_keeps_what_has_ended(tmp_path, capsys):
  with chat_server.serving() as (url, server):
    config = config_lib.load_evaluation(
      [
        f"server={url}",
        f"dir={tmp_path}",
        *ADD,
        "name=i",
        "collect.concurrency=1",
      ]
    )
    evaluation = evaluate.Evaluation(config)
    first = threading.Event()

    def stop_then(a, b, seed):
      if first.is_set():
        evaluation.stop.set()
      first.set()
      return False

    server.wrong = stop_then
    assert evaluate.run_to_end(evaluation) == 130
    assert "resume with:" in capsys.readouterr().out
    outcomes = evaluation_journal.load(tmp_path / "i")
    assert 1 <= len(outcomes) < 6
    with (tmp_path / "i" / evaluation_journal.NAME).open("a") as file:
      file.write('{"mode": "sampled", "ind')  # Torn by a kill.
    assert evaluate.main([f"resume={tmp_path / 'i'}"]) == 0
  assert len(evaluation_journal.load(tmp_path / "i")) == 6


def test_screenshots_reach_the_model(tmp_path):
  with chat_server.serving() as (url, server):
    assert evaluate.main([
        f"server={url}", f"dir={tmp_path}", "name=e", "gym=desktop",
        "tasks=click-color", "eval.episodes_per_task=2",
        "eval.modes=[greedy]", "max_turns=2", "report.progress=none",
    ]) == 0  # fmt: skip
  assert set(server.screens) == {(128, 96)}
  assert [b["temperature"] for b in server.bodies[1:]] == [0.0] * 2
  page = (tmp_path / "e" / "report.html").read_text()
  assert "data:image/png;base64," in page


REFUSED = {
  "absent": ("http://127.0.0.1:9/v1", (), "cannot be reached"),
  "other model": (None, ("model=addr",), "did you mean 'adder'?"),
  "no address": ("127.0.0.1", (), "must be an address such as"),
  "unknown key": (None, ("atempts=2",), "did you mean 'attempts'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, tmp_path, capsys):
  address, overrides, reason = REFUSED[case]
  with chat_server.serving() as (url, _):
    assert run(tmp_path, address or url, "name=n", *overrides) == 2
  stderr = capsys.readouterr().err
  assert reason in stderr and "Traceback" not in stderr
  assert not (tmp_path / "n").exists()


def test_a_missing_and_a_wrong_key_are_named(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  with chat_server.serving(key="right") as (url, _):
    assert run(tmp_path, url, "name=k") == 2
    assert "put it into $OPENAI_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("OTHER", "wrong-secret")
    assert run(tmp_path, url, "name=k", "evaluate.api_key_env=OTHER") == 2
    text = capsys.readouterr().err
    assert "refuses the key in $OTHER" in text and "wrong-secret" not in text
    monkeypatch.setenv("OTHER", "right")
    assert run(tmp_path, url, "name=k", "evaluate.api_key_env=OTHER") == 0
  written = (tmp_path / "k" / evaluator.FILE).read_text()
  assert '"right"' not in written


def test_a_model_without_vision_is_refused(tmp_path, capsys):
  with chat_server.serving(sees=False) as (url, _):
    assert (
      evaluate.main(
        [f"server={url}", f"dir={tmp_path}", "gym=desktop", "tasks=click-color"]
      )
      == 2
    )
  assert "adder takes no images" in capsys.readouterr().err


def test_fields_that_a_model_refuses_are_left_out(tmp_path, capsys):
  with chat_server.serving(lists=False) as (url, server):
    server.refuses = {
      "max_tokens": "Unsupported parameter: 'max_tokens' is not supported"
      " with this model. Use 'max_completion_tokens' instead.",
      "temperature": "Unsupported value: 'temperature' does not support 0.0",
    }
    server.busy = 2
    assert run(tmp_path, url, "name=f") == 2  # It lists no models.
    assert "name one with evaluate.model" in capsys.readouterr().err
    assert run(tmp_path, url, "name=f", "model=adder") == 0
  assert "does not take temperature" in capsys.readouterr().err
  data = result_of(tmp_path / "f")
  assert data["subject"]["left_out"] == ["temperature"]
  assert data["results"]["success_rate"] == 1.0


def test_a_gym_that_fails_ends_the_evaluation(tmp_path, capsys):
  with chat_server.serving() as (url, _):
    assert run(
        tmp_path, url, "name=g", "evaluate.give_up_after=2",
        "collect.deadlines.step=0.000001", "collect.concurrency=1",
    ) == 1  # fmt: skip
  stderr = capsys.readouterr().err
  assert "2 episodes in a row were broken" in stderr and "timeout" in stderr


def test_other_settings_than_it_began_with_are_refused(tmp_path, capsys):
  with chat_server.serving() as (url, _):
    assert run(tmp_path, url, "name=o") == 0
    directory = tmp_path / "o"
    assert evaluate.main([f"resume={directory}", "tasks=multiply"]) == 2
    assert "was begun with" in capsys.readouterr().err
    assert run(tmp_path, url, "name=o") == 2
    assert f"resume={directory}" in capsys.readouterr().err


def test_every_task_of_a_file_is_played(tmp_path):
  file = tmp_path / "tasks.jsonl"
  rows = [
    {"id": f"t{i}", "question": f"What is {i} + 4?", "answer": str(i + 4)}
    for i in range(5)
  ]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  with chat_server.serving() as (url, _):
    assert evaluate.main([
        f"server={url}", f"dir={tmp_path}", "name=l", "environment=tool",
        "task_source.source=jsonl", f"task_source.path={file}",
        "eval.modes=[greedy]", "report.progress=none",
    ]) == 0  # fmt: skip
  outcomes = evaluation_journal.load(tmp_path / "l")
  assert sorted(key[2] for key in outcomes) == [f"t{i}" for i in range(5)]
