"""Attention over sequences packed end to end, as an attention implementation of transformers.

In 16 bits on a GPU torch's flash attention takes them as they lie. Elsewhere they are cut into buckets of similar
length. Inside a bucket each is aligned to the left, so the filling lies after its last token and the causal mask alone
keeps every real query from seeing it; filled rows are dropped from the result. No token sees another sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from beamline.policy.passes import inverse

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


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed batch lie; made once a batch, used by every layer.

    What a way of computing attention needs of it is made when the first layer asks, on ``device``.
    """

    borders: tuple[int, ...]  # [B + 1] of the sequences in the packed rows
    device: torch.device

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], device: torch.device | None = None) -> "Packing":
        """Sequences with these borders in the packed rows, ``[B + 1]``, on the CPU if nothing else is said."""
        return cls(tuple(cu_seqlens), device or torch.device("cpu"))

    @cached_property
    def longest(self) -> int:
        """Rows of the longest sequence."""
        return max(b - a for a, b in pairwise(self.borders))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The borders ``[B + 1]`` as :func:`flash` takes them: int32."""
        return torch.tensor(self.borders, dtype=torch.int32, device=self.device)

    @cached_property
    def buckets(self) -> tuple[_Bucket, ...]:
        """Sequences of similar length, the longest first."""
        spans = list(pairwise(self.borders))
        spans.sort(key=lambda span: span[0] - span[1])
        buckets: list[list[tuple[int, int]]] = []
        for span in spans:
            first = buckets[-1][0] if buckets else (0, 0)
            if buckets and span[1] - span[0] >= _FILL_LIMIT * (first[1] - first[0]):
                buckets[-1].append(span)
            else:
                buckets.append([span])
        return tuple(_bucket(bucket, self.device) for bucket in buckets)

    @cached_property
    def inverse(self) -> Tensor:
        """Place ``[N]`` of each packed row in the buckets' concatenated results."""
        return inverse(torch.cat([bucket.rows for bucket in self.buckets]))


def _bucket(spans: Sequence[tuple[int, int]], device: torch.device) -> _Bucket:
    start = torch.tensor([a for a, _ in spans])
    length = torch.tensor([b - a for a, b in spans])
    longest = int(length[0])
    offset = torch.arange(longest)
    real = offset < length[:, None]
    gather = torch.where(real, start[:, None] + offset, start[:, None]).reshape(-1)
    keep = real.reshape(-1).nonzero().squeeze(1)
    return _Bucket(gather.to(device), keep.to(device), gather[keep].to(device), longest)


@lru_cache(maxsize=64)
def window_mask(length: int, window: int, device: torch.device | None = None) -> Tensor:
    """Causal mask ``[length, length]`` in which a query sees itself and ``window - 1`` tokens before it."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def flash_takes(query: Tensor) -> bool:
    """Whether :func:`flash` is there for such a tensor: 16 bits on a GPU."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def flash(
    query_NHd: Tensor,
    key_NGd: Tensor,
    value_NGd: Tensor,
    cu_seqlens_B1: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within each sequence, ``[N, H, d]``, by torch's flash attention.

    ``cu_seqlens_B1`` are the borders of the sequences, int32 on the device. A query sees ``window`` tokens, itself
    included. Products are scaled by ``scale``, or by ``d ** -0.5``.
    """
    borders: Any = (cu_seqlens_B1, cu_seqlens_B1, longest, longest)
    window_size = (-1 if window is None else window - 1, 0)
    out: Tensor = _varlen()(query_NHd, key_NGd, value_NGd, *borders, scale=scale, window_size=window_size)
    return out


@cache
def _varlen() -> Callable[..., Any]:
    """torch's function, told that key heads are shared: from 2.12 on it wants to be, the one before just takes them."""
    from torch.nn.attention.varlen import varlen_attn

    shares = "enable_gqa" in signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if shares else varlen_attn


def attend(
    query_NHd: Tensor,
    key_NGd: Tensor,
    value_NGd: Tensor,
    packing: Packing,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within each sequence, ``[N, H, d]``, with ``window`` and ``scale`` as :func:`flash` has them.

    By :func:`flash` where it takes them; else in buckets.
    """
    if flash_takes(query_NHd):
        return flash(query_NHd, key_NGd, value_NGd, packing.cu_seqlens, packing.longest, window, scale)
    shared = query_NHd.shape[1] // key_NGd.shape[1]
    results = []
    for bucket in packing.buckets:
        T = bucket.length
        q, k, v = (
            x.index_select(0, bucket.gather).unflatten(0, (-1, T)).transpose(1, 2)
            for x in (query_NHd, key_NGd, value_NGd)
        )
        if shared > 1:
            k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        mask = window_mask(T, window, q.device) if window is not None and window < T else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        results.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.keep))
    return torch.cat(results).index_select(0, packing.inverse)


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
    """:func:`attend` as transformers calls it: ``query [1, H, N, d]``, ``key``, ``value [1, KV, N, d]``.

    Returns ``[1, N, H, d]``.

    Raises:
        RuntimeError: adapters and routes came as far as here, where nobody takes them.
    """
    if "brought" in others:
        raise RuntimeError("no hook took what the pass brought: beamline.policy.model.build makes modules with hooks")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packing, sliding_window, scaling).unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
