"""Which experts rows go to, where scores are equal, endless, or no numbers at all."""

from typing import Any

import pytest
import torch
from transformers.models.beam.modeling_beam import BeamTopKRouter

from beamline.policy.router import chosen_experts, chosen_weights, sorted_by_expert
from tests.tiny_beam import beam_config

EXPERTS, GROUPS, KEPT, CHOICES = 16, 4, 2, 4


def chosen(logits_NE: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    return chosen_experts(logits_NE, torch.zeros(EXPERTS) if bias_E is None else bias_E, GROUPS, KEPT, CHOICES)


@pytest.mark.parametrize("change", [{}, {"n_group": 1, "topk_group": 1}, {"n_group": 8, "num_experts_per_tok": 1}])
def test_experts_are_those_of_the_hugging_face_router(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    gate = BeamTopKRouter(beam_config(**change))
    gate.weight.data.normal_()
    gate.e_score_correction_bias.normal_(std=0.1)
    logits, weights, experts = gate(torch.randn(50, 32))
    by = gate.num_group, gate.topk_group, gate.top_k
    ours = chosen_experts(logits, gate.e_score_correction_bias, *by)
    assert torch.equal(ours, experts)
    torch.testing.assert_close(chosen_weights(logits, ours, gate.norm_topk_prob), weights)


@pytest.mark.parametrize("value", [0.0, 200.0, -200.0, torch.inf, -torch.inf])
def test_of_equal_scores_those_of_lower_numbers_are_chosen(value: float) -> None:
    assert chosen(torch.full((2, EXPERTS), value)).tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("places", [[5], [0, 15], list(range(EXPERTS))])
def test_scores_that_are_no_numbers_choose_experts_that_there_are_and_show_in_the_weights(places: list[int]) -> None:
    """Of a row that is no number one expert would be as good as another, but rows are sent to them and come back."""
    torch.manual_seed(0)
    logits = torch.randn(3, EXPERTS)
    logits[1, places] = torch.nan
    found = chosen(logits)
    assert all(len(set(row)) == CHOICES and set(row) <= set(range(EXPERTS)) for row in found.tolist())
    assert int(sorted_by_expert(found, EXPERTS)[2][-1]) == found.numel()
    weights = chosen_weights(logits, found, False)
    assert weights.isnan().any(dim=1).tolist() == [False, True, False]
    assert torch.equal(found[::2], chosen(logits[::2]))


def test_a_bias_that_is_the_same_for_all_experts_changes_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, EXPERTS)
    assert torch.equal(chosen(logits, torch.full((EXPERTS,), 0.5)), chosen(logits))
