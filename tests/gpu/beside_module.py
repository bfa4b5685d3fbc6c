"""How far a learner in bfloat16 is from float32, beside the Hugging Face module in bfloat16 on the same GPU."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import BeamConfig, BeamForCausalLM

from beamline.policy import model
from beamline.records import Experience
from tests.tiny_beam import reference, teacher_forced

DEVICE = "cuda"
CAP = 30.0

Floats = NDArray[np.float32]
Record = Callable[[str, object], None]


@torch.no_grad()
def by_the_module(plain: BeamForCausalLM, sequence: Experience) -> Floats:
    """Log-probabilities by the Hugging Face module on the GPU, whose logits are not rounded."""
    ids = torch.from_numpy(sequence.rollout.token_ids.astype(np.int64)).to(DEVICE)
    hidden = plain.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
    logits = CAP * torch.tanh(hidden.float() @ plain.lm_head.weight.float().T / CAP)
    found: Floats = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None]).squeeze(1).cpu().numpy()
    return found


def assert_as_near_to_float32(
    logprobs: Sequence[Floats] | None,
    sequences: Sequence[Experience],
    module: nn.Module,
    what: str,
    record: Record,
) -> None:
    """Log-probabilities of a learner of ``module``, in bfloat16, are as far from float32 as the module's are.

    And no further from the module's than two such errors. In the middle: where rounding turns over a router's choice, a
    token's is another one altogether.
    """
    assert logprobs is not None
    exact = model.build(BeamConfig(**cast(Any, module).config.to_dict()), "float32")
    exact.load_state_dict(module.state_dict())
    plain = reference(module).to(DEVICE)
    ours, theirs = np.concatenate(logprobs), np.concatenate([by_the_module(plain, each) for each in sequences])
    expected = np.concatenate([teacher_forced(reference(exact), each.rollout.token_ids) for each in sequences])
    errors = {
        "learner from float32": float(np.median(np.abs(ours - expected))),
        "module from float32": float(np.median(np.abs(theirs - expected))),
        "learner from module": float(np.median(np.abs(ours - theirs))),
    }
    for name, error in errors.items():
        record(f"{what}: median |delta log p|, {name}", error)
    assert 0 < errors["learner from float32"] < 1.2 * errors["module from float32"]
    assert errors["learner from module"] < 1.5 * errors["module from float32"]
