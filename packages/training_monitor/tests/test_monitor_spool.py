"""A spool: its log, its reader, and the state of rows between two starts."""

import collections
import contextlib
import errno
import json
import os
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import msgpack
import numpy as np
import observed_run
import pytest
from trainer_core import events
from trainer_core import images as images_lib
from training_monitor.client import event_codec
from training_monitor.client import frames as frames_lib
from training_monitor.client import plain_json
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_reader
from training_monitor.client.rows import run_rows


@pytest.fixture(autouse=True)
def _many_segments(monkeypatch):
  monkeypatch.setattr(spool_lib, "_MOST_SEGMENT", 2000)


def made(folder, bodies, name="x"):
  """A closed spool with these records."""
  spool = spool_lib.Spool(folder / f"{name}.spool", "t")
  for body in bodies:
    spool.append([(spool_lib.PART, body)])
  spool.close()
  return spool


def frames_of(spool, ended=True):
  return frames_lib.FrameReader(
    spool.path, spool.header.mark, ended=lambda: ended
  )


def rest_of(reader):
  return [frame.body for frame in iter(reader.next, None)]


def bodies(count, seed=0, size=700):
  rng = np.random.default_rng(seed)
  return [rng.bytes(int(rng.integers(0, size))) for _ in range(count)]


# --- the log ------------------------------------------------------------------


def test_records_come_back_in_order_from_many_segments(tmp_path):
  records = bodies(40)
  spool = made(tmp_path, records)
  assert len(frames_lib.segments(spool.path)) > 5
  reader = frames_of(spool)
  assert rest_of(reader) == records and not reader.damaged
  again = spool_lib.Spool(spool.path, "t")
  assert again.seq == 40 and again.header == spool.header
  again.append([(spool_lib.PART, b"more")])
  assert rest_of(reader) == [b"more"]
  again.close()
  reader.close()


@pytest.mark.parametrize("live", [True, False])
def test_a_log_cut_anywhere_in_its_last_frame_loses_that_alone(tmp_path, live):
  records = bodies(5, size=300)
  spool = made(tmp_path, records)
  _, last = frames_lib.segments(spool.path)[-1]
  content = last.read_bytes()
  begins = content.rindex(spool.header.mark)
  for size in range(begins, len(content)):
    last.write_bytes(content[:size])
    reader = frames_of(spool, ended=not live)
    assert rest_of(reader) == records[:4]
    # A live writer finishes the frame, so it is not damage.
    assert reader.damaged == int(not live and size > begins)
    assert spool_lib.last_frame(spool.path, spool.header) == 4
    last.write_bytes(content)
    if live:
      assert rest_of(reader) == records[4:]
    reader.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_damage_costs_the_frames_that_it_hits(
  tmp_path_factory, seed, hits, cut
):
  folder = tmp_path_factory.mktemp("spool")
  rng = np.random.default_rng(seed)
  records = bodies(12, seed)
  spool = made(folder, records)
  hit = set()
  for _ in range(hits):
    segments = frames_lib.segments(spool.path)
    first, path = segments[int(rng.integers(len(segments)))]
    content = bytearray(path.read_bytes())
    at = int(rng.integers(len(content)))
    ends = np.cumsum(
      [frames_lib.size_of(body) for body in records[first - 1 :]]
    )
    size = int(rng.integers(1, 30))
    for offset in range(at, min(at + size, len(content))):
      content[offset] ^= 0xFF
      hit.add(first - 1 + int(np.searchsorted(ends, offset, "right")))
    path.write_bytes(content)
  if cut:  # A whole segment is gone.
    segments = frames_lib.segments(spool.path)
    first, path = segments[int(rng.integers(len(segments)))]
    after = [f for f, _ in segments if f > first] or [len(records) + 1]
    hit |= set(range(first - 1, after[0] - 1))
    path.unlink()
  reader = frames_of(spool)
  unhit = [body for n, body in enumerate(records) if n not in hit]
  read = rest_of(reader)
  assert collections.Counter(unhit) - collections.Counter(read) == {}
  assert set(read) <= set(records)
  assert [b for b in read if b in unhit] == unhit
  last = max((n for n in range(12) if n not in hit), default=-1)
  if not cut and frames_lib.segments(spool.path)[0][0] == 1:
    assert reader.damaged >= len([n for n in hit if n < last]) - 2 * hits
  reader.close()


def test_a_record_that_quotes_the_log_is_no_frame(tmp_path):
  """A record's bytes are not searched for frames of another log."""
  other = made(tmp_path, [b"hello"], name="other")
  ((_, path),) = frames_lib.segments(other.path)
  quoting = made(tmp_path, [b"a" + path.read_bytes() * 3, b"b"])
  ((_, path),) = frames_lib.segments(quoting.path)
  content = bytearray(path.read_bytes())
  content[0] ^= 0xFF  # Of a mark by chance: any fixed byte may be the one.
  path.write_bytes(content)
  reader = frames_of(quoting)
  assert rest_of(reader) == [b"b"] and reader.damaged == 1
  reader.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_a_disk_that_is_full_now_and_then_repeats_and_loses_nothing(
  tmp_path_factory, seed, stays
):
  """A write stops anywhere; the torn frame may be impossible to cut off."""
  folder = tmp_path_factory.mktemp("spool")
  rng = np.random.default_rng(seed)
  waiting = [(spool_lib.PART, body) for body in bodies(30, seed)]
  records = [body for _, body in waiting]
  spool = spool_lib.Spool(folder / "x.spool", "t")
  reader = frames_of(spool, ended=False)
  real, real_cut = os.write, os.ftruncate
  room = [0]

  def write(file, data):
    if not room[0]:
      raise OSError(errno.ENOSPC, "no space left")
    size = real(file, data[: room[0]])
    room[0] -= size
    return size

  def cut_off(file, size):
    if stays:
      raise OSError(errno.EIO, "the disk fails")
    real_cut(file, size)

  read = []
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(spool_lib.os, "write", write)
    patched.setattr(spool_lib.os, "ftruncate", cut_off)
    while waiting:
      room[0] = int(rng.integers(0, 3000))
      try:
        del waiting[: spool.append(waiting[: int(rng.integers(1, 8))])]
      except OSError as error:
        assert error.errno == errno.ENOSPC
      read += rest_of(reader)
  assert read == records and not reader.damaged
  assert rest_of(frames_of(spool)) == records
  spool.close()
  reader.close()


def test_nothing_goes_in_beyond_the_bound(tmp_path):
  spool = spool_lib.Spool(tmp_path / "x.spool", "t", max_bytes=5000)
  record = (spool_lib.PART, bytes(1000))
  assert spool.append([record] * 9) == 4
  with pytest.raises(spool_lib.SpoolFull):
    spool.append([record])
  with pytest.raises(spool_lib.SpoolFull):
    spool.keep_image("a" * 64, bytes(10))
  assert spool.bytes <= 5000
  ((_, path),) = frames_lib.segments(spool.path)[:1]
  path.unlink()  # The reader frees room by deleting segments.
  time.sleep(0.05)  # Measuring takes a tenth of the time at most.
  assert spool.append([record]) == 1
  assert spool.bytes <= 5000
  spool.close()


# --- the reader ---------------------------------------------------------------


def reader_of(spool, ended=True, **options):
  counters = collections.Counter()
  reader = spool_reader.SpoolReader(
    spool.path,
    spool.header,
    ended=lambda: ended,
    counters=counters,
    complain=lambda what, message: None,
    **options,
  )
  return reader, counters


def parts(count):
  return [msgpack.packb([[], b"%d" % n]) for n in range(count)]


def test_screenshots_may_go_while_the_bytes_are_counted(tmp_path, monkeypatch):
  """The uploader, another process, deletes what the server has."""
  spool = spool_lib.Spool(tmp_path / "x.spool", "t")
  for name in "abc":
    spool.keep_image(name * 64, bytes(1000))
  scandir = os.scandir

  @contextlib.contextmanager
  def deleted_after_the_listing(folder):
    with scandir(folder) as entries:
      listed = list(entries)
    for name in os.listdir(folder):
      if name.startswith("b"):
        os.unlink(os.path.join(folder, name))
    yield listed

  monkeypatch.setattr(spool_lib.os, "scandir", deleted_after_the_listing)
  spool._measure_at = 0.0
  spool.measure()
  assert spool.bytes == 2000
  spool.close()


def test_what_is_acknowledged_is_forgotten_and_the_rest_comes_again(tmp_path):
  spool = made(tmp_path, parts(300))
  sent = []
  while True:
    reader, _ = reader_of(spool)
    entries = reader.entries(100)[:7]
    if not entries:
      break
    sent += [(e.seq, e.body) for e in entries[:5]]
    reader.remove_through(entries[min(4, len(entries) - 1)].seq)
    # Killed: neither closed nor asked.
  assert sent == [(n + 1, b"%d" % n) for n in range(300)]
  assert len(frames_lib.segments(spool.path)) == 1
  reader.close()
  assert not spool.path.exists()


def test_an_acknowledgement_that_the_disk_has_lost_repeats(tmp_path):
  """The server knows which it has."""
  spool = made(tmp_path, parts(9))
  reader, _ = reader_of(spool)
  reader.entries(1000)
  reader.remove_through(5)
  (spool.path / spool_lib.ACK).write_bytes(b"\0" * 12)
  again, _ = reader_of(spool)
  assert [e.seq for e in again.entries(1000)] == [*range(1, 10)]
  again.remove_through(9)
  assert spool_lib.read_ack(spool.path) == 9


def test_what_is_refused_stays_for_whoever_looks(tmp_path):
  spool = made(tmp_path, parts(3))
  reader, _ = reader_of(spool)
  for entry in reader.entries(1000):
    reader.bury(entry, f"no {entry.seq}")
  with open(spool.path / spool_lib.DEAD, "ab") as file:
    file.write(b'{"seq": 1, "bo')  # Killed while it was put aside again.
  reader.close()
  assert spool_lib.dead(spool.path) == [
    (n, f"{n - 1}", f"no {n}") for n in (1, 2, 3)
  ]
  assert not frames_lib.segments(spool.path)
  own = tmp_path / "own.spool"
  assert list(spool_lib.claim_orphans(tmp_path, "t", own)) == []
  waiting = spool_lib.contents(spool.path)
  assert (waiting.records, waiting.images, len(waiting.dead)) == (0, 0, 3)


# --- rows that are made again -------------------------------------------------


@pytest.fixture(name="run", scope="module")
def _run():
  """(records of a run, the entries that they become, its facts)."""
  store, emitted = images_lib.ImageStore(), []
  observed_run.play(emitted.append, store, steps=4)
  records = [event_codec.dump(event) for event in emitted]
  rows = run_rows.RunRows(run_rows.RunFacts(**observed_run.FACTS))
  return records, [written(rows, record) for record in records]


def written(rows, record):
  part = rows.rows(event_codec.load(record))
  return None if part is None else (plain_json.dumps(part.part), [*part.images])


def test_rows_go_on_from_any_state_as_if_nothing_had_been(run):
  records, expected = run
  rows = run_rows.RunRows(run_rows.RunFacts(**observed_run.FACTS))
  for number, record in enumerate(records):
    state = event_codec.unpack(event_codec.pack(rows.state()))
    rows = run_rows.RunRows(run_rows.RunFacts(**observed_run.FACTS))
    rows.restore(state)
    assert written(rows, record) == expected[number], number


@pytest.mark.parametrize("seed", range(3))
def test_an_uploader_that_is_killed_makes_the_same_entries(tmp_path, run, seed):
  records, expected = run
  rng = np.random.default_rng(seed)
  spool = spool_lib.Spool(
    tmp_path / "x.spool", "t", run=json.loads(json.dumps(observed_run.FACTS))
  )
  waiting = list(records)
  by_seq, starts = {}, 0
  reader, counters = reader_of(spool, ended=False)
  while waiting or not reader.empty or reader.acked < len(records):
    for _ in range(int(rng.integers(0, 5))):
      if waiting:
        spool.append([(spool_lib.EVENT, waiting.pop(0))])
    entries = reader.entries(int(rng.integers(1, 100_000)))
    for entry in entries:
      # A number stands for the same entry, however often it is made.
      first_entry = by_seq.setdefault(entry.seq, (entry.body, entry.images))
      assert first_entry == (entry.body, entry.images)
    if entries and rng.random() < 0.5:
      reader.remove_through(entries[int(rng.integers(len(entries)))].seq)
    if rng.random() < 0.2:
      starts += 1
      reader, counters = reader_of(spool, ended=False)
  assert starts > 10 and not +counters
  assert by_seq == {
    n: entry for n, entry in enumerate(expected, 1) if entry is not None
  }
  assert len(frames_lib.segments(spool.path)) <= 2
  spool.close()


def test_a_state_that_is_damaged_is_reported_and_the_rest_goes_on(
  tmp_path, run
):
  records, _ = run
  spool = spool_lib.Spool(tmp_path / "x.spool", "t", run=observed_run.FACTS)
  for record in records:
    spool.append([(spool_lib.EVENT, record)])
  spool.close()
  reader, _ = reader_of(spool)
  while reader.acked < 100:
    reader.remove_through(reader.entries(1000)[-1].seq)
  (state_file, *_) = sorted(spool.path.glob("*.state"))
  state_file.write_bytes(b"\xc1")
  reader, counters = reader_of(spool)
  assert counters["damaged"] == 1
  while entries := reader.entries(1 << 20):
    assert all(isinstance(json.loads(e.body), dict) for e in entries)
    reader.remove_through(entries[-1].seq)
  assert reader.acked == len(records) and not counters["failed"]


def test_an_evaluation_under_another_name_joins_the_row_of_its_step():
  """Also where its own start and end were told to another process."""
  rows = run_rows.RunRows(run_rows.RunFacts(**observed_run.FACTS))
  evals = []
  for event in (
    events.EvalStarted("step_4", "sampled", 8, 4),
    events.EvalFinished("step_4", {"success_rate": 0.5}),
    events.EvalFinished("final", {"success_rate": 0.5}, step=4),
  ):
    event = event_codec.load(event_codec.dump(event))
    evals.append(rows.rows(event).part["evals"][0])
  assert len({row["client_id"] for row in evals}) == 1
  assert set(evals[-1]["metrics_json"]) == {"step_4", "final"}
  again = run_rows.RunRows(run_rows.RunFacts(**observed_run.FACTS))
  (alone,) = again.rows(event).part["evals"]
  assert alone["client_id"] == evals[0]["client_id"]
