"""Our gyms and environments as a taskset of the package verifiers (0.4).

    vf-eval tunix-multi-turn --env.taskset.settings.gym desktop …

Its harness plays the episodes, in the process of verifiers and without a
program in a sandbox: the messages of the run's agent go to verifiers' endpoint,
and the policy's text goes to the process of `outside`. Screenshots are
`image_url` parts, and an agent's shortened history is the prompt.

Promises: a rollout that no policy decided (an environment that failed, a
deadline) has an error, and is no reward of 0; an episode is closed with its
rollout, one that verifiers ended (its limits) included, whose reward is 0.

Does not sample, or train.
"""

import asyncio
import contextlib
import functools
import json
from typing import Any

import openai
import verifiers.v1 as vf

from tunix_multi_turn import outside

_OUTCOME = "tunix_outcome"


class TunixTasksetConfig(vf.TasksetConfig):
  """Arguments of `verifiers_env.load_environment`, and the tasks' split."""

  settings: dict[str, Any] | list[str] = {}
  split: str = "train"
  train: int = 256
  eval: int = 64
  python: str = ""
  start_s: float = 120.0
  turn_s: float = 300.0


class TunixData(vf.TaskData):
  """A task.

  Attributes:
    host: JSON; arguments of the `outside.Host` that plays it.
    split, place: The task's list, and its place in it.
  """

  host: str
  split: str
  place: int


class TunixTask(vf.Task[TunixData, vf.State]):
  """Rewards are the episode's own."""

  @vf.reward
  async def reward(self, trace: vf.Trace) -> float:
    return float(_outcome(trace).get("reward", 0.0))

  @vf.metric
  async def success(self, trace: vf.Trace) -> float:
    return float(_outcome(trace).get("success", False))

  @vf.metric
  async def parse_errors(self, trace: vf.Trace) -> float:
    """Turns whose text held no well-formed action."""
    return float(_outcome(trace).get("parse_errors", 0))


class TunixTaskset(vf.Taskset[TunixTask, TunixTasksetConfig]):
  """The first tasks of a split, the families by turns."""

  def load(self):
    config = self.config
    if config.split not in ("train", "eval"):
      raise ValueError(f"split={config.split!r} must be train or eval")
    arguments = config.model_dump(
      include={"settings", "train", "eval", "python", "start_s", "turn_s"}
    )
    host = json.dumps(arguments, sort_keys=True)
    tasks = _host(host).worker().facts[config.split]
    for place, task in enumerate(tasks):
      data = TunixData(
        id=task["task_id"],
        description=task["instruction"] or None,
        prompt=task["instruction"] or task["task_id"],
        host=host,
        split=config.split,
        place=place,
      )
      yield TunixTask(data, config.task)


class TunixHarness(vf.Harness[vf.HarnessConfig]):
  """Plays an episode by the messages of the run's own agent."""

  APPENDS_SYSTEM_PROMPT = True
  EXECUTES_CODE = False
  NEEDS_CONTAINER = False

  async def launch(
    self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
  ) -> vf.ProgramResult:
    from tunix.rl.multi_turn.net import line_process

    del runtime, mcp_urls  # The episode runs elsewhere, with its own tools.
    host = _host(data.host)
    worker = await asyncio.to_thread(host.worker)
    ask = functools.partial(worker.play, seconds=host.turn_s)
    start = {"split": data.split, "index": data.place}
    answer = await ask({"start": start})
    episode, messages = answer.get("episode"), []
    client = openai.AsyncOpenAI(
      base_url=endpoint, api_key=secret, max_retries=0
    )
    try:
      async with client:
        while "outcome" not in answer:
          messages = [*messages[: answer["kept"]], *answer["messages"]]
          completion = await client.chat.completions.create(
            model=ctx.model, messages=messages
          )
          choice = completion.choices[0]
          reply = {
            "episode": episode,
            "text": choice.message.content or "",
            "truncated": choice.finish_reason == "length",
          }
          answer = await ask({"reply": reply})
      trace.info[_OUTCOME] = answer["outcome"]
    except openai.BadRequestError:
      if trace.stop_condition is None:  # It is no limit of verifiers'.
        raise
    finally:
      if "outcome" not in answer and worker.alive:
        # It may end meanwhile, and what ended the rollout is to be raised.
        with contextlib.suppress(line_process.WorkerError):
          await ask({"close": {"episode": episode}})
    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _outcome(trace: vf.Trace) -> dict[str, Any]:
  return trace.info.get(_OUTCOME) or {}


@functools.cache  # Without a limit: its process may be playing.
def _host(arguments: str) -> outside.Host:
  return outside.Host(**json.loads(arguments))
