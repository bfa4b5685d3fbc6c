"""Rollout routing replay with adapters: beside a frozen model, and with that model as the reference."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamline.model.lora import LoraShape
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors
from tests.adapters import random_adapters
from tests.contract.engines import LearnerFactory
from tests.contract.forcing import assert_follows, forced, routed_batch
from tests.contract.learning import (
    GRADIENT,
    assert_gradients_equal,
    loss_of,
    metrics,
    update,
    updated_gradient,
    written_gradient,
)
from tests.tiny_beam import beam_shape, random_beam, reference

ADAPTED = [LoraShape(8, 16.0, experts=experts) for experts in ("per_expert", "shared_per_layer")]


def chained(adapters: Adapters, of_weights: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """The gradient of A and B from that of the weights ``W + scale B A`` that they make."""
    found: dict[str, torch.Tensor] = {}
    for i, (site, a, b) in enumerate(zip(adapters.sites, adapters.a, adapters.b, strict=True)):
        a, b, scale = a.detach().double(), b.detach().double(), adapters.lora.scale
        da, db = torch.zeros_like(a), torch.zeros_like(b)
        for expert in range(site.experts or 1):
            place = site.place if site.experts is None else f"{site.place}.{expert}"
            at = expert % site.sets
            for projection, rows in site.spans():
                dw = torch.from_numpy(of_weights[f"{place}.{projection}.weight"])
                da[at] += scale * b[at, rows].T @ dw
                db[at, rows] += scale * dw @ a[at].T
        found |= dict(adapters.split(f"a.{i}", da)) | dict(adapters.split(f"b.{i}", db))
    return {name: gradient.numpy() for name, gradient in found.items()}


@pytest.mark.parametrize("lora", ADAPTED, ids=lambda lora: lora.experts)
def test_adapters_follow_the_routes(learner_factory: LearnerFactory, lora: LoraShape) -> None:
    """Held against a module with ``W + scale B A`` in place of W, and its experts forced."""
    adapters, merged, sequences = random_adapters(beam_shape(), lora, b=0.05), random_beam(), routed_batch()
    with torch.no_grad():
        adapters.merge_into(named_tensors(merged))
    learner = learner_factory(random_beam(), r3=True, lora=lora, b=0.05, **GRADIENT)
    assert_follows(learner, merged, sequences)
    plain = reference(merged)
    with forced(plain, sequences):
        of_weights, _ = written_gradient(plain, sequences, sum(e.rollout.response_tokens for e in sequences))
    gradient, _ = updated_gradient(learner, sequences, loss_of(on_policy=False))
    expected = chained(adapters, of_weights)
    assert gradient.keys() == expected.keys()
    assert_gradients_equal(gradient, expected, 1e-5)


def test_the_base_is_a_reference_that_replays_too(learner_factory: LearnerFactory) -> None:
    loss = loss_of(kl={"place": "loss", "coefficient": 0.1})
    learner = learner_factory(random_beam(), r3=True, lora=LoraShape(8, 16.0))
    assert metrics(update(learner, routed_batch(), loss))["policy/kl_reference"] == 0.0
