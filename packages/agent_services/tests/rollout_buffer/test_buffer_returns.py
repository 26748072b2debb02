"""Accepted items come back as they were sent; a failed answer costs nothing."""

import asyncio
import concurrent.futures
import functools
import itertools
import json
import math
import socket
import threading
import time

from agent_services.rollout_buffer import buffer_app
from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import client
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import store
from agent_services.rollout_buffer import store_work
import buffer_services
import hypothesis
from hypothesis import strategies as st
import pytest

item = buffer_services.item
group = buffer_services.group


def nested(levels):
  """Lists within lists, `levels` of them."""
  return functools.reduce(lambda inner, _: [inner], range(levels - 1), [])


# --- what is accepted can be returned -----------------------------------------


def test_an_item_of_too_many_levels_is_refused_when_it_is_written(buffer):
  most = items.DEEPEST - 2  # Within the item and its extra_info.
  buffer.write(*group("g"))
  for levels in (most + 1, 150, 195, 255, 1023, 200_000):
    body = json.dumps(item("deep", "deep", extra_info={"x": 0}))
    body = body.replace('"x": 0', f'"x": {"[" * levels}{"]" * levels}')
    answer = buffer.post("/buffer/write", body)
    assert answer.status_code == 500, levels
    assert answer.json()["code"] == "invalid_item"
    assert "nests deeper than 128 levels" in answer.json()["detail"]
  for levels in (900, 1000, 1020):  # Lists where an item is expected.
    answer = buffer.post("/buffer/write", "[" * levels + "]" * levels)
    assert answer.status_code == 500, levels
    assert "item must be an object" in answer.json()["detail"], answer.text
  near = item("near", "near", extra_info={"x": nested(most + 1)})
  refusal = buffer.post("/buffer/write", near).json()["detail"]
  assert "nests deeper than 128 levels" in refusal
  deep = [{**one, "extra_info": {"x": nested(most)}} for one in group("most")]
  buffer.write(*deep)
  peeked = buffer.client.get("/buffer/peek?batch_size=9").json()["data"]["data"]
  assert peeked == group("g") + deep
  names = [one["uid"] for one in buffer.read()["data"]["data"]]
  assert names == [one["uid"] for one in group("g") + deep]


@pytest.mark.parametrize(
  "value, fault",
  [
    ("1e400", "item 1: extra_info.x is larger than any float"),
    ("[0.5, [-1e999]]", "item 1: extra_info.x.1.0 is larger than any"),
    ("18446744073709551616", "64-bit"),
    ("-9223372036854775809", "64-bit"),
    ("9" * 5000, "not JSON"),
    ("NaN", "not JSON"),
    ("-Infinity", "not JSON"),
    (r'"\ud800"', "not JSON"),
    (r'{"\udfff": 1}', "not JSON"),
    ('"\x01"', "not JSON"),
    ("\ufeff1", "not JSON"),
  ],
)
def test_values_that_no_encoder_writes_are_refused(buffer, value, fault):
  bodies = [json.dumps(item(f"u{n}", extra_info={"x": 0})) for n in (0, 1)]
  bodies[1] = bodies[1].replace('"x": 0', f'"x": {value}')
  for body in ("\n".join(bodies), f"[{', '.join(bodies)}]"):
    answer = buffer.post("/buffer/write", body)
    assert answer.status_code == 500
    assert fault.removeprefix("item 1: ") in answer.json()["detail"]
  assert buffer.stats()["items"] == 0


def test_a_repeated_key_hides_no_number_that_no_float_holds(buffer):
  one = json.dumps(item("u", extra_info={"l": 2**62, "x": 0}))
  twice = one.replace('"x": 0', '"x": null, "x": 1e400')
  answer = buffer.post("/buffer/write", twice)
  assert answer.status_code == 500
  assert "extra_info.x is larger than any float" in answer.json()["detail"]


_NUMBERS = st.one_of(
  st.integers(-(2**63), 2**64 - 1),
  st.floats(allow_nan=False, allow_infinity=False),
  st.sampled_from([5e-324, -0.0, 1e308, 2**64 - 1, -(2**63)]),
)
_REFUSED = st.sampled_from(
  [math.nan, math.inf, 2**64, -(2**63) - 1, 2**200, "\ud800", nested(300)]
)
_TEXTS = st.one_of(
  st.text(max_size=8),
  st.sampled_from(["\x00", "\x85\u2028", "null", "\U0010ffff"]),
)
_VALUES = st.recursive(
  st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
  lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
  ),
  max_leaves=6,
)
_MINE = st.one_of(
  _VALUES, _VALUES, _REFUSED, st.builds(nested, st.integers(120, 140))
)
_ID = itertools.count()
_ITEMS = st.builds(
  lambda uid, instance_id, reward, **values: item(
    f"{uid}{next(_ID)}" if isinstance(uid, str) else next(_ID),
    instance_id,
    reward,
    **values,
  ),
  uid=st.one_of(_TEXTS, st.just(0)),
  instance_id=st.one_of(_TEXTS.filter(bool), st.integers(0, 9)),
  reward=st.one_of(st.floats(0, 1), st.sampled_from([0, 1, 1e300, 7])),
  extra_info=st.dictionaries(_TEXTS, _MINE, max_size=2),
  mine=_VALUES,
)


def same(one, other):
  """Equality of values and their types; 0.0 is not -0.0."""
  if type(one) is not type(other):
    return False
  if isinstance(one, dict):
    return one.keys() == other.keys() and all(
      same(one[key], other[key]) for key in one
    )
  if isinstance(one, list):
    return len(one) == len(other) and all(map(same, one, other))
  if isinstance(one, float):
    return one == other and math.copysign(1, one) == math.copysign(1, other)
  return one == other


def test_what_is_accepted_is_returned_as_it_was_sent(buffer):
  buffer.start(num_repeat_per_sample=1, group_rules="raw")
  accepted = 0

  @hypothesis.settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(st.lists(_ITEMS, min_size=1, max_size=3), st.booleans())
  def sent_and_read(sent, ascii_only):
    nonlocal accepted
    body = json.dumps(sent, ensure_ascii=ascii_only)
    answer = buffer.post("/buffer/write", body.encode("utf-8", "surrogatepass"))
    if answer.status_code != 200:
      assert answer.json()["code"] == "invalid_item"
      return
    accepted += len(sent)
    for returned, one in zip(buffer.read()["data"]["data"], json.loads(body)):
      one["uid"], one["instance_id"] = str(one["uid"]), str(one["instance_id"])
      assert same(returned.pop("raw_reward"), returned["reward"])
      assert same(returned, one)

  sent_and_read()
  assert accepted > 100


def test_an_item_that_an_earlier_version_took_costs_its_own_group(buffer):
  buffer.write(*group("a"))
  old = group("old")
  old[2]["extra_info"]["x"] = nested(600)
  buffer.put(*old)
  buffer.write(*group("b"))
  got = buffer.read()["data"]
  assert [one["uid"] for one in got["data"]] == [
    one["uid"] for one in group("a") + group("b")
  ]
  assert "old" in got["meta_info"]["finished_groups"]
  assert "nests deeper than 128" in buffer.stats()["errors"][0]


ODD = """
TASK_TYPE = "odd"

def run_rollout(data):
  pass

def get_group_data_meta_info(groups):
  return {"statistics": {1, 2}}

def transform_group(group, task_type):
  name, items = group
  odd = {"nan": float("nan"), "set": {1}, "big": 2 ** 64, "deep": DEEP}
  for item in items:
    if name in ("nan",):
      item["reward"] = odd[name]
    elif name in odd:
      item["mine"] = odd[name]
  return group

DEEP = []
for _ in range(300):
  DEEP = [DEEP]
"""


def test_a_hook_that_returns_no_json_costs_its_group_only(tmp_path):
  (tmp_path / "odd_generator.py").write_text(ODD)
  with buffer_services.Running(tmp_path / "b", generators=[tmp_path]) as odd:
    assert odd.start(task_type="odd").status_code == 200
    for name in ("good", "nan", "set", "big", "deep", "fine"):
      odd.write(*group(name))
    got = odd.read()["data"]
    assert {one["instance_id"] for one in got["data"]} == {"good", "fine"}
    assert got["meta_info"]["total_samples"] == 24  # By the default rule.
    assert len(odd.stats()["errors"]) == 5
    assert odd.stats()["items"] == 0


# --- an answer that is not sent gives its groups back -------------------------


def ask_and_hang_up(buffer, body, received=4096, before=lambda: None):
  """Sends a read, and hangs up after some bytes of its answer.

  Args:
    buffer: A running service.
    body: The read's.
    received: Bytes of the answer.
    before: Called before it hangs up.
  """
  raw = json.dumps(body).encode()
  address = buffer.url.removeprefix("http://").split(":")
  line = socket.socket()
  line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
  line.connect((address[0], int(address[1])))
  with line:
    line.sendall(
      b"POST /get_rollout_data HTTP/1.1\r\nHost: 127.0.0.1\r\n"
      b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)
    )
    size = 0
    while size < received:
      size += len(line.recv(received - size))
    before()


@pytest.mark.parametrize("body", [{}, {"lease_s": 3600}])
def test_a_client_that_leaves_before_the_end_takes_no_groups(buffer, body):
  text = "x" * 4_000_000
  written = [{**one, "text": text} for one in group("a")]
  buffer.write(*written)
  for _ in range(2):
    ask_and_hang_up(buffer, body)
    due = time.monotonic() + 20
    while buffer.stats()["current_size"] < 4:
      assert time.monotonic() < due, "the groups do not return"
      time.sleep(0.01)
  stats = buffer.stats()
  assert (stats["leases"], stats["items"]) == (0, 4)
  got = buffer.read()["data"]["data"]
  assert [one["uid"] for one in got] == [one["uid"] for one in written]
  assert buffer.stats()["items"] == 0


def test_a_final_read_is_done_when_its_answer_has_arrived(buffer):
  buffer.write(*group("a"))
  assert "lease" not in buffer.read()["data"]
  stats = buffer.stats()
  assert (stats["leases"], stats["items"], stats["total_read"]) == (0, 0, 4)
  assert not buffer.service.store.rows("SELECT * FROM leases")


def test_a_final_read_that_is_not_acknowledged_is_broken_off(buffer):
  """The disk fails between the body and its last byte."""
  buffer.write(*group("a"))
  broken = buffer.service.buffer("default")
  acknowledge, broken.acknowledge = (
    broken.acknowledge,
    lambda lease: (_ for _ in ()).throw(store.StoreError("no disk")),
  )
  try:
    with pytest.raises(buffer_services.httpx.RemoteProtocolError):
      buffer.read()
  finally:
    broken.acknowledge = acknowledge
  assert len(buffer.read()["data"]["data"]) == 4


def test_an_answer_that_is_broken_off_leaves_the_lease_to_a_later_one(
  buffer, monkeypatch
):
  text = "x" * 4_000_000
  buffer.write(*({**one, "text": text} for one in group("a")))
  query = dict(lease_s=60, lease="mine")
  ended = threading.Event()
  give_back = buffer_app._Delivery._give_back  # pylint: disable=protected-access

  def observed(delivery):
    give_back(delivery)
    ended.set()

  monkeypatch.setattr(buffer_app._Delivery, "_give_back", observed)
  again = []
  ask_and_hang_up(
    buffer, query, before=lambda: again.append(buffer.read(**query)["data"])
  )
  assert ended.wait(20)
  assert not buffer.read(lease_s=60, lease="another")["success"]
  assert [one["uid"] for one in again[0]["data"]] == [
    one["uid"] for one in group("a")
  ]
  assert buffer.post("/buffer/ack", {"lease": "mine"}).status_code == 200
  # The lease of a read that is made again later under the same id, too.
  buffer.write(*({**one, "text": text} for one in group("b")))
  ended.clear()

  def given_back_and_read_again():
    assert buffer.post("/buffer/release", {"lease": "next"}).is_success
    again.append(buffer.read(lease_s=60, lease="next"))

  ask_and_hang_up(
    buffer, {**query, "lease": "next"}, before=given_back_and_read_again
  )
  assert ended.wait(20) and buffer.stats()["leases"] == 1


def keep_busy(buffer, free):
  """Lets the disk begin no further work until the event is set."""
  busy = threading.Event()
  buffer.service.store.call(lambda db: (busy.set(), free.wait(20)))
  assert busy.wait(20)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("by_client", [False, True])
def test_an_acknowledgement_that_waits_too_long_loses_nothing(
  buffer, monkeypatch, begun, by_client
):
  """The disk is busy before the acknowledgement begins, or in it."""
  buffer.write(*group("a"))
  lent = buffer.service.buffer("default")
  lease = lent.read(lease_s=60).lease
  monkeypatch.setattr(store, "_COMMIT_S", 0.1)
  free = threading.Event()
  acknowledge = store_work.acknowledge
  if begun:
    monkeypatch.setattr(
      store_work,
      "acknowledge",
      lambda *args: lambda db: (free.wait(20), acknowledge(*args)(db)),
    )
  else:
    keep_busy(buffer, free)
  with pytest.raises(TimeoutError):
    lent.acknowledge(lease)
  monkeypatch.undo()
  free.set()
  if by_client:
    assert lent.release(lease) == (0 if begun else 4)
  else:
    buffer.clock.now += 61
  got = buffer.read()["data"]["data"]
  assert [one["uid"] for one in got] == (
    [] if begun else [one["uid"] for one in group("a")]
  )
  assert (buffer.stats()["items"], buffer.stats()["leases"]) == (0, 0)
  assert not buffer.stats()["errors"]
  # The client of an acknowledgement that was committed repeats it.
  answer = buffer.post("/buffer/ack", {"lease": lease})
  assert answer.status_code == (200 if begun else 404)


# --- a lease's id -------------------------------------------------------------


def test_a_read_may_be_repeated_under_the_id_of_its_lease(buffer):
  buffer.write(*group("a"), *group("b"))
  query = dict(batch_size=4, lease_s=60, lease="mine")
  first = buffer.read(**query)["data"]
  rows = "SELECT id, seconds, acknowledged FROM leases"
  assert buffer.service.store.rows(rows) == [("mine", 60.0, 0)]
  buffer.clock.now += 50
  again = buffer.read(**query)["data"]
  assert (again["data"], again["lease"], again["groups"]) == (
    first["data"],
    "mine",
    first["groups"],
  )
  assert again["meta_info"]["finished_groups"] == ["a"]
  assert again["meta_info"]["total_samples"] == 4
  assert buffer.stats()["leased_items"] == 4
  buffer.clock.now += 50  # The repeated read has renewed it.
  assert buffer.post("/buffer/ack", {"lease": "mine"}).status_code == 200
  for path in ("/get_rollout_data", "/b/other/get_rollout_data"):
    buffer.write(*group("c"), path="/b/other/buffer/write")
    used = buffer.post(path, query)
    assert used.status_code == 409 and used.json()["code"] == "lease_used"
  assert buffer.read(lease_s=60, lease="next")["data"]["data"][0]["uid"] == (
    "b-0"
  )


def test_a_lease_s_id_is_one_buffer_s_also_of_reads_at_once(buffer):
  for name in ("left", "right"):
    buffer.start(buffer=name)
    buffer.write(*group(name), path=f"/b/{name}/buffer/write")
  free = threading.Event()
  keep_busy(buffer, free)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    reads = [
      pool.submit(
        buffer.post,
        f"/b/{name}/get_rollout_data",
        {"lease_s": 60, "lease": "mine"},
      )
      for name in ("left", "right")
    ]
    due = time.monotonic() + 20
    while buffer.service.store._queue.qsize() < 2:  # pylint: disable=protected-access
      assert time.monotonic() < due
      time.sleep(0.01)
    free.set()
    answers = {read.result().status_code: read.result() for read in reads}
  assert answers.keys() == {200, 409}
  assert answers[409].json()["code"] == "lease_used"
  sizes = [buffer.stats(name)["current_size"] for name in ("left", "right")]
  assert sorted(sizes) == [0, 4]


@pytest.mark.parametrize(
  "body, fault",
  [
    ({"lease": "x"}, "lease needs lease_s"),
    (
      {"lease": "", "lease_s": 9},
      "lease must have at least 1 characters, got ''",
    ),
    ({"lease": "x" * 65, "lease_s": 9}, "lease must have up to 64 characters"),
    ({"lease": 7, "lease_s": 9}, "lease must be a string, got 7"),
  ],
)
def test_a_wrong_lease_is_named(buffer, body, fault):
  answer = buffer.post("/get_rollout_data", body)
  assert answer.status_code == 422 and fault in answer.json()["detail"]


def test_the_newest_acknowledgements_may_be_repeated(buffer, monkeypatch):
  monkeypatch.setattr(store_work, "_MOST_LEASES", 3)
  answers = {}
  for n in range(6):
    buffer.write(*group(f"g{n}"))
    lease = buffer.read(lease_s=60)["data"]["lease"]
    for _ in range(2):
      answer = buffer.post("/buffer/ack", {"lease": lease})
      assert answer.status_code == 200
    answers[n] = lease
  again = [
    buffer.post("/buffer/ack", {"lease": lease}).status_code
    for lease in answers.values()
  ]
  assert again == [404] * 3 + [200] * 3


def test_the_client_repeats_a_read_whose_answer_was_cut_off(tmp_path):
  """The service answers; a relay between cuts the first answer short."""
  limits = buffer_settings.BufferLimits(group_size=4)
  with buffer_services.Running(tmp_path, limits=limits) as running:
    running.write(*({**one, "text": "x" * 200_000} for one in group("a")))
    port = int(running.url.rpartition(":")[2])
    cuts = [100_000, 0]

    async def relay(reader, writer):
      upstream = await asyncio.open_connection("127.0.0.1", port)

      async def pump(source, sink, cut):
        size = 0
        while data := await source.read(65536):
          size += len(data)
          if cut and size > cut:
            break
          sink.write(data)
          await sink.drain()
        sink.close()

      cut = cuts.pop(0) if cuts else 0
      await asyncio.gather(
        pump(reader, upstream[1], 0),
        pump(upstream[0], writer, cut),
        return_exceptions=True,
      )

    async def read():
      server = await asyncio.start_server(relay, "127.0.0.1", 0)
      async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client.BufferClient(url) as reading:
          lease = await reading.lease(lease_s=600, seconds=20)
          await reading.acknowledge(lease.id)
          return [one.data for g in lease.groups for one in g.records]

    got = asyncio.run(read())
    assert [one["uid"] for one in got] == [one["uid"] for one in group("a")]
    assert not cuts and running.stats()["items"] == 0


def test_items_that_are_given_back_wait_again(buffer):
  buffer.write(*group("a"))
  lent = buffer.service.buffer("default")
  lease = lent.read(lease_s=60).lease
  assert buffer.stats()["waiting_items"] == 0
  assert lent.release(lease) == 4
  assert buffer.stats()["waiting_items"] == 4
