"""Log-probabilities and entropy from hidden states, chunk by chunk: ``[N, V]`` never exists."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)`` in float32, as the Hugging Face module computes it."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    cap: float | None,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of its distribution, both ``[N]`` float32.

    Logits come from the given precision with float32 output, are never rounded, then soft-capped, then divided by
    the temperature. Each chunk is recomputed in the backward pass. The entropy carries no gradient.
    """
    logprobs, entropies = [], []
    for start in range(0, len(hidden_ND), chunk_rows):
        rows = slice(start, start + chunk_rows)
        logprob, entropy = checkpoint(
            _chunk, hidden_ND[rows], weight_VD, target_N[rows], temperature_N[rows], cap, use_reentrant=False
        )
        logprobs.append(logprob)
        entropies.append(entropy)
    if not logprobs:
        empty = hidden_ND.new_zeros(0, dtype=torch.float32)
        return empty, empty
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor, cap: float | None
) -> tuple[Tensor, Tensor]:
    logits = soft_cap(hidden_ND.float() @ weight_VD.float().T, cap) / temperature_N[:, None]
    logprobs_NV = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, target_N[:, None]).squeeze(1), entropy
