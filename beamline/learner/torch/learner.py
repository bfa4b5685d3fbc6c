"""The embedded learner: every weight or adapters, on packed sequences, by the kernels of the sampler or by torch.

On a CPU, or on one GPU.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from beamline.algorithms.diagnostics import Learned, joined
from beamline.algorithms.guards import check_mismatch
from beamline.algorithms.loss import LossConfig
from beamline.checkpoint.shards import ShardReader, ShardWriter
from beamline.config.kl import KlLoss
from beamline.config.policy import PolicyConfig
from beamline.config.schema import LearnerConfig
from beamline.learner.learner import Outputs, StepStats, Weights
from beamline.learner.offload import Offload
from beamline.learner.planning import Plan, evaluated, micro_batches, needs_old, plan
from beamline.learner.torch.evaluation import Chosen, Evaluation, every_row
from beamline.learner.torch.optimizer import Optimizer
from beamline.learner.update import MicroBatch, check_update, compared_of, guard_mismatch, loss_of, micro_batch
from beamline.model.layout import Layout, TensorSlice, WeightKind
from beamline.policy import model
from beamline.policy.dropout import Dropout
from beamline.policy.lora import Adapters
from beamline.policy.weights import module_layout, named_tensors, raw
from beamline.records import Experience
from beamline.transfer.dtypes import DTYPE_NAMES
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan
from beamline.transfer.source import Tensors, first_not_finite

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TorchPrepared:
    """A mini-batch cut into micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    plan: Plan
    loss: LossConfig

    @property
    def loss_tokens(self) -> int:
        """Tokens that the update learns from."""
        return sum(len(micro.rows_T) for micro in self.micro_batches)

    @property
    def verified_logprobs(self) -> Floats | None:
        """What a pass before the update found of its tokens, where a guard asked for one."""
        found = [m.verified_logprobs_T for m in self.micro_batches if m.verified_logprobs_T is not None]
        return torch.cat(found).cpu().numpy() if found else None


class TorchLearner:
    """Trains a module in this process: every parameter, or adapters beside a module that stays as it is.

    Args:
        module: a Beam module from :func:`beamline.policy.model.load`. It goes to the device of ``policy``, as the
            adapters and the reference do. What is not float32 of it is trained beside float32 masters.
        policy: how it is evaluated, and where.
        config: micro-batches and optimizer.
        channel: where weights go.
        adapters: what is trained in place of the module's parameters; None trains those.
        reference: the model that a KL penalty holds the policy near; None without one. With adapters it is the module.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PolicyConfig,
        config: LearnerConfig,
        channel: LocalChannel,
        adapters: Adapters | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        self._module, self._policy, self._config, self._channel = module, policy, config, channel
        self._device = torch.device(policy.device)
        for each in (module, adapters, reference):
            if each is not None:
                each.to(self._device)
        self._adapters, self._evaluation = adapters, Evaluation(module, policy, adapters)
        self._trained: nn.Module = module if adapters is None else adapters
        self._offered = Tensors(named_tensors(module) | ({} if adapters is None else named_tensors(adapters)))
        if adapters is not None:
            module.requires_grad_(False)
            reference = module
        self._reference = None if reference is None else Evaluation(reference, policy)
        self._optimizer = Optimizer(self._trained, config.optimizer)
        self._saved = named_tensors(self._trained) | self._optimizer.named_weights()
        modules = {each for each in (module, adapters, reference) if each is not None}
        held = [tensor for each in modules for tensor in each.state_dict().values()]
        self._offload = Offload([*held, *self._optimizer.memory()], [])
        self._module.train()
        if policy.recompute == "full":
            cast(Any, module).gradient_checkpointing_enable({"use_reentrant": False})

    def forward(
        self,
        batch: Sequence[Experience],
        outputs: Collection[Literal["logprobs", "entropy", "values"]],
        weights: Weights = "policy",
    ) -> Outputs:
        """Log-probabilities and entropies of every row of the sequences, in their order."""
        if "values" in outputs:
            raise ValueError("forward: the torch learner has no value head; ask for 'logprobs' or 'entropy'")
        logprobs, entropies = self._passed(batch, weights, every_row)
        return Outputs(
            logprobs=logprobs if "logprobs" in outputs else None,
            entropy=entropies if "entropy" in outputs else None,
        )

    def prepare(self, batch: Sequence[Experience], loss: LossConfig) -> TorchPrepared:
        """Decide what is learned from, with the log-probabilities that this takes, and cut it into micro-batches."""
        indices = evaluated(batch, loss)
        sequences = [batch[i] for i in indices]
        old = self._response_logprobs(sequences, "policy") if needs_old(loss) else None
        limit = loss.algorithm.guard.mismatch
        if self._drops and loss.first and old is None and limit is not None and sequences:
            # An update with dropout does not evaluate the policy that sampled. What is found here is for the guard
            # alone: the figures of a run do not depend on where its process began.
            found = np.concatenate(self._response_logprobs(sequences, "policy"))
            check_mismatch(found, np.concatenate([s.rollout.response_logprobs for s in sequences]), limit)
        penalized = isinstance(loss.algorithm.kl, KlLoss)
        reference = self._response_logprobs(sequences, "reference") if penalized else None
        planned = plan(batch, indices, old, reference, loss)
        cuts = micro_batches([p.experience.rows for p in planned.sequences], self._config.micro_batch_tokens)
        micros = [micro_batch([planned.sequences[i] for i in cut], loss).to(self._device) for cut in cuts]
        if loss.first and loss.on_policy and loss.algorithm.guard.ratio:
            with torch.no_grad():
                passes = [self._evaluate_update(micro, loss)[0] for micro in micros]
            micros = [replace(m, verified_logprobs_T=logprobs) for m, logprobs in zip(micros, passes, strict=True)]
        return TorchPrepared(tuple(micros), planned, loss)

    def step(self, prepared: TorchPrepared) -> StepStats:
        """One optimizer update over the mini-batch; none when no token is kept."""
        planned, lr = prepared.plan, self._optimizer.lr
        guard_mismatch(prepared.loss, planned.compared)
        if not prepared.loss_tokens:
            return StepStats(0.0, None, lr, planned.counted_tokens, planned.kept_tokens, planned.compared, None)
        passes = [self._backward(micro, prepared.loss) for micro in prepared.micro_batches]
        learned = joined([learned() for _, learned in passes])
        compared = planned.compared
        try:
            loss = float(torch.stack([loss for loss, _ in passes]).sum())
            if prepared.loss.on_policy and compared is None and not self._drops:
                compared = compared_of([each for micro in prepared.micro_batches for each in micro.planned], learned)
            check_update(loss, learned, prepared.verified_logprobs, compared, prepared.loss)
            if self._adapters is not None:
                self._adapters.check_gradients()
        except (FloatingPointError, RuntimeError):
            self._optimizer.zero()
            raise
        norm = self._optimizer.step()
        return StepStats(loss, norm, lr, planned.counted_tokens, planned.kept_tokens, compared, learned)

    def _backward(self, micro: MicroBatch, loss: LossConfig) -> tuple[Tensor, Callable[[], Learned]]:
        """Add the micro-batch's gradient; returns its part of the loss, and what :func:`loss_of` says of its tokens."""
        total, learned = loss_of(micro, *self._evaluate_update(micro, loss), loss)
        total.backward()
        return total.detach().double(), learned

    def _evaluation_of(self, weights: Weights) -> Evaluation:
        if weights == "policy":
            return self._evaluation
        if self._reference is None:
            raise ValueError("this learner was built without a reference model; set algorithm.kl.place")
        return self._reference

    def _response_logprobs(self, sequences: Sequence[Experience], weights: Weights) -> list[Floats]:
        """Log-probabilities of the response tokens of each sequence."""
        return self._passed(sequences, weights, lambda packed: packed.loss_mask_N)[0]

    def _passed(
        self, sequences: Sequence[Experience], weights: Weights, chosen: Chosen
    ) -> tuple[list[Floats], list[Floats]]:
        """Log-probabilities and entropies of the chosen rows of each sequence, without a gradient."""
        return self._evaluation_of(weights).of_sequences(sequences, self._config.micro_batch_tokens, chosen)

    @property
    def _drops(self) -> bool:
        """Whether updates have dropout, so that the policy that they evaluate is not the one that samples."""
        return self._adapters is not None and self._policy.lora.dropout > 0

    def _evaluate_update(self, micro: MicroBatch, loss: LossConfig) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the trained tokens as the next update sees them: with its dropout."""
        if not self._drops:
            return self._evaluation(micro.batch, micro.rows_T)
        experiences = [planned.experience for planned in micro.planned]
        dropout = Dropout(
            share=self._policy.lora.dropout,
            seed=loss.seed,
            updates=self._optimizer.updates,
            keys=tuple(experience.rollout.key for experience in experiences),
            rows=tuple(experience.rows for experience in experiences),
        )
        return self._evaluation(micro.batch, micro.rows_T, dropout)

    @property
    def kind(self) -> WeightKind:
        """What is trained, saved and sent: the model's weights, or an adapter."""
        return "full" if self._adapters is None else "adapter"

    def layout(self, kind: WeightKind) -> Layout:
        """One rank that holds everything."""
        if kind == "full":
            return module_layout(self._module)
        if self._adapters is None:
            raise ValueError("this policy has no adapters: its weights are the model's, of kind 'full'")
        return module_layout(self._adapters)

    def send(self, plan: TransferPlan) -> None:
        """Offer weights to the sampler of this process: the model's, or the adapter's."""
        self._channel.send(plan, self._offered)

    def save(self, writer: ShardWriter) -> None:
        """Write what is trained (the weights, or the adapter alone) in float32, moments and the number of updates.

        Raises:
            FloatingPointError: a weight is not finite; nothing was written.
        """
        name = first_not_finite(self._saved)
        if name is not None:
            raise FloatingPointError(f"{name} holds values that are not finite; no checkpoint was written")
        _write(writer, "policy", self._saved.items())
        _write(writer, "optimizer", self._optimizer.named_state())
        writer.write_state("learner", {"updates": self._optimizer.updates})

    def load(self, reader: ShardReader) -> None:
        """Read what :meth:`save` wrote."""
        model.restore(self._saved, reader)
        for name, tensor in self._optimizer.named_state():
            tensor.copy_(torch.from_numpy(reader.read("optimizer", _slice(name, tensor))).view(tensor.dtype))
        self._optimizer.restore(int(reader.read_state("learner")["updates"]))

    def sleep(self) -> None:
        """Free the gradients, and on a GPU all that is large: it goes to the memory of the host."""
        self._optimizer.zero()
        if self._device.type == "cuda":
            self._offload.sleep()

    def wake(self) -> None:
        """Take the memory again; gradients appear with the next backward pass."""
        self._offload.wake()


def _slice(name: str, tensor: Tensor) -> TensorSlice:
    return TensorSlice.whole(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def _write(writer: ShardWriter, group: Literal["policy", "optimizer"], tensors: Iterable[tuple[str, Tensor]]) -> None:
    held = list(tensors)
    buffers = (raw(tensor.cpu()).numpy() for _, tensor in held)
    writer.write(group, [_slice(name, tensor) for name, tensor in held], buffers)
