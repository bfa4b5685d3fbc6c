"""Attention over sequences packed end to end, as an attention implementation of transformers.

Sequences are cut into buckets of similar length. Inside a bucket each is aligned to the left, so the filling lies
after its last token and the causal mask alone keeps every real query from seeing it; filled rows are dropped from
the result. No token sees another sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "beamline_packed"
_FILL_LIMIT = (
    0.75  # the shortest sequence of a bucket has at least this share of the longest: at most a third is filling
)


@dataclass(frozen=True, slots=True)
class _Bucket:
    gather: Tensor  # [b * T] row of each place; filled places repeat a row of the bucket
    keep: Tensor  # [rows] the places that are real, in the order of `rows`
    rows: Tensor  # [rows] where the kept places go in the packed batch
    length: int  # T


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed batch lie; made once a batch, used by every layer."""

    borders: tuple[int, ...]  # [B + 1] of the sequences in the packed rows
    buckets: tuple[_Bucket, ...]
    inverse: Tensor  # [N] place of each packed row in the buckets' concatenated results

    @classmethod
    def of(cls, cu_seqlens: Sequence[int]) -> "Packing":
        """Plan the buckets of sequences with these borders in the packed rows, ``[B + 1]``."""
        spans = list(pairwise(cu_seqlens))
        spans.sort(key=lambda span: span[0] - span[1])
        buckets: list[list[tuple[int, int]]] = []
        for span in spans:
            first = buckets[-1][0] if buckets else (0, 0)
            if buckets and span[1] - span[0] >= _FILL_LIMIT * (first[1] - first[0]):
                buckets[-1].append(span)
            else:
                buckets.append([span])
        made = tuple(_bucket(bucket) for bucket in buckets)
        order = torch.cat([bucket.rows for bucket in made])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return cls(tuple(cu_seqlens), made, inverse)


def _bucket(spans: Sequence[tuple[int, int]]) -> _Bucket:
    start = torch.tensor([a for a, _ in spans])
    length = torch.tensor([b - a for a, b in spans])
    longest = int(length[0])
    offset = torch.arange(longest)
    real = offset < length[:, None]
    gather = torch.where(real, start[:, None] + offset, start[:, None]).reshape(-1)
    keep = real.reshape(-1).nonzero().squeeze(1)
    return _Bucket(gather, keep, gather[keep], longest)


@lru_cache(maxsize=64)
def window_mask(length: int, window: int) -> Tensor:
    """Causal mask ``[length, length]`` in which a query sees itself and ``window - 1`` tokens before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


def flash_takes(query: Tensor) -> bool:
    """Whether :func:`flash` is there for such a tensor: 16 bits on a GPU."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def flash(
    query_NHd: Tensor, key_NGd: Tensor, value_NGd: Tensor, cu_seqlens_B1: Tensor, longest: int, window: int | None
) -> Tensor:
    """Causal attention within each sequence, ``[N, H, d]``, by torch's flash attention; scaled by ``d ** -0.5``.

    ``cu_seqlens_B1`` are the borders of the sequences, int32 on the device. A query sees ``window`` tokens, itself
    included.
    """
    from torch.nn.attention.varlen import varlen_attn

    borders: Any = (cu_seqlens_B1, cu_seqlens_B1, longest, longest)
    left = -1 if window is None else window - 1
    # torch from 2.12 on wants to be told that key heads are shared; the one before takes them without a word.
    shared: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out: Tensor = varlen_attn(query_NHd, key_NGd, value_NGd, *borders, window_size=(left, 0), **shared)  # type: ignore[assignment]
    return out


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query [1, H, N, d]`` over ``key``, ``value [1, KV, N, d]``; returns ``[1, N, H, d]``.

    Raises:
        RuntimeError: adapters and routes came as far as here, where nobody takes them.
    """
    if "brought" in others:
        raise RuntimeError("no hook took what the pass brought: beamline.policy.model.build makes modules with hooks")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    heads, kv_heads = q.shape[1], k.shape[1]
    results = []
    for bucket in packing.buckets:
        T = bucket.length
        qb, kb, vb = (x.index_select(0, bucket.gather).unflatten(0, (-1, T)).transpose(1, 2) for x in (q, k, v))
        if kv_heads != heads:
            kb, vb = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (kb, vb))
        windowed = sliding_window is not None and sliding_window < T
        mask = window_mask(T, sliding_window) if windowed and sliding_window is not None else None
        out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, is_causal=mask is None, scale=scaling)
        results.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.keep))
    return torch.cat(results).index_select(0, packing.inverse).unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
