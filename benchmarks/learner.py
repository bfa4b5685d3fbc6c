"""Learning: the embedded learner on packed sequences against the padded module of transformers.

    python -m benchmarks.learner

Forward and backward of the same 64 sampled sequences with responses of 8 to 256 tokens, the same module class, loss and
thread count. Ours is ``prepare`` and ``step`` less the time of gradient clipping and the optimizer, which the clocks of
:mod:`benchmarks.phases` take apart; the rate is 0, so every round has the same weights. What the update reports beside
its loss (entropy, ratios) stays inside. The peer pads on the right and computes log-probabilities from float32 logits.
Every pair of rounds checks that losses and gradient norms agree. ``parity`` is our learner with ``policy.parity``, its
default, against itself without.
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from beamline.algorithms.loss import LossConfig
from beamline.algorithms.losses import Tokens, token_losses
from beamline.chat import BeamChat
from beamline.config.algorithm import AlgorithmConfig
from beamline.learner.learner import Learner
from beamline.records import Experience
from beamline.records.random import stream
from beamline.rollout.collect import to_rollout
from beamline.runtime.engines import build, load_models
from beamline.starter import STARTER
from benchmarks.harness import OURS, Apart, Figures, both, comparison_table, paired, parser, record, write
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
PARITY, PARITY_TARGET = "parity", 1 / 1.15  # against our learner without it: it may cost 15 %
PEER_SEQUENCES = 32  # of a micro-batch; 16 are as fast, 8 and 64 slower
LOSS = LossConfig(AlgorithmConfig(), LONGEST, SEED, on_policy=True)


class Ours:
    """Prepare and step of the learner, the optimizer's time left out."""

    def __init__(self, parity: bool = True) -> None:
        as_ours()
        self._phases = Phases()
        self._phases.watch_torch()
        self._learner, self._batch = learner_and_batch(parity)

    def __call__(self) -> Figures:
        start = time.perf_counter()
        stats = self._learner.step(self._learner.prepare(self._batch, LOSS))
        seconds = time.perf_counter() - start - self._phases.take("optimizer")["optimizer"]
        assert stats.grad_norm is not None
        return _figures(self._batch, seconds, stats.loss, stats.grad_norm)


class Peer:
    """The padded module of transformers."""

    def __init__(self) -> None:
        self._batch = learner_and_batch()[1]
        as_peer()
        self._module = peer_module().train()

    def __call__(self) -> Figures:
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
        return _figures(self._batch, seconds, float(torch.stack(losses).sum()), norm)


def main() -> None:
    """Compare and write the results."""
    arguments = parser(__doc__, rounds=7).parse_args()
    learner, batch = learner_and_batch()
    worst = _compare_logprobs(learner, peer_module().train(), batch)
    comparison = both(Ours, Peer, arguments.rounds, NAME, _agree)
    with Apart(Ours, OURS) as with_parity, Apart(partial(Ours, parity=False), OURS) as without:
        price = paired(with_parity, without, arguments.rounds, label=PARITY, check=_agree)
    comparisons, targets = {NAME: comparison, PARITY: price}, {NAME: TARGET, PARITY: PARITY_TARGET}
    table = comparison_table("forward and backward", comparisons, targets, "tokens_per_s", "tokens/s")
    size = {"sequences": len(batch), "tokens": _tokens(batch)}
    workloads = {name: record(found, targets[name]) | size for name, found in comparisons.items()}
    write("learner", {"workloads": workloads, "logprob_difference": worst}, table, arguments.results)


def learner_and_batch(parity: bool = True) -> tuple[Learner[Any], list[Experience]]:
    """A learner, and the sequences that both sides learn from: the same in every process."""
    as_ours()
    config = run_config(LONGEST, lr=0.0)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"parity": parity})})
    engines = build(config, load_models(config))
    engines.sync(version=0)
    return engines.learner, _experiences(engines.sampler)


def _experiences(sampler: Any) -> list[Experience]:
    """Sampled sequences with advantages drawn from a normal distribution."""
    tokens = lengths(64)
    asked_problems, chat = problems(len(tokens)), BeamChat(STARTER)
    asked = requests(asked_problems, [chat.prompt_ids(problem.messages) for problem in asked_problems], tokens)
    rollouts = [to_rollout(request, done) for request, done in zip(asked, sample(sampler, asked), strict=True)]
    advantages = np.random.Generator(stream(SEED, "benchmark advantages")).standard_normal(len(rollouts))
    return [Experience(rollout, float(advantage)) for rollout, advantage in zip(rollouts, advantages, strict=True)]


def _tokens(batch: Sequence[Experience]) -> int:
    return sum(experience.rollout.response_tokens for experience in batch)


def _figures(batch: Sequence[Experience], seconds: float, loss: float, grad_norm: float) -> Figures:
    return {"seconds": seconds, "tokens_per_s": _tokens(batch) / seconds, "loss": loss, "grad_norm": grad_norm}


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
    tokens = Tokens(logprobs, logprobs.detach(), advantages, torch.zeros_like(logprobs, dtype=torch.int64))
    return token_losses(tokens, LOSS.algorithm.loss).loss_T.sum()


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


def _agree(ours: Figures, peer: Figures) -> None:
    """Raise unless the two sides computed the same; two orders of float32 sums differ less than this."""
    for name, tolerance in {"loss": 1e-4, "grad_norm": 1e-3}.items():
        if not math.isclose(ours[name], peer[name], rel_tol=tolerance):
            raise RuntimeError(f"{name} differs: ours {ours[name]:.8g}, peer {peer[name]:.8g}")


if __name__ == "__main__":
    main()
