"""Keeps an episode's messages and steps, and reads the policy's actions."""

from tunix.rl.multi_turn.agents.base_agent import BaseAgent
from tunix.rl.multi_turn.agents.history import MessageHistory
from tunix.rl.multi_turn.agents.history import MessageView
from tunix.rl.multi_turn.agents.tool_agent import ToolAgent
