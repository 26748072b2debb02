"""The process in which a generator runs.

Its first line of stdin is `{"file", "payload"}`; then it imports the file and
calls `run_rollout(payload)`. It ends, with every process of its group, when its
stdin ends: so it never outlives the service, however that ends.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import signal
import sys
import threading
import traceback


def _end_with_parent() -> None:
  # Not by `sys.stdin`: a thread that holds its lock aborts the interpreter's
  # end. It is empty once the service ends.
  while os.read(0, 4096):
    pass
  os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> int:
  order = json.loads(sys.stdin.buffer.readline())
  threading.Thread(target=_end_with_parent, daemon=True).start()
  path = pathlib.Path(order["file"])
  sys.path.insert(0, str(path.parent))
  from tunix.rl.multi_turn.net import http  # pylint: disable=g-import-not-at-top

  from agent_services.rollout_buffer import generating  # pylint: disable=g-import-not-at-top
  from agent_services.rollout_buffer import plugins  # pylint: disable=g-import-not-at-top

  try:
    result = plugins.load(path).run_rollout(order["payload"])
    if inspect.isawaitable(result):
      import asyncio  # pylint: disable=g-import-not-at-top

      async def run() -> None:
        await result

      asyncio.run(run())
  except Exception as error:  # pylint: disable=broad-except
    first: Exception = error
    while isinstance(first, ExceptionGroup):
      first = first.exceptions[0]
    if not getattr(first, "is_for_users", False):
      text = "".join(traceback.format_exception(error))
      generating.say(text, private=generating.quotes_server(error))
    if isinstance(first, http.CallError):
      generating.say(first.summary)
    else:
      generating.say(f"{type(first).__name__}: {first}")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
