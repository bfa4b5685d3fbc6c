"""Measuring accuracy: several samples of every problem, graded, with an interval over problems."""

import json
from collections.abc import Mapping
from pathlib import Path

from beamline.algorithms.statistics import evaluation_statistics
from beamline.chat import BeamChat
from beamline.checkpoint import write_atomic
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet
from beamline.records import Group, SamplingParams
from beamline.report.rollouts import RolloutRow
from beamline.rollout.collect import Job, graded, sample
from beamline.rollout.sampler import Sampler
from beamline.runtime.console import RunConsole


def evaluate(
    config: RunConfig,
    sets: Mapping[str, ProblemSet],
    sampler: Sampler,
    chat: BeamChat,
    step: int,
    console: RunConsole,
    dumps: Path | None = None,
) -> dict[str, float]:
    """The ``eval/`` metrics of every problem set; with ``dumps``, also each response as ``<dumps>/<set>.jsonl``."""
    metrics: dict[str, float] = {}
    k = config.evaluation.samples_per_problem
    for name, problems in sets.items():
        job = Job("eval", step, problems.problems, k, evaluation_params(config, chat))
        with console.phase(f"eval {name}", len(problems) * k) as bar:
            deadline = config.rollout.deadline_seconds
            drawn = sample(sampler, job, chat, deadline, lambda done: bar.advance(len(done.token_ids)))
        groups = [graded(group, chat, job.params.max_tokens, config.reward) for group in drawn]
        if dumps is not None:
            dumps.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(row).encode() + b"\n" for row in rows(groups, chat, step))
            write_atomic(dumps / f"{name}.jsonl", lines)
        metrics |= {f"eval/{name}/{key}": value for key, value in evaluation_statistics(groups, k).items()}
    return metrics


def evaluation_params(config: RunConfig, chat: BeamChat) -> SamplingParams:
    """How evaluation draws."""
    settings = config.evaluation
    return SamplingParams(
        max_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop_ids=chat.stop_ids,
    )


def rows(groups: list[Group], chat: BeamChat, step: int) -> list[RolloutRow]:
    """One readable row a sample."""
    made: list[RolloutRow] = []
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.grade is not None
            policy = rollout.policy_mask
            made.append(
                {
                    "step": step,
                    "problem": group.problem.id,
                    "sample": rollout.key.sample,
                    "question": group.problem.text,
                    "answer": group.problem.answer,
                    "response": chat.decode(rollout.token_ids[policy]),
                    "parsed": rollout.grade.parsed,
                    "correct": rollout.grade.correct,
                    "reward": rollout.grade.reward,
                    "parts": rollout.grade.parts,
                    "status": rollout.grade.status,
                    "finish": rollout.finish,
                    "tokens": rollout.response_tokens,
                    "logprob_mean": float(rollout.logprobs[policy].astype("float64").mean()),
                }
            )
    return made
