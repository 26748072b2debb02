"""Builds a run's policy, engine and learner from its configuration.

Nothing here runs, waits or owns a thread, except that an engine starts its own
at the first request.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sqlite3
from typing import Any, TYPE_CHECKING

from flax import nnx
import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import config as learner_config
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.planning import run_memory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import custom_policy
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.run import before_jax
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import recorded_data
from tunix.rl.multi_turn.run import refusals
from tunix.rl.multi_turn.run import rollout_hosts
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.queue import admission
from tunix.rl.queue import group_store

TrainConfig = config_lib.TrainConfig
WARM_START = "warm_start"
"""Subdirectory of a run: the policy after cloning."""
ConfigError = config_lib.ConfigError
if TYPE_CHECKING:
  from tunix.rl.multi_turn.clients import remote_engine
  from tunix.rl.multi_turn.run.recorded_data import no_engine
  from tunix.rl.multi_turn.run.rollout_hosts import remote as remote_hosts

  Engine = (
    engine_lib.RolloutEngine
    | remote_engine.RemoteEngine
    | remote_hosts.HostsEngine
    | no_engine.NoEngine
  )


@dataclasses.dataclass
class LoadedPolicy:
  """A policy with what belongs to it.

  Attributes:
    model: flax nnx module, on the mesh if there is one.
    processor: its host side.
    tokenizer: `tokenizers.Tokenizer`.
    renderer: messages to its tokens.
  """

  model: Any
  processor: Any
  tokenizer: Any
  renderer: choice.AnyRenderer


def make_mesh(config: TrainConfig) -> jax.sharding.Mesh | None:
  """The configured mesh; None for a single device.

  Raises:
    ConfigError: it is not made of all devices.
  """
  with refusals.refused("", ValueError):
    mesh = sharding.mesh_of(config.mesh)
    if config.mesh.engine and jax.process_count() > 1:
      raise ValueError(
        f"mesh.engine={config.mesh.engine}: a run of {jax.process_count()}"
        " processes copies weights to each; leave it out, or use rollout hosts"
        " (rollout.via=hosts)"
      )
    if mesh is None and jax.process_count() > 1:
      raise ValueError(
        f"mesh={{data: 1, fsdp: 1, …}} is one device, but"
        f" {jax.process_count()} processes have {jax.device_count()}; set"
        f" mesh.fsdp={jax.device_count()}, or sizes that multiply to that"
      )
    return mesh


def make_policy(
  config: TrainConfig, mesh: jax.sharding.Mesh | None, source: str
) -> LoadedPolicy:
  """A policy with random weights (`source=""`) or those of a directory.

  Args:
    config: names the architecture and its changes.
    mesh: Mesh that holds the weights.
    source: directory or shipped name whose weights are loaded.

  Raises:
    ConfigError: no such directory, or weights of another shape.
  """
  changes = _policy_changes(config)
  name, named = config.policy.name, named_policy(config)
  screen = episodes.screen_size(config)
  try:
    if source:
      loaded = named.load(source, mesh, screen, **changes)
    else:
      loaded = named.create(config.run.seed, mesh, screen, **changes)
  except (OSError, ValueError, TypeError) as error:
    raise ConfigError(
      [before_jax.policy_problem(config, source, str(error))]
    ) from None
  except Exception as error:  # pylint: disable=broad-except
    if not policy_settings.is_factory(name):
      raise
    # A user's factory, which may raise anything.
    text = f"{type(error).__name__}: {error}"
    raise ConfigError(
      [before_jax.policy_problem(config, source, text)]
    ) from error
  model, processor, tokenizer = loaded
  if config.mesh.sequence > 1 and not isinstance(model, qwen_text.QwenText):
    raise ConfigError(
      [
        f"mesh.sequence={config.mesh.sequence}: {name} cannot split its rows;"
        " use mesh.fsdp, or a Qwen policy"
      ]
    )
  _check_screenshots(config, processor, screen)
  add_adapter(config, model)
  host_memory.settle(model)
  run_memory.settle_remat(config, model, processor, mesh)
  renderer = make_renderer(config, processor, tokenizer)
  return LoadedPolicy(model, processor, tokenizer, renderer)


def make_renderer(
  config: TrainConfig, processor: base.Processor, tokenizer: Any
) -> choice.AnyRenderer:
  """The renderer of a policy, by its chat template.

  Raises:
    ConfigError: there is none for it.
  """
  policy, named = config.policy, named_policy(config)
  where = f"policy.renderer={policy.renderer}"
  fix = f" (policy.name={policy.name})"
  if named.tokenizer and policy.name.endswith(".gguf"):
    unpacked = policy_files.resolve(named.tokenizer)
    fix = f" (policy.name={policy.name}, unpacked in {unpacked})"
  with refusals.refused(where, OSError, ValueError, fix=fix):
    if named.tokenizer:
      template = policy_files.chat_template(
        named.tokenizer, policy.template_options
      )
    else:
      template = custom_policy.chat_template(processor, policy.template_options)
    renderer = choice.make_renderer(
      tokenizer, base.layout_of(processor), template, policy.renderer
    )
  if policy.template_options and not choice.takes_options(renderer):
    names = ", ".join(policy.template_options)
    raise ConfigError(
      [
        f"policy.template_options: {policy.name} has no chat template with the"
        f" variables {names}; leave them out"
      ]
    )
  return renderer


def _check_screenshots(
  config: TrainConfig, processor: base.Processor, screen: tuple[int, int]
) -> None:
  """Refuses a policy that resizes what the agent has resized for it.

  Raises:
    ConfigError: it does, and the grammar counts its pixels.
  """
  parser = tool_parser.get_tool_parser(config.agent.parser, "operator")
  resized = base.optional(processor, "image_size")
  if (
    not callable(resized)
    or config.agent.resize == "none"
    or parser.coordinates != "absolute"
  ):
    return
  size = resized(*screen)
  if size != screen:
    width, height = screen
    raise ConfigError(
      [
        f"agent.parser={config.agent.parser} counts pixels of screenshots of"
        f" {width}x{height}, which policy.name={config.policy.name} sees as"
        f" {size[0]}x{size[1]}; set agent.min_pixels and agent.max_pixels to"
        " the policy's own bounds, choose a grammar of fractions where all"
        " images have one size (Gemma 3), or agent.resize=none for a policy"
        " with patches of its own"
      ]
    )


def add_adapter(config: TrainConfig, model: base.Policy) -> None:
  """Gives the model the adapter that GRPO trains, if one is configured.

  Raises:
    ConfigError: the policy cannot have one.
  """
  rank = config.policy.lora_rank
  if not rank:
    return
  if not isinstance(model, qwen_text.QwenText):
    raise ConfigError([before_jax.no_adapter(config)])
  experts = config.policy.lora_experts
  if experts and not model.config.text.num_experts:
    raise ConfigError(
      [
        f"policy.lora_experts=true: policy.name={config.policy.name} has no"
        " experts; set it to false"
      ]
    )
  lora.add(
    model,
    rank=rank,
    alpha=config.policy.lora_alpha or 2.0 * rank,
    seed=config.run.seed,
    experts=experts,
  )


def without_adapter(policy: LoadedPolicy) -> LoadedPolicy:
  """The policy that the adapter was put on; weights are shared."""
  model = policy.model
  if isinstance(model, qwen_text.QwenText) and lora.has_adapter(model):
    base = nnx.clone(model)
    lora.remove(base)
    policy = dataclasses.replace(policy, model=base)
  return policy


def save_policy(
  config: TrainConfig, directory: pathlib.Path, model: nnx.Module
) -> None:
  """Replaces a policy directory in one step.

  An adapter is merged, and by itself in the subdirectory `adapter`, which
  names the weights that it was put on; those that no other directory holds are
  in `base`.

  Raises:
    OSError: the disk's; the directory is as it was.
  """
  with durable.new_directory(directory) as fresh:
    if isinstance(model, qwen_text.QwenText) and lora.has_adapter(model):
      base = adapted_weights(config)
      if not base:
        bare = nnx.clone(model)
        lora.remove(bare)
        named_policy(config).save(fresh / "base", bare)
        base = str((directory / "base").absolute())
      from tunix.rl.multi_turn.policy.checkpoints import lora_files  # pylint: disable=g-import-not-at-top

      lora_files.save(fresh / "adapter", model, base_model_name=base)
      lora.merge(model)
    named_policy(config).save(fresh, model)


def adapted_weights(config: TrainConfig) -> str:
  """Directory or name of the weights that an adapter is put on.

  Those that were cloned in the run, else those that it started from; "" where
  they were random.
  """
  cloned = config.run_dir / WARM_START
  if config.warm_start.steps and cloned.is_dir():
    return str(cloned.absolute())
  source = warm_start_source(config)
  place = pathlib.Path(source).expanduser()
  return str(place.absolute()) if source and place.is_dir() else source


def tokenizer_file(config: TrainConfig) -> pathlib.Path | None:
  """The policy's tokenizer.json; None where it has no such file."""
  source = named_policy(config).tokenizer
  if not source:
    return None
  path = policy_files.resolve(source) / "tokenizer.json"
  return path if path.is_file() else None


def named_policy(config: TrainConfig) -> by_name.NamedPolicy:
  """The policy that policy.name stands for.

  Raises:
    ConfigError: it names a factory that is not there.
  """
  with refusals.refused("policy.name", ValueError):
    return by_name.resolve(config.policy.name)


def _policy_changes(config: TrainConfig) -> dict[str, Any]:
  policy = config.policy
  if policy.trajectory_pixels and not named_policy(config).takes_image_budget:
    raise ConfigError([before_jax.no_image_budget(config)])
  # A screenshot comes before the first turn and after each but the last.
  return policy.changes(config.agent.max_images or config.environment.max_turns)


def warm_start_source(config: TrainConfig) -> str:
  """Directory or shipped name of the weights a run starts from; "" = none."""
  warm, named = config.warm_start, named_policy(config)
  if warm.source == "path":
    return warm.path
  if named.brings_weights or warm.source == "embedded":
    return named.weights
  return ""


def starts_random(config: TrainConfig, source: str) -> bool:
  """Whether a run begins with random weights, replaced by `source`'s later."""
  named = named_policy(config)
  # A directory's own weights are loaded from the beginning.
  return not (named.brings_weights and source == named.weights)


def check_weights(
  config: TrainConfig, policy: LoadedPolicy, source: str
) -> None:
  """Refuses weights that cannot take the place of `policy`'s; reads none.

  Raises:
    ConfigError: no policy directory, or one of another architecture.
  """
  fix = (
    "; policy.name and policy.config must describe the weights, or start from"
    " random ones with warm_start.source=none"
  )
  where, bad = f"warm start from {source}", (OSError, ValueError, TypeError)
  with refusals.refused(where, *bad, fix=fix):
    changes = _policy_changes(config)
    named_policy(config).check(source, policy.model, **changes)


def make_engine(
  config: TrainConfig,
  policy: LoadedPolicy,
  image_store: images_lib.ImageStore,
  model: base.Policy | None = None,
  version: int = 0,
  directory: pathlib.Path | None = None,
  processes: peers_lib.Peers = peers_lib.ALONE,
  copies: sharding.HostCopies | None = None,
) -> Engine:
  """The rollout engine; not warmed up yet.

  Args:
    config: Settings of the run.
    policy: Policy that it samples from.
    image_store: Pixels of the prompts' images.
    model: the policy's, on the devices of the engine; None where those are the
      policy's own.
    version: Version of its weights.
    directory: Directory of the run, for rollout hosts.
    processes, copies: See `remote_hosts.HostsEngine`.
  """
  if not config.samples:
    return recorded_data.NoEngine(version)
  if config.rollout.via == "hosts":
    types = device_state.types_to_send(policy.model, config.engine.weights)
    return rollout_hosts.HostsEngine(
      config,
      image_store,
      directory or config.run_dir,
      processes,
      copies,
      {".".join(path): dtype for path, dtype in types.items()},
    )
  model = policy.model if model is None else model
  if config.rollout.via == "external":
    from tunix.rl.multi_turn.run import external_engine  # pylint: disable=g-import-not-at-top

    return external_engine.make_engine(
      config, policy, image_store, named_policy(config).tokenizer, model
    )
  settings = dataclasses.replace(
    config.engine,
    lockstep="true" if config.lockstep else "false",
    entropies=config.engine.entropies
    or (config.monitor.on and config.monitor.entropies),
  )
  screens = [episodes.screen_size(config)]
  if config.agent.older_scale < 1:
    older = screenshot.shrunk_size(*screens[0], config.agent.older_scale)
    screens.append(older)
  with refusals.refused("engine", ValueError):
    return engine_lib.RolloutEngine(
      model,
      policy.processor,
      image_store,
      settings,
      image_sizes=screens if config.sees_screenshots else (),
      banned_token_ids=policy.model.config.banned_token_ids,
      seed=config.run.seed,
      version=version,
    )


def make_learner(
  config: TrainConfig,
  policy: LoadedPolicy,
  image_store: images_lib.ImageStore,
  mesh: jax.sharding.Mesh | None,
  processes: peers_lib.Peers = peers_lib.ALONE,
  teacher: object = None,
) -> learner_lib.Learner:
  """The learner of GRPO; its KL term is measured to `policy`.

  `teacher` is what `make_teacher` gave.
  """
  return _make_learner(
    config,
    policy,
    image_store,
    mesh,
    config.learner,
    config.algorithm,
    reference=policy.model if config.algorithm.kl_coef else None,
    processes=processes,
    teacher=teacher,
  )


def make_teacher(
  config: TrainConfig, policy: LoadedPolicy, mesh: jax.sharding.Mesh | None
) -> Any:
  """The model of algorithm.teacher; None without one.

  Raises:
    ConfigError: no such policy, or one of another tokenizer or other images.
  """
  name = config.algorithm.teacher
  if not name:
    return None
  screen = episodes.screen_size(config)
  bad = OSError, ValueError, TypeError
  with refusals.refused(f"algorithm.teacher={name}", *bad):
    named = by_name.resolve(name)
    if not named.weights:
      raise ValueError("it brings no weights; name a directory, or tiny_vl")
    loaded = named.load(
      named.weights, mesh, screen, compute_dtype=config.policy.dtype
    )
  model, processor, tokenizer = loaded
  for what, other, own in (
    ("tokenizer", tokenizer.to_str(), policy.tokenizer.to_str()),
    (
      "image processor",
      _patches(processor, screen),
      _patches(policy.processor, screen),
    ),
  ):
    if other != own:
      raise ConfigError(
        [
          f"algorithm.teacher={name} has another {what} than"
          f" policy.name={config.policy.name}; a teacher must read the policy's"
          " tokens and patches: give one of the same family"
        ]
      )
  return model


def _patches(
  processor: base.Processor, screen: tuple[int, int]
) -> tuple[int, ...]:
  """Numbers of what a processor makes of a screenshot."""
  per_token = processor.patches_per_token
  tokens = processor.num_image_tokens(*screen) if per_token else 0
  return per_token, processor.patch_bytes, processor.position_axes, tokens


def make_cloning_learner(
  config: TrainConfig,
  policy: LoadedPolicy,
  image_store: images_lib.ImageStore,
  mesh: jax.sharding.Mesh | None,
  processes: peers_lib.Peers = peers_lib.ALONE,
) -> learner_lib.Learner:
  """The learner of the warm start's behaviour cloning."""
  warm = config.warm_start
  return _make_learner(
    config,
    policy,
    image_store,
    mesh,
    dataclasses.replace(
      config.learner,
      steps=warm.steps,
      minibatches=1,
      epochs=1,
      freeze_vision=False,
      # Fast for a new file, but it would overwrite an existing one.
      optimizer="adamw" if warm_start_source(config) else "muon",
      learning_rate=warm.learning_rate,
      schedule="cosine",
      warmup_steps=min(20, warm.steps // 2),
    ),
    dataclasses.replace(
      config.algorithm,
      objective="behaviour_cloning",
      advantage="grpo",
      kl_coef=0.0,
      kl_target=0.0,
      entropy_coef=0.0,
      teacher="",
      distill_coef=0.0,
      keep_sampling_mask=False,
    ),
    processes=processes,
  )


def _make_learner(
  config: TrainConfig,
  policy: LoadedPolicy,
  image_store: images_lib.ImageStore,
  mesh: jax.sharding.Mesh | None,
  settings: learner_config.LearnerConfig,
  algorithm: learner_config.AlgorithmConfig,
  **more: Any,
) -> learner_lib.Learner:
  with refusals.refused("learner", ValueError):
    return learner_lib.Learner(
      policy.model,
      policy.processor,
      image_store,
      settings,
      algorithm,
      sampling=config.sampling,
      gamma=config.collect.gamma,
      seed=config.run.seed,
      mesh=mesh,
      **more,
    )


def make_store(
  config: TrainConfig, images: images_lib.ImageStore, own: pathlib.Path
) -> group_store.SqliteGroupStore | None:
  """Opens the queue's durable store; None for `queue.path=""`.

  Args:
    config: Settings of the run.
    images: receives the stored groups' screenshots.
    own: file of this process, for `queue.path=auto`.

  Raises:
    ConfigError: the file cannot be one, or holds another run's groups.
  """
  path = config.queue.path
  if not path:
    return None
  if path == admission.AUTO:
    path = str(own)
  try:
    store = group_store.SqliteGroupStore(
      pathlib.Path(path).expanduser(), images=images
    )
    stored = store.known()
  except (OSError, sqlite3.Error) as error:
    advice = "give a file that is new, in a folder that can be written"
    if config.run.resume:
      advice = (
        "restore it from a copy; or delete it: the groups in it that were"
        " not trained on are collected again"
      )
    raise ConfigError(
      [f"queue.path={path} cannot be a queue's file: {error}; {advice}"]
    ) from error
  if stored and not config.run.resume:
    store.close()
    raise ConfigError(
      [
        f"queue.path={path} holds the {len(stored)} groups of another run;"
        " give a new file, or continue that run with resume="
      ]
    )
  return store
