"""Keeps compiled programs on disk, so that the next start need not compile.

The cache is JAX's own, in a directory for each kind of processor: programs
compiled for a CPU use its instructions, and different machines may share a home
directory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import platform

_LOG = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"
_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_CPU_FACTS = pathlib.Path("/proc/cpuinfo")


def _processor() -> str:
  """Returns a name for the instructions that this machine's CPU has."""
  facts = platform.machine()
  try:
    for line in _CPU_FACTS.read_text(encoding="utf-8").splitlines():
      if line.startswith(("flags", "Features", "model name")):
        facts += line
      elif not line:
        break  # The others are alike.
  except OSError:  # Not Linux.
    facts += platform.processor() + platform.node()
  return hashlib.sha256(facts.encode()).hexdigest()[:12]


def directory(choice: str = AUTO) -> pathlib.Path | None:
  """Returns the directory that `enable` would use; None if it would use none.

  Args:
    choice: a directory, "off", or "auto": that of the environment variable
      JAX_COMPILATION_CACHE_DIR, else one below the user's cache directory.
  """
  if choice == OFF:
    return None
  if choice != AUTO:
    return pathlib.Path(choice).expanduser() / _processor()
  if os.environ.get(_VARIABLE):
    return pathlib.Path(os.environ[_VARIABLE])
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "tunix-multi-turn" / "xla" / _processor()


def enable(choice: str = AUTO) -> pathlib.Path | None:
  """Turns the cache on for this process, unless it is on already.

  A directory that cannot be written is no error: a warning reports it, and
  programs are compiled as without it.

  Returns:
    The directory in use, or None.
  """
  # Its name "auto" is a default of commands that explain themselves without.
  import jax  # pylint: disable=g-import-not-at-top

  folder = directory(choice)
  if folder is None:
    jax.config.update("jax_enable_compilation_cache", False)
    return None
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".writable-{os.getpid()}"
    probe.touch()
    probe.unlink()
  except OSError as error:
    _LOG.warning(
      "compiled programs are not kept: %s cannot be written (%s); choose"
      " another directory with run.compile_cache or %s",
      folder,
      error,
      _VARIABLE,
    )
    return None
  jax.config.update("jax_compilation_cache_dir", str(folder))
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    # The engine's programs are many, and most compile in less than a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
  return folder
