"""Resolves policy.name: a built-in policy, files, or module:factory.

Only `resolve` distinguishes the three kinds of names. Each kind implements
`NamedPolicy`: fresh weights, weights of a directory, saving, the tokenizer's
files, and the weights that come with the name.
"""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

from flax import nnx
import jax
from tunix.rl.multi_turn.policy import custom_policy
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files

BUILT_IN = {
  name: policy_settings.POLICIES.get(name)
  for name in policy_settings.POLICIES
  if name not in policy_settings.PRETRAINED
}
"""policy.name of a policy that needs no directory -> its size."""

SHIPPED = tuple(
  name
  for name in BUILT_IN
  if (policy_files.DATA / name / "config.json").is_file()
)
"""Of these, the ones that come with weights."""


class NamedPolicy(Protocol):
  """A policy by its name.

  Attributes:
    name: The name in the settings.
    tokenizer: directory or shipped name with its tokenizer's files; "" where
      there are none.
    weights: directory or shipped name of the weights that the name comes with;
      "" for none.
    brings_weights: whether it starts from them in every run.
    takes_image_budget: whether `image_budget` can be given.
  """

  name: str
  tokenizer: str
  weights: str
  brings_weights: bool

  @property
  def takes_image_budget(self) -> bool: ...

  def create(
    self,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
  ) -> checkpoint.Loaded:
    """Returns the policy with random weights; `changes` to its config."""
    ...

  def load(
    self,
    source: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
  ) -> checkpoint.Loaded:
    """Returns the policy with the weights of a directory or shipped name."""
    ...

  def check(
    self, source: str | pathlib.Path, model: nnx.Module, **changes: Any
  ) -> None:
    """Refuses weights that cannot take the place of `model`'s."""
    ...

  def save(self, directory: str | pathlib.Path, model: nnx.Module) -> None:
    """Writes a policy directory that `load` reads."""
    ...


def resolve(name: str) -> NamedPolicy:
  """Returns the policy of a name; imports a factory, reads no weights.

  Args:
    name: A name of `BUILT_IN` or `policy_settings.PRETRAINED`, a directory, a
      GGUF file, or "package.module:factory".

  Raises:
    ValueError: no such factory.
  """
  if name in BUILT_IN:
    return _BuiltIn(name)
  if policy_settings.is_factory(name):
    return custom_policy.CustomPolicy(name)
  return _Directory(name)


class _Files:
  """Base of built-in policies and directories: both take `checkpoint`."""

  brings_weights = False

  def __init__(self, name: str):
    self.name = name
    self.tokenizer = name

  @property
  def takes_image_budget(self) -> bool:
    return policy_files.takes_image_budget(self.name)

  def load(self, source, mesh=None, screen=None, **changes):
    return checkpoint.load_policy(source, mesh, screen, **changes)

  def check(self, source, model, **changes):
    checkpoint.check(source, model, **changes)

  def save(self, directory, model):
    checkpoint.save_policy(directory, model, self.tokenizer)


class _BuiltIn(_Files):
  def __init__(self, name: str):
    super().__init__(name)
    self.tokenizer = checkpoint.tokenizer_of(name)
    self.weights = name

  def create(self, seed=0, mesh=None, screen=None, **changes):
    return checkpoint.create_policy(
      BUILT_IN[self.name], seed, self.tokenizer, mesh, screen, **changes
    )


class _Directory(_Files):
  """A policy directory, or what becomes one (see `policy_files.resolve`): it
  sets the sizes and the weights."""

  brings_weights = True

  def __init__(self, name: str):
    super().__init__(name)
    self.weights = name

  def create(self, seed=0, mesh=None, screen=None, **changes):
    return checkpoint.create_like(self.name, seed, mesh, screen, **changes)
