"""AdamW over the parameters that are trained, with warm-up, clipping, and state under checkpoint names."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from beamline.config.schema import OptimizerConfig
from beamline.policy.weights import split_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (torch's, foreach). Matrices are decayed, vectors are not. ``updates`` counts those that were made.

    It trains the parameters of ``module``: a model, or its adapters.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig) -> None:
        self._config, self._split = config, split_of(module)
        self._named = dict(module.named_parameters())
        matrices = [p for p in self._named.values() if p.dim() > 1]
        vectors = [p for p in self._named.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=True)
        for parameter in self._named.values():
            # Made now rather than at the first step, so that a checkpoint has the same tensors at every step.
            moments = {name: torch.zeros_like(parameter) for name in _MOMENTS}
            self._adamw.state[parameter] = {"step": torch.tensor(0.0), **moments}
        self.updates = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self._config.lr_after(self.updates)

    def step(self) -> float:
        """Clip the gradients, update, and return the norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite; nothing was updated.
        """
        norm = float(nn.utils.clip_grad_norm_(self._named.values(), self._config.max_grad_norm, foreach=True))
        if not norm < float("inf"):
            self.zero()
            raise FloatingPointError(f"the gradient norm is {norm}; the update was not made")
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.zero()
        self.updates += 1
        return norm

    def zero(self) -> None:
        """Free the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments, as views under ``<tensor name>/<moment>``."""
        for name, parameter in self._named.items():
            for moment in _MOMENTS:
                for part, view in self._split(name, self._adamw.state[parameter][moment]):
                    yield f"{part}/{moment}", view

    def restore(self, updates: int) -> None:
        """Set the number of updates made, after the moments were filled."""
        self.updates = updates
        for state in self._adamw.state.values():
            state["step"].fill_(float(updates))
