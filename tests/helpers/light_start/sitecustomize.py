"""Imported by each process that tests start: it skips google-tunix's own code.

With google-tunix installed, `python -m tunix.rl.multi_turn.NAME` imports all of
it first, four seconds of CPU time. The framework's modules are the same.
"""

try:
  import tunix_multi_turn

  tunix_multi_turn.light()
except ImportError:
  pass  # Another program's environment.
