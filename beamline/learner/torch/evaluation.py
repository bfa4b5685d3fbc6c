"""Log-probabilities of packed sequences under a model, by the kernels of the sampler or by torch."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from beamline.config.policy import PolicyConfig
from beamline.learner.planning import micro_batches
from beamline.policy import attention, head, model, parity
from beamline.policy.device import on_device
from beamline.policy.dropout import Dropout
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors
from beamline.records import Batch, Experience, pack

Floats = NDArray[np.float32]
Chosen = Callable[[Batch], NDArray[np.bool_]]
"""Which rows ``[N]`` of a packed batch are evaluated."""


def every_row(packed: Batch) -> NDArray[np.bool_]:
    """All rows ``[N]``."""
    return np.ones(packed.rows, dtype=bool)


class Evaluation:
    """How a model is evaluated, with the module and adapters as they are at the time, on the device where they are.

    Args:
        module: a Beam module from :func:`beamline.policy.model.load`.
        policy: by what it is evaluated, and whether routes are replayed.
        adapters: those on the module; None for the module without any.
        hidden_states: in place of the function that ``policy`` names; it takes the same arguments.

    Raises:
        ValueError: the kernels cannot evaluate the module.
        ModelError: the adapters match no weight of it.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PolicyConfig,
        adapters: Adapters | None = None,
        hidden_states: Callable[..., Tensor] | None = None,
    ) -> None:
        self._module, self._policy, self._adapters = module, policy, adapters
        if policy.parity:
            parity.check(module)
        if adapters is not None:
            adapters.check_bound(named_tensors(module))
        self._hidden_states = hidden_states or (parity.hidden_states if policy.parity else model.hidden_states)
        self._score = parity.head_logprobs if policy.parity else head.head_logprobs

    def __call__(self, batch: Batch, rows: Tensor, dropout: Dropout | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the given rows, with gradients, on the model's device.

        Raises:
            ValueError: routes are to be replayed, and the batch does not have those of this model.
        """
        typed = cast(Any, self._module)
        weight = typed.lm_head.weight
        packing = attention.Packing.of(batch.cu_seqlens_B1.tolist(), weight.device)
        routes_NLK = self._replayed(batch) if self._policy.r3 else None
        support = batch.support_of(rows.numpy())
        arrays = batch.input_ids_N, batch.position_ids_N, batch.target_ids_N, batch.row_temperatures
        input_ids_N, position_ids_N, target_ids_N, temperature_N = (
            on_device(torch.from_numpy(array), weight.device) for array in arrays
        )
        rows = on_device(rows, weight.device)
        hidden_ND = self._hidden_states(
            self._module, input_ids_N, position_ids_N, packing, self._adapters, routes_NLK, dropout
        )
        return self._score(
            hidden_ND[rows],
            weight,
            target_ids_N[rows],
            temperature_N[rows],
            typed.config.final_logit_softcapping,
            self._policy.head_chunk_rows,
            support,
        )

    @torch.no_grad()
    def of_sequences(
        self, sequences: Sequence[Experience], limit: int, chosen: Chosen
    ) -> tuple[list[Floats], list[Floats]]:
        """Log-probabilities and entropies of the chosen rows of each sequence, without gradients.

        Sequences are packed up to ``limit`` rows; a longer one is alone.
        """
        logprobs: list[Any] = [None] * len(sequences)
        entropies: list[Any] = [None] * len(sequences)
        passes = []
        for cut in micro_batches([sequence.rows for sequence in sequences], limit):
            packed = pack([sequences[i] for i in cut])
            mask_N = chosen(packed)
            passes.append((cut, packed, mask_N, self(packed, torch.from_numpy(mask_N.nonzero()[0]))))
        for cut, packed, mask_N, found in passes:  # afterwards, so that a GPU need not wait in between
            parts = (packed.by_sequence(mask_N, tensor.cpu().numpy()) for tensor in found)
            for i, of_logprobs, of_entropies in zip(cut, *parts, strict=True):
                logprobs[i], entropies[i] = of_logprobs, of_entropies
        return logprobs, entropies

    def _replayed(self, batch: Batch) -> NDArray[np.unsignedinteger]:
        """The experts that the sampler chose for each row."""
        config = cast(Any, self._module).config
        wanted = batch.rows, config.mlp_layer_types.count("sparse"), config.num_experts_per_tok
        if batch.routes_NLK is None or batch.routes_NLK.shape != wanted:
            found = "there are none" if batch.routes_NLK is None else f"they are {batch.routes_NLK.shape}"
            raise ValueError(f"policy.r3 replays routes of shape {wanted} (rows, MoE layers, experts), and {found}")
        return batch.routes_NLK
