"""Programs on a machine that seems to have several devices."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import fresh_interpreter

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*arguments, devices=8, seconds=280, flags=""):
  """Returns Python's output for these arguments.

  The number of devices is a process's own, so it takes another process: a fork
  of an interpreter that has imported JAX and has not yet looked for devices.

  Args:
    *arguments: "-c" and a program, or "-m" and a module; then its own.
    devices: CPU devices that JAX has.
    seconds: deadline.
    flags: more of XLA's.
  """
  kind, what, *argv = arguments
  call = {"-c": fresh_interpreter.run, "-m": fresh_interpreter.run_module}
  done = call[kind](
    what, *argv, timeout=seconds, env=_environment(devices, flags), cwd=ROOT
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


def _environment(devices, flags):
  forced = (
    # First the flags that conftest.py chose: of two, the last one counts.
    f"{os.environ.get('XLA_FLAGS', '')}"
    f" --xla_force_host_platform_device_count={devices}"
    # Eight threads on two busy cores may meet late.
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    f" {flags}"
  ).strip()
  return {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": forced,
    "PYTHONPATH": os.pathsep.join(
      filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    ),
    # Programs are compiled for eight devices and run a few times.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }


def start(*arguments, devices, flags="", output=None, environment=None):
  """Such a process, still running.

  Args:
    *arguments, devices, flags: as of `run`.
    output: File that receives its output; a pipe each by default.
    environment: more variables.
  """
  return subprocess.Popen(
    [sys.executable, *map(str, arguments)],
    cwd=ROOT,
    env=_environment(devices, flags) | (environment or {}),
    stdout=output or subprocess.PIPE,
    stderr=subprocess.STDOUT if output else subprocess.PIPE,
    text=True,
  )


def report(*arguments, **options):
  """The JSON of the last line that such a program prints."""
  return json.loads(run(*arguments, **options).strip().splitlines()[-1])


def reports(*arguments, processes, devices, seconds=280):
  """The JSON that each of several processes prints, which JAX joins.

  Args:
    *arguments: Arguments of the interpreter; address, number and index of the
      processes follow them.
    processes: their number.
    devices: Devices of each process.
    seconds: deadline of all.
  """
  address = free_address()
  started = [
    start(*arguments, address, processes, i, devices=devices)
    for i in range(processes)
  ]
  with concurrent.futures.ThreadPoolExecutor(processes) as pool:
    found = [pool.submit(one.communicate, timeout=seconds) for one in started]
    try:
      said = [future.result() for future in found]
    finally:
      for one in started:
        one.kill()
  for one, (_, err) in zip(started, said):
    assert one.returncode == 0, err[-4000:]
  return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


def free_address():
  """host:port of the loopback interface that nothing listens on."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"
