"""Settings of a computer-use training: gym, agent service, monitor.

`CUAFields` is mixed into AReaL's configuration by `config_class`; the names are
those of the former trainer. A field that is left empty is read from the
environment where one is named.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any


@dataclasses.dataclass
class CUAFields:
  """Beside AReaL's own settings.

  Attributes:
    gym_base_url, gym_id: The gym server, and one of its gyms.
    tasks, eval_tasks: Names of tasks; [] = those of the split.
    split_type: Split of the tasks to train on, "train" or "eval".
    limit, seed: Number of tasks, 0 for all, and the seed of their draw.
    rollout_backend: "gbox_mini_agent" only.
    gbox_mini_agent_base_url: Address of the agent service; "" =
      $GBOX_MINI_AGENT_BASE_URL.
    gbox_mini_agent_agent, gbox_mini_agent_model, gbox_mini_agent_env: The run's
      agent, and fields of its `model` and `env`.
    max_turns, max_task_time_seconds, max_turn_time_seconds: Limits of a run.
    model_base_url: The policy's server or AReaL's proxy, as the agent service
      reaches it; "" = the engine's own servers.
    max_concurrent_rollouts: Runs in flight; AReaL's rollout setting, too,
      where that is null.
    baseline: Whether the held-out tasks are played before the first step.
    processor_path: The policy's processor; "" = AReaL's tokenizer_path.
    standard_action_space, run_options, poll_s: See `CUAAgentWorkflow`.
    monitor_base_url: The Training Monitor; "" = $TUNIX_MONITOR_URL; without,
      nothing is recorded.
    project_token: Its token, which is moved to $TUNIX_MONITOR_TOKEN; "" leaves
      the variable unchanged.
  """

  gym_base_url: str = "http://127.0.0.1:5010"
  gym_id: str = "desktop"
  tasks: list[str] = dataclasses.field(default_factory=list)
  eval_tasks: list[str] = dataclasses.field(default_factory=list)
  split_type: str = "train"
  limit: int = 0
  seed: int = 42
  rollout_backend: str = "gbox_mini_agent"
  gbox_mini_agent_base_url: str = ""
  gbox_mini_agent_agent: str = "mai-ui"
  gbox_mini_agent_model: str = ""
  gbox_mini_agent_env: dict[str, Any] = dataclasses.field(default_factory=dict)
  max_turns: int = 20
  max_task_time_seconds: float = 1800.0
  max_turn_time_seconds: float = 180.0
  model_base_url: str = ""
  max_concurrent_rollouts: int = 8
  baseline: bool = True
  processor_path: str = ""
  standard_action_space: str = "mobile"
  run_options: dict[str, Any] = dataclasses.field(
    default_factory=lambda: {"sampling": True}
  )
  poll_s: float = 3.0
  monitor_base_url: str = ""
  project_token: str = dataclasses.field(default="", repr=False)

  def __post_init__(self):
    if self.rollout_backend != "gbox_mini_agent":
      raise ValueError(
        f"rollout_backend={self.rollout_backend!r} is not known; set"
        " gbox_mini_agent"
      )
    if self.split_type not in ("train", "eval"):
      raise ValueError(
        f"split_type={self.split_type!r} is not known; set train or eval"
      )
    env = os.environ
    self.monitor_base_url = self.monitor_base_url or env.get(
      "TUNIX_MONITOR_URL", ""
    )
    # AReaL writes its configuration to disk, and sends it to W&B.
    if self.project_token:
      env["TUNIX_MONITOR_TOKEN"] = self.project_token
      self.project_token = ""

  def workflow_arguments(self) -> dict[str, Any]:
    """Returns the keyword arguments of `CUAAgentWorkflow`.

    The monitor's token is not among them: AReaL writes arguments to its logs.
    """
    names = (
        "gbox_mini_agent_base_url", "gbox_mini_agent_agent",
        "gbox_mini_agent_model", "gbox_mini_agent_env", "gym_base_url",
        "gym_id", "model_base_url", "max_turns", "max_task_time_seconds",
        "max_turn_time_seconds", "max_concurrent_rollouts",
        "standard_action_space", "run_options", "poll_s", "monitor_base_url",
    )  # fmt: skip
    arguments = {name: getattr(self, name) for name in names}
    path = getattr(self, "tokenizer_path", "")
    if path:
      arguments["tokenizer"] = path
      arguments["processor"] = self.processor_path or path
    if hasattr(self, "gconfig"):
      arguments["gconfig"] = self.gconfig
      arguments["group_size"] = self.gconfig.n_samples
    return arguments


@dataclasses.dataclass
class VLLMFields:
  """Settings of vLLM that computer use needs, mixed into AReaL's own.

  Attributes:
    max_model_len: Tokens of a conversation, screenshots included.
    limit_mm_per_prompt: JSON; the most images of a prompt.
    allowed_media_domains: Hosts from which vLLM may fetch screenshots; exact
      names. [] = any.
  """

  max_model_len: int | None = 262144
  limit_mm_per_prompt: str = '{"image": 64}'
  allowed_media_domains: list[str] = dataclasses.field(
    default_factory=lambda: [
      name
      for name in os.environ.get("CUA_MEDIA_DOMAINS", "").split(",")
      if name
    ]
  )


def config_class(base: type) -> type:
  """Returns AReaL's configuration (PPOConfig, GRPOConfig) with these fields."""

  def check(self):
    CUAFields.__post_init__(self)
    rollout = getattr(self, "rollout", None)
    if rollout is not None and rollout.max_concurrent_rollouts is None:
      rollout.max_concurrent_rollouts = self.max_concurrent_rollouts
    above = getattr(base, "__post_init__", None)
    if above is not None:
      above(self)

  extra = []
  served = {f.name: f for f in dataclasses.fields(base)}.get("vllm")
  if served is not None:
    vllm = dataclasses.make_dataclass(
      "CUAVLLMConfig", [], bases=(VLLMFields, served.default_factory)
    )
    extra = [("vllm", vllm, dataclasses.field(default_factory=vllm))]
  return dataclasses.make_dataclass(
    "CUAConfig",
    extra,
    bases=(CUAFields, base),
    namespace={"__post_init__": check, "__module__": __name__},
  )
