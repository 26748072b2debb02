"""A real SGLang on this CPU, beside the policy of vllm_server.py.

It lies in an environment of its own (`make sglang`), without which its tests
are skipped. It is started by the documented command, with what a CPU needs.
"""

import dataclasses
import pathlib
import shlex

import vllm_server

BIN = pathlib.Path(__file__).parents[2] / ".venv-sglang" / "bin"


@dataclasses.dataclass(frozen=True)
class SglangLaunch:
  """The command of docs/serving.md for a model, and flags for a CPU."""

  model: str
  port: int
  dtype: str = "float32"
  vision_cache_mib: int = 0

  def check_model(self) -> None:
    pass

  def command(self) -> str:
    documented = documented_command()
    argv = shlex.split(documented.replace("\\\n", ""))
    values = {
      "--model-path": self.model,
      "--served-model-name": vllm_server.NAME,
      "--port": str(self.port),
      "--dtype": self.dtype,
      "--context-length": str(vllm_server.CONTEXT),
    }
    for option, value in values.items():
      argv[argv.index(option) + 1] = value
    (cache,) = (i for i, word in enumerate(argv) if "VLM_CACHE" in word)
    argv[cache] = f"SGLANG_VLM_CACHE_SIZE_MB={self.vision_cache_mib}"
    shown = [argv.pop(cache), "TORCHDYNAMO_DISABLE=1", shlex.join(argv), *CPU]
    return " ".join(shown)


CPU = (
    "--device", "cpu", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--mem-fraction-static", "0.1", "--max-total-tokens", "16384",
    "--skip-server-warmup",
)  # fmt: skip


def documented_command() -> str:
  """Returns the shell command of docs/serving.md that starts SGLang."""
  page = pathlib.Path(__file__).parents[2] / "docs" / "serving.md"
  (block,) = (
    block
    for block in page.read_text(encoding="utf-8").split("\n\n")
    if block.startswith("    SGLANG_VLM_CACHE_SIZE_MB=0 ")
  )
  return block


class SglangServer(vllm_server.Server):
  """Runs the command in a shell until the context ends."""

  name = "SGLang"
  bin = BIN
