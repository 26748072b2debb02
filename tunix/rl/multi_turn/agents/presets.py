"""Declares the agents of published models: grammar, prompt, sizes, history.

Each is `ToolAgent` with settings that are defaults where its name is chosen
(`agent=NAME`); any of them may be overridden. A grammar's module names its
source; those of the histories are here.
`of_checkpoint` names the agent of a published checkpoint.

Does not: import a parser, or build an agent.
"""

from __future__ import annotations

import pathlib
from typing import Any, Mapping

from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import json_text

_CONTEXT = 16384
"""Tokens for the prompts below, five screenshots of 1080p, and the turns."""


def _preset(
  parser: str,
  *,
  prompt: str = "",
  images: int = 0,
  new_tokens: int = 1024,
  **agent: Any,
) -> Mapping[str, Any]:
  """Returns an agent's settings, by dotted key.

  Args:
    parser: the grammar.
    prompt: name of the system prompt; "" where the grammar's is the whole.
    images: newest screenshots in the prompt; 0 for all.
    new_tokens: Longest completion of a turn, in tokens.
    **agent: other settings of the section `agent`.
  """
  return {
    "agent.parser": parser,
    "agent.system_prompt": prompt,
    "agent.max_images": images,
    **{f"agent.{name}": value for name, value in agent.items()},
    "sampling.max_new_tokens": new_tokens,
    "engine.context_length": _CONTEXT,
    "learner.row_length": _CONTEXT,
  }


_LISTED: Mapping[str, Any] = {"list_dropped_turns": True}
_PLAIN_END: Mapping[str, Any] = {"on_parse_error": "answer"}
"""The model ends an episode by text without a call."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
  # mm_agents/qwen3vl_agent.py of xlang-ai/OSWorld: four earlier screenshots,
  # older steps as a list, images of up to 12,800 vision tokens.
  "qwen3_vl_computer_use": _preset(
    "computer_use",
    prompt="qwen3_vl_computer_use",
    images=5,
    **_LISTED,
    resize="grammar",
    max_pixels=12800 * 32**2,
    new_tokens=1500,
  ),
  # mm_agents/qwen25vl_agent.py of the same: the same history.
  "qwen2_5_vl_computer_use": _preset(
    "computer_use_absolute",
    prompt="assistant",
    images=5,
    **_LISTED,
    resize="grammar",
    new_tokens=1500,
  ),
  # cookbooks/mobile_agent.ipynb of QwenLM/Qwen3-VL: one screenshot and the
  # list of earlier steps.
  "qwen3_vl_mobile_use": _preset(
    "mobile_use",
    prompt="qwen3_vl_mobile_use",
    images=1,
    **_LISTED,
    resize="grammar",
  ),
  "qwen2_5_vl_mobile_use": _preset(
    "mobile_use_absolute",
    prompt="assistant",
    images=1,
    **_LISTED,
    resize="grammar",
  ),
  # README and mm_agents/uitars15_v1.py: five screenshots, all texts.
  "ui_tars_1": _preset("ui_tars", prompt="ui_tars", images=5),
  "ui_tars_1_5": _preset(
    "ui_tars_absolute", prompt="ui_tars", images=5, resize="grammar"
  ),
  "ui_tars_1_5_mobile": _preset(
    "ui_tars_mobile", prompt="ui_tars", images=5, resize="grammar"
  ),
  # src/mai_naivigation_agent.py of Tongyi-MAI/MAI-UI: history_n=3, all texts.
  "mai_ui": _preset("mai_ui", images=3, resize="grammar", new_tokens=2048),
  # mm_agents/opencua_agent.py of xlang-ai/OSWorld: three screenshots, older
  # steps as texts in one message.
  "opencua": _preset(
    "opencua", images=3, **_LISTED, resize="grammar", new_tokens=1500
  ),
  "opencua_relative": _preset(
    "opencua_relative", images=3, **_LISTED, new_tokens=1500
  ),
  # examples/gui-agent/glm-45v/agent.md of zai-org/GLM-V: four earlier
  # screenshots at half their sides, older steps as texts.
  "glm_4_5v": _preset(
    "glm_v", images=5, **_LISTED, older_scale=0.5, new_tokens=2048
  ),
  # The same page: the current screenshot and the history as text.
  "glm_4_5v_mobile": _preset(
    "glm_v_mobile", images=1, **_LISTED, new_tokens=2048
  ),
  # OpenAI keeps every screenshot. Anthropic's and Google's reference
  # implementations keep the newest three.
  "openai_computer": _preset("openai_computer", **_PLAIN_END),
  "anthropic_computer": _preset("anthropic_computer", images=3, **_PLAIN_END),
  "gemini_computer": _preset("gemini_computer", images=3, **_PLAIN_END),
  # android_world/agents/m3a.py: one screenshot and a summary of the steps.
  "android_world": _preset("android_world", images=1, **_LISTED),
  # agents/ of ServiceNow/BrowserGym: one page and the earlier actions.
  "browsergym": _preset("browsergym", images=1, **_LISTED),
}

FAMILIES: Mapping[str, str] = {
  "qwen2_5_vl": "qwen2_5_vl_computer_use",
  "qwen3_vl": "qwen3_vl_computer_use",
  "qwen3_vl_moe": "qwen3_vl_computer_use",
  "opencua": "opencua",
  "glm4v": "glm_4_5v",
  "glm4v_moe": "glm_4_5v",
}
"""`model_type` of a checkpoint -> the agent of its family."""

_ON_PHONES: Mapping[str, str] = {
  "qwen2_5_vl_computer_use": "qwen2_5_vl_mobile_use",
  "qwen3_vl_computer_use": "qwen3_vl_mobile_use",
  "glm_4_5v": "glm_4_5v_mobile",
  "ui_tars_1_5": "ui_tars_1_5_mobile",
}

_FINE_TUNES: Mapping[str, str] = {
  "ui-tars-1.5": "ui_tars_1_5",
  "ui-tars": "ui_tars_1",
  "mai-ui": "mai_ui",
  "opencua": "opencua",
}
"""Part of a checkpoint's path -> the agent of that model, which has the
`model_type` of the model that it was made from."""

_LEAST_WIDTH = 1024
"""Narrower models are toys, whose context holds no published prompt."""


def of_checkpoint(directory: str, phone: bool = False) -> str:
  """Returns the agent of a published checkpoint, by its path and family.

  Returns "" for a directory without a readable `config.json`, for a family
  without an agent here, for a model narrower than `_LEAST_WIDTH`, and for a
  policy that a run saved, whose agent its run knows.

  Args:
    directory: The checkpoint.
    phone: Whether the gym's screens are those of a phone.
  """
  try:
    path = pathlib.Path(directory).expanduser()
    if (path / durable.SUMS).exists():
      return ""
    config = json_text.read(path / "config.json", most_bytes=1 << 20)
    text = config.get("text_config") or config
    width = int(text.get("hidden_size", 0))
  except (OSError, ValueError, AttributeError, TypeError, RuntimeError,
          OverflowError):  # fmt: skip
    return ""  # The policy's loader says what is wrong with it.
  agent = FAMILIES.get(str(config.get("model_type")), "")
  if not agent or width < _LEAST_WIDTH:
    return ""
  # A hub's cache has the name further up; a link may have one at either end.
  places = f"{path.absolute()} {path.resolve()}".lower().replace("_", "-")
  agent = next((a for part, a in _FINE_TUNES.items() if part in places), agent)
  return _ON_PHONES.get(agent, agent) if phone else agent


def reason(agent: str) -> str:
  """Returns what `of_checkpoint` goes by, and the grammar that it means."""
  grammar = f"agent.parser={PRESETS[agent]['agent.parser']} and its context"
  if agent.removesuffix("_mobile") in _FINE_TUNES.values():
    return f"{grammar} are those of the model that its path names"
  return (
    f"{grammar} are those of the family that config.json names, and not of a"
    " fine-tune with a grammar of its own"
  )
