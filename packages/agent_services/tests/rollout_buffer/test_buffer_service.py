"""The rollout buffer's protocol: each key, default and error, over HTTP."""

import concurrent.futures
import functools
import json
import math
import time
import tracemalloc

from agent_services.rollout_buffer import __main__
from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import requests
import buffer_services
import pytest
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.trajectory_collector import records

item = buffer_services.item
group = buffer_services.group


# --- the documented replies ---------------------------------------------------


def test_every_documented_reply_is_word_for_word(buffer):
  assert buffer.client.get("/").json() == {
    "message": "Rollout Buffer Server is running"
  }
  assert buffer.start(group_timeout_seconds=1).json() == {
    "message": "Rollout started"
  }
  one = item("a", "g", 0.0)
  written = buffer.post("/buffer/write", one)
  assert written.status_code == 200
  assert written.json() == {
    "success": True,
    "message": "Data has been successfully written to buffer",
    "data": {"data": [one], "meta_info": "write to buffer"},
    "new": 1,
  }
  nothing = {"data": [], "meta_info": {}}
  assert buffer.read() == {
    "success": False,
    "message": "No data available to read",
    "data": nothing,
  }
  assert buffer.read(batch_size=8) == {
    "success": False,
    "message": "Not enough data. Requested 8 items but only 0 available.",
    "data": nothing,
  }
  waited = buffer.post("/buffer/read", {"batch_size": 1, "timeout": 0})
  assert waited.json() == {
    "success": False,
    "message": "Timeout waiting, no data available to read",
    "data": nothing,
  }
  assert buffer.post("/buffer/read", {"wait": False}).json() == {
    "success": True,
    "message": "Successfully read 0 items",
    "data": nothing,
  }
  buffer.write(*(item(n, "g", r) for n, r in (("b", 1.0), ("c", 0), ("d", 1))))
  peeked = buffer.client.request(
    "GET", "/buffer/peek", json={"batch_size": 2}
  ).json()
  assert peeked["message"] == "Successfully previewed 2 items"
  assert peeked["data"]["data"][0] == one
  stats = buffer.client.get("/buffer/stats").json()
  assert stats["message"] == "Buffer stats retrieved successfully"
  assert stats["data"]["meta_info"] == {}
  figures = stats["data"]["data"][0]
  assert figures["current_size"] == figures["total_written"] == 4
  assert figures["total_read"] == 0
  assert figures["max_size"] == buffer_settings.BufferLimits().max_items
  got = buffer.read()
  assert got["success"] and got["message"] == "Successfully read 4 items"
  meta = got["data"]["meta_info"]
  assert meta == {
    "total_samples": 4,
    "num_groups": 1,
    "avg_group_size": 4.0,
    "avg_reward": 0.5,
    "reward_std": pytest.approx(math.sqrt(1 / 3)),
    "reward_min": 0.0,
    "reward_max": 1.0,
    "finished_groups": ["g"],
  }
  assert [i["uid"] for i in got["data"]["data"]] == ["a", "b", "c", "d"]
  for one in got["data"]["data"]:
    assert set(one) == {*records.REQUIRED, "raw_reward"}
    sign = 1 if one["raw_reward"] else -1
    assert one["reward"] == pytest.approx(sign, rel=1e-6)
  assert not buffer.read()["success"]


DEFAULTS = {
  "min_valid_group_size_ratio": ("min_valid_group_size_ratio", 1.0),
  "min_valid_item_size_ratio": ("min_valid_item_size_ratio", 0.7),
  "group_timeout_seconds": ("group_timeout_seconds", 300.0),
  "min_timeout_group_size_ratio": ("min_timeout_group_size_ratio", 0.7),
}


def test_defaults_of_a_start_are_the_documented_ones():
  request = requests.rollout({"task_type": "m", "num_repeat_per_sample": 8})
  assert request.rules.group_size == 8
  for field, value in DEFAULTS.values():
    assert getattr(request.rules, field) == value
  assert not request.rules.raw and not request.start.keep_items
  assert request.payload["num_process"] == 100
  assert request.payload["num_epoch"] == 1
  assert request.payload["skip_instance_ids"] == []


def sent(**changes):
  """The payload as a trainer sends it, numbers as texts."""
  return {
    "num_process": "100",
    "num_epoch": "3",
    "remote_engine_url": "http://127.0.0.1:30000",
    "remote_buffer_url": "http://127.0.0.1:8889",
    "task_type": "math",
    "input_file": "in.jsonl",
    "num_repeat_per_sample": "8",
    "max_tokens": "8192",
    "sampling_params": {"max_tokens": "8192", "temperature": 0.8, "top_p": 1},
    "tokenizer_path": "/t",
    "skip_instance_ids": ["a", 7],
    **changes,
  }


@pytest.mark.parametrize("number", [str, int, float])
def test_numbers_of_a_start_may_be_texts(number):
  request = requests.rollout(
    sent(
      num_repeat_per_sample=number(8),
      group_timeout_seconds=number(60),
      min_valid_item_size_ratio=str(0.5),
      task_arg={"mine": [1]},
    )
  )
  assert request.rules.group_size == 8
  assert request.rules.group_timeout_seconds == 60.0
  assert request.rules.min_valid_item_size == 4
  assert request.payload["skip_instance_ids"] == ["a", "7"]
  # Everything reaches the generator as it was sent.
  assert request.payload["num_process"] == "100"
  assert request.payload["task_arg"] == {"mine": [1]}
  assert request.payload["remote_buffer_url"] == "http://127.0.0.1:8889"
  without = sent()
  del without["remote_buffer_url"]
  assert (
    requests.rollout(without, "http://me:1").payload["remote_buffer_url"]
    == "http://me:1"
  )


@pytest.mark.parametrize(
  "changes, named",
  [
    ({"task_type": None}, "task_type is missing"),
    ({"task_type": 3}, "task_type must be a string, got 3"),
    ({"num_repeat_per_sample": None}, "num_repeat_per_sample is missing"),
    ({"num_repeat_per_sample": "0"}, "num_repeat_per_sample must be >= 1"),
    ({"num_repeat_per_sample": "x"}, "number, got 'x'"),
    ({"num_repeat_per_sample": 2.5}, "whole number, got 2.5"),
    ({"num_process": True}, "num_process must be a whole number, got True"),
    ({"num_epoch": "1e99"}, "num_epoch must be <= 65536"),
    ({"max_tokens": "-1"}, "max_tokens must be >= 1, got -1"),
    ({"sampling_params": [1]}, "sampling_params must be an object, got [1]"),
    ({"skip_instance_ids": "a"}, "skip_instance_ids must be a list"),
    ({"skip_instance_ids": [[]]}, "skip_instance_ids.0: id=[] must be a text"),
    ({"group_timeout_seconds": 0}, "group_timeout_seconds must be > 0"),
    ({"group_timeout_seconds": "nan"}, "group_timeout_seconds must be finite"),
    ({"min_valid_group_size_ratio": 2}, "min_valid_group_size_ratio must be"),
    ({"min_timeout_group_size_ratio": "x"}, "min_timeout_group_size_ratio"),
    ({"group_rules": "none"}, "group_rules='none' must be one of"),
    ({"remote_engine_url": "here"}, "remote_engine_url='here' must be an"),
  ],
)
def test_a_wrong_start_names_its_key(buffer, changes, named):
  answer = buffer.post("/start_rollout", sent(**changes))
  assert answer.status_code == 422
  assert answer.json()["code"] == "invalid_request"
  assert named in answer.json()["detail"]


def test_an_unknown_task_type_is_an_error_that_lists_the_known(buffer):
  answer = buffer.start(task_type="chess")
  assert answer.status_code == 404
  assert answer.json() == {
    "detail": "task_type='chess' has no generator; there is desktop,"
    " external, math",
    "code": "unknown_task_type",
  }


# --- items --------------------------------------------------------------------


@pytest.mark.parametrize("key", records.REQUIRED)
def test_each_required_key_is_required(buffer, key):
  one = item("a")
  del one[key]
  answer = buffer.post("/buffer/write", one)
  assert answer.status_code == 500  # The protocol's.
  assert answer.json()["code"] == "invalid_item"
  assert answer.json()["detail"].startswith(f"Write failed: {key} is missing")
  assert buffer.stats()["items"] == 0


EXACT = {
  "tokens": [1, 2, 3],
  "loss_mask": [0, 1, 1],
  "logprobs": [None, -0.5, None],
  "versions": [None, 0, 1],
}
HASH = "ab" * 32
SPAN = {"sha256": HASH, "width": 2, "height": 3, "start": 0, "num_tokens": 1}


@pytest.mark.parametrize(
  "changes, fault",
  [
    ({"uid": ""}, "uid='' must be a text"),
    ({"uid": None}, "uid=None must be a text"),
    ({"instance_id": 1.5}, "instance_id=1.5 must be a text"),
    ({"instance_id": True}, "instance_id=True must be a text"),
    ({"reward": "1"}, "reward='1' must be a finite number"),
    ({"reward": 1e300}, "a reward of 1e+300 is larger than"),
    ({"messages": {}}, "messages={} must be a list"),
    ({"messages": [1]}, "messages.0=1 must be an object"),
    ({"messages": [{"content": "x"}]}, "with a text 'role'"),
    ({"extra_info": []}, "extra_info=[] must be an object"),
    ({"buffer": "../x"}, "buffer='../x' must be a name"),
    ({"raw_reward": "1"}, "raw_reward='1' must be a finite number"),
    ({"messages": [{"role": "user", "content": {"$type": "x"}}]}, "$type"),
    ({"tokens": [1]}, "sequences[0] lacks loss_mask"),
    ({**EXACT, "loss_mask": [1]}, "loss_mask has 1 entries for 3 tokens"),
    ({**EXACT, "loss_mask": [0, 1, 2]}, "loss_mask must be 0 or 1"),
    ({**EXACT, "tokens": [1, -2, 3]}, "tokens must be ids >= 0"),
    ({**EXACT, "tokens": [1, 2**31, 3]}, "tokens must be ids >= 0"),
    ({**EXACT, "tokens": [1, 2.0, 3]}, "tokens must be a flat list of"),
    ({**EXACT, "logprobs": [0, "a", -1]}, "logprobs must be a flat list"),
    ({**EXACT, "logprobs": [0, 0.5, -1]}, "logprobs must be <= 0"),
    ({**EXACT, "logprobs": [0, -1e300, 0]}, "logprobs must be finite"),
    ({**EXACT, "versions": [0, 0.5, 2]}, "versions must be a flat list"),
    ({**EXACT, "versions": [0, 1, 2**40]}, "versions must be numbers of"),
    ({**EXACT, "versions": [0]}, "versions has 1 entries for 3 tokens"),
    ({**EXACT, "turn_ids": [1, 0, 0]}, "turn_ids must not decrease"),
    ({**EXACT, "turn_ids": [0, 0, 2**40]}, "turn_ids must be >= 0"),
    ({**EXACT, "entropies": [0, -1, 1]}, "entropies must be >= 0"),
    ({**EXACT, "support": 3}, "support must be a list of token ids"),
    ({**EXACT, "support": [[1], [1]]}, "is outside of its support"),
    ({**EXACT, "images": [{"sha256": "x"}]}, "images: each needs sha256"),
    ({**EXACT, "images": [{**SPAN, "num_tokens": 4}]}, "leaves the 3 tokens"),
    ({**EXACT, "images": [{**SPAN, "start": 1}]}, "marked as sampled"),
    ({"images": {"ab": "aGk="}}, "images.ab='aGk=' must be a base64 PNG"),
    ({"images": 3}, "images=3 must be an object"),
    ({"sequences": {}}, "sequences must be a list, got {}"),
    ({"sequences": [{}]}, "sequences[0] lacks tokens"),
    ({"sequences": [{**EXACT, "loss_mask": 0}]}, "sequences[0].loss_mask"),
  ],
)
def test_a_wrong_item_names_field_value_and_fix(buffer, changes, fault):
  answer = buffer.post("/buffer/write", {**item("a"), **changes})
  assert answer.status_code == 500 and fault in answer.json()["detail"]
  assert buffer.stats()["items"] == 0


def test_the_service_takes_no_item_that_its_reader_refuses():
  """Each value of an item in turn is replaced by ones of every kind."""
  pictures = {"images": {HASH: "aGk="}, "raw_reward": 0.2}
  complete = {
    **EXACT,
    "turn_ids": [0, 0, 0],
    "entropies": [None, 0.1, 0.2],
    "support": [[2, 5], [3]],
    "images": [SPAN],
  }
  count = 0
  for one in (
    item("a", **complete),
    item("a", sequences=[complete]),
    item("a", **pictures),
  ):
    for path in list(paths_of(one)):
      for value in OF_EVERY_KIND:
        raw = json.dumps(replaced(one, path, value)).encode()
        try:
          items.read(raw)
        except items.ItemError:
          continue
        records.read(json.loads(raw))
        count += 1
  assert count > 300  # Many are taken.


class Watched(bytes):
  """A body that notes how much of it was copied or searched at a time."""

  longest = 0

  def __getitem__(self, place):
    part = bytes.__getitem__(self, place)
    Watched.longest = max(Watched.longest, len(part))
    return part


@pytest.mark.parametrize(
  "digits, place",
  [*((19, n) for n in (0, 1, 17, 18, 19, 20, 4095, 4096)), (40, 4080), (18, 7)],
)
@pytest.mark.parametrize("before", [b"", b",", b".", b"7"])
def test_long_integers_are_searched_for_in_parts(
  monkeypatch, digits, place, before
):
  """A search of a whole body would hold up every other thread."""
  monkeypatch.setattr(items, "_SLICE", 64)
  raw = Watched(b"x" * place + before + b"7" * digits + b"x" * 100)
  Watched.longest = 0
  expected = items._LONG_INTEGER.search(raw) is not None
  assert items._may_hold_long_integer(raw) == expected
  assert 0 < Watched.longest < 64 + 20


def test_lines_of_a_body_are_read_one_by_one(monkeypatch):
  """A list of all of them would take twenty times the body."""

  def refuse(raw):
    raise items.ItemError(f"{len(raw)} bytes")

  monkeypatch.setattr(items, "_parse", refuse)  # Parsers reserve memory.
  raw = b'{"a":1}' + b"\nx" * 1_000_000
  tracemalloc.start()
  try:
    with pytest.raises(items.ItemError, match=f"^{len(raw)} bytes"):
      items.read(raw)
    assert tracemalloc.get_traced_memory()[1] < 2 * len(raw)
  finally:
    tracemalloc.stop()


OF_EVERY_KIND = (
    None, True, -1, 0, 1, 2.5, 1e300, -1e300, 2**31, 2**40, 2**70, "x", "", [],
    [1], [[1]], [None], [-1, 2], {}, {"a": 1}, {"$type": "x"}, HASH,
    {"$type": "ImageRef"},
    {"$type": "ndarray", "data": [300], "dtype": "uint8"},
    {"$type": "ndarray", "data": ["a"], "dtype": "S4000000000"},
    functools.reduce(lambda inner, _: [inner], range(900), []),
)  # fmt: skip


def paths_of(value, path=()):
  if path:
    yield path
  if isinstance(value, (dict, list)):
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
      yield from paths_of(value[key], (*path, key))


def replaced(value, path, new):
  if not path:
    return new
  copy = dict(value) if isinstance(value, dict) else list(value)
  copy[path[0]] = replaced(copy[path[0]], path[1:], new)
  return copy


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"uid": NaN}'])
def test_a_body_that_holds_no_item_is_refused(buffer, body):
  answer = buffer.post("/buffer/write", body)
  assert answer.status_code == 500
  assert answer.json()["detail"].startswith("Write failed: ")


def test_whole_numbers_are_ids_and_leave_as_texts(buffer):
  buffer.write(*(item(i, 5, i % 2) for i in range(4)))
  got = buffer.read()["data"]
  assert {i["instance_id"] for i in got["data"]} == {"5"}
  assert [i["uid"] for i in got["data"]] == ["0", "1", "2", "3"]
  assert got["meta_info"]["finished_groups"] == ["5"]


def test_token_exact_items_leave_as_they_came(buffer):
  exact = {**EXACT, "images": {HASH: "cGljdHVyZQ=="}}
  several = {
    "sequences": [{**EXACT, "images": [SPAN]}, {"tokens": [], "loss_mask": []}]
  }
  for number, more in enumerate((exact, several, exact, several)):
    buffer.write(item(f"u{number}", "g", number % 2, **more, mine={"x": None}))
  for got, more in zip(buffer.read()["data"]["data"], (exact, several) * 2):
    assert {k: got[k] for k in more} == more and got["mine"] == {"x": None}


def test_several_items_are_written_together_or_not_at_all(buffer):
  one, two = group("g")[:2], group("g")[2:]
  assert buffer.post("/buffer/write", one).json()["new"] == 2
  lines = "\n".join(json.dumps(i) for i in two) + "\n"
  assert buffer.post("/buffer/write", lines).json()["new"] == 2
  assert len(buffer.read()["data"]["data"]) == 4
  bad = [item("x"), {**item("y"), "reward": None}]
  answer = buffer.post("/buffer/write", bad)
  assert "item 1: reward=None" in answer.json()["detail"]
  conflicting = [item("z"), item("z", reward=0.25)]
  assert buffer.post("/buffer/write", conflicting).status_code == 409
  apart = [item("p"), item("q", buffer="other")]
  assert "one buffer" in buffer.post("/buffer/write", apart).json()["detail"]
  assert buffer.stats()["items"] == 0


def test_a_write_that_is_repeated_is_one_item_also_after_it_was_read(buffer):
  members = group("g")
  buffer.write(*members, *members)
  assert len(buffer.read()["data"]["data"]) == 4
  buffer.write(*members)
  assert buffer.stats()["items"] == 0
  assert not buffer.read()["success"]
  uids = buffer.post("/buffer/known", {"uids": ["g-0", "h"]}).json()
  assert uids == {"known": ["g-0"]}
  other = buffer.post("/buffer/write", item("g-0", "g", 0.75))
  assert other.status_code == 409 and other.json()["code"] == "uid_conflict"


def test_an_answer_is_short_where_its_client_prefers_so(buffer):
  answer = buffer.post(
    "/buffer/write", item("a"), headers={"prefer": "return=minimal"}
  ).json()
  assert answer["data"]["data"] == [] and answer["new"] == 1


# --- groups -------------------------------------------------------------------


def test_a_read_takes_whole_groups_and_leaves_the_rest(buffer):
  for name in ("a", "b", "c"):
    buffer.write(*group(name))
  assert buffer.read(batch_size=13)["message"] == (
    "Not enough data. Requested 13 items but only 12 available."
  )
  first = buffer.read(batch_size="5")["data"]
  assert [i["uid"][0] for i in first["data"]] == list("aaaabbbb")
  assert first["meta_info"]["finished_groups"] == ["a", "b"]
  assert first["meta_info"]["total_samples"] == 12
  remainder = buffer.read(batch_size=4)["data"]  # Exactly what there is.
  assert [i["uid"][0] for i in remainder["data"]] == list("cccc")
  # Statistics begin anew with each read.
  assert remainder["meta_info"]["total_samples"] == 0


def test_statistics_count_what_came_since_the_last_read(buffer):
  buffer.write(*group("a"))
  buffer.post("/buffer/read", {"batch_size": 4, "timeout": 1})
  buffer.write(*group("b", (0.0, 0.0, 0.0, 0.5)))
  meta = buffer.read()["data"]["meta_info"]
  # /buffer/read does not begin them anew.
  assert meta["total_samples"] == 8 and meta["avg_reward"] == 2.5 / 8


def test_groups_that_teach_nothing_never_leave_and_are_reported(buffer):
  buffer.write(*group("same", (1.0,) * 4))
  assert not buffer.read()["success"]
  buffer.write(*group("good"))
  meta = buffer.read()["data"]["meta_info"]
  assert meta["finished_groups"] == ["same", "good"]
  assert meta["total_samples"] == 8
  stats = buffer.stats()
  assert stats["total_dropped"] == 4 and stats["items"] == 0


@pytest.mark.parametrize("members, used", [(2, False), (3, True)])
def test_times_out_exactly(buffer, members, used):
  """A group of four, of which 0.7 are needed, by a clock that stands."""
  buffer.write(*group("g")[:members])
  buffer.clock.now += 299.0
  assert not buffer.read()["success"]
  buffer.write(item("other", "h"))
  buffer.clock.now += 1.0  # 300 s since the last write, and no more.
  assert not buffer.read()["success"]
  buffer.clock.now += 2**-20
  got = buffer.read()
  assert got["success"] == used
  if used:
    assert len(got["data"]["data"]) == 4  # Padded.
    assert got["data"]["meta_info"]["finished_groups"] == ["g"]
  assert buffer.stats()["waiting_items"] == 1  # Of the other group.


def test_a_write_renews_a_group_s_time(buffer):
  members = group("g")
  for member in members[:3]:
    buffer.write(member)
    buffer.clock.now += 300.0
    assert not buffer.read()["success"]
  buffer.write(members[3])
  assert len(buffer.read()["data"]["data"]) == 4


def test_further_items_of_an_instance_are_its_next_group(buffer):
  buffer.write(*group("g"), *(item(f"n{i}", "g", i % 2) for i in range(3)))
  assert [i["uid"] for i in buffer.read()["data"]["data"]] == [
    "g-0",
    "g-1",
    "g-2",
    "g-3",
  ]
  buffer.write(item("n3", "g", 1.0))
  assert [i["uid"] for i in buffer.read()["data"]["data"]] == [
    "n0",
    "n1",
    "n2",
    "n3",
  ]


def test_groups_may_be_read_raw(buffer):
  buffer.start(group_rules="raw")
  buffer.write(*group("g", (5.0, 5.0, 5.0, -1)))
  got = buffer.read()["data"]["data"]
  assert [i["reward"] for i in got] == [5.0, 5.0, 5.0, -1]
  assert [i["raw_reward"] for i in got] == [5.0, 5.0, 5.0, -1]


def test_a_waiting_read_returns_once_there_is_enough(buffer):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    reading = pool.submit(
      buffer.post, "/buffer/read", {"batch_size": 4, "timeout": "20"}
    )
    time.sleep(0.2)
    buffer.write(*group("g"))
    assert len(reading.result(20).json()["data"]["data"]) == 4


def test_a_start_replaces_what_the_buffer_holds_unless_it_is_kept(buffer):
  buffer.write(*group("g")[:2])
  buffer.start(keep_items=True, group_rules="raw")
  buffer.write(*group("g")[2:])
  assert len(buffer.read()["data"]["data"]) == 4
  buffer.write(*group("h"))
  buffer.start()
  assert not buffer.read()["success"]
  # Its uids are forgotten with it.
  buffer.write(*group("h"))
  assert buffer.read()["success"]


# --- the command --------------------------------------------------------------


@pytest.mark.parametrize(
  "argv, fault",
  [
    (["--host", "0.0.0.0", "--port", "0"], "needs a token"),
    (["--max-items", "0"], "--max-items must be >= 1, got 0"),
    (["--generators", "/nowhere"], "--generators=/nowhere is no folder"),
    (["--token-file", "/nowhere"], "/nowhere: No such file"),
  ],
)
def test_a_wrong_argument_ends_the_command_with_one_line(
  tmp_path, capsys, argv, fault
):
  argv = ["--port", "0", "--dir", str(tmp_path), *argv]
  assert __main__.main(argv) == 2
  output = capsys.readouterr().err
  assert output.startswith("error: ") and fault in output
  assert output.count("\n") == 1


def test_a_folder_belongs_to_one_service(tmp_path, capsys):
  with buffer_services.Running(tmp_path):
    assert __main__.main(["--port", "0", "--dir", str(tmp_path)]) == 2
  assert "is held by another buffer service" in capsys.readouterr().err
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "buffer.db").write_text("no database " * 100)
  argv = ["--port", "0", "--dir", str(tmp_path / "other")]
  assert __main__.main(argv) == 2
  assert "is no database of a buffer service" in capsys.readouterr().err


def test_the_port_is_the_protocol_s_and_the_address_the_loopback_s():
  args = __main__.parser().parse_args([])
  assert (args.port, args.host) == (8889, "127.0.0.1")
  assert http_server.is_loopback(args.host)
