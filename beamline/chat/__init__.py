"""Chat formats: messages to token ids, token ids to channels."""

from beamline.chat.beam import BeamChat, Channels

__all__ = ["BeamChat", "Channels"]
