"""Gym servers, seen from a client: genv's HTTP protocol."""

from tunix.rl.multi_turn.environments.gyms.genv.client import GenvCapacityError
from tunix.rl.multi_turn.environments.gyms.genv.client import GenvClient
from tunix.rl.multi_turn.environments.gyms.genv.client import GenvError
from tunix.rl.multi_turn.environments.gyms.genv.client import (
    GenvExecutionLostError,
)
from tunix.rl.multi_turn.environments.gyms.genv.client import GenvRequestError
from tunix.rl.multi_turn.environments.gyms.genv.client import (
    GenvUnavailableError,
)
from tunix.rl.multi_turn.environments.gyms.genv.client import (
    GenvUnknownTaskError,
)
from tunix.rl.multi_turn.environments.gyms.genv.client import RETRIES
from tunix.rl.multi_turn.environments.gyms.genv.client import Timeouts
from tunix.rl.multi_turn.environments.gyms.genv.execution import (
    evaluate_execution,
)
from tunix.rl.multi_turn.environments.gyms.genv.execution import (
    GenvExecutionContext,
)
from tunix.rl.multi_turn.environments.gyms.genv.execution import (
    start_genv_execution,
)
from tunix.rl.multi_turn.environments.gyms.genv.execution import (
    terminate_execution,
)
from tunix.rl.multi_turn.environments.gyms.genv.gym import GenvGym
