"""The actor that Ray starts for a run with `fleet=ray`.

Here and not beside `run.fleet`, so that a worker of Ray finds the class without
importing google-tunix, and with it JAX.
"""

from __future__ import annotations

import tunix_multi_turn


class CollectorActor:
  """One collector. Arguments and result are text."""

  def collect(self, address: str, name: str, patience_s: float) -> str:
    """Collects until the run ends; see `run.fleet.collector.collect`."""
    tunix_multi_turn.light()
    from tunix.rl.multi_turn.run.fleet import collector  # pylint: disable=g-import-not-at-top

    return collector.collect(address, name, patience_s)
