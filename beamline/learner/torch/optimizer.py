"""AdamW over the parameters that are trained, with warm-up, clipping, and state under checkpoint names."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from beamline.config.schema import OptimizerConfig
from beamline.policy.weights import split_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (torch's). Matrices are decayed, vectors are not. ``updates`` counts those that were made.

    It trains the parameters of ``module``: a model, or its adapters. One that is not float32 has a master: a float32
    weight in which its gradients are added up and which is updated and saved, because in 16 bits small gradients and
    small updates would be lost. The parameter itself is the master rounded.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig) -> None:
        self._config, self._split = config, split_of(module)
        self._named = dict(module.named_parameters())
        self._masters = {name: _master(p) for name, p in self._named.items() if p.dtype != torch.float32}
        self._trained: dict[str, nn.Parameter] = self._named | self._masters
        trained = self._trained.values()
        matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # On a GPU fused: one pass over memory, and nothing in between is kept.
        by = "fused" if all(p.is_cuda for p in trained) else "foreach"
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **{by: True})
        for parameter in trained:
            # Made now rather than at the first step, so that a checkpoint has the same tensors at every step.
            moments = {name: torch.zeros_like(parameter) for name in _MOMENTS}
            self._adamw.state[parameter] = {"step": torch.tensor(0.0, device=parameter.device), **moments}
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
        norm = float(nn.utils.clip_grad_norm_(self._trained.values(), self._config.max_grad_norm, foreach=True))
        if not norm < float("inf"):
            self.zero()
            raise FloatingPointError(f"the gradient norm is {norm}; the update was not made")
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.zero()
        self._round()
        self.updates += 1
        return norm

    def zero(self) -> None:
        """Free the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def named_weights(self) -> dict[str, Tensor]:
        """The float32 weights, as views under checkpoint names."""
        named = self._trained.items()
        return {part: view for name, weight in named for part, view in self._split(name, weight.detach())}

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments, as views under ``<tensor name>/<moment>``."""
        for name, parameter in self._trained.items():
            for moment in _MOMENTS:
                for part, view in self._split(name, self._adamw.state[parameter][moment]):
                    yield f"{part}/{moment}", view

    def restore(self, updates: int) -> None:
        """Set the number of updates made, after the float32 weights and the moments were filled."""
        self._round()
        self.updates = updates
        for state in self._adamw.state.values():
            state["step"].fill_(float(updates))

    def memory(self) -> Iterator[Tensor]:
        """What is large beside the module: masters and moments. Gradients are there from a backward pass to a step."""
        yield from (master.detach() for master in self._masters.values())
        yield from (state[moment] for state in self._adamw.state.values() for moment in _MOMENTS)

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self._masters.items():
            self._named[name].copy_(master)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 copy of a parameter, to which each backward pass adds the parameter's gradient."""
    master = nn.Parameter(parameter.detach().float())

    def add(computed: Tensor) -> None:
        assert computed.grad is not None
        if master.grad is None:
            master.grad = computed.grad.float()
        else:
            master.grad.add_(computed.grad)
        computed.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return master
