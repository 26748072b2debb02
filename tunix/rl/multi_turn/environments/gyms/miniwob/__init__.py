"""Real MiniWoB++ pages in one headless Chromium, many episodes in parallel."""

from tunix.rl.multi_turn.environments.gyms.miniwob.gym import Browser
from tunix.rl.multi_turn.environments.gyms.miniwob.gym import MiniWobGym
from tunix.rl.multi_turn.environments.gyms.miniwob.gym import shared_browser
from tunix.rl.multi_turn.environments.gyms.miniwob.oracle import describe
from tunix.rl.multi_turn.environments.gyms.miniwob.oracle import oracle_action
from tunix.rl.multi_turn.environments.gyms.miniwob.oracle import ORACLE_FAMILIES
from tunix.rl.multi_turn.environments.gyms.miniwob.tasks import families
from tunix.rl.multi_turn.environments.gyms.miniwob.tasks import MiniWobTasks
