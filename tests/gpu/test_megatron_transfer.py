"""Weights of two learner ranks on GPUs, or on one, in a running engine: each rank's buckets come by CUDA IPC."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.beam import BeamShape
from beamline.policy import model
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.layout import Mesh
from beamline.rollout.vllm.sampler import VllmSampler
from beamline.runtime.vllm import say
from beamline.transfer.plan import plan
from tests.cluster.learner import weights_of, with_learner
from tests.gpu.engines import launch
from tests.gpu.meshes import on_gpus
from tests.gpu.test_vllm_weights import POSITIONS, drawn, given, same_bits
from tests.tiny_beam import LARGER, beam_config, random_beam

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

MESHES = {"tensor and expert": {"tensor": 2, "expert": 2}, "pipeline": {"pipeline": 2}}


def handed_over(learner: Any, folder: Path, log: Path) -> bool:
    """Whether an engine draws by the learner's weights what it draws by those of a module in this process."""
    vllm = VllmConfig(memory_share=0.1, max_sequences=16, engine_args={"enforce_eager": True})
    fleet = Fleet([launch(folder, log, POSITIONS, RolloutConfig(engine="vllm", vllm=vllm))], 0, say)
    given(fleet, random_beam(1, "bfloat16", **LARGER))
    expected = drawn(fleet)
    given(fleet, random_beam(0, "bfloat16", **LARGER))
    assert not same_bits(expected, drawn(fleet))
    shape = BeamShape.from_folder(folder)
    sampler = VllmSampler(fleet, shape, Mesh(), "bfloat16", POSITIONS, 0, learner._channel, 1 << 16)
    moves = plan(learner.layout("full"), sampler.layout("full"))
    for version in (2, 3):  # the second by what was prepared for the first
        learner.send(moves)
        sampler.receive(moves, version, unfinished="abort")
    found = drawn(fleet)
    sampler.close()
    return same_bits(expected, found)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_engine_has_the_weights_of_two_ranks(mesh: str, tmp_path: Path) -> None:
    model.save(random_beam(0, **LARGER), tmp_path / "model", "bfloat16")
    weights = weights_of(random_beam(1, "bfloat16", **LARGER))
    job = (tmp_path / "model", tmp_path / "engine.log")
    arguments = (handed_over, MESHES[mesh], beam_config(**LARGER), weights, {}, 512, "bfloat16", "none", job, "cuda")
    assert on_gpus(2, with_learner, *arguments)[0]
