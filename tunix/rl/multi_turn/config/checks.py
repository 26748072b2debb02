"""Finds values of different sections that cannot go together.

Each problem names the fields, the reason and the change to make. A check that
needs one section only is in that section's class.
"""

from __future__ import annotations

from typing import Iterator, Sequence

from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.agents import agent_registry as agents
from tunix.rl.multi_turn.clients import client_settings as clients_settings
from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.config import fleet_checks
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.core.statistics import evaluation_figures
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.learner import config as learner_config
from tunix.rl.multi_turn.learner.algorithms import presets
from tunix.rl.multi_turn.net import credentials
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.policy import policy_settings

TrainConfig = train_config.TrainConfig
SHIPPED = ("tiny_vl", "qwen3_vl_tiny")
"""Policies whose weights are in this package."""
LEAST_TEMPERATURE = 0.01


def contradictions(config: TrainConfig) -> list[str]:
  """Every contradiction between the sections."""
  return [
    *_episode(config),
    *_screenshots(config),
    *_observation(config),
    *_history(config),
    *_reward(config),
    *_tasks(config),
    *_engine(config),
    *_external(config),
    *data_sections.contradictions(config),
    *_learning(config),
    *_algorithm(config),
    *_queue(config),
    *_parts(config),
    *_replay(config),
    *_experts(config),
    *_warm_start(config),
    *_evaluation(config),
    *fleet_checks.problems(config),
  ]


def _evaluation(c: TrainConfig) -> Iterator[str]:
  """Evaluations between updates, and what they are for."""
  if c.eval.beside and c.rollout.via != "in_process":
    yield (
      f"eval.beside=true evaluates with a second engine in this process, and"
      f" rollout.via={c.rollout.via} has none; leave it out, or set"
      " rollout.via=in_process"
    )
  evaluate = getattr(c, "evaluate", None)
  if evaluate is not None and not c.evaluates:
    yield f"eval.on={c.eval.on}: an evaluation evaluates; leave it out"
  if evaluate is not None and not evaluate.server and c.rollout.via == "hosts":
    yield (
      "rollout.via=hosts: rollout hosts take their weights from a learner,"
      " and an evaluation has none; leave it out, or set"
      " rollout.via=in_process"
    )
  metric = c.checkpoint.keep_best
  if not metric:
    return
  why = evaluation_figures.problem(metric, c.eval.modes, c.eval.attempts)
  if why:
    yield f"checkpoint.keep_best={metric}: {why}"
  elif not c.eval.every and c.learner.steps:
    yield (
      f"checkpoint.keep_best={metric}: no update is evaluated with"
      " eval.every=0; set eval.every"
    )


_WITHOUT_SECRETS = {
  "monitor.url": "put the token into $TUNIX_MONITOR_TOKEN",
  "external.url": "put the key into $VLLM_API_KEY",
  "tracking.mlflow": (
    "put them into $MLFLOW_TRACKING_USERNAME and $MLFLOW_TRACKING_PASSWORD"
    " (or $MLFLOW_TRACKING_TOKEN), and a database's into ~/.pgpass"
  ),
  "gym.options": (
    "put it into the gym's own variable ($TUNIX_GYM_TOKEN, $GBOX_API_KEY,"
    " $OSWORLD_CLIENT_PASSWORD) or, where it takes one, gym.options."
    "token_file"
  ),
}
"""Setting -> the place of its credentials."""
_ELSEWHERE = (
  "leave it out, and let the code that needs it read an environment variable"
  " or a file"
)


def secrets(credentials_found: Sequence[credentials.Credential]) -> list[str]:
  """The problems of credentials in settings."""
  return [
    f"{one.key}={one.shown} holds {one.what}, which would be written to"
    " config.yaml, the report and every tracker;"
    f" {_place(one.key)}"
    for one in credentials_found
  ]


def _place(key: str) -> str:
  for setting, place in _WITHOUT_SECRETS.items():
    if key == setting or key.startswith(f"{setting}."):
      return place
  return _ELSEWHERE


def _environment(c: TrainConfig) -> environment_spec.EnvironmentSpec | None:
  try:
    return environment_spec.get(c.environment.name)
  except (ValueError, ImportError, TypeError):
    return None  # Its name is a problem of its own.


def _gym(c: TrainConfig) -> gyms.GymSpec | None:
  try:
    return gyms.get(c.gym.name, "operator")
  except (ValueError, ImportError, TypeError):
    return None


def _episode(c: TrainConfig) -> Iterator[str]:
  """The environment against the grammar, the gym and the policy's images."""
  spec = _environment(c)
  if spec is None:
    return
  try:
    parser = tool_parser.get_tool_parser(c.agent.parser, "operator")
  except (ValueError, ImportError):
    parser = None
  name = f"environment.name={c.environment.name}"
  reads_calls = _reads_calls(c)
  if parser is not None and reads_calls:
    is_gui = isinstance(parser, type) and issubclass(
      parser, tool_parser.GuiActionParser
    )
    if spec.grammar == "gui" and not is_gui:
      yield (
        f"agent.parser={c.agent.parser} has no GUI actions, which {name}"
        " needs; use computer_use_compact, computer_use or another GUI"
        " grammar"
      )
    if spec.grammar == "tool" and is_gui:
      yield (
        f"agent.parser={c.agent.parser} has GUI actions only, and {name}"
        " needs calls of tools; use qwen or qwen_xml"
      )
  if not spec.gym:
    default = train_config.GymConfig()
    for field in settings.fields(train_config.GymConfig):
      value = getattr(c.gym, field.name)
      if value != getattr(default, field.name):
        yield (
          f"gym.{field.name}={value}: {name} has no gym; leave it out, or"
          " set environment=cua"
        )
    if c.agent.on_parse_error == "end" and reads_calls:
      yield (
        f"agent.on_parse_error=end ends an episode of {name} at its answer,"
        " which is text without a call; set it to answer or retry"
      )


def _reads_calls(c: TrainConfig) -> bool:
  try:
    return agents.get(c.agent.name).reads_calls
  except (ValueError, ImportError):
    return False  # Its name is a problem of its own.


def _observation(c: TrainConfig) -> Iterator[str]:
  """Trees against the gym, the grammar and what else plays the episodes."""
  chosen, gym, environment = c.gym.observation, _gym(c), _environment(c)
  if chosen == "screenshot" or environment is None or not environment.gym:
    return
  if gym is not None and not gym.has_trees:
    yield (
      f"gym.observation={chosen}: gym.name={c.gym.name} shows screenshots"
      " only; leave it out, or use a gym of web pages (miniwob, browser)"
    )
  if c.rollout.agent == "run_service":
    yield (
      f"gym.observation={chosen}: rollout.agent=run_service plays by"
      " screenshots; leave one of them out"
    )
  if c.warm_start.recordings:
    yield (
      f"warm_start.recordings={c.warm_start.recordings} has screenshots and"
      f" no trees, and gym.observation={chosen} shows trees; leave one of"
      " them out"
    )
  try:
    parser = tool_parser.get_tool_parser(c.agent.parser, "operator")
  except (ValueError, ImportError):
    return
  if chosen == "axtree" and _reads_calls(c) and not parser.by_element:
    yield (
      f"agent.parser={c.agent.parser} acts on pixels, and"
      " gym.observation=axtree shows no screenshot; use browsergym, whose"
      " actions name elements by id, or gym.observation=both"
    )


def _screenshots(c: TrainConfig) -> Iterator[str]:
  """The sizes that the agent wants against the grammar and the policy."""
  try:
    agents.screenshot_options(c.agent)
    parser = tool_parser.get_tool_parser(c.agent.parser, "operator")
  except ImportError:
    return
  except ValueError as error:
    if c.agent.parser in tool_parser.tool_parser_names():
      yield str(error)
    return
  if parser.coordinates == "absolute" and c.policy.trajectory_pixels:
    yield (
      f"policy.trajectory_pixels={c.policy.trajectory_pixels} resizes"
      f" screenshots once more, and agent.parser={c.agent.parser} counts"
      " their pixels; set it to 0, and agent.resize=grammar with"
      " agent.max_pixels=<pixels of a screenshot>"
    )


def _history(c: TrainConfig) -> Iterator[str]:
  """A summarizing agent against the context and what else plays episodes."""
  bound = c.agent.summary_bound(c.engine.context_length)
  if not bound:
    return
  room = c.engine.context_length - c.agent.summary_tokens
  if bound >= room:
    yield (
      f"agent.summary_at={c.agent.summary_at:g} ({bound} tokens) leaves no"
      f" room for agent.summary_tokens={c.agent.summary_tokens} in"
      f" engine.context_length={c.engine.context_length}; set it below {room},"
      " or raise engine.context_length"
    )
  if c.rollout.agent or c.rollout.via == "buffer":
    player = "agent" if c.rollout.agent else "via"
    yield (
      "agent.history=summary is of the run's own agent, and rollout."
      f"{player}={getattr(c.rollout, player)} plays with another, whose"
      " history is its own; set agent.history=window"
    )
  environment, gym = _environment(c), _gym(c)
  summarizes = (
    environment is not None
    and environment.gym
    and gym is not None
    and gym.summarize is not None
  )
  if c.warm_start.steps and (c.warm_start.recordings or not summarizes):
    yield (
      f"warm_start.steps={c.warm_start.steps} clones demonstrations, and"
      " these hold no summaries, which agent.history=summary asks for; clone"
      " with agent.history=window and start from its checkpoint, or set"
      " warm_start.steps=0"
    )


def _reward(c: TrainConfig) -> Iterator[str]:
  if not c.environment.reward:
    yield (
      f"environment.reward={c.environment.reward!r} has no part; name a"
      " reward, e.g. reward=success"
    )
    return
  try:
    spec = rewards.plan(c.environment.reward).episode
  except (ValueError, ImportError) as error:
    yield from str(error).splitlines()
    return
  limit = c.collect.deadlines.evaluate
  if spec is not None and spec.deadline_s >= limit:
    yield (
      f"environment.reward: a reward's deadline_s={spec.deadline_s:g} must"
      f" be below collect.deadlines.evaluate={limit:g}, which would end it"
      " first"
    )


def _tasks(c: TrainConfig) -> Iterator[str]:
  """The gym's own options and size, and where its tasks come from."""
  environment, gym = _environment(c), _gym(c)
  if environment is None:
    return
  families = c.task_source.families
  generated = c.task_source.source == "generated"
  if environment.gym:
    if gym is None:
      try:
        gyms.get(c.gym.name, "operator")
      except TypeError as error:
        yield f"gym.name={c.gym.name}: {error}"
      except (ValueError, ImportError):
        pass  # Reported with all other unknown names.
      return
    yield from gym.problems(
      c.gym.options,
      c.gym.width,
      c.gym.height,
      families if generated else None,
      c.task_source.levels,
    )
    if c.task_source.source == "gym" and gym.task_list is None:
      yield (
        f"task_source.source=gym is the list of a gym server, but"
        f" gym.name={c.gym.name}; set gym.name=genv, or another source"
      )
  elif generated and not environment.tasks:
    yield (
      f"environment.name={c.environment.name} makes no tasks of its own; set"
      " task_source.source=jsonl and task_source.path"
    )
  elif c.task_source.source == "gym":
    yield (
      "task_source.source=gym is the list of a gym server, but"
      f" environment.name={c.environment.name} has no gym; set"
      " task_source.source=jsonl or huggingface"
    )


def _engine(c: TrainConfig) -> Iterator[str]:
  context = c.engine.context_length
  if c.sampling.max_new_tokens >= context:
    yield (
      f"sampling.max_new_tokens={c.sampling.max_new_tokens} leaves no room"
      f" for a prompt in engine.context_length={context}; lower the first or"
      " raise the second"
    )
  if c.engine.lockstep == "true" and c.rollout.via != "in_process":
    yield (
      "engine.lockstep=true waits for sessions in the order in which they"
      f" open, which rollout.via={c.rollout.via} does not tell the engine;"
      " set engine.lockstep=auto (equal seeds still give equal tokens, up to"
      " rounding)"
    )
  if c.engine.lockstep == "true" and c.queue.max_staleness > 0:
    yield (
      "engine.lockstep=true is for repeatable runs, which"
      f" queue.max_staleness={c.queue.max_staleness} cannot give (new"
      " weights arrive at any time); set queue.max_staleness=0 or"
      " engine.lockstep=auto"
    )
  without_engine = []
  if c.rollout.via in ("hosts", "external", "buffer", "offline"):
    without_engine.append(f"rollout.via={c.rollout.via}")
  if getattr(c, "evaluate", None) is not None:
    without_engine.append("an evaluation")
  if c.processes.count > 1:
    without_engine.append(f"processes.count={c.processes.count}")
  if c.mesh.engine and without_engine:
    yield (
      f"mesh.engine={c.mesh.engine} parts one process's devices between learner"
      f" and engine; leave it out with {' and '.join(without_engine)}"
    )
  if c.learner.row_length < context:
    yield (
      f"learner.row_length={c.learner.row_length} is shorter than"
      f" engine.context_length={context}, and sequences are never cut; raise"
      " the first or lower the second"
    )


def _external(c: TrainConfig) -> Iterator[str]:
  if c.rollout.via != "external":
    if c.external.url:
      yield (
        f"external.url={c.external.url} is not asked with"
        f" rollout.via={c.rollout.via}; set rollout.via=external"
      )
    return
  if not c.external.url:
    yield (
      "rollout.via=external needs external.url, where vLLM or SGLang listens;"
      f" {shell_hints.command('clients.vllm')} prints how to start it"
    )
  if not policy_settings.is_directory(c.policy.name):
    yield (
      f"rollout.via=external: policy.name={c.policy.name} is not a directory"
      " that another process could load; save one and give its path"
    )
  transfer = c.external.transfer
  if transfer != "reload" and c.external.protocol != "vllm":
    yield (
      f"external.transfer={transfer} is vLLM's, and"
      f" external.protocol={c.external.protocol}; leave it at reload"
    )
  s, most = c.sampling, clients_settings.SGLANG_TOP_K
  if c.external.protocol == "sglang" and (s.top_p < 1 or s.min_p):
    if not 0 < s.top_k <= most:
      yield (
        f"external.protocol=sglang with sampling.top_p={s.top_p},"
        f" sampling.min_p={s.min_p} and sampling.top_k={s.top_k}: its"
        " log-probs are those of a truncated distribution with a top_k only;"
        f" set sampling.top_k to 1 to {most}, or top_p=1 and min_p=0"
      )
  if transfer == "adapter" and not c.policy.lora_rank:
    yield (
      "external.transfer=adapter with policy.lora_rank=0: no adapter is"
      " trained; set policy.lora_rank, or external.transfer=reload"
    )
  if transfer == "adapter" and c.warm_start.steps:
    yield (
      f"external.transfer=adapter with warm_start.steps={c.warm_start.steps}:"
      " cloning trains all weights, which the server does not get; clone"
      " first, and serve the result"
    )
  if c.engine.weights != "same":
    yield (
      f"engine.weights={c.engine.weights} is of the engine in this process;"
      " leave it at same with rollout.via=external"
    )


def _learning(c: TrainConfig) -> Iterator[str]:
  size, valid = c.collect.group_size, c.collect.min_valid
  alone = c.algorithm.advantage in learner_config.COMPARED_WITH_NOTHING
  own = c.rollout.via != "offline"  # Its groups are as they were recorded.
  if c.learner.steps > 0 and size < 2 and not alone and own:
    yield (
      f"collect.group_size={size}: {c.algorithm.advantage} compares the"
      " episodes of a group, so it needs >= 2 (or steps=0)"
    )
  if c.learner.steps > 0 and valid < 2 and not alone and own:
    yield (
      f"collect.min_valid={valid}: one episode has nothing to be compared"
      " with; set it >= 2"
    )
  shards = c.mesh.data * c.mesh.fsdp
  if c.learner.rows % shards != 0:
    yield (
      f"mesh.data * mesh.fsdp = {shards} takes {shards} devices, and"
      f" learner.rows={c.learner.rows} cannot be divided among {shards}"
      " shards; with fewer devices lower mesh.*, else set learner.rows to a"
      " multiple"
    )
  if c.learner.row_length % c.mesh.sequence != 0:
    yield (
      f"learner.row_length={c.learner.row_length} cannot be divided among"
      f" mesh.sequence={c.mesh.sequence} shards; make it a multiple"
    )


def _algorithm(c: TrainConfig) -> Iterator[str]:
  if c.algorithm.name:
    try:
      presets.get(c.algorithm.name)
    except ValueError as error:
      if ":" in c.algorithm.name:
        yield f"algorithm.name={c.algorithm.name}: {error}"
    except ImportError:
      pass  # Reported with all other unknown names.
  extra = []
  if c.algorithm.kl_in_loss:
    extra.append(f"algorithm.kl_coef={c.algorithm.kl_coef}")
  if c.algorithm.entropy_coef > 0:
    extra.append(f"algorithm.entropy_coef={c.algorithm.entropy_coef}")
  if c.algorithm.advantage == "gdpo" and isinstance(c.environment.reward, str):
    yield (
      "algorithm.advantage=gdpo normalises each part of a reward, and"
      f" environment.reward={c.environment.reward} is of one piece; give a"
      " mapping of parts to weights, e.g. '{success: 1, format: 0.1}', or set"
      " algorithm.advantage=grpo"
    )
  by_pass_k = c.algorithm.advantage == "pass_at_k" and c.learner.steps > 0
  if by_pass_k and c.algorithm.pass_k > c.collect.group_size:
    yield (
      f"algorithm.pass_k={c.algorithm.pass_k} needs groups of as many"
      f" episodes, collect.group_size={c.collect.group_size}; lower the first"
      " or raise the second"
    )
  name = c.algorithm.advantage
  alone = name in learner_config.COMPARED_WITH_NOTHING
  if (alone or name == "gdpo") and c.learner.dynamic_sampling:
    yield (
      f"learner.dynamic_sampling={c.learner.dynamic_sampling} replaces groups"
      f" of equal rewards, from which algorithm.advantage={name} learns;"
      " set learner.dynamic_sampling=0"
    )
  if name == "gae":
    if c.algorithm.gae_bootstrap and c.collect.gamma == 1:
      yield (
        "algorithm.gae_bootstrap=true with collect.gamma=1 makes an episode"
        " without an end worth as much as a solved one; set collect.gamma"
        " below 1, e.g. 0.95, or algorithm.gae_bootstrap=false"
      )
    extra.append("algorithm.advantage=gae")
  if c.algorithm.distill_coef > 0:
    extra.append(f"algorithm.distill_coef={c.algorithm.distill_coef}")
  if name == "remax" and c.rollout.agent:
    yield (
      f"algorithm.advantage=remax plays a greedy episode beside each group,"
      f" and the agents of rollout.agent={c.rollout.agent} sample as they"
      " like; leave it empty, or use another algorithm"
    )
  if c.learner.skip_zero_advantage and extra:
    yield (
      "learner.skip_zero_advantage=true would also skip the term of"
      f" {' and '.join(extra)} on those groups; set"
      " learner.skip_zero_advantage=false"
    )
  if (
    c.engine.weights == "int8"
    and c.algorithm.importance == "none"
    and c.learner.steps > 0
  ):
    yield (
      "engine.weights=int8 samples from another policy than the one that"
      " learns; set algorithm.importance=tis"
    )
  s = c.sampling
  if 0 < s.temperature < LEAST_TEMPERATURE:
    yield (
      f"sampling.temperature={s.temperature:g} is neither 0 (the likeliest"
      f" token) nor >= {LEAST_TEMPERATURE:g}: gradients are divided by it;"
      " raise it"
    )
  if s.temperature == 0 and c.learner.steps > 0:
    yield (
      "sampling.temperature=0 samples the likeliest token only, and such"
      " episodes carry no policy gradient; set it > 0 (or steps=0)"
    )
  yield from _other_sampling(c)
  truncated = s.top_k > 0 or s.top_p < 1 or s.min_p > 0
  if c.algorithm.keep_sampling_mask:
    yield from _sampling_mask(c)
  elif truncated and c.algorithm.importance == "none" and c.learner.steps > 0:
    yield (
      f"sampling.top_k={s.top_k}, sampling.top_p={s.top_p},"
      f" sampling.min_p={s.min_p} sample from a truncated distribution that"
      " the learner does not reproduce; set them to 0, 1 and 0, or"
      " algorithm.keep_sampling_mask=true, or algorithm.importance=tis"
    )


def _other_sampling(c: TrainConfig) -> Iterator[str]:
  if c.rollout.other_sampling == "train" and c.algorithm.importance == "none":
    yield (
      "rollout.other_sampling=train trains on tokens of distributions that"
      " the learner does not reproduce; set algorithm.importance=tis, or"
      " rollout.other_sampling=mask"
    )


def _sampling_mask(c: TrainConfig) -> Iterator[str]:
  most = policy_client.MAX_TOP_LOGPROBS
  if not 0 < c.sampling.top_k <= most:
    yield (
      f"algorithm.keep_sampling_mask=true keeps at most {most} tokens with"
      f" each sampled one, and sampling.top_k={c.sampling.top_k}; set it to 1"
      f" to {most} (sampling.top_p and sampling.min_p are free)"
    )
  if c.rollout.agent or c.rollout.via == "proxy":
    yield (
      "algorithm.keep_sampling_mask=true: what is sampled through the proxy"
      f" (rollout.via={c.rollout.via}, rollout.agent={c.rollout.agent!r})"
      " has no mask; use rollout.via=in_process or external, or"
      " algorithm.importance=tis"
    )


def _queue(c: TrainConfig) -> Iterator[str]:
  every = c.learner.publish_every
  if every > c.queue.max_staleness + 1:
    yield (
      f"learner.publish_every={every} makes tokens up to {every - 1} versions"
      f" old, more than queue.max_staleness={c.queue.max_staleness} accepts:"
      " nothing would ever be trained on; raise queue.max_staleness or lower"
      " publish_every"
    )
  admits = f"queue.admission={c.queue.admission}"
  if not c.queue.bounds_running and c.queue.max_staleness == 0:
    yield (
      f"{admits} starts groups during updates, and"
      " queue.max_staleness=0 accepts no token from before the last one; set"
      " queue.max_staleness >= 1 or queue.admission=started"
    )
  if not c.queue.bounds_running and c.rollout.via == "hosts":
    yield (
      f"{admits} starts groups when this process has room for"
      " episodes, and with rollout.via=hosts it plays none; set"
      " queue.admission=started, and queue.max_staleness as high as hosts"
      " are to be kept busy"
    )
  groups = c.learner.groups_per_step * c.collect.parts
  if 0 < c.queue.capacity < groups:
    yield (
      f"queue.capacity={c.queue.capacity} can never hold the"
      f" {groups} groups of one update (learner.groups_per_step times the"
      " parts of a group, collect.group_size / collect.part_size); set it to"
      f" 0 or >= {groups}"
    )


_OF_EPISODES = ("grpo", "dr_grpo", "rloo")
"""Advantages that need nothing of a peer but its reward."""


def _parts(c: TrainConfig) -> Iterator[str]:
  if not c.collect.part_size or c.learner.steps <= 0:
    return
  part, advantage = c.collect.part_size, c.algorithm.advantage
  if c.rollout.via == "hosts":
    yield (
      f"collect.part_size={part} splits groups, which rollout.via=hosts lends"
      " whole; set collect.part_size=0"
    )
  if advantage not in _OF_EPISODES:
    yield (
      f"collect.part_size={part} splits groups, which"
      f" algorithm.advantage={advantage} needs whole; set"
      " collect.part_size=0, or an advantage of"
      f" {', '.join(_OF_EPISODES)}"
    )
  if c.algorithm.kl_in_reward:
    yield (
      f"collect.part_size={part} compares with the rewards of earlier parts,"
      " which algorithm.kl_in=reward would price anew; set kl_in=loss or"
      " collect.part_size=0"
    )
  if c.algorithm.overlong_tokens:
    yield (
      f"collect.part_size={part} compares with the rewards of earlier parts,"
      f" off which algorithm.overlong_tokens={c.algorithm.overlong_tokens}"
      " would take no price; set one of them to 0"
    )
  if c.task_source.order == "curriculum":
    yield (
      f"collect.part_size={part} delivers the fast members of a group first,"
      " and task_source.order=curriculum takes a group's success rate from"
      " all of its members; set task_source.order=in_turn or"
      " collect.part_size=0"
    )
  if c.lockstep or c.queue.max_staleness == 0:
    yield (
      f"collect.part_size={part} delivers episodes in the order in which they"
      f" end, and queue.max_staleness={c.queue.max_staleness} admits no group"
      " in place of parts that are dropped or never come; set"
      " queue.max_staleness > 0 or collect.part_size=0"
    )


def _replay(c: TrainConfig) -> Iterator[str]:
  age = c.learner.success_replay
  if not age:
    return
  if age > c.queue.max_staleness and c.algorithm.importance == "none":
    yield (
      f"learner.success_replay={age} lends episodes older than"
      f" queue.max_staleness={c.queue.max_staleness} accepts, without a"
      " correction; set algorithm.importance=tis, or lower the first to the"
      " second"
    )
  if c.collect.part_size:
    yield (
      f"learner.success_replay={age} lends to whole groups, and"
      f" collect.part_size={c.collect.part_size} splits them; set one to 0"
    )
  if c.algorithm.advantage in learner_config.COMPARED_WITH_NOTHING:
    yield (
      f"learner.success_replay={age} gives groups an episode to be compared"
      f" with, and algorithm.advantage={c.algorithm.advantage} compares none;"
      " set it to 0"
    )


def _experts(c: TrainConfig) -> Iterator[str]:
  share = c.collect.expert_share
  if not share:
    return
  where, gym, spec = f"collect.expert_share={share}", _gym(c), _environment(c)
  if not (gym and gym.oracle and spec and spec.gym):
    yield (
      f"{where} needs an oracle, and environment.name={c.environment.name} with"
      f" gym.name={c.gym.name} has none; set it to 0"
    )
  if c.rollout.via not in ("in_process", "hosts"):
    yield (
      f"{where} corrects what the engine of a run samples, and"
      f" rollout.via={c.rollout.via} has none here; set one to 0 or in_process"
    )
  if c.fleet.away:
    yield f"{where}: collectors of a fleet have no oracle; set it to 0"
  if c.collect.part_size:
    yield (
      f"{where} looks at whole groups, and"
      f" collect.part_size={c.collect.part_size} splits them; set one to 0"
    )
  if c.algorithm.advantage in (*learner_config.COMPARED_WITH_NOTHING, "remax"):
    yield (
      f"{where} gives groups an episode to be compared with, and"
      f" algorithm.advantage={c.algorithm.advantage} compares none; set it to 0"
    )


def _warm_start(c: TrainConfig) -> Iterator[str]:
  start = c.warm_start
  if start.source == "embedded" and c.policy.name not in SHIPPED:
    yield (
      f"warm_start.source=embedded holds weights of {' and '.join(SHIPPED)},"
      f" not of policy.name={c.policy.name}; set warm_start.source=none (a"
      " directory brings its own weights) or path"
    )
  if not start.steps or start.recordings:
    return
  environment, gym = _environment(c), _gym(c)
  if environment is not None and not environment.gym:
    if not environment.oracle:
      yield (
        f"warm_start.steps={start.steps} needs demonstrations, and"
        f" environment.name={c.environment.name} has no oracle; set"
        " warm_start.recordings to a file of conversations, or"
        " warm_start.steps=0"
      )
  elif gym is not None and gym.oracle is None:
    yield (
      f"warm_start.steps={start.steps} needs demonstrations, and"
      f" gym.name={c.gym.name} has no oracle; set warm_start.steps=0 or"
      " warm_start.recordings, or clone on desktop first and start from its"
      " checkpoint"
    )
