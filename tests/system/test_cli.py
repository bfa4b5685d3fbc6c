"""The command line as a user meets it: what it teaches, what it refuses and in which words, what it writes."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from beamline.checkpoint import open_checkpoint, verify
from beamline.config import load_config
from beamline.policy.weights import named_tensors
from beamline.report import read_metrics, read_rollouts, rollouts_path
from beamline.starter import STARTER
from tests.system.conftest import Cli
from tests.system.runs import PER_STEP, PROBLEMS, QUICKSTART, SAMPLES, STEPS, TINY, newest, python, results, tensors

HELP = {
    "": [
        "train",
        "eval",
        "report",
        "config",
        "export",
        "mismatch",
        "starter",
        "grade",
        "data",
        "from a laptop to a cluster",
    ],
    "train": ["Train a model as a recipe says", " [KEY=VALUE]...", "--dry-run", "checkpoint.resume=latest", "Example:"],
    "eval": ["Measure a model's accuracy", "MODEL", "--recipe", "--set", "into this folder", "Example:"],
    "report": ["one page with plots", "RUN", "--samples"],
    "config": ["Print the resolved configuration", "RECIPE", " [KEY=VALUE]..."],
    "export": ["Hugging Face model folder", "MODEL", "OUT", "--merge", "PEFT"],
    "mismatch": ["disagree", "MODEL", "--set", "--sequences", "--json", "--out", "Example:"],
    "starter": ["The small models that come with the package", "build"],
    "starter build": ["Train a starter model", "starter-math", "--out"],
    "grade": ["Grade responses as training would", "--grader", "dapo_strict", "--deadline", "Example:"],
    "data": ["Data sets", "prepare"],
    "data prepare": ["aime-2025", "--from", "--wording", "Example:"],
}

HEAVY = """
import sys
from beamline.cli import main
for arguments in {commands}:
    sys.argv = ["beamline", *arguments]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code or 0, *sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
"""Runs commands one after the other; after each comes its exit code and which heavy modules are loaded."""


def test_help_teaches_every_command_without_torch() -> None:
    ended = python(HEAVY.format(commands=[[*command.split(), "--help"] for command in HELP]))
    *pages, rest = ended.stdout.split("exit 0\n")
    assert rest == ""
    assert len(pages) == len(HELP), ended.stdout + ended.stderr
    for page, (command, words) in zip(pages, HELP.items(), strict=True):
        assert [word for word in words if word.lower() not in page.lower()] == [], command


MISTAKES = {
    "learner.optimizer.learning_rate=1e-5": ["learning_rate=1e-05", "unknown key", "did you mean learner.optimizer.lr"],
    "step=5": ["step=5", "unknown key; did you mean steps"],
    "steps=many": ['steps="many"', "expected integer >= 1"],
    "rollout.temperature=0": ["rollout.temperature=0", "expected number >= 0.001 and <= 1000.0"],
    "rollout.top_p=0.9": [
        "rollout.top_p=0.9 cannot be trained on",
        "use rollout.record_support=true, or rollout.top_p=1.0",
    ],
    "algorithm.prompts_per_update=3": ["prompts_per_update=3 does not divide algorithm.prompts_per_step=4"],
    "steps": ["override 'steps'", "dotted.key=value"],
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_a_wrong_setting_is_refused_by_name_before_torch_is_loaded(setting: str) -> None:
    ended = python(HEAVY.format(commands=[["train", str(TINY), setting]]))
    assert ended.stdout == "exit 2\n", ended.stderr
    assert ended.stderr.startswith("ConfigError: ")
    assert [words for words in MISTAKES[setting] if words not in ended.stderr] == [], ended.stderr


def test_every_mistake_of_a_recipe_is_told_with_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\nstepz: 3\nrollout:\n  temperature: warm\n")
    ended = python(HEAVY.format(commands=[["train", str(recipe)]]))
    assert ended.stdout == "exit 2\n"
    assert f"{recipe}:2: stepz=3: unknown key; did you mean steps" in ended.stderr
    assert f'{recipe}:4: rollout.temperature="warm": expected number >= 0.001 and <= 1000.0' in ended.stderr


def test_config_prints_a_complete_recipe_with_the_meaning_of_every_key(tmp_path: Path) -> None:
    ended = python(HEAVY.format(commands=[["config", str(QUICKSTART), "learner.optimizer.lr=1e-5"]]))
    text, _, modules = ended.stdout.rpartition("exit 0")
    assert modules == "\n"
    (tmp_path / "complete.yaml").write_text(text)
    assert load_config(tmp_path / "complete.yaml") == load_config(QUICKSTART, ["learner.optimizer.lr=1e-5"])
    assert "    # Learning rate after warm-up." in text
    assert "    lr: 1.0e-05" in text


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path: Path, cli: Cli) -> None:
    ended = cli("train", TINY, f"output={tmp_path / 'run'}", "--dry-run")
    assert ended.code == 0
    samples = PER_STEP * SAMPLES
    for fact in (
        f"run         tiny in {tmp_path / 'run'}, seed 0",
        "begins      at the first step",
        f"steps       {STEPS}, each {PER_STEP} problems x {SAMPLES} samples = {samples} responses and 2 updates",
        f"training    {PROBLEMS} problems, passed through 2.40 times",
        "evaluation  arithmetic: 8 problems x 2 samples",
    ):
        assert fact in ended.out
    assert list(tmp_path.iterdir()) == []


def edit_config(**changes: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def truncate_weights(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def overflow_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "model folder {folder} does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "{folder}/config.json is missing"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "{folder}/config.json is not JSON"),
    "short context": (
        edit_config(max_position_embeddings=64),
        "add up to 96 tokens, but the context of {folder} is 64",
    ),
    "wide window": (edit_config(sliding_window=2048), "sliding_window=2048 is larger than the context"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "{folder}/model.safetensors is missing"),
    "truncated weights": (truncate_weights, "{folder}/model.safetensors is corrupt"),
    "infinite weights": (overflow_weights, "lm_head.weight holds values that are not finite"),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("token*")], "{folder} has no usable tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_model_is_refused_with_the_file_and_the_reason(damage: str, tmp_path: Path, cli: Cli) -> None:
    apply, message = DAMAGES[damage]
    folder = tmp_path / "model"
    shutil.copytree(STARTER, folder)
    apply(folder)
    ended = cli("train", TINY, f"model.path={folder}", f"output={tmp_path / 'run'}")
    assert ended.code == 1
    assert ended.err.startswith("ModelError: ")
    assert message.format(folder=folder) in ended.err
    assert not (tmp_path / "run").exists()


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").write_text("not a folder")
    ended = cli("train", TINY, f"output={tmp_path / 'file' / 'run'}")
    assert ended.code == 1
    assert "Not a directory" in ended.err
    assert str(tmp_path / "file" / "run") in ended.err


def problem_file(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


GOOD = [{"question": f"1{n}+2{n}+3{n}", "answer": 60 + 3 * n} for n in range(5)]


def test_rows_that_cannot_be_used_are_counted_and_listed_and_the_run_goes_on(tmp_path: Path, cli: Cli) -> None:
    data = problem_file(
        tmp_path / "sums.jsonl",
        *GOOD,
        "{not json",
        {"question": "1+1", "answer": "[/two]"},
        {"question": "+".join(["12"] * 20), "answer": 240},
        GOOD[0],
    )
    run = tmp_path / "run"
    arguments = ["train", TINY, f"output={run}", "steps=1", "evaluation.every=0", "checkpoint.every=0"]
    arguments += ["data.train.source=file", f"data.train.path={data}", "evaluation.before_training=false"]
    left_out = {
        "line 6": "not JSON",
        "line 9": "the same question as 'sums:1'",
        "sums:7": "reward.grader=math cannot judge by its answer: not an answer that can be judged",
        "sums:8": "prompt of ",
    }
    planned = cli(*arguments, "--dry-run")
    assert [where for where, why in left_out.items() if f"train, {where}: {why}" not in planned.out] == []
    ended = cli(*arguments)
    assert ended.code == 0, ended.err
    assert "data train: 5 problems, 4 left out" in ended.out
    record = json.loads((run / "data.json").read_text())["train"]
    assert record["problems"] == 5
    assert [row["where"] for row in record["excluded"]] == list(left_out)
    assert all(row["reason"].startswith(left_out[row["where"]]) for row in record["excluded"])
    assert {row["question"] for row in read_rollouts(rollouts_path(run, 1))} < {row["question"] for row in GOOD}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "{data} has no usable row (the file is empty)"),
        (["[1]"], "{data} has no usable row; line 1: a list, not an object"),
        ([{"question": "1+" * 40 + "1", "answer": 41}], "no problem of 1 can be used; test:1: prompt of "),
    ],
    ids=["empty", "bad rows", "long prompts"],
)
def test_an_evaluation_file_without_a_usable_problem_is_refused(
    rows: list[object], message: str, tmp_path: Path, cli: Cli
) -> None:
    data = problem_file(tmp_path / "test.jsonl", *rows)
    ended = cli(
        "train", TINY, f"output={tmp_path / 'run'}", f"data.evaluation={{test: {{source: file, path: {data}}}}}"
    )
    assert ended.code == 1
    assert ended.err.startswith("DataError: ")
    assert message.format(data=data) in ended.err


def test_training_on_evaluation_problems_is_refused(tmp_path: Path, cli: Cli) -> None:
    train, test = problem_file(tmp_path / "train.jsonl", *GOOD), problem_file(tmp_path / "test.jsonl", *GOOD[3:])
    ended = cli(
        *("train", TINY, f"output={tmp_path / 'run'}", "data.train.source=file", f"data.train.path={train}"),
        f"data.evaluation={{held-out: {{source: file, path: {test}}}}}",
    )
    assert ended.code == 1
    assert "2 of 2 problems of evaluation set 'held-out' are also trained on, first 'test:1'" in ended.err


def test_a_diverged_run_stops_and_its_last_checkpoint_stands(reference: Path, finished: Path, cli: Cli) -> None:
    saved = finished / "checkpoints" / "global_step_4"
    shutil.rmtree(finished / "checkpoints" / "global_step_6")
    arguments = ("train", TINY, f"output={finished}", "checkpoint.resume=latest")
    ended = cli(*arguments, "learner.optimizer.lr=1e30", "checkpoint.allow_other_config=true")
    assert ended.code == 1
    assert ended.err.startswith("DivergedError: after step 4: ")
    assert "lower learner.optimizer.lr" in ended.err
    assert tensors(verify(saved).path) == tensors(reference / "checkpoints" / "global_step_4")
    assert cli(*arguments).code == 0
    assert results(finished) == results(reference)


def figures(folder: Path) -> dict[str, float]:
    """The figures that ``eval`` wrote."""
    made = json.loads((folder / "metrics.json").read_text())
    return {key: value for key, value in made.items() if key.startswith("eval/")}


def recorded(run: Path, step: int) -> dict[str, float]:
    """The same of a step of training."""
    line = next(line for line in read_metrics(run / "metrics.jsonl") if line["step"] == step)
    return {key: value for key, value in line.items() if key.startswith("eval/")}


def test_eval_of_the_starter_gives_the_numbers_that_training_began_with(
    reference: Path, tmp_path: Path, cli: Cli
) -> None:
    assert cli("eval", "starter", "--recipe", TINY, "--out", tmp_path).code == 0
    assert figures(tmp_path) == recorded(reference, step=0) == figures(reference / "export" / "evals" / "step_0")


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_eval_gives_the_numbers_and_the_files_of_training(of: str, reference: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("eval", reference if of == "run" else newest(reference), "--out", tmp_path).code == 0
    assert figures(tmp_path) == recorded(reference, step=STEPS)
    made = reference / "export" / "evals" / f"step_{STEPS}"
    for path in made.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_eval_of_the_export_equals_that_of_its_checkpoint(reference: Path, tmp_path: Path, cli: Cli) -> None:
    greedy = ("--set", "evaluation.temperature=0", "--recipe", TINY)
    for name, model in (("exported", reference / "export" / f"global_step_{STEPS}"), ("saved", reference)):
        assert cli("eval", model, *greedy, "--out", tmp_path / name).code == 0
    exported = figures(tmp_path / "exported")
    assert len(exported) == 8
    assert exported == figures(tmp_path / "saved")


def test_eval_reads_problem_files_and_writes_every_response(reference: Path, tmp_path: Path, cli: Cli) -> None:
    data = problem_file(tmp_path / "sums.jsonl", *GOOD, {"question": "1+1", "answer": "[/two]"})
    out = tmp_path / "out"
    settings = ("--set", "evaluation.samples_per_problem=3", "--set", "reward.grader=integer")
    ended = cli("eval", reference, data, *settings, "--out", out)
    assert ended.code == 0, ended.err
    assert "left out of sums, sums:6: reward.grader=integer cannot judge by its answer: not an integer: '[/two]'" in (
        ended.out
    )
    rows = [json.loads(line) for line in (out / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * len(GOOD)
    assert figures(out)["eval/sums/avg@3"] == pytest.approx(sum(row["correct"] for row in rows) / len(rows))
    problems = [json.loads(line) for line in (out / "sums.problems.jsonl").read_text().splitlines()]
    assert [row["right"] for row in problems] == [
        sum(row["correct"] for row in rows if row["problem"] == problem["problem"]) for problem in problems
    ]


def test_eval_prints_accuracy_first_in_percent_and_every_problem(reference: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli("eval", reference, "--out", tmp_path)
    made = figures(tmp_path)
    head, _, row = (line.split() for line in ended.out.splitlines()[2:5])
    assert head[:5] == ["set", "avg@2", "95", "%", "pass@2"]
    assert row[:4] == ["arithmetic", "(8)", f"{100 * made['eval/arithmetic/avg@2']:.1f}", "%"]
    problems = [json.loads(line) for line in (tmp_path / "arithmetic.problems.jsonl").read_text().splitlines()]
    for problem in problems:
        (line,) = (line for line in ended.out.splitlines() if line.strip().startswith(problem["problem"]))
        assert f" {problem['right']}/{problem['graded']} " in line


def test_eval_measures_the_model_that_was_asked_for_whatever_the_recipe_trains(tmp_path: Path, cli: Cli) -> None:
    assert load_config(QUICKSTART).model.path == "starter"
    ended = cli("eval", tmp_path / "nowhere", "--recipe", QUICKSTART)
    assert ended.code == 1
    assert f"model folder {tmp_path / 'nowhere'} does not exist" in ended.err


def test_eval_refuses_two_problem_files_of_one_name(tmp_path: Path, cli: Cli) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [problem_file(tmp_path / folder / "sums.jsonl", *GOOD) for folder in ("a", "b")]
    ended = cli("eval", "starter", *paths)
    assert ended.code == 1
    assert all(str(path) in ended.err for path in paths)


def test_report_writes_one_page_of_a_run(finished: Path, cli: Cli) -> None:
    page = finished / "report.html"
    page.unlink()
    ended = cli("report", finished)
    assert ended.code == 0
    assert ended.out == f"report: {page}\n"
    assert "<title>tiny" in page.read_text()
    assert cli("report", finished / "export").err.startswith(f"FileNotFoundError: {finished / 'export'} is not")


def test_export_is_a_model_that_transformers_loads_with_the_same_weights(
    reference: Path, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "model"
    ended = cli("export", reference / "checkpoints" / "global_step_4", folder)
    assert ended.code == 0, ended.err
    module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    reader = open_checkpoint(reference / "checkpoints" / "global_step_4").reader
    saved = {
        part.name: torch.from_numpy(reader.read("policy", part)).view(torch.float32) for part in reader.slices("policy")
    }
    loaded = named_tensors(module)
    assert loaded.keys() == saved.keys()
    assert [name for name, tensor in loaded.items() if not torch.equal(tensor, saved[name])] == []
    assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(STARTER).chat_template


def test_export_of_what_is_no_checkpoint_is_refused(tmp_path: Path, cli: Cli) -> None:
    ended = cli("export", tmp_path, tmp_path / "model")
    assert ended.code == 1
    assert f"{tmp_path} is neither a run with a checkpoint nor a checkpoint" in ended.err


def test_export_touches_nothing_that_is_there_already(reference: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "precious").write_text("mine")
    ended = cli("export", reference, tmp_path)
    assert ended.code == 1
    assert ended.err.startswith(f"FileExistsError: {tmp_path} is there already")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_export_that_cannot_be_written_names_its_path(reference: Path, tmp_path: Path, cli: Cli) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # bytes of a file; the weights are larger
    try:
        ended = cli("export", reference, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ended.code == 1
    assert ended.err.startswith(f"OSError: cannot write {tmp_path / '.model.beamline-staging' / 'model.safetensors'}: ")
    assert "File too large" in ended.err
    assert not (tmp_path / "model").exists()


def test_evaluation_does_not_write_over_its_problems(tmp_path: Path, cli: Cli) -> None:
    problems = tmp_path / "one.jsonl"
    problems.write_text('{"question": "11+22+33", "answer": 66}\n')
    before = problems.read_bytes()
    ended = cli("eval", "starter", problems, "--out", tmp_path)
    assert ended.code == 1
    assert f"{problems} is there already" in ended.err
    assert problems.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content"), [("config.yaml", "a: ["), ("config.yaml", "[1]"), ("rollouts/step_000006.jsonl.zst", "?")]
)
def test_the_report_of_a_damaged_run_is_an_error_that_names_the_file(
    finished: Path, cli: Cli, name: str, content: str
) -> None:
    (finished / name).write_text(content)
    ended = cli("report", finished)
    assert ended.code == 1
    assert f"DamagedFileError: {finished / name}" in ended.err


def test_what_a_user_named_is_printed_as_it_is(tmp_path: Path, cli: Cli) -> None:
    data = problem_file(tmp_path / "own.jsonl", {"question": "1+1", "answer": 2, "id": "a:b:[bold]1"})
    settings = ("--set", "evaluation.samples_per_problem=1")
    assert "a:b:[bold]1" in cli("eval", "starter", data, *settings).out
    assert "no:b:[bold]where" in cli("eval", "no:b:[bold]where").err


def test_ctrl_c_within_compiled_code_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def interrupted(*_: object) -> None:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr("beamline.evaluate.evaluate_model", interrupted)
    assert cli("eval", "starter").code == 130
