"""The sampler's own forward pass against the Hugging Face module, at every position."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.policy import model
from beamline.policy.attention import Packing
from beamline.policy.weights import named_tensors
from beamline.rollout.local.beam import BeamDecoder
from tests.tiny_beam import CONTEXT, THETA, VOCAB, WINDOW, beam_shape, evaluate, random_beam, reference

LENGTHS = [1, 2, 7, 8, 9, 24, 40, 15]  # around the window of 8, and several of them
STEPS = 24
SEQUENCES = [np.random.default_rng(n).integers(0, VOCAB, n + STEPS) for n in LENGTHS]


def decoder_of(module: nn.Module, dtype: Any = "float32", **changes: Any) -> BeamDecoder:
    decoder = BeamDecoder(beam_shape(**changes), dtype, THETA, CONTEXT)
    for name, tensor in named_tensors(module).items():
        decoder.weights[name].copy_(tensor)
    return decoder


@torch.inference_mode()
def forced(decoder: BeamDecoder) -> tuple[list[Tensor], list[Tensor]]:
    """Prefill each sequence up to its length, then feed it the rest; logits and routes of each, ``[rows, ...]``."""
    cache = decoder.new_cache(len(LENGTHS), CONTEXT)
    prefixes = [torch.from_numpy(ids[:n]) for ids, n in zip(SEQUENCES, LENGTHS, strict=True)]
    first, routes_N = decoder.prefill(prefixes, [[slot] for slot in range(len(prefixes))], cache)
    logits, routes = [[row] for row in first], [[part] for part in routes_N.split(LENGTHS)]
    for step in range(STEPS):
        at = torch.tensor(LENGTHS) + step
        tokens = torch.tensor([ids[p] for ids, p in zip(SEQUENCES, at, strict=True)])
        for b, (row, chosen) in enumerate(zip(*decoder.decode(tokens, at, cache), strict=True)):
            logits[b].append(row)
            routes[b].append(chosen[None])
    return [torch.stack(rows) for rows in logits], [torch.cat(rows) for rows in routes]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        {"norm_topk_prob": False, "num_key_value_heads": 4},
        {"mlp_layer_types": ["dense"] * 3, "sliding_window": 1},
    ],
    ids=["tiny", "other experts", "plain gate weights", "dense"],
)
def test_logits_and_routes_are_those_of_the_module(changes: dict[str, Any]) -> None:
    module = random_beam(**changes)
    plain = reference(module)
    for n, ids, logits, routes in zip(LENGTHS, SEQUENCES, *forced(decoder_of(module, **changes)), strict=True):
        expected = evaluate(plain, ids)
        torch.testing.assert_close(logits, expected.logits_SV[n - 1 :], rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(routes.numpy(), expected.routes_SLK)


@torch.no_grad()
def float32_head(module: nn.Module) -> Tensor:
    """Logits of the rows that :func:`forced` gives, by the module on packed sequences and a head in float32."""
    lengths = [len(ids) for ids in SEQUENCES]
    packing = Packing.of([0, *np.cumsum(lengths).tolist()])
    ids, positions = torch.from_numpy(np.concatenate(SEQUENCES)), torch.cat([torch.arange(n) for n in lengths])
    hidden = model.hidden_states(module, ids, positions, packing).split(lengths)
    rows = torch.cat([part[n - 1 :] for part, n in zip(hidden, LENGTHS, strict=True)])
    return 30 * torch.tanh(rows.float() @ cast(Any, module).lm_head.weight.float().T / 30)


@pytest.mark.parametrize(("attention", "mlp"), [("full_attention", "dense"), ("sliding_attention", "sparse")])
def test_bfloat16_is_rounded_where_the_module_rounds(attention: str, mlp: str) -> None:
    """Over one layer (more would amplify the last bits) it is much nearer to the module than float32 is."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": [attention], "mlp_layer_types": [mlp]}
    module = random_beam(dtype="bfloat16", **changes)
    ours = torch.cat(forced(decoder_of(module, "bfloat16", **changes))[0])
    theirs, exact = float32_head(module), float32_head(module.float())
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.2 * (exact - theirs).abs().mean()


@torch.inference_mode()
def test_one_prefix_fills_several_slots() -> None:
    decoder = decoder_of(random_beam())
    cache = decoder.new_cache(5, CONTEXT)
    long, short = (torch.from_numpy(ids) for ids in (SEQUENCES[5][:24], SEQUENCES[2][:7]))
    logits, routes = decoder.prefill([long, short], [[0, 2, 4], [1, 3]], cache)
    assert (len(logits), len(routes)) == (2, 31)
    for layer in range(3):
        for filled in cache.read(layer, 5, 24):
            assert torch.equal(filled[0], filled[2])
            assert torch.equal(filled[0], filled[4])
            assert torch.equal(filled[1], filled[3])
            assert not torch.equal(filled[0], filled[1])


def test_a_sliding_layer_keeps_no_more_than_its_window() -> None:
    cache = decoder_of(random_beam()).new_cache(2, CONTEXT)
    assert [cache.places(layer) for layer in range(3)] == [WINDOW, CONTEXT, WINDOW]
