"""The command line. Commands import what they need when they run: ``beamline --help`` answers without torch."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from beamline import __version__
from beamline.errors import BeamlineError
from beamline.runtime.launched import LaunchError, first, processes

app = typer.Typer(
    name="beamline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
starter_app = typer.Typer(help="The small models that come with the package.", no_args_is_help=True)
app.add_typer(starter_app, name="starter")
data_app = typer.Typer(help="Data sets: raw files to clean ones.", no_args_is_help=True)
app.add_typer(data_app, name="data")

_SIGNALS = 128  # exit codes above say that a signal ended the run

Recipe = Annotated[Path, typer.Argument(help="A recipe: a YAML file such as recipes/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's: learner.optimizer.lr=1e-5"),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Reinforcement learning of mixture-of-experts language models, from a laptop to a cluster."""
    if version:
        sys.stdout.write(f"beamline {__version__}\n")
        raise typer.Exit
    command = context.invoked_subcommand
    if command not in (None, "train") and processes() > 1:
        raise LaunchError(f"beamline {command} runs in one process, and torchrun has started {processes()}: start one")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check configuration, model and data, say what would run, and stop.")
    ] = False,
) -> None:
    """Train a model as a recipe says.

    Everything goes to the recipe's `output` folder: metrics.jsonl, rollouts, report.html, checkpoints, export.
    Ctrl-C finishes the step, saves, and exits; the same command with `checkpoint.resume=latest` goes on.

    Example: beamline train recipes/quickstart.yaml seed=1 output=runs/seed1
    """
    from beamline.config import ConfigError, Problem, load_config

    config = load_config(recipe, overrides or [])
    # Thread pools read these when torch is imported, which is why the import comes after.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.runtime.threads)
    if config.learner.engine != "megatron" and processes() > 1:
        reason = f"it runs in one process, and torchrun has started {processes()}: use learner=megatron, or no torchrun"
        raise ConfigError([Problem(reason, "learner.engine", config.learner.engine)])
    if dry_run:
        if not first():
            return
        from beamline.runtime.preview import preview

        Console(soft_wrap=True, emoji=False).print(preview(config), highlight=False, markup=False)
        return
    if not first():
        from beamline.runtime.engines import model_folder
        from beamline.runtime.megatron import serve

        serve(config, model_folder(config))
        return
    from beamline.train import train as run

    run(config)


@app.command()
def grade(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON Lines with `response` and `answer`; `-` is the standard input.")
    ],
    grader: Annotated[
        Literal["math", "integer", "dapo_strict", "exact"], typer.Option(help="How answers are read and compared.")
    ] = "math",
    workers: Annotated[int, typer.Option(min=1, help="Grading processes.")] = 2,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds for one response.")] = 5.0,
    memory: Annotated[int, typer.Option(min=64, help="MiB for one response.")] = 1024,
) -> None:
    """Grade responses as training would: one JSON line for each, with `correct`, `parsed`, `status` and `seconds`.

    `response` is what stands in the final channel. `status` is `graded`, or `timeout` or `error` with the reason.

    Example: echo '{"response": "**Answer:** 034", "answer": "34"}' | beamline grade -
    """
    from beamline.tasks.grade_file import grade_file
    from beamline.tasks.pool import GradingPool

    with GradingPool(workers, deadline, memory) as pool:
        grade_file(grader, file, sys.stdout, pool)


@app.command("eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A run, a checkpoint, a Hugging Face or PEFT folder, `starter` or `starter-math`."),
    ],
    data: Annotated[
        list[Path] | None,
        typer.Argument(help="Problem files (Parquet, JSON Lines, JSON, CSV); none = the recipe's evaluation sets."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Where settings come from; by default the run's own, else the built-in ones.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting: evaluation.samples_per_problem=32")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write responses, the result of each problem and all figures into this folder."),
    ] = None,
) -> None:
    """Measure a model's accuracy: avg@k with a 95 % interval over problems, pass@k, maj@k, and how each problem went.

    For a run or a checkpoint the figures are those that training gave at that step.

    Example: beamline eval runs/quickstart --set evaluation.samples_per_problem=32
    """
    from beamline.evaluate import evaluate_model

    evaluate_model(model, data or [], recipe, set_ or [], out)


@app.command()
def mismatch(
    model: Annotated[
        str,
        typer.Argument(help="A run folder, a checkpoint, a Hugging Face model folder, `starter` or `starter-math`."),
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting: rollout.dtype=bfloat16 asks what if it were that.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that are sampled, and stay.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write mismatch.json and a page, mismatch.html, into this folder.")
    ] = None,
) -> None:
    """Explain why sampler and learner disagree on log-probabilities: each cause alone, then one after another.

    Switches from the learner to the sampler one cause at a time (batch composition, kernels, routing, types, ...) on
    what the next step would sample. For a run, RUN/mismatch.json and a section of RUN/report.html are written too.

    Example: beamline mismatch starter --set rollout.dtype=bfloat16
    """
    from beamline.mismatch.measure import explain_mismatch

    explain_mismatch(model, set_ or [], sequences, json, out)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    samples: Annotated[int, typer.Option(help="Responses shown of the first and of the last dump.", min=0)] = 8,
) -> None:
    """Write RUN/report.html: one page with plots and sample responses, self-contained."""
    from beamline.report import write_report

    if not (run / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{run} is not the folder of a run: it has no metrics.jsonl")
    Console(soft_wrap=True, emoji=False).print(f"report: {write_report(run, samples)}", highlight=False, markup=False)


@app.command()
def config(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print the resolved configuration, with the meaning, bounds and default of every key."""
    from beamline.config import load_config
    from beamline.config.describe import describe

    sys.stdout.write(describe(load_config(recipe, overrides or [])))


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A run folder (its newest checkpoint), or a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; there must be none of that name.")],
    merge: Annotated[bool, typer.Option("--merge", help="Add adapters to the weights that they belong to.")] = False,
    base: Annotated[
        Path | None, typer.Option(help="Where the model that training began from lies now, if it was moved.")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model folder: config, tokenizer, safetensors.

    Of a run that trains adapters (`policy.lora`) it is a PEFT folder, unless they are merged.

    Example: beamline export runs/quickstart model --merge
    """
    from beamline.runtime.export import export_model

    export_model(model, out, merge, base)
    Console(soft_wrap=True, emoji=False).print(f"exported to {out}", highlight=False, markup=False)


@starter_app.command("build")
def starter_build(
    name: Annotated[Literal["starter", "starter-math"], typer.Argument(help="Which one.")] = "starter",
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default build/NAME.")] = None,
) -> None:
    """Train a starter model from its fixed seed: a warm start on worked problems, in five to fifteen minutes.

    On the CPU family and versions named in starter.json the result has the hash stored there.
    """
    from beamline.starter.build import build_starter

    folder = out or Path("build") / name
    made = build_starter(name, folder)
    Console(emoji=False).print(
        f"{name} in {folder}: {made['parameters']:,} parameters, {made['sampled_accuracy']:.1%} right, "
        f"{made['well_formed']:.1%} well formed, sha256 {made['sha256']}, {made['seconds']} s",
        highlight=False,
    )


@data_app.command("prepare")
def data_prepare(
    source: Annotated[str, typer.Argument(help="`dapo`, `aime-2024`, `aime-2025`, or a file of problems.")],
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("data"),
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="The raw file of a named data set; by default it is fetched from its hub."),
    ] = None,
    wording: Annotated[
        Literal["keep", "dapo"],
        typer.Option(help="`keep` prompts as they are, or put `dapo`'s instructions around every problem."),
    ] = "keep",
) -> None:
    """Write OUT/NAME-cleaned.parquet, without duplicates and contradictory answers, and a manifest with all counts.

    Files are Parquet, JSON Lines, JSON or CSV, in the columns of verl, SkyRL, slime or TRL, or `question` and `answer`.

    Example: beamline data prepare dapo --out data --from dapo-math-17k.parquet
    """
    from beamline.data.console import prepare_and_show

    prepare_and_show(source, out, from_, wording)


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: compiled code turns one that came while it ran into a SystemError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def going_on(arguments: list[str]) -> list[str]:
    """The command that goes on with what these began, with as many processes."""
    program, *words = arguments
    if processes() > 1:
        started = ["torchrun", "--nproc-per-node", str(processes()), "-m", "beamline"]
    else:  # a module's own file is not what it is started by
        started = ["python", "-m", "beamline"] if Path(program).name == "__main__.py" else [program]
    return [
        *started,
        *(word for word in words if not word.startswith("checkpoint.resume=")),
        "checkpoint.resume=latest",
    ]


def main() -> None:
    """Run the command line; failures that the user can mend end in their message alone."""
    try:
        app()
    except (KeyboardInterrupt, SystemError) as error:
        if not _interrupted(error):
            raise
        raise SystemExit(130) from None
    except (BeamlineError, OSError, FloatingPointError) as error:
        console = Console(stderr=True, soft_wrap=True, emoji=False)
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
        code = error.exit_code if isinstance(error, BeamlineError) else 1
        if code > _SIGNALS:
            console.print(f"go on:  {escape(shlex.join(going_on(sys.argv)))}", highlight=False)
        raise SystemExit(code) from None
