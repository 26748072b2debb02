"""The stateful tools' base class by its file in the source document."""

from tunix.rl.multi_turn.tools import stateful

BaseTool = stateful.BaseTool
OpenAIFunctionToolSchema = stateful.OpenAIFunctionToolSchema
