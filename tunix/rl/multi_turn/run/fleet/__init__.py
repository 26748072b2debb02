"""Collectors in other processes and on other machines (`fleet.via`).

The learner's process has the engine: it lends groups (`service`), and answers
the collectors' requests with tokens of its policy. A collector (`collector`)
has gyms and no devices, and imports no JAX. `service.Supervisor` keeps as many
alive as a run wants; `service.RayLauncher` starts them on a Ray cluster, by a
process of `ray_cluster`, the one module that imports ray.
"""

from tunix.rl.multi_turn.core import registry

__getattr__ = registry.lazy_attributes(__name__, service="Fleet")
