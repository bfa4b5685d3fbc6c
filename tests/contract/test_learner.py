"""What every learner computes: the module's log-probabilities, the written loss, and one update of its gradient."""

from typing import Any

import numpy as np
import pytest

from beamline.algorithms.loss import LossConfig
from beamline.learner.learner import Learner
from beamline.model.beam import tensors
from beamline.records import Experience
from tests.contract.engines import LearnerFactory
from tests.contract.learning import (
    GRADIENT,
    LOSS,
    assert_gradients_equal,
    batch,
    experience,
    loss_of,
    metrics,
    snapshot,
    untrained,
    update,
    updated_gradient,
    weights,
    written_gradient,
)
from tests.tiny_beam import beam_shape, evaluate, random_beam, reference, teacher_forced

PLAIN = reference(random_beam())
TOKENS = sum(e.rollout.response_tokens for e in batch())
OLD = loss_of(on_policy=False)


def logprobs_of(sequence: Experience) -> np.ndarray:
    """Log-probability of each target by the Hugging Face module, at the sequence's temperature."""
    return teacher_forced(PLAIN, sequence.rollout.token_ids, sequence.rollout.temperature)


def entropy_of(sequence: Experience) -> np.ndarray:
    table = evaluate(PLAIN, sequence.rollout.token_ids[:-1]).logprobs(sequence.rollout.temperature).astype(np.float64)
    return np.asarray(-(np.exp(table) * table).sum(-1))


def chosen(values: list[np.ndarray], sequences: list[Experience]) -> np.ndarray:
    """The values of the tokens that the policy chose, over all sequences."""
    return np.concatenate([v[e.rollout.policy_mask[1:]] for v, e in zip(values, sequences, strict=True)])


# Forward


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 4096])
def test_forward_gives_logprobs_and_entropies_in_order(
    learner_factory: LearnerFactory, micro_batch_tokens: int
) -> None:
    outputs = learner_factory(random_beam(), micro_batch_tokens).forward(batch(), ["logprobs", "entropy"])
    assert outputs.logprobs is not None
    assert outputs.entropy is not None
    for sequence, logprobs, entropy in zip(batch(), outputs.logprobs, outputs.entropy, strict=True):
        np.testing.assert_allclose(logprobs, logprobs_of(sequence), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(entropy, entropy_of(sequence), rtol=1e-5, atol=1e-5)


def test_no_token_sees_another_sequence(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam())
    together = learner.forward(batch(), ["logprobs"]).logprobs
    assert together is not None
    for sequence, logprobs in zip(batch(), together, strict=True):
        alone = learner.forward([sequence], ["logprobs"]).logprobs
        assert alone is not None
        np.testing.assert_allclose(logprobs, alone[0], rtol=1e-6, atol=5e-6)


def test_forward_gives_what_was_asked_for_and_changes_nothing(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam())
    before = snapshot(learner)
    only = learner.forward(batch(), ["entropy"])
    assert (only.logprobs, only.values) == (None, None)
    learner.prepare(batch(), OLD)
    assert snapshot(learner) == before


def test_an_output_that_the_model_cannot_give_is_an_error(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam())
    with pytest.raises(ValueError, match="value"):
        learner.forward(batch(), ["values"])
    with pytest.raises(ValueError, match="reference"):
        learner.forward(batch(), ["logprobs"], "reference")


# The loss and its gradient


@pytest.mark.parametrize("loss", [LOSS, OLD], ids=["on-policy", "old-logprobs"])
def test_an_update_follows_the_gradient_of_the_written_loss(learner_factory: LearnerFactory, loss: LossConfig) -> None:
    gradient, stats = updated_gradient(learner_factory(random_beam(), **GRADIENT), batch(), loss)
    expected, value = written_gradient(PLAIN, batch(), TOKENS)
    assert_gradients_equal(gradient, expected, 1e-5)
    assert stats.loss == pytest.approx(value, abs=1e-6)
    assert (stats.skipped, stats.tokens) == (False, TOKENS)
    norm = np.sqrt(sum((values**2).sum() for values in expected.values()))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("loss", [LOSS, OLD], ids=["on-policy", "old-logprobs"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 50])
def test_the_cut_into_micro_batches_does_not_matter(
    learner_factory: LearnerFactory, micro_batch_tokens: int, loss: LossConfig
) -> None:
    whole, stats = updated_gradient(learner_factory(random_beam(), **GRADIENT), batch(), loss)
    learner = learner_factory(random_beam(), micro_batch_tokens, **GRADIENT)
    cut, cut_stats = updated_gradient(learner, batch(), loss)
    assert_gradients_equal(cut, whole, 2e-6)
    assert cut_stats.loss == pytest.approx(stats.loss, abs=1e-6)
    assert metrics(cut_stats) == pytest.approx(metrics(stats), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "sequences",
    [
        list(reversed(batch())),
        [*batch()[:2], untrained(experience(4, 30, seed=9, advantage=5.0)), *batch()[2:]],
        [*batch(), experience(9, 0, seed=9, advantage=5.0)],
    ],
    ids=["another order", "an untrained sequence more", "a sequence without a response more"],
)
@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_what_is_not_learned_from_does_not_matter(
    learner_factory: LearnerFactory, sequences: list[Experience], micro_batch_tokens: int
) -> None:
    expected, stats = updated_gradient(learner_factory(random_beam(), **GRADIENT), batch())
    learner = learner_factory(random_beam(), micro_batch_tokens, **GRADIENT)
    actual, other = updated_gradient(learner, sequences)
    assert_gradients_equal(actual, expected, 2e-6)
    assert other.loss == pytest.approx(stats.loss, abs=1e-6)
    assert other.tokens == stats.tokens


@pytest.mark.parametrize(("mask_truncated", "renormalize"), [(False, False), (True, False), (True, True)])
def test_the_denominator_counts_the_tokens_that_it_should(
    learner_factory: LearnerFactory, mask_truncated: bool, renormalize: bool
) -> None:
    """At a ratio of 1 the loss is the sum of -A over the tokens kept, divided by the denominator."""
    loss = loss_of(mask_truncated=mask_truncated, renormalize_after_mask=renormalize)
    kept = [e for e in batch() if not mask_truncated or e.rollout.finish == "stop"]
    kept_tokens = sum(e.rollout.response_tokens for e in kept)
    learner = learner_factory(random_beam())
    prepared = learner.prepare([*batch(), untrained(experience(4, 6, seed=9, advantage=1.0))], loss)
    assert prepared.loss_tokens == kept_tokens
    stats = learner.step(prepared)
    total = -sum(e.advantage * e.rollout.response_tokens for e in kept)
    assert stats.loss == pytest.approx(total / (kept_tokens if renormalize else TOKENS), rel=1e-6)
    assert stats.tokens == kept_tokens


@pytest.mark.parametrize("loss", [LOSS, OLD], ids=["on-policy", "old-logprobs"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 4096])
def test_the_first_ratio_is_exactly_1(
    learner_factory: LearnerFactory, micro_batch_tokens: int, loss: LossConfig
) -> None:
    found = metrics(update(learner_factory(random_beam(), micro_batch_tokens), batch(), loss))
    names = ("policy/kl_old", "policy/clip_share_low", "policy/clip_share_high")
    assert [found[name] for name in names] == [0.0, 0.0, 0.0]


def test_a_later_update_is_clipped_against_the_policy_before_the_first(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), lr=2e-3)
    first, second = (learner.prepare(batch(), OLD) for _ in range(2))
    old = learner.forward(batch(), ["logprobs"]).logprobs
    learner.step(first)
    new = learner.forward(batch(), ["logprobs"]).logprobs
    stats = learner.step(second)
    assert old is not None
    assert new is not None
    difference = chosen(new, batch()).astype(np.float64) - chosen(old, batch())
    advantage = np.concatenate([np.full(e.rollout.response_tokens, e.advantage) for e in batch()])
    ratio = np.exp(difference)
    low, high = (advantage < 0) & (ratio < 0.8), (advantage > 0) & (ratio > 1.28)
    assert low.any()
    assert high.any()
    objective = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    assert stats.loss == pytest.approx(-objective.mean(), abs=1e-5)
    found = metrics(stats)
    assert found["policy/kl_old"] == pytest.approx(-difference.mean(), abs=1e-5)
    assert found["policy/clip_share_low"] == pytest.approx(low.mean())
    assert found["policy/clip_share_high"] == pytest.approx(high.mean())


def test_metrics_compare_the_sampler_with_the_policy_before_the_update(learner_factory: LearnerFactory) -> None:
    found = metrics(update(learner_factory(random_beam(), micro_batch_tokens=40), batch()))
    sampler = chosen([e.rollout.logprobs[1:] for e in batch()], batch())
    difference = chosen([logprobs_of(e) for e in batch()], batch()).astype(np.float64) - sampler
    expected = {
        "mismatch/logprob_abs_diff_mean": np.abs(difference).mean(),
        "mismatch/logprob_abs_diff_max": np.abs(difference).max(),
        "mismatch/ratio_mean": np.exp(difference).mean(),
        "policy/entropy": chosen([entropy_of(e) for e in batch()], batch()).mean(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


# The optimizer


def test_the_rate_rises_linearly(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), lr=4e-4, warmup_updates=4)
    rates = [update(learner, batch()[:1]).lr for _ in range(6)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_the_rate_reported_is_the_one_used(learner_factory: LearnerFactory) -> None:
    """A first update with almost no epsilon moves every weight with a gradient by the rate."""
    learner = learner_factory(random_beam(), lr=4e-4, eps=1e-20, weight_decay=0.0, warmup_updates=4)
    before = weights(learner)
    update(learner, batch())
    assert np.abs(before["lm_head.weight"] - weights(learner)["lm_head.weight"]).max() == pytest.approx(1e-4, rel=1e-3)


def test_the_gradient_is_clipped_to_its_norm(learner_factory: LearnerFactory) -> None:
    free, stats = updated_gradient(learner_factory(random_beam(), **GRADIENT), batch())
    limited = GRADIENT | {"max_grad_norm": 0.5}
    clipped, other = updated_gradient(learner_factory(random_beam(), **limited), batch())
    assert other.grad_norm == stats.grad_norm
    assert stats.grad_norm is not None
    assert stats.grad_norm > 0.5
    assert_gradients_equal(clipped, {name: g * 0.5 / stats.grad_norm for name, g in free.items()}, 1e-5)


def test_a_sequence_with_an_advantage_of_0_is_left_out_and_counts_in_the_denominator(
    learner_factory: LearnerFactory,
) -> None:
    silent = experience(3, 9, seed=5, advantage=0.0)
    prepared = learner_factory(random_beam()).prepare([*batch(), silent], LOSS)
    assert prepared.loss_tokens == sum(e.rollout.response_tokens for e in batch())
    share = sum(e.rollout.response_tokens for e in batch()) / (sum(e.rollout.response_tokens for e in batch()) + 9)
    _, alone = updated_gradient(learner_factory(random_beam(), **GRADIENT), batch())
    _, beside = updated_gradient(learner_factory(random_beam(), **GRADIENT), [*batch(), silent])
    assert beside.loss == pytest.approx(alone.loss * share, rel=1e-6)


def test_matrices_decay_and_vectors_do_not(learner_factory: LearnerFactory) -> None:
    """A gradient far below the optimizer's epsilon leaves the decay alone."""
    learner = learner_factory(random_beam(), lr=0.1, weight_decay=0.5, eps=1e6)
    before = weights(learner)
    update(learner, [experience(3, 9, seed=1, advantage=1e-3)])
    for name, after in weights(learner).items():
        np.testing.assert_allclose(after, before[name] * (0.95 if after.ndim > 1 else 1.0), rtol=1e-6, err_msg=name)


def test_a_rate_of_0_trains_nothing(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), lr=0.0)
    before = weights(learner)
    assert not update(learner, batch()).skipped
    after = weights(learner)
    assert all((after[name] == before[name]).all() for name in before)


# Updates that are not made


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [untrained(e) for e in batch()],
        [experience(3, 9, seed=1, advantage=1.0, finish="length")],
        [experience(9, 0, seed=1, advantage=1.0)],
    ],
    ids=["nothing", "untrained", "truncated", "no response"],
)
@pytest.mark.parametrize("on_policy", [True, False])
def test_without_a_token_to_learn_from_nothing_happens(
    learner_factory: LearnerFactory, sequences: list[Experience], on_policy: bool
) -> None:
    learner = learner_factory(random_beam(), lr=1e-3, warmup_updates=8)
    update(learner, batch())
    before = snapshot(learner)
    prepared = learner.prepare(sequences, loss_of(on_policy, mask_truncated=True))
    assert prepared.loss_tokens == 0
    stats = learner.step(prepared)
    assert (stats.skipped, stats.tokens, stats.grad_norm) == (True, 0, None)
    assert not any(name in metrics(stats) for name in ("policy/lr", "policy/loss", "policy/entropy"))
    assert snapshot(learner) == before
    assert update(learner, batch()).lr == pytest.approx(2 / 8 * 1e-3)


@pytest.mark.parametrize(
    "sequences",
    [
        [*batch(), experience(3, 1, seed=8, advantage=float("nan"))],
        [*batch(), experience(3, 1, seed=8, advantage=float("inf"))],
        [experience(3, 1, seed=8, advantage=3e38)],
    ],
    ids=["nan", "inf", "only the gradient"],
)
@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_what_is_not_finite_is_not_learned(
    learner_factory: LearnerFactory, sequences: list[Experience], micro_batch_tokens: int
) -> None:
    def fresh() -> Learner[Any]:
        return learner_factory(random_beam(), micro_batch_tokens, lr=1e-3, warmup_updates=8)

    learner, spared = fresh(), fresh()
    for each in (learner, spared):
        update(each, batch())
    before = snapshot(learner)
    with pytest.raises(FloatingPointError, match="was not made"):
        update(learner, sequences)
    assert snapshot(learner) == before
    assert metrics(update(learner, batch())) == metrics(update(spared, batch()))
    assert snapshot(learner) == snapshot(spared)


def test_a_weight_that_is_not_finite_stops_updates_and_is_never_saved(learner_factory: LearnerFactory) -> None:
    module = random_beam()
    module.state_dict()["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    learner = learner_factory(module)
    with pytest.raises(FloatingPointError, match="nan"):
        update(learner, batch())
    with pytest.raises(FloatingPointError, match=r"layers\.1\.self_attn\.o_proj"):
        snapshot(learner)


def test_the_layout_covers_every_tensor_of_the_checkpoint(learner_factory: LearnerFactory) -> None:
    held = {(s.name, s.shape) for rank in learner_factory(random_beam()).layout("full").ranks for s in rank}
    assert held == {(spec.name, spec.shape) for spec in tensors(beam_shape())}
