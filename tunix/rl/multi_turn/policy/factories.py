"""Imports a user's policy factory and checks its arguments.

`policy.name=package.module:factory`; `custom_policy` calls it.

Does not: call the factory, or import JAX (the factory's module may).
"""

from __future__ import annotations

import inspect
from typing import Any, Mapping

from tunix.rl.multi_turn.core import registry

FROM_RUN = ("seed", "mesh", "compute_dtype", "screen", "image_budget")
"""Arguments that the run gives to a factory that takes them."""


class Factory:
  """A factory by its name.

  Attributes:
    name: "package.module:factory".
    function: What is called.
    takes: Parameters of its signature, by name.
    own_files: Whether it saves and loads the weights itself.
  """

  def __init__(self, name: str):
    """Imports the factory.

    Raises:
      ValueError: there is none, or not one that can be called by keywords.
    """
    self.name = name
    try:
      self.function: Any = registry.import_path(name)
    except (ImportError, ValueError) as error:
      raise ValueError(
        f"{name}: {error}; give package.module:factory of a module that"
        " Python finds (PYTHONPATH, or the working directory)"
      ) from error
    if not callable(self.function):
      raise ValueError(
        f"{name} is a {type(self.function).__name__}; give a function or"
        " class that returns (model, processor, tokenizer)"
      )
    try:
      signature = inspect.signature(self.function)
    except ValueError:
      raise ValueError(f"{name} has no signature in Python") from None
    self.takes = {
      parameter.name: parameter
      for parameter in signature.parameters.values()
      if parameter.kind
      in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    self._takes_any = any(
      parameter.kind is parameter.VAR_KEYWORD
      for parameter in signature.parameters.values()
    )
    hooks = [hook for hook in ("save", "load") if hasattr(self.function, hook)]
    if len(hooks) == 1:
      raise ValueError(
        f"{name} has the attribute {hooks[0]}, but not its counterpart; give"
        " it both save(directory, model) and load(directory, model), or"
        " neither"
      )
    self.own_files = bool(hooks)

  @property
  def takes_image_budget(self) -> bool:
    return "image_budget" in self.takes

  def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the factory is called with.

    Args:
      arguments: policy.config, and what the run gives (`FROM_RUN`).

    Raises:
      ValueError: naming an argument that it does not take, or lacks.
    """
    dtype = arguments.get("compute_dtype", "float32")
    if "compute_dtype" not in self.takes and dtype != "float32":
      raise ValueError(
        f"{self.name} takes no compute_dtype, so policy.dtype={dtype} would"
        " have no effect; add the argument, or leave policy.dtype=float32"
      )
    own = [name for name in self.takes if name not in FROM_RUN]
    for key in arguments:
      if key in FROM_RUN or key in self.takes or self._takes_any:
        continue
      raise ValueError(
        f"{self.name} takes no argument {key!r}"
        f"{registry.did_you_mean(key, own) or ';'}"
        f" policy.config may hold: {', '.join(own) or 'nothing'}"
      )
    for key in own:
      needed = self.takes[key].default is inspect.Parameter.empty
      if needed and key not in arguments:
        raise ValueError(
          f"{self.name} needs the argument {key!r}; set policy.config.{key}"
        )
    return {
      key: value
      for key, value in arguments.items()
      if key in self.takes or key not in FROM_RUN
    }
