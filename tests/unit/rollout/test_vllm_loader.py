"""How a rank of vLLM takes weights: bucket by bucket, in place, and layer by layer where kernels want another form."""

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from beamline.model.beam import ModelError
from beamline.model.layout import TensorSlice
from beamline.records.codec import encode
from beamline.rollout.vllm import worker
from beamline.rollout.vllm.layout import Mesh, parameters, placed
from beamline.rollout.vllm.worker import Loader
from beamline.transfer.buckets import Copier, buckets, checksum, samples
from beamline.transfer.group import Meeting, free_port
from beamline.transfer.memory import host_memory
from beamline.transfer.plan import Share
from beamline.transfer.source import Packer
from tests.tiny_beam import beam_config
from tests.unit.rollout.vllm_meshes import UNEVEN, assembled, checkpoint, name_of, uneven

ONE = Mesh()
MESHES = (ONE, Mesh(2), Mesh(4, experts=True), Mesh(8), Mesh(2, 2), Mesh(1, 3))
SIZES = (256, 4096, 1 << 20)
"""Bytes of a bucket: parts are cut into rows, several fit, everything does."""

Weights = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return checkpoint(uneven())


@pytest.fixture(autouse=True)
def _stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers lie as they are stored, until a test says otherwise."""
    monkeypatch.setattr(worker, "lies_as_stored", lambda module: True)


class Rank:
    """A rank of an engine, with a module that has vLLM's parameters, and the hand that fills its buckets."""

    def __init__(
        self,
        mesh: Mesh = ONE,
        rank: int = 0,
        size: int = 4096,
        parts: Sequence[TensorSlice] | None = None,
        sources: int = 1,
    ) -> None:
        shape = uneven()
        table = placed(shape, mesh, rank, "float32")
        self.module = tree({name: size for name, (size, _) in parameters(shape, mesh, rank, "float32").items()})
        self.parts = [each.part for each in table] if parts is None else list(parts)
        self.shares = [self.parts[source::sources] for source in range(sources)]
        self.buckets = [buckets(share, size) for share in self.shares]
        self.loader = Loader(self.module, table, self.shares, size)

    @torch.no_grad()
    def fill(self, weights: Weights, *numbers: int) -> None:
        """Give these buckets of every source, or all."""
        for number in numbers or range(max(map(len, self.buckets))):
            for source, each in enumerate(self.buckets):
                if number < len(each):
                    buffer = torch.zeros(each[number].nbytes, dtype=torch.uint8)
                    Copier(each[number], lambda part: view(weights, part)).pack(buffer)
                    self.loader.fill(source, number, buffer)
                    buffer.zero_()  # the sender writes another over it

    def load(self, weights: Weights) -> list[int]:
        self.fill(weights)
        return self.loader.finish()


def tree(sizes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Modules with parameters of these names, all 0; each knows its path."""
    root = nn.Module()
    root.path = ""  # type: ignore[assignment]
    for name, size in sizes.items():
        *steps, leaf = name.split(".")
        module = root
        for n, step in enumerate(steps):
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
            module.path = ".".join(steps[: n + 1])  # type: ignore[assignment]
        module.register_parameter(leaf, nn.Parameter(torch.zeros(size)))
    return root


def view(weights: Weights, part: TensorSlice) -> Tensor:
    return torch.from_numpy(weights[part.name])[part.index]


def sent(shares: Sequence[Share], weights: Weights) -> list[int]:
    """Checksums of the senders."""
    return [checksum(view(weights, part), part.dtype) for part in chain.from_iterable(samples(shares))]


def assert_holds(module: nn.Module, expected: dict[str, NDArray[np.float32]]) -> None:
    held = dict(module.named_parameters())
    assert held.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(held[name].detach().numpy(), array, err_msg=name)


# In place


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sources", [1, 3])
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_every_parameter_is_what_its_parts_make(mesh: Mesh, sources: int, size: int, weights: Weights) -> None:
    for number in range(mesh.size):
        rank = Rank(mesh, number, size, sources=sources)
        before = {name: each.data_ptr() for name, each in rank.module.named_parameters()}
        found = rank.load(weights)
        assert_holds(rank.module, assembled(uneven(), mesh, number, weights))
        assert found == sent(rank.shares, weights)
        assert {name: each.data_ptr() for name, each in rank.module.named_parameters()} == before


def test_weights_are_cast_to_what_the_model_has(weights: Weights) -> None:
    """The wire has the checkpoint's type for it, a bias in float32 may stand in a model of 16 bits."""
    rank = Rank()
    rank.module.get_parameter("model.norm.weight").data = torch.zeros(32, dtype=torch.bfloat16)
    rank.load(weights)
    held = rank.module.get_parameter("model.norm.weight")
    torch.testing.assert_close(held.data, torch.from_numpy(weights["model.norm.weight"]).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("sources", [1, 3])
def test_another_load_takes_the_place_of_the_first(sources: int, weights: Weights) -> None:
    rank, other = Rank(Mesh(2), 1, sources=sources), {name: -array for name, array in weights.items()}
    first = rank.load(weights)
    second = rank.load(other)
    assert_holds(rank.module, assembled(uneven(), Mesh(2), 1, other))
    assert second == sent(rank.shares, other) != first


def test_a_wrong_value_is_in_the_checksums(weights: Weights) -> None:
    rank = Rank()
    rank.fill(weights)
    last = rank.parts[-1]
    assert last.name == "lm_head.weight"
    with torch.no_grad():
        rank.module.get_parameter(last.name)[0, 0] += 1
    found = rank.loader.finish()
    assert [one == other for one, other in zip(found, sent(rank.shares, weights), strict=True)].count(False) == 1


def test_what_is_not_given_stays(weights: Weights) -> None:
    """As adapters alone would be, or the half of a tensor."""
    table = {each.part.name: each.part for each in placed(uneven(), Mesh(2), 1, "float32")}
    norm, whole = table["model.norm.weight"], table["model.layers.0.mlp.down_proj.weight"]
    half = replace(whole, start=(4, *whole.start[1:]), stop=(9, *whole.stop[1:]))
    rank = Rank(Mesh(2), 1, parts=[half, norm])
    assert rank.load(weights) == sent([[half, norm]], weights)
    expected = {name: np.zeros_like(each) for name, each in assembled(uneven(), Mesh(2), 1, weights).items()}
    expected[norm.name][:] = weights[norm.name]
    expected[whole.name][4:9] = view(weights, half).numpy()
    assert_holds(rank.module, expected)


def test_a_tensor_that_the_rank_does_not_hold_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"lm_head\.weight"):
        Rank(Mesh(1, 2), 0, parts=[TensorSlice.whole("lm_head.weight", "float32", (70, 32))])


# Layers that are processed

PROCESSED = ("model.layers.1.mlp.experts.routed_experts", "model.layers.2.self_attn.qkv_gate_proj")


class Processed(worker._Layer):
    """Its kernels want weights negated; what the layer held is gone while it is open."""

    log: list[tuple[str, str]]

    def open(self) -> None:
        if not self._is_open:
            self._note("open")
            self._old = dict(self._module.named_parameters())
            for name, each in self._old.items():
                self._module.register_parameter(name, nn.Parameter(torch.full_like(each, torch.nan)))
            self._is_open = True

    def close(self) -> None:
        self._note("close")
        for name, each in self._old.items():
            each.data.copy_(-self._module.get_parameter(name).data)
            self._module.register_parameter(name, each)
        self._is_open = False

    def _note(self, what: str) -> None:
        self.log.append((what, str(self._module.path)))


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> "type[Processed]":
    """Two layers have kernels that want another form; the log has what is done to them."""
    Processed.log = []
    monkeypatch.setattr(worker, "_Layer", Processed)
    monkeypatch.setattr(worker, "lies_as_stored", lambda module: module.path not in PROCESSED)
    return Processed


def negated(weights: Weights) -> Weights:
    """What a rank holds in the end."""
    expected = assembled(uneven(), Mesh(), 0, weights)
    return {name: -each if name.startswith(PROCESSED) else each for name, each in expected.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sources", [1, 3])
def test_a_layer_is_opened_once_and_processed_when_it_is_complete(
    processed: type[Processed], sources: int, size: int, weights: Weights
) -> None:
    rank = Rank(size=size, sources=sources)
    before = {name: each.data_ptr() for name, each in rank.module.named_parameters()}
    found = rank.load(weights)
    assert sorted(processed.log) == sorted((what, name) for what in ("open", "close") for name in PROCESSED)
    assert_holds(rank.module, negated(weights))
    assert {name: each.data_ptr() for name, each in rank.module.named_parameters()} == before
    assert found == sent(rank.shares, weights)  # taken before the layers were processed


def test_a_layer_is_processed_no_sooner_than_it_is_complete(processed: type[Processed], weights: Weights) -> None:
    rank = Rank(size=256)
    of_it = [
        i for i, bucket in enumerate(rank.buckets[0]) for part in bucket.parts if "layers.1.mlp.experts" in part.name
    ]
    rank.fill(weights, *range(of_it[-1]))
    assert processed.log == [("open", PROCESSED[0])]
    rank.fill(weights, of_it[-1])
    assert processed.log == [(what, PROCESSED[0]) for what in ("open", "close")]


def test_processed_layers_take_weights_again_and_again(processed: type[Processed], weights: Weights) -> None:
    rank, other = Rank(), {name: 2 * array for name, array in weights.items()}
    for each in (weights, other, weights):
        assert rank.load(each) == sent(rank.shares, each)
        assert_holds(rank.module, negated(each))
    assert len(processed.log) == 3 * 2 * len(PROCESSED)


@pytest.mark.parametrize("loads", [0, 1])
def test_a_layer_that_lacks_something_is_named(processed: type[Processed], loads: int, weights: Weights) -> None:
    """One that was given nothing has old weights, where others have new ones."""
    rank = Rank(size=256)
    for _ in range(loads):
        rank.load(weights)
    part_of = {number: bucket.parts[0].name for number, bucket in enumerate(rank.buckets[0])}
    first = next(number for number, name in part_of.items() if "layers.1.mlp.experts" in name)
    rank.fill(weights, *range(first + 1))
    with pytest.raises(RuntimeError, match=rf"weights of {PROCESSED[0]}, {PROCESSED[1]} were not given completely"):
        rank.loader.finish()


def test_a_layer_that_is_not_in_the_plan_is_left_alone(processed: type[Processed], weights: Weights) -> None:
    norm = next(each.part for each in placed(uneven(), Mesh(), 0, "float32") if each.part.name == "model.norm.weight")
    rank = Rank(parts=[norm])
    assert rank.load(weights) == sent([[norm]], weights)
    assert processed.log == []


# The worker


class Worker(worker.WeightsExtension):
    """A worker of vLLM, as far as the extension looks at it."""

    def __init__(self, folder: Path, module: nn.Module, mesh: Mesh, rank: int) -> None:
        names = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
        parallel = dict(zip(names, (mesh.tensor, mesh.pipeline, mesh.experts), strict=True))
        self.model_runner = SimpleNamespace(get_model=lambda: module)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, **parallel),
            model_config=SimpleNamespace(model=str(folder), dtype=torch.float32),
        )
        self.device = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")
@pytest.mark.parametrize("sources", [1, 2])
def test_each_worker_takes_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: int, weights: Weights
) -> None:
    """All are told the same: the parts of all ranks, and where the buckets of all ranks are."""
    beam_config(**UNEVEN).save_pretrained(tmp_path)
    synchronized: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    mesh = Mesh(2, 2, experts=True)
    ranks = [Rank(mesh, number, 1 << 12, sources=sources) for number in range(mesh.size)]
    memory = [[host_memory(1 << 12) for _ in range(sources)] for _ in ranks]
    workers = [Worker(tmp_path, rank.module, mesh, number) for number, rank in enumerate(ranks)]
    for each in workers:
        assert each.beamline_prepare([encode(rank.shares) for rank in ranks], 1 << 12) == []
    rounds = max(len(each) for rank in ranks for each in rank.buckets)
    for bucket in range(rounds):
        described = [[b""] * sources for _ in ranks]
        for r, rank in enumerate(ranks):
            for s, each_of in enumerate(rank.buckets):
                if bucket < len(each_of):
                    Copier(each_of[bucket], lambda part: view(weights, part)).pack(memory[r][s].buffer)
                    described[r][s] = memory[r][s].descriptor
        for each in workers:
            each.beamline_fill(bucket, described)
    for number, (each, rank) in enumerate(zip(workers, ranks, strict=True)):
        assert each.beamline_finish() == sent(rank.shares, weights)
        assert_holds(rank.module, assembled(uneven(), mesh, number, weights))
    assert len(synchronized) == sum(max(map(len, rank.buckets)) for rank in ranks)
    for each in workers:
        each._beamline_close()
    for shared in chain.from_iterable(memory):
        shared.close()


@pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")
def test_workers_receive_from_ranks_that_they_meet_in_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    """Two of the learner, and two workers, each of which waits for all others; and another group after that one."""
    beam_config(**UNEVEN).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    mesh, sources = Mesh(2), 2
    ranks = [Rank(mesh, number, 1 << 12, sources=sources) for number in range(mesh.size)]
    shares = [rank.shares for rank in ranks]
    place = lambda part: view(weights, part)  # noqa: E731
    packers = [Packer(shares, source, place, torch.device("cpu"), 1 << 12) for source in range(sources)]
    workers = [Worker(tmp_path, rank.module, mesh, number) for number, rank in enumerate(ranks)]
    rounds = max(packer.rounds for packer in packers)

    def send(packer: Packer, meeting: Meeting) -> None:
        packer.join(meeting)
        for number in range(rounds):
            packer.send(number)

    def take(each: Worker, meeting: Meeting) -> list[int]:
        each.beamline_prepare([encode(rank) for rank in shares], 1 << 12)
        each.beamline_join(encode(meeting))
        for number in range(rounds):
            each.beamline_fill(number, None)
        return each.beamline_finish()

    for _ in range(2):
        meeting = Meeting("127.0.0.1", free_port(), sources, sources + mesh.size, "gloo", 60.0)
        with ThreadPoolExecutor(sources + mesh.size) as pool:
            sending = [pool.submit(send, packer, meeting) for packer in packers]
            taking = [pool.submit(take, each, meeting) for each in workers]
            for each in sending:
                each.result()
            found = [each.result() for each in taking]
        for number, rank in enumerate(ranks):
            assert found[number] == sent(rank.shares, weights)
            assert_holds(rank.module, assembled(uneven(), mesh, number, weights))
        for _, parameter in (pair for rank in ranks for pair in rank.module.named_parameters()):
            parameter.data.zero_()
    for worker_ in workers:
        worker_._beamline_close()
    for packer in packers:
        packer.close()


def test_a_parameter_that_a_kernel_pads_is_refused_with_both_shapes(weights: Weights) -> None:
    rank = Rank()
    name = next(name for name, _ in rank.module.named_parameters() if name.endswith("w13_weight"))
    padded = rank.module.get_parameter(name)
    wider = (padded.shape[0], padded.shape[1] + 64, padded.shape[2])
    padded.data = torch.zeros(wider)
    with pytest.raises(ModelError, match=re.escape(f"{name} as {wider}")):
        rank.load(weights)


@pytest.mark.parametrize("flags", [torch.tensor([3, 1, 4]), None])
def test_flags_that_ranks_wait_by_outlive_the_sleep_of_weights(tmp_path: Path, flags: torch.Tensor | None) -> None:
    """An engine of one rank has none."""
    module = Rank().module
    held = None if flags is None else SimpleNamespace(flags=flags.clone())
    module.get_submodule("model").allreduce_workspace = held  # type: ignore[assignment]
    one = Worker(tmp_path, module, ONE, 0)
    one.beamline_keep()
    if held is not None:
        held.flags = torch.zeros(3, dtype=torch.int64)  # as what they were on is after it
    one.beamline_put_back()
    assert held is None or torch.equal(held.flags, cast(Tensor, flags))
