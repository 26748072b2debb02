"""Generators of the rollout buffer: found by file, run, stopped, resumed."""

import asyncio
import collections
import concurrent.futures
import json
import os
import pathlib
import textwrap
import time

from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import client
from agent_services.rollout_buffer import generating
from agent_services.rollout_buffer import generators_run
from agent_services.rollout_buffer import plugins
from agent_services.rollout_buffer import rights
import buffer_services
import chat_server
import pytest
import run_services
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.trajectory_collector import records

BUILT_IN = plugins.discover(()).generators
CLICK = run_services.call(action="left_click", coordinate=[500, 500])
TERMINATE = run_services.call(action="terminate", status="success")


def until(condition, seconds=60):
  due = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < due, "it did not happen in time"
    time.sleep(0.05)


def write_rows(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def play(task_type, data):
  """A built-in generator, run here."""
  module = plugins.load(BUILT_IN[task_type].path)
  data = {rights.ALLOWED: {"gyms": ["desktop"], "client_settings": []}, **data}
  asyncio.run(module._run(data))  # pylint: disable=protected-access


@pytest.fixture(name="running")
def running_fixture(tmp_path):
  with buffer_services.Running(tmp_path / "buffer") as running:
    yield running


def payload(running, path, **changes):
  return {
      "task_type": "math", "num_repeat_per_sample": "2", "num_process": "4",
      "num_epoch": "1", "input_file": path, "rollout_id": "r",
      "remote_buffer_url": running.url, "sampling_params": {}, **changes,
  }  # fmt: skip


# --- mathematics --------------------------------------------------------------


def test_mathematics_is_played_checked_and_read(running, tmp_path):
  rows = write_rows(
    tmp_path / "in.jsonl",
    [
      {
        "instance_id": f"m{i}",
        "label": str(i + 1),
        "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
      }
      for i in range(3)
    ]
    + [{"instance_id": 7, "prompt": "What is 1 + 1?", "answer": 2}],
  )
  with chat_server.serving() as (url, server):
    server.wrong = lambda a, b, seed: seed % 2
    data = payload(
      running,
      rows,
      remote_engine_url=url,
      reward="numeric_match",
      num_repeat_per_sample="4",
      max_tokens="64",
      skip_instance_ids=["m1"],
      sampling_params={"max_tokens": "32", "temperature": "0.8", "top_p": 1},
    )
    running.start(num_repeat_per_sample=4, group_rules="raw")
    play("math", data)
  items = running.read()["data"]["data"]
  assert collections.Counter(i["instance_id"] for i in items) == {
    "m0": 4,
    "m2": 4,
    "7": 4,
  }
  assert len({i["uid"] for i in items}) == 12
  for item in items:
    roles = [m["role"] for m in item["messages"]]
    assert roles == ["user", "assistant"]
    right = item["messages"][-1]["content"] == item["extra_info"]["label"]
    assert item["reward"] == float(right)
    assert item["extra_info"]["finish_reason"] == "stop"
    assert item["extra_info"]["round_number"] == 1
    assert item["extra_info"]["token_exact"] is False
    assert float(item["extra_info"]["timestamp"]) > 1e9
    assert item["sampling_params"] == {
      "max_tokens": 32,
      "temperature": 0.8,
      "top_p": 1.0,
    }
  assert {i["reward"] for i in items} == {0.0, 1.0}
  seeds = [b["seed"] for b in server.bodies]
  assert len(set(seeds)) == 12
  for body in server.bodies:
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (
      32,
      0.8,
      1.0,
    )
    assert body["logprobs"] and body["return_token_ids"]


def test_sampled_tokens_are_kept_where_the_server_returns_them(
  running, tmp_path
):
  rows = write_rows(
    tmp_path / "in.jsonl",
    [{"instance_id": "a", "prompt": "2 + 2?", "label": "4"}],
  )
  parts = [
    run_services.completion("4") | {},
    run_services.completion("The answer"),
    run_services.completion(" is 4"),
  ]
  parts[0]["choices"][0]["policy_versions"] = [[0, 3]]
  parts[1]["choices"][0]["finish_reason"] = "abort"
  parts[1]["usage"] = {"completion_tokens": 2}
  bodies = []

  def answer(method, path, body):
    if path.endswith("/models"):
      return 200, {"data": [{"id": "m"}]}
    bodies.append(json.loads(body))
    return 200, parts.pop(0)

  with run_services.scripted(answer) as (url, _):
    running.start(num_repeat_per_sample=2, group_rules="raw")
    play("math", payload(
        running, rows, remote_engine_url=url, reward="numeric_match",
        num_process=1, max_tokens=10,
    ))  # fmt: skip
  exact, text = running.read()["data"]["data"]
  (sequence,) = exact["sequences"]
  assert sequence["tokens"] == [1, 2, 5, 6]
  assert sequence["loss_mask"] == [0, 0, 1, 1]
  assert sequence["logprobs"] == [None, None, -0.5, -0.25]
  assert sequence["versions"] == [None, None, 3, 3]
  assert exact["extra_info"]["token_exact"] is True
  assert records.read(exact).sequences[0].has_logprobs
  # An aborted completion is continued, and is text only.
  assert text["messages"][-1]["content"] == "The answer is 4"
  assert "sequences" not in text and text["reward"] == 1.0
  assert text["extra_info"]["token_exact"] is False
  assert bodies[2]["continue_final_message"] is True
  assert bodies[2]["max_tokens"] == 8
  assert bodies[2]["messages"][-1] == {
    "role": "assistant",
    "content": "The answer",
  }


def test_a_group_of_mathematics_needs_an_answer_of_each_member():
  hook = plugins.hooks_of(BUILT_IN["math"]).is_valid_group
  said_by = lambda text: {"messages": [{"role": "assistant", "content": text}]}
  assert hook(("g", [said_by("1"), said_by("1")]), 2, "math") == (True, True)
  assert hook(("g", [said_by("1"), said_by(" ")]), 2, "math") == (False, True)
  assert hook(("g", [said_by("1")]), 2, "math") == (False, False)
  assert hook(("g", [said_by(None), {"messages": []}]), 2) == (False, True)


@pytest.mark.parametrize(
  "rows, fault",
  [
    ([], "holds no task"),
    ([{"prompt": "x"}], "line 1: it has no instance_id; give each"),
    ([{"instance_id": "a"}], "prompt must be a text or a list of messages"),
    ([{"instance_id": "a", "prompt": "x"}], "give each task its answer"),
  ],
)
def test_a_wrong_input_is_one_line(running, tmp_path, rows, fault):
  path = write_rows(tmp_path / "in.jsonl", rows)
  with chat_server.serving() as (url, _):
    with pytest.raises((generating.GeneratorError, ExceptionGroup)) as caught:
      play(
        "math",
        payload(running, path, remote_engine_url=url, reward="numeric_match"),
      )
  error = caught.value
  while isinstance(error, ExceptionGroup):
    error = error.exceptions[0]
  assert fault in str(error) and "\n" not in str(error)


# --- the desktop --------------------------------------------------------------


def test_the_desktop_is_played_by_an_openai_server(running, tmp_path):
  rows = write_rows(
    tmp_path / "in.jsonl",
    [
      {"instance_id": "d0", "family": "click-button", "index": 0},
      {"instance_id": "d1", "family": "enter-text"},
    ],
  )
  turns = collections.Counter()

  def answer(method, path, body):
    if path.endswith("/models"):
      return 200, {"data": [{"id": "m"}]}
    request = json.loads(body)
    turn = sum(m["role"] == "assistant" for m in request["messages"])
    turns[turn] += 1
    images = 1 + turn
    prompt = [1] + [2, 9, 9, 3] * images + [4] * turn
    # Prompts extend one another: what was sampled stands where it was.
    prompt = [1, 2, 9, 9, 3] + [5, 6, 2, 9, 9, 3] * turn
    text = CLICK if not turn else TERMINATE
    return 200, run_services.completion(text, prompt=prompt)

  with run_services.scripted(answer) as (url, _):
    running.start(num_repeat_per_sample=2, group_rules="raw")
    play("desktop", payload(
        running, rows, task_type="desktop", remote_engine_url=url,
        image_token_id=9, sampling_params={"temperature": 0.6},
    ))  # fmt: skip
  items = running.read()["data"]["data"]
  assert len(items) == 4 and turns[1] >= 1
  for item in items:
    record = records.read(item)
    store = images_lib.ImageStore()
    records.read_images(item, store)  # Each is what its hash says.
    (sequence,) = record.sequences
    assert sequence.has_logprobs and not sequence.has_versions
    assert len(sequence.images) == item["extra_info"]["round_number"]
    for span in sequence.images:
      assert store.get(span.image).shape == (96, 128, 3)
      assert set(sequence.tokens[span.offset : span.end]) == {9}
    assert item["extra_info"]["token_exact"] is True
    assert item["sampling_params"]["temperature"] == 0.6
    assert 0 <= item["reward"] <= 1


# --- plug-ins -----------------------------------------------------------------


PLUGINS = {
  "echo_generator.py": """
        import helper, json, os, time, urllib.request
        TASK_TYPE = "echo"
        def run_rollout(data):
          print("pid", os.getpid(), flush=True)
          for row in range(int(data["rows"])):
            for k in range(int(data["num_repeat_per_sample"])):
              body = json.dumps(helper.item(row, k)).encode()
              url = data["remote_buffer_url"].rstrip("/") + "/buffer/write"
              asked = urllib.request.Request(url, body)
              urllib.request.urlopen(asked, timeout=30)
          time.sleep(float(data.get("then_sleep", 0)))
        def is_valid_group(group, min_valid_group_size, task_type):
          return len(group[1]) >= min_valid_group_size
        def transform_group(group, task_type):
          if group[0] == "1":
            raise RuntimeError("this group is odd")
          return group[0], [{**i, "by": task_type} for i in group[1]]
        def get_group_data_meta_info(temp_data):
          return {"total_samples": sum(map(len, temp_data.values())), "mine": 1}
    """,
  "helper.py": """
        def item(row, k):
          return {"uid": f"{row}-{k}", "instance_id": row, "messages": [],
                  "reward": k, "extra_info": {}}
    """,
  "failing_generator.py": """
        TASK_TYPE = "failing"
        def run_rollout(data):
          raise RuntimeError("it has no wood")
    """,
  "hanging_generator.py": """
        import subprocess, sys, time, signal
        TASK_TYPE = "hanging"
        def run_rollout(data):
          signal.signal(signal.SIGTERM, signal.SIG_IGN)
          child = subprocess.Popen(
              [sys.executable, "-c", "import time; time.sleep(600)"])
          print("child", child.pid, flush=True)
          time.sleep(600)
    """,
  "broken_generator.py": "def run_rollout(:\n",
  "untold_generator.py": "def run_rollout(data): pass\n",
  "computed_generator.py": "TASK_TYPE = str(1)\ndef run_rollout(d): pass\n",
  "double_generator.py": "TASK_TYPE = 'echo'\ndef run_rollout(d): pass\n",
  "unimportable_generator.py": (
    "import nowhere_at_all\nTASK_TYPE = 'unimportable'\n"
    "def run_rollout(d): pass\ndef filter_item(i, t): return True\n"
  ),
}


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("generators")
  for name, text in PLUGINS.items():
    (folder / name).write_text(textwrap.dedent(text))
  return folder


def test_generators_are_found_by_file_and_broken_ones_listed(folder):
  plugin_set = plugins.discover([folder])
  assert set(plugin_set.generators) == {
    "desktop",
    "external",
    "math",
    "echo",
    "failing",
    "hanging",
    "unimportable",
  }
  assert plugin_set.generators["echo"].path.name in (
    "double_generator.py",
    "echo_generator.py",
  )
  problems = "\n".join(plugin_set.problems)
  for part in (
    "broken_generator.py: ",
    "untold_generator.py: it defines no TASK_TYPE",
    "computed_generator.py: TASK_TYPE must be a text in quotes",
    "TASK_TYPE='echo' is that of",
  ):
    assert part in problems
  assert "helper.py" not in problems


def test_plug_ins_run_fail_and_are_stopped(folder, tmp_path):
  (folder / "double_generator.py").unlink(missing_ok=True)
  limits = buffer_settings.BufferLimits(stop_grace=0.2)
  with buffer_services.Running(
    tmp_path, generators=[folder], limits=limits
  ) as running:
    # It runs, with hooks of the newer form; one group fails in a hook.
    answer = running.start(task_type="echo", num_repeat_per_sample="2", rows=3)
    assert answer.json() == {"message": "Rollout started"}
    until(lambda: running.stats()["generator"]["state"] == "finished")
    got = running.read()["data"]
    assert [i["uid"] for i in got["data"]] == ["0-0", "0-1", "2-0", "2-1"]
    assert {i["by"] for i in got["data"]} == {"echo"}
    assert got["meta_info"] == {
      "total_samples": 6,
      "mine": 1,
      "finished_groups": ["0", "2", "1"],
    }
    stats = running.stats()
    assert stats["hook_failures"] == 1
    assert "group '1': RuntimeError: this group is odd" in stats["errors"][0]

    # It fails: the reason is in the stats.
    running.start(task_type="failing")
    until(lambda: running.stats()["generator"]["state"] == "failed")
    stats = running.stats()
    assert "RuntimeError: it has no wood" in stats["errors"][-1]
    assert any("Traceback" in li for li in stats["generator"]["log"])

    # It cannot be imported here.
    answer = running.start(task_type="unimportable")
    assert answer.status_code == 422
    assert "nowhere_at_all" in answer.json()["detail"]

    # It hangs, ignores SIGTERM and has a child: both are gone.
    running.start(task_type="hanging")
    until(
      lambda: any(
        line.startswith("child") for line in running.stats()["generator"]["log"]
      )
    )
    log = running.stats()["generator"]["log"]
    child = int(next(li for li in log if li.startswith("child")).split()[1])
    assert alive(child)
    assert running.post("/stop_rollout").json() == {
      "message": "Rollout stopped"
    }
    assert running.stats()["generator"]["state"] == "stopped"
    until(lambda: not alive(child), 10)
    assert running.post("/stop_rollout").json() == {
      "message": "No rollout was running"
    }


def alive(pid):
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_rollout_goes_on_with_a_service_that_starts_again(tmp_path):
  rows = write_rows(
    tmp_path / "in.jsonl",
    [
      {"instance_id": f"m{i}", "prompt": f"What is {i} + 1?", "label": i + 1}
      for i in range(6)
    ],
  )
  with chat_server.serving() as (url, server):
    slow, answer = [True], server.complete

    def complete(body):
      if slow[0] and server.answered > 5:
        time.sleep(1.0)
      return answer(body)

    server.complete = complete
    with buffer_services.Running(tmp_path / "b") as first:
      first.start(
        task_type="math",
        input_file=rows,
        remote_engine_url=url,
        reward="numeric_match",
        num_repeat_per_sample="2",
        num_process=1,
      )
      until(lambda: first.stats()["total_written"] >= 4)
    slow[0] = False
    before = len(server.bodies)
    with buffer_services.Running(tmp_path / "b") as second:
      until(lambda: second.stats()["generator"]["state"] == "finished")
      assert second.stats()["total_written"] == 12
      stored_rows = second.service.store.rows(
        "SELECT instance_id, COUNT(*) FROM items GROUP BY instance_id"
      )
      assert dict(stored_rows) == {f"m{i}": 2 for i in range(6)}
    # What was written is not played again.
    assert len(server.bodies) - before <= 12 - 4
    with buffer_services.Running(tmp_path / "b") as third:
      state = third.stats()["generator"]
      assert (state["state"], state["task_type"]) == ("finished", "math")


ENDING = """
TASK_TYPE = "ending"

def run_rollout(data):
  print("it was here", flush=True)
  if data["fails"]:
    raise RuntimeError("no wood")
"""


@pytest.mark.parametrize(
  "fails, state", [(True, "failed"), (False, "finished")]
)
def test_how_a_generator_ended_is_known_after_a_restart(tmp_path, fails, state):
  (tmp_path / "ending_generator.py").write_text(ENDING)
  options = {"generators": [tmp_path]}
  with buffer_services.Running(tmp_path / "b", **options) as first:
    first.start(task_type="ending", fails=fails)
    until(lambda: first.stats()["generator"]["state"] == state)
    before = first.stats()
    until(
      lambda: (
        '"run": {'
        in first.service.store.rows("SELECT rollout FROM buffers")[0][0]
      )
    )
  for _ in range(2):
    with buffer_services.Running(tmp_path / "b", **options) as again:
      after = again.stats()
      assert after["generator"] == before["generator"]
      assert after["errors"] == before["errors"]
      assert ("no wood" in str(after["errors"])) == fails
  (tmp_path / "ending_generator.py").unlink()
  with buffer_services.Running(tmp_path / "b", **options) as without:
    assert without.stats()["generator"] == before["generator"]
    without.start()  # Another rollout has its own state.
    assert without.stats()["generator"]["task_type"] == "external"


# --- what generators have in common -------------------------------------------


def test_each_skip_leaves_out_one_group_of_a_task():
  rows = [{"instance_id": n} for n in "abc"]
  data = {
    "num_repeat_per_sample": "2",
    "num_epoch": "3",
    "rollout_id": "r",
    "skip_instance_ids": ["a", "a", "b", "unknown"],
  }
  result = list(generating.jobs(rows, data))
  assert collections.Counter(j.instance_id for j in result) == {
    "a": 2,
    "b": 4,
    "c": 6,
  }
  assert len({j.uid for j in result}) == len({j.seed for j in result}) == 12
  assert [j.uid for j in result] == [j.uid for j in generating.jobs(rows, data)]
  names = [j.instance_id for j in result]
  assert names[::2] == names[1::2], "members of a group are neighbours"


def test_episodes_that_keep_failing_end_the_rollout(
  running, tmp_path, monkeypatch
):
  monkeypatch.setattr(generating, "_PAUSE_S", 0.0)
  rows = write_rows(tmp_path / "in.jsonl", [{"instance_id": "a"}])
  tries = collections.Counter()

  async def sometimes(job):
    tries[job.uid] += 1
    if tries[job.uid] < 3:
      raise RuntimeError("the model is away")
    return {"messages": [], "reward": 1.0}

  async def never(job):
    raise RuntimeError("the model is away")

  data = payload(running, rows, num_repeat_per_sample=2)
  assert asyncio.run(generating.generate(data, sometimes)) == 2
  data = payload(running, rows, num_repeat_per_sample=99, rollout_id="s")
  with pytest.raises(ExceptionGroup) as caught:
    asyncio.run(generating.generate(data, never))
  assert "tries in a row failed, the last with: RuntimeError: the model is" in (
    str(caught.value.exceptions[0])
  )


def test_episodes_are_listed_as_they_are_played(running, tmp_path):
  """A start may ask for more of them than any memory holds."""
  rows = write_rows(tmp_path / "in.jsonl", [{"instance_id": "a"}])

  async def refused(job):
    raise generating.GeneratorError(f"{job.uid} is not played")

  data = payload(running, rows, num_repeat_per_sample=65_536, num_epoch=65_536)
  began = time.monotonic()
  with pytest.raises(ExceptionGroup) as caught:
    asyncio.run(generating.generate(data, refused))
  assert "r-0-a-0 is not played" in str(caught.value.exceptions[0])
  assert time.monotonic() - began < 10


def test_a_group_begins_only_while_the_trainer_allows_it(running, tmp_path):
  """Groups of two; the second is dropped, as its rewards are equal."""
  tasks = [{"instance_id": name} for name in "abcdefgh"]
  data = payload(
    running, write_rows(tmp_path / "in.jsonl", tasks), allowed_items=4
  )
  second = list(generating.jobs(tasks, data))[2].instance_id
  began = collections.Counter()

  async def play(job):
    began[job.instance_id] += 1
    reward = 0.5 if job.instance_id == second else job.number
    return {"messages": [], "reward": reward}

  def is_still(count):
    until(lambda: running.stats()["total_written"] == count)
    time.sleep(3 * generating._LOOK_S)
    return sum(began.values()) == running.stats()["total_written"] == count

  running.start(num_repeat_per_sample="2", allowed_items=4)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    played = pool.submit(lambda: asyncio.run(generating.generate(data, play)))
    assert is_still(4)
    running.service.sweep()  # A dropped group makes place for another.
    assert is_still(4 + 2)
    # A bound never falls, and a read without one leaves it.
    running.read(batch_size=2)
    running.read(batch_size=2, allowed_items=1)
    assert is_still(4 + 2)
    running.read(batch_size=2, allowed_items=7)  # A group begins whole.
    assert is_still(8 + 2)
    running.read(allowed_items=100)
    assert played.result(30) == 16
  assert set(began.values()) == {2}
  assert running.stats()["total_dropped"] == 2
  assert running.stats()["allowed_items"] == 100


def test_a_bound_outlives_the_service(tmp_path):
  with buffer_services.Running(tmp_path / "b") as first:
    first.start(allowed_items="12")
    assert first.stats()["allowed_items"] == 12
    first.start()
    assert first.stats()["allowed_items"] is None
    first.read(allowed_items=3)
    assert first.stats()["allowed_items"] is None
    answer = first.start(allowed_items=-1)
    assert answer.status_code == 422
    assert "allowed_items must be >= 0, got -1" in answer.text
    rows = write_rows(tmp_path / "in.jsonl", [{"instance_id": "a"}])
    # No model answers, so the next service resumes the rollout.
    first.start(
      task_type="math",
      input_file=rows,
      allowed_items=16,
      remote_engine_url="http://127.0.0.1:1/v1",
    )
  with buffer_services.Running(tmp_path / "b") as second:
    assert second.stats()["allowed_items"] == 16


def test_what_is_written_is_not_played_again_in_any_batch(
  running, tmp_path, monkeypatch
):
  monkeypatch.setattr(generating, "_BATCH", 3)
  rows = write_rows(tmp_path / "in.jsonl", [{"instance_id": "a"}])
  played = []

  async def play(job):
    played.append(job.number)
    return {"messages": [], "reward": 1.0}

  data = payload(running, rows, num_repeat_per_sample=8)
  for number in (1, 3, 4, 5):
    running.write(buffer_services.item(f"r-0-a-{number}", "a"))
  assert asyncio.run(generating.generate(data, play)) == 4
  assert sorted(played) == [0, 2, 6, 7]


@pytest.mark.parametrize("named", [{}, {"model": "m"}])
def test_words_of_the_model_s_server_stay_in_the_service_s_log(
  running, tmp_path, monkeypatch, caplog, capfd, named
):
  """Both where it ends the rollout at once, and where an episode fails."""
  caplog.set_level("INFO")
  rows = write_rows(
    tmp_path / "in.jsonl",
    [{"instance_id": "a", "prompt": "2 + 2?", "label": "4"}],
  )
  answer = lambda *_: (404, {"error": "the key sk-hidden is wrong"})
  with run_services.scripted(answer) as (url, _):
    if not named:
      running.start(
        task_type="math",
        num_repeat_per_sample=1,
        input_file=rows,
        remote_engine_url=url,
      )
      until(lambda: running.stats()["generator"]["state"] == "failed")
      stats = json.dumps(running.stats())
      assert "the answer has status 404" in running.stats()["errors"][-1]
      log = caplog.text
    else:
      monkeypatch.setattr(generating, "_PAUSE_S", 0.0)
      play(
        "math",
        payload(
          running, rows, num_repeat_per_sample=1, remote_engine_url=url, **named
        ),
      )
      log = capfd.readouterr().err
      stats = "\n".join(
        line
        for line in log.splitlines()
        if not line.startswith(generating.PRIVATE)
      )
      assert "(try 3): ModelError: the answer has status 404" in stats
  assert "sk-hidden" in log and "sk-hidden" not in stats


# --- the client ---------------------------------------------------------------


def test_a_writer_waits_for_room_and_repeats_what_was_not_answered(tmp_path):
  limits = buffer_settings.BufferLimits(group_size=2, max_items=2)
  item = buffer_services.item

  async def use(running):
    async with client.BufferClient(running.url) as buffer:
      pair = [item("a", "g", 0.0), item("b", "g", 1.0)]
      assert await buffer.write(pair) == 2
      waiting = asyncio.create_task(buffer.write(item("c", "h")))
      await asyncio.sleep(0.3)
      assert not waiting.done(), "the buffer is full"
      lease = await buffer.lease(lease_s=30)
      (pair_read,) = lease.groups
      assert len(pair_read.records) == 2
      await buffer.acknowledge(lease.id)
      await buffer.acknowledge(lease.id)
      assert await waiting == 1
      assert await buffer.known(["a", "c", "x"]) == {"a", "c"}
      with pytest.raises(client.BufferError, match="reward is missing"):
        await buffer.write({"uid": "u", "instance_id": "i", "messages": []})
      with pytest.raises(client.BufferError, match="written before with"):
        await buffer.write(item("a", "other"))

  with buffer_services.Running(tmp_path, limits=limits) as running:
    asyncio.run(asyncio.wait_for(use(running), 60))


def test_a_write_is_repeated_through_failures_of_the_service():
  answers = [
    (503, {"detail": "the disk", "code": "disk"}),
    (500, {"detail": "it failed", "code": "internal_error"}),
    (200, {"success": True, "new": 1}),
  ]

  async def use(url):
    async with client.BufferClient(url, buffer="b", token="t") as buffer:
      return await buffer.write({"uid": "u"})

  with run_services.scripted(lambda *_: answers.pop(0)) as (url, app):
    assert asyncio.run(use(url)) == 1
  assert [r[1] for r in app.requests] == ["/b/b/buffer/write"] * 3
  assert {r[3]["authorization"] for r in app.requests} == {"Bearer t"}


def test_a_run_that_has_ended_is_sent_no_signal(tmp_path, monkeypatch):
  path = tmp_path / "short_generator.py"
  path.write_text("TASK_TYPE = 'short'\ndef run_rollout(data): pass\n")
  run = generators_run.GeneratorRun(
    plugins.Generator("short", path, ()), {}, timeout_s=60, grace_s=1
  )
  until(lambda: not run.running)
  sent = []
  monkeypatch.setattr(os, "killpg", lambda *args: sent.append(args))
  run.stop()
  assert run.state == "finished" and not sent
