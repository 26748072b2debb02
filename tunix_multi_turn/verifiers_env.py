"""Our gyms and environments as one of the package verifiers (0.1).

    vf.load_environment("tunix-multi-turn", settings={"gym": "desktop"})
    vf-eval tunix-multi-turn -a '{"settings": {"gym": "desktop"}}' …

It is imported where verifiers is installed, and needs nothing else there: the
episodes run in a process with this package's own interpreter, see
`tunix.rl.multi_turn.run.evaluations.outside_policy`. verifiers asks the policy,
by the messages that the run's agent would send: screenshots are `image_url`
parts, and an agent's shortened history is the prompt.

Promises: a rollout that no policy decided (an environment that failed, a
deadline) has an error, and is no reward of 0; an episode is closed with its
rollout.

Does not sample, or train.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any, Mapping, Sequence

if not metadata.version("verifiers").startswith("0.1."):
  raise ImportError(
    f"verifiers {metadata.version('verifiers')} is not supported by"
    " load_environment; install 'verifiers<0.2', or play the taskset"
    " tunix-multi-turn by verifiers==0.4.0"
  )
import datasets
import verifiers as vf

from tunix_multi_turn import outside


def load_environment(
  settings: Mapping[str, Any] | Sequence[str] = (),
  train: int = 256,
  eval: int = 64,  # pylint: disable=redefined-builtin
  python: str = "",
  start_s: float = 120.0,
  turn_s: float = 300.0,
) -> vf.Environment:
  """The environment of verifiers.

  Args:
    settings: Settings of a run, as `train` takes them: {"gym": "desktop",
      "agent":
      "qwen3_vl_computer_use", "gym.width": 640}, or ["gym=desktop", …]. They
      choose gym, tasks, agent, reward and deadlines.
    train: tasks to train on, the families by turns.
    eval: held-out tasks.
    python: interpreter that has this package; "" takes $TUNIX_PYTHON, else
      `.venv/bin/python` of this clone, else this one.
    start_s: Deadline of its start.
    turn_s: Deadline of a turn's actions, or of an episode's start.

  Raises:
    ValueError: naming the argument or the setting.
  """
  host = outside.Host(settings, train, eval, python, start_s, turn_s)
  tasks = host.worker().facts
  return TunixEnv(
    host,
    dataset=_rows("train", tasks["train"]),
    eval_dataset=_rows("eval", tasks["eval"]),
    rubric=vf.Rubric(
      funcs=[reward, success, parse_errors], weights=[1.0, 0.0, 0.0]
    ),
    message_type="chat",
  )


def _rows(split: str, tasks: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
  """The first message of a rollout takes the place of `prompt`."""
  return datasets.Dataset.from_list(
    [
      {
        "prompt": [
          {"role": "user", "content": task["instruction"] or task["task_id"]}
        ],
        "answer": "",
        "info": {"split": split, "index": index, **task},
      }
      for index, task in enumerate(tasks)
    ]
  )


# --- rewards ------------------------------------------------------------------


def _outcome(state: Any) -> Mapping[str, Any]:
  return state.get("tunix_outcome") or {}


def reward(state, **kwargs) -> float:
  """The episode's reward; 0 where the rollout has an error."""
  del kwargs
  return float(_outcome(state).get("reward", 0.0))


def success(state, **kwargs) -> float:
  del kwargs
  return float(_outcome(state).get("success", False))


def parse_errors(state, **kwargs) -> float:
  """Turns whose text held no well-formed action."""
  del kwargs
  return float(_outcome(state).get("parse_errors", 0))


# --- episodes -----------------------------------------------------------------


class TunixEnv(vf.MultiTurnEnv):
  """Episodes of a run, turn by turn; the run's own agent writes the prompts."""

  def __init__(self, host: outside.Host, **options: Any):
    super().__init__(max_turns=-1, **options)
    self._host = host

  async def setup_state(self, state: vf.State) -> None:
    """Starts the episode: its first messages are the rollout's prompt."""
    info = state["info"]
    try:
      state["tunix_worker"] = await asyncio.to_thread(self._host.worker)
    except ValueError as error:
      raise vf.InfraError(str(error)) from None
    state["tunix_said"] = []
    start = {"split": info["split"], "index": info["index"]}
    answer = await self._ask(state, {"start": start})
    state["tunix_episode"] = answer.get("episode")
    if self._take(state, answer):
      state["prompt"] = state["tunix_messages"]

  async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
    if not state["trajectory"]:
      return state["tunix_messages"]
    step = state["trajectory"][-1]
    completion = step["completion"]
    text = "".join(_text_of(message) for message in completion)
    state["tunix_said"] += completion
    reply = {
      "episode": state["tunix_episode"],
      "text": text,
      "truncated": bool(step["is_truncated"]),
    }
    answer = await self._ask(state, {"reply": reply})
    if not self._take(state, answer):
      return []
    return state["tunix_messages"]

  async def env_response(self, messages, state, **kwargs) -> vf.Messages:
    """Unused: the agent writes whole prompts (`get_prompt_messages`)."""
    raise NotImplementedError("get_prompt_messages asks the episode")

  async def render_completion(self, state: vf.State) -> None:
    """All turns in order, those included that the prompt has dropped."""
    messages = list(state.get("tunix_said") or ())
    if state["trajectory"] and not _outcome(state):
      messages += state["trajectory"][-1]["completion"]
    state["completion"] = messages

  @vf.cleanup
  async def close_episode(self, state: vf.State) -> None:
    """Ends an episode whose rollout ended first."""
    name = state.get("tunix_episode")
    if name is not None and not _outcome(state):
      try:
        await self._ask(state, {"close": {"episode": name}})
      except vf.InfraError:
        pass  # With its process.
    state.pop("tunix_worker", None)

  @vf.teardown
  async def end_process(self) -> None:
    self._host.end()

  async def _ask(self, state: vf.State, request: Mapping[str, Any]) -> Any:
    from tunix.rl.multi_turn.net import line_process

    try:
      return await state["tunix_worker"].play(request, self._host.turn_s)
    except line_process.WorkerError as error:
      raise vf.InfraError(str(error)) from None

  def _take(self, state: vf.State, answer: Mapping[str, Any]) -> bool:
    """Notes what the episode answered; False at its end."""
    if "outcome" in answer:
      state["tunix_outcome"] = answer["outcome"]
      state["final_env_response"] = []
      return False
    before = state.get("tunix_messages") or []
    new = [_message(message) for message in answer["messages"]]
    if before:
      state["tunix_said"] += [m for m in new if m.role != "assistant"]
    state["tunix_messages"] = [*before[: answer["kept"]], *new]
    return True


def _message(message: Mapping[str, Any]) -> Any:
  kinds = {
    "system": vf.SystemMessage,
    "user": vf.UserMessage,
    "assistant": vf.AssistantMessage,
  }
  return kinds[message["role"]](content=message["content"])


def _text_of(message: Any) -> str:
  content = message.content or ""
  if isinstance(content, str):
    return content
  return "".join(getattr(part, "text", "") for part in content)
