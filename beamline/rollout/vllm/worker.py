"""What our engines can do beyond stock vLLM, on each rank: take weights in place, and say what they hold.

vLLM adds :class:`WeightsExtension` to its own worker class (``worker_extension_cls``) and has its methods run by all
ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from beamline.model.beam import BeamShape, ModelError
from beamline.model.layout import TensorSlice
from beamline.model.placement import Placed
from beamline.records.codec import decode
from beamline.rollout.vllm import patches
from beamline.rollout.vllm.layout import Mesh, placed
from beamline.transfer.buckets import Copier, buckets, checksum, samples
from beamline.transfer.dtypes import DTYPE_NAMES
from beamline.transfer.group import Group, Meeting
from beamline.transfer.memory import SharedMemory, attach, gpu_of, visible_gpus
from beamline.transfer.plan import Share


class WeightsExtension:
    """Mixed into vLLM's worker; every name begins with ``beamline_`` because vLLM refuses names that it has too."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    beamline_loader: "Loader"
    beamline_flags: Tensor | None
    beamline_shared: dict[bytes, SharedMemory]
    beamline_group: Group | None
    beamline_buffer: Tensor

    def beamline_device(self) -> str:
        """What this rank computes on, as our patches have it."""
        patches.check()
        return torch.cuda.get_device_name(self.device)

    def beamline_memory(self) -> int:
        """Bytes in use on this rank's device, by whomever."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def beamline_prepare(self, shares: Sequence[bytes], bucket_bytes: int) -> list[str]:
        """Find where the parts of this rank go; ``shares[r]`` are those of rank r. Gives the GPUs that it sees."""
        rank, config = self._beamline_rank(), self.vllm_config
        given = decode(shares[rank], list[Share])
        shape = BeamShape.from_folder(Path(config.model_config.model))
        table = placed(shape, _mesh(config.parallel_config), rank, DTYPE_NAMES[config.model_config.dtype])
        self._beamline_close()
        self.beamline_loader = Loader(self.model_runner.get_model(), table, given, bucket_bytes)
        own = gpu_of(self.device)
        return sorted(visible_gpus(), key=lambda gpu: gpu != own)

    def beamline_join(self, meeting: bytes) -> None:
        """Meet the learner's ranks in a group."""
        where = decode(meeting, Meeting)
        self.beamline_group = where.join(where.sources + self._beamline_rank())
        place = self.device if where.backend == "nccl" else "cpu"
        self.beamline_buffer = torch.empty(self.beamline_loader.most_bytes, dtype=torch.uint8, device=place)

    @torch.no_grad()
    def beamline_fill(self, bucket: int, memory: Sequence[Sequence[bytes]] | None) -> None:
        """Copy this rank's bucket of each rank of the learner to where its parts belong."""
        if memory is None:
            self._beamline_receive(bucket)
            return
        here = memory[self._beamline_rank()]
        for source, descriptor in enumerate(here):
            if descriptor:
                if descriptor not in self.beamline_shared:  # that of a GPU is attached to once in all its life
                    self.beamline_shared[descriptor] = attach(descriptor)
                self.beamline_loader.fill(source, bucket, self.beamline_shared[descriptor].buffer)
        if any(here):
            torch.cuda.synchronize(self.device)  # the senders write other buckets over these

    def _beamline_receive(self, bucket: int) -> None:
        group = self.beamline_group
        assert group is not None
        for source, nbytes in self.beamline_loader.sizes(bucket):
            buffer = self.beamline_buffer[:nbytes]
            group.receive(buffer, source)
            self.beamline_loader.fill(source, bucket, buffer)
            torch.cuda.synchronize(self.device)  # another is received over it

    @torch.no_grad()
    def beamline_finish(self) -> list[int]:
        """Checksums of a fixed sample of what was given, as it lies there now."""
        return self.beamline_loader.finish()

    def beamline_keep(self) -> None:
        """Before sleep 2: keep what lies among the weights and is no weight, nor a buffer that vLLM keeps itself."""
        workspace = self._beamline_workspace()
        self.beamline_flags = None if workspace is None else workspace.flags.cpu()

    def beamline_put_back(self) -> None:
        """After it: without its flags Beam's fused all-reduce (ranks joined by NVLink multicast) would wait forever."""
        workspace = self._beamline_workspace()
        if workspace is not None and self.beamline_flags is not None:
            workspace.flags.copy_(self.beamline_flags)

    def _beamline_workspace(self) -> Any:
        return self.model_runner.get_model().model.allreduce_workspace

    def _beamline_close(self) -> None:
        for shared in getattr(self, "beamline_shared", {}).values():
            shared.close()
        self.beamline_shared = {}
        if (group := getattr(self, "beamline_group", None)) is not None:
            group.close()
        self.beamline_group = None

    def _beamline_rank(self) -> int:
        rank: int = self.vllm_config.parallel_config.rank
        return rank


def _mesh(parallel: Any) -> Mesh:
    return Mesh(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel)


class Loader:
    """Puts parts of Hugging Face tensors where a running vLLM model has them.

    Most parameters lie as in a checkpoint, and are written where they are. A layer that is quantized, or whose kernel
    wants its experts in another order, is laid open first, as vLLM's own reload does it: parameters in the checkpoint's
    form are allocated, filled, processed by the layer's method once they are complete, and the outcome is copied over
    the old, so that captured graphs go on to find it.

    Args:
        model: the running model.
        table: what this rank holds, and where.
        shares: what it will be given by each rank of the learner, in order.
        bucket_bytes: most bytes of a bucket.

    Raises:
        KeyError: a part of a tensor that this rank does not hold.
    """

    def __init__(self, model: nn.Module, table: Sequence[Placed], shares: Sequence[Share], bucket_bytes: int) -> None:
        self._modules = dict(model.named_modules())
        self._table = {each.part.name: each for each in table}
        self._buckets = [buckets(share, bucket_bytes) for share in shares]
        self._sampled = list(chain.from_iterable(samples(shares)))
        self._layers = self._processed(chain.from_iterable(shares))
        self._copiers: dict[tuple[int, int], Copier] = {}
        self._checksums: dict[int, int] = {}

    @property
    def most_bytes(self) -> int:
        """Of the largest bucket."""
        return max((bucket.nbytes for each in self._buckets for bucket in each), default=0)

    def sizes(self, number: int) -> list[tuple[int, int]]:
        """The ranks of the learner that have a bucket of this number, and how many bytes it has."""
        return [(s, each[number].nbytes) for s, each in enumerate(self._buckets) if number < len(each)]

    def fill(self, source: int, number: int, buffer: Tensor) -> None:
        """Copy one bucket of a rank of the learner; layers that it completes are processed."""
        bucket = self._buckets[source][number]
        parts = bucket.parts
        touched = {self._module_of(part) for part in parts} & self._layers.keys()
        for name in touched:
            self._layers[name].open()
        copier = self._copiers.get((source, number)) or Copier(bucket, self._view)
        copier.unpack(buffer)
        if not touched:
            self._copiers[source, number] = copier  # what is written in place stays where it is
        for part in parts:
            if self._module_of(part) in touched:
                self._layers[self._module_of(part)].missing -= prod(part.size)
        for name in touched:
            if self._layers[name].missing == 0:
                self._take_checksums(name)
                self._layers[name].close()

    def finish(self) -> list[int]:
        """Checksums of the sampled parts; those of layers that were processed are from before.

        Raises:
            RuntimeError: a layer is not complete.
        """
        if lacking := sorted(name for name, layer in self._layers.items() if layer.missing):
            raise RuntimeError(f"weights of {', '.join(lacking)} were not given completely")
        for layer in self._layers.values():
            layer.await_all()
        for name in {self._module_of(part) for part in self._sampled} - self._layers.keys():
            self._take_checksums(name)
        found = [self._checksums[i] for i in range(len(self._sampled))]
        self._checksums = {}
        return found

    def _take_checksums(self, module: str) -> None:
        """Of the sampled parts of a module, as they lie there now."""
        for i, part in enumerate(self._sampled):
            if self._module_of(part) == module:
                self._checksums[i] = checksum(self._view(part), part.dtype)

    def _view(self, part: TensorSlice) -> Tensor:
        """Where a part lies now, as a tensor of its shape.

        Raises:
            ModelError: the parameter has another shape than a checkpoint's weights, such as one that a kernel pads.
        """
        place = self._table[part.name]
        module, _, leaf = place.parameter.rpartition(".")
        parameter: Tensor = getattr(self._modules[module], leaf).data
        if parameter.shape != place.shape:
            raise ModelError(
                f"vLLM holds {place.parameter} as {tuple(parameter.shape)}, and weights come for {place.shape}: a "
                "kernel wants it padded; use rollout.vllm.expert_parallel=true, or "
                "rollout.vllm.engine_args.moe_backend=triton"
            )
        return _inside(parameter[place.box], place.part, part)

    def _module_of(self, part: TensorSlice) -> str:
        return self._table[part.name].parameter.rpartition(".")[0]

    def _processed(self, parts: Iterable[TensorSlice]) -> dict[str, "_Layer"]:
        """The layers that are given anything and do not use it as it is."""
        elements: Counter[str] = Counter()
        for part in parts:
            elements[self._module_of(part)] += prod(part.size)
        modules = {name: self._modules[name] for name in elements}
        return {name: _Layer(each, elements[name]) for name, each in modules.items() if not lies_as_stored(each)}


class _Layer:
    """A layer whose kernels want weights in another form than a checkpoint has them, while it takes new ones.

    ``missing`` are the elements that it has not been given yet, of ``elements`` in all.
    """

    def __init__(self, module: nn.Module, elements: int) -> None:
        self._module, self._elements = module, elements
        self._is_open = False
        self.await_all()

    def await_all(self) -> None:
        """Another load begins, in which nothing has been given yet."""
        self.missing = self._elements

    def open(self) -> None:
        """Give the layer parameters in the checkpoint's form, with nothing in them; the old ones are kept aside."""
        if self._is_open:
            return
        from vllm.model_executor.model_loader.reload import layerwise, meta

        info = layerwise.get_layerwise_info(self._module)
        info.kernel_tensors = layerwise.get_layer_params_buffers(self._module)
        info.kernel_non_persistent_buffers = set(self._module._non_persistent_buffers_set)
        meta.restore_layer_on_meta(self._module, info)
        meta.materialize_layer(self._module, info)
        self._is_open = True

    def close(self) -> None:
        """Process what the layer was given, and copy the outcome over the parameters that its kernels use."""
        from vllm.model_executor.model_loader.reload import layerwise

        layer: Any = self._module
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        layer.quant_method.process_weights_after_loading(layer)
        info = layerwise.get_layerwise_info(layer)
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()
        self._is_open = False


def _inside(whole: Tensor, held: TensorSlice, part: TensorSlice) -> Tensor:
    """The box of ``part`` in a view of ``held``, which has one more dimension in a stack of experts."""
    matrix = whole if whole.dim() == len(held.size) else whole[0]
    return matrix[part.within(held)]


def lies_as_stored(module: nn.Module) -> bool:
    """Whether a layer's kernels use its parameters just as a checkpoint has them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        as_stored = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
        return method.unquantized_backend in as_stored
    return method is None or isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
