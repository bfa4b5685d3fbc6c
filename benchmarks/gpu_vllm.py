"""Sampling by vLLM on one GPU: against vLLM's own `LLM.generate`, against the learner, and what weights and sleep cost.

    python -m benchmarks.gpu_vllm

A random Beam of 3.4 B parameters (1.1 B active) in BF16 for what is about speed; the trained starter for what is about
agreement. Both sides of a ratio are run in turn, in one process, with everything else idle.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BeamConfig, BeamForCausalLM

from beamline.chat import BeamChat
from beamline.config.policy import PolicyConfig
from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.learner.torch.evaluation import Evaluation, every_row
from beamline.model.beam import BeamShape
from beamline.policy import model
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Completion, Experience, Key, Request, SamplingParams
from beamline.rollout.collect import to_rollout
from beamline.rollout.vllm.sampler import VllmSampler, request_seed
from beamline.runtime.vllm import vllm_sampler
from beamline.starter import STARTER
from beamline.tasks.arithmetic import generate
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from benchmarks.harness import Summary, machine, parser

REQUESTS, PROMPT, RESPONSE, SAMPLES = 512, 64, 256, 8
LAYERS, VOCABULARY = 16, 32_768
NAPS = 10
TARGETS = {"throughput": 0.97, "module": 0.012, "module, replayed": 0.008, "creep": 0.01}


def large_config(layers: int = LAYERS) -> BeamConfig:
    """A Beam of 3.4 B parameters, 1.1 B of them active."""
    full = [(i + 1) % 6 == 0 or i == layers - 1 for i in range(layers)]
    return BeamConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=512,
        max_position_embeddings=4096,
        moe_intermediate_size=1024,
        num_experts=32,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        final_logit_softcapping=30.0,
        layer_types=["full_attention" if each else "sliding_attention" for each in full],
        mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    )


def random_module(config: BeamConfig, device: str) -> nn.Module:
    """Random weights in BF16, the router's in float32."""
    torch.manual_seed(0)
    with torch.device(device):
        module = BeamForCausalLM._from_config(config, dtype=torch.bfloat16)
    for name, tensor in module.state_dict().items():
        if ".mlp.gate." in name:
            owner = module.get_submodule(name.rpartition(".")[0])
            getattr(owner, name.rpartition(".")[2]).data = tensor.float()
    return cast(nn.Module, module)


def rollout_config(**vllm: Any) -> RolloutConfig:
    return RolloutConfig(engine="vllm", vllm=VllmConfig(**vllm))


def started(rollout: RolloutConfig, folder: Path, positions: int) -> tuple[VllmSampler, LocalChannel, float]:
    """A sampler over a model folder, and the seconds that its engine took to start."""
    channel, began = LocalChannel(), time.monotonic()
    shape = BeamShape.from_folder(folder)
    sampler = vllm_sampler(rollout, shape, folder, positions, 0, channel, True, None)
    return sampler, channel, time.monotonic() - began


def give(sampler: VllmSampler, channel: LocalChannel, moves: Any, source: Tensors, version: int) -> float:
    """Seconds of a load."""
    channel.send(moves, source)
    torch.cuda.synchronize()
    began = time.monotonic()
    sampler.receive(moves, version, unfinished="abort")
    return time.monotonic() - began


def large_requests(step: int) -> list[Request]:
    problems = [
        np.random.default_rng(i).integers(0, VOCABULARY, PROMPT).astype(np.int32) for i in range(REQUESTS // SAMPLES)
    ]
    return [
        Request(Key("train", step, f"{i}", sample), ids, SamplingParams(RESPONSE))
        for i, ids in enumerate(problems)
        for sample in range(SAMPLES)
    ]


def run(sampler: VllmSampler, asked: Sequence[Request]) -> list[Completion]:
    sampler.submit(asked)
    done: dict[Key, Completion] = {}
    while len(done) < len(asked):
        done |= {completion.key: completion for completion in sampler.poll(60.0)}
    return [done[request.key] for request in asked]


def tokens_a_second(work: Callable[[], int]) -> float:
    began = time.monotonic()
    tokens = work()
    return tokens / (time.monotonic() - began)


def throughput(sampler: VllmSampler, folder: Path, rounds: int) -> dict[str, Any]:
    """Ours against `LLM.generate` with the same settings, in turn; prompts are in both caches after the first round."""
    from vllm import LLM
    from vllm import SamplingParams as Theirs
    from vllm.inputs import TokensPrompt

    os.environ.update(VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_V2_MODEL_RUNNER="1")
    raw = LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=1024, max_num_seqs=REQUESTS,
        logprobs_mode="processed_logprobs", enable_return_routed_experts=True, enable_prefix_caching=True,
        hf_overrides={"head_dtype": "float32"}, generation_config="vllm", gpu_memory_utilization=0.4,
        disable_log_stats=True,
    )  # fmt: skip

    def theirs(step: int) -> int:
        asked = large_requests(step)
        params = [
            Theirs(max_tokens=RESPONSE, seed=request_seed(0, each.key), logprobs=0, detokenize=False) for each in asked
        ]
        prompts = [TokensPrompt(prompt_token_ids=each.prefix_ids.tolist()) for each in asked]
        outputs = raw.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].routed_experts) == PROMPT + RESPONSE - 1 for output in outputs)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def ours(step: int) -> int:
        return sum(len(completion.token_ids) for completion in run(sampler, large_requests(step)))

    found = [
        (tokens_a_second(partial(ours, step)), tokens_a_second(partial(theirs, step))) for step in range(rounds + 1)
    ]
    own, other = zip(*found[1:], strict=True)
    ratio = Summary.of([a / b for a, b in found[1:]])
    raw.llm_engine.engine_core.shutdown()
    return {
        "ours_tokens_per_s": Summary.of(own).__str__(),
        "llm_generate_tokens_per_s": Summary.of(other).__str__(),
        "ratio": [ratio.min, ratio.median, ratio.max],
        "target": TARGETS["throughput"],
        "met": ratio.median >= TARGETS["throughput"],
    }


def copy_rate() -> float:
    """Bytes copied a second from device memory to device memory."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 10 * len(source) / (time.monotonic() - began)


def loads(sampler: VllmSampler, channel: LocalChannel, module: nn.Module) -> dict[str, Any]:
    """Loading every weight in place, and whether the same weights change anything."""
    tensors, moves = named_tensors(module), plan(module_layout(module), sampler.layout("full"))
    size = sum(tensor.nbytes for tensor in tensors.values())
    source = Tensors(tensors)
    seconds = [give(sampler, channel, moves, source, version) for version in range(6)]
    probe = large_requests(99)[:SAMPLES]
    before = run(sampler, probe)
    seconds.append(give(sampler, channel, moves, source, 7))
    again = run(sampler, probe)
    rate = copy_rate()
    limit = 0.2 + size / (0.3 * rate)
    return {
        "bytes": size,
        "first_seconds": seconds[0],
        "seconds": [min(seconds[1:]), float(np.median(seconds[1:])), max(seconds[1:])],
        "copy_bytes_per_s": rate,
        "limit_seconds": limit,
        "met": float(np.median(seconds[1:])) <= limit,
        "same_bits_after_the_same_weights": all(
            a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
            for a, b in zip(before, again, strict=True)
        ),
    }


def naps(sampler: VllmSampler, channel: LocalChannel, module: nn.Module) -> dict[str, Any]:
    """Sleep without anything, wake, load, draw; ten times."""
    source, moves = Tensors(named_tensors(module)), plan(module_layout(module), sampler.layout("full"))
    device, host, slept, woke, asleep = [], [], [], [], []
    for nap in range(NAPS + 1):
        sampler.sleep(2)
        assert sampler.memory is not None
        slept.append(sampler.memory.seconds)
        asleep.append(sampler.memory.after)
        sampler.wake(["weights"])
        woke.append(sampler.memory.seconds)
        give(sampler, channel, moves, source, 100 + nap)
        sampler.wake(["cache"])
        woke[-1] += sampler.memory.seconds
        run(sampler, large_requests(200 + nap)[:SAMPLES])
        device.append(sampler.memory.after)
        host.append(resident(sampler._fleet.replicas[0].pid))
    creep = [(values[-1] - values[1]) / values[1] for values in (device, host)]
    return {
        "device_bytes_awake": device,
        "device_bytes_asleep": asleep,
        "host_bytes": host,
        "device_creep": creep[0],
        "host_creep": creep[1],
        "sleep_seconds": float(np.median(slept)),
        "wake_seconds": float(np.median(woke)),
        "met": max(creep) <= TARGETS["creep"],
    }


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def agreement(rollout: RolloutConfig) -> tuple[dict[str, Any], float]:
    """Mean |delta log p| on responses of the starter, by the Hugging Face module and by the learner."""
    sampler, channel, seconds = started(rollout, STARTER, 112)
    module = model.load(STARTER, "float32")
    moves = plan(module_layout(module), sampler.layout("full"))
    give(sampler, channel, moves, Tensors(named_tensors(module)), 0)
    chat = BeamChat(STARTER, {})
    problems = [chat.prompt_ids(problem.messages) for problem in generate(0, "train", 64, [3])]
    asked = [
        Request(Key("train", 1, str(i), sample), ids, SamplingParams(80, stop_ids=chat.stop_ids))
        for i, ids in enumerate(problems)
        for sample in range(4)
    ]
    rollouts = [to_rollout(request, done) for request, done in zip(asked, run(sampler, asked), strict=True)]
    sampler.close()
    experiences = [Experience(each, 0.0) for each in rollouts]
    drawn = np.concatenate([each.response_logprobs for each in rollouts]).astype(np.float64)

    def difference(reference: nn.Module, parity: bool, replayed: bool) -> float:
        evaluation = Evaluation(reference, PolicyConfig(parity=parity, r3=replayed))
        found, _ = evaluation.of_sequences(experiences, 4096, every_row)
        theirs = np.concatenate([v[r.policy_mask[1:]] for v, r in zip(found, rollouts, strict=True)])
        return float(np.abs(theirs - drawn).mean())

    rounded = model.load(STARTER, "bfloat16")
    found = {
        "tokens": len(drawn),
        "module": difference(rounded, parity=False, replayed=False),
        "module, replayed": difference(rounded, parity=False, replayed=True),
        "learner": difference(module, parity=True, replayed=False),
        "learner, replayed": difference(module, parity=True, replayed=True),
    }
    met = all(
        found[f"{side}{how}"] <= TARGETS[f"module{how}"] for side in ("module", "learner") for how in ("", ", replayed")
    )
    return found | {"met": met}, seconds


def toy(folder: Path) -> dict[str, float]:
    """A random Beam of 8 layers, with vLLM's stock settings and with ours, against the Hugging Face module."""
    from vllm import LLM
    from vllm import SamplingParams as Theirs
    from vllm.inputs import TokensPrompt

    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it is never used where requests have seeds, but compiled
    module: Any = random_module(large_config(8), "cuda")
    model.save(module, folder, "bfloat16")
    prompts = [np.random.default_rng(i).integers(0, VOCABULARY, PROMPT) for i in range(32)]
    found = {}
    for name, overrides in (("stock", {}), ("float32 head", {"hf_overrides": {"head_dtype": "float32"}})):
        raw = LLM(
            str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=4 << 30, enforce_eager=True, generation_config="vllm", **overrides,
        )  # fmt: skip
        asked = [TokensPrompt(prompt_token_ids=ids.tolist()) for ids in prompts]
        params = [Theirs(max_tokens=64, seed=i, logprobs=0, detokenize=False) for i in range(len(prompts))]
        differences = []
        for ids, output in zip(prompts, raw.generate(asked, params, use_tqdm=False), strict=True):
            one = output.outputs[0]
            tokens = np.array(one.token_ids)
            theirs = np.array([step[token].logprob for step, token in zip(one.logprobs, tokens, strict=True)])
            sequence = torch.from_numpy(np.concatenate([ids, tokens])).cuda()[None]
            with torch.no_grad():
                hidden = module.model(sequence[:, :-1], use_cache=False).last_hidden_state[0, PROMPT - 1 :]
                logits = torch.mm(hidden, module.lm_head.weight.t(), out_dtype=torch.float32)
                logprobs = (30 * torch.tanh(logits / 30)).log_softmax(-1).cpu().numpy()
            differences.append(np.abs(logprobs[np.arange(len(tokens)), tokens] - theirs))
        found[name] = float(np.concatenate(differences).mean())
        raw.llm_engine.engine_core.shutdown()
    return found


SECTIONS = ("large", "starter", "toy")


def main() -> None:
    """Measure what is asked for, keep it in ``gpu-vllm.json`` beside what was measured before, and show the targets."""
    made = parser(__doc__, rounds=2)
    made.add_argument("--only", choices=SECTIONS, action="append", help="this part alone; may be given several times")
    options = made.parse_args()
    if not torch.cuda.is_available():
        made.error("this needs an NVIDIA GPU, and torch finds none")
    target = options.results / "gpu-vllm.json"
    found: dict[str, Any] = json.loads(target.read_text()) if options.only and target.is_file() else {}
    found["command"] = "python -m benchmarks.gpu_vllm"
    found["machine"] = machine() | {"gpu": torch.cuda.get_device_name(0), "vllm": version("vllm")}

    def keep(name: str, figures: Any) -> None:
        found[name] = figures
        options.results.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(found, indent=2) + "\n")
        Console().print_json(json.dumps({name: figures}))

    folder = Path(tempfile.mkdtemp(prefix="beamline-vllm-"))
    wanted = options.only or SECTIONS
    if "large" in wanted:
        of_large(folder / "large", options.rounds, keep)
    if "starter" in wanted:
        figures, seconds = agreement(rollout_config(memory_share=0.1))
        keep("starter", figures | {"start_seconds": seconds})
    if "toy" in wanted:
        keep("toy", toy(folder / "toy"))
    table = Table("what", "met", title="vLLM on one GPU")
    for name, figures in found.items():
        if isinstance(figures, dict) and "met" in figures:
            table.add_row(name, str(figures["met"]))
    Console().print(table)


def of_large(folder: Path, rounds: int, keep: Callable[[str, Any], None]) -> None:
    """What is measured on the large model, by one engine."""
    compiled = (Path.home() / ".triton" / "cache").exists()
    module = random_module(large_config(), "cuda")
    model.save(module, folder, "bfloat16")
    sampler, channel, seconds = started(rollout_config(memory_share=0.4, max_sequences=REQUESTS), folder, 1024)
    keep("start", {"seconds": seconds, "kernels were compiled before": compiled})
    keep("load", loads(sampler, channel, module))
    keep("sleep", naps(sampler, channel, module))
    keep("throughput", throughput(sampler, folder, rounds))
    sampler.close()
    del module
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
