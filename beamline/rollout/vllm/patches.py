"""All that is different in our engine processes from stock vLLM 0.33: one function each, with its reason.

There is nothing else: what is not named here is reached through arguments of the engine (``arguments.py``), the worker
extension (``worker.py``), or the records that go into vLLM's engine core and come out of it (``engine.py``).
"""

from typing import Any

from beamline.errors import BeamlineError

_SHORTCUTS = (
    "allow_bf16x3_router_gemm",
    "allow_cublas_router_gemm",
    "allow_fp32_router_gemm",
    "allow_ll_bf16_gemm",
    "allow_ll_fp32w_gemm",
)


class UpstreamError(BeamlineError, RuntimeError):
    """vLLM has changed where a patch rests on it."""


def apply() -> None:
    """Apply every patch; twice is once.

    Raises:
        UpstreamError: a patch no longer fits the vLLM that is installed.
    """
    _exact_router()


def check() -> None:
    """Make sure that the patches are active in this process.

    Raises:
        UpstreamError: they are not; vLLM goes on without a plugin that it cannot load.
    """
    if not _is_replaced():
        raise UpstreamError(
            "vLLM did not load Beamline's plugin (its log says why): install Beamline with pip, again if it was "
            "before, so that its entry point vllm.general_plugins is known; name it in VLLM_PLUGINS where that is set"
        )


def _is_replaced() -> bool:
    """Whether vLLM's router is replaced by ours.

    Raises:
        UpstreamError: it is, by somebody else's.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    router = op_registry_oot.get("GateLinear")
    if router is not None and router.__module__ != __name__:
        raise UpstreamError(
            f"another plugin of vLLM replaces its router, {router.__module__}: leave it out (VLLM_PLUGINS)"
        )
    return router is not None


def _exact_router() -> None:
    """The router's matrix product in float32, the same for every number of tokens.

    Stock: ``GateLinear`` picks among five kernels by the number of rows (up to 16, up to 32, more) and by the GPU; on
    Blackwell from 33 rows on it multiplies in three BF16 pieces. A token's experts then depend on what else is in the
    batch, and the learner, which multiplies in float32, chooses others. Replaced through vLLM's own extension point for
    layers (``PluggableLayer.register_oot``); what remains is ``torch.nn.functional.linear`` in float32.
    """
    from vllm.model_executor.layers.fused_moe import GateLinear

    if _is_replaced():
        return

    class ExactRouter(GateLinear):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for shortcut in _SHORTCUTS:
                if not isinstance(getattr(self, shortcut, None), bool):
                    raise UpstreamError(f"vLLM's GateLinear has no {shortcut} any more: look at its forward() again")
                setattr(self, shortcut, False)

    GateLinear.register_oot(ExactRouter, name="GateLinear")
