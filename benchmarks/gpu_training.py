"""Training every weight on one GPU: both learners, the Hugging Face module beside them, and the GPU's matrix rate.

    python -m benchmarks.gpu_training

A random Beam of 3.4 B parameters (1.1 B active) in BF16 with float32 weights and moments. An update is a whole one: the
pass for the old log-probabilities, forward and backward over packed sequences, and AdamW. Its share of the matrix rate
counts 6 operations for each active parameter and token, as if the pass before it and attention cost nothing.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BeamConfig

from beamline.algorithms.loss import LossConfig
from beamline.config.algorithm import AlgorithmConfig
from beamline.config.policy import PolicyConfig, Recompute
from beamline.config.schema import LearnerConfig, OptimizerConfig, RunConfig
from beamline.learner.learner import Learner
from beamline.learner.torch import TorchLearner
from beamline.policy import model
from beamline.records import Experience, Key, Rollout, Turn
from beamline.runtime.determinism import make_deterministic
from beamline.runtime.megatron import megatron_learner
from beamline.transfer.local import LocalChannel
from benchmarks.gpu_vllm import VOCABULARY, large_config, random_module
from benchmarks.harness import THREADS, Summary, machine, parser

TOKENS, PROMPT = 8192, 64  # that a sequence is evaluated at, and those of its prompt
MICRO_BATCH = 2 * TOKENS
HEAD_ROWS = 8192
TARGETS = {"megatron": "0.35", "torch": "0.28", "forward": "2.5", "asleep": "1e+09"}


def sequences(number: int, seed: int) -> list[Experience]:
    """So many sequences of random tokens, which a learner evaluates at ``TOKENS`` rows each."""
    rng, size = np.random.default_rng(seed), TOKENS + 1
    chosen = np.arange(size) >= PROMPT
    return [
        Experience(
            Rollout(
                key=Key("train", seed, str(i), 0),
                token_ids=rng.integers(0, VOCABULARY, size).astype(np.int32),
                policy_mask=chosen,
                logprobs=np.where(chosen, -10, 0).astype(np.float32),
                versions=np.where(chosen, 1, -1).astype(np.int32),
                routes=None,
                turns=(Turn("prompt", 0, PROMPT), Turn("policy", PROMPT, size)),
                finish="stop",
                temperature=1.0,
            ),
            float(rng.normal()),
        )
        for i in range(number)
    ]


def active_parameters(config: BeamConfig, module: nn.Module) -> tuple[int, int]:
    """All parameters, and those that a token is multiplied with: not the table of embeddings, of which it has a row."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    chosen = experts * config.num_experts_per_tok // config.num_experts
    whole = sum(sizes.values())
    return whole, whole - sizes["model.embed_tokens.weight"] - experts + chosen


def matrix_rate() -> float:
    """Operations a second of a product of two BF16 matrices of 8192 x 8192."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(20):
            left @ right

    return 20 * 2 * 8192**3 / min(seconds(products) for _ in range(5))


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, until the GPU is done, and what it gives."""
    torch.cuda.synchronize()
    began = time.monotonic()
    found = action()
    torch.cuda.synchronize()
    return time.monotonic() - began, found


def seconds(action: Callable[[], Any]) -> float:
    """How long it takes."""
    return timed(action)[0]


def memory_in_use() -> int:
    """Bytes of the device that are taken, by whomever."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def megatron(
    folder: Path, settings: LearnerConfig, recompute: Recompute = "none"
) -> AbstractContextManager[Learner[Any]]:
    """The learner over Megatron-Core, of one rank, as a run has it."""
    run = RunConfig(
        policy=PolicyConfig(dtype="bfloat16", recompute=recompute, head_chunk_rows=HEAD_ROWS),
        learner=settings.model_copy(update={"engine": "megatron"}),
    )
    return megatron_learner(run, folder, LocalChannel())


def embedded(folder: Path, settings: LearnerConfig) -> AbstractContextManager[Learner[Any]]:
    """The torch learner."""
    policy = PolicyConfig(parity=False, dtype="bfloat16", device="cuda", head_chunk_rows=HEAD_ROWS)
    return nullcontext(TorchLearner(model.load(folder, "bfloat16"), policy, settings, LocalChannel()))


LEARNERS: dict[str, Callable[..., AbstractContextManager[Learner[Any]]]] = {
    "megatron": megatron,
    "megatron, selective recompute": partial(megatron, recompute="selective"),
    "megatron, full recompute": partial(megatron, recompute="full"),
    "torch": embedded,
}


def of_learner(learner: Learner[Any], batches: Sequence[list[Experience]], active: int, bare: int) -> dict[str, Any]:
    """Updates, of which the first is not counted, the pass before them, and sleep."""
    algorithm = AlgorithmConfig.model_validate({"prompts_per_update": 16, "guard": {"mismatch": None}})
    loss = LossConfig(algorithm, TOKENS, seed=0, on_policy=False)
    rate, passes, updates = matrix_rate(), [], []
    tokens = sum(sequence.rows for sequence in batches[0])
    for batch in batches:
        took, prepared = timed(partial(learner.prepare, batch, loss))
        passes.append(took)
        updates.append(seconds(partial(learner.step, prepared)))
    awake = memory_in_use()
    peak = torch.cuda.max_memory_allocated()
    first = seconds(learner.sleep), memory_in_use() - bare, seconds(learner.wake)
    again = seconds(learner.sleep), memory_in_use() - bare, seconds(learner.wake)
    wholes = [one + other for one, other in zip(passes[1:], updates[1:], strict=True)]
    shares = Summary.of([6 * active * tokens / whole / rate for whole in wholes])
    return {
        "matrix_operations_per_s": rate,
        "tokens_per_update": tokens,
        "first_update_seconds": passes[0] + updates[0],
        "pass_seconds": median(passes[1:]),
        "update_seconds": median(updates[1:]),
        "tokens_per_s": tokens / median(wholes),
        "share_of_matrix_rate": [shares.min, shares.median, shares.max],
        "share_without_the_pass": 6 * active * tokens / median(updates[1:]) / rate,
        "update_over_pass": median(updates[1:]) / median(passes[1:]),
        "peak_bytes": peak,
        "bytes_awake": awake - bare,
        "bytes_asleep": [first[1], again[1]],
        "sleep_seconds": [first[0], again[0]],
        "wake_seconds": [first[2], again[2]],
    }


def of_module(config: BeamConfig, active: int, rounds: int) -> dict[str, Any]:
    """Forward and backward of the Hugging Face module as it is, over 8 sequences of 2,048 tokens, without an update."""
    module: Any = random_module(config, "cuda")
    ids, rate = torch.randint(0, VOCABULARY, (8, 2048), device="cuda"), matrix_rate()

    def both() -> None:
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        module.zero_grad(set_to_none=True)

    took = [seconds(both) for _ in range(rounds + 1)][1:]
    return {"share_of_matrix_rate": 6 * active * ids.numel() / median(took) / rate, "matrix_operations_per_s": rate}


SECTIONS = (*LEARNERS, "module")


def shown(found: dict[str, Any]) -> Table:
    """What was found of each learner, beside what is aimed at."""
    table = Table("what", "found", "aim", title="training on one GPU")
    for name in (name for name in LEARNERS if name in found):
        figures = found[name]
        rows = {
            "share of the matrix rate": (f"{figures['share_of_matrix_rate'][1]:.3f}", TARGETS.get(name, "")),
            "update / pass": (f"{figures['update_over_pass']:.2f}", TARGETS["forward"]),
            "peak bytes": (f"{figures['peak_bytes']:.4g}", ""),
            "bytes asleep": (f"{max(figures['bytes_asleep']):.3g}", TARGETS["asleep"]),
        }
        for what, (measured, aim) in rows.items():
            table.add_row(f"{name}: {what}", measured, aim)
    return table


def main() -> None:
    """Measure what is asked for, keep it in ``gpu-training.json`` beside what was measured before."""
    made = parser(__doc__, rounds=3)
    made.add_argument("--only", choices=SECTIONS, action="append", help="this part alone; may be given several times")
    made.add_argument("--sequences", type=int, default=16, help="of 8,192 tokens, in an update")
    options = made.parse_args()
    if not torch.cuda.is_available():
        made.error("this needs an NVIDIA GPU, and torch finds none")
    make_deterministic(THREADS)  # as a run does
    target = options.results / "gpu-training.json"
    found: dict[str, Any] = json.loads(target.read_text()) if options.only and target.is_file() else {}
    found["command"] = "python -m benchmarks.gpu_training"
    found["machine"] = machine() | {"gpu": torch.cuda.get_device_name(0), "megatron-core": version("megatron-core")}
    config = large_config()
    config.max_position_embeddings = 2 * TOKENS

    with TemporaryDirectory(prefix="beamline-training-") as folder:
        module = random_module(config, "cuda")
        whole, active = active_parameters(config, module)
        model.save(module, Path(folder), "bfloat16")
        del module
        found["parameters"], found["active_parameters"] = whole, active
        settings = LearnerConfig(micro_batch_tokens=MICRO_BATCH, optimizer=OptimizerConfig(lr=1e-6))
        batches = [sequences(options.sequences, seed) for seed in range(options.rounds + 1)]
        for name in options.only or SECTIONS:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if name == "module":
                found[name] = of_module(config, active, options.rounds)
            else:
                bare = memory_in_use()
                with LEARNERS[name](Path(folder), settings) as learner:
                    found[name] = of_learner(learner, batches, active, bare)
                del learner
            options.results.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(found, indent=2) + "\n")
            Console().print_json(json.dumps({name: found[name]}))
    Console().print(shown(found))


if __name__ == "__main__":
    main()
