"""Products with one matrix a group, and their gradients, against a loop over groups."""

import pytest
import torch
from torch import Tensor

from beamline.policy.grouped import grouped_linear

GROUPS, OUT, IN = 4, 16, 8


def found(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the weights, what it has to be, and that of the rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(GROUPS, OUT, IN, generator=generator).to(dtype).requires_grad_()
    rows = torch.randn(sum(counts), IN, generator=generator).to(dtype).requires_grad_()
    direction = torch.randn(sum(counts), OUT, generator=generator).to(dtype)
    grouped_linear(rows, weight, torch.tensor(counts).cumsum(0, dtype=torch.int32)).backward(direction)
    parts = zip(direction.double().split(counts), rows.detach().double().split(counts), strict=True)
    assert weight.grad is not None
    assert rows.grad is not None
    return weight.grad, torch.stack([left.T @ right for left, right in parts]), rows.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_a_group_without_rows_has_the_gradient_0_and_others_their_own(counts: list[int], dtype: torch.dtype) -> None:
    gradient, expected, of_rows = found(counts, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)
    assert all(gradient[group].any() == bool(count) for group, count in enumerate(counts))
    assert of_rows.shape == (sum(counts), IN)


def test_memory_that_the_product_leaves_as_it_was_is_not_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's grouped product does on some GPUs for groups without rows."""
    product = torch.nn.functional.grouped_mm

    def careless(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left, right, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless)
    gradient, expected, _ = found([3, 0, 5, 1], torch.float32)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)
