"""Where the time goes: products against torch's, the stages of a decode step, the stages of an update.

    python -m benchmarks.profile

Products and the decode step run on one thread, as each thread of the sampler does; medians over ``--rounds`` calls. A
decode step has 128 rows, all at one position of sequences of their own; its stages are called one after the other on
the step's own arrays, layer by layer, so that each finds the caches as it would. An update has the 64 ragged sequences
of the learner's benchmark on two threads; its stages are the autograd functions that torch's profiler sees.
"""

import time
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from beamline.kernels import attention, linear
from beamline.model.beam import BeamShape
from beamline.rollout.local.beam import BeamDecoder, Numerics, forward
from beamline.rollout.local.worker import ROWS
from beamline.starter import STARTER
from benchmarks.harness import median_seconds, parser, write
from benchmarks.learner import LOSS, learner_and_batch

SHAPES = ((128, 64, 384), (128, 128, 64), (32, 64, 128), (8, 64, 384), (128, 512, 512), (128, 1024, 1024))
POSITIONS = (10, 80, 200)
PLACES, SLOTS = 256, 512
STAGES = {
    "attention": "_Attention",
    "linear layers": "_Linear",
    "router": "_Route",
    "SwiGLU": "_Swiglu",
    "sum of experts": "_Mix",
    "norms and residuals": "_Norm",
    "head": "_Head",
    "optimizer": "Optimizer.step#AdamW.step",
}


def main() -> None:
    """Measure and write the results."""
    arguments = parser(__doc__, rounds=30).parse_args()
    torch.set_num_threads(1)
    products = {f"{n}x{k}x{m}": _product(n, k, m, arguments.rounds) for n, k, m in SHAPES}
    decode = {str(position): _decode(position, arguments.rounds) for position in POSITIONS}
    update = _update()
    write("profile", {"products": products, "decode": decode, "update": update}, _table(products, decode, update),
          arguments.results)  # fmt: skip


def _product(rows: int, depth: int, columns: int, rounds: int) -> dict[str, float]:
    """GFLOP/s of ours and of torch."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(size).astype(np.float32) for size in ((rows, depth), (depth, columns)))
    out = np.empty((rows, columns), np.float32)
    theirs = [torch.from_numpy(array) for array in (x, w, out)]
    flat = [array.reshape(-1) for array in (x, w, out)]

    def ours() -> None:
        linear.product(flat[0], 0, depth, flat[1], 0, columns, flat[2], 0, columns, rows, columns, depth, False)

    work = 2e-9 * rows * depth * columns
    return {
        "ours_gflops": work / median_seconds(ours, rounds),
        "torch_gflops": work / median_seconds(lambda: torch.mm(theirs[0], theirs[1], out=theirs[2]), rounds),
    }


def _decode(position: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step, and of its attention (reading and writing the cache)."""
    shape = BeamShape.from_folder(STARTER)
    decoder = BeamDecoder(shape, Numerics(), 10000.0, PLACES)
    for tensor in decoder.tensors.values():
        tensor.normal_(0, 0.1)
    cache, space = decoder.new_cache(SLOTS, PLACES), decoder.new_workspace(ROWS, PLACES)
    tokens = np.arange(ROWS, dtype=np.int32) % shape.vocab_size
    positions, slots = np.full(ROWS, position), np.arange(ROWS)
    routes = np.empty((ROWS, len(shape.moe_layers), shape.num_experts_per_tok), np.uint8)
    traits, size = decoder.traits, shape.head_dim
    kv_heads, group = shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
    v_first = (shape.num_attention_heads + kv_heads) * size

    def step() -> None:
        forward(decoder.weights, traits, space, cache.keys, cache.values, cache.at, cache.places, tokens, positions,
                slots, routes, False)  # fmt: skip

    def attend() -> None:
        for layer, (at, places) in enumerate(zip(cache.at, cache.places, strict=True)):
            window = traits.window if traits.sliding[layer] else PLACES
            attention.store(cache.keys, cache.values, at, places, space.k, space.qkvg, v_first, slots, positions,
                            kv_heads, size, False)  # fmt: skip
            attention.attend(space.q, cache.keys, cache.values, at, places, window, slots, positions, kv_heads, group,
                             size, space.scores, space.attended, False)  # fmt: skip

    return {"step_ms": 1e3 * median_seconds(step, rounds), "attention_ms": 1e3 * median_seconds(attend, rounds)}


def _update() -> dict[str, float]:
    """Shares of an update's time by stage, forward and backward."""
    learner, batch = learner_and_batch()
    learner.step(learner.prepare(batch, LOSS))
    prepared = learner.prepare(batch, LOSS)
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        learner.step(prepared)
    total = 1e6 * (time.perf_counter() - start)
    spent = {event.key: event.cpu_time_total for event in seen.key_averages()}
    shares = {}
    for stage, name in STAGES.items():
        for label, wanted in (("forward", name), ("backward", f"{name}Backward")):
            if wanted in spent:
                shares[f"{stage}, {label}" if name.startswith("_") else stage] = spent[wanted] / total
    shares["norms and residuals, forward"] += spent["_NormedResidual"] / total
    shares["norms and residuals, backward"] += spent["_NormedResidualBackward"] / total
    return shares | {"rest": 1 - sum(shares.values())}


def _table(products: dict[str, Any], decode: dict[str, Any], update: dict[str, float]) -> Table:
    table = Table("what", "figure", title="where the time goes")
    for shape, found in products.items():
        table.add_row(f"product {shape}", f"{found['ours_gflops']:.0f} GFLOP/s, torch {found['torch_gflops']:.0f}")
    for position, found in decode.items():
        share = found["attention_ms"] / found["step_ms"]
        table.add_row(f"decode, position {position}", f"{found['step_ms']:.1f} ms, attention {share:.0%}")
    for stage, share in update.items():
        table.add_row(f"update: {stage}", f"{share:.1%}")
    return table


if __name__ == "__main__":
    main()
