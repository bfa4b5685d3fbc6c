"""Which inputs an update's dropout leaves out."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from beamline.policy.dropout import Dropout
from beamline.records import Key
from beamline.records.random import uniforms

KEYS = tuple(Key("train", 1, f"problem-{i}", i) for i in range(3))
DROPOUT = Dropout(0.3, seed=5, updates=2, keys=KEYS, rows=(4, 1, 30))
SITE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("choices", [1, 4])
def test_inputs_are_left_out_or_grow_by_what_is_missing(choices: int) -> None:
    factors = DROPOUT.factors(SITE, 7, choices)
    assert factors.shape == (35 * choices, 7)
    assert factors.dtype == torch.float32
    assert set(factors.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_share_is_the_one_asked_for(share: float) -> None:
    """Of 300,000 independent draws, to four standard deviations, as a whole and in each column."""
    left_out = replace(DROPOUT, share=share, keys=KEYS[:1], rows=(3000,)).factors(SITE, 100) == 0
    deviation = (share * (1 - share)) ** 0.5
    assert abs(left_out.double().mean().item() - share) < 4 * deviation / 300_000**0.5
    assert (left_out.double().mean(0) - share).abs().max() < 5 * deviation / 3000**0.5


def test_a_mask_is_the_stream_of_its_key() -> None:
    """The two halves of each number are compared with the share, the lower one first; the upper one leads a uniform."""
    key = KEYS[0]
    purpose = ("dropout", 2, SITE, *astuple(key))
    leading = uniforms(5, purpose, 0, 14) < 0.3
    found = replace(DROPOUT, keys=(key,), rows=(4,)).factors(SITE, 7).numpy().reshape(-1) == 0
    np.testing.assert_array_equal(found[1::2], leading)


def test_sequences_have_the_same_masks_alone_and_among_others_in_any_order() -> None:
    together = DROPOUT.factors(SITE, 5, 2).split([8, 2, 60])
    backwards = replace(DROPOUT, keys=KEYS[::-1], rows=DROPOUT.rows[::-1]).factors(SITE, 5, 2).split([60, 2, 8])
    for i, (key, rows) in enumerate(zip(KEYS, DROPOUT.rows, strict=True)):
        alone = replace(DROPOUT, keys=(key,), rows=(rows,)).factors(SITE, 5, 2)
        assert torch.equal(together[i], alone)
        assert torch.equal(backwards[2 - i], alone)


@pytest.mark.parametrize(
    "other",
    [
        replace(DROPOUT, seed=6),
        replace(DROPOUT, updates=3),
        replace(DROPOUT, keys=(replace(KEYS[0], attempt=1), *KEYS[1:])),
        replace(DROPOUT, keys=(replace(KEYS[0], step=2), *KEYS[1:])),
    ],
    ids=["seed", "update", "attempt", "step"],
)
def test_every_part_of_the_key_counts(other: Dropout) -> None:
    assert not torch.equal(other.factors(SITE, 32)[:4], DROPOUT.factors(SITE, 32)[:4])


def test_sites_have_masks_of_their_own() -> None:
    assert not torch.equal(DROPOUT.factors("model.layers.1.self_attn.q_proj", 32), DROPOUT.factors(SITE, 32))
