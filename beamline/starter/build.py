"""Building a starter: a warm start on worked problems from a fixed seed, that leaves much to learn.

The steps are clean and training stops when a third of the sampled answers is right, so that reinforcement learning can
go beyond what the model does when it always takes its most likely token. The loss is taken at a temperature above 1:
sampling at 1 is then sharper than what was trained, and seldom slips out of the format.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from rich.progress import Progress
from torch import Tensor, nn
from transformers import BeamConfig

from beamline.chat import BeamChat
from beamline.errors import BeamlineError
from beamline.model.beam import BeamShape
from beamline.policy import attention, head, model
from beamline.policy.positions import rope_theta
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import SamplingParams
from beamline.rollout.collect import Job, sample
from beamline.rollout.local import LocalSampler, Numerics
from beamline.runtime.determinism import cpu_family, make_deterministic
from beamline.starter.lessons import COURSES, Lesson
from beamline.starter.tokenizer import vocab_size, write_tokenizer
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors

_RESPONSE_LIMIT = 96
_SAMPLING_SECONDS = 600.0  # the longest wait for the next response of a check


class WarmStartError(BeamlineError, RuntimeError):
    """The warm start ended before the model was good enough."""


@dataclass(frozen=True, slots=True)
class Warmup:
    """The numbers of the warm start."""

    seed: int = 1
    batch: int = 64
    most_steps: int = 400
    lr: float = 3e-3
    temperature: float = 1.3
    first_check: int = 100
    check_every: int = 5
    check_problems: int = 512
    stop_accuracy: float = 0.35
    bias_rate: float = 1e-3
    threads: int = 2


WARMUPS = {"starter": Warmup(), "starter-math": Warmup(most_steps=600)}


def beam_config(vocabulary: int) -> BeamConfig:
    """One dense and six MoE layers, 1.5 M parameters; widths stay multiples of 32 when cut over two ranks."""
    full = {2, 5, 6}
    return BeamConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
        max_position_embeddings=1024,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        layer_types=["full_attention" if i in full else "sliding_attention" for i in range(7)],
        mlp_layer_types=["dense"] + ["sparse"] * 6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    )


def build_starter(name: str, folder: Path, warmup: Warmup | None = None) -> dict[str, Any]:
    """Train a packaged starter and write it to ``folder`` with ``starter.json``: how it was made, and its hash.

    Bit-identical on one CPU family with one set of versions.

    Raises:
        WarmStartError: the warm start did not reach the accuracy at which it stops.
    """
    course, warmup = COURSES[name], warmup or WARMUPS[name]
    make_deterministic(warmup.threads)
    torch.manual_seed(warmup.seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, course.words)
    chat = BeamChat(folder, dict(course.template_arguments))
    module = model.build(beam_config(vocab_size(course.words)), "float32")
    with torch.no_grad():
        cast(Any, module).model.embed_tokens.weight.normal_(0.0, 1.0)  # learns much faster than with 0.02
    started = time.monotonic()
    steps, accuracy, well_formed = _train(module, chat, course.lessons, warmup)
    model.save(module, folder, "bfloat16")
    record = {
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "warmup": asdict(warmup),
        "steps": steps,
        "sampled_accuracy": accuracy,
        "well_formed": well_formed,
        "parameters": sum(t.numel() for t in named_tensors(module).values()),
        "cpu": cpu_family(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / "starter.json").write_text(json.dumps(record, indent=2) + "\n")
    return record | {"seconds": round(time.monotonic() - started)}


def _train(
    module: nn.Module, chat: BeamChat, lessons: Callable[[int, int], Sequence[Lesson]], warmup: Warmup
) -> tuple[int, float, float]:
    """Learn until the stop; returns steps, sampled accuracy and the share of well-formed responses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=warmup.lr, weight_decay=0.01)
    used = warmup.most_steps * warmup.batch
    taught = lessons(warmup.seed, warmup.check_problems + used)  # each is seen once
    held_out, seen = taught[: warmup.check_problems], taught[warmup.check_problems :]
    batches = ([_example(chat, each) for each in seen[at : at + warmup.batch]] for at in range(0, used, warmup.batch))
    with _BalancedExperts(module, warmup.bias_rate) as balance, Progress() as progress:
        task = progress.add_task("warm start", total=warmup.most_steps)
        for step, batch in enumerate(batches, start=1):
            loss = _loss(module, warmup.temperature, *batch)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            balance.update()
            progress.update(task, advance=1)
            if step % warmup.check_every == 0 and step >= warmup.first_check:
                accuracy, formed = sampled_accuracy(module, chat, held_out, warmup.seed)
                progress.console.print(
                    f"step {step}: loss {loss.item():.3f}, sampled {accuracy:.1%}, well formed {formed:.1%}"
                )
                if accuracy >= warmup.stop_accuracy:
                    return step, accuracy, formed
    raise WarmStartError(f"the warm start did not reach {warmup.stop_accuracy:.0%} in {warmup.most_steps} steps")


def _example(chat: BeamChat, lesson: Lesson) -> tuple[list[int], int]:
    """Token ids of a whole conversation, and how many of them are the prompt."""
    prompt = chat.prompt_ids(lesson.problem.messages).tolist()
    response = (
        f"<|channel|>analysis<|message|>{lesson.steps}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{lesson.final}<|return|>"
    )
    return prompt + chat.encode(response), len(prompt)


def _loss(module: nn.Module, temperature: float, *examples: tuple[list[int], int]) -> Tensor:
    """Mean cross-entropy of the response tokens."""
    rows = [len(ids) - 1 for ids, _ in examples]
    borders = np.concatenate([[0], np.cumsum(rows)]).tolist()
    inputs = torch.tensor([i for ids, _ in examples for i in ids[:-1]])
    targets = torch.tensor([i for ids, _ in examples for i in ids[1:]])
    positions = torch.cat([torch.arange(n) for n in rows])
    trained = torch.cat([torch.arange(n) >= prompt - 1 for n, (_, prompt) in zip(rows, examples, strict=True)])
    hidden = model.hidden_states(module, inputs, positions, attention.Packing.of(borders))[trained]
    cap, weight = cast(Any, module).config.final_logit_softcapping, cast(Any, module).lm_head.weight
    logits = head.soft_cap(hidden @ weight.T, cap) / torch.full((len(hidden), 1), temperature)
    return -torch.log_softmax(logits, dim=-1).gather(1, targets[trained][:, None]).squeeze(1).mean()


class _BalancedExperts:
    """Loss-free balancing: after each step an expert's selection bias moves against its load (arXiv 2408.15664)."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        self._rate = rate
        self._gates = [layer.mlp.gate for layer in cast(Any, module).model.layers if hasattr(layer.mlp, "gate")]
        self._loads: dict[nn.Module, Tensor] = {}

    def __enter__(self) -> "_BalancedExperts":
        self._hooks = [gate.register_forward_hook(self._record) for gate in self._gates]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, gate: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        experts = cast(Any, gate).num_experts
        self._loads[gate] = torch.bincount(output[2].flatten(), minlength=experts).float()

    def update(self) -> None:
        for gate in self._gates:
            load = self._loads[gate]
            cast(Any, gate).e_score_correction_bias.add_(self._rate * torch.sign(load.mean() - load))


def sampled_accuracy(module: nn.Module, chat: BeamChat, lessons: Sequence[Lesson], seed: int) -> tuple[float, float]:
    """Share of right answers, and of well-formed responses, of one sample a problem at temperature 1."""
    longest = max(len(chat.prompt_ids(lesson.problem.messages)) for lesson in lessons)
    config = cast(Any, module).config
    channel = LocalChannel()
    theta = rope_theta(config)
    shape = BeamShape.from_config(config.to_dict())
    sampler = LocalSampler(shape, Numerics(), theta, 256, longest + _RESPONSE_LIMIT, seed, channel)
    weights = plan(module_layout(module), sampler.layout("full"))
    channel.send(weights, Tensors(named_tensors(module)))
    sampler.receive(weights, 0, "keep")
    params = SamplingParams(_RESPONSE_LIMIT, stop_ids=chat.stop_ids)
    job = Job("eval", 0, [lesson.problem for lesson in lessons], 1, params)
    groups = sample(sampler, job, chat, _SAMPLING_SECONDS)
    said = [chat.channels(rollout.token_ids[rollout.policy_mask]) for group in groups for rollout in group.rollouts]
    right = [channels.final == lesson.final for channels, lesson in zip(said, lessons, strict=True)]
    return sum(right) / len(lessons), sum(channels.well_formed for channels in said) / len(lessons)
