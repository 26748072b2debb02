"""Runs programs in forks of an interpreter that has imported google-tunix.

That import takes seconds; the rest of a program's modules is its own, so a
program can check which of them it loads.
"""

import atexit
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

_MOTHER = """
import gc, json, os, signal, sys, traceback
try:
  import tunix.rl
except ImportError:  # A package is tested alone.
  pass
gc.freeze()
def run(asked):
  for number, name in enumerate(("in", "out", "err")):
    path = asked[name]
    flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
    os.dup2(os.open(path, flags), number)
  os.environ.clear()
  os.environ.update(asked["env"])
  os.chdir(asked["cwd"])
  sys.argv = ["-c", *asked["argv"]]
  try:
    code = compile(asked["program"], "<program>", "exec")
    exec(code, {"__name__": "__main__"})
  except SystemExit as exit:
    code = exit.code
  except BaseException:
    traceback.print_exc()
    code = 1
  else:
    code = 0
  if isinstance(code, str):
    print(code, file=sys.stderr)
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code or 0)
for line in sys.stdin:
  asked = json.loads(line)
  child = os.fork()
  if not child:
    signal.alarm(asked["timeout"])
    run(asked)
  status = os.waitpid(child, 0)[1]
  print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Done:
  """Result of a program."""

  returncode: int
  stdout: str
  stderr: str


@functools.cache
def _mother(preload: str) -> subprocess.Popen:
  env = os.environ | ({"LD_PRELOAD": preload} if preload else {})
  found = subprocess.Popen(
    [sys.executable, "-c", _MOTHER],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=env,
  )
  atexit.register(_end, found)
  return found


def _end(mother: subprocess.Popen) -> None:
  mother.stdin.close()
  mother.wait(60)


def run(
  program: str, *argv, timeout: int = 100, env=None, preload: str = "", cwd=None
) -> Done:
  """Runs a program as `python -c program *argv` would; its input is empty.

  Args:
    program: Python.
    *argv: its arguments.
    timeout: seconds; then SIGALRM ends it.
    env: its environment; None is this process's.
    preload: a library that is loaded before all others.
    cwd: its directory; None is this process's.
  """
  mother = _mother(str(preload))
  with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
    out, err = pathlib.Path(folder, "out"), pathlib.Path(folder, "err")
    asked = {
      "program": program,
      "argv": [str(a) for a in argv],
      "in": os.devnull,
      "out": str(out),
      "err": str(err),
      "timeout": timeout,
      "cwd": str(cwd or os.getcwd()),
      "env": dict(os.environ if env is None else env),
    }
    mother.stdin.write(json.dumps(asked) + "\n")
    mother.stdin.flush()
    code = mother.stdout.readline()
    assert code, "the interpreter has ended; its stderr says why"
    return Done(int(code), out.read_text(), err.read_text())


def run_module(name: str, *argv, **options) -> Done:
  """Runs a module as `python -m name *argv` would."""
  program = (
    "import runpy\n"
    f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)\n"
  )
  return run(program, *argv, **options)
