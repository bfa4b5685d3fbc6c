"""The training loop, to be read as the algorithm: GRPO with clip-higher on tasks whose answers can be checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from beamline.algorithms.advantages import grpo
from beamline.algorithms.loss import LossConfig
from beamline.algorithms.statistics import rewards_of, sampling_statistics
from beamline.config.schema import RunConfig
from beamline.errors import BeamlineError
from beamline.evaluate import evaluate, evaluation_metrics, write_evaluation
from beamline.learner.learner import StepStats, update_statistics
from beamline.records import Experience, Group, SamplingParams
from beamline.report import evaluation_folder
from beamline.rollout.collect import Job, sample
from beamline.rollout.grading import Grading
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.interrupt import Interrupt
from beamline.runtime.session import Run, open_run


class DivergedError(BeamlineError, RuntimeError):
    """A loss, a gradient or the weights were not finite."""


def train(config: RunConfig) -> dict[str, float]:
    """Run a recipe to its end and return its last line of metrics.

    Raises:
        Interrupted: a signal came; the step at hand was finished and saved.
        DivergedError: a loss, a gradient or the weights were not finite; the last checkpoint stands.
        ModelError, DataError, CheckpointError, ResumeError, SamplingStalledError: the run cannot begin or go on.
    """
    make_deterministic(config.runtime.threads)
    with open_run(config) as run, Interrupt() as interrupt, explained_divergence(run):
        if run.fresh:
            run.engines.sync(version=0)
            run.record(0, measure(run, 0) if config.evaluation.before_training else {})
        else:
            run.engines.sync(version=run.step)
        while run.step < config.steps and interrupt.received is None:
            one_step(run, run.step + 1)
            if interrupt.received is None and run.due(config.checkpoint.every):
                run.save()
        if run.step > run.saved_step:
            run.save()
        if interrupt.received is None:
            run.export()
        run.report()
        interrupt.raise_if_received()
    return run.line


@contextmanager
def explained_divergence(run: Run) -> Iterator[None]:
    """Turn a number that is not finite into an error that says where the run stands and what to do."""
    try:
        yield
    except FloatingPointError as error:
        raise DivergedError(
            f"after step {run.step}: {error}; the newest checkpoint is {run.store.latest()}. "
            "Look at the last rollouts and at policy/grad_norm, and lower learner.optimizer.lr"
        ) from error


def one_step(run: Run, step: int) -> None:
    """Sample, grade, learn, hand the new weights over, and write down what happened."""
    groups = sample_groups(run, step)
    stats = learn(run, groups)
    with run.timings("transfer"):
        run.engines.sync(version=step)
    run.dump(step, groups)
    evaluated = measure(run, step) if run.due(run.config.evaluation.every, step) else {}
    run.updates += sum(not update.skipped for update in stats)
    run.skipped_updates += sum(update.skipped for update in stats)
    run.record(step, sampling_statistics(groups) | update_statistics(stats) | evaluated)


def sample_groups(run: Run, step: int) -> list[Group]:
    """The step's problems, several graded samples of each, and how each sample compares with its group."""
    config, algorithm = run.config, run.config.algorithm
    problems = run.data.train.of_step(config.seed, step, algorithm.prompts_per_step)
    params = SamplingParams(
        config.rollout.max_response_tokens, temperature=config.rollout.temperature, stop_ids=run.chat.stop_ids
    )
    job = Job("train", step, problems, algorithm.samples_per_prompt, params)
    grading = Grading(run.pool, job, run.chat, config.reward)
    with run.timings("sampling"), run.console.phase("sampling", job.size) as bar:
        deadline = config.rollout.deadline_seconds
        drawn = sample(
            run.engines.sampler, job, run.chat, deadline, grading.add, lambda done: bar.advance(len(done.token_ids))
        )
    with run.timings("grading"):
        groups = grading.finish(drawn)
        return [replace(g, advantages=grpo(*rewards_of(g), norm_by_std=algorithm.norm_by_std)) for g in groups]


def learn(run: Run, groups: list[Group]) -> list[StepStats]:
    """Cut the step into mini-batches, prepare all of them with the weights that sampled, and update once for each."""
    learner, size = run.engines.learner, run.config.algorithm.prompts_per_update
    mini_batches = [experiences(groups[start : start + size]) for start in range(0, len(groups), size)]
    with run.timings("old_logprobs"):
        prepared = [
            learner.prepare(batch, loss_config(run.config, first=i == 0)) for i, batch in enumerate(mini_batches)
        ]
    stats = []
    with run.timings("update"), run.console.phase("training", len(prepared)) as bar:
        for mini_batch in prepared:
            stats.append(learner.step(mini_batch))
            bar.advance(stats[-1].tokens)
    return stats


def experiences(groups: list[Group]) -> list[Experience]:
    """What a learner is given: each sample with its advantage; samples without a grade are in no loss."""
    return [
        Experience(rollout, float(advantage), trained=rollout.verdict is not None)
        for group in groups
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
    ]


def loss_config(config: RunConfig, first: bool) -> LossConfig:
    """The loss of a mini-batch; only the first update of a step is made by the weights that sampled."""
    algorithm = config.algorithm
    return LossConfig(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        mask_truncated=algorithm.mask_truncated,
        renormalize_after_mask=algorithm.renormalize_after_mask,
        on_policy=first,
    )


def measure(run: Run, step: int) -> dict[str, float]:
    """Accuracy on every evaluation set; the responses are kept with the exports."""
    config = run.config
    if not run.data.evaluation:
        return {}
    with run.timings("evaluation"):
        measured = evaluate(config, run.data.evaluation, run.engines.sampler, run.chat, run.pool, step, run.console)
        write_evaluation(evaluation_folder(config.output, step), measured, run.chat, step)
    return evaluation_metrics(measured)
