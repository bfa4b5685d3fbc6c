"""Which inputs of its adapters an update leaves out."""

from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamline.records import Key
from beamline.records.random import stream


@dataclass(frozen=True, slots=True)
class Dropout:
    """An update's dropout: adapters read ``x * mask / (1 - share)``, the model itself reads x (as PEFT's LoRA does).

    A mask is a function of the seed, of how many updates were made before, of the sequence's key, the adapter's site,
    and row and column: how sequences are cut and ordered does not matter, and a pass that is made again finds the same.

    Args:
        share: of inputs that are left out, in [0, 1).
        seed: of the run.
        updates: that were made before.
        keys: of the packed sequences, in their order.
        rows: of each of them.
    """

    share: float
    seed: int
    updates: int
    keys: tuple[Key, ...]
    rows: tuple[int, ...]

    def factors(self, site: str, width: int, choices: int = 1) -> Tensor:
        """What inputs are multiplied by, 0 or ``1 / (1 - share)``: ``[N * choices, width]`` float32 for N packed rows.

        A row that goes to several experts has a mask for each of its choices.
        """
        drawn = [self._drawn(key, site, n * choices * width) for key, n in zip(self.keys, self.rows, strict=True)]
        kept = torch.from_numpy(np.concatenate(drawn) >= np.uint32(self.share * 2**32))
        return (kept / (1 - self.share)).view(-1, width)

    def _drawn(self, key: Key, site: str, count: int) -> NDArray[np.uint32]:
        """Uniform integers of 32 bits, two from each number of the stream."""
        numbers = stream(self.seed, "dropout", self.updates, site, *astuple(key)).random_raw((count + 1) // 2)
        return numbers.astype("<u8", copy=False).view("<u4")[:count]
