"""What every learner makes of the settings of the algorithm: weights, masks, corrections, a KL loss, guards."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from beamline.algorithms.guards import GuardError
from beamline.algorithms.kl import kl_losses
from beamline.algorithms.loss import LossConfig
from beamline.algorithms.losses import Tokens, selects, token_losses
from beamline.config.algorithm import Aggregation
from beamline.config.kl import KlLoss
from beamline.config.losses import Loss
from beamline.learner.learner import Learner
from beamline.records import Experience
from tests.contract.engines import LearnerFactory
from tests.contract.learning import (
    GRADIENT,
    LIMIT,
    assert_gradients_equal,
    batch,
    loss_of,
    metrics,
    named_gradients,
    snapshot,
    untrained,
    update,
    updated_gradient,
)
from tests.tiny_beam import random_beam, reference, teacher_forced

PLAIN, OTHER = reference(random_beam()), reference(random_beam(seed=1))
LOSSES = sorted(type_.model_fields["name"].default for type_ in get_args(get_args(Loss)[0]))
AGGREGATIONS = get_args(Aggregation)


def near(noise: float = 0.3) -> list[Experience]:
    """The sequences of ``batch``, as a sampler drew them whose log-probabilities are nearly those of the learner."""
    rng = np.random.default_rng(0)
    made = []
    for number, e in enumerate(batch()):
        exact = np.concatenate([[0], teacher_forced(PLAIN, e.rollout.token_ids, e.rollout.temperature)])
        noisy = np.where(e.rollout.policy_mask, exact + noise * rng.normal(size=len(exact)), 0)
        made.append(replace(e, rollout=replace(e.rollout, logprobs=noisy.astype(np.float32)), group=number // 2))
    return made


def logprobs_by(plain: Any, e: Experience) -> torch.Tensor:
    """Log-probabilities of the response tokens by a Hugging Face module."""
    ids = torch.from_numpy(e.rollout.token_ids.astype(np.int64))
    logits = plain(ids[None, :-1], use_cache=False).logits[0] / e.rollout.temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[torch.from_numpy(e.rollout.policy_mask[1:])]


def sampled(sequences: list[Experience]) -> list[torch.Tensor]:
    return [torch.from_numpy(e.rollout.logprobs[e.rollout.policy_mask]) for e in sequences]


def written(
    sequences: list[Experience], weights: list[float], loss: LossConfig, corrections: list[torch.Tensor] | None = None
) -> dict[str, Any]:
    """Gradient of ``sum_t weight (correction loss_t + coefficient kl_t)`` over whole sequences by the plain module."""
    found = [logprobs_by(PLAIN, e) for e in sequences]
    sizes = [len(x) for x in found]
    logprobs = torch.cat(found)
    anchor = torch.cat(sampled(sequences)) if loss.algorithm.loss.anchor == "sampler" else logprobs.detach()
    tokens = Tokens(
        logprobs,
        anchor,
        torch.cat([torch.full((n,), e.advantage) for n, e in zip(sizes, sequences, strict=True)]),
        torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
    )
    loss_T = token_losses(tokens, loss.algorithm.loss).loss_T
    if corrections is not None:
        loss_T = loss_T * torch.cat(corrections)
    if isinstance(loss.algorithm.kl, KlLoss):
        with torch.no_grad():
            away = torch.cat([logprobs_by(OTHER, e) for e in sequences])
        loss_T = loss_T + loss.algorithm.kl.coefficient * kl_losses(logprobs, anchor, away, loss.algorithm.kl)
    total = (torch.cat([torch.full((n,), w) for n, w in zip(sizes, weights, strict=True)]) * loss_T).sum()
    return named_gradients(PLAIN, total)


def sampler_anchored(name: str, **algorithm: Any) -> LossConfig:
    """A loss whose ratios are not 1 in a first update, because it compares with the sampler."""
    return loss_of(loss={"name": name, "anchor": "sampler"}, **algorithm)


def even(sequences: list[Experience]) -> list[float]:
    """The weights of ``token_mean``."""
    return [1 / sum(e.rollout.response_tokens for e in sequences)] * len(sequences)


def tuned(learner_factory: LearnerFactory, micro_batch_tokens: int = 4096, **arguments: Any) -> Learner[Any]:
    return learner_factory(random_beam(), micro_batch_tokens, **GRADIENT, **arguments)


# Losses


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("clip_cov", "kl_cov")])
def test_an_update_follows_the_gradient_of_its_loss(learner_factory: LearnerFactory, name: str) -> None:
    loss = sampler_anchored(name)
    gradient, _ = updated_gradient(tuned(learner_factory), near(), loss)
    assert_gradients_equal(gradient, written(near(), even(near()), loss), 1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_neither_the_cut_nor_the_order_nor_what_is_masked_matters(learner_factory: LearnerFactory, name: str) -> None:
    wide = {"clip_cov": {"share": 0.2, "covariance_low": 0.1}, "kl_cov": {"share": 0.2}}.get(name, {})
    loss = loss_of(loss={"name": name, "anchor": "sampler", **wide}, mask_truncated=True)
    stopped = [e for e in near() if e.rollout.finish == "stop"]
    expected, stats = updated_gradient(tuned(learner_factory), stopped, loss)
    actual, other = updated_gradient(tuned(learner_factory, 1), [untrained(near()[0]), *near()[::-1]], loss)
    in_denominator = even(stopped)[0] / even(near())[0]  # the truncated sequence is in no gradient, but there
    # Float32: attention by torch rounds with what else is in a bucket, and so with the cut.
    assert_gradients_equal({n: g * in_denominator for n, g in actual.items()}, expected, 1e-5)
    assert (other.tokens, other.kept_tokens) == (stats.tokens, stats.kept_tokens)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_aggregation_weighs_sequences(learner_factory: LearnerFactory, aggregation: str) -> None:
    tokens = [e.rollout.response_tokens for e in near()]
    of_group = [sum(n for n, e in zip(tokens, near(), strict=True) if e.group == g) for g in range(3)]
    weights = {
        "token_mean": even(near()),
        "sequence_mean_token_mean": [1 / (5 * n) for n in tokens],
        "sequence_sum": [1 / (5 * LIMIT)] * 5,
        "prompt_mean": [1 / (3 * of_group[e.group]) for e in near()],
    }
    loss = loss_of(aggregation=aggregation)
    gradient, _ = updated_gradient(tuned(learner_factory), near(), loss)
    assert_gradients_equal(gradient, written(near(), weights[aggregation], loss), 1e-5)


def test_a_loss_that_selects_asks_for_log_probabilities_before_the_update(learner_factory: LearnerFactory) -> None:
    for name in LOSSES:
        prepared = tuned(learner_factory).prepare(near(), loss_of(loss={"name": name, "anchor": "learner"}))
        assert (prepared.plan.compared is not None) == selects(prepared.loss.algorithm.loss), name


# Corrections


def ratios(sequences: list[Experience]) -> list[torch.Tensor]:
    """pi_old / mu of the response tokens."""
    with torch.no_grad():
        return [(logprobs_by(PLAIN, e) - mu).exp() for e, mu in zip(sequences, sampled(sequences), strict=True)]


def test_truncated_importance_sampling_weighs_tokens(learner_factory: LearnerFactory) -> None:
    loss = loss_of(correction={"weight": {"name": "tis", "cap": 1.1}})
    gradient, stats = updated_gradient(tuned(learner_factory), near(), loss)
    corrections = [rho.clamp(max=1.1) for rho in ratios(near())]
    assert_gradients_equal(gradient, written(near(), even(near()), loss, corrections), 1e-5)
    assert metrics(stats)["correction/weight_max"] == pytest.approx(1.1)


@pytest.mark.parametrize("renormalize", [False, True])
def test_icepop_leaves_tokens_out(learner_factory: LearnerFactory, renormalize: bool) -> None:
    weight = {"name": "icepop", "low": 0.8, "high": 1.25}
    loss = loss_of(correction={"weight": weight}, renormalize_after_mask=renormalize)
    gradient, stats = updated_gradient(tuned(learner_factory), near(), loss)
    corrections = [torch.where((rho >= 0.8) & (rho <= 1.25), rho, 0.0) for rho in ratios(near())]
    kept = int(sum((c > 0).sum() for c in corrections))
    tokens = sum(e.rollout.response_tokens for e in near())
    weights = [1 / (kept if renormalize else tokens)] * 5
    assert_gradients_equal(gradient, written(near(), weights, loss, corrections), 1e-5)
    assert (stats.counted_tokens, stats.kept_tokens, stats.tokens) == (tokens, kept, kept)
    assert metrics(stats)["correction/dropped_share_weight"] == pytest.approx(1 - kept / tokens)


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_masked_sequence_is_not_computed(learner_factory: LearnerFactory, renormalize: bool) -> None:
    """A sequence far from its sampler costs the pass that shows it, and nothing after."""
    far = near(noise=0)
    off = far[3].rollout.logprobs - 0.05 * far[3].rollout.policy_mask
    far[3] = replace(far[3], rollout=replace(far[3].rollout, logprobs=off.astype(np.float32)))
    loss = loss_of(correction={"sequence_mask": {"name": "geometric"}}, renormalize_after_mask=renormalize)
    learner = tuned(learner_factory)
    prepared = learner.prepare(far, loss)
    assert [p.experience.rollout.key for p in prepared.plan.sequences] == [far[i].rollout.key for i in (0, 1, 2, 4)]
    gradient, stats = updated_gradient(learner, far, loss)
    rest = [far[i] for i in (0, 1, 2, 4)]
    share = 1 / sum(e.rollout.response_tokens for e in (rest if renormalize else far))
    assert_gradients_equal(gradient, written(rest, [share] * 4, loss), 1e-5)
    tokens = sum(e.rollout.response_tokens for e in far)
    assert metrics(stats)["correction/dropped_share_sequence_mask"] == pytest.approx(
        far[3].rollout.response_tokens / tokens
    )


def test_an_update_of_which_nothing_is_kept_is_skipped_and_explained(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), lr=1e-3)
    before = snapshot(learner)
    loss = loss_of(
        correction={"sequence_mask": {"name": "product", "low": 1e5, "high": 1e6}}, renormalize_after_mask=True
    )
    stats = update(learner, near(), loss)
    assert (stats.skipped, stats.kept_tokens) == (True, 0)
    assert metrics(stats)["correction/dropped_share_sequence_mask"] == 1
    assert snapshot(learner) == before


def test_with_the_engines_agreeing_every_correction_changes_nothing(learner_factory: LearnerFactory) -> None:
    learner = tuned(learner_factory)
    exact = learner.forward(batch(), ["logprobs"]).logprobs
    assert exact is not None
    sequences = []
    for e, logprobs in zip(batch(), exact, strict=True):
        whole = np.where(e.rollout.policy_mask, np.concatenate([[0], logprobs]), 0).astype(np.float32)
        sequences.append(replace(e, rollout=replace(e.rollout, logprobs=whole)))
    plain, _ = updated_gradient(learner, sequences)
    rules = {"weight": "icepop", "sequence_mask": "geometric", "veto": "outlier"}
    correction = {name: {"name": rule} for name, rule in rules.items()}
    corrected, stats = updated_gradient(tuned(learner_factory), sequences, loss_of(correction=correction))
    assert_gradients_equal(corrected, plain, 2e-6)
    assert metrics(stats)["correction/kept_share"] == 1


def test_a_missing_log_probability_is_an_error(learner_factory: LearnerFactory) -> None:
    sequences = near()
    sequences[2].rollout.logprobs[-1] = np.nan
    for loss in (loss_of(correction={"weight": {"name": "tis"}}), sampler_anchored("reinforce")):
        with pytest.raises(ValueError, match="sampler"):
            tuned(learner_factory).prepare(sequences, loss)


# KL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_kl_loss_pulls_towards_the_reference(learner_factory: LearnerFactory, estimator: str, unbiased: bool) -> None:
    kl = {"place": "loss", "coefficient": 0.2, "estimator": estimator, "unbiased_gradient": unbiased}
    loss = loss_of(kl=kl)
    sequences = [replace(near()[0], advantage=0.0), *near()[1:]]  # one that only the KL loss has a gradient for
    gradient, stats = updated_gradient(tuned(learner_factory, reference=random_beam(seed=1)), sequences, loss)
    assert_gradients_equal(gradient, written(sequences, even(sequences), loss), 2e-5)
    with torch.no_grad():
        away = torch.cat([logprobs_by(PLAIN, e) - logprobs_by(OTHER, e) for e in sequences])
    value = {"k1": away, "k2": away**2 / 2, "k3": (-away).exp() - 1 + away}[estimator]
    assert metrics(stats)["policy/kl_reference"] == pytest.approx(float(value.mean()), rel=1e-4)


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_kl_loss_beside_a_loss_anchored_at_the_sampler_weighs_by_the_ratio_to_it(
    learner_factory: LearnerFactory, on_policy: bool
) -> None:
    """The tokens are the sampler's: whatever update it is, the gradient of the divergence is rho d, rho = pi / mu."""
    loss = loss_of(on_policy, loss={"name": "reinforce"}, kl={"place": "loss", "coefficient": 0.2})
    gradient, _ = updated_gradient(tuned(learner_factory, reference=random_beam(seed=1)), near(), loss)
    assert_gradients_equal(gradient, written(near(), even(near()), loss), 2e-5)


def test_forward_evaluates_the_reference_where_there_is_one(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), reference=random_beam(seed=1), lr=1e-2)
    update(learner, batch())
    found = learner.forward(batch(), ["logprobs"], "reference").logprobs
    assert found is not None
    for e, logprobs in zip(batch(), found, strict=True):
        expected = teacher_forced(OTHER, e.rollout.token_ids, e.rollout.temperature)
        np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)


# Guards


def test_the_first_update_passes_its_guards_and_is_the_same_with_them(learner_factory: LearnerFactory) -> None:
    guarded, unguarded = learner_factory(random_beam(), 40, lr=1e-3), learner_factory(random_beam(), 40, lr=1e-3)
    update(guarded, near(0.01), loss_of(first=True))
    update(unguarded, near(0.01), loss_of(first=False))
    assert snapshot(guarded) == snapshot(unguarded)


def test_weights_that_change_between_the_passes_stop_the_run(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), lr=1e-3)
    prepared = learner.prepare(near(0.01), loss_of(first=True))
    update(learner, near(0.01))
    before = snapshot(learner)
    with pytest.raises(GuardError, match=r"pi / pi_old differs from 1"):
        learner.step(prepared)
    assert snapshot(learner) == before


def test_a_sampler_with_other_weights_stops_the_run(learner_factory: LearnerFactory) -> None:
    learner = learner_factory(random_beam(), lr=1e-3)
    before = snapshot(learner)
    with pytest.raises(GuardError, match="other weights"):
        update(learner, batch(), loss_of(first=True))
    assert snapshot(learner) == before
    assert not update(learner, batch(), loss_of(first=True, guard={"mismatch": None})).skipped
    assert not update(learner, batch(), loss_of(first=False)).skipped
