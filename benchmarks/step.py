"""A whole GRPO step: Beamline against the GRPOTrainer of TRL.

    python -m benchmarks.step

The same model, 8 prompts x 8 samples, responses of 8 to 256 tokens whose lengths are forced, temperature 1, no
reference model, token-level loss with clip-higher, one update a step by AdamW at the same rate, the same thread count.
The reward is the share of even tokens, which is cheap and differs within a group. Ours also records routes and
log-probabilities, and hands the new weights to its sampler. The trainer saves and logs nothing, keeps its activations,
and takes micro-batches of the size at which it is fastest; its ``train`` runs in a thread that waits after each step.
The phases of both sides come from the same clocks. Loading, and what ``train`` does before its first step, are outside.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Semaphore
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, PrinterCallback, StoppingCriteriaList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from beamline.algorithms.advantages import GroupRewards, advantages
from beamline.algorithms.loss import LossConfig
from beamline.chat import BeamChat
from beamline.config.algorithm import AlgorithmConfig
from beamline.config.losses import ClipLoss
from beamline.records import Experience, Problem
from beamline.rollout.collect import to_rollout
from beamline.runtime.engines import build, load_models
from beamline.starter import STARTER
from benchmarks.harness import THREADS, Comparison, Figures, both, comparison_table, parser, record, write
from benchmarks.phases import Phases
from benchmarks.workload import (
    LONGEST,
    PAD,
    SEED,
    ForcedLengths,
    as_ours,
    as_peer,
    lengths,
    peer_module,
    problems,
    requests,
    run_config,
    sample,
)

NAME = "grpo-8x8"
TARGET = 2.0
PROMPTS, SAMPLES = 8, 8
PEER_SEQUENCES = 32  # of a micro-batch
LR, CLIP_LOW, CLIP_HIGH = 1e-6, 0.2, 0.28
ALGORITHM = AlgorithmConfig(loss=ClipLoss(clip_low=CLIP_LOW, clip_high=CLIP_HIGH))
PHASES = ("generation", "forward", "backward", "optimizer", "transfer", "rest")


def main() -> None:
    """Compare and write the results."""
    arguments = parser(__doc__, rounds=5).parse_args()
    asked = problems(PROMPTS * (1 + arguments.rounds))
    comparison = both(partial(Ours, asked), partial(Peer, asked), arguments.rounds, NAME)
    table = comparison_table("GRPO step", {NAME: comparison}, {NAME: TARGET}, "seconds", "s")
    workload = record(comparison, TARGET) | {"sequences": PROMPTS * SAMPLES}
    write("step", {"workloads": {NAME: workload}}, table, arguments.results)
    Console().print(_phase_table(comparison))


def even_share(token_ids: Sequence[int]) -> float:
    """The reward of a response."""
    return float(np.mean(np.asarray(token_ids) % 2 == 0))


class Ours:
    """One step of Beamline a call, over the next prompts."""

    def __init__(self, asked: Sequence[Problem]) -> None:
        as_ours()
        self._phases, self._steps = Phases(), count()
        self._phases.watch_torch()
        config = run_config(LONGEST, lr=LR)
        self._engines = build(config, load_models(config))
        chat = BeamChat(STARTER)
        self._problems, self._prompts = asked, [chat.prompt_ids(problem.messages) for problem in asked]
        self._engines.sync(version=0)

    def __call__(self) -> Figures:
        step, clocked = next(self._steps), self._phases.clocked
        start = time.perf_counter()
        batch = self._experiences(step)
        clocked("forward", self._update)(batch)  # less backward and optimizer, whose clocks stop this one
        clocked("transfer", self._engines.sync)(version=step + 1)
        return _figures(self._phases, time.perf_counter() - start)

    def _experiences(self, step: int) -> list[Experience]:
        part = slice(PROMPTS * step, PROMPTS * (step + 1))
        asked = requests(self._problems[part], self._prompts[part], lengths(PROMPTS * SAMPLES, draw=step), step)
        done = self._phases.clocked("generation", sample)(self._engines.sampler, asked)
        rewards = np.array([even_share(completion.token_ids) for completion in done]).reshape(PROMPTS, SAMPLES)
        graded = np.ones(SAMPLES, dtype=bool)
        groups = [GroupRewards(of_group, graded, graded, {}) for of_group in rewards]
        rollouts = [to_rollout(request, completion) for request, completion in zip(asked, done, strict=True)]
        return [
            Experience(r, float(a))
            for r, a in zip(rollouts, np.concatenate(advantages(groups, ALGORITHM.advantage)), strict=True)
        ]

    def _update(self, batch: Sequence[Experience]) -> None:
        loss = LossConfig(ALGORITHM, LONGEST, SEED, on_policy=True)
        self._engines.learner.step(self._engines.learner.prepare(batch, loss))


class Peer:
    """One step of the trainer a call; ``train`` itself runs in a thread."""

    def __init__(self, asked: Sequence[Problem]) -> None:
        self._phases, self._pace, self._steps = Phases(), Pace(), count()
        self._phases.watch_torch()
        self._tokens: list[int] = []
        self._folder = tempfile.TemporaryDirectory()
        module = peer_module()
        module.generate = self._phases.clocked("generation", self._forced(module))
        self._trainer = GRPOTrainer(
            module,
            reward_funcs=self._reward,
            args=_settings(self._folder.name, len(asked) // PROMPTS),
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": m.role, "content": m.content} for m in problem.messages] for problem in asked]}
            ),
            processing_class=AutoTokenizer.from_pretrained(STARTER, padding_side="left"),
            callbacks=[self._pace],
        )
        self._trainer.remove_callback(PrinterCallback)
        self._trainer._compute_loss = self._phases.clocked("forward", self._trainer._compute_loss)

    def __enter__(self) -> "Peer":
        as_peer()
        self._pace.begin(self._trainer.train)
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.end()
        self._folder.cleanup()

    def __call__(self) -> Figures:
        self._tokens = lengths(PROMPTS * SAMPLES, draw=next(self._steps))
        start = time.perf_counter()
        self._pace.step()
        return _figures(self._phases, time.perf_counter() - start)

    def _forced(self, module: Any) -> Callable[..., Tensor]:
        """``generate`` with a stop token just where a response is to end, which is where the trainer cuts it."""
        generate = module.generate

        def forced(input_ids: Tensor, generation_config: Any, **options: Any) -> Tensor:
            for config in (generation_config, module.generation_config):
                config.eos_token_id = None  # a drawn stop token ends nothing
            width = input_ids.shape[1]
            stop = StoppingCriteriaList([ForcedLengths(width, self._tokens)])
            ids = cast(
                Tensor, generate(input_ids, generation_config=generation_config, stopping_criteria=stop, **options)
            )
            drawn, ends = ids[:, width:], torch.tensor(self._trainer.eos_token_ids)
            drawn[torch.isin(drawn, ends)] = PAD
            drawn[torch.arange(len(drawn)), torch.tensor(self._tokens) - 1] = ends[0]
            return ids

        return forced

    def _reward(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        found = [len(ids) for ids in completion_ids]
        if found != self._tokens:
            raise RuntimeError(f"the trainer's responses have {found} tokens, asked for {self._tokens}")
        return [even_share(ids) for ids in completion_ids]


class Pace(TrainerCallback):  # type: ignore[misc]
    """Makes a trainer wait after each of its steps."""

    def __init__(self) -> None:
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._pool, self._ended = ThreadPoolExecutor(1), False
        self._training: Future[Any] | None = None

    def begin(self, train: Callable[[], Any]) -> None:
        """Start training, which goes on to the wait before its first step."""
        self._training = self._pool.submit(train)
        self._training.add_done_callback(lambda _: self._done.release())
        self._done.acquire()
        self._raise_failure()

    def step(self) -> None:
        """Let one step happen."""
        self._go.release()
        self._done.acquire()
        self._raise_failure()

    def end(self) -> None:
        """Let training end, after its last step or, where steps are left, after the next one."""
        self._ended = True
        self._go.release()
        self._pool.shutdown()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        torch.set_num_threads(THREADS)  # a setting of the thread
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._ended:
            self._wait()
        control.should_training_stop |= self._ended

    def _wait(self) -> None:
        self._done.release()
        self._go.acquire()

    def _raise_failure(self) -> None:
        if self._training is not None and self._training.done():
            self._training.result()


def _settings(folder: str, steps: int) -> GRPOConfig:
    cuts = PROMPTS * SAMPLES // PEER_SEQUENCES
    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=PEER_SEQUENCES,
        gradient_accumulation_steps=cuts,
        steps_per_generation=cuts,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        temperature=1.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=SEED,
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def _figures(phases: Phases, seconds: float) -> Figures:
    """Seconds of the step and of each phase; what no clock saw is the rest."""
    spent = phases.take("generation", "forward", "backward", "optimizer")
    return dict.fromkeys(PHASES, 0.0) | spent | {"rest": seconds - sum(spent.values()), "seconds": seconds}


def _phase_table(comparison: Comparison) -> Table:
    table = Table("phase", "ours, s", "peer, s", title="where a step's time goes (medians)")
    for phase in PHASES:
        table.add_row(phase, *(f"{side[phase].median:.3f}" for side in (comparison.ours, comparison.peer)))
    return table


if __name__ == "__main__":
    main()
