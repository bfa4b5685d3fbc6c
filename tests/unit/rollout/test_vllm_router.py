"""The plugin in engine processes: the router that it puts in, and that vLLM loads it, held against the vLLM here."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from beamline.rollout.vllm import patches
from beamline.rollout.vllm.plugin import ACTIVE
from tests.unit.rollout.vllm_source import called, calls, used

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(autouse=True, scope="module")
def _without_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        yield


# The router

# Of other makers' GPUs.
ELSEWHERE = {"allow_rocm_bf16x3_router_gemm"}

GATE = """
from types import SimpleNamespace
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import GateLinear
from beamline.rollout.vllm import patches

built = GateLinear.__init__
def on_a_gpu(self, *args, **kwargs):  # as it would be there
    built(self, *args, **kwargs)
    for name in patches._SHORTCUTS:
        assert hasattr(self, name), name
        setattr(self, name, True)
GateLinear.__init__ = on_a_gpu

parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1)
with set_current_vllm_config(VllmConfig()):
    gate = GateLinear(64, 16, params_dtype=torch.float32, out_dtype=torch.float32, prefix="gate")
assert isinstance(gate, GateLinear)
random = torch.Generator().manual_seed(0)
gate.weight.data.copy_(torch.randn(16, 64, generator=random))
utils.current_platform = SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=lambda: True)
gate.quant_method._gemm_impl = utils.dispatch_unquantized_gemm()  # as it is on NVIDIA's
print(type(gate).__name__, sorted(op_registry_oot), [getattr(gate, name) for name in patches._SHORTCUTS])
if type(gate) is not GateLinear:
    patches.check()
    patches.apply()  # twice is once
    for rows in (1, 16, 17, 32, 33, 300):
        x = torch.randn(rows, 64, generator=random).bfloat16()
        logits, _ = gate(x)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, x.float() @ gate.weight.T, rtol=1e-6, atol=1e-6)
    print("float32 throughout")
"""


def test_no_shortcut_of_the_router_is_unknown() -> None:
    """All that its product chooses by, and nothing that is not there any more."""
    from vllm.model_executor.layers.fused_moe import GateLinear

    chosen = {name for name in used(GateLinear.forward) if name.startswith("allow")}
    assert chosen == {*patches._SHORTCUTS, *ELSEWHERE}
    # and by nothing of another name
    known = {"LL_BF16_MAX_TOKENS", "_bf16x3_weight", "_return", "is_gfx950", "is_unquantized", "out_dtype", "prefix"}
    assert used(GateLinear.forward) - chosen == known | {"return_bias", "weight"}


def test_the_model_says_the_type_of_its_router_when_it_is_built() -> None:
    """Told later (``set_out_dtype``), the layer would choose its shortcuts anew."""
    from vllm.models.beam.nvidia import moe

    (made,) = [call for call in calls(moe) if ast.unparse(call.func) == "GateLinear"]
    given = {each.arg: ast.unparse(each.value) for each in made.keywords}
    assert (given["params_dtype"], given["out_dtype"]) == ("torch.float32", "torch.float32")
    assert "quant_config" not in given


def python(code: str, folder: Path, **variables: str) -> str:
    """Run code with the installed package, as an engine process does: not from the folder of the sources."""
    environment_ = {name: value for name, value in os.environ.items() if name not in (ACTIVE, "VLLM_PLUGINS")}
    environment_.pop("PYTHONPATH", None)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment_ | {"VLLM_TARGET_DEVICE": "cpu"} | variables,
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_in_an_engine_process_the_router_is_exact(tmp_path: Path) -> None:
    said = python(GATE, tmp_path, **{ACTIVE: "1", "VLLM_PLUGINS": "beamline"})
    assert f"ExactRouter ['GateLinear'] {[False] * len(patches._SHORTCUTS)}" in said
    assert "float32 throughout" in said


def test_in_other_processes_nothing_is_replaced(tmp_path: Path) -> None:
    said = python(GATE, tmp_path, VLLM_PLUGINS="beamline")
    assert f"GateLinear [] {[True] * len(patches._SHORTCUTS)}" in said


def test_an_engine_without_the_plugin_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import custom_op

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    with pytest.raises(patches.UpstreamError, match="install Beamline with pip"):
        patches.check()


@pytest.mark.parametrize("value", [None, "absent"])
def test_a_shortcut_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import fused_moe

    class Changed(fused_moe.GateLinear):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            for name in patches._SHORTCUTS[1:]:
                setattr(self, name, True)
            if value is None:
                setattr(self, patches._SHORTCUTS[0], None)

    registry: dict[str, Any] = {}
    monkeypatch.setattr(custom_op, "op_registry_oot", registry)
    monkeypatch.setattr(fused_moe, "GateLinear", Changed)
    patches.apply()
    with pytest.raises(patches.UpstreamError, match=f"no {patches._SHORTCUTS[0]} any more"):
        registry["GateLinear"]()


# The plugin


def test_the_installed_package_brings_the_plugin(tmp_path: Path) -> None:
    """A package that was installed before it had one, or from a folder that shadows it, would not."""
    code = """
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
print({name: f"{function.__module__}:{function.__name__}" for name, function in
       load_plugins_by_group(DEFAULT_PLUGINS_GROUP).items()})
"""
    assert "'beamline': 'beamline.rollout.vllm.plugin:register'" in python(code, tmp_path)


def test_a_plugin_is_loaded_by_every_process_that_builds_a_model() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    for thing in (EngineCore.__init__, WorkerWrapperBase.init_worker):
        assert "load_general_plugins" in called(thing)
