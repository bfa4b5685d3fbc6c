"""The problems of a run: read, held against each other, and accounted for."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from beamline.chat import BeamChat
from beamline.checkpoint.files import write_json
from beamline.config.schema import MixtureSource, RunConfig, Source
from beamline.data import ProblemSet, check_disjoint, load, mixture, usable
from beamline.runtime.resume import fingerprints

_SHOWN = 5  # things left out of a set that are listed one by one


@dataclass(frozen=True, slots=True)
class Data:
    """The problems of a run."""

    train: ProblemSet
    evaluation: dict[str, ProblemSet]
    overlap: dict[str, int]
    """For each evaluation set, how many of its problems are also trained on."""

    @property
    def sets(self) -> list[ProblemSet]:
        """The training set, then those of evaluation."""
        return [self.train, *self.evaluation.values()]

    def fingerprints(self) -> dict[str, str]:
        """A hash of each set."""
        return fingerprints(self.sets)


def evaluation_sets(config: RunConfig, sources: Mapping[str, Source], chat: BeamChat) -> dict[str, ProblemSet]:
    """The evaluation problems of each source, without those that cannot be used.

    Raises:
        DataError: a set cannot be used.
    """
    limit, grader = config.rollout.max_prompt_tokens, config.reward.grader
    return {
        name: usable(load(name, source, config.seed, "eval"), chat, limit, grader) for name, source in sources.items()
    }


def load_data(config: RunConfig, chat: BeamChat) -> Data:
    """Make or read every problem set, leave out prompts over the limit, and hold the sets against each other.

    Raises:
        DataError: a set cannot be used, or an evaluation problem is also trained on and that is not allowed.
    """
    train = training_set(config, chat)
    evaluation = evaluation_sets(config, config.data.evaluation, chat)
    overlap = check_disjoint(train, *evaluation.values(), allow=config.data.allow_overlap)
    return Data(train, evaluation, overlap)


def training_set(config: RunConfig, chat: BeamChat) -> ProblemSet:
    """The training problems, or those of all parts of a mixture, without those that cannot be used, in their order.

    Raises:
        DataError: the set, or a part of it, cannot be used, or a problem lacks the difficulty that it is ordered by.
    """

    def opened(name: str, source: Source) -> ProblemSet:
        loaded = load(name, source, config.seed, "train")
        return usable(loaded, chat, config.rollout.max_prompt_tokens, config.reward.grader)

    source = config.data.train
    if isinstance(source, MixtureSource):
        train = mixture("train", [(opened(name, part.data), part.weight) for name, part in source.parts.items()])
    else:
        train = opened("train", source)
    return train.easy_first() if config.data.order == "easy_first" else train


def write_data_report(folder: Path, sets: Iterable[ProblemSet], overlap: Mapping[str, int] | None = None) -> None:
    """``data.json``: the size of each problem set, and everything that was left out of it, with the reason.

    Also the sizes of a mixture's parts, and how many problems of an evaluation set are trained on too.
    """
    shared = overlap or {}
    record = {
        problems.name: {
            "problems": len(problems),
            "excluded": [{"where": e.where, "reason": e.reason} for e in problems.excluded],
        }
        | ({"parts": {part.name: part.problems for part in problems.parts}} if problems.parts else {})
        | ({"also_trained_on": shared[problems.name]} if problems.name in shared else {})
        for problems in sets
    }
    write_json(folder / "data.json", record)


def left_out(sets: Iterable[ProblemSet]) -> Iterator[str]:
    """For each set a line for the first things that were left out of it, and one for how many more there are."""
    for problems in sets:
        for excluded in problems.excluded[:_SHOWN]:
            yield f"{problems.name}, {excluded.where}: {excluded.reason}"
        if len(problems.excluded) > _SHOWN:
            yield f"{problems.name}: {len(problems.excluded) - _SHOWN} more"
