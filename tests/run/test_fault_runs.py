"""A few of the faults that `benchmarks/fault_run.py` injects by the hundred."""

import json
import os

import fault_runs
import fresh_interpreter
import monitor_faults
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = """
import fault_runs
fault_runs.main()
"""


def test_no_fault_loses_work(tmp_path):
  few = {name: 1 for name in fault_runs.NUMBERS}  # Of each kind.
  env, preload = dict(os.environ), ""
  try:
    preload = str(monitor_faults.build(tmp_path))
    env |= {fault_runs.LIBRARY: preload}
  except monitor_faults.NoCompiler:
    pass  # Without a clock that jumps.
  helpers = os.path.dirname(fault_runs.__file__)
  env["PYTHONPATH"] = os.pathsep.join(
    filter(None, [helpers, env.get("PYTHONPATH")])
  )
  process = fresh_interpreter.run(
    f"import sys; sys.path.insert(0, {helpers!r})\n{PROGRAM}",
    tmp_path / "runs",
    f"--most={len(few)}",
    *(f"--{name}={n}" for name, n in few.items()),
    timeout=800,
    env=env,
    preload=preload,
  )
  assert process.returncode == 0, process.stderr[-3000:]
  data = [json.loads(line) for line in process.stdout.splitlines()]
  failed = [entry for entry in data if "failed" in entry]
  assert not failed, "\n".join(json.dumps(e, indent=1) for e in failed)
  kinds = {entry["what"] for entry in data}
  expected = {"undisturbed", "kill", "interrupt", "twice", "damage"}
  expected |= {"clock"} if preload else set()
  assert expected <= kinds
