"""Strategies of sampling in the real command line: the same bytes again, also when interrupted, and sums that hold."""

import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from beamline.checkpoint import open_checkpoint
from beamline.report import RolloutRow, read_metrics, read_rollouts, rollouts_path
from beamline.report.rollouts import find_rollouts
from tests.system.conftest import Cli, Ended
from tests.system.runs import QUICKSTART, newest, results

WANTED, SAMPLES, STEPS, PROBLEMS = 4, 4, 4, 96
SMALL = (
    f"data.train.problems={PROBLEMS}",
    "data.evaluation={}",
    "rollout.max_response_tokens=64",
    f"algorithm.prompts_per_step={WANTED}",
    f"algorithm.samples_per_prompt={SAMPLES}",
    "algorithm.prompts_per_update=2",
    "evaluation.before_training=false",
    "checkpoint={every: 2, keep: 0, export: false, resume: latest}",
    "report.every=0",
    "reward.grading.workers=1",
    "runtime.threads=1",
)
STRATEGIES = {
    "dynamic": ("algorithm.sampling=dynamic",),
    "dynamic with a penalty": ("algorithm.sampling={name: dynamic, rounds: 2}", "algorithm.kl=reward"),
    "replace": ("algorithm.sampling=replace",),
    "oversample": ("algorithm.sampling={name: oversample, cutoff_tokens: 52}",),
    "easy first": ("data.order=easy_first", "data.train.levels=[2,3]", "algorithm.sampling=dynamic"),
}
HOPELESS = ("rollout.max_response_tokens=4", "reward.overlong.buffer_tokens=0")
"""No answer fits into so few tokens: every response is wrong, and no group has a signal."""


def train(folder: Path, cli: Cli, *overrides: str, steps: int = STEPS) -> Ended:
    ended = cli("train", QUICKSTART, f"output={folder}", f"steps={steps}", *SMALL, *overrides)
    assert ended.code == 0, ended.err
    return ended


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of the steps."""
    return read_metrics(run / "metrics.jsonl")[1:]


def drawn(checkpoint: Path) -> int:
    """How many problems a run had taken when it was saved."""
    state = open_checkpoint(checkpoint).run_state
    return int(state["problems_drawn"])


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Path]:
    """Folders of the runs that were made; they are not to be changed."""
    return {}


@pytest.fixture
def run(
    cli: Cli, uninterrupted: dict[str, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of an uninterrupted run of the strategy that the test is about."""
    name = request.node.callspec.params["strategy"]
    if name not in uninterrupted:
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        train(folder, cli, *STRATEGIES[name])
        uninterrupted[name] = folder
    return uninterrupted[name]


of_each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@of_each_strategy
def test_a_run_is_the_same_bytes_again(strategy: str, run: Path, tmp_path: Path, cli: Cli) -> None:
    train(tmp_path / "again", cli, *STRATEGIES[strategy])
    assert results(tmp_path / "again") == results(run)


@of_each_strategy
def test_an_interrupted_run_goes_on_to_the_same_bytes(strategy: str, run: Path, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "interrupted"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "global_step_4")
    (folder / "checkpoints" / "latest").unlink()
    ended = train(folder, cli, *STRATEGIES[strategy])
    assert "resumed at step 2" in ended.out
    assert results(folder) == results(run)


@of_each_strategy
def test_a_checkpoint_says_how_many_problems_were_taken(strategy: str, run: Path) -> None:
    per_step = [sum(1 for _ in groups_of(run, step)) for step in range(1, STEPS + 1)]
    if strategy == "oversample":  # of which the dumps show those that were judged
        per_step = [6] * STEPS
    assert drawn(run / "checkpoints" / "global_step_2") == sum(per_step[:2])
    assert drawn(newest(run)) == sum(per_step)


def groups_of(run: Path, step: int) -> Counter[tuple[str, int]]:
    """Responses of each problem and round of sampling in the dump of a step."""
    return Counter((row["problem"], row["attempt"]) for row in read_rollouts(rollouts_path(run, step)))


@of_each_strategy
def test_no_problem_comes_twice_before_all_have_come(strategy: str, run: Path) -> None:
    dumped = [row for dump in find_rollouts(run) for row in read_rollouts(dump)]
    assert drawn(newest(run)) <= PROBLEMS
    assert set(Counter(row["problem"] for row in dumped).values()) == {SAMPLES}
    responses = {(row["step"], row["problem"], row["sample"], row["attempt"]) for row in dumped}
    assert len(responses) == len(dumped)


@of_each_strategy
def test_the_statistics_of_a_step_add_up(strategy: str, run: Path) -> None:
    for line in lines_of(run):
        groups = groups_of(run, int(line["step"]))
        rows = read_rollouts(rollouts_path(run, int(line["step"])))
        assert line["train/graded"] + line["train/ungraded"] == len(rows) == SAMPLES * len(groups)
        assert line["train/tokens"] == sum(row["tokens"] for row in rows)
        assert line["train/sampling_rounds"] == 1 + max(attempt for _, attempt in groups)
        taken = len(groups) + (line["train/groups_left_out"] if strategy == "oversample" else 0)
        learned = WANTED - line["train/groups_missing"] * (strategy != "replace")
        if strategy == "replace":
            assert taken == WANTED
        else:
            assert learned + line["train/groups_left_out"] == taken
        assert (line["train/tokens_unjudged"] > 0) == (strategy == "oversample")
        if learned:
            assert 0 < line["policy/counted_tokens"] <= learned * SAMPLES * 64
            seconds = line["timing/old_logprobs"] + line["timing/update"]
            assert line["timing/training_tokens_per_s"] == pytest.approx(line["policy/counted_tokens"] / seconds)


@pytest.mark.parametrize("strategy", ["dynamic"])
def test_dynamic_sampling_learns_from_groups_with_a_signal_alone(strategy: str, run: Path) -> None:
    lines = lines_of(run)
    assert max(line["train/sampling_rounds"] for line in lines) > 1
    for line in lines:
        rows = read_rollouts(rollouts_path(run, int(line["step"])))
        rewards: dict[tuple[str, int], set[float | None]] = {}
        for row in rows:
            rewards.setdefault((row["problem"], row["attempt"]), set()).add(row["reward"])
        with_signal = [group for group, values in rewards.items() if len(values) > 1][:WANTED]
        tokens = sum(row["tokens"] for row in rows if (row["problem"], row["attempt"]) in with_signal)
        assert line["policy/counted_tokens"] == tokens
        assert line["train/groups_missing"] == WANTED - len(with_signal)


@pytest.mark.parametrize("strategy", ["replace"])
def test_copies_are_learned_from_as_often_as_they_are_there(strategy: str, run: Path) -> None:
    replaced = [line for line in lines_of(run) if line["train/groups_left_out"]]
    assert replaced
    for line in replaced:
        assert line["train/groups_left_out"] == line["train/groups_without_signal"]
        tokens, with_signal = Counter[str](), set()
        for problem, rows in by_problem(run, int(line["step"])).items():
            tokens[problem] = sum(row["tokens"] for row in rows)
            if len({row["reward"] for row in rows}) > 1:
                with_signal.add(problem)
        each, once_more = divmod(WANTED, len(with_signal))
        base = each * sum(tokens[problem] for problem in with_signal)
        possible = {base + sum(map(tokens.get, more)) for more in combinations(sorted(with_signal), once_more)}
        assert line["policy/counted_tokens"] in possible


def by_problem(run: Path, step: int) -> dict[str, list[RolloutRow]]:
    rows: dict[str, list[RolloutRow]] = {}
    for row in read_rollouts(rollouts_path(run, step)):
        rows.setdefault(row["problem"], []).append(row)
    return rows


@pytest.mark.parametrize("strategy", ["easy first"])
def test_easy_problems_come_first(strategy: str, run: Path) -> None:
    terms = [row["question"].count("+") for dump in find_rollouts(run) for row in read_rollouts(dump)]
    assert set(terms) == {1}  # of two kinds, half the problems each, of which a few were taken


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dry_run_says_how_many_problems_a_step_takes(strategy: str, run: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli(
        "train", QUICKSTART, f"output={tmp_path / 'new'}", f"steps={STEPS}", *SMALL, *STRATEGIES[strategy], "--dry-run"
    )
    assert ended.code == 0, ended.err
    facts = {
        "dynamic": ("sampling dynamic (4 to 16 problems a step), no KL penalty", "0.17 to 0.67"),
        "dynamic with a penalty": (
            "sampling dynamic (4 to 8 problems a step), KL penalty in the reward, so a second model in memory",
            "0.17 to 0.33",
        ),
        "replace": ("sampling replace (4 problems a step)", "0.17"),
        "oversample": ("sampling oversample (6 problems a step)", "0.25"),
        "easy first": ("sampling dynamic (4 to 16 problems a step)", "0.17 to 0.67"),
    }
    sampling, passes = facts[strategy]
    assert "algorithm   advantage grpo, loss clip (token_mean), " in ended.out
    assert sampling in ended.out
    assert f"training    {PROBLEMS} problems, passed through {passes} times" in ended.out
    low, _, high = passes.partition(" to ")
    assert float(low) - 0.005 <= drawn(newest(run)) / PROBLEMS <= float(high or low) + 0.005


def test_a_step_that_is_not_full_says_so_and_learns_from_what_it_has(cli: Cli, tmp_path: Path) -> None:
    ended = train(tmp_path, cli, "algorithm.sampling={name: dynamic, rounds: 1}", steps=2)
    short = [line for line in lines_of(tmp_path) if line["train/groups_missing"]]
    assert short
    for line in short:
        found = WANTED - line["train/groups_missing"]
        assert found > 0
        assert (
            f"step {line['step']}: algorithm.sampling.rounds=1 is reached after {WANTED} problems, and {found} of "
            f"{WANTED} groups have a signal; the step learns from those"
        ) in ended.out
        assert line["policy/updates"] > 0


@pytest.mark.parametrize(
    ("overrides", "problems", "note"),
    [
        (
            ("algorithm.sampling={name: dynamic, rounds: 2}",),
            8,
            "step 1: algorithm.sampling.rounds=2 is reached after 8 problems, and 0 of 4 groups have a signal",
        ),
        (
            ("algorithm.sampling={name: dynamic, rounds: 2}", "algorithm.kl=reward"),
            8,
            "step 1: algorithm.sampling.rounds=2 is reached after 8 problems, and 0 of 4 groups have a signal",
        ),
        (("algorithm.sampling=replace",), 4, "step 1: 0 of 4 groups have a signal, too few to replace the others by"),
        (("algorithm.sampling={name: oversample, cutoff_tokens: 2}",), 6, ""),
        (("algorithm.sampling=plain", "algorithm.correction.weight=tis", "algorithm.loss=kl_cov"), 4, ""),
    ],
    ids=["dynamic", "dynamic with a penalty", "replace", "oversample", "plain"],
)
def test_a_run_without_any_signal_goes_on_skips_its_updates_and_counts_them(
    overrides: tuple[str, ...], problems: int, note: str, cli: Cli, tmp_path: Path
) -> None:
    ended = train(tmp_path, cli, *HOPELESS, *overrides, steps=2)
    assert note in ended.out
    assert drawn(newest(tmp_path)) == 2 * problems
    for step, line in enumerate(lines_of(tmp_path), start=1):
        assert (line["policy/updates"], line["policy/skipped_updates"]) == (0, 2 * step)
        judged = line["train/graded"] // SAMPLES
        assert line["train/accuracy"] == 0
        assert line["train/groups_without_signal"] == judged
        assert "policy/loss" not in line
        assert "timing/training_tokens_per_s" not in line
    assert "report: " in ended.out


def test_what_could_not_be_graded_is_no_signal_and_is_counted(cli: Cli, tmp_path: Path) -> None:
    hang = ("reward.grading.deadline_seconds=1e-9", "algorithm.kl=reward")
    train(tmp_path, cli, "algorithm.sampling={name: dynamic, rounds: 2}", *hang, steps=1)
    (line,) = lines_of(tmp_path)
    assert (line["train/graded"], line["train/ungraded"]) == (0, 2 * WANTED * SAMPLES)
    assert line["train/grading_timeouts"] == line["train/ungraded"]
    assert line["train/groups_missing"] == WANTED
    assert line["policy/skipped_updates"] == 2
