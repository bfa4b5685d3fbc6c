"""Learning: the embedded learner on packed sequences against the padded module of transformers.

    python -m benchmarks.learner

Forward and backward of the same 64 sampled sequences with responses of 8 to 256 tokens, the same module class, loss and
thread count. Ours is ``prepare`` and ``step`` less the time of gradient clipping and the optimizer, which the clocks of
:mod:`benchmarks.phases` take apart; the rate is 0, so every round has the same weights. What the update reports beside
its loss (entropy, ratios) stays inside. The peer pads on the right and computes log-probabilities from float32 logits.
Every pair of rounds checks that losses and gradient norms agree.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from beamline.algorithms.loss import LossConfig, clipped_loss
from beamline.chat import BeamChat
from beamline.learner.learner import Learner
from beamline.records import Experience
from beamline.records.random import stream
from beamline.rollout.collect import to_rollout
from beamline.runtime.engines import build
from beamline.starter import STARTER
from benchmarks.harness import Figures, comparison_table, paired, parser, record, write
from benchmarks.phases import Phases
from benchmarks.workload import (
    LONGEST,
    PAD,
    SEED,
    as_ours,
    as_peer,
    lengths,
    peer_module,
    problems,
    requests,
    run_config,
    sample,
)

NAME = "ragged-64"
TARGET = 1.3
PEER_SEQUENCES = 32  # of a micro-batch; 16 are as fast, 8 and 64 slower
LOSS = LossConfig(clip_low=0.2, clip_high=0.28, mask_truncated=False, renormalize_after_mask=False, on_policy=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update came to, for comparing the two sides."""

    loss: float
    grad_norm: float


class Ours:
    """Prepare and step of the learner, the optimizer's time left out."""

    def __init__(self, learner: Learner[Any], batch: Sequence[Experience], phases: Phases) -> None:
        self._learner, self._batch, self._phases = learner, batch, phases
        self.outcome = Outcome(math.nan, math.nan)

    def __call__(self) -> Figures:
        as_ours()
        start = time.perf_counter()
        stats = self._learner.step(self._learner.prepare(self._batch, LOSS))
        seconds = time.perf_counter() - start - self._phases.take("optimizer")["optimizer"]
        assert stats.grad_norm is not None
        self.outcome = Outcome(stats.loss, stats.grad_norm)
        return _figures(self._batch, seconds)


class Peer:
    """The padded module of transformers."""

    def __init__(self, module: Any, batch: Sequence[Experience], phases: Phases, ours: Ours) -> None:
        self._module, self._batch, self._phases, self._ours = module.train(), batch, phases, ours

    def __call__(self) -> Figures:
        as_peer()
        self._module.zero_grad()
        tokens = _tokens(self._batch)
        start = time.perf_counter()
        losses = []
        for cut in _cuts(self._batch, PEER_SEQUENCES):
            loss = _padded_loss(self._module, cut) / tokens
            loss.backward()
            losses.append(loss.detach())
        seconds = time.perf_counter() - start
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self._module.parameters()]))
        _agree(self._ours.outcome, Outcome(float(torch.stack(losses).sum()), norm))
        self._phases.take()
        return _figures(self._batch, seconds)


def main() -> None:
    """Compare and write the results."""
    arguments = parser(__doc__, rounds=7).parse_args()
    config = run_config(LONGEST, lr=0.0)
    engines = build(config)
    engines.sync(version=0)
    batch = _experiences(engines.sampler)
    phases = Phases()
    phases.watch_torch()
    module = peer_module()
    worst = _compare_logprobs(engines.learner, module, batch)
    ours = Ours(engines.learner, batch, phases)
    comparison = paired(ours, Peer(module, batch, phases, ours), arguments.rounds, label=NAME)
    table = comparison_table("forward and backward", {NAME: comparison}, {NAME: TARGET}, "tokens_per_s", "tokens/s")
    workload = record(comparison, TARGET) | {
        "sequences": len(batch),
        "tokens": _tokens(batch),
        "logprob_difference": worst,
    }
    write("learner", {"workloads": {NAME: workload}}, table, arguments.results)


def _experiences(sampler: Any) -> list[Experience]:
    """Sampled sequences with advantages drawn from a normal distribution."""
    tokens = lengths(64)
    asked_problems, chat = problems(len(tokens)), BeamChat(STARTER)
    as_ours()
    asked = requests(asked_problems, [chat.prompt_ids(problem.messages) for problem in asked_problems], tokens)
    rollouts = [to_rollout(request, done) for request, done in zip(asked, sample(sampler, asked), strict=True)]
    advantages = np.random.Generator(stream(SEED, "benchmark advantages")).standard_normal(len(rollouts))
    return [Experience(rollout, float(advantage)) for rollout, advantage in zip(rollouts, advantages, strict=True)]


def _tokens(batch: Sequence[Experience]) -> int:
    return sum(experience.rollout.response_tokens for experience in batch)


def _figures(batch: Sequence[Experience], seconds: float) -> Figures:
    return {"seconds": seconds, "tokens_per_s": _tokens(batch) / seconds}


def _cuts(batch: Sequence[Experience], size: int) -> Iterator[Sequence[Experience]]:
    return (batch[start : start + size] for start in range(0, len(batch), size))


def _padded_logprobs(module: Any, batch: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all response tokens of the sequences, end to end, and their advantages."""
    rows = [torch.from_numpy(e.rollout.token_ids.astype(np.int64)) for e in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    response = pad_sequence([torch.from_numpy(e.rollout.policy_mask) for e in batch], batch_first=True)[:, 1:]
    logits = module(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    advantages = torch.tensor([e.advantage for e in batch])[:, None].expand_as(logprobs)
    return logprobs[response], advantages[response]


def _padded_loss(module: Any, batch: Sequence[Experience]) -> Tensor:
    logprobs, advantages = _padded_logprobs(module, batch)
    return clipped_loss(logprobs, logprobs.detach(), advantages, LOSS).loss


def _compare_logprobs(learner: Learner[Any], module: Any, batch: Sequence[Experience]) -> float:
    """The largest difference of a log-probability; the on-policy loss alone would not show a wrong one."""
    as_ours()
    rows = learner.forward(batch, ["logprobs"]).logprobs
    assert rows is not None
    ours = np.concatenate([row[e.rollout.policy_mask[1:]] for row, e in zip(rows, batch, strict=True)])
    as_peer()
    with torch.no_grad():
        peer = _padded_logprobs(module, batch)[0].numpy()
    worst = float(np.abs(ours - peer).max())
    if worst > 1e-3:
        raise RuntimeError(f"log-probabilities of the two sides differ by up to {worst:.1e}")
    return worst


def _agree(ours: Outcome, peer: Outcome) -> None:
    """Raise unless the two sides computed the same; two orders of float32 sums differ less than this."""
    if not math.isclose(ours.loss, peer.loss, rel_tol=1e-4):
        raise RuntimeError(f"the losses differ: ours {ours.loss:.8g}, peer {peer.loss:.8g}")
    if not math.isclose(ours.grad_norm, peer.grad_norm, rel_tol=1e-3):
        raise RuntimeError(f"the gradient norms differ: ours {ours.grad_norm:.8g}, peer {peer.grad_norm:.8g}")


if __name__ == "__main__":
    main()
