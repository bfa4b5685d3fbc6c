"""Drawing tokens from logits, with one uniform number a token."""

import torch
from torch import Tensor


def draw(
    logits_nV: Tensor,
    uniforms_n: Tensor,
    temperature_n: Tensor,
    top_p_n: Tensor,
    top_k_n: Tensor,
    min_p_n: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens ``[n]`` and their log-probabilities under the distribution they were drawn from.

    A temperature of 0 takes the most likely token, with log-probability 0. Filters apply to the tempered distribution
    in the order min-p, top-k, top-p (vLLM's), each to the renormalized result of the one before it. A token is drawn
    by inverting the cumulative distribution in fp64, so no token of probability 0 can be drawn.
    """
    greedy_n = temperature_n == 0
    logprobs = torch.log_softmax(logits_nV / torch.where(greedy_n, 1.0, temperature_n)[:, None], dim=-1)
    if bool((top_k_n > 0).any() or (top_p_n < 1).any() or (min_p_n > 0).any()):
        logprobs = _filter(logprobs, top_p_n, top_k_n, min_p_n)
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniforms_n[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits_nV.shape[1] - 1)
    tokens = torch.where(greedy_n, logits_nV.argmax(-1), drawn)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return tokens, torch.where(greedy_n, 0.0, chosen)


def _filter(logprobs: Tensor, top_p_n: Tensor, top_k_n: Tensor, min_p_n: Tensor) -> Tensor:
    """Log-probabilities renormalized over what the filters allow; the most likely token always stays."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    V = logprobs.shape[1]
    probs = ordered.double().exp()
    allowed = probs >= min_p_n[:, None].double() * probs[:, :1]
    allowed &= torch.arange(V) < torch.where(top_k_n > 0, top_k_n, V)[:, None]
    probs = torch.where(allowed, probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    allowed &= (before < top_p_n[:, None].double()) | (top_p_n >= 1)[:, None]
    allowed[:, 0] = True
    kept = torch.zeros_like(allowed).scatter_(1, order, allowed)
    return torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), dim=-1)
