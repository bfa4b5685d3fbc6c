"""The optimizer of the torch learner: float32 weights, gradients and moments beside parameters in bfloat16."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from beamline.config.schema import OptimizerConfig
from beamline.learner.torch.optimizer import Optimizer

SETTINGS: dict[str, Any] = {"lr": 1e-2, "warmup_updates": 2, "weight_decay": 0.1, "max_grad_norm": 2.0}
Doubles = NDArray[np.float64]


class Model(nn.Module):
    """A matrix and a vector in one type, and a matrix in float32, as a router is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
        self.router = nn.Parameter(torch.randn(3, 4, generator=generator))

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """A backward pass with these gradients."""
        pairs = zip(self.parameters(), gradients, strict=True)
        torch.stack([(parameter * gradient).float().sum() for parameter, gradient in pairs]).sum().backward()


def random_gradients(model: Model, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def written(weights: list[Doubles], updates: Sequence[Sequence[Sequence[Tensor]]]) -> tuple[list[Doubles], list[float]]:
    """AdamW in double precision, by the formula, over the sum of each update's gradients; weights and norms."""
    config, norms = OptimizerConfig(**SETTINGS), []
    first, second = config.betas
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for t, passes in enumerate(updates, start=1):
        sums = [np.sum([g.double().numpy() for g in each], axis=0) for each in zip(*passes, strict=True)]
        norms.append(float(np.sqrt(sum((g**2).sum() for g in sums))))
        lr = config.lr_after(t - 1)
        for i, g in enumerate(sums):
            g = g * min(1.0, config.max_grad_norm / (norms[-1] + 1e-6))
            decayed = weights[i] * (1 - lr * config.weight_decay) if g.ndim > 1 else weights[i]
            m[i], v[i] = first * m[i] + (1 - first) * g, second * v[i] + (1 - second) * g**2
            step = m[i] / (1 - first**t) / (np.sqrt(v[i] / (1 - second**t)) + config.eps)
            weights[i] = decayed - lr * step
    return weights, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_the_formula_in_double_precision(dtype: torch.dtype) -> None:
    """And a parameter in bfloat16 is its float32 weight, rounded."""
    model = Model(dtype)
    before = [p.detach().double().numpy() for p in model.parameters()]
    optimizer = Optimizer(model, OptimizerConfig(**SETTINGS))
    updates = [[random_gradients(model, 10 * update + cut) for cut in range(3)] for update in range(5)]
    norms = []
    for passes in updates:
        for gradients in passes:
            model.backward(gradients)
        norms.append(optimizer.step())
    expected, expected_norms = written(before, updates)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
    found = optimizer.named_weights()
    for (name, parameter), values in zip(model.named_parameters(), expected, strict=True):
        np.testing.assert_allclose(found[name].double().numpy(), values, rtol=1e-5, atol=1e-6, err_msg=name)
        assert found[name].dtype == torch.float32
        assert torch.equal(parameter, found[name].to(parameter.dtype))


def test_small_gradients_of_many_micro_batches_add_up() -> None:
    """In bfloat16 one and a 512th is one."""
    model = Model(torch.bfloat16)
    optimizer = Optimizer(model, OptimizerConfig(**SETTINGS))
    of_size = [torch.zeros_like(p) for p in model.parameters()]
    for size in [1.0, *[1 / 512] * 256]:
        of_size[0][0, 0] = size
        model.backward(of_size)
    assert optimizer.step() == 1.5


def test_small_updates_are_not_lost() -> None:
    """Each is a 30th of what the parameter can be changed by."""
    model = Model(torch.bfloat16)
    with torch.no_grad():
        model.matrix.fill_(1.0)
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-4, weight_decay=0.0))
    for _ in range(100):
        model.backward([torch.ones_like(p) for p in model.parameters()])
        optimizer.step()
    torch.testing.assert_close(optimizer.named_weights()["matrix"], torch.full((6, 4), 0.99), rtol=0, atol=1e-4)
    assert torch.equal(model.matrix, torch.full((6, 4), 0.99).bfloat16())


def test_a_parameter_in_16_bits_keeps_no_gradient_of_its_own() -> None:
    model = Model(torch.bfloat16)
    Optimizer(model, OptimizerConfig(**SETTINGS))
    model.backward(random_gradients(model, 0))
    assert [p.grad is None for p in model.parameters()] == [True, True, False]


def test_what_is_float32_has_no_second_weight() -> None:
    model = Model(torch.float32)
    optimizer = Optimizer(model, OptimizerConfig(**SETTINGS))
    assert {t.data_ptr() for t in optimizer.named_weights().values()} == {p.data_ptr() for p in model.parameters()}
    assert sum(t.nbytes for t in optimizer.memory()) == 2 * sum(p.nbytes for p in model.parameters())


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model, other = Model(torch.bfloat16), Model(torch.bfloat16)
    optimizers = [Optimizer(each, OptimizerConfig(**SETTINGS)) for each in (model, other)]
    model.backward([g * float("inf") for g in random_gradients(model, 0)])
    with pytest.raises(FloatingPointError, match="the gradient norm is"):
        optimizers[0].step()
    for each, optimizer in zip((model, other), optimizers, strict=True):
        each.backward(random_gradients(each, 1))
        optimizer.step()
    one, two = (optimizer.named_weights() for optimizer in optimizers)
    assert all(torch.equal(one[name], two[name]) for name in two)
