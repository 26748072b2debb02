"""Processes that agree, here threads with one store."""

import threading

from tunix.rl.multi_turn.net import peers as peers_lib


class Store:
  """JAX's coordination service as its client shows it."""

  def __init__(self):
    self._values, self._changed = {}, threading.Condition()
    self.most = 0

  def key_value_set_bytes(self, key, value):
    assert len(value) < 4 << 20
    with self._changed:
      assert key not in self._values, key
      self._values[key] = value
      self.most = max(self.most, len(self._values))
      self._changed.notify_all()

  def blocking_key_value_get_bytes(self, key, timeout_ms):
    with self._changed:
      if not self._changed.wait_for(
        lambda: key in self._values, timeout_ms / 1000
      ):
        raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
      return self._values[key]

  def key_value_dir_get_bytes(self, key):
    with self._changed:
      return [(k, v) for k, v in self._values.items() if k.startswith(key)]

  def key_value_delete(self, key):
    with self._changed:
      del self._values[key]


def run_all(count, work, store=None, deadline_s=20.0):
  """Returns the results or errors of `work(peers)` in several threads."""
  store = store or Store()
  found = [None] * count

  def main(index):
    peers = peers_lib.StorePeers(store, index, count, deadline_s)
    try:
      found[index] = work(peers)
    except Exception as error:  # pylint: disable=broad-except
      found[index] = error

  threads = [threading.Thread(target=main, args=(i,)) for i in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  return found
