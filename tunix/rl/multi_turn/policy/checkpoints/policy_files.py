"""Finds policy directories; reads and copies their files.

A published checkpoint keeps its chat template in one of three places: a file of
its own (transformers 5), chat_template.json (of a processor) or
tokenizer_config.json.

Does not: import JAX, which `parameters` alone needs.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any, Mapping, TYPE_CHECKING

import tokenizers
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.parser.renderer import chat_template as template_lib
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_families

if TYPE_CHECKING:
  from flax import nnx
  import jax

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "chat_template.jinja",
  "chat_template.json",
  "special_tokens_map.json",
)

_RANKS = "tiktoken.model"
"""A tokenizer that is not read here; OpenCUA is published with it."""

GENERATION_FILE = "generation_config.json"
TINY, CUSTOM = "tunix_tiny_vl", "tunix_custom"
"""`model_type` of the drawn desktop's policy, and of a user's own factory."""


def write_generation(directory: str | pathlib.Path) -> None:
  """Completes a policy's directory, which has its tokenizer and config.json.

  Nothing is written where the tokenizer names no end of a turn.

  Raises:
    OSError: a file cannot be written.
  """
  directory = pathlib.Path(directory)
  ids = generation_ids(directory)
  if "eos_token_id" not in ids:
    return
  generation = directory / GENERATION_FILE
  if generation.is_file():  # Its own, which config.json then repeats.
    existing = tensor_files.read_json(generation)
    ids |= {key: existing[key] for key in ids if existing.get(key) is not None}
  else:
    _replace_file(generation, {
        **ids,
        # As the policy is trained: of the whole distribution.
        "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    })  # fmt: skip
  path = directory / "config.json"
  config = tensor_files.read_json(path)
  completed = _with_ids(config, ids)
  if isinstance(text := config.get("text_config"), dict):
    completed["text_config"] = _with_ids(text, ids)
  if completed != config:
    _replace_file(path, completed)


def generation_ids(directory: pathlib.Path) -> dict[str, int]:
  """`eos_token_id` and `pad_token_id`, as tokenizer_config.json names them."""
  ids: dict[str, int] = {}
  path = directory / "tokenizer_config.json"
  if not path.is_file() or not (directory / "tokenizer.json").is_file():
    return ids
  named = tensor_files.read_json(path)
  added = tensor_files.read_json(directory / "tokenizer.json")
  added_ids = {
    token["content"]: token["id"] for token in added.get("added_tokens", ())
  }
  for role in ("eos", "pad"):
    token = named.get(f"{role}_token")
    # Older files hold {"content": …}.
    text = token.get("content") if isinstance(token, dict) else token
    if text in added_ids:
      ids[f"{role}_token_id"] = added_ids[text]
  return ids


def _with_ids(config: dict[str, Any], ids: dict[str, Any]) -> dict[str, Any]:
  absent = {k: v for k, v in ids.items() if config.get(k) is None}
  return {**config, **absent}


def _replace_file(path: pathlib.Path, content: dict[str, Any]) -> None:
  part = tensor_files.part(path)
  part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  part.replace(path)


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the directory that `path` stands for.

  Args:
    path: A directory, a shipped name, a GGUF file, or a name whose weights a
      package holds; for the latter two a directory in the user's cache.

  Raises:
    FileNotFoundError: There is none.
    ValueError: A GGUF file that is no policy here, or one beside another
      checkpoint.
  """
  directory = pathlib.Path(path).expanduser()
  if directory.is_dir():
    _refuse_two(directory)
    return directory
  if str(path) in policy_settings.PRETRAINED or policy_settings.is_gguf(
    str(path)
  ):
    # It builds on this module.
    from tunix.rl.multi_turn.policy.checkpoints import gguf_files

    if str(path) in policy_settings.PRETRAINED:
      directory = gguf_files.pretrained(str(path))
    if str(path) == policy_settings.SMOLVLM:
      from tunix.rl.multi_turn.policy.models.smolvlm import smolvlm_smollm2

      return smolvlm_smollm2.directory_of(directory)
    return gguf_files.directory_of(directory)
  if (DATA / str(path)).is_dir():
    return DATA / str(path)
  shipped = sorted(p.parent.name for p in DATA.glob("*/config.json"))
  hint = registry.did_you_mean(path, shipped) or _download(str(path))
  raise FileNotFoundError(
    f"{str(path)!r} is neither a policy directory nor one of the shipped"
    f" policies {shipped}{hint}"
  )


def _refuse_two(directory: pathlib.Path) -> None:
  """Raises a ValueError for a directory with a GGUF file: which weights?"""
  file = next(iter(sorted(directory.glob("*.gguf"))), None)
  if file is None:
    return
  both = any(directory.glob("*.safetensors"))
  files = f"{file.name} beside safetensors" if both else file.name
  raise ValueError(
    f"{directory} holds {files}; give {file}"
    + (", or move one of them elsewhere" if both else "")
  )


def _download(name: str) -> str:
  """Returns how to download a checkpoint by its name on the Hub, or ""."""
  owner = name.partition("/")[0]
  if name.startswith((".", "/", "~")):
    return "; there is no such directory"
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    return ""
  if owner in ("runs", "evaluations") or pathlib.Path(owner).exists():
    return "; there is no such directory"
  place = f"./{name.rpartition('/')[2]}"
  return (
    f"; download it with: hf download {name} --local-dir {place}, and give"
    f" {place}"
  )


def file_of(directory: pathlib.Path, name: str) -> pathlib.Path:
  file = directory / name
  if not file.is_file():
    raise FileNotFoundError(
      f"{directory} has no {name}; give the directory of a whole checkpoint,"
      " as it was downloaded or as a run wrote it"
    )
  return file


def model_type(directory: pathlib.Path) -> str:
  """Returns the architecture of a directory, from its config.json.

  Raises:
    FileNotFoundError: no config.json.
    ValueError: it names none.
  """
  file = file_of(directory, "config.json")
  try:
    kind = json_text.read(file)["model_type"]
  except ValueError as error:
    raise ValueError(f"{file} is not JSON: {error}") from None
  except (KeyError, TypeError):
    raise ValueError(f"{file} does not name a model_type") from None
  return str(kind)


def family_of(directory: pathlib.Path) -> str:
  """Returns the `model_type` of a directory whose policy loads here.

  Raises:
    FileNotFoundError: no config.json.
    ValueError: another architecture, or weights of a user's own factory.
  """
  kind = model_type(directory)
  if kind == CUSTOM:
    factory = json_text.read(directory / "config.json").get("factory")
    raise ValueError(
      f"{directory} holds weights of a custom policy; load them with"
      f" policy={factory} warm_start.source=path"
      f" warm_start.path={directory}"
    )
  families = (TINY, *qwen_families.VISION_LANGUAGE, *qwen_families.TEXT)
  if kind not in families:
    raise ValueError(
      f"{directory} holds a model of type"
      f" {kind!r}{config_checks.why_not(kind)}; policies here are"
      f" {', '.join(families)}"
    )
  return kind


def kind_of(name: str) -> str:
  """Returns the architecture of a built-in policy or a directory.

  "" for a directory whose loading raises an error.
  """
  if name in policy_settings.POLICIES:
    return name.removesuffix("_tiny")
  try:
    return model_type(resolve(name))
  except (OSError, ValueError):
    return ""


def takes_image_budget(name: str) -> bool:
  """Returns whether a built-in policy or a directory resizes screenshots."""
  return kind_of(name) in ("", *qwen_families.VISION_LANGUAGE)


def check(path: str, of_factory: bool = False) -> None:
  """Refuses a directory that lacks the files of a policy; leaves GGUF files.

  Args:
    path: As of `resolve`.
    of_factory: Whether weights of a user's own factory are accepted.

  Raises:
    FileNotFoundError, ValueError: naming what is missing.
  """
  if policy_settings.is_gguf(path):
    return
  directory = resolve(path)
  if not (of_factory and model_type(directory) == CUSTOM):
    family_of(directory)
  tensor_files.Reader(directory)


def load_tokenizer(path: str | pathlib.Path) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a policy directory or shipped name.

  Raises:
    FileNotFoundError: no such directory, or no tokenizer.json in it.
    ValueError: the file is damaged.
  """
  directory = resolve(path)
  if (directory / _RANKS).is_file():
    _need_conversion(directory)
  file = file_of(directory, "tokenizer.json")
  try:
    return tokenizers.Tokenizer.from_file(str(file))
  except Exception as error:  # pylint: disable=broad-except
    # The library raises no narrower class.
    raise ValueError(
      f"{file} is not a whole tokenizer ({error}); copy or download it again"
    ) from None


def _need_conversion(directory: pathlib.Path) -> None:
  """Raises FileNotFoundError where tiktoken's ranks are the only tokenizer."""
  if not (directory / "tokenizer.json").is_file():
    raise FileNotFoundError(
      f"{directory} has {_RANKS} and no tokenizer.json; convert it once, with"
      " transformers.convert_slow_tokenizer.TikTokenConverter and the pattern"
      " and special tokens of the checkpoint's own tokenizer class"
    )


def chat_template(
  path: str | pathlib.Path, options: Mapping[str, Any] | None = None
) -> template_lib.ChatTemplate | None:
  """Returns the chat template of a policy directory or shipped name.

  Args:
    path: Path of the directory.
    options: variables for the template.

  Returns:
    None where the directory has none.

  Raises:
    FileNotFoundError: no such directory.
    ValueError: a file is damaged, or holds several templates and none of them
      is called "default".
  """
  directory = resolve(path)
  config = _json_of(directory / "tokenizer_config.json")
  source: Any = None
  file = directory / "chat_template.jinja"
  if file.is_file():
    source = file.read_text(encoding="utf-8")
  else:
    of_processor = _json_of(directory / "chat_template.json")
    source = of_processor.get("chat_template") or config.get("chat_template")
  if source is None:
    return None
  if isinstance(source, list):  # As older tokenizers keep several.
    named = {t.get("name"): t.get("template") for t in source}
    source = named.get("default")
    if source is None:
      raise ValueError(
        f"{directory} has the chat templates {sorted(map(str, named))}, none"
        " of them called default; put the one to use into"
        " chat_template.jinja"
      )
  tokens = {**_json_of(directory / "special_tokens_map.json"), **config}
  special = {}
  for key, value in tokens.items():
    if isinstance(value, dict):
      value = value.get("content")
    if key.endswith("_token") and isinstance(value, str):
      special[key] = value
  return template_lib.ChatTemplate(source, special, options)


def _json_of(file: pathlib.Path) -> dict[str, Any]:
  """Returns a JSON object of a file; {} where it is not there."""
  if not file.is_file():
    return {}
  try:
    value = json_text.read(file)
  except ValueError as error:
    raise ValueError(f"{file} is not JSON ({error}); copy it again") from None
  if not isinstance(value, dict):
    raise ValueError(f"{file} holds no JSON object; copy it again")
  return value


def copy_tokenizer(source: str | pathlib.Path, directory: pathlib.Path) -> None:
  """Copies the tokenizer's files of a policy directory or shipped name.

  Only tokenizer.json has to be there: published checkpoints differ in where
  they keep the chat template.
  """
  source = resolve(source)
  if source.resolve() != directory.resolve():
    file_of(source, "tokenizer.json")
    for name in TOKENIZER_FILES:
      if (source / name).is_file():
        shutil.copyfile(source / name, directory / name)


def named_parameters(model: nnx.Module) -> dict[str, jax.Array]:
  """Parameter name ("blocks.0.q") to array."""
  return {
    ".".join(map(str, path)): variable[...]
    for path, variable in parameters(model)
  }


def misfit(weights: pathlib.Path, model: nnx.Module) -> str:
  """Returns the first tensor of a file that is not the model's, or ""."""
  with tensor_files.opened(weights) as file:
    there = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}
  here = {k: tuple(v.shape) for k, v in named_parameters(model).items()}
  for name in sorted({*there, *here}):
    if there.get(name) != here.get(name):
      return (
        f"tensor {name} is {there.get(name, 'absent')} there,"
        f" {here.get(name, 'absent')} here"
      )
  return ""


def parameters(model: nnx.Module) -> list[tuple[Any, nnx.Variable]]:
  """(path, variable) of every parameter, in the order of their paths."""
  from flax import nnx

  state = nnx.state(model, nnx.Param)
  return sorted(
    nnx.to_flat_state(state), key=lambda item: tuple(map(str, item[0]))
  )
