"""The embedded learner: full-parameter training on packed sequences, by the kernels of the sampler or by torch."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from beamline.algorithms.loss import LossConfig, clipped_loss
from beamline.checkpoint.shards import ShardReader, ShardWriter
from beamline.config.schema import LearnerConfig, PolicyConfig
from beamline.learner.learner import Outputs, StepStats
from beamline.learner.planning import contributing, denominator, micro_batches
from beamline.learner.torch.optimizer import Optimizer
from beamline.model.layout import Layout, TensorSlice, WeightKind
from beamline.policy import attention, head, model, parity
from beamline.policy.weights import DTYPE_NAMES, first_not_finite, module_layout, named_tensors, raw
from beamline.records import Batch, Experience, pack
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """A packed batch as tensors. ``old_logprobs`` are those of the trained rows, None when ``pi_old`` is ``pi``."""

    batch: Batch
    packing: attention.Packing
    trained: Tensor  # rows that carry loss
    old_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TorchPrepared:
    """A mini-batch cut into micro-batches."""

    micro_batches: tuple[_MicroBatch, ...]
    loss: LossConfig
    denominator: int

    @property
    def loss_tokens(self) -> int:
        """Tokens that the update learns from."""
        return sum(len(micro.trained) for micro in self.micro_batches)


class TorchLearner:
    """Trains every parameter of a module in this process.

    Args:
        module: a Beam module from :func:`beamline.policy.model.load`.
        policy: how it is evaluated.
        config: micro-batches and optimizer.
        channel: where weights go.
    """

    def __init__(self, module: nn.Module, policy: PolicyConfig, config: LearnerConfig, channel: LocalChannel) -> None:
        self._module, self._policy, self._config, self._channel = module, policy, config, channel
        if policy.parity:
            parity.check(module)
        self._hidden_states = parity.hidden_states if policy.parity else model.hidden_states
        self._score = parity.head_logprobs if policy.parity else head.head_logprobs
        self._optimizer = Optimizer(module, config.optimizer)
        self._module.train()
        if policy.activation_checkpointing:
            cast(Any, module).gradient_checkpointing_enable({"use_reentrant": False})

    def forward(
        self,
        batch: Sequence[Experience],
        outputs: Collection[Literal["logprobs", "entropy", "values"]],
        adapters: bool = True,
    ) -> Outputs:
        """Log-probabilities and entropies of every row of the sequences, in their order."""
        if "values" in outputs:
            raise ValueError("forward: the torch learner has no value head; ask for 'logprobs' or 'entropy'")
        if not adapters:
            raise ValueError("forward: adapters=False needs a policy with adapters; this one trains full weights")
        logprobs: list[Any] = [None] * len(batch)
        entropies: list[Any] = [None] * len(batch)
        for indices in micro_batches(batch, self._config.micro_batch_tokens):
            micro = _tensors(pack([batch[i] for i in indices]))
            with torch.no_grad():
                logprob_N, entropy_N = self._evaluate(micro, torch.arange(micro.batch.rows))
            borders = micro.batch.cu_seqlens_B1
            for i, a, b in zip(indices, borders[:-1], borders[1:], strict=True):
                logprobs[i], entropies[i] = logprob_N[a:b].numpy(), entropy_N[a:b].numpy()
        return Outputs(
            logprobs=logprobs if "logprobs" in outputs else None,
            entropy=entropies if "entropy" in outputs else None,
        )

    def prepare(self, batch: Sequence[Experience], loss: LossConfig) -> TorchPrepared:
        """Cut what has a gradient into micro-batches; if needed, compute old log-probabilities under the same cut."""
        sequences = contributing(batch, loss)
        cuts = micro_batches(sequences, self._config.micro_batch_tokens)
        micros = [_tensors(pack([sequences[i] for i in cut])) for cut in cuts]
        if not loss.on_policy:
            with torch.no_grad():
                micros = [replace(m, old_logprobs=self._evaluate(m, m.trained)[0]) for m in micros]
        return TorchPrepared(tuple(micros), loss, denominator(batch, loss))

    def step(self, prepared: TorchPrepared) -> StepStats:
        """One optimizer update over the mini-batch; none when no token is kept."""
        if not prepared.loss_tokens:
            return StepStats(skipped=True, tokens=0, loss=0.0, grad_norm=None, lr=self._optimizer.lr, metrics={})
        sums = [self._backward(micro, prepared) for micro in prepared.micro_batches]
        totals = {name: torch.stack([s[name] for s in sums]) for name in sums[0]}
        loss = float(totals.pop("loss").sum()) / prepared.denominator
        if not np.isfinite(loss):
            self._optimizer.zero()
            raise FloatingPointError(f"the loss is {loss}; the update was not made")
        lr = self._optimizer.lr
        norm = self._optimizer.step()
        tokens = prepared.loss_tokens
        metrics = {n: float(t.max()) if n.endswith("_max") else float(t.sum()) / tokens for n, t in totals.items()}
        return StepStats(skipped=False, tokens=tokens, loss=loss, grad_norm=norm, lr=lr, metrics=metrics)

    def _backward(self, micro: _MicroBatch, prepared: TorchPrepared) -> dict[str, Tensor]:
        """Add the micro-batch's gradient; returns sums over its trained tokens (and maxima)."""
        logprobs, entropy = self._evaluate(micro, micro.trained)
        old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        advantages = torch.from_numpy(micro.batch.advantages_N)[micro.trained]
        terms = clipped_loss(logprobs, old, advantages, prepared.loss)
        (terms.loss / prepared.denominator).backward()
        with torch.no_grad():
            delta = (old - torch.from_numpy(micro.batch.sampler_logprobs_N)[micro.trained]).double()
            return {
                "loss": terms.loss.detach().double(),
                "policy/entropy": entropy.double().sum(),
                "policy/clip_share_low": terms.clipped_low.double(),
                "policy/clip_share_high": terms.clipped_high.double(),
                "policy/kl_old": terms.kl.double(),
                "mismatch/logprob_abs_diff_mean": delta.abs().sum(),
                "mismatch/logprob_abs_diff_max": delta.abs().max(),
                "mismatch/ratio_mean": delta.exp().sum(),
            }

    def _evaluate(self, micro: _MicroBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the given rows."""
        batch = micro.batch
        hidden_ND = self._hidden_states(
            self._module, torch.from_numpy(batch.input_ids_N), torch.from_numpy(batch.position_ids_N), micro.packing
        )
        temperature_N = torch.from_numpy(np.repeat(batch.temperature_B, np.diff(batch.cu_seqlens_B1)))
        module = cast(Any, self._module)
        return self._score(
            hidden_ND[rows],
            module.lm_head.weight,
            torch.from_numpy(batch.target_ids_N)[rows],
            temperature_N[rows],
            module.config.final_logit_softcapping,
            self._policy.head_chunk_rows,
        )

    def layout(self, kind: WeightKind) -> Layout:
        """One rank that holds everything."""
        if kind != "full":
            raise ValueError(f"this policy has full weights only, not {kind!r}")
        return module_layout(self._module)

    def send(self, plan: TransferPlan) -> None:
        """Offer the weights to the sampler of this process."""
        self._channel.send(plan, named_tensors(self._module))

    def save(self, writer: ShardWriter) -> None:
        """Write weights, moments and the number of updates.

        Raises:
            FloatingPointError: a weight is not finite; nothing was written.
        """
        tensors = named_tensors(self._module)
        name = first_not_finite(tensors)
        if name is not None:
            raise FloatingPointError(f"{name} holds values that are not finite; no checkpoint was written")
        _write(writer, "policy", tensors.items())
        _write(writer, "optimizer", self._optimizer.named_state())
        writer.write_state("learner", {"updates": self._optimizer.updates})

    def load(self, reader: ShardReader) -> None:
        """Read weights, moments and the number of updates."""
        model.restore(self._module, reader)
        for name, tensor in self._optimizer.named_state():
            tensor.copy_(torch.from_numpy(reader.read("optimizer", _slice(name, tensor))).view(tensor.dtype))
        self._optimizer.restore(int(reader.read_state("learner")["updates"]))

    def sleep(self) -> None:
        """Free the gradients; on a CPU there is no device memory to give back."""
        self._optimizer.zero()

    def wake(self) -> None:
        """Nothing to take again on a CPU: gradients appear with the next backward pass."""


def _tensors(batch: Batch) -> _MicroBatch:
    trained = torch.from_numpy(batch.loss_mask_N.nonzero()[0])
    return _MicroBatch(batch, attention.Packing.of(batch.cu_seqlens_B1.tolist()), trained)


def _slice(name: str, tensor: Tensor) -> TensorSlice:
    return TensorSlice.whole(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def _write(writer: ShardWriter, group: Literal["policy", "optimizer"], tensors: Iterable[tuple[str, Tensor]]) -> None:
    held = list(tensors)
    buffers = (raw(tensor).numpy() for _, tensor in held)
    writer.write(group, [_slice(name, tensor) for name, tensor in held], buffers)
