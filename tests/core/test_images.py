"""Screenshots by content: always readable, never written by `put`."""

import threading

import numpy as np
import pytest
from tunix.rl.multi_turn.core import images

ONE = 8 * 8 * 3  # Bytes of a picture.


def picture(value):
  return np.full((8, 8, 3), value, np.uint8)


def test_equal_screenshots_are_kept_once():
  store = images.ImageStore()
  first, again = store.put(picture(1)), store.put(picture(1))
  assert first == again and len(store) == 1 and store.nbytes == ONE
  assert not store.get(first).flags.writeable


def test_without_a_directory_the_oldest_are_forgotten():
  store = images.ImageStore(capacity_bytes=2 * ONE)
  refs = [store.put(picture(i)) for i in range(3)]
  assert refs[0] not in store and refs[1] in store and refs[2] in store
  with pytest.raises(KeyError, match="capacity"):
    store.get(refs[0])


def test_what_falls_out_of_memory_is_read_back(tmp_path):
  store = images.ImageStore(tmp_path, capacity_bytes=2 * ONE)
  refs = [store.put(picture(i)) for i in range(6)]
  assert store.flush(20)
  assert store.nbytes <= 2 * ONE
  for i, ref in enumerate(refs):
    np.testing.assert_array_equal(store.get(ref), picture(i))
  assert store.flush(20)
  assert store.nbytes <= 2 * ONE and store.write_failures == 0


def test_put_does_not_write_and_an_image_can_be_read_while_it_is_written(
  tmp_path,
):
  go_on, writers = threading.Event(), []

  class SlowDisk(images.ImageStore):
    def _write(self, path, pixels):
      writers.append(threading.current_thread())
      go_on.wait(20)
      super()._write(path, pixels)

  store = SlowDisk(tmp_path, capacity_bytes=ONE)
  refs = [store.put(picture(i)) for i in range(3)]
  assert not store.flush(0.05)
  for i, ref in enumerate(refs):
    assert ref in store
    np.testing.assert_array_equal(store.get(ref), picture(i))
  go_on.set()
  assert store.flush(20)
  assert threading.current_thread() not in writers
  assert store.nbytes == ONE
  for i, ref in enumerate(refs):
    np.testing.assert_array_equal(store.get(ref), picture(i))


def test_a_disk_error_loses_no_image_and_reaches_no_caller(tmp_path, caplog):
  directory = tmp_path / "cache"
  directory.write_text("in the way")
  store = images.ImageStore(directory, capacity_bytes=ONE)
  refs = []
  for i in range(4):
    refs.append(store.put(picture(i)))
    assert store.flush(20)
  assert store.write_failures == 3
  assert caplog.text.count("cannot be written") == 1
  for i, ref in enumerate(refs):
    np.testing.assert_array_equal(store.get(ref), picture(i))
  directory.unlink()
  refs.append(store.put(picture(4)))  # Tries again.
  assert store.flush(20)
  assert store.nbytes == ONE and store.write_failures == 3
  for i, ref in enumerate(refs):
    np.testing.assert_array_equal(store.get(ref), picture(i))


def test_a_thread_that_cannot_start_costs_memory_only(tmp_path, monkeypatch):
  store = images.ImageStore(tmp_path, capacity_bytes=ONE)
  with monkeypatch.context() as patch:

    def start(self):
      raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)
    refs = [store.put(picture(i)) for i in range(3)]
    assert store.write_failures == 2 and store.flush(0)
  refs.append(store.put(picture(3)))
  assert store.flush(20) and store.nbytes == ONE
  for i, ref in enumerate(refs):
    np.testing.assert_array_equal(store.get(ref), picture(i))


def test_a_damaged_file_is_named_and_never_shown(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)
  store = images.ImageStore(tmp_path, capacity_bytes=1)
  ref = store.put(pixels)
  store.put(pixels + 1)  # The first one has to go.
  assert store.flush(30)
  path = next(p for p in tmp_path.iterdir() if ref.sha256 in p.name)
  data = path.read_bytes()
  for place in range(0, len(data), 7):
    path.write_bytes(
      data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :]
    )
    try:
      image = images.ImageStore(tmp_path).get(ref)
      np.testing.assert_array_equal(image, pixels)
    except ValueError as error:
      assert str(path) in str(error) and "delete it" in str(error)
  for length in (0, 5, len(data) // 2):
    path.write_bytes(data[:length])
    with pytest.raises(ValueError, match="is damaged"):
      images.ImageStore(tmp_path).get(ref)


def test_a_file_has_its_name_once_it_is_on_the_disk(tmp_path, monkeypatch):
  synced = set()
  monkeypatch.setattr(
    images.durable, "sync", lambda path: synced.add(path.stat().st_ino)
  )
  store = images.ImageStore(tmp_path, capacity_bytes=100)
  for value in range(5):
    store.put(picture(value))
  assert store.flush(30)
  files = list(tmp_path.iterdir())
  assert files and {f.stat().st_ino for f in files} <= synced
