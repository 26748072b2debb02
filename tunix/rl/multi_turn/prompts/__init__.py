"""Provides system prompts by name."""

from tunix.rl.multi_turn.prompts.templates import get_prompt
from tunix.rl.multi_turn.prompts.templates import insert_tools
from tunix.rl.multi_turn.prompts.templates import prompt_names
from tunix.rl.multi_turn.prompts.templates import register_prompt
from tunix.rl.multi_turn.prompts.templates import render_system_prompt
