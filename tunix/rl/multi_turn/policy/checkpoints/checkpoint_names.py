"""Names a policy's parameters as its checkpoint's files do.

A parameter's path is its key, but for prefixes that differ between families and
versions; stacked layers have a key each.

Does not: read or write files (see `hf_checkpoint`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from flax import nnx
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers

# Other spellings of a key, for reading: of Qwen2.5-VL before transformers
# 4.52, as in the published files.
_OLD_PREFIXES = (
  ("model.language_model.", "model."),
  ("model.visual.", "visual."),
  # Of Gemma 3 as transformers 4.52 and later, and 5, write it.
  ("vision_tower.vision_model.", "vision_tower."),
  ("vision_tower.vision_model.", "model.vision_tower.vision_model."),
  ("multi_modal_projector.", "model.multi_modal_projector."),
  ("language_model.model.", "model.language_model."),
  ("language_model.lm_head.", "lm_head."),
)


class Tensor:
  """One parameter of the model and where the checkpoint has it.

  Attributes:
    path: Path of the parameter in the module.
    variable: the parameter.
    keys: Keys in the file; several for stacked layers, in their order.
    stacked: the module's leading axis is the layer.
    transposed: the last two axes are swapped in the module.
    either_way: experts' matrices, whose files differ in this.
    fixed: whether it is float32 in the module and in files in any case.
  """

  def __init__(
    self,
    path: tuple[Any, ...],
    variable: nnx.Variable,
    prefixes: Sequence[tuple[str, str]] = (),
  ):
    """Args:

    path: Path of the parameter in the module.
    variable: the parameter.
    prefixes: (ours, the file's) beginnings of keys.
    """
    metadata = variable.get_metadata()
    self.path = path
    self.variable = variable
    self.transposed = bool(metadata.get("transposed"))
    self.either_way = "experts" in path
    self.fixed = isinstance(variable, layers.FixedParam)
    self.stacked = bool(metadata.get("stacked"))
    shape = tuple(variable.shape)
    names = [str(part) for part in path]
    # A text model's decoder is called "model" already.
    prefix = "" if names[0] in ("lm_head", "model") else "model."

    def key(parts: Sequence[str]) -> str:
      return _renamed(prefix + ".".join(parts), prefixes)

    if self.stacked:
      at = names.index("layers") + 1
      self.keys = tuple(
        key([*names[:at], str(i), *names[at:]]) for i in range(shape[0])
      )
      shape = shape[1:]
    else:
      self.keys = (key(names),)
    self._shape = shape

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of each key's tensor in the file."""
    shape = self._shape
    if self.transposed:
      return (*shape[:-2], shape[-1], shape[-2])
    return shape

  @property
  def square(self) -> bool:
    return self._shape[-1] == self._shape[-2]


def _renamed(key: str, prefixes: Sequence[tuple[str, str]]) -> str:
  for prefix, file_prefix in prefixes:
    if key.startswith(prefix):
      return file_prefix + key[len(prefix) :]
  return key


def tensors_of(model: Any) -> list[Tensor]:
  """Returns a published checkpoint's parameters, without adapters'."""
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  tensors = [
    Tensor(path, variable, model.config.traits.prefixes)
    for path, variable in flat
    if not str(path[-1]).startswith("lora_")
  ]
  return sorted(tensors, key=lambda tensor: tensor.keys)


class Piece(NamedTuple):
  """A tensor of a file: a parameter's layer, or matrices of it.

  Attributes:
    tensor: the parameter.
    layer: Number of the layer where layers are stacked.
    expert: Number of the expert; None = all experts of the parameter.
    half: 0 or 1 for gate or up of a matrix that holds both; None = whole.
  """

  tensor: Tensor
  layer: int = 0
  expert: int | None = None
  half: int | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    """In the file."""
    if self.expert is None:
      return self.tensor.shape
    _, rows, columns = self.tensor.shape
    return (rows if self.half is None else rows // 2), columns


def pieces_of(
  tensors: Sequence[Tensor], experts_apart: bool = False
) -> dict[str, Piece]:
  """Returns the tensors of a checkpoint's files, by key.

  Args:
    tensors: Tensors of a model; experts that lie apart must be transposed.
    experts_apart: whether each expert's matrices are tensors of their own.
  """
  pieces: dict[str, Piece] = {}
  for tensor in tensors:
    for layer, key in enumerate(tensor.keys):
      if not (experts_apart and tensor.either_way):
        pieces[key] = Piece(tensor, layer)
        continue
      home, _, name = key.rpartition(".")
      halves: tuple[tuple[int | None, str], ...] = ((None, name),)
      if name == "gate_up_proj":
        halves = ((0, "gate_proj"), (1, "up_proj"))
      for expert in range(tensor.shape[0]):
        for half, part in halves:
          pieces[f"{home}.{expert}.{part}.weight"] = Piece(
            tensor, layer, expert, half
          )
  return pieces


def spellings(key: str) -> list[str]:
  """Names that files may use for `key`, ours first."""
  return [key] + [
    old + key[len(new) :] for new, old in _OLD_PREFIXES if key.startswith(new)
  ]
