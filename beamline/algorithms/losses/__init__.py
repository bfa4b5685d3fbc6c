"""Policy losses: the file named like ``algorithm.loss.name`` has ``token_losses`` and, for some, ``select``."""

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.losses.terms import BatchTokens, TokenLosses, Tokens
from beamline.config.losses import Loss

__all__ = ["BatchTokens", "TokenLosses", "Tokens", "select", "selects", "token_losses"]


def token_losses(tokens: Tokens, config: Loss) -> TokenLosses:
    """The loss of each token of a micro-batch."""
    losses: TokenLosses = _module(config).token_losses(tokens, config)
    return losses


def selects(config: Loss) -> bool:
    """Whether the loss chooses tokens over the whole mini-batch, and so needs log pi_old before the update."""
    return hasattr(_module(config), "select")


def select(tokens: BatchTokens, config: Loss) -> NDArray[np.bool_]:
    """The tokens ``[T]`` of a mini-batch that the loss treats apart; only for losses that choose."""
    selected: NDArray[np.bool_] = _module(config).select(tokens, config)
    return selected


def _module(config: Loss) -> Any:
    return import_module(f"{__name__}.{config.name}")
