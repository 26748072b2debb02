"""Builds the command that starts vLLM as the rollout engine.

    python -m tunix.rl.multi_turn.clients.vllm --model DIR

prints the command for computer use: contexts that hold an episode's
screenshots, as many images as an episode has, images from listed hosts only,
log-probs of the distribution that was sampled from, the endpoint that takes
tokens with images. Settings come from the command line or from TUNIX_VLLM_…
variables.

Promises: a shell reads the printed command as the same argument list, JSON
included; an impossible setting is refused by name, as is a policy that vLLM
does not serve. Written for vLLM 0.32, which tests start by it.

Does not start vLLM, or need it. `disk_weights` hands over weights,
`openai_client` asks for completions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shlex
import sys
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import json_text

NO_HOST = "none.invalid"
"""A host that cannot exist. Without a list of hosts vLLM fetches from any, and
the list cannot be empty. data: URLs are not fetched."""

DTYPES = ("bfloat16", "float16", "float32")
CPU_HEAD_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that attention of vLLM's CPU build has kernels for. At another one the
server starts, and dies of its first request."""
_CPU_BATCH_TOKENS = 32768
VARIABLE = "TUNIX_VLLM_"
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""

_HOST = re.compile(
  r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*"
  r"[a-z0-9])?)*"
)


def config_of(directory: str) -> dict[str, Any] | None:
  """Returns the policy's config.json; None where there is no directory of
  one."""
  file = pathlib.Path(directory).expanduser() / "config.json"
  if not file.is_file():
    return None
  try:
    return json_text.read(file)
  except ValueError as error:
    raise ValueError(f"{file} is not JSON: {error}") from None


def stored_dtype(config: Mapping[str, Any]) -> str:
  """Type of a policy's files by its config.json; "" where it has none."""
  for part in (config, config.get("text_config") or {}):
    for key in ("dtype", "torch_dtype"):
      if part.get(key) in DTYPES:
        return part[key]
  return ""


def head_problem(config: Mapping[str, Any]) -> str:
  """Why vLLM's CPU build cannot serve a policy, by its config.json; "" where
  it can."""
  text = config.get("text_config") or config
  width = text.get("head_dim") or (
    text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
  )
  if not width or width in CPU_HEAD_WIDTHS:
    return ""
  return (
    f"has heads {width} wide, of which vLLM's CPU build dies at the first"
    f" request: it serves widths {', '.join(map(str, CPU_HEAD_WIDTHS))};"
    " serve a policy of those, or sample in this process"
    " (rollout.via=in_process)"
  )


@dataclasses.dataclass(frozen=True)
class VllmLaunch:
  """A vLLM server for computer use.

  Attributes:
    model: Directory or name of the policy that the server starts with.
    served_name: The model's name for clients; "" is `model`.
    host, port: Address to listen on. Another host than this machine needs
      `api_key_file`.
    max_model_len: Tokens of a sequence, images included.
    images: Largest number of images of a prompt.
    allowed_media_domains: Hosts that image URLs may name, compared exactly: a
      subdomain is another host. None: images come as data URLs only.
    tensor_parallel: Number of devices that share each layer.
    dtype: Type that vLLM computes in; "" is that of the policy's files. vLLM's
      own choice for float32 files is bfloat16.
    cpu_cache_gib: Memory of the KV cache where a CPU computes, in GiB; 0 for an
      accelerator.
    reload_weights: open the endpoints that load new weights. Anyone who
      reaches the port can then load some: keep it on this machine or in a
      closed network.
    lora_rank: Rank of the adapter that external.transfer=adapter hands over; 0
      for none.
    api_key_file: holds the key that clients must present; "" asks for none.
    extra: further arguments, at the end.
  """

  model: str
  served_name: str = ""
  host: str = "127.0.0.1"
  port: int = 8000
  max_model_len: int = 262144
  images: int = 64
  allowed_media_domains: tuple[str, ...] = ()
  tensor_parallel: int = 1
  dtype: str = ""
  cpu_cache_gib: int = 0
  reload_weights: bool = True
  lora_rank: int = 0
  api_key_file: str = ""
  extra: tuple[str, ...] = ()

  def __post_init__(self):
    if not self.model:
      raise ValueError("model='' names no policy; give its directory or name")
    if self.model.startswith("-"):
      raise ValueError(f"model={self.model!r} would be read as an option")
    for name, low, high in (
      ("port", 0, 65535),
      ("max_model_len", 2, 1 << 31),
      ("images", 0, 1 << 20),
      ("tensor_parallel", 1, 1 << 16),
      ("cpu_cache_gib", 0, 1 << 16),
    ):
      value = getattr(self, name)
      if type(value) is not int or not low <= value <= high:
        raise ValueError(
          f"{name}={value!r} must be an integer in [{low}, {high}]"
        )
    if self.dtype and self.dtype not in DTYPES:
      raise ValueError(
        f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}"
      )
    if isinstance(self.allowed_media_domains, str):
      raise ValueError(
        f"allowed_media_domains={self.allowed_media_domains!r} must be a list"
        f" of hosts: ({self.allowed_media_domains!r},)"
      )
    object.__setattr__(
      self, "allowed_media_domains", tuple(self.allowed_media_domains)
    )
    object.__setattr__(self, "extra", tuple(self.extra))
    for host in self.allowed_media_domains:
      if why := _wrong_host(host):
        raise ValueError(f"allowed_media_domains: {why}")
    if not 0 <= self.lora_rank <= _LORA_RANKS[-1]:
      raise ValueError(
        f"lora_rank={self.lora_rank} must be 0 to {_LORA_RANKS[-1]}, which is"
        " the most that vLLM serves"
      )
    if self.lora_rank and not self.reload_weights:
      raise ValueError(
        f"lora_rank={self.lora_rank} needs the endpoints of reload_weights=True"
      )
    if not _is_local(self.host) and not self.api_key_file:
      raise ValueError(
        f"host={self.host!r} can be reached from elsewhere; give"
        " api_key_file, or leave host at 127.0.0.1"
      )
    if not _is_local(self.host) and self.reload_weights:
      raise ValueError(
        f"host={self.host!r} with reload_weights=True: no key protects the"
        " endpoints that load weights; listen on 127.0.0.1 behind a proxy of"
        " your own, or set reload_weights=False"
      )

  # --- from elsewhere --------------------------------------------------------

  @classmethod
  def from_environment(
    cls, environment: Mapping[str, str] | None = None, **settings: Any
  ) -> VllmLaunch:
    """Reads TUNIX_VLLM_<FIELD> variables; `given` takes precedence.

    Lists are separated by commas or spaces: vLLM would read one word with
    commas as one host.

    Raises:
      ValueError: naming the variable.
    """
    environment = os.environ if environment is None else environment
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
      if not variable.startswith(VARIABLE):
        continue
      name = variable.removeprefix(VARIABLE).lower()
      if name not in fields:
        raise ValueError(
          f"{variable}={text} is not a setting; known:"
          f" {', '.join(VARIABLE + f.upper() for f in fields)}"
        )
      values[name] = _read(variable, text, str(fields[name].type))
    values |= settings
    if "model" not in values:
      raise ValueError(f"no model was given; set {VARIABLE}MODEL")
    return cls(**values)

  # --- the command -----------------------------------------------------------

  @property
  def name(self) -> str:
    """The model's name for clients."""
    return self.served_name or self.model

  def argv(self) -> list[str]:
    """Returns the command, one string an argument.

    Raises:
      ValueError: dtype is "", and no file of the policy says it.
    """
    arguments = [
        "vllm", "serve", self.model,
        "--served-model-name", self.name,
        "--host", self.host,
        "--port", str(self.port),
        "--max-model-len", str(self.max_model_len),
        "--limit-mm-per-prompt", _json({"image": self.images}),
        "--allowed-media-domains",
        *(self.allowed_media_domains or (NO_HOST,)),
        "--logprobs-mode", "processed_logprobs",
        # Opens /inference/v1/generate, which takes tokens with images.
        "--enable-scale-out",
        # Else penalties and top-k of generation_config.json apply to requests
        # without them.
        "--generation-config", "vllm",
        "--dtype", self.dtype or self._stored_dtype(),
        "--tensor-parallel-size", str(self.tensor_parallel),
    ]  # fmt: skip
    if self.cpu_cache_gib:
      # A seeded request whose prompt is read in two steps kills the CPU build.
      # Whole prompts of this many sequences fit one step.
      tokens = max(_CPU_BATCH_TOKENS, self.max_model_len)
      arguments += [
        "--enforce-eager",
        "--max-num-batched-tokens",
        str(tokens),
        "--max-num-seqs",
        str(min(256, tokens // self.max_model_len)),
      ]
    if self.lora_rank:
      rank = next(r for r in _LORA_RANKS if r >= self.lora_rank)
      arguments += ["--enable-lora", "--max-lora-rank", str(rank)]
    return [*arguments, *self.extra]

  def environment(self) -> dict[str, str]:
    """Returns the process's environment variables.

    Raises:
      OSError, ValueError: the key's file cannot be read, or is empty.
    """
    # A listed host could redirect to any other.
    variables = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    if self.cpu_cache_gib:
      variables["VLLM_CPU_KVCACHE_SPACE"] = str(self.cpu_cache_gib)
      # Else one core is left to the server's other process.
      variables["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    if self.reload_weights:
      variables["VLLM_SERVER_DEV_MODE"] = "1"
    if self.lora_rank:
      variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if self.api_key_file:
      key = pathlib.Path(self.api_key_file).read_text(encoding="utf-8").strip()
      if not key:
        raise ValueError(f"api_key_file={self.api_key_file} is empty")
      variables["VLLM_API_KEY"] = key
    return variables

  def command(self) -> str:
    """Returns the command for a shell, which reads the key's file when it
    runs."""
    variables = {
      k: shlex.quote(v)
      for k, v in dataclasses.replace(self, api_key_file="", host="127.0.0.1")
      .environment()
      .items()
    }
    if self.api_key_file:
      variables["VLLM_API_KEY"] = f'"$(cat {shlex.quote(self.api_key_file)})"'
    shown = " ".join(f"{k}={v}" for k, v in variables.items())
    return f"{shown} {shlex.join(self.argv())}"

  def check_model(self) -> None:
    """Compares with the model's own config.json, where it is a directory.

    Raises:
      ValueError: vLLM does not know the model, its positions end before
        `max_model_len`, it takes no images, `dtype` rounds its weights, or the
        CPU build has no kernels for its heads.
    """
    config = self._config()
    if config is None:
      return
    if config.get("model_type") == "tunix_tiny_vl":
      raise ValueError(
        f"{self.model} is of this package's own architecture, tiny_vl, which"
        " vLLM does not serve; sample in this process"
        " (rollout.via=in_process)"
      )
    text = config.get("text_config") or config
    longest = text.get("max_position_embeddings")
    if isinstance(longest, int) and self.max_model_len > longest:
      raise ValueError(
        f"max_model_len={self.max_model_len} exceeds the {longest} positions"
        f" of {self.model}; set max_model_len={longest} or less"
      )
    if self.images and "vision_config" not in config:
      raise ValueError(
        f"images={self.images}: {self.model} has no vision_config, so it"
        " takes none; serve a vision-language policy, or set images=0"
      )
    if self.dtype and self.dtype != "float32":
      stored = self._stored_dtype()
      if stored != self.dtype:
        raise ValueError(
          f"dtype={self.dtype} rounds the {stored} weights of {self.model};"
          f" set dtype={stored} or float32, or save them in {self.dtype}"
        )
    problem = head_problem(config)
    if self.cpu_cache_gib and problem:
      raise ValueError(f"{self.model} {problem}")

  def _config(self) -> dict[str, Any] | None:
    return config_of(self.model)

  def _stored_dtype(self) -> str:
    """Type of the policy's files, as its config.json says."""
    if stored := stored_dtype(self._config() or {}):
      return stored
    raise ValueError(
      f"dtype='': no config.json in {self.model} says the type of its"
      " weights, and vLLM would round float32; set dtype to one of"
      f" {', '.join(DTYPES)}"
    )


# --- pieces -------------------------------------------------------------------


def _wrong_host(host: str) -> str:
  """Returns the problem of a host's name; "" for none."""
  if "," in host:
    return (
      f"{host!r} is one host with a comma in its name; separate hosts by spaces"
    )
  if "*" in host:
    return f"{host!r}: names are compared exactly; list each host"
  if not _HOST.fullmatch(host):
    return (
      f"{host!r} is not a host name; write host.example, without scheme, port"
      " or path, in lower case"
    )
  return ""


def _is_local(host: str) -> bool:
  return host in ("localhost", "::1") or host.startswith("127.")


def _json(value: object) -> str:
  return json.dumps(value, separators=(",", ":"))


def _read(variable: str, text: str, kind: str) -> Any:
  """Returns a variable's text as its field's type."""
  if kind.startswith("tuple"):
    return tuple(re.split(r"[,\s]+", text.strip())) if text.strip() else ()
  if kind == "int":
    try:
      return int(text)
    except ValueError:
      raise ValueError(f"{variable}={text} must be an integer") from None
  if kind == "bool":
    if text.lower() in ("1", "true", "yes"):
      return True
    if text.lower() in ("0", "false", "no"):
      return False
    raise ValueError(f"{variable}={text} must be true or false")
  return text


# The texts of --help.
_METAVARS = {"int": "N", "bool": "true|false", "tuple[str, ...]": "WORD"}
_HELP = {
  "model": "directory or name of the policy that it starts with; required",
  "served_name": "the model's name for clients (--model)",
  "host": "address to listen on; one for other machines needs --api-key-file",
  "port": "of that address",
  "max_model_len": "tokens of a sequence, images included",
  "images": "most images of a prompt",
  "allowed_media_domains": (
    "hosts that image URLs may name, compared exactly (none: images come"
    " as data URLs)"
  ),
  "tensor_parallel": "devices that share each layer",
  "dtype": f"type to compute in: {', '.join(DTYPES)} (that of the files)",
  "cpu_cache_gib": (
    "GiB of the KV cache where a CPU computes; 0 for an accelerator"
  ),
  "lora_rank": "of the adapter of external.transfer=adapter (0: none)",
  "reload_weights": (
    "open the endpoints that load new weights to anyone on the port"
  ),
  "api_key_file": "holds the key that clients must present (none)",
  "extra": "further arguments of vLLM, at the end",
}


def _default(field: dataclasses.Field[Any]) -> str:
  if field.default in (dataclasses.MISSING, "", ()):
    return ""
  shown = str(field.default)
  return f" ({shown.lower() if isinstance(field.default, bool) else shown})"


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the command; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.clients.vllm",
    description="Print the command that starts vLLM as the rollout engine.",
    epilog=f"Each setting may also be a variable, {VARIABLE}MAX_MODEL_LEN.",
  )
  for field in dataclasses.fields(VllmLaunch):
    option = "--" + field.name.replace("_", "-")
    kind = str(field.type)
    parser.add_argument(
      option,
      nargs="+" if kind.startswith("tuple") else None,
      metavar=_METAVARS.get(kind, "TEXT"),
      help=_HELP[field.name] + _default(field),
    )
  args = vars(parser.parse_args(argv))
  settings: dict[str, Any] = {}
  try:
    for field in dataclasses.fields(VllmLaunch):
      value = args[field.name]
      if isinstance(value, list):
        settings[field.name] = tuple(value)
      elif value is not None:
        option = "--" + field.name.replace("_", "-")
        settings[field.name] = _read(option, value, str(field.type))
    launch = VllmLaunch.from_environment(**settings)
    launch.check_model()
    launch.environment()
    command = launch.command()
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(command)
  return 0


if __name__ == "__main__":
  sys.exit(main())
