"""The embedded desktop: a deterministic GUI, its tasks and their oracle."""

from tunix.rl.multi_turn.environments.gyms.desktop.gym import DesktopGym
from tunix.rl.multi_turn.environments.gyms.desktop.gym import DesktopTasks
from tunix.rl.multi_turn.environments.gyms.desktop.gym import families
from tunix.rl.multi_turn.environments.gyms.desktop.gym import oracle_action
from tunix.rl.multi_turn.environments.gyms.desktop.gym import QUICKSTART_FAMILIES
