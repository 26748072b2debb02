"""Leases, named buffers, bounds and access of the rollout buffer, over HTTP."""

import asyncio
import json
import socket

from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import buffers
from agent_services.rollout_buffer import items
import buffer_services
import pytest

item = buffer_services.item
group = buffer_services.group


# --- leases -------------------------------------------------------------------


def test_a_lease_ends_acknowledged_or_its_groups_return(buffer):
  buffer.write(*group("a"), *group("b"))
  first = buffer.read(batch_size=4, lease_s=60)["data"]
  second = buffer.read(batch_size=4, lease_s="60")["data"]
  assert not buffer.read()["success"]
  stats = buffer.stats()
  assert (stats["leases"], stats["leased_items"], stats["items"]) == (2, 8, 8)
  for _ in range(2):  # May be repeated.
    answer = buffer.post("/buffer/ack", {"lease": first["lease"]})
    assert answer.status_code == 200 and answer.json()["success"]
  buffer.clock.now += 60
  assert not buffer.read()["success"]
  buffer.clock.now += 2**-20
  again = buffer.read()["data"]
  assert again["data"] == second["data"] and "lease" not in again
  late = buffer.post("/buffer/ack", {"lease": second["lease"]})
  assert late.status_code == 404 and late.json()["code"] == "unknown_lease"
  assert buffer.stats()["items"] == 0


def test_a_leased_read_tells_the_groups_of_one_instance_apart(buffer):
  buffer.write(*group("a"), *group("b"))
  buffer.write(*({**i, "uid": f"{i['uid']}-2"} for i in group("a")))
  first = buffer.read(lease_s=60)["data"]
  numbers = first["groups"]
  apart = {
    n: {i["uid"] for i, m in zip(first["data"], numbers) if m == n}
    for n in numbers
  }
  assert sorted(map(sorted, apart.values())) == [
    [f"a-{i}" for i in range(4)],
    [f"a-{i}-2" for i in range(4)],
    [f"b-{i}" for i in range(4)],
  ]
  buffer.clock.now += 61
  assert buffer.read(lease_s=60)["data"]["groups"] == numbers
  buffer.clock.now += 61
  assert "groups" not in buffer.read()["data"]  # The protocol's answer.


def test_a_lease_is_given_back_in_its_old_place(buffer):
  buffer.write(*group("a"))
  lease = buffer.read(lease_s=60)["data"]["lease"]
  buffer.write(*group("b"))
  assert buffer.post("/buffer/release", {"lease": lease}).status_code == 200
  assert buffer.post("/buffer/release", {"lease": lease}).status_code == 404
  again = buffer.read()["data"]["data"]
  assert [i["uid"][0] for i in again] == list("aaaabbbb")


@pytest.mark.parametrize(
  "path, body, fault",
  [
    ("/get_rollout_data", {"lease_s": 0}, "lease_s must be > 0, got 0"),
    ("/get_rollout_data", {"lease_s": 1e5}, "lease_s=100000 must be <= 86400"),
    ("/get_rollout_data", {"batch_size": "x"}, "batch_size must be a whole"),
    ("/get_rollout_data", {"batch_size": -2}, "batch_size must be >= -1"),
    ("/buffer/read", {"timeout": 1e3}, "timeout=1000 must be <= 600"),
    ("/buffer/ack", {}, "lease is missing"),
    ("/buffer/known", {"uids": "a"}, "uids must be a list"),
    ("/get_rollout_data", [1], "the body must be an object, got a list"),
  ],
)
def test_wrong_reads_name_their_key(buffer, path, body, fault):
  answer = buffer.post(path, body)
  assert answer.status_code == 422 and fault in answer.json()["detail"]


def test_unread_paths_and_bodies_have_their_errors(buffer):
  assert buffer.post("/get_rollout_data", b"{").status_code == 400
  assert buffer.client.get("/nowhere").json()["code"] == "not_found"
  wrong = buffer.client.get("/buffer/write")
  assert wrong.status_code == 405
  assert wrong.json()["code"] == "method_not_allowed"
  unknown = buffer.post("/b/none/get_rollout_data")
  assert unknown.status_code == 404
  assert "no buffer is called 'none'" in unknown.json()["detail"]


# --- several buffers, bounds, access ------------------------------------------


def test_buffers_of_several_names_do_not_know_each_other(buffer):
  buffer.start(buffer="left", num_repeat_per_sample=2)
  assert (
    buffer.post(
      "/b/right/start_rollout",
      {"task_type": "external", "num_repeat_per_sample": 2},
    ).status_code
    == 200
  )
  pair = lambda name: [item("u0", name, 0.0), item("u1", name, 1.0)]
  buffer.write(*pair("r"), path="/b/right/buffer/write")
  for one in pair("l"):
    buffer.write({**one, "buffer": "left"})
  assert {"default", "left", "right"} <= set(
    buffer.client.get("/buffers").json()["buffers"]
  )
  assert not buffer.read()["success"]
  left_rows = buffer.read(buffer="left")["data"]["data"]
  right = buffer.post("/b/right/get_rollout_data").json()["data"]["data"]
  assert {i["instance_id"] for i in left_rows} == {"l"}
  assert {i["instance_id"] for i in right} == {"r"}
  lines = buffer.client.get("/metrics").text
  assert 'buffer_held_items{buffer="left"} 0' in lines
  assert 'buffer_items_total{buffer="right",fate="written"} 2.0' in lines


@pytest.mark.parametrize(
  "limit, holds", [({"max_items": 3}, 3), ({"max_gib": 1e-5}, 5)]
)
def test_a_full_buffer_answers_429_until_it_is_read(tmp_path, limit, holds):
  limits = buffer_settings.BufferLimits(group_size=2, **limit)
  with buffer_services.Running(tmp_path, limits=limits) as full:
    text = "x" * 1900
    for number in range(holds):
      full.write(item(number, number // 2, number % 2, text=text))
    refused = full.post("/buffer/write", item("more", text=text))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["code"] == "full"
    assert "read from it, or write again later" in refused.json()["detail"]
    assert full.stats()["refused_writes"] == 1
    assert full.read()["success"]
    full.write(item("more"))


def test_a_read_is_bounded_in_size_and_the_next_goes_on(tmp_path):
  limits = buffer_settings.BufferLimits(group_size=2, read_mib=1)
  with buffer_services.Running(tmp_path, limits=limits) as bounded:
    for name in "abc":
      for i in range(2):
        bounded.write(item(f"{name}{i}", name, i, text="x" * 300_000))
    sizes = [len(bounded.read()["data"]["data"]) for _ in range(3)]
    assert sizes == [2, 2, 2]


def test_a_preview_is_bounded_in_size(tmp_path):
  with buffer_services.Running(
    tmp_path, limits=buffer_settings.BufferLimits(group_size=4, read_mib=1)
  ) as bounded:
    for one in group("a"):
      bounded.write({**one, "text": "x" * 400_000})
    shown = bounded.client.get("/buffer/peek?batch_size=4").json()["data"]
    assert [one["uid"] for one in shown["data"]] == ["a-0", "a-1"]
    bounded.start(keep_items=False)
    for one in group("b"):
      bounded.write({**one, "text": "x" * 1_100_000})
    shown = bounded.client.get("/buffer/peek?batch_size=4").json()["data"]
    assert [one["uid"] for one in shown["data"]] == ["b-0"]


@pytest.mark.parametrize("path", ["/buffer/write", "/buffer/stats"])
@pytest.mark.parametrize(
  "part, fits, beyond", [("[]", 1_700_000, 1_800_000), ("1", 2_100_000, None)]
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
  buffer, path, part, fits, beyond
):
  method = "GET" if path.endswith("stats") else "POST"
  ask = lambda n: buffer.client.request(
    method, path, content="[" + ",".join([part] * n) + "]"
  )
  assert ask(fits).json()["code"] in ("invalid_item", "invalid_request")
  if beyond is not None:
    refused = ask(beyond)
    assert refused.status_code == 413
    assert "more than 2,000,000 lists and objects" in refused.json()["detail"]


def test_the_screens_of_a_desktop_are_bounded_together(tmp_path):
  rows = tmp_path / "in.jsonl"
  rows.write_text('{"instance_id": "a", "family": "click-button"}\n\n')
  payload = dict(
    task_type="desktop",
    num_repeat_per_sample=1,
    input_file=str(rows),
    width=1000,
    height="1000",
    num_process=3,
    num_epoch=2,
    remote_engine_url="http://127.0.0.1:9",
  )
  limits = buffer_settings.BufferLimits(max_megapixels=2)
  with buffer_services.Running(tmp_path / "b", limits=limits) as bounded:
    refused = bounded.post("/start_rollout", {**payload, "num_epoch": 3})
    assert refused.status_code == 422
    for words in (
      "width=1000 and height=1000 of 3 episodes at a time (num_process=3)",
      "--max-megapixels=2",
    ):
      assert words in refused.json()["detail"]
    for fits in ({}, {"num_epoch": 3, "num_process": 2}):  # Two screens.
      assert bounded.post("/start_rollout", {**payload, **fits}).is_success
    default = {k: v for k, v in payload.items() if k not in ("width", "height")}
    rows.write_text('{"instance_id": "a"}\n' * 200)
    many = bounded.post("/start_rollout", {**default, "num_process": 200})
    assert "width=128 and height=96 of 200" in many.json()["detail"]


def test_a_token_is_demanded_on_every_route_but_health(tmp_path):
  with buffer_services.Running(tmp_path, token="secret") as guarded:
    assert guarded.client.get("/health").status_code == 200
    for method, path in (
      ("POST", "/buffer/write"),
      ("POST", "/get_rollout_data"),
      ("POST", "/start_rollout"),
      ("GET", "/buffer/stats"),
      ("GET", "/metrics"),
      ("POST", "/b/x/buffer/ack"),
    ):
      for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = guarded.client.request(method, path, headers=headers)
        assert answer.status_code == 401, path
    right = {"authorization": "Bearer secret"}
    assert guarded.client.get("/buffer/stats", headers=right).is_success


@pytest.mark.parametrize(
  "headers", [{"origin": "http://evil.example"}, {"host": "evil.example"}]
)
def test_web_pages_are_not_answered(buffer, headers):
  answer = buffer.client.get("/buffer/stats", headers=headers)
  assert answer.status_code == 403 and answer.json()["code"] == "cross_site"


@pytest.mark.slow
def test_a_slow_reader_does_not_hold_up_512_writers(buffer):
  buffer.start(num_repeat_per_sample=2, group_rules="raw")
  for number in range(60):
    buffer.write(item(f"s{number}", f"s{number // 2}", 0.0, text="x" * 200_000))
  address = buffer.url.removeprefix("http://").split(":")
  with socket.create_connection((address[0], int(address[1]))) as slow:
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(
      b"POST /get_rollout_data HTTP/1.1\r\nHost: 127.0.0.1\r\n"
      b"Content-Length: 2\r\n\r\n{}"
    )
    assert slow.recv(100)  # It is answered, and reads no further.

    async def write(number):
      body = json.dumps(item(f"w{number}", f"w{number // 2}")).encode()
      reader, writer = await asyncio.open_connection(*address)
      writer.write(
        b"POST /buffer/write HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
      )
      writer.write(body)
      answer = await reader.read()
      writer.close()
      return answer.split()[1]

    async def write_all():
      return set(await asyncio.gather(*map(write, range(512))))

    assert asyncio.run(write_all()) == {b"200"}
    got = []
    while (answer := buffer.read())["success"]:
      got += [i["uid"] for i in answer["data"]["data"]]
  assert sorted(got) == sorted(f"w{n}" for n in range(512))


# --- what is dropped ----------------------------------------------------------


COUNTING = """
TASK_TYPE = "counting"

def run_rollout(data):
  pass

def get_group_data_meta_info(groups):
  return {"seen": sorted(i["uid"] for items in groups.values() for i in items)}
"""


def rows_of(running, table):
  return running.service.store.rows(f"SELECT COUNT(*) FROM {table}")[0][0]


def same(name):
  """A group that teaches nothing, and is dropped."""
  return group(name, (1.0, 1.0))


def test_contents_of_dropped_groups_leave_the_disk_before_anybody_reads(
  tmp_path,
):
  limits = buffer_settings.BufferLimits(
    group_size=2, max_items=20, max_gib=1e-5, remembered_uids=30
  )
  with buffer_services.Running(tmp_path, limits=limits) as bounded:
    for number in range(100):
      bounded.write(*same(f"g{number}"))
      bounded.service.sweep()
    stats = bounded.stats()
    assert stats["total_dropped"] == 200
    assert (stats["items"], stats["bytes"]) == (0, 0)
    assert rows_of(bounded, "payloads") == 0
    # Nor do their numbers grow without end.
    assert rows_of(bounded, "items") <= 40
    bounded.write(*group("good", (0.0, 1.0)))
    meta = bounded.read()["data"]["meta_info"]
    assert meta["total_samples"] == 30  # The newest ones.
    assert len(meta["finished_groups"]) == 31
    assert meta["finished_groups"][-2:] == ["g99", "good"]


@pytest.mark.slow
def test_statistics_of_a_hook_do_without_what_another_read_has_taken(tmp_path):
  (tmp_path / "counting_generator.py").write_text(COUNTING)
  with buffer_services.Running(
    tmp_path / "b", generators=[tmp_path]
  ) as counting:
    counting.start(task_type="counting", num_repeat_per_sample=2)
    counting.write(*group("a", (0.0, 1.0)))
    assert counting.post("/buffer/read", {"timeout": 1}).json()["success"]
    counting.write(*group("b", (0.0, 1.0)))
    meta = counting.read()["data"]["meta_info"]
    assert meta["seen"] == ["b-0", "b-1"]
    assert counting.stats()["errors"] == []


def test_a_step_that_a_buffer_cannot_hold_is_refused_with_both_numbers(
  tmp_path,
):
  """Else its trainer would wait without end."""
  limits = buffer_settings.BufferLimits(group_size=2, max_items=24)
  with buffer_services.Running(tmp_path / "buffer", limits=limits) as running:
    payload = {
      "task_type": "external",
      "num_repeat_per_sample": 5,
      "rollout_batch_size": 5,
    }
    refused = running.post("/start_rollout", payload)
    assert refused.status_code == 422
    assert "rollout_batch_size=5 groups of" in refused.json()["detail"]
    assert "are 25 items, and --max-items=24" in refused.json()["detail"]
    for path in ("/get_rollout_data", "/buffer/read"):
      answer = running.post(path, {"batch_size": 25})
      assert answer.status_code == 422
      assert "batch_size=25 exceeds --max-items=24" in answer.json()["detail"]
    fits = {**payload, "num_repeat_per_sample": 4}
    assert running.post("/start_rollout", fits).status_code == 200


def test_a_write_under_way_holds_its_room(tmp_path):
  limits = buffer_settings.BufferLimits(group_size=2, max_items=3)
  written = [
    items.Item("default", f"u{n}", "i", 0.0, b"{}", 0) for n in range(2)
  ]
  with buffer_services.Running(tmp_path, limits=limits) as running:
    buffer = running.service.buffer("default")
    with buffer.reserving(written):
      with pytest.raises(buffers.BufferFull), buffer.reserving(written):
        pass
    with buffer.reserving(written):
      pass
