"""What we rest on inside vLLM, held against the vLLM that is installed: it goes red when that one changes under us.

What its engine core does batch by batch is in ``test_vllm_core.py``, its router in ``test_vllm_router.py``,
where parameters lie in ``test_vllm_layout_against_vllm.py``.
"""

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.records import Key, Request, SamplingParams
from beamline.rollout.vllm.engine import _TAGS, _sampling_params
from beamline.rollout.vllm.messages import Asked
from beamline.rollout.vllm.sampler import TEMPERATURES
from beamline.rollout.vllm.worker import WeightsExtension, _Layer, lies_as_stored
from tests.tiny_beam import beam_shape
from tests.unit.rollout.test_vllm_layout_against_vllm import write_config
from tests.unit.rollout.vllm_source import called, names_of, used, written

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(autouse=True, scope="module")
def _without_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        yield


# Records


def test_a_request_is_named_in_full() -> None:
    """What we do not name has a default."""
    from vllm.v1.engine import EngineCoreRequest

    given = (
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
    )
    assert set(given) <= set(EngineCoreRequest.__struct_fields__)
    EngineCoreRequest(**dict.fromkeys(given))


def test_an_output_has_what_is_taken_from_it() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    output = EngineCoreOutput("1", [4])
    assert (output.request_id, output.new_token_ids, output.finished) == ("1", [4], False)
    assert (output.new_logprobs, output.new_sampling_mask, output.routed_experts, output.error) == (None,) * 4
    assert EngineCoreOutputs().outputs == []
    ended = EngineCoreOutput("1", [], finish_reason=FinishReason.STOP)
    assert ended.finished
    assert [str(each) for each in FinishReason] == ["stop", "length", "abort", "error", "repetition"]


def test_masks_and_log_probabilities_are_cut_as_we_read_them() -> None:
    from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

    masks = SamplingMaskLists(np.array([3, 4, 5, 6, 7, 8]), np.array([0, 2, 3, 6]), [0, 1, 3])
    single, several = masks.slice_request(0, 1), masks.slice_request(1, 2)
    assert (single.token_ids.tolist(), single.offsets) == ([3, 4], None)
    assert (several.token_ids.tolist(), several.offsets.tolist()) == ([5, 6, 7, 8], [0, 1, 4])
    values = LogprobsLists(np.zeros((2, 1)), np.array([[-1.0], [-2.0]]), np.zeros(2)).slice_request(1, 1)
    assert values.logprobs[:1, 0].tolist() == [-2.0]


def test_the_first_log_probability_is_that_of_the_drawn_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that come along none is asked for, and its rank, which takes a GPU, is not looked at."""
    from vllm.v1.worker.gpu.sample import logprob

    monkeypatch.setattr(logprob, "_ranks_kernel", {(2,): lambda *_, **__: None})
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    found = logprob.compute_topk_scores(scores, 0, torch.tensor([2, 1]), logits_mode=True)
    assert found.logprobs.tolist() == [[1.0], [2.0]]
    assert logprob.compute_topk_scores(scores, 1, torch.tensor([2, 1]), logits_mode=True).logprobs[0].tolist() == [1, 3]


# Parameters of sampling


def params_of(**params: Any) -> Any:
    params = {"stop_ids": (9, 8)} | params
    request = Request(Key("train", 0, "a", 0), np.zeros(1, np.int32), SamplingParams(max_tokens=7, **params))
    return _sampling_params(Asked(request, 2**63 - 1))


def test_parameters_mean_what_they_do_here() -> None:
    from vllm.sampling_params import RequestOutputKind

    drawing = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "min_tokens": 2}
    made = params_of(**drawing)
    assert {name: getattr(made, name) for name in drawing} == drawing
    assert (made.max_tokens, made.seed, made.num_logprobs) == (7, 2**63 - 1, 0)
    assert made.output_kind == RequestOutputKind.DELTA
    assert made.all_stop_token_ids == {8, 9}  # which cannot be drawn before min_tokens
    assert made.eos_token_id is None  # nothing stops but what we say
    assert (made.stop, made.repetition_detection, made.n) == ([], None, 1)
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (0, 0, 1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_temperatures_are_not_changed(temperature: float) -> None:
    assert params_of(temperature=temperature).temperature == temperature


def test_no_filter_is_no_filter() -> None:
    made = params_of()
    assert (made.top_k, made.top_p, made.min_p) == (0, 1.0, 0.0)
    assert params_of(temperature=0.0).temperature == 0.0


# The core


def test_the_client_has_the_calls_that_are_made() -> None:
    from vllm.v1.engine.core_client import InprocClient

    expected = {
        "get_output": ["self"],
        "add_request": ["self", "request"],
        "abort_requests": ["self", "request_ids"],
        "release_kv_cache_memory": ["self"],
        "wake_up": ["self", "tags"],
    }
    assert {name: names_of(getattr(InprocClient, name)) for name in expected} == expected
    assert names_of(InprocClient.sleep)[:2] == ["self", "level"]
    assert inspect.signature(InprocClient.reset_prefix_cache).return_annotation in (bool, "bool")
    assert names_of(InprocClient)[:3] == ["vllm_config", "executor_class", "log_stats"]
    assert "engine_core" in written(InprocClient.__init__)


def test_the_core_has_the_parts_that_are_looked_at() -> None:
    from vllm.config import CacheConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.executor.abstract import SLEEP_TAGS

    assert written(EngineCore.__init__) >= {"batch_queue", "scheduler", "model_executor"}
    assert names_of(EngineCore.pause_scheduler)[:2] == ["self", "mode"]
    assert names_of(EngineCore.collective_rpc)[1:4] == ["method", "timeout", "args"]
    assert "sleeping_tags" in written(Executor.__init__)
    assert set(SLEEP_TAGS) == set(_TAGS.values())
    assert CacheConfig().kv_cache_size_tokens is None


def test_the_states_of_the_scheduler() -> None:
    from vllm.v1.core.sched.interface import PauseState, SchedulerInterface

    assert [state.name for state in PauseState] == ["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"]
    assert isinstance(SchedulerInterface.pause_state, property)
    assert names_of(SchedulerInterface.set_pause_state) == ["self", "pause_state"]
    assert names_of(SchedulerInterface.has_requests) == ["self"]


def test_logits_are_computed_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    write_config(beam_shape(), tmp_path)

    def head(**overrides: str) -> torch.dtype:
        made = ModelConfig(str(tmp_path), dtype=torch.bfloat16, skip_tokenizer_init=True, hf_overrides=overrides)
        found: torch.dtype = made.head_dtype
        return found

    assert head(head_dtype="float32") == torch.float32
    assert head() == torch.bfloat16


# The worker


def test_no_name_of_the_extension_is_one_of_the_workers() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    ours = {name for name in {*vars(WeightsExtension), *WeightsExtension.__annotations__} if "beamline" in name}
    assert len(ours) > 9
    assert not [name for name in ours if hasattr(Worker, name)]
    looked_at = used(WeightsExtension) - ours
    assert looked_at == {"model_runner", "vllm_config", "device"}
    assert looked_at <= written(Worker) | {name for base in Worker.__mro__[:-1] for name in written(base)}


def test_workers_know_their_model_and_rank() -> None:
    from vllm.config import ParallelConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert names_of(GPUModelRunner.get_model) == ["self"]
    parallel = ParallelConfig()
    names = ("rank", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
    assert [getattr(parallel, name) for name in names] == [0, 1, 1, False]


def test_the_flags_of_the_fused_reduction_are_where_they_are_looked_for() -> None:
    from vllm.models.beam.nvidia import allreduce, model

    assert "allreduce_workspace" in written(model.BeamModel.__init__)
    assert "model" in written(model.BeamForCausalLM.__init__)
    assert "flags" in written(allreduce.BeamAllReduceWorkspace.__init__)


def test_which_layers_lie_as_they_are_stored() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerTensorOnlineLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def layer(method: Any) -> nn.Module:
        module = nn.Module()
        module.quant_method = method
        return module

    assert "unquantized_backend" in written(UnquantizedFusedMoEMethod.__init__)
    found = {}
    for backend in UnquantizedMoeBackend:
        method = object.__new__(UnquantizedFusedMoEMethod)
        method.unquantized_backend = backend
        found[backend.name] = lies_as_stored(layer(method))
    assert {name for name, stored in found.items() if stored} == {"TRITON", "BATCHED_TRITON"}
    assert lies_as_stored(nn.Module())
    assert lies_as_stored(layer(UnquantizedLinearMethod()))
    assert lies_as_stored(layer(UnquantizedEmbeddingMethod()))
    assert not lies_as_stored(layer(object.__new__(Fp8PerTensorOnlineLinearMethod)))


def test_triton_uses_experts_as_they_are_stored() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    w13, w2 = torch.arange(48.0).view(2, 6, 4), torch.arange(24.0).view(2, 4, 3)
    backend = unquantized.UnquantizedMoeBackend.TRITON
    first, second = unquantized.convert_to_unquantized_kernel_format(backend, SimpleNamespace(), w13, w2)[:2]
    torch.testing.assert_close(first, w13, rtol=0, atol=0)
    torch.testing.assert_close(second, w2, rtol=0, atol=0)


# Layers that are processed


class Negating:
    """A method whose kernel wants the transposed weight, negated, under another name."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer._already_called_process_weights_after_loading = True  # type: ignore[assignment]
        layer.kernel = nn.Parameter(-layer.get_parameter("weight").data.T.contiguous(), requires_grad=False)
        del layer.weight


def test_a_layer_is_opened_filled_and_processed_into_the_memory_that_its_kernel_uses() -> None:
    """Twice, since a run does it again and again."""
    from vllm.model_executor.model_loader.reload import layerwise

    layer = nn.Linear(3, 2, bias=False).requires_grad_(False)
    layer.quant_method = Negating()  # type: ignore[assignment]
    layerwise.record_metadata_for_reloading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    kernel = layer.get_parameter("kernel")
    ours = _Layer(layer, 6)
    for seed in (1, 2):
        values = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        ours.open()
        assert {name: tuple(each.shape) for name, each in layer.named_parameters()} == {"weight": (2, 3)}
        weight: Tensor = layer.weight
        ours.open()
        assert layer.weight is weight
        weight.data.copy_(values)
        ours.close()
        assert dict(layer.named_parameters()).keys() == {"kernel"}
        assert layer.get_parameter("kernel") is kernel
        torch.testing.assert_close(kernel.data, -values.T, rtol=0, atol=0)


def test_what_a_layer_looked_like_is_recorded_when_the_model_is_built() -> None:
    from vllm.model_executor.model_loader import utils

    assert "record_metadata_for_reloading" in called(utils.initialize_model)
