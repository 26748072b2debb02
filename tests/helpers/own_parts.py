"""A user's own gym, agent, environment, reward and policy, in one file."""

import numpy as np
from tunix.rl.multi_turn.agents import ToolAgent
from tunix.rl.multi_turn.environments import BaseEnv
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import spec
from tunix.rl.multi_turn.policy.checkpoints import checkpoint


class LampGym:
  """A dark screen with one lit lamp, to be clicked."""

  def __init__(self, width: int = 128, height: int = 96, brightness: int = 255):
    self._screen = np.zeros((height, width, 3), np.uint8)
    self._brightness = brightness

  def start(self, task):
    rng = np.random.default_rng(task.seed)
    self._y, self._x = rng.integers(0, np.subtract(self._screen.shape[:2], 32))
    self._hit = False
    self._screen[:] = 0
    lamp = self._screen[self._y : self._y + 32, self._x : self._x + 32]
    lamp[:] = self._brightness
    return base.Observation(self._screen.copy(), "Click the lamp.")

  def act(self, action):
    inside_x = self._x <= (action.x or 0) < self._x + 32
    self._hit = inside_x and self._y <= (action.y or 0) < self._y + 32
    return base.Observation(self._screen.copy(), done=True)

  def evaluate(self):
    return base.Evaluation(float(self._hit), self._hit)

  def close(self):
    pass


class LampTasks:
  def families(self):
    return ("lamp",)

  def train_task(self, family, index, seed=0):
    return base.Task(f"{family}/{index}/{seed}", family, seed=index)

  def eval_task(self, family, index, seed=0):
    return base.Task(f"{family}/eval/{index}", family, seed=10**6 + index)


GYM = spec.GymSpec(
  make=LampGym, tasks=LampTasks, lists_tasks=True, set_by_run=spec.SIZE
)


class FewLamps(LampTasks):
  """Five tasks, and no more."""

  def train_task(self, family, index, seed=0):
    if index >= 5:
      raise StopIteration
    return super().train_task(family, index, seed)


FEW = spec.GymSpec(
  make=LampGym, tasks=FewLamps, lists_tasks=True, set_by_run=spec.SIZE
)


class PoliteAgent(ToolAgent):
  """Asks more nicely than ToolAgent."""

  def __init__(self, system_prompt="", parser_name="qwen", please="Please: "):
    super().__init__(please + system_prompt, parser_name)


class Echo(BaseEnv):
  """One turn; any answer will do."""

  def __init__(self, question, bonus: float = 0.0):
    self.question, self.bonus = question, bonus

  def reset(self):
    return {"question": self.question}, {}

  def step(self, action):
    return {}, len(str(action)) % 7 + self.bonus, True, {}


def brevity(task, action, info=None):
  return 1.0 / (1 + len((info or {}).get("gui_actions", ())))


def make_policy(seed=0, mesh=None, **changes):
  return checkpoint.create_policy("tiny", seed, "tiny_vl", mesh, **changes)
