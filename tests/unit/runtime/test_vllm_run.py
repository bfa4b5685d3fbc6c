"""Runs that sample by vLLM, as far as they come without it: what is refused, shown, compared, told and closed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from beamline import evaluate
from beamline.cli import main
from beamline.config import ConfigError, load_config
from beamline.config.schema import RunConfig
from beamline.mismatch.measure import measure
from beamline.model.beam import BeamShape, ModelError
from beamline.rollout.sampler import Sampler
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.replica import Launch
from beamline.runtime import engines, vllm
from beamline.runtime.console import RunConsole
from beamline.runtime.preview import preview
from beamline.runtime.probe import ProbeError
from beamline.runtime.resume import ResumeError, RunState, check_same, environment
from beamline.runtime.subject import find_subject
from beamline.starter import STARTER
from beamline.transfer.local import LocalChannel

ARITHMETIC = "{source: arithmetic, problems: 4, levels: [3]}"
SMALL = (
    f"data.train={ARITHMETIC}",
    f"data.evaluation={{sums: {ARITHMETIC}}}",
    "data.allow_overlap=true",
    "rollout.max_prompt_tokens=32",
    "rollout.max_response_tokens=4",
    "evaluation.samples_per_problem=1",
    "reward.grading.workers=1",
    "runtime.threads=1",
)


def config_of(output: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"output={output}", *SMALL, "rollout=vllm", *settings])


@pytest.fixture
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not installed, and who imports it all the same fails."""
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "vllm", None)


# Without vLLM


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who loads the model fails."""

    def loaded(config: RunConfig) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(engines, "load_module", loaded)


@pytest.mark.usefixtures("_no_vllm", "_no_model")
def test_an_engine_that_is_not_installed_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed here: make setup-gpu") as caught:
        engines.load_models(config_of(tmp_path))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("rollout.engine", "vllm")]


@pytest.mark.usefixtures("_no_vllm", "_no_model")
def test_the_command_says_what_to_install_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # so that what the command sets is undone
    monkeypatch.setattr("beamline.train.make_deterministic", lambda threads: None)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rollout: vllm\n")
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["beamline", "train", str(recipe), f"output={run}", *SMALL])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "make setup-gpu" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.usefixtures("_no_vllm")
def test_a_preview_names_engines_and_gpus_and_needs_no_vllm(tmp_path: Path) -> None:
    shown = preview(config_of(tmp_path, "rollout.vllm={replicas: 2, tensor_parallel: 2, max_sequences: 8}"))
    assert "sequences   up to 36 tokens, 16 at a time, on 2 vLLM engines of 2 GPUs\n" in shown
    assert "on 1 vLLM engine of 1 GPU\n" in preview(config_of(tmp_path))


def test_a_model_that_cannot_be_cut_so_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tensor=8 ranks: num_attention_heads=\d+ is not divisible by 8.*: use 1, 2"):
        preview(config_of(tmp_path, "rollout.vllm.tensor_parallel=8"))


@pytest.mark.usefixtures("_no_vllm")
def test_an_evaluation_says_so_before_it_loads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(config: RunConfig) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("beamline.runtime.subject.load_module", loaded)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        evaluate.evaluate_model("starter", [], None, [*SMALL, "rollout=vllm"], None)


# Going on


def saved(config: RunConfig) -> RunState:
    dumped = config.model_dump(mode="json")
    empty: dict[str, str] = {}
    return RunState(
        updates=1,
        skipped_updates=0,
        problems_drawn=4,
        environment=environment(config),
        problems=empty,
        base="",
        config=dumped,
    )


def test_a_run_goes_on_with_other_gpus_and_other_buckets(tmp_path: Path) -> None:
    began = saved(config_of(tmp_path))
    other = "{bucket_mb: 64, replicas: 2, devices: [3, 1], max_restarts: 7, start_seconds: 60, token_seconds: 9}"
    check_same(config_of(tmp_path, f"rollout.vllm={other}", "rollout.vllm.weights=group"), {}, "", began)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("vllm.dtype=float32", "rollout.vllm.dtype: bfloat16 -> float32"),
        ("vllm.quantization=fp8_per_tensor", "rollout.vllm.quantization: none -> fp8_per_tensor"),
        ("engine=local", "rollout.engine: vllm -> local"),
    ],
)
def test_a_run_does_not_go_on_with_other_numbers(tmp_path: Path, setting: str, said: str) -> None:
    began = saved(config_of(tmp_path))
    with pytest.raises(ResumeError, match=said):
        check_same(config_of(tmp_path, f"rollout.{setting}"), {}, "", began)


# Mismatch


@pytest.mark.usefixtures("_no_vllm")
def test_the_mismatch_of_vllm_is_refused_with_the_way_out() -> None:
    subject = find_subject("starter", ["rollout=vllm", *SMALL])
    with pytest.raises(ConfigError, match=r"--set rollout=local puts it in its place") as caught:
        measure(subject, [], 1, RunConsole(1, 1))
    assert caught.value.problems[0].key == "rollout.engine"
    assert find_subject("starter", ["rollout=vllm", *SMALL, "rollout=local"]).config.rollout.engine == "local"


# Evaluation


class Closing:
    """A sampler that knows whether it was closed."""

    def __init__(self, behind: Sampler) -> None:
        self.behind, self.closed = behind, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def close(self) -> None:
        self.closed = True
        self.behind.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Closing]:
    """The samplers that an evaluation makes."""
    samplers: list[Closing] = []
    make: Callable[..., Sampler] = evaluate.sampler_of

    def remembered(*arguments: Any) -> Closing:
        samplers.append(Closing(make(*arguments)))
        return samplers[-1]

    monkeypatch.setattr(evaluate, "sampler_of", remembered)
    return samplers


def test_an_evaluation_closes_its_sampler(made: list[Closing]) -> None:
    evaluate.evaluate_model("starter", [], None, SMALL, None)
    assert [each.closed for each in made] == [True]


def test_an_evaluation_that_fails_closes_its_sampler(made: list[Closing], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(evaluate, "sample", fails)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        evaluate.evaluate_model("starter", [], None, SMALL, None)
    assert [each.closed for each in made] == [True]


def test_engines_that_do_not_compute_what_the_model_does_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their processes would stay behind on the GPUs."""
    config = load_config(None, [*SMALL, "rollout=vllm"])
    module = engines.load_module(config)
    wrong: list[Closing] = []

    def sampler(config: RunConfig, channel: LocalChannel, logs: None) -> Closing:
        wrong.append(Closing(engines.local_sampler(load_config(None, list(SMALL)), channel)))
        return wrong[-1]

    monkeypatch.setattr(engines, "_sampler", sampler)
    engines.sampler_of(config, module, 0).close()
    give = engines._give  # and then the weights that evaluate change
    monkeypatch.setattr(engines, "_give", lambda *given: (give(*given), cast(Any, module).lm_head.weight.data.mul_(-1)))
    with pytest.raises(ProbeError, match=r"differ by .* Nothing was trained or measured"):
        engines.sampler_of(config, module, 0)
    assert [each.closed for each in wrong] == [True, True]


# What engines are told


class Built:
    """Stands for the fleet and for the sampler: keeps what it was made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Built]:
    """What a run's sampler is made of, where vLLM is installed."""
    monkeypatch.setattr(vllm, "find_spec", lambda name: "a module")
    monkeypatch.setattr(vllm, "Fleet", Built)
    monkeypatch.setattr(vllm, "VllmSampler", Built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(config: RunConfig, logs: Path | None) -> Built:
        sampler = engines._sampler(config, LocalChannel(), logs)
        assert isinstance(sampler, Built)
        return sampler

    return make


def launches_of(sampler: Built) -> list[Launch]:
    return list(sampler.arguments[0].arguments[0])


def test_each_engine_is_told_its_gpus_and_its_log(built: Callable[..., Built], tmp_path: Path) -> None:
    settings = "rollout.vllm={replicas: 2, tensor_parallel: 2, start_seconds: 60, token_seconds: 9, max_restarts: 3}"
    sampler = built(config_of(tmp_path, settings), tmp_path / "engines")
    launches = launches_of(sampler)
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in launches] == ["0,1", "2,3"]
    assert [each.log for each in launches] == [tmp_path / "engines" / f"vllm-{n}.log" for n in (0, 1)]
    assert {(each.start_seconds, each.token_seconds) for each in launches} == {(60, 9)}
    assert {each.command for each in launches} == {(sys.executable, "-P", "-m", "beamline.rollout.vllm.process")}
    assert sampler.arguments[0].arguments[1] == 3


def test_the_sampler_knows_what_its_engines_are_told(built: Callable[..., Built], tmp_path: Path) -> None:
    settings = ("seed=5", "rollout.vllm={tensor_parallel: 2, dtype: float32, bucket_mb: 3}")
    sampler = built(config_of(tmp_path, *settings), tmp_path)
    (launch,) = launches_of(sampler)
    _, shape, mesh, dtype, positions, seed, _, bucket_bytes, group_seconds = sampler.arguments
    assert (shape, mesh) == (BeamShape.from_folder(STARTER), Mesh(tensor=2))
    assert (dtype, positions, seed, bucket_bytes, group_seconds) == ("float32", 36, 5, 3 << 20, None)
    apart = built(config_of(tmp_path, "rollout.vllm={weights: group, token_seconds: 7}"), tmp_path)
    assert apart.arguments[-1] == 7
    told = launch.arguments
    assert (told["model"], told["max_model_len"], told["dtype"]) == (str(STARTER), 36, "float32")


@pytest.mark.parametrize("r3", [False, True])
def test_routes_are_asked_for_where_they_are_replayed(built: Callable[..., Built], tmp_path: Path, r3: bool) -> None:
    (launch,) = launches_of(built(config_of(tmp_path, f"policy.r3={str(r3).lower()}"), tmp_path))
    assert launch.arguments["enable_return_routed_experts"] == r3


def test_an_evaluation_keeps_the_logs_of_its_engines_apart(built: Callable[..., Built], tmp_path: Path) -> None:
    first, second = (launches_of(built(config_of(tmp_path), None))[0].log for _ in range(2))
    assert first.parent != second.parent
    assert first.parent.is_dir()
