"""Rollout routing replay: the learner sends tokens where the sampler sent them, and weighs the experts itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from beamline.algorithms.loss import LossConfig
from beamline.learner.learner import Learner
from beamline.policy import model, parity
from beamline.policy.attention import Packing
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Completion, Experience, Request, Rollout, pack
from beamline.rollout.collect import joined, to_rollout
from beamline.rollout.local import LocalSampler, Numerics
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from tests.adapters import random_routes
from tests.contract.engines import LearnerFactory, PairBench, PairFactory
from tests.contract.forcing import (
    Routes,
    assert_follows,
    forced,
    free_logprobs,
    logprobs_of,
    routed_batch,
    with_routes,
)
from tests.contract.learning import (
    GRADIENT,
    LOSS,
    assert_gradients_equal,
    batch,
    loss_of,
    metrics,
    snapshot,
    update,
    updated_gradient,
    weights,
    written_gradient,
)
from tests.contract.sampling import requests, resumed, run
from tests.tiny_beam import CONTEXT, THETA, beam_shape, evaluate, random_beam, reference

TOKENS = sum(e.rollout.response_tokens for e in batch())
OLD = loss_of(on_policy=False)


def with_layers(*kinds: str) -> dict[str, Any]:
    sliding = ["sliding_attention", "full_attention"] * 2
    return {"num_hidden_layers": 4, "layer_types": sliding, "mlp_layer_types": list(kinds)}


DEPTHS = {
    "no dense layer": with_layers("sparse", "sparse", "sparse", "sparse"),
    "a dense first layer": with_layers("dense", "sparse", "sparse", "sparse"),
    "two dense first layers": with_layers("dense", "dense", "sparse", "sparse"),
    "a dense layer in the middle": with_layers("sparse", "dense", "sparse", "sparse"),
}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain gate weights": {"norm_topk_prob": False},
    "one expert a token": {"num_experts_per_tok": 1},
    "more experts than 8 bits count": {"num_experts": 272, "n_group": 4, "hidden_size": 16},
}
VARIANTS = DEPTHS | ROUTERS


@torch.no_grad()
def trained(learner: Learner[Any]) -> nn.Module:
    """A module with the weights that a learner has come to."""
    module, found = random_beam(), weights(learner)
    for name, tensor in named_tensors(module).items():
        tensor.copy_(torch.from_numpy(found[name]))
    return module


def furthest(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> list[float]:
    return [float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)]


# Log-probabilities and gradients, with routes that no router would choose


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logprobs_are_those_of_a_module_with_forced_experts(
    learner_factory: LearnerFactory, changes: dict[str, Any]
) -> None:
    module, sequences = random_beam(**changes), routed_batch(**changes)
    learner = learner_factory(random_beam(**changes), r3=True)
    assert_follows(learner, module, sequences)
    free = [free_logprobs(reference(module), sequence) for sequence in sequences]
    assert min(furthest(logprobs_of(learner, sequences), free)) > 0.05


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("loss", [LOSS, OLD], ids=["on-policy", "old-logprobs"])
def test_gradients_are_those_of_a_module_with_forced_experts(
    learner_factory: LearnerFactory, changes: dict[str, Any], loss: LossConfig
) -> None:
    """To 1e-5 of the largest entry: float32 sums over 80 rows in another order."""
    plain, sequences = reference(random_beam(**changes)), routed_batch(**changes)
    learner = learner_factory(random_beam(**changes), r3=True, **GRADIENT)
    gradient, stats = updated_gradient(learner, sequences, loss)
    with forced(plain, sequences):
        expected, value = written_gradient(plain, sequences, TOKENS)
    assert_gradients_equal(gradient, expected, 1e-5)
    assert stats.loss == pytest.approx(value, abs=1e-6)


def test_the_router_learns_where_its_experts_are_given(learner_factory: LearnerFactory) -> None:
    gradient, _ = updated_gradient(learner_factory(random_beam(), r3=True, **GRADIENT), routed_batch())
    largest = max(float(np.abs(values).max()) for values in gradient.values())
    for layer in (1, 2):
        router = np.abs(gradient[f"model.layers.{layer}.mlp.gate.weight"])
        assert router.max() > 1e-3 * largest
        assert (router.max(axis=1) > 0).all()  # each expert is somebody's


def test_the_learner_weighs_experts_by_its_own_scores(learner_factory: LearnerFactory) -> None:
    """Of a router that has changed since: here its weights have turned around."""
    turned, sequences = random_beam(), routed_batch()
    with torch.no_grad():
        for name, tensor in named_tensors(turned).items():
            if name.endswith("mlp.gate.weight"):
                tensor.neg_()
    before = logprobs_of(learner_factory(random_beam(), r3=True), sequences)
    learner = learner_factory(turned, r3=True)
    assert_follows(learner, turned, sequences)
    assert min(furthest(logprobs_of(learner, sequences), before)) > 0.05


def test_after_an_update_the_new_weights_follow_the_same_routes(learner_factory: LearnerFactory) -> None:
    learner, sequences = learner_factory(random_beam(), r3=True, lr=1e-2), routed_batch()
    before = logprobs_of(learner, sequences)
    update(learner, sequences)
    assert_follows(learner, trained(learner), sequences)
    assert min(furthest(logprobs_of(learner, sequences), before)) > 0.05


# Its own choices


def recorded(by: Completion | Rollout) -> Routes:
    assert by.routes is not None
    return by.routes


def sampled(pair: PairBench, version: int = 1) -> tuple[list[Request], list[Completion]]:
    pair.sync(version)
    asked = requests()
    return asked, run(pair.sampler, asked)


def experiences(asked: Sequence[Request], completions: Sequence[Completion]) -> list[Experience]:
    pairs = zip(asked, completions, strict=True)
    return [Experience(to_rollout(wanted, got), 1.0 - 2.0 * (i % 2)) for i, (wanted, got) in enumerate(pairs)]


def test_replaying_its_own_choices_changes_no_bit_of_logprobs(pair_factory: PairFactory) -> None:
    pair = pair_factory(random_beam(), r3=True)
    asked, drawn = sampled(pair)
    sequences = experiences(asked, drawn)
    replayed = logprobs_of(pair.learner, sequences)
    for one, other in zip(replayed, logprobs_of(pair_factory(random_beam()).learner, sequences), strict=True):
        np.testing.assert_array_equal(one, other)
    for values, wanted, completion in zip(replayed, asked, drawn, strict=True):
        np.testing.assert_array_equal(values[len(wanted.prefix_ids) - 1 :], completion.logprobs)


@pytest.mark.parametrize("loss", [LOSS, OLD], ids=["on-policy", "old-logprobs"])
def test_replaying_its_own_choices_changes_no_bit_of_an_update(pair_factory: PairFactory, loss: LossConfig) -> None:
    replaying, free = (pair_factory(random_beam(), r3=r3, lr=1e-3) for r3 in (True, False))
    sequences = experiences(*sampled(replaying))
    found = [metrics(update(pair.learner, sequences, loss)) for pair in (replaying, free)]
    assert found[0] == found[1]
    assert snapshot(replaying.learner) == snapshot(free.learner)


# A trace that is shifted


def own_routes(module: nn.Module, sequence: Experience) -> Routes:
    """The choices of the Hugging Face module."""
    return evaluate(reference(module), sequence.rollout.token_ids[:-1]).routes_SLK.astype(np.uint8)


@pytest.mark.parametrize("axis", [0, 1], ids=["by one token", "by one layer"])
@pytest.mark.parametrize("changes", DEPTHS.values(), ids=DEPTHS)
def test_a_shifted_trace_is_seen_against_the_module(
    learner_factory: LearnerFactory, changes: dict[str, Any], axis: int
) -> None:
    """A thousand times the tolerance that the unshifted one is held to, in every sequence of more than 2 rows."""
    module = random_beam(**changes)
    learner, plain = learner_factory(random_beam(**changes), r3=True), reference(module)
    sequences = [with_routes(e, own_routes(module, e)) for e in batch() if e.rows > 2]
    shifted = [with_routes(e, np.roll(own_routes(module, e), 1, axis)) for e in sequences]
    expected = [free_logprobs(plain, sequence) for sequence in sequences]
    assert max(furthest(logprobs_of(learner, sequences), expected)) < 2e-5
    assert min(furthest(logprobs_of(learner, shifted), expected)) > 2e-2


# How sequences lie in batches


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 4096])
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_neither_the_cut_nor_the_order_matters(
    learner_factory: LearnerFactory, micro_batch_tokens: int, order: int
) -> None:
    sequences = routed_batch()
    whole, stats = updated_gradient(learner_factory(random_beam(), r3=True, **GRADIENT), sequences, OLD)
    learner = learner_factory(random_beam(), micro_batch_tokens, r3=True, **GRADIENT)
    assert_follows(learner, random_beam(), sequences[::order])
    cut, cut_stats = updated_gradient(learner, sequences[::order], OLD)
    assert_gradients_equal(cut, whole, 2e-6)
    assert cut_stats.loss == pytest.approx(stats.loss, abs=1e-6)


def test_recomputing_activations_replays_too(learner_factory: LearnerFactory) -> None:
    keeping, recomputing = (learner_factory(random_beam(), r3=True, recompute=recompute) for recompute in (False, True))
    for learner in (keeping, recomputing):
        update(learner, routed_batch(), OLD)
    assert snapshot(recomputing) == snapshot(keeping)


@pytest.mark.parametrize("path", [parity, model], ids=["parity", "module"])
def test_a_pass_between_forward_and_backward_changes_no_recomputed_routes(path: Any) -> None:
    packed = pack(routed_batch())
    borders, ids, places = packed.cu_seqlens_B1.tolist(), packed.input_ids_N, packed.position_ids_N
    direction = torch.randn(packed.rows, 32, generator=torch.Generator().manual_seed(0))

    def hidden(module: nn.Module, routes: Any) -> torch.Tensor:
        where = torch.from_numpy(ids), torch.from_numpy(places), Packing.of(borders)
        found: torch.Tensor = path.hidden_states(module, *where, routes_NLK=routes)
        return found

    def gradients(recompute: bool, between: Callable[[nn.Module], object]) -> dict[str, torch.Tensor]:
        module: Any = random_beam().train()
        if recompute:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        found = hidden(module, packed.routes_NLK)
        between(module)
        (found * direction).sum().backward()
        return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    expected = gradients(recompute=False, between=lambda _: None)
    for routes in (random_routes(beam_shape(), packed.rows, seed=99), None):
        actual = gradients(recompute=True, between=lambda module, routes=routes: hidden(module, routes))
        for name, gradient in expected.items():
            assert torch.equal(actual[name], gradient), name


# Several updates, and the reference


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 4096])
@pytest.mark.parametrize("loss", [LOSS, OLD], ids=["on-policy", "old-logprobs"])
def test_the_first_ratio_is_exactly_1(
    learner_factory: LearnerFactory, micro_batch_tokens: int, loss: LossConfig
) -> None:
    learner = learner_factory(random_beam(), micro_batch_tokens, r3=True)
    found = metrics(update(learner, routed_batch(), loss))
    names = ("policy/kl_old", "policy/clip_share_low", "policy/clip_share_high")
    assert [found[name] for name in names] == [0.0, 0.0, 0.0]


def test_a_later_update_is_held_against_replayed_logprobs(learner_factory: LearnerFactory) -> None:
    learner, sequences = learner_factory(random_beam(), r3=True, lr=2e-3), routed_batch()
    first, second = (learner.prepare(sequences, OLD) for _ in range(2))
    old = logprobs_of(learner, sequences)
    learner.step(first)
    new = logprobs_of(learner, sequences)
    chosen = [e.rollout.policy_mask[1:] for e in sequences]
    drift = np.concatenate([(a.astype(np.float64) - b)[mask] for a, b, mask in zip(old, new, chosen, strict=True)])
    assert metrics(learner.step(second))["policy/kl_old"] == pytest.approx(drift.mean(), abs=1e-6)
    assert np.abs(drift).max() > 0.05


def test_the_reference_replays_too(learner_factory: LearnerFactory) -> None:
    """So that before the first update it is the policy: any other routes would part them."""
    loss = loss_of(kl={"place": "loss", "coefficient": 0.1})
    learner = learner_factory(random_beam(), r3=True, reference=random_beam())
    assert metrics(update(learner, routed_batch(), loss))["policy/kl_reference"] == 0.0


# Responses of every kind


@pytest.mark.parametrize("drawn", [1, 7])
def test_a_response_in_two_parts_replays_what_each_was_drawn_with(pair_factory: PairFactory, drawn: int) -> None:
    """The second part is drawn under other weights, whose sampler evaluates the first part again in its own way."""
    pair, asked = pair_factory(random_beam(), r3=True, lr=1e-2), requests()
    begun = [replace(r, params=replace(r.params, max_tokens=drawn)) for r in asked]
    pair.sync(1)
    parts = run(pair.sampler, begun)
    update(pair.learner, experiences(begun, parts))
    pair.sync(2)
    rest = run(pair.sampler, [resumed(r, part) for r, part in zip(asked, parts, strict=True)])
    both = [(recorded(begin), recorded(end)) for begin, end in zip(parts, rest, strict=True)]
    assert any((again[: len(first)] != first).any() for first, again in both)
    sequences = experiences(asked, [joined(begin, end) for begin, end in zip(parts, rest, strict=True)])
    assert_follows(pair.learner, trained(pair.learner), sequences)
    under_old = logprobs_of(pair_factory(random_beam(), r3=True).learner, sequences)
    for values, wanted, part in zip(under_old, asked, parts, strict=True):
        np.testing.assert_array_equal(values[len(wanted.prefix_ids) - 1 :][:drawn], part.logprobs)


# What cannot be replayed


@pytest.mark.parametrize("parts", [slice(0, 1), slice(0, 3), slice(0, 5)])
def test_without_routes_there_is_nothing_to_replay(learner_factory: LearnerFactory, parts: slice) -> None:
    sequences = [with_routes(e, None) for e in routed_batch()[parts]]
    learner = learner_factory(random_beam(), r3=True)
    for use in (lambda: logprobs_of(learner, sequences), lambda: learner.prepare(sequences, OLD)):
        with pytest.raises(ValueError, match=r"policy\.r3 .* there are none"):
            use()


def test_a_sequence_without_routes_among_others_is_an_error(learner_factory: LearnerFactory) -> None:
    sequences = routed_batch()
    with pytest.raises(ValueError, match="4 of 5 sequences have routes"):
        logprobs_of(learner_factory(random_beam(), r3=True), [with_routes(sequences[0], None), *sequences[1:]])


@pytest.mark.parametrize(
    "other",
    [
        {"mlp_layer_types": ["sparse", "sparse", "sparse"]},
        {"mlp_layer_types": ["dense", "dense", "sparse"]},
        {"num_experts_per_tok": 3},
    ],
    ids=["a layer more", "a layer less", "an expert less"],
)
def test_routes_of_another_model_are_an_error(learner_factory: LearnerFactory, other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"policy\.r3 replays routes of shape \(\d+, 2, 4\)"):
        logprobs_of(learner_factory(random_beam(), r3=True), routed_batch(**other))


# A sampler of another type


def rounded_sampler(module: nn.Module) -> LocalSampler:
    """One that computes as bfloat16."""
    channel = LocalChannel()
    sampler = LocalSampler(beam_shape(), Numerics("bfloat16"), THETA, 16, CONTEXT, 0, channel)
    moves = plan(module_layout(module), sampler.layout("full"))
    channel.send(moves, Tensors(named_tensors(module)))
    sampler.receive(moves, 1, "keep")
    return sampler


def test_a_learner_in_float32_follows_a_sampler_in_bfloat16(learner_factory: LearnerFactory) -> None:
    module, asked = random_beam(), requests()
    drawn = run(rounded_sampler(module), asked)
    sequences = experiences(asked, drawn)
    own = [own_routes(module, sequence) for sequence in sequences]
    assert any((np.sort(recorded(c)) != np.sort(routes)).any() for c, routes in zip(drawn, own, strict=True))
    replaying, free = (learner_factory(random_beam(), r3=r3) for r3 in (True, False))
    assert_follows(replaying, module, sequences)
    mismatch = [metrics(update(learner, sequences))["mismatch/logprob_abs_diff_mean"] for learner in (replaying, free)]
    assert 0 < mismatch[0] < mismatch[1]
