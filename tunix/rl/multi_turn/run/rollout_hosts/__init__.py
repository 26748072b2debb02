"""Rollout on hosts beside the learner's (`rollout.via=hosts`).

The learner's process lends groups to be collected (`leases`, `server`) and
publishes weights; each rollout host (`commands.rollout`) has an engine, gyms
and devices of its own. Hosts come and go: they are no part of JAX's process
group, where one death ends all.
"""

from tunix.rl.multi_turn.core import registry

__getattr__ = registry.lazy_attributes(__name__, remote="HostsEngine")
