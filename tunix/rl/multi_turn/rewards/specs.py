"""Builds a run's reward from `environment.reward`: names, weights, options.

A registered reward is of one of three kinds, which its parameters tell:

- `(task, action)`, with `info` if it wants: judges the answer. The environment
  calls it when the episode ends there.
- `(task, step)`: judges one turn, a `Step`. None leaves the turn out.
- `(task, action, trajectory)`: judges the whole episode. It returns a number, a
  RewardOutput, an `EpisodeOutput` with a reward for each turn, or None to be
  left out of the sum.

The last two are called once the policy has ended the episode, by the collector
(`EpisodeReward`), whatever the environment. Options are a function's
keyword-only parameters, or a class's constructor's; `weight` and `per` are
every part's.

Promises: an unknown name, an option of another name or type, and a missing one
are refused when the run is built, naming the reward and the option.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Callable, Mapping, Sequence

from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import registry as registry_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.rewards import reward_registry

_PER = ("episode", "turn")


@dataclasses.dataclass(frozen=True)
class EpisodeOutput(reward_registry.RewardOutput):
  """A reward of which each turn has its share.

  Attributes:
    reward: Reward of the whole episode, `turns` included.
    turns: reward of each turn, in order; the rest of `reward` is the last
      turn's. Empty: all of it is.
  """

  turns: tuple[float, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    turns = tuple(
      reward_registry.RewardOutput(value).reward for value in self.turns
    )
    object.__setattr__(self, "turns", turns)


@dataclasses.dataclass(frozen=True)
class Part:
  """One reward of a sum.

  Attributes:
    name: Registered name.
    fn: takes its arguments alone; options are bound.
    kind: "answer", "turn" or "episode".
    weight: Weight of its value in the sum.
    per: Use of a turn's reward. "episode": the mean over the turns is the
      episode's reward. "turn": each turn gets its own.
  """

  name: str
  fn: reward_registry.RewardFn
  kind: str
  weight: float = 1.0
  per: str = "episode"


class EpisodeReward:
  """Sums the parts that judge turns or whole episodes.

  A `final_reward_fn` of the collector that is added to the environment's own
  reward.

  Attributes:
    deadline_s: the longest that one of its parts takes by its own deadline; 0
      when none has one.
  """

  beside_environment = True

  def __init__(self, parts: Sequence[Part], own: str = ""):
    """`own`: name under which the environment's own reward is logged."""
    self._parts = tuple(parts)
    self._own = own
    self.deadline_s = max(
      (float(getattr(p.fn, "deadline_s", 0.0)) for p in parts), default=0.0
    )

  async def __call__(
    self, trajectory: trajectory_lib.Trajectory, task: object, answer: object
  ) -> EpisodeOutput:
    """The weighted sum; metadata `parts` keep each part's reward.

    Raises:
      ValueError: a part returned no finite number, naming it.
      Exception: whatever a part raises.
    """
    steps = trajectory.steps
    answer = (steps[-1].info or {}).get("answer", answer) if steps else answer
    turns = [0.0] * len(steps)
    total = 0.0
    parts: dict[str, Any] = {}
    if self._own:
      own = float(trajectory.reward)
      parts[self._own] = {"reward": own, "weight": 1.0}
    for part in self._parts:
      if part.kind == "turn":
        out = await _judge_turns(part, task, steps)
      else:
        out = await _judge(part, task, answer, trajectory)
      if out is None:
        continue
      total += part.weight * out.reward
      shares = out.turns if isinstance(out, EpisodeOutput) else ()
      for k, value in enumerate(shares):
        turns[k] += part.weight * value
      parts[part.name] = {
        **out.metadata,
        "reward": out.reward,
        "weight": part.weight,
      }
    return EpisodeOutput(total, {"parts": parts}, tuple(turns))


async def _judge(
  part: Part,
  task: object,
  answer: object,
  trajectory: trajectory_lib.Trajectory,
) -> reward_registry.RewardOutput | None:
  value = await concurrency.acall(
    part.fn, task, answer, trajectory, what=f"reward {part.name!r}"
  )
  if value is None:
    return None
  out = reward_registry.as_reward(value, f"reward {part.name!r}")
  turns = len(out.turns) if isinstance(out, EpisodeOutput) else 0
  if turns > len(trajectory.steps):
    raise ValueError(
      f"reward {part.name!r} gave {turns} turns a reward; the episode"
      f" has {len(trajectory.steps)}"
    )
  return out


async def _judge_turns(
  part: Part, task: object, steps: Sequence[trajectory_lib.Step]
) -> reward_registry.RewardOutput | None:
  what = f"reward {part.name!r}"
  if concurrency.is_async(part.fn):
    verdicts = [await part.fn(task, step) for step in steps]
  else:
    verdicts = await concurrency.acall(
      lambda: [part.fn(task, step) for step in steps], what=what
    )
  outs = [
    None if v is None else reward_registry.as_reward(v, what) for v in verdicts
  ]
  counted = [out.reward for out in outs if out is not None]
  if not counted:
    return None
  values = tuple(0.0 if out is None else out.reward for out in outs)
  if part.per == "turn":
    return EpisodeOutput(math.fsum(values), {"turns": list(values)}, values)
  mean = math.fsum(counted) / len(counted)
  return reward_registry.RewardOutput(mean, {"turns": list(values)})


@dataclasses.dataclass(frozen=True)
class RewardPlan:
  """A run's reward, by where it is computed.

  Attributes:
    environment: Reward for the environment: a function; or "score" or
      "success", which environments with an evaluation of their own know.
    episode: Reward for the collector, None without a part that needs it.
  """

  environment: reward_registry.RewardFn | str
  episode: EpisodeReward | None = None


def plan(spec: str | Mapping[str, Any]) -> RewardPlan:
  """Returns the reward that `environment.reward` describes.

  Args:
    spec: A registered name or "package.module:function"; or a mapping of such
      names to a weight, or to `{weight: …, per: …}` with the reward's own
      options.

  Raises:
    ValueError: listing what is wrong, a line each.
  """
  if not spec:
    raise ValueError("environment.reward={} has no part; name a reward")
  entries = {spec: 1.0} if isinstance(spec, str) else spec
  parts, problems = [], []
  for name, value in entries.items():
    try:
      parts.append(_part(name, value))
    except ValueError as error:
      problems += str(error).splitlines()
  if problems:
    raise ValueError("\n".join(problems))
  answers = [part for part in parts if part.kind == "answer"]
  later = [part for part in parts if part.kind != "answer"]
  own = ""
  environment: reward_registry.RewardFn | str
  built_in = answers and answers[0].name in ("score", "success")
  if isinstance(spec, str) and answers:
    environment = spec if built_in else answers[0].fn
  elif later and len(answers) == 1 and built_in and answers[0].weight == 1.0:
    # An environment that takes no reward function has one of its own.
    environment = own = answers[0].name
  elif answers:
    environment = reward_registry.combine_parts(
      {part.name: (part.fn, part.weight) for part in answers}
    )
  else:
    environment = reward_registry.get_reward_fn("zero")
  return RewardPlan(environment, EpisodeReward(later, own) if later else None)


def kind_of(fn: Callable[..., Any]) -> str:
  """ "answer", "turn" or "episode"; see the module docstring."""
  call = fn.__call__ if inspect.isclass(fn) else fn
  try:
    names = inspect.signature(call).parameters
  except (TypeError, ValueError):
    return "answer"
  if "step" in names:
    return "turn"
  return "episode" if "trajectory" in names else "answer"


def options_of(fn: Callable[..., Any]) -> arguments.Takes:
  """Returns the options that a reward takes."""
  takes = arguments.takes(fn)
  if inspect.isclass(fn):
    options = {n: o for n, o in takes.options.items() if n != "self"}
    return arguments.Takes(options, takes.anything)
  try:
    parameters = inspect.signature(fn).parameters
  except (TypeError, ValueError):
    return takes
  return arguments.Takes(
    {
      name: takes.options[name]
      for name, parameter in parameters.items()
      if parameter.kind is parameter.KEYWORD_ONLY
    }
  )


def bind(name: str, options: Mapping[str, Any]) -> reward_registry.RewardFn:
  """Returns the reward of that name with its options.

  Raises:
    ValueError: an unknown name; an unknown, wrong or missing option.
    ImportError: no such module or attribute.
  """
  fn = reward_registry.get_reward_fn(name, "operator")
  takes = options_of(fn)
  where = f"environment.reward.{name}."
  wrong = [where + text for _, text in takes.wrong(options, f"reward {name!r}")]
  wrong += [
    f"{where}{option} is missing; reward {name!r} needs it"
    for option in takes.required
    if option not in options
  ]
  if wrong:
    raise ValueError("\n".join(wrong))
  make: Callable[..., Any] = fn
  if inspect.isclass(fn):
    try:
      return make(**options)
    except ValueError as error:
      raise ValueError(f"environment.reward.{name}: {error}") from None
  check = getattr(fn, "check_options", None)
  if check is not None:
    try:
      check(**options)
    except ValueError as error:
      raise ValueError(f"environment.reward.{name}: {error}") from None
  if not options:
    return fn
  return functools.update_wrapper(functools.partial(fn, **options), fn)


def _part(name: str, value: object) -> Part:
  where = f"environment.reward.{name}"
  options = dict(value) if isinstance(value, Mapping) else {"weight": value}
  weight = options.pop("weight", 1.0)
  per = options.pop("per", "episode")
  if isinstance(weight, bool) or not isinstance(weight, (int, float)):
    raise ValueError(
      f"{where}={weight!r}: give numbers as weights, or a mapping of weight"
      " and the reward's options"
    )
  if not math.isfinite(weight):
    raise ValueError(f"{where}.weight={weight} must be finite")
  if per not in _PER:
    raise ValueError(
      f"{where}.per: " + registry_lib.unknown_name("value", per, _PER)
    )
  try:
    kind = kind_of(reward_registry.get_reward_fn(name, "operator"))
  except (ValueError, ImportError) as error:
    raise ValueError(f"{where}: {error}") from None
  if per == "turn" and kind != "turn":
    raise ValueError(
      f"{where}.per=turn: it judges no single turn; leave it out"
    )
  return Part(name, bind(name, options), kind, float(weight), per)
