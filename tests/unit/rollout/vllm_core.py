"""vLLM's own engine core without a GPU: its scheduler, queue of batches and cache, over workers that pretend."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamline.rollout.vllm.engine import VllmEngine
from tests.tiny_beam import beam_shape
from tests.unit.rollout.test_vllm_layout_against_vllm import write_config

BLOCK, POSITIONS = 16, 96


class Workers:
    """What the workers of an engine would do. A request's tokens are those of ``script`` under its first prompt token.

    ``log`` has what they were told; of a batch, the tokens of each request that were computed before it.
    """

    def __init__(self, script: Mapping[int, Sequence[int]]) -> None:
        self.script = script
        self.log: list[tuple[Any, ...]] = []
        self.params: list[Any] = []
        self._left: dict[str, list[int]] = {}
        self._begun: list[Any] = []

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self, f"_{method}", lambda *_: self.log.append((method, *args)))(*args)

    def batches(self) -> list[dict[str, int]]:
        """Of each batch, which requests were in it, and how many of their tokens had been computed."""
        return [each[1] for each in self.log if each[0] == "batch"]

    def _execute_model(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        for each in scheduled.scheduled_new_reqs:
            self.params.append(each.sampling_params)
            self._left[each.req_id] = list(self.script[each.prompt_token_ids[0]])
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        self.log.append(("batch", computed))
        self._begun.append(scheduled)
        return None

    def _sample_tokens(self, _: Any) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(self._begun.pop(0).num_scheduled_tokens)
        tokens = [self._left[name].pop(0) if self._left[name] else 0 for name in names]
        column = np.array(tokens)[:, None]
        logprobs = LogprobsLists(column, -column.astype(np.float32), column[:, 0])
        return ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, [[t] for t in tokens], logprobs)

    def _get_kv_cache_spec(self) -> Any:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return {"layer": FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)}

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def _determine_available_memory(self) -> int:
        return 1 << 20

    def _compile_or_warm_up_model(self) -> Any:
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(0.0, 0.0)

    def _beamline_device(self) -> str:
        return "none"

    def _beamline_memory(self) -> int:
        return 0

    def _beamline_keep(self) -> None:
        return None

    def _beamline_put_back(self) -> None:
        return None


def executor(workers: Workers) -> Any:
    """vLLM's executor, of one worker in this process."""
    from vllm.v1.executor import Executor

    class InThisProcess(Executor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            pass

        def check_health(self) -> None:
            pass

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
        ) -> Any:
            name = method if isinstance(method, str) else method.__name__
            if not non_block:
                return [workers.call(name, args or tuple((kwargs or {}).values()))]
            future: Future[Any] = Future()  # of the first rank's result: execute_model() takes [0] of what comes
            future.set_result(workers.call(name, args))
            return [future]

    return InThisProcess


def core_config(folder: Path, asynchronous: bool) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig

    write_config(beam_shape(), folder)
    config = VllmConfig(
        model_config=ModelConfig(
            str(folder),
            dtype=torch.bfloat16,
            skip_tokenizer_init=True,
            max_model_len=POSITIONS,
            enable_sleep_mode=False,
        ),
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config


@dataclass
class _Arguments:
    """Takes the place of vLLM's ``EngineArgs``, which asks for a GPU."""

    config: Any

    def create_engine_config(self) -> Any:
        return self.config


def core_engine(patch: pytest.MonkeyPatch, folder: Path, workers: Workers, asynchronous: bool) -> VllmEngine:
    """Our engine over vLLM's core."""
    from vllm.engine import arg_utils
    from vllm.v1.executor import Executor

    patch.setattr(arg_utils, "EngineArgs", _Arguments)
    patch.setattr(Executor, "get_class", lambda config: executor(workers))
    return VllmEngine({"config": core_config(folder, asynchronous)})
