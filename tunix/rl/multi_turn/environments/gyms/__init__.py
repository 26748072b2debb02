"""Gyms: the worlds that environments act in. One folder declares one gym.

`register(name, GymSpec(make=…, tasks=…))` adds one; see `spec` for its fields.
"""

from tunix.rl.multi_turn.environments.gyms.gym_registry import from_config
from tunix.rl.multi_turn.environments.gyms.gym_registry import get
from tunix.rl.multi_turn.environments.gyms.gym_registry import make
from tunix.rl.multi_turn.environments.gyms.gym_registry import names
from tunix.rl.multi_turn.environments.gyms.gym_registry import register
from tunix.rl.multi_turn.environments.gyms.gym_registry import unregister
from tunix.rl.multi_turn.environments.gyms.spec import GymSpec
from tunix.rl.multi_turn.environments.gyms.spec import Oracle
from tunix.rl.multi_turn.environments.gyms.spec import SIZE
