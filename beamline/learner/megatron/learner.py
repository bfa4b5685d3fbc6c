"""The learner over Megatron-Core, as the first of its ranks offers it to the loop."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.diagnostics import joined
from beamline.algorithms.loss import LossConfig
from beamline.checkpoint.shards import ShardReader, ShardWriter
from beamline.learner.learner import Outputs, StepStats, Weights
from beamline.learner.megatron.layout import learner_layout
from beamline.learner.megatron.mesh import Mesh
from beamline.learner.megatron.rank import Evaluated, Rank, Trained
from beamline.learner.megatron.ranks import Ranks
from beamline.learner.megatron.source import RanksSource
from beamline.learner.planning import Plan, evaluated, needs_old, plan
from beamline.learner.update import check_update, compared_of, guard_mismatch
from beamline.model.beam import tensors
from beamline.model.layout import Layout, WeightKind
from beamline.policy.model import check_saved
from beamline.records import Experience
from beamline.transfer.dtypes import DTYPE_NAMES
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MegatronPrepared:
    """A mini-batch with what was decided of it. ``verified`` has what a pass before the update found, for a guard."""

    plan: Plan
    loss: LossConfig
    verified: list[Floats] | None

    @property
    def loss_tokens(self) -> int:
        """Tokens that the update learns from."""
        return sum(int(planned.keep_R.sum()) for planned in self.plan.sequences)

    def verified_logprobs(self, trained: Sequence[Trained]) -> Floats | None:
        """What the pass before the update found, in the order in which its tokens were trained."""
        if self.verified is None:
            return None
        return np.concatenate([self.verified[i] for each in trained for i in each.indices])


class MegatronLearner:
    """Trains every weight of a model that is spread over ranks. Lives on the first of them.

    Args:
        rank: what this rank does.
        ranks: all of them; the others serve.
        mesh: how they share the model.
        channel: where weights go.
    """

    def __init__(self, rank: Rank, ranks: Ranks, mesh: Mesh, channel: LocalChannel) -> None:
        self._rank, self._ranks, self._channel = rank, ranks, channel
        stage = rank.stage
        self._layout = learner_layout(stage.shape, mesh, DTYPE_NAMES[stage.config.params_dtype])
        self._offered = RanksSource(ranks, mesh.size)

    def forward(
        self,
        batch: Sequence[Experience],
        outputs: Collection[Literal["logprobs", "entropy", "values"]],
        weights: Weights = "policy",
    ) -> Outputs:
        """Log-probabilities and entropies of every row of the sequences, in their order."""
        if "values" in outputs:
            raise ValueError("forward: the Megatron learner has no value head; ask for 'logprobs' or 'entropy'")
        if weights == "reference":
            raise ValueError("forward: the Megatron learner has no reference model yet; use learner.engine=torch")
        found = self._evaluate(batch, "all")
        return Outputs(
            logprobs=[each.logprobs for each in found] if "logprobs" in outputs else None,
            entropy=[each.entropy for each in found] if "entropy" in outputs else None,
        )

    def prepare(self, batch: Sequence[Experience], loss: LossConfig) -> MegatronPrepared:
        """Decide what is learned from, with the log-probabilities that this takes."""
        indices = evaluated(batch, loss)
        sequences = [batch[i] for i in indices]
        old = [each.logprobs for each in self._evaluate(sequences, "responses")] if needs_old(loss) else None
        planned = plan(batch, indices, old, None, loss)
        verified = None
        if loss.first and loss.on_policy and loss.algorithm.guard.ratio:
            found = self._evaluate([each.experience for each in planned.sequences], "responses")
            verified = [f.logprobs[p.keep_R] for f, p in zip(found, planned.sequences, strict=True)]
        return MegatronPrepared(planned, loss, verified)

    def step(self, prepared: MegatronPrepared) -> StepStats:
        """One optimizer update over the mini-batch; none when no token is kept."""
        planned, loss, lr = prepared.plan, prepared.loss, self._rank.optimizer.lr
        guard_mismatch(loss, planned.compared)
        if not prepared.loss_tokens:
            return StepStats(0.0, None, lr, planned.counted_tokens, planned.kept_tokens, planned.compared, None)
        sequences = planned.sequences
        try:
            trained: list[Trained] = list(chain.from_iterable(self._ranks.call("update", sequences, loss)))
            order = [sequences[i] for each in trained for i in each.indices]
            learned = joined([each.learned for each in trained])
            total = float(np.sum([each.loss for each in trained]))
            compared = planned.compared
            if loss.on_policy and compared is None:
                compared = compared_of(order, learned)
            check_update(total, learned, prepared.verified_logprobs(trained), compared, loss)
        except (FloatingPointError, RuntimeError):
            if not self._ranks.broken:
                self._ranks.call("forget")
            raise
        norm = self._ranks.call("apply")[0]
        return StepStats(total, norm, lr, planned.counted_tokens, planned.kept_tokens, compared, learned)

    @property
    def kind(self) -> WeightKind:
        """The model's weights."""
        return "full"

    def layout(self, kind: WeightKind) -> Layout:
        """Which rank holds which slice.

        Raises:
            ValueError: adapters, which there are none of yet.
        """
        if kind == "adapter":
            raise ValueError("the Megatron learner trains no adapters yet: its weights are of kind 'full'")
        return self._layout

    def send(self, plan: TransferPlan) -> None:
        """Offer the weights of all ranks to the sampler of this process, which asks each for its own."""
        self._channel.send(plan, self._offered)

    def save(self, writer: ShardWriter) -> None:
        """Write what is trained, moments and the number of updates; each rank writes what it owns.

        Raises:
            FloatingPointError: a weight is not finite; nothing was written.
        """
        if name := next(filter(None, self._ranks.call("not_finite")), None):
            raise FloatingPointError(f"{name} holds values that are not finite; no checkpoint was written")
        for digests in self._ranks.call("save", writer.folder):
            writer.digests |= digests
        writer.write_state("learner", {"updates": self._rank.optimizer.updates})

    def load(self, reader: ShardReader) -> None:
        """Read what :meth:`save` wrote, on any mesh, or the torch learner did."""
        check_saved(reader, [spec.name for spec in tensors(self._rank.stage.shape)])
        self._ranks.call("read", Path(reader.folder), int(reader.read_state("learner")["updates"]))
        self._ranks.call("share")  # apart: a rank that cannot read would leave the others waiting for it

    def sleep(self) -> None:
        """Give back what the ranks hold on their devices: all goes to the memory of the host."""
        self._ranks.call("sleep")

    def wake(self) -> None:
        """Take it again."""
        self._ranks.call("wake")

    def _evaluate(self, sequences: Sequence[Experience], chosen: Literal["responses", "all"]) -> list[Evaluated]:
        found = chain.from_iterable(self._ranks.call("evaluate", sequences, chosen))
        return sorted(found, key=lambda each: each.index)
