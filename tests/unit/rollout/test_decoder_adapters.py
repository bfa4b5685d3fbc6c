"""The decoder with adapters against the module with merged weights, and with given experts against forced ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BeamForCausalLM

from beamline.model.lora import LoraShape, adapter_tensors
from beamline.policy.weights import named_tensors
from beamline.rollout.local.beam import BeamDecoder, Numerics, decoder_layout
from tests.adapters import LORAS, Routes, loras, random_routes
from tests.exact import bits
from tests.tiny_beam import CONTEXT, THETA, beam_shape, evaluate, random_beam, reference
from tests.unit.rollout.decoding import SEQUENCES, Evaluation, adapters_for, decoder_of, forced, shapes

# Adapters


MERGED = 1e-4
"""Without adapters float32 paths are 2e-5 apart; here one has sums of larger terms, and the other weights are rounded
when they are merged. Adapters change logits by more than 1."""


@shapes
@torch.no_grad()
def test_logits_and_routes_are_those_of_merged_weights(changes: dict[str, Any]) -> None:
    module, merged, adapters = random_beam(**changes), random_beam(**changes), adapters_for(changes)
    adapters.merge_into(named_tensors(merged))
    plain, without = reference(merged), reference(module)
    for ids, logits, routes in zip(SEQUENCES, *forced(decoder_of(module, adapters=adapters, **changes)), strict=True):
        expected = evaluate(plain, ids)
        np.testing.assert_allclose(logits, expected.logits_SV.numpy(), rtol=1e-5, atol=MERGED)
        np.testing.assert_array_equal(routes, expected.routes_SLK)
        assert (expected.logits_SV - evaluate(without, ids).logits_SV).abs().max() > 1.0


@loras
def test_adapters_have_the_names_and_sizes_of_their_files(lora: LoraShape) -> None:
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT, lora)
    expected = {spec.name: spec.shape for spec in adapter_tensors(beam_shape(), lora)}
    assert {name: tuple(tensor.shape) for name, tensor in decoder.adapters.items()} == expected
    (held,) = decoder_layout(beam_shape(), "float32", lora, "adapter").ranks
    assert {part.name: part.size for part in held} == expected


@loras
def test_adapters_and_weights_lie_apart(lora: LoraShape) -> None:
    """Each is filled with a number of its own, and still has it when all are."""
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT, lora)
    held = list((decoder.tensors | decoder.adapters).values())
    for number, tensor in enumerate(held):
        tensor.fill_(number)
    for number, tensor in enumerate(held):
        assert bool((tensor == number).all())


def test_without_adapters_they_take_no_room_and_no_time() -> None:
    """No row of their products has an element."""
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT)
    assert decoder.adapters == {}
    space = decoder.new_workspace(8, CONTEXT)
    of_adapters = [array for name, array in decoder.weights._asdict().items() if name.endswith(("_a", "_b"))]
    assert [array.size for array in (*of_adapters, space.z, space.z_choices)] == [0] * 14


def test_adapters_on_none_of_the_experts_cost_them_nothing() -> None:
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT, LORAS["none on experts"])
    of_experts = [getattr(decoder.weights, name) for name in ("gate_up_a", "gate_up_b", "down_a", "down_b")]
    assert [array.size for array in of_experts] == [0] * 4


def test_what_is_no_target_takes_no_room() -> None:
    decoder = BeamDecoder(beam_shape(), Numerics(), THETA, CONTEXT, LoraShape(8, 8.0, ("q_proj", "experts.down_proj")))
    ranks = {name: array.shape[-1] for name, array in decoder.weights._asdict().items() if name.endswith("_a")}
    assert ranks == {"qkvg_a": 8, "o_a": 0, "dense_gate_up_a": 0, "dense_down_a": 0, "gate_up_a": 0, "down_a": 8}
    assert decoder.weights.qkvg_a.size > 0


# Given experts


def any_routes(changes: dict[str, Any]) -> list[Routes]:
    """Experts ``[S, L, K]`` for each sequence."""
    return [random_routes(beam_shape(**changes), len(ids), seed) for seed, ids in enumerate(SEQUENCES)]


@contextmanager
def experts_forced(plain: BeamForCausalLM, routes_SLK: NDArray[Any]) -> Iterator[None]:
    """The module sends each token to the experts given, which weigh what their router scores them."""

    def forcing(experts_SK: Tensor) -> Any:
        def force(gate: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            scores = output[0].sigmoid().gather(1, experts_SK)
            total = scores.sum(-1, keepdim=True) + 1e-20 if gate.norm_topk_prob else 1.0
            return output[0], scores / total, experts_SK

        return force

    gates = [layer.mlp.gate for layer in plain.model.layers if hasattr(layer.mlp, "gate")]
    given = torch.from_numpy(routes_SLK.astype(np.int64)).unbind(1)
    hooks = [gate.register_forward_hook(forcing(experts_SK)) for gate, experts_SK in zip(gates, given, strict=True)]
    yield
    for hook in hooks:
        hook.remove()


@shapes
def test_replayed_experts_are_those_of_a_module_with_forced_ones(changes: dict[str, Any]) -> None:
    module, replayed = random_beam(**changes), any_routes(changes)
    plain, before = reference(module), [routes.copy() for routes in replayed]
    logits_of, routes_of = forced(decoder_of(module, **changes), replayed)
    for ids, given, logits, routes, untouched in zip(SEQUENCES, replayed, logits_of, routes_of, before, strict=True):
        with experts_forced(plain, given):
            expected = evaluate(plain, ids)
        np.testing.assert_allclose(logits, expected.logits_SV.numpy(), rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(routes, untouched)
        if given.size:
            assert (expected.logits_SV - evaluate(plain, ids).logits_SV).abs().max() > 1.0


@torch.no_grad()
def test_experts_are_replayed_with_their_adapters() -> None:
    module, merged, adapters, replayed = random_beam(), random_beam(), adapters_for({}), any_routes({})
    adapters.merge_into(named_tensors(merged))
    plain, (found, _) = reference(merged), forced(decoder_of(module, adapters=adapters), replayed)
    for ids, given, logits in zip(SEQUENCES, replayed, found, strict=True):
        with experts_forced(plain, given):
            np.testing.assert_allclose(logits, evaluate(plain, ids).logits_SV.numpy(), rtol=1e-5, atol=MERGED)


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapted", [False, True])
def test_replaying_its_own_choices_changes_no_bit(changes: dict[str, Any], dtype: str, adapted: bool) -> None:
    decoder = decoder_of(random_beam(**changes), dtype, adapters=adapters_for(changes) if adapted else None, **changes)
    logits, routes = forced(decoder)
    for one, other in zip(logits, forced(decoder, [part.copy() for part in routes])[0], strict=True):
        assert np.array_equal(bits(one), bits(other))


@pytest.mark.parametrize("kv_dtype", ["same", "float8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_bits_are_the_same_all_at_once_and_one_after_the_other(dtype: str, kv_dtype: str) -> None:
    decoder, replayed = decoder_of(random_beam(), dtype, kv_dtype, adapters=adapters_for({})), any_routes({})
    evaluation = Evaluation(decoder)
    for ids, given, logits in zip(SEQUENCES, replayed, forced(decoder, replayed)[0], strict=True):
        whole, _ = evaluation.prefill(ids, 0, given)
        assert np.array_equal(bits(logits), bits(whole))


def test_a_token_may_go_to_its_experts_in_any_order() -> None:
    """Their sum changes by rounding alone."""
    decoder, replayed = decoder_of(random_beam()), any_routes({})
    reversed_routes = [routes[..., ::-1].copy() for routes in replayed]
    for one, other in zip(forced(decoder, replayed)[0], forced(decoder, reversed_routes)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)
