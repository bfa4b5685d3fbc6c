"""Each gradient kernel against automatic differentiation of the written formula in double precision.

Tolerances: a few roundings of float32 each (6e-8), over sums of up to 48 terms.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from beamline.kernels import experts, gradients, rows
from beamline.kernels.vocabulary import soft_cap
from tests.exact import Floats, bits

N, EPS = 21, 1e-6
NO_IDS = np.zeros(0, np.int32)
RNG = np.random.default_rng(5)


def random(*size: int) -> Floats:
    return RNG.normal(0, 1, size).astype(np.float32)


def exact(formula: Callable[..., Tensor], dy: Floats, *inputs: Floats) -> list[Floats]:
    leaves = [torch.from_numpy(x).double().requires_grad_() for x in inputs]
    found = torch.autograd.grad((formula(*leaves) * torch.from_numpy(dy).double()).sum(), leaves)
    return [gradient.numpy() for gradient in found]


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6 * np.abs(theirs).max())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def test_rms_norm() -> None:
    x, weight, dy = random(N, 37), random(37), random(N, 37)
    dx, dweight = np.empty_like(x), np.zeros_like(weight)
    gradients.rms_norm_gradient(x, weight, EPS, 0.5, dy, dx, dweight)
    for ours, theirs in zip((dx, dweight), exact(lambda a, w: 0.5 * norm(a, w), dy, x, weight), strict=True):
        close(ours, theirs)


def test_swiglu() -> None:
    wide, dy = random(N, 2 * 19), random(N, 19)
    dwide = np.empty_like(wide)
    gradients.swiglu_gradient(wide, dy, dwide)
    close(dwide, exact(lambda x: torch.nn.functional.silu(x[:, :19]) * x[:, 19:], dy, wide)[0])


def test_the_gate_of_attention() -> None:
    heads, size = 3, 6
    attended, qkvg, bias, dy = random(N, 18), random(N, 30), random(heads), random(N, 18)
    dattended, dqkvg, dbias = np.empty_like(attended), np.zeros_like(qkvg), np.zeros_like(bias)
    gradients.open_gate_gradient(attended, qkvg, 12, bias, dy, dattended, dqkvg, dbias)

    def formula(a: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return a * torch.sigmoid(g[:, 12:] + b.repeat_interleave(size))

    for ours, theirs in zip((dattended, dqkvg, dbias), exact(formula, dy, attended, qkvg, bias), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("query", [True, False])
def test_turned_heads(sliding: bool, query: bool) -> None:
    """The gradient of what the forward kernel does, which is written here as a matrix on each head."""
    heads, size, first = 2, 8, 3
    qkvg, weight, dy = random(N, 24), random(size), random(N, heads * size)
    angles, stretch = random(50, size // 2), 1 + random(50) ** 2
    tables = np.cos(angles), np.sin(angles), stretch
    positions = RNG.integers(0, 50, N)
    dqkvg, dweight = np.zeros_like(qkvg), np.zeros_like(weight)
    gradients.turn_heads_gradient(
        qkvg, first, heads, weight, EPS, positions, *tables, sliding, query, dy, dqkvg, dweight
    )

    def formula(x: Tensor, w: Tensor) -> Tensor:
        normed = norm(x[:, first : first + heads * size].unflatten(1, (heads, size)), w)
        if not sliding:
            return (normed * (torch.from_numpy(stretch[positions])[:, None, None] if query else 1)).flatten(1)
        c, s = (torch.from_numpy(t[positions]).double()[:, None] for t in tables[:2])
        low, high = normed.chunk(2, dim=-1)
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1).flatten(1)

    for ours, theirs in zip((dqkvg, dweight), exact(formula, dy, qkvg, weight), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_router(normalize: bool) -> None:
    E, K = 12, 3
    logits, dweights = random(N, E), random(N, K)
    scores, chosen, weights = logits.copy(), np.empty((N, K), np.int64), np.empty((N, K), np.float32)
    experts.route(scores, np.zeros(E, np.float32), 3, 2, normalize, False, chosen, weights)
    dlogits = np.empty_like(logits)
    gradients.weigh_gradient(scores, chosen, weights, normalize, dweights, dlogits)

    def formula(z: Tensor) -> Tensor:
        picked = torch.sigmoid(z).gather(1, torch.from_numpy(chosen))
        return picked / picked.sum(1, keepdim=True) if normalize else picked

    close(dlogits, exact(formula, dweights, logits)[0])


def test_mixed_experts() -> None:
    """Spread over the choices and gathered from them: transposes of each other."""
    K, D, factor = 3, 11, 2.5
    order = RNG.permutation(N * K)
    place = np.empty_like(order)
    experts.invert(order, place)
    outer, weights, dy = random(N * K, D), random(N, K), random(N, D)
    douter, dweights = np.empty_like(outer), np.empty_like(weights)
    gradients.spread_to_experts(dy, order, weights, factor, outer, douter, dweights, 0, N * K)

    def formula(o: Tensor, w: Tensor) -> Tensor:
        return factor * (o[torch.from_numpy(place)].unflatten(0, (N, K)) * w[..., None]).sum(1)

    for ours, theirs in zip((douter, dweights), exact(formula, dy, outer, weights), strict=True):
        close(ours, theirs)
    dx = np.empty((N, D), np.float32)
    gradients.gather_rows(outer, place, K, dx)
    close(dx, outer[place].reshape(N, K, D).astype(np.float64).sum(1))


def test_scored_logits() -> None:
    V, cap = 40, 5.0
    logits, dlogprobs = 4 * random(N, V), random(N)
    targets, temperature = RNG.integers(0, V, N), (0.5 + RNG.random(N)).astype(np.float32)
    allowed = RNG.random((N, V)) < 0.3
    allowed[np.arange(N), targets] = True
    allowed[::3] = True
    sizes = np.where(np.arange(N) % 3, allowed.sum(1), 0)
    ids = np.concatenate([np.flatnonzero(allowed[i]) for i in range(N) if i % 3]).astype(np.int32)
    every, restricted = (NO_IDS, np.zeros(N + 1, np.int64)), (ids, np.concatenate([[0], np.cumsum(sizes)]))

    def formula(z: Tensor, mask: Tensor) -> Tensor:
        capped = cap * torch.tanh(z / cap) / torch.from_numpy(temperature)[:, None]
        own = capped.gather(1, torch.from_numpy(targets)[:, None]).squeeze(1)
        return own - (capped.exp() * mask).sum(1).log()  # no maximum: what is not allowed has no part in it

    found = []
    for support, mask in ((every, np.ones_like(allowed)), (restricted, allowed)):
        ours = logits.copy()
        gradients.score_rows_gradient(ours, cap, targets, temperature, *support, dlogprobs)
        close(ours, exact(partial(formula, mask=torch.from_numpy(mask)), dlogprobs, logits)[0])
        assert not ours[~mask].any()
        found.append(ours)
    assert np.array_equal(bits(found[0][::3]), bits(found[1][::3]))


def test_a_token_that_alone_was_allowed_has_no_gradient() -> None:
    logits = np.array([[50.0, -3.0, 2.0]], np.float32)
    gradients.score_rows_gradient(logits, 30.0, np.array([1]), np.array([0.7], np.float32), np.array([1], np.int32),
                                  np.array([0, 1]), np.ones(1, np.float32))  # fmt: skip
    assert not logits.any()


@pytest.mark.parametrize(("length", "window"), [(1, 4), (15, 100), (16, 5), (17, 16), (47, 17), (48, 1000)])
def test_attention(length: int, window: int) -> None:
    kv_heads, group, size = 2, 2, 6
    width, kv_width = kv_heads * group * size, kv_heads * size
    q, k, qkvg = random(length, width), random(length, kv_width), random(length, kv_width + 4)
    dy = random(length, width)

    def formula(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        qh = a.unflatten(1, (kv_heads, group, size))
        kh, vh = b.unflatten(1, (kv_heads, size)), c[:, 4:].unflatten(1, (kv_heads, size))
        scores = torch.einsum("ihgd,jhd->hgij", qh, kh) / size**0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return torch.einsum("hgij,jhd->ihgd", scores.softmax(-1), vh).flatten(1)

    attended = formula(*(torch.from_numpy(x).double() for x in (q, k, qkvg))).float().numpy()
    dq, dk, dqkvg = np.empty_like(q), np.zeros_like(k), np.zeros_like(qkvg)
    gradients.attend_gradient(q, k, qkvg, 4, attended, dy, window, kv_heads, group, size, dq, dk, dqkvg)
    for ours, theirs in zip((dq, dk, dqkvg), exact(formula, dy, q, k, qkvg), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6)


def test_the_forward_kernels_are_the_formulas_here() -> None:
    """Else the tests above would speak of something else."""
    x, weight = random(N, 37), random(37)
    out = np.empty_like(x)
    rows.rms_norm(x, weight, 0, EPS, out, False)
    close(out, norm(torch.from_numpy(x).double(), torch.from_numpy(weight).double()).numpy())
    z = random(64)
    capped = z.copy()
    soft_cap(capped, 5.0)
    close(capped, 5.0 * np.tanh(z.astype(np.float64) / 5.0))
