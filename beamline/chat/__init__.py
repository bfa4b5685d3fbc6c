"""Chat formats: messages to token ids, token ids to channels."""

from beamline.chat.beam import BeamChat, PromptError
from beamline.chat.channels import Channels, ToolCall

__all__ = ["BeamChat", "Channels", "PromptError", "ToolCall"]
