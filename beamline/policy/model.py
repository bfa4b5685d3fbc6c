"""Loading, running and writing the Hugging Face module."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BeamConfig, BeamForCausalLM

from beamline.checkpoint import CheckpointError, ShardReader
from beamline.model.beam import BeamShape, ModelError, TensorSpec, tensors
from beamline.model.layout import DType, TensorSlice
from beamline.policy import attention, hooks
from beamline.policy.dropout import Dropout
from beamline.policy.hooks import Brought
from beamline.policy.lora import Adapters
from beamline.policy.weights import module_layout, named_tensors
from beamline.transfer.dtypes import TORCH_DTYPES

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

SHARD_BYTES = 5 << 30
"""Most bytes of a file of weights, as others cut them; a tensor is never cut."""


def build(config: BeamConfig, dtype: DType) -> nn.Module:
    """A Beam module for :func:`hidden_states`, in ``dtype`` but for the router, which stays float32."""
    # The type is given, because the configuration's own is that of the file, and would be the router's too.
    module = cast(
        nn.Module,
        BeamForCausalLM._from_config(
            config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=attention.NAME,
            experts_implementation=hooks.EXPERTS,
        ),
    )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if ".mlp.gate." in name:
            tensor.data = tensor.data.float()
    hooks.install(module)
    return module


def load(folder: Path, dtype: DType) -> nn.Module:
    """Read a Beam model folder (safetensors, one file or sharded with an index), cast to ``dtype``.

    Raises:
        ModelError: a file is missing or corrupt, a tensor is missing, unknown, misshapen or not finite.
    """
    shape = BeamShape.from_folder(folder)
    module = build(BeamConfig.from_pretrained(folder), dtype)
    own = named_tensors(module)
    expected = {spec.name: spec.shape for spec in tensors(shape)}
    if {name: tuple(tensor.shape) for name, tensor in own.items()} != expected:
        raise ModelError(f"{folder}: the module of transformers and our table of Beam's tensors disagree")
    with stored_weights(folder, shape) as read:
        for part in module_layout(module).ranks[0]:
            own[part.name].copy_(read(part))
    return module


def fingerprint(folder: Path) -> str:
    """A hash of what a model folder computes: its shape and its tensors, however they are shared out over files.

    Raises:
        ModelError: a file is missing or corrupt.
    """
    shape, rope = BeamShape.from_folder(folder), BeamConfig.from_pretrained(folder).rope_parameters
    digest = hashlib.sha256(f"{shape}{json.dumps(rope, sort_keys=True)}".encode())
    tensors = {name: found for path in _weight_files(folder) for name, found in _stored(path)}
    for name, (kind, size, content) in sorted(tensors.items()):
        digest.update(f"{name} {kind} {size}".encode())
        digest.update(content)
    return digest.hexdigest()


def _stored(path: Path) -> Iterator[tuple[str, tuple[str, list[int], memoryview]]]:
    """Name, type, shape and bytes of each tensor of a safetensors file, which is mapped and not read."""
    try:
        content = np.memmap(path, mode="r").data
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8:start]))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, (entry["dtype"], entry["shape"], content[start + first : start + last])
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is corrupt: {error}; copy the model again") from error


def restore(tensors: Mapping[str, Tensor], reader: ShardReader) -> None:
    """Fill tensors, given by name, with the weights of a checkpoint, whatever layout saved it.

    A checkpoint holds float32; what is of another type gets them rounded.

    Raises:
        CheckpointError: the checkpoint is of other tensors: of every weight or of adapters, or of other adapters; one
            is misshapen, of another type or not finite.
    """
    check_saved(reader, tensors.keys())
    for name, tensor in tensors.items():
        tensor.copy_(saved(reader, TensorSlice.whole(name, "float32", tuple(tensor.shape))))


def check_saved(reader: ShardReader, wanted: Collection[str]) -> None:
    """Make sure that a checkpoint has these tensors, and no others.

    Raises:
        CheckpointError: it has not.
    """
    found = {part.name for part in reader.slices("policy")}
    if found != set(wanted):
        kinds = {True: "an adapter", False: "every weight of a model"}
        of_adapter = any(".lora_A." in name for name in found)
        raise CheckpointError(
            f"{reader.folder} holds {kinds[of_adapter]}: {len(found)} tensors, of which {len(found - set(wanted))} "
            f"have no place and {len(set(wanted) - found)} are missing, first {min(found ^ set(wanted))}; use its own "
            "model and policy.lora settings"
        )


def saved(reader: ShardReader, part: TensorSlice) -> Tensor:
    """A slice of a weight of a checkpoint.

    Raises:
        CheckpointError: it is missing, misshapen, of another type or not finite.
    """
    tensor = torch.from_numpy(reader.read("policy", part)).view(TORCH_DTYPES[part.dtype])
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{part.name} holds values that are not finite: the checkpoint is damaged, use another one"
        )
    return tensor


def save(module: nn.Module, folder: Path, dtype: DType) -> None:
    """Write a module as :func:`write` does."""
    own = named_tensors(module)
    write(cast(Any, module).config, own.__getitem__, folder, dtype)


def write(
    config: BeamConfig,
    weight: Callable[[str], Tensor],
    folder: Path,
    dtype: DType,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``config.json`` and weights under checkpoint names: one file, or several of ``shard_bytes`` and an index.

    ``weight`` gives a tensor by its name; as many as a file holds are in memory at a time. The router is float32.

    Raises:
        OSError: the disk fails or is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors(BeamShape.from_config(config.to_dict()), dtype), shard_bytes))
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names if len(shards) > 1 else [_SINGLE], shards, strict=True):
        stored = {spec.name: weight(spec.name).to(TORCH_DTYPES[spec.dtype]).contiguous() for spec in shard}
        try:
            save_file(stored, str(folder / name), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {folder / name}: {error}") from error
    if len(shards) > 1:
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        total = sum(_bytes(spec) for shard in shards for spec in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    written = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
    written |= {"dtype": dtype, "architectures": ["BeamForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def _shards(specs: Iterable[TensorSpec], most: int) -> Iterator[list[TensorSpec]]:
    """Tensors in their order, as many to a file as it may have bytes, one at least."""
    shard: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if shard and size + _bytes(spec) > most:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += _bytes(spec)
    yield shard


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize


def hidden_states(
    module: nn.Module,
    input_ids_N: Tensor,
    position_ids_N: Tensor,
    packing: attention.Packing,
    adapters: Adapters | None = None,
    routes_NLK: NDArray[np.unsignedinteger] | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Last hidden states ``[N, D]`` (after the final norm) of packed sequences.

    With ``adapters`` they are those of the module with adapters on it. ``routes_NLK`` are the experts that each row
    goes to in each MoE layer, in place of those that the routers would choose. ``dropout`` is that of the adapters.

    Raises:
        RuntimeError: the module did not use them: it was not made by :func:`build`, or transformers has changed.
    """
    routes = None if routes_NLK is None else torch.from_numpy(routes_NLK.astype(np.int64)).to(input_ids_N.device)
    output = cast(Any, module).model(
        input_ids=input_ids_N[None],
        position_ids=position_ids_N[None],
        # A mapping goes to the layers as it is: the packing, not a mask, says who sees whom.
        attention_mask={"full_attention": None, "sliding_attention": None},
        use_cache=False,
        packing=packing,
        brought=Brought(adapters, dropout, routes),
    )
    return cast(Tensor, output.last_hidden_state.squeeze(0))


@contextmanager
def stored_weights(folder: Path, shape: BeamShape) -> Iterator[Callable[[TensorSlice], Tensor]]:
    """A function that reads slices of the weights of a model folder. What is not asked for is not read.

    Raises:
        ModelError: a file is missing or corrupt, a tensor is missing, unknown, misshapen, or what is read of it is not
            finite.
    """
    expected = {spec.name: spec.shape for spec in tensors(shape)}
    with ExitStack() as files:
        found: dict[str, tuple[Path, Any]] = {}
        for path in _weight_files(folder):
            with _readable(path):
                file = files.enter_context(safe_open(str(path), framework="pt"))
                found |= {name: (path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118  no mapping
        for name, (path, stored) in found.items():
            if name not in expected:
                raise ModelError(f"{path} holds {name}, which this model does not have")
            if tuple(stored.get_shape()) != expected[name]:
                raise ModelError(f"{path}: {name} has shape {tuple(stored.get_shape())}, expected {expected[name]}")
        if missing := sorted(expected.keys() - found.keys()):
            raise ModelError(f"{folder} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}")

        def read(part: TensorSlice) -> Tensor:
            path, stored = found[part.name]
            with _readable(path):
                tensor: Tensor = stored[part.index]
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(f"{path}: {part.name} holds values that are not finite")
            return tensor

        yield read


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file that is missing or corrupt."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is corrupt: {error}; copy the model again") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / name for name in names]
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors: {error!r}") from error
    return [folder / _SINGLE]
