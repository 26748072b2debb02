"""OpenCUA put together of transformers' parts, for want of its own classes.

Those come with the checkpoint: Qwen2.5-VL's tower, and Qwen2 as a causal
language model whose positions count vision tokens one by one. Names of
parameters are the checkpoint's.
"""

import json
import pathlib

from safetensors import torch as safetensors_torch
import torch
import transformers
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as tower


class OpenCua(torch.nn.Module):
  def __init__(self, raw, dtype=torch.float32):
    """raw: the content of config.json."""
    super().__init__()
    self.raw = raw
    vision = tower.Qwen2_5_VLVisionConfig(**raw["vision_config"])
    text = transformers.Qwen2Config(**raw["text_config"])
    make = tower.Qwen2_5_VisionTransformerPretrainedModel._from_config
    self.vision_tower = make(vision)
    self.language_model = transformers.Qwen2ForCausalLM(text)
    self.to(dtype)

  def forward(
    self, input_ids, attention_mask, pixel_values=None, image_grid_thw=None
  ):
    embedded = self.language_model.get_input_embeddings()(input_ids)
    if pixel_values is not None:
      seen = self.vision_tower(pixel_values, grid_thw=image_grid_thw)
      where = input_ids == self.raw["media_placeholder_token_id"]
      embedded = embedded.masked_scatter(
        where[..., None], seen.pooler_output.to(embedded.dtype)
      )
    return self.language_model(
      inputs_embeds=embedded,
      attention_mask=attention_mask,
      position_ids=attention_mask.cumsum(-1) - 1,
    )

  def save_pretrained(self, directory):
    directory = pathlib.Path(directory)
    tensors = {
      key: value.detach().contiguous()
      for key, value in self.state_dict().items()
      if not key.endswith("inv_freq")
    }
    if self.raw["text_config"]["tie_word_embeddings"]:
      del tensors["language_model.lm_head.weight"]
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(self.raw))

  @classmethod
  def from_pretrained(cls, directory, dtype=torch.float32):
    raw = json.loads((directory / "config.json").read_text())
    found = cls(raw, dtype)
    loaded = safetensors_torch.load_file(directory / "model.safetensors")
    missing, unexpected = found.load_state_dict(loaded, strict=False)
    assert not unexpected
    tied = raw["text_config"]["tie_word_embeddings"]
    assert (
      set(missing) <= {"language_model.lm_head.weight"}
      if tied
      else (not missing)
    )
    return found.eval()
