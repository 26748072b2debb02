"""A rollout buffer service that is killed and started again, quickly.

As a program it imports the service once and forks it: `start` on a line of
stdin starts one, `kill` ends it with SIGKILL; each is answered by a line.
"""

import os
import pathlib
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


class KilledService:
  """The program, seen from a test."""

  def __init__(self, folder, port, *options):
    self._process = subprocess.Popen(
        [sys.executable, __file__, "--dir", str(folder), "--port", str(port),
         *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # pyformat: disable

  def tell(self, order):
    self._process.stdin.write(order + "\n")
    self._process.stdin.flush()
    answer = self._process.stdout.readline().strip()
    assert answer == order, f"the service's program answered {answer!r}"

  def close(self):
    self._process.stdin.close()
    self._process.wait(30)
    self._process.stdout.close()


def main():
  sys.path.insert(0, str(ROOT))
  import tunix_multi_turn  # pylint: disable=g-import-not-at-top

  tunix_multi_turn.light()
  from tunix.rl.multi_turn.core import connections  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.trajectory_collector.buffer_service import (
    __main__ as service,  # pylint: disable=g-import-not-at-top
  )
  import uvicorn  # pylint: disable=g-import-not-at-top

  del connections, uvicorn  # Imported before the fork, that is all.
  child = 0
  for line in sys.stdin:
    if line.strip() == "start":
      child = os.fork()
      if not child:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os._exit(service.main(sys.argv[1:]))
    elif child:
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      child = 0
    print(line.strip(), flush=True)
  if child:
    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
  main()
