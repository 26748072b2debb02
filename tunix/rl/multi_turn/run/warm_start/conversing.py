"""Makes demonstrations in environments without a screen.

A demonstration is played by the run's own agent in its own environment, whose
tools run, and only what the assistant says comes from the conversation: its
tokens are those that the policy will act in. One that the environment does not
call solved is left out.

Does not train anything; no JAX.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Callable, Iterator, Sequence

from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.clients import scripted_client
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import conversations
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.trajectory_collector import collect_settings
from tunix.rl.multi_turn.trajectory_collector import episode as engine_lib
from tunix.rl.multi_turn.trajectory_collector import model_calls

_LOG = logging.getLogger(__name__)

Solve = Callable[[gym_base.Task], Sequence[conversations.Turn]]
"""The turns that solve a task; LookupError: there are none."""


@dataclasses.dataclass(frozen=True)
class Converser:
  """Plays tasks by saying what a conversation said.

  Attributes:
    renderer: messages to tokens.
    make_episode: task -> a fresh (agent, environment).
    solve: see `Solve`.
    max_turns: Turns of an episode whose task sets no limit.
    deadlines: Deadlines of an episode and of its calls.
    warned: Ids of tasks in whose demonstrations a tool reported an error.
  """

  renderer: choice.AnyRenderer
  make_episode: Callable[[gym_base.Task], tuple[Any, Any]]
  solve: Solve
  max_turns: int
  deadlines: collect_settings.Deadlines = collect_settings.Deadlines()
  warned: list[str] = dataclasses.field(default_factory=list, init=False)

  async def episode(
    self, task: gym_base.Task, seed: int
  ) -> trajectory.Trajectory:
    """One demonstration of `task`; any `seed` gives the same.

    Raises:
      demonstrations.UnsolvableError: no conversation solves it, or the
        environment does not call it solved.
    """
    del seed
    try:
      turns = iter(self.solve(task))
    except LookupError as error:
      raise demonstrations.UnsolvableError(str(error)) from error
    agent, env = self.make_episode(task)
    replies = _texts(turns, agent)
    unsaid: list[LookupError] = []

    async def speak(prompt: policy_client.TokenPrompt, session: str):
      del prompt, session
      text = next(replies, None)
      if text is None:
        error = LookupError(
          f"task {task.task_id} is not over after all that was said"
        )
        unsaid.append(error)
        raise error
      return demonstrations.completion_ids(self.renderer, text)

    model = model_calls.PolicyModel(
      scripted_client.ScriptedClient(speak),
      self.renderer,
      policy_client.SamplingParams(max_new_tokens=4096),
      runs_inline=True,
    )
    engine = engine_lib.TrajectoryCollectEngine(
      agent,
      env,
      model,
      max_steps=task.max_turns or self.max_turns,
      timeout=self.deadlines.episode,
      deadlines=self.deadlines,
    )
    played = await engine.collect()
    if unsaid:
      raise demonstrations.UnsolvableError(str(unsaid[0])) from unsaid[0]
    if (
      played.status.is_policy_outcome
      and played.status is not trajectory.TrajectoryStatus.SUCCEEDED
    ):
      raise demonstrations.UnsolvableError(
        f"task {task.task_id} was not solved: {played.status.value}"
      )
    if any(step.info.get("tool_errors") for step in played.steps):
      if not self.warned:
        _LOG.warning(
          "a tool answered with an error in the demonstration of task %s,"
          " which is cloned as it is; look at its calls",
          task.task_id,
        )
      self.warned.append(task.task_id)
    return played


def _texts(
  turns: Iterator[conversations.Turn], agent: tool_agent.ToolAgent
) -> Iterator[str]:
  """Yields each turn as the policy would write it, in the agent's grammar."""
  for turn in turns:
    text, calls = conversations.text_and_calls(turn)
    yield agent.tool_parser.format(calls, text or None) if calls else text
