"""Rollouts as rows that people read: dumps of training steps and of evaluations."""

from collections.abc import Sequence

from beamline.chat import BeamChat
from beamline.records import Group
from beamline.report import RolloutRow


def rows(groups: Sequence[Group], chat: BeamChat, step: int) -> list[RolloutRow]:
    """One readable row a sample."""
    made: list[RolloutRow] = []
    for group in groups:
        for rollout in group.rollouts:
            grade, verdict = rollout.grade, rollout.verdict
            assert grade is not None
            row: RolloutRow = {
                "step": step,
                "problem": group.problem.id,
                "sample": rollout.key.sample,
                "attempt": rollout.key.attempt,
                "question": group.problem.text,
                "answer": group.problem.answer,
                "response": chat.decode(rollout.token_ids[rollout.policy_mask]),
                "parsed": grade.parsed,
                "correct": None if verdict is None else verdict.correct,
                "reward": None if verdict is None else verdict.reward,
                "parts": grade.parts,
                "status": grade.status,
                "finish": rollout.finish,
                "tokens": rollout.response_tokens,
                "logprob_mean": float(rollout.response_logprobs.astype("float64").mean()),
            }
            if grade.error is not None:
                row["error"] = grade.error
            made.append(row)
    return made
