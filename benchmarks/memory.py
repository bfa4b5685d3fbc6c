"""Memory of sampling: 512 sequences x 256 tokens against what any sampler of this kind has to hold.

    python -m benchmarks.memory

Needs Linux. Measured in a fresh process: the most resident memory while a sampler is made, takes weights and samples,
less what was resident just before. By then everything is imported, another small sampler has sampled and is gone, its
freed memory is given back to the system, and the module that the weights come from is loaded. The completions are held
to the end.

The floor counts, in bytes of the types that they have:

- weights: every tensor of the model, once;
- cache: keys and values of each sequence's tokens, all of them in a full layer, the last ``sliding_window`` in a
  sliding one; the last drawn token has none;
- records: for each token of a sequence its id, for each drawn one also the log-probability and the version of the
  weights (4 bytes each), for each evaluated one the chosen experts of each layer (1 byte each); held once;
- activations: what is alive at the widest place of one decode step of all sequences: the residual stream with either
  the projections and result of attention, or the chosen experts' inputs, inner values and outputs, or logits and
  probabilities. The prefill step is not counted: it can be cut as small.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from beamline.chat import BeamChat
from beamline.model.beam import BeamShape, tensors
from beamline.runtime.engines import DTYPE, load_module, sampler_of
from beamline.runtime.timing import peak_memory
from beamline.starter import STARTER
from beamline.transfer.dtypes import TORCH_DTYPES
from benchmarks.harness import parser, write
from benchmarks.workload import as_ours, problems, requests, run_config, sample

SEQUENCES, TOKENS = 512, 256
LIMIT = 1.2


def main() -> None:
    """Measure in a fresh process and write the results."""
    options = parser(__doc__)
    options.add_argument("--measure", action="store_true", help="measure in this process, and print it as JSON")
    arguments = options.parse_args()
    if arguments.measure:
        print(json.dumps(_measure()))
        return
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--measure"], check=True, capture_output=True, text=True
    )
    measured = json.loads(child.stdout.splitlines()[-1])
    floor = floor_bytes(BeamShape.from_folder(STARTER), SEQUENCES, measured["prompt_tokens"], TOKENS)
    total = sum(floor.values())
    record = {
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        **measured,
        "floor_bytes": floor | {"total": total},
        "ratio": measured["used_bytes"] / total,
        "limit": LIMIT,
    }
    write("memory", record, _table(record), arguments.results)


def floor_bytes(shape: BeamShape, sequences: int, prompt: int, drawn: int) -> dict[str, int]:
    """The parts of the floor."""
    width = TORCH_DTYPES[DTYPE].itemsize
    evaluated = prompt + drawn - 1
    kept = [
        min(evaluated, shape.sliding_window) if kind == "sliding_attention" else evaluated for kind in shape.layer_types
    ]
    key_value = 2 * shape.num_key_value_heads * shape.head_dim * width
    routes = evaluated * len(shape.moe_layers) * shape.num_experts_per_tok
    return {
        "weights": sum(prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize for spec in tensors(shape, DTYPE)),
        "cache": sequences * sum(kept) * key_value,
        "records": sequences * (4 * (prompt + drawn) + 8 * drawn + routes),
        "activations": sequences * _widest(shape) * width,
    }


def _widest(shape: BeamShape) -> int:
    """Most values that a decode step of one sequence has to hold at once."""
    hidden, inner, chosen = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts_per_tok
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads  # query, gate, key, value
    attention = (heads + shape.num_attention_heads) * shape.head_dim
    dense = 3 * shape.intermediate_size
    experts = chosen * (2 * hidden + 3 * inner)
    return hidden + max(attention, dense, experts, 2 * shape.vocab_size)


def _measure() -> dict[str, int]:
    as_ours()
    chat = BeamChat(STARTER)
    asked = problems(SEQUENCES)
    prompts = [chat.prompt_ids(problem.messages) for problem in asked]
    longest = max(len(prompt) for prompt in prompts)
    config = run_config(TOKENS, prompt_tokens=longest)
    module = load_module(config)
    small = config.model_copy(update={"rollout": config.rollout.model_copy(update={"slots": 8})})
    _sample(small, module, requests(asked[:16], prompts[:16], [16] * 16))
    before = _resident()
    completions = _sample(config, module, requests(asked, prompts, [TOKENS] * SEQUENCES))  # held until it is measured
    used = peak_memory() - before
    del completions
    return {"prompt_tokens": longest, "before_bytes": before, "used_bytes": used}


def _sample(config: Any, module: Any, asked: Sequence[Any]) -> list[Any]:
    sampler = sampler_of(config, module, version=0)
    completions = sample(sampler, asked)
    sampler.sleep(level=2)
    return list(completions)


def _resident() -> int:
    """Resident memory, once what was freed is given back; from here on the peak counts anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def _table(record: dict[str, Any]) -> Table:
    table = Table("part", "MiB", title=f"memory of sampling {SEQUENCES} x {TOKENS} tokens")
    for part, size in record["floor_bytes"].items():
        table.add_row(f"floor: {part}", f"{size / 2**20:.1f}")
    table.add_row("measured", f"{record['used_bytes'] / 2**20:.1f}")
    met = "met" if record["ratio"] <= LIMIT else "missed"
    table.add_row("measured / floor", f"{record['ratio']:.2f} (limit {LIMIT:g}, {met})")
    return table


if __name__ == "__main__":
    main()
