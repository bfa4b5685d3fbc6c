"""The training loop, to be read as the algorithm: policy gradients on tasks whose answers can be checked."""

from dataclasses import replace
from functools import partial

from beamline.algorithms.advantages import has_signal, rewards_of, with_advantages
from beamline.algorithms.loss import LossConfig
from beamline.algorithms.statistics import sampling_statistics
from beamline.config.kl import KlReward
from beamline.config.schema import RunConfig
from beamline.evaluate import evaluate, evaluation_metrics, write_evaluation
from beamline.learner.learner import PreparedBatch, StepStats, update_statistics
from beamline.learner.penalty import with_kl_penalty
from beamline.records import Experience, Group
from beamline.report import evaluation_folder
from beamline.rollout.collect import Job, Sampled, sample_until
from beamline.rollout.grading import Grading
from beamline.rollout.strategies import Drawn, draw, training_params
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.divergence import explained_divergence
from beamline.runtime.interrupt import Interrupt
from beamline.runtime.session import Run, open_run


def train(config: RunConfig) -> dict[str, float]:
    """Run a recipe to its end and return its last line of metrics.

    Raises:
        Interrupted: a signal came; the step at hand was finished and saved.
        DivergedError: a loss, a gradient or the weights were not finite; the last checkpoint stands.
        ModelError, DataError, CheckpointError, ResumeError, SamplingStalledError, RouteError: the run cannot begin or
            go on.
    """
    make_deterministic(config.runtime.threads)
    with open_run(config) as run, Interrupt() as interrupt, explained_divergence(run):
        run.engines.sync(version=run.step)
        check_agreement(run)
        if run.fresh:
            run.record(0, measure(run, 0) if config.evaluation.before_training else {})
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


def check_agreement(run: Run) -> None:
    """Make sure that the sampler computes with the learner's weights, before time is spent on it."""
    if run.config.algorithm.guard.mismatch is None:
        return
    difference = run.engines.agreement(run.config.rollout.deadline_seconds)
    run.console.print(f"sampler and learner agree on a probe: mean |delta log p| = {difference:.1e}")


def one_step(run: Run, step: int) -> None:
    """Sample, grade, learn, hand the new weights over, and write down what happened."""
    config = run.config
    drawn = sample_groups(run, step)
    stats = learn(run, with_advantages(drawn.groups, config.algorithm.advantage))
    with run.timings("transfer"):
        run.engines.sync(version=step)
    run.dump(step, drawn.sampled)
    evaluated = measure(run, step) if run.due(config.evaluation.every, step) else {}
    run.problems_drawn += drawn.problems
    run.updates += sum(not update.skipped for update in stats)
    run.skipped_updates += config.updates_per_step - sum(not update.skipped for update in stats)
    sampled = sampling_statistics(drawn.sampled) | drawn.metrics | run.engines.sampler.statistics()
    run.record(step, sampled | update_statistics(stats, config.rollout.max_response_tokens) | evaluated)


def sample_groups(run: Run, step: int) -> Drawn:
    """Several graded samples of each of the step's problems, and which of these groups are learned from."""
    config, algorithm, rollout = run.config, run.config.algorithm, run.config.rollout
    params = training_params(rollout, run.chat.stop_ids)
    replayed = run.engines.shape if config.policy.r3 else None
    drawn = draw(
        algorithm.sampling,
        config.seed,
        Job("train", step, (), algorithm.samples_per_prompt, params, routes_of=replayed),
        algorithm.prompts_per_step,
        take=lambda start, count: run.data.train.take(config.seed, run.problems_drawn + start, count),
        sample_round=partial(sample_round, run),
        has_signal=lambda group: has_signal(rewards_of(group), algorithm.advantage),
    )
    if drawn.note is not None:
        run.console.print(drawn.note)
    if isinstance(algorithm.kl, KlReward):
        with run.timings("old_logprobs"):
            drawn = drawn.changed(partial(with_kl_penalty, learner=run.engines.learner, config=algorithm.kl))
    return drawn


def sample_round(run: Run, job: Job) -> Sampled:
    """Draw the samples of a job, and have each graded as it ends."""
    grading = Grading(run.pool, job, run.chat, run.config.reward)
    with run.timings("sampling"), run.console.phase("sampling", job.size) as bar:
        deadline = run.config.rollout.deadline_seconds
        sampled = sample_until(
            run.engines.sampler, job, run.chat, deadline, grading.add, lambda done: bar.advance(len(done.token_ids))
        )
    with run.timings("grading"):
        return replace(sampled, groups=grading.finish(sampled.groups))


def learn(run: Run, groups: list[Group]) -> list[StepStats]:
    """Cut the step into mini-batches, prepare all of them with the weights that sampled, and update once for each.

    The first that has anything to learn from is updated by the weights that sampled.
    """
    learner, size = run.engines.learner, run.config.algorithm.prompts_per_update
    mini_batches = [experiences(groups[start : start + size]) for start in range(0, len(groups), size)]
    prepared: list[PreparedBatch] = []
    with run.timings("old_logprobs"):
        for batch in mini_batches:
            on_policy = not any(earlier.loss_tokens for earlier in prepared)
            prepared.append(learner.prepare(batch, loss_config(run, on_policy)))
    stats = []
    with run.timings("update"), run.console.phase("training", len(prepared)) as bar:
        for mini_batch in prepared:
            stats.append(learner.step(mini_batch))
            bar.advance(stats[-1].tokens)
    run.guarded |= any(not update.skipped for update in stats)
    return stats


def experiences(groups: list[Group]) -> list[Experience]:
    """What a learner is given: each sample with its advantage; samples without a grade are in no loss."""
    return [
        Experience(rollout, float(advantage), trained=rollout.verdict is not None, group=number)
        for number, group in enumerate(groups)
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
    ]


def loss_config(run: Run, on_policy: bool) -> LossConfig:
    """The loss of a mini-batch, and whether the weights that sampled are those that it updates."""
    return LossConfig(
        algorithm=run.config.algorithm,
        response_limit=run.config.rollout.max_response_tokens,
        seed=run.config.seed,
        on_policy=on_policy,
        first=on_policy and not run.guarded,
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
