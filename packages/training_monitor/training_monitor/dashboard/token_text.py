"""Decodes token ids, where a tokenizer of the run's model is known.

The built-in policies' is in the package. Others are given when the server
starts: a name from a client never becomes a path.
"""

from __future__ import annotations

import logging
import pathlib
import threading
from typing import Mapping, Sequence, TYPE_CHECKING

if TYPE_CHECKING:
  import tokenizers as tokenizers_lib

_LOG = logging.getLogger(__name__)
_BUILT_IN = pathlib.Path(__file__).with_name("tiny_vl_tokenizer.json")
_BUILT_IN_NAMES = (
    "", "tiny", "tiny_vl", "qwen3_vl_tiny", "qwen3_5_tiny",
    "qwen2_5_vl_tiny", "qwen2_vl_tiny", "qwen3_text_tiny",
)  # fmt: skip


class TokenTexts:
  """Model names -> their tokenizers, loaded when first needed."""

  def __init__(
    self, tokenizers: Mapping[str, str | pathlib.Path] | None = None
  ):
    """Args:

      tokenizers: model name -> `tokenizer.json`, or the folder with it.

    Raises:
      ValueError: there is none.
    """
    self._paths = {name: _BUILT_IN for name in _BUILT_IN_NAMES}
    for name, target in (tokenizers or {}).items():
      path = pathlib.Path(target).expanduser()
      if path.is_dir():
        path /= "tokenizer.json"
      if not path.is_file():
        raise ValueError(
          f"--tokenizer {name}={target}: there is no {path}; give a"
          " tokenizer.json, or the folder of a model that has one"
        )
      self._paths[name] = path
    self._loaded: dict[pathlib.Path, tokenizers_lib.Tokenizer | None] = {}
    self._lock = threading.Lock()

  def of(self, model: str, ids: Sequence[int]) -> list[str] | None:
    """Returns the text of each token; None without a tokenizer of this model.

    A token that is a part of a character is shown as U+FFFD.
    """
    # `model_path` of a rollout ends with the version of the weights.
    path = self._paths.get(model) or self._paths.get(model.rpartition("@")[0])
    if path is None:
      return None
    with self._lock:
      if path not in self._loaded:
        self._loaded[path] = _load(path)
      tokenizer = self._loaded[path]
    if tokenizer is None:
      return None
    try:
      return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    except (OverflowError, TypeError):
      return None  # Ids that no tokenizer has.


def _load(path: pathlib.Path) -> tokenizers_lib.Tokenizer | None:
  try:
    import tokenizers  # pylint: disable=g-import-not-at-top

    return tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # pylint: disable=broad-except
    _LOG.warning("%s: %s; token ids stay numbers", path, error)
    return None
