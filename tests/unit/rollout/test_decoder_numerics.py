"""Where the decoder rounds: to bfloat16 as the Hugging Face module does, keys and values to 8 bits, and logits."""

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from beamline.model.beam import tensors
from beamline.policy import model
from beamline.policy.attention import Packing, packed_attention
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors
from beamline.rollout.local.beam import BeamDecoder, Numerics
from tests.tiny_beam import beam_shape, random_beam
from tests.unit.rollout.decoding import (
    SEQUENCES,
    SHARED,
    Evaluation,
    adapters_for,
    decoder_of,
    drawn_by,
    forced,
)


def rounded_once(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """Attention that rounds its result alone; torch's rounds the weights of a softmax too, before it sums."""
    out, _ = packed_attention(module, query.float(), key.float(), value.float(), *rest, **kwargs)
    return out.to(query.dtype), None


def over_8_bits(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """The same over keys and values that are rounded to 8 bits before."""
    key, value = (held.clamp(-448, 448).to(torch.float8_e4m3fn).to(query.dtype) for held in (key, value))
    return rounded_once(module, query, key, value, *rest, **kwargs)


@torch.no_grad()
def float32_head(module: nn.Module, attention: Any = rounded_once) -> Tensor:
    """Logits of all positions, by the module on packed sequences and a head in float32."""
    AttentionInterface.register(attention.__name__, attention)
    cast(Any, module).config._attn_implementation = attention.__name__
    lengths = [len(ids) for ids in SEQUENCES]
    packing = Packing.of([0, *np.cumsum(lengths).tolist()])
    ids, positions = torch.from_numpy(np.concatenate(SEQUENCES)).long(), torch.cat([torch.arange(n) for n in lengths])
    rows = model.hidden_states(module, ids, positions, packing)
    return 30 * torch.tanh(rows.float() @ cast(Any, module).lm_head.weight.float().T / 30)


def of_decoder(module: nn.Module, *numerics: Any, **settings: Any) -> Tensor:
    """The same by a decoder."""
    return torch.from_numpy(np.concatenate(forced(decoder_of(module, *numerics, **settings))[0]))


def one_layer(attention: str, mlp: str) -> dict[str, Any]:
    """More would amplify the last bits."""
    return {"num_hidden_layers": 1, "layer_types": [attention], "mlp_layer_types": [mlp]}


layers = pytest.mark.parametrize(
    ("attention", "mlp"), [("full_attention", "dense"), ("sliding_attention", "dense"), ("sliding_attention", "sparse")]
)


@layers
def test_bfloat16_is_rounded_where_the_module_rounds(attention: str, mlp: str) -> None:
    """It is far nearer to the module than float32 is."""
    changes = one_layer(attention, mlp)
    module = random_beam(dtype="bfloat16", **changes)
    ours = of_decoder(module, "bfloat16", **changes)
    theirs, exact = float32_head(module), float32_head(module.float())
    assert (ours - theirs).abs().mean() < 0.01 * (exact - theirs).abs().mean()


class Unmerged(TorchFunctionMode):
    """Meanwhile linear layers have adapters: ``W x + B z``, rounded once, for ``z = scale A x``, rounded before."""

    def __init__(self, module: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        weights, self.parts = named_tensors(module), dict[int, tuple[Tensor, Tensor]]()
        for site, stacked_a, stacked_b in zip(adapters.sites, adapters.a, adapters.b, strict=True):
            a, b = (stacked[0].to(module.dtype).float() for stacked in (stacked_a, stacked_b))
            for projection, rows in site.spans():
                self.parts[weights[f"{site.place}.{projection}.weight"].data_ptr()] = a * adapters.lora.scale, b[rows]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.parts.get(args[1].data_ptr()) if function is F.linear else None
        if found is None:
            return function(*args, **(kwargs or {}))
        x, (a, b) = args[0], found
        z = (x.float() @ a.T).to(x.dtype).float()
        return (x.float() @ args[1].float().T + z @ b.T).to(x.dtype)


@pytest.mark.parametrize("attention", ["full_attention", "sliding_attention"])
def test_adapters_in_bfloat16_are_rounded_twice(attention: str) -> None:
    """Of experts, the kernel is held against its formula."""
    changes = one_layer(attention, "dense")
    module, adapters = random_beam(dtype="bfloat16", **changes), adapters_for(changes)
    ours = of_decoder(module, "bfloat16", adapters=adapters, **changes)
    with Unmerged(module, adapters):
        theirs = float32_head(module)
    with Unmerged(module.float(), adapters):
        exact = float32_head(module)
    assert (ours - theirs).abs().mean() < 0.01 * (exact - theirs).abs().mean()
    assert (float32_head(module) - theirs).abs().mean() > 10 * (exact - theirs).abs().mean()


@layers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_reads_keys_and_values_of_8_bits(attention: str, mlp: str, dtype: Any) -> None:
    """It is far nearer to a module that rounds them than that is to one that does not."""
    changes = one_layer(attention, mlp)
    module = random_beam(dtype=dtype, **changes)
    ours = of_decoder(module, dtype, "float8_e4m3", **changes)
    theirs, unrounded = float32_head(module, over_8_bits), float32_head(module)
    assert (ours - theirs).abs().mean() < 0.01 * (unrounded - theirs).abs().mean()


def test_a_cache_of_8_bits_changes_the_logits_of_every_position() -> None:
    """A key or value is off by up to a sixteenth."""
    rounded, exact = (of_decoder(random_beam(), "float32", kv_dtype) for kv_dtype in ("float8_e4m3", "same"))
    assert ((rounded - exact).abs().amax(1) > 1e-3).all()


# The head


def as_it_is(x: Any) -> Any:
    return x


def bfloat16(x: Any) -> Any:
    return torch.from_numpy(x).bfloat16().double().numpy()


def head_logprobs(decoder: BeamDecoder, ids: Any, before: Any = as_it_is, after: Any = as_it_is) -> Any:
    """Log-probabilities ``[S, V]`` in double precision, from the decoder's own hidden states.

    Logits are rounded before the soft cap, after it, or not at all.
    """
    evaluation = Evaluation(decoder)
    logits, _ = evaluation.logits(ids, np.arange(len(ids)), np.zeros(len(ids), np.int64), evaluation.unrung)
    capped = after(30.0 * np.tanh(before(logits).astype(np.float64) / 30.0))
    return torch.from_numpy(capped).log_softmax(-1).numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_in_bfloat16_rounds_logits_before_the_cap_and_nothing_after(dtype: str) -> None:
    """Tanh is within 3 units in the last place, which times 30 is 5e-6; rounding logits around 20 costs up to 0.06."""
    decoder, (prefixes, groups), steps = decoder_of(random_beam(), dtype, "same", "bfloat16"), SHARED, 20
    slots = drawn_by(decoder, prefixes, groups, steps)

    def apart(**rounding: Any) -> Any:
        distances = []
        for slot, prefix in enumerate(prefixes):
            new = np.arange(len(prefix), len(prefix) + steps + 1)
            expected = head_logprobs(decoder, slots.tokens[slot, : new[-1]], **rounding)
            distances.append(np.abs(slots.logprobs[slot, new] - expected[new - 1, slots.tokens[slot, new]]))
        return np.concatenate(distances)

    assert apart(before=bfloat16).max() < 1e-5
    assert apart().mean() > 1e-3
    assert apart(after=bfloat16).mean() > 1e-3


def test_a_head_in_bfloat16_changes_no_route_and_no_hidden_state() -> None:
    one, other = (forced(decoder_of(random_beam(), "float32", "same", head)) for head in ("float32", "bfloat16"))
    for parts, others in zip(one, other, strict=True):
        for part, same in zip(parts, others, strict=True):
            np.testing.assert_array_equal(part, same)


# Received weights


def test_received_weights_are_rounded_to_their_types() -> None:
    """The router stays float32."""
    module = random_beam()
    decoder = decoder_of(module, "bfloat16")
    given = named_tensors(module)
    for spec in tensors(beam_shape(), "bfloat16"):
        expected = given[spec.name].bfloat16().float() if spec.dtype == "bfloat16" else given[spec.name]
        assert torch.equal(decoder.tensors[spec.name], expected), spec.name
        assert torch.equal(expected, given[spec.name]) == (spec.dtype == "float32"), spec.name


def test_what_was_not_received_is_not_rounded() -> None:
    decoder = decoder_of(random_beam(), "bfloat16", adapters=adapters_for({}))
    held = decoder.tensors | decoder.adapters
    names = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.lora_B.weight"
    others = [name.replace("layers.1", "layers.2") for name in names]
    for name in (*names, *others):
        held[name].fill_(1 + 2.0**-10)
    decoder.round_weights(names)
    assert all(bool((held[name] == 1).all()) for name in names)
    assert all(bool((held[name] == 1 + 2.0**-10).all()) for name in others)


def test_received_adapters_are_rounded() -> None:
    adapters = adapters_for({})
    decoder = decoder_of(random_beam(), "bfloat16", adapters=adapters)
    for name, given in named_tensors(adapters).items():
        assert torch.equal(decoder.adapters[name], given.bfloat16().float()), name
        assert not torch.equal(decoder.adapters[name], given), name


@pytest.mark.parametrize("name", ["dtype", "head_dtype"])
def test_it_computes_as_two_types(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=float32 or bfloat16, not float16"):
        Numerics(**{name: "float16"})
