"""Packed attention against a loop over sequences, heads and queries in double precision."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from beamline.policy import attention
from beamline.policy.attention import Packing, packed_attention, window_mask

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
LENGTHS = [5, 40, 1, 17, 39, 2, 8, 9, 1, 30, 12, 7]

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def borders(rows: list[int]) -> list[int]:
    return [0, *np.cumsum(rows).tolist()]


def random_qkv(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(1, heads, rows, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, rows: list[int], window: int | None) -> Tensor:
    packing = Packing.of(borders(rows))
    out, _ = packed_attention(nn.Module(), q, k, v, None, packing=packing, scaling=SCALE, sliding_window=window)
    return out


def written(q: Tensor, k: Tensor, v: Tensor, rows: list[int], window: int | None) -> Tensor:
    """``[1, N, H, d]``: each query sees the keys of its own sequence up to itself, at most ``window`` of them."""
    out = torch.zeros(1, sum(rows), HEADS, DIM, dtype=q.dtype)
    for start, stop in pairwise(borders(rows)):
        for t in range(start, stop):
            first = start if window is None else max(start, t - window + 1)
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                weights = torch.softmax(k[0, kv, first : t + 1] @ q[0, head, t] * SCALE, dim=0)
                out[0, t, head] = weights @ v[0, kv, first : t + 1]
    return out


@pytest.mark.parametrize("window", [None, 1, 8, 100])
def test_result_and_gradient_are_those_of_the_loop(window: int | None) -> None:
    qkv = random_qkv(sum(LENGTHS))
    out, expected = attend(*qkv, LENGTHS, window), written(*qkv, LENGTHS, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual = torch.autograd.grad((out * direction).sum(), qkv)
    for ours, theirs in zip(actual, torch.autograd.grad((expected * direction).sum(), qkv), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@settings(max_examples=20)
@given(lengths)
def test_no_sequence_influences_another(rows: list[int]) -> None:
    """The gradient of one sequence's results is exactly 0 in the rows of all others."""
    q, k, v = random_qkv(sum(rows))
    for start, stop in list(pairwise(borders(rows)))[:3]:
        result = attend(q, k, v, rows, 8)[:, start:stop].sum()
        for gradient in torch.autograd.grad(result, (q, k, v)):
            others = torch.cat([gradient[:, :, :start], gradient[:, :, stop:]], dim=2)
            assert not others.any()


@given(lengths)
def test_every_row_has_one_place(rows: list[int]) -> None:
    packing = Packing.of(borders(rows))
    kept = torch.cat([bucket.rows for bucket in packing.buckets])
    assert kept.sort().values.tolist() == list(range(sum(rows)))
    assert kept[packing.inverse].tolist() == list(range(sum(rows)))
    for bucket in packing.buckets:
        assert bucket.gather[bucket.keep].tolist() == bucket.rows.tolist()
        assert set(bucket.gather.tolist()) == set(bucket.rows.tolist())


@given(lengths)
def test_at_most_a_third_is_filling(rows: list[int]) -> None:
    for bucket in Packing.of(borders(rows)).buckets:
        assert len(bucket.gather) % bucket.length == 0
        assert len(bucket.gather) - len(bucket.rows) <= len(bucket.rows) / 3


def test_sequences_of_one_length_share_a_bucket_without_filling() -> None:
    packing = Packing.of(borders([12] * 5))
    assert [len(bucket.gather) for bucket in packing.buckets] == [60]


def test_the_window_counts_the_query_itself() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert window_mask(4, 2).int().tolist() == expected


def test_a_mask_that_was_made_while_sampling_serves_in_training() -> None:
    """Masks are kept, and a tensor made in inference mode must not be saved for a backward pass."""
    rows = [23]
    qkv = random_qkv(23)
    with torch.inference_mode():
        attend(*qkv, rows, 8)
    attend(*qkv, rows, 8).sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in qkv)


@pytest.mark.parametrize("window", [None, 8])
def test_flash_attention_is_given_the_same_sequences(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """On a GPU; here another function takes its place, and a tensor's."""

    def flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, seen: Any, scale: float) -> Tensor:
        assert (cu_seqlens.dtype, longest, scale) == (torch.int32, max(LENGTHS), SCALE)
        return written(*(x.transpose(0, 1)[None] for x in (q, k, v)), np.diff(cu_seqlens).tolist(), seen)[0]

    qkv = random_qkv(sum(LENGTHS))
    expected = attend(*qkv, LENGTHS, window)
    monkeypatch.setattr(attention, "flash_takes", lambda query: True)
    monkeypatch.setattr(attention, "flash", flash)
    torch.testing.assert_close(attend(*qkv, LENGTHS, window), expected, rtol=0, atol=1e-12)
