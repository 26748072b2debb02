"""The process of reward `math`: compares expressions, one JSON line each.

Run as a file with the bytes of memory it may take and the import path; needs
nothing of this package. Reads `{"truth", "answer", "precision", "strict"}`,
writes `{"equal", "read_as"}` or `{"error"}`.
"""

import json
import os
import resource
import sys


def main() -> None:
  memory = int(sys.argv[1])
  resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
  here = os.path.dirname(os.path.abspath(__file__))
  # This directory is no place to import from.
  sys.path = [p for p in sys.argv[2:] if os.path.abspath(p or ".") != here]
  out = os.fdopen(os.dup(1), "w", encoding="ascii")
  os.dup2(2, 1)  # Whatever else is printed.
  import math_verify  # pylint: disable=g-import-not-at-top

  def write(value):
    out.write(json.dumps(value) + "\n")
    out.flush()

  write({"ready": True})
  for line in sys.stdin:
    request = json.loads(line)
    # The owner's deadline ends this process; no signals.
    truth: list = []
    for text in (request["truth"], f"${request['truth']}$"):
      truth = truth or math_verify.parse(
        text, fallback_mode="no_fallback", parsing_timeout=None
      )
    if not truth:
      write({"error": "it does not read as mathematics"})
      continue
    answer = math_verify.parse(request["answer"], parsing_timeout=None)
    equal = bool(answer) and math_verify.verify(
      truth,
      answer,
      float_rounding=request["precision"],
      strict=request["strict"],
      timeout_seconds=None,
    )
    read_as = str(answer[-1])[:200] if answer else ""
    write({"equal": bool(equal), "read_as": read_as})


if __name__ == "__main__":
  main()
