"""Declares the bodies of the gym server's protocols: genv's and OpenEnv's.

Requests are models that validate (`reading` turns a failure into a 422);
answers are typed dictionaries, which the handlers build and `openapi`
describes. `wire` declares screenshots, actions and observations.

Promises: names, types and shapes here are the wire format; a field that is not
`NotRequired` is in every answer. Fields that a request does not know are
ignored, unless its model forbids them.
"""

from __future__ import annotations

import enum
import functools
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import json_models
from typing_extensions import TypedDict

MAX_KEY = 256
SHAPES = ("summary", "meta", "flat")

Flag = json_models.Flag
Json = dict[str, Any]
Shape = Literal["summary", "meta", "flat"]
Split = Literal["train", "eval"]
_Count = Annotated[int, pydantic.Field(ge=0)]


class State(str, enum.Enum):
  """The life of an execution; see `executions.TRANSITIONS`."""

  CREATING = "creating"
  RUNNING = "running"
  TERMINATED = "terminated"  # By its client.
  FAILED = "failed"  # Its gym raised, or missed a deadline.
  EXPIRED = "expired"  # No call renewed it in time, or it ran too long.


class Error(TypedDict):
  """Every answer that is not 200."""

  detail: str
  code: str


# --- what addresses hold ------------------------------------------------------


class Query(json_models.Request):
  """Base of the parameters after "?"; an empty one is not given."""

  @pydantic.model_validator(mode="before")
  @classmethod
  def _drop_empty(cls, data: Any) -> Any:
    return {k: v for k, v in data.items() if v != ""}


class ShapeQuery(Query):
  shape: Shape | None = None


class TasksQuery(ShapeQuery):
  split: Split | None = None
  family: bounds.Name = ""
  full: Flag = False
  bare: Flag = False


class ScreenshotQuery(Query):
  format: Literal["png", "json"] = "png"


# --- genv: requests -----------------------------------------------------------


class CreateOptions(json_models.Request):
  """`options` of a create; a key stands for all of them."""

  model_config = pydantic.ConfigDict(
    extra="allow", json_schema_extra={"x-maxValues": bounds.MAX_VALUES}
  )

  observe: Flag = False
  screenshot: Flag = True
  lease_s: bounds.Seconds | None = None
  gym: bounds.Json = {}

  @pydantic.model_validator(mode="before")
  @classmethod
  def _bounded(cls, data: object) -> Any:
    if problem := bounds.json_problem(data):
      raise ValueError(problem)
    return data


class Create(json_models.Request):
  options: CreateOptions = CreateOptions()
  idempotency_key: Annotated[str, pydantic.Field(max_length=MAX_KEY)] | None = (
    None
  )


class Step(json_models.Request):
  action: wire.Action
  step: Annotated[int, pydantic.Field(ge=1, le=2**31)] | None = None
  screenshot: Flag = True


class Evaluate(json_models.Request):
  execution_data: bounds.Json = {}
  answer_text: wire.Text = ""
  context_text: bounds.Text = ""
  facts: bounds.Json = {}

  @pydantic.model_validator(mode="before")
  @classmethod
  def _find_answer(cls, data: object) -> Any:
    """Clients write the answer in either place, by either name."""
    if not isinstance(data, dict) or data.get("answer_text") is not None:
      return data
    more = data.get("execution_data")
    if isinstance(more, dict):
      for name in ("answer_text", "answer"):
        if more.get(name) is not None:
          return {**data, "answer_text": more[name]}
    return data


# --- genv: answers ------------------------------------------------------------


class Health(TypedDict):
  status: Literal["ok"]
  executions: int
  capacity: int


class Gym(TypedDict):
  gym: str
  gym_id: str
  families: list[str]
  tasks: int
  instances: str
  max_turns: dict[str, int | None]
  client_settings: list[str]


class Gyms(TypedDict):
  gyms: list[Gym]


class TaskMeta(TypedDict):
  id: str
  number: str
  name: str
  displayName: str
  description: str


class Task(TypedDict):
  """A task, with each of its names wherever a client looks for it."""

  task_id: str
  id: str
  name: str
  task_name: str
  display_name: str
  number: str
  task_number: str
  seed_id: str
  difficulty: Literal["", "easy", "medium", "hard"]
  family: str
  split: str
  tags: list[str]
  max_turns: int | None
  meta: TaskMeta
  description: NotRequired[str]
  instruction: NotRequired[str]
  env_config: NotRequired[Json]
  evaluation: NotRequired[Json]


class Tasks(TypedDict):
  tasks: list[Task]


class Execution(TypedDict):
  execution_id: str
  gym_id: str
  task_id: str
  status: State
  steps: int
  done: bool
  age_s: float
  lease_s: float
  lease_left_s: float
  reason: NotRequired[str]
  code: NotRequired[str]


class Executions(TypedDict):
  executions: list[Execution]


class Terminated(Execution):
  success: bool


class Screen(TypedDict):
  width: int
  height: int


class BuildStage(TypedDict):
  name: str
  status: str
  duration: float
  details: Json


class EnvBuild(TypedDict):
  status: str
  total_time: float
  stages: list[BuildStage]
  prehook_executed: bool
  prehook_output: str


class Created(Execution):
  box_id: str
  task: Task
  screen: Screen
  replayed: bool
  env_build: EnvBuild
  observation: NotRequired[wire.Observation]


class Stepped(TypedDict):
  step: int
  observation: wire.Observation


class Shown(TypedDict):
  step: int
  screenshot: wire.Screenshot


ValidatorResult = TypedDict(
  "ValidatorResult",
  {"id": str, "type": str, "pass": bool, "score": float, "weight": float},
)


class Result(TypedDict):
  score: float
  success: bool
  validators: list[ValidatorResult]
  details: NotRequired[Json]


class Evaluated(TypedDict):
  """A verdict; `score` and `reward` repeat the result's score."""

  success: bool
  score: float
  reward: float
  result: Result


# --- OpenEnv ------------------------------------------------------------------

MAX_SEED = 10**15 - 1


class Message(json_models.Request):
  """A client's message over the WebSocket."""

  model_config = pydantic.ConfigDict(extra="forbid")

  type: bounds.Name | None = None
  data: bounds.Json = {}


class Reset(json_models.Request):
  """Chooses the task by one of `task`, `index` and `seed`, or at random."""

  model_config = pydantic.ConfigDict(extra="forbid")

  task: bounds.Name | None = None
  split: Split | None = None
  index: bounds.Whole | None = None
  family: bounds.Name | None = None
  seed: Annotated[int, pydantic.Field(ge=0, le=MAX_SEED)] | None = None
  episode_id: (
    Annotated[str, pydantic.Field(min_length=1, max_length=255)] | None
  ) = None
  gym: bounds.Json = {}
  lease_s: bounds.Seconds | None = None

  @pydantic.model_validator(mode="after")
  def _one_way(self) -> Reset:
    ways = ("task", "index", "seed")
    chosen = [name for name in ways if getattr(self, name) is not None]
    if len(chosen) > 1:
      raise ValueError(
        f"{chosen[0]} and {chosen[1]} both choose the task; give one"
      )
    if self.seed is None and chosen and self.family is not None:
      raise ValueError(f"{chosen[0]} chooses the task; leave family out")
    if self.task is not None and self.split is not None:
      raise ValueError("task chooses the task; leave split out")
    if self.index is not None and self.split is None:
      raise ValueError("split=None must be train or eval: index counts in it")
    return self


class StepMetadata(json_models.Request):
  truncated: Flag = False


class SplitBody(json_models.Request):
  split: Split


class IndexBody(SplitBody):
  index: bounds.Whole


class RangeBody(SplitBody):
  start: bounds.Whole | None = None
  stop: bounds.Whole | None = None


class EpisodeMetadata(TypedDict):
  episode_id: str
  task_id: str
  evaluation: NotRequired[Result]


class EpisodeObservation(TypedDict):
  """An observation; OpenEnv sends done and reward beside it."""

  screenshot: wire.Screenshot
  instruction: str
  text: str
  info: NotRequired[Json]
  metadata: NotRequired[EpisodeMetadata]
  done: NotRequired[bool]
  reward: NotRequired[float | None]


class EpisodeStep(TypedDict):
  """The data of an "observation" message, and the answer to a reset."""

  observation: EpisodeObservation
  reward: float | None
  done: bool
  metadata: EpisodeMetadata


class EpisodeState(TypedDict):
  episode_id: str | None
  step_count: _Count
  task_id: NotRequired[str]
  family: NotRequired[str]
  seed: NotRequired[int]
  done: NotRequired[bool]
  status: NotRequired[State]
  lease_left_s: NotRequired[float]
  evaluation: NotRequired[Result | None]


@functools.cache
def openenv_schemas() -> dict[str, Any]:
  """JSON Schemas of an OpenEnv environment's action, observation and state."""
  observation = json_models.adapter(EpisodeObservation).json_schema()
  return {
    "action": {
      "type": "object",
      "properties": {"kind": {"type": "string"}},
      "required": ["kind"],
      "anyOf": wire.kind_schemas({"metadata": {"type": "object"}}),
    },
    "observation": observation,
    "reset_observation": observation,
    "state": json_models.adapter(EpisodeState).json_schema(),
  }
