"""Builds a run's policy, engine and learner from its configuration.

Nothing here runs, waits or owns a thread, except that an engine starts its own
at the first request.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sqlite3
from typing import Any

from flax import nnx
import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.learner import config as learner_config
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy import checkpoint as policy_checkpoint
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import policy_files
from tunix.rl.multi_turn.policy import qwen_vl
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import tiny_vl
from tunix.rl.multi_turn.run import external_engine
from tunix.rl.queue import group_store

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError

BUILT_IN = {
    "tiny_vl": "tiny",
    "qwen3_vl_tiny": "qwen3_vl_tiny",
    "qwen2_5_vl_tiny": "qwen2_5_vl_tiny",
}
"""policy.name of what needs no directory -> its size."""


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
  renderer: qwen.QwenRenderer


def make_mesh(config: TrainConfig) -> jax.sharding.Mesh | None:
  """The configured mesh; None for a single device."""
  try:
    return sharding.mesh_of(config.mesh)
  except ValueError as error:
    raise ConfigError([str(error)]) from None


def make_policy(
    config: TrainConfig, mesh: jax.sharding.Mesh | None, source: str
) -> LoadedPolicy:
  """A policy with random weights (`source=""`) or those of a directory.

  Args:
    config: names the architecture and its changes.
    mesh: where weights lie.
    source: directory or shipped name whose weights are loaded.

  Raises:
    ConfigError: no such directory, or weights of another shape.
  """
  changes = _policy_changes(config)
  name = config.policy.name
  screen = (config.gym.width, config.gym.height)
  try:
    if source:
      loaded = policy_checkpoint.load_policy(source, mesh, screen, **changes)
    else:
      seed = config.run.seed
      if name in BUILT_IN:
        loaded = policy_checkpoint.create_policy(
            BUILT_IN[name], seed, tokenizer_source(config), mesh, screen,
            **changes,
        )  # pyformat: disable
      else:  # A directory: its sizes, without its weights.
        loaded = policy_checkpoint.create_like(
            name, seed, mesh, screen, **changes
        )
  except (FileNotFoundError, ValueError, TypeError) as error:
    raise ConfigError([f"policy {source or name}: {error}"]) from None
  model, processor, tokenizer = loaded
  if config.mesh.sequence > 1 and not isinstance(model, qwen_vl.QwenVL):
    raise ConfigError([
        f"mesh.sequence={config.mesh.sequence}: {name} cannot split its rows;"
        " use mesh.fsdp, or a Qwen-VL policy"
    ])
  add_adapter(config, model)
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)
  return LoadedPolicy(model, processor, tokenizer, renderer)


def add_adapter(config: TrainConfig, model: Any) -> None:
  """Gives the model the adapter that GRPO trains, if one is configured.

  Raises:
    ConfigError: the policy cannot have one.
  """
  rank = config.policy.lora_rank
  if not rank:
    return
  if not isinstance(model, qwen_vl.QwenVL):
    raise ConfigError([
        f"policy.lora_rank={rank}: policy.name={config.policy.name} takes no"
        " adapter; train all its weights (policy.lora_rank=0), or use a"
        " Qwen-VL policy"
    ])
  lora.add(
      model,
      rank=rank,
      alpha=config.policy.lora_alpha or 2.0 * rank,
      seed=config.run.seed,
  )


def without_adapter(policy: LoadedPolicy) -> LoadedPolicy:
  """The policy that the adapter was put on; weights are shared."""
  model = policy.model
  if isinstance(model, qwen_vl.QwenVL) and lora.has_adapter(model):
    base = nnx.clone(model)
    lora.remove(base)
    policy = dataclasses.replace(policy, model=base)
  return policy


def save_policy(
    config: TrainConfig, directory: pathlib.Path, model: Any
) -> None:
  """Writes a policy directory: an adapter merged, and by itself beside it."""
  if isinstance(model, qwen_vl.QwenVL) and lora.has_adapter(model):
    lora.save(
        directory / "adapter", model, base_model_name=config.policy.name
    )
    lora.merge(model)
  policy_checkpoint.save_policy(directory, model, tokenizer_source(config))


def tokenizer_file(config: TrainConfig) -> pathlib.Path | None:
  """The policy's tokenizer.json; None where its directory has none."""
  path = policy_files.resolve(tokenizer_source(config)) / "tokenizer.json"
  return path if path.is_file() else None


def tokenizer_source(config: TrainConfig) -> str:
  """Directory or shipped name whose tokenizer the policy uses."""
  return "tiny_vl" if config.policy.name in BUILT_IN else config.policy.name


def _policy_changes(config: TrainConfig) -> dict[str, Any]:
  policy = config.policy
  changes = {"compute_dtype": policy.dtype, **policy.config}
  if "image_budget" in changes:
    raise ConfigError([
        "policy.config.image_budget is no field of a policy; use"
        " policy.trajectory_pixels"
    ])
  if policy.trajectory_pixels:
    if _is_tiny_vl(policy.name):
      raise ConfigError([
          f"policy.trajectory_pixels={policy.trajectory_pixels}: tiny_vl sees"
          " every screenshot at its own size; leave it at 0, or use a Qwen-VL"
          " policy"
      ])
    # A screenshot comes before the first turn and after each but the last.
    images = config.agent.max_images or config.environment.max_turns
    changes["image_budget"] = policy.trajectory_pixels, images
  return changes


def _is_tiny_vl(name: str) -> bool:
  if name in BUILT_IN:
    return name == "tiny_vl"
  try:
    found = policy_checkpoint.load_config(name)
  except (OSError, ValueError):
    return False  # Loading it will say what is wrong.
  return isinstance(found, tiny_vl.TinyVLConfig)


def warm_start_source(config: TrainConfig) -> str:
  """Directory or shipped name of the weights a run starts from; "" = none."""
  warm, name = config.warm_start, config.policy.name
  if warm.source == "path":
    return warm.path
  # A directory brings its weights.
  if name in BUILT_IN:
    return name if warm.source == "embedded" else ""
  return name


def check_weights(
    config: TrainConfig, policy: LoadedPolicy, source: str
) -> None:
  """Refuses weights that cannot take the place of `policy`'s; reads none.

  Raises:
    ConfigError: no policy directory, or one of another architecture.
  """
  try:
    policy_checkpoint.check(source, policy.model, **_policy_changes(config))
  except (OSError, ValueError, TypeError) as error:
    raise ConfigError([
        f"warm start from {source}: {error}; policy.name and policy.config must"
        " describe the weights, or start from random ones with"
        " warm_start.source=none"
    ]) from None


def make_engine(
    config: TrainConfig,
    policy: LoadedPolicy,
    image_store: images_lib.ImageStore,
) -> engine_lib.RolloutEngine | remote_engine.RemoteEngine:
  """The rollout engine; not warmed up yet."""
  if config.rollout.via == "external":
    return external_engine.make_engine(
        config, policy, image_store, tokenizer_source(config)
    )
  settings = dataclasses.replace(
      config.engine,
      lockstep="true" if config.lockstep else "false",
      entropies=config.engine.entropies
      or (config.monitor.on and config.monitor.entropies),
  )
  screens = ((config.gym.width, config.gym.height),)
  sees_gym = environment_spec.get(config.environment.name).gym
  try:
    return engine_lib.RolloutEngine(
        policy.model,
        policy.processor,
        image_store,
        settings,
        image_sizes=screens if sees_gym else (),
        banned_token_ids=policy.model.config.banned_token_ids,
        seed=config.run.seed,
    )
  except ValueError as error:
    raise ConfigError([f"engine: {error}"]) from None


def make_learner(
    config: TrainConfig,
    policy: LoadedPolicy,
    image_store: images_lib.ImageStore,
    mesh: jax.sharding.Mesh | None,
) -> learner_lib.Learner:
  """The learner of GRPO; its KL term is measured to `policy`."""
  return _make_learner(
      config,
      policy,
      image_store,
      mesh,
      config.learner,
      config.algorithm,
      reference=policy.model if config.algorithm.kl_coef else None,
  )


def make_cloning_learner(
    config: TrainConfig,
    policy: LoadedPolicy,
    image_store: images_lib.ImageStore,
    mesh: jax.sharding.Mesh | None,
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
          # Fast from nothing, but it would overwrite what is there already.
          optimizer="adamw" if warm_start_source(config) else "muon",
          learning_rate=warm.learning_rate,
          schedule="cosine",
          warmup_steps=min(20, warm.steps // 2),
      ),
      dataclasses.replace(
          config.algorithm,
          objective="behaviour_cloning",
          kl_coef=0.0,
          entropy_coef=0.0,
      ),
  )


def _make_learner(
    config: TrainConfig,
    policy: LoadedPolicy,
    image_store: images_lib.ImageStore,
    mesh: jax.sharding.Mesh | None,
    settings: learner_config.LearnerConfig,
    algorithm: learner_config.AlgorithmConfig,
    reference: Any = None,
) -> learner_lib.Learner:
  try:
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
        reference=reference,
    )
  except ValueError as error:
    raise ConfigError([f"learner: {error}"]) from None


def make_store(
    config: TrainConfig, images: images_lib.ImageStore
) -> group_store.SqliteGroupStore | None:
  """Where the queue's groups survive a crash; None without `queue.path`.

  Raises:
    ConfigError: the file cannot be one, or holds another run's groups.
  """
  path = config.queue.path
  if not path:
    return None
  try:
    store = group_store.SqliteGroupStore(
        pathlib.Path(path).expanduser(), images=images
    )
    known = store.known()
  except (OSError, sqlite3.Error) as error:
    raise ConfigError([
        f"queue.path={path} cannot be a queue's file: {error}; give a file"
        " that is new, in a folder that can be written"
    ]) from error
  if known and not config.run.resume:
    store.close()
    raise ConfigError([
        f"queue.path={path} holds the {len(known)} groups of another run;"
        " give a file that is new, or go on with that run by resume="
    ])
  return store
