"""Makes policies by a user's factory, `policy.name=package.module:factory`.

`factory(**policy.config)` returns (model, processor, tokenizer): a flax nnx
module with the methods of `base.Policy`, a `base.Processor`, and a
`tokenizers.Tokenizer` with Qwen's chat tokens, which the renderer writes. A
processor with the attribute `chat_template` (Jinja; `special_tokens` has its
variables, {"bos_token": "<s>"}) brings another format. Arguments `seed`,
`mesh`, `compute_dtype`, `screen` and `image_budget` come from the run, each if
the factory's signature names it.

A saved policy is a directory with config.json, which names the factory, and
model.safetensors with every parameter under its path in the module. A factory
that has the attributes `save(directory, model)` and `load(directory, model)`
(which fills the model in place) writes and reads the weights itself.

Promises: the factory's result is checked before anything runs, and an error
names a missing method or attribute; a missing, extra or misshapen tensor is an
error that names it. The factory named in a saved directory is never imported:
only `policy.name` chooses the code that runs.

Does not: merge adapters, or save the tokenizer; the factory brings it.
"""

from __future__ import annotations

import pathlib
from typing import Any, cast, Mapping, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.parser.renderer import chat_template as template_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.parser.renderer import template
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import factories
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.checkpoints import tensor_files

MODEL_TYPE = policy_files.CUSTOM
WEIGHTS = "model.safetensors"
Loaded = tuple[Any, base.Processor, tokenizers.Tokenizer]

_MODEL_METHODS = ("__call__", "encode_images", "init_cache", "extend", "logits")
_CONFIG_FIELDS = ("vocab_size", "banned_token_ids")
_PROCESSOR_METHODS = ("num_image_tokens", "patchify", "positions")
_PROCESSOR_SIZES = ("patch_bytes", "patches_per_token", "position_axes")


class CustomPolicy:
  """A factory, and the files of the policies it makes.

  A `by_name.NamedPolicy`: the name comes with neither tokenizer files nor
  weights.

  Attributes:
    name: "package.module:factory".
  """

  tokenizer = ""
  weights = ""
  brings_weights = False

  def __init__(self, name: str):
    """Imports the factory; raises ValueError as `factories.Factory` does."""
    self.name = name
    self._made_by = factories.Factory(name)
    self._factory = self._made_by.function

  @property
  def takes_image_budget(self) -> bool:
    return self._made_by.takes_image_budget

  # --- making ----------------------------------------------------------------

  def create(
    self,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
  ) -> Loaded:
    """Calls the factory and checks its result.

    Args:
      seed, mesh, screen: of the run, given to a factory that takes them.
      **changes: policy.config, and of the run compute_dtype and image_budget.

    Raises:
      ValueError: an argument that the factory does not take or lacks, or a
        result that lacks something; names it.
    """
    arguments = {"seed": seed, "mesh": mesh, "screen": screen, **changes}
    model, processor, tokenizer = self._checked(
      self._factory(**self._made_by.checked(arguments))
    )
    if mesh is not None and "mesh" not in self._made_by.takes:
      sharding.shard_model(model, mesh)
    return model, processor, tokenizer

  def _checked(self, result: object) -> Loaded:
    if not isinstance(result, tuple) or len(result) != 3:
      raise ValueError(
        f"{self.name} returned a {type(result).__name__}; it must return the"
        " tuple (model, processor, tokenizer)"
      )
    model, processor, tokenizer = result
    if not isinstance(model, nnx.Module):
      raise ValueError(
        f"{self.name}: the model is a {type(model).__name__}; it must be a"
        " flax.nnx.Module"
      )
    self._need(model, "model", _MODEL_METHODS, method=True)
    self._need(model, "model", ("config",))
    config = cast(base.Policy, model).config
    self._need(config, "model.config", _CONFIG_FIELDS)
    self._need(processor, "processor", _PROCESSOR_SIZES)
    self._need(processor, "processor", _PROCESSOR_METHODS, method=True)
    if not isinstance(tokenizer, tokenizers.Tokenizer):
      raise ValueError(
        f"{self.name}: the tokenizer is a {type(tokenizer).__name__}; it must"
        " be a tokenizers.Tokenizer"
      )
    own_template = base.optional(processor, "chat_template")
    lacking = [t for t in qwen.CHAT_TOKENS if tokenizer.token_to_id(t) is None]
    if lacking and own_template is None:
      raise ValueError(
        f"{self.name}: the tokenizer has no token {', '.join(lacking)}, which"
        " the renderer writes; add them (add_special_tokens), use the"
        " shipped one, policy.load_tokenizer('tiny_vl'), or give the"
        " processor a chat_template"
      )
    if tokenizer.get_vocab_size() > config.vocab_size:
      raise ValueError(
        f"{self.name}: model.config.vocab_size={config.vocab_size} is"
        f" below the tokenizer's {tokenizer.get_vocab_size()} tokens"
      )
    for token in template.PLACEHOLDERS:
      placeholder = tokenizer.token_to_id(token)
      if placeholder in (None, *config.banned_token_ids):
        continue
      raise ValueError(
        f"{self.name}: model.config.banned_token_ids lacks {placeholder}, the"
        f" id of {token}, which stands for pixels and must never be sampled"
      )
    return model, processor, tokenizer

  def _need(
    self, subject: object, part: str, names: Sequence[str], method: bool = False
  ) -> None:
    for name in names:
      value = getattr(subject, name, None)
      if value is None or (method and not callable(value)):
        kind = "method" if method else "attribute"
        raise ValueError(
          f"{self.name}: {part} ({type(subject).__name__}) has no {kind}"
          f" {name!r}; policy/base.py documents the protocol"
        )

  # --- files -----------------------------------------------------------------

  def load(
    self,
    source: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
  ) -> Loaded:
    """Returns a policy of the factory with the weights of a saved directory.

    Raises:
      FileNotFoundError, ValueError: as `check` and `create`.
    """
    directory = _directory(source)
    model, processor, tokenizer = self.create(0, mesh, screen, **changes)
    if self._made_by.own_files:
      self._factory.load(directory, model)
    else:
      self.check(directory, model)
      with tensor_files.opened(directory / WEIGHTS) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
      filled = []
      for path, variable in policy_files.parameters(model):
        old = variable.get_value()
        value = tensors[".".join(map(str, path))].astype(old.dtype)
        if isinstance(old.sharding, jax.sharding.NamedSharding):
          value = sharding.put(value, old.sharding)
        filled.append((path, variable.replace(jnp.asarray(value))))
      nnx.update(model, nnx.from_flat_state(filled))
    return model, processor, tokenizer

  def check(
    self, source: str | pathlib.Path, model: nnx.Module, **changes: Any
  ) -> None:
    """Refuses weights that cannot take the place of `model`'s; reads none.

    Of a directory that the factory's own `save` wrote, checks its existence
    only.

    Raises:
      FileNotFoundError: the directory or a file of it is missing.
      ValueError: naming the first tensor that differs.
    """
    del changes  # The model was made with them.
    directory = _directory(source)
    if self._made_by.own_files:
      return
    file = policy_files.file_of(directory, WEIGHTS)
    if difference := policy_files.misfit(file, model):
      raise ValueError(f"{directory} does not fit {self.name}: {difference}")

  def save(self, directory: str | pathlib.Path, model: nnx.Module) -> None:
    """Writes a directory that `load` reads; its policy files are replaced."""
    directory = pathlib.Path(directory).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    if self._made_by.own_files:
      self._factory.save(directory, model)
    else:
      tensors = {
        name: _as_stored(value)
        for name, value in policy_files.named_parameters(model).items()
      }
      tensor_files.save(directory / WEIGHTS, tensors)
    config = {"model_type": MODEL_TYPE, "factory": self.name}
    # Last: a directory with a config.json has its weights.
    durable.write_bytes(
      directory / "config.json", tensor_files.json_bytes(config)
    )


def chat_template(
  processor: base.Processor, options: Mapping[str, Any]
) -> template_lib.ChatTemplate | None:
  """Returns the template that a factory's processor brings; None for none.

  Raises:
    ValueError: it is no Jinja.
  """
  source = base.optional(processor, "chat_template")
  if source is None:
    return None
  if not isinstance(source, str):
    raise ValueError(
      f"processor.chat_template is a {type(source).__name__}; give Jinja's text"
    )
  special = base.optional(processor, "special_tokens")
  return template_lib.ChatTemplate(source, special, options)


def _directory(source: str | pathlib.Path) -> pathlib.Path:
  directory = pathlib.Path(source).expanduser()
  if not directory.is_dir():
    raise FileNotFoundError(
      f"{str(source)!r} is not a directory; give that of a saved policy"
    )
  return directory


def _as_stored(value: jax.Array) -> np.ndarray:
  """As a numpy array; narrow float dtypes exactly in float32."""
  narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.itemsize < 4
  return np.asarray(value, np.float32 if narrow else None)
