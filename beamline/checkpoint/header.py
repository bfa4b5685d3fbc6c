"""The head of a shard: a safetensors header that also knows boxes of larger tensors.

A tensor that is whole in the file is stored under its name. A box of a tensor is stored under the name with the box
appended, for instance ``lm_head.weight[0:128,0:64]``; what the box is part of stands under ``slices`` in the file's
``__metadata__``, as JSON: ``{key: {"name": ..., "shape": [...], "start": [...]}}``. Keys are never parsed, so a name
may be any string.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from beamline.checkpoint.errors import CheckpointError
from beamline.model.layout import DType, TensorSlice

_CODES: dict[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
_DTYPES: dict[str, DType] = {code: dtype for dtype, code in _CODES.items()}
_RAW: dict[DType, np.dtype[np.unsignedinteger[Any]]] = {
    "float32": np.dtype("<u4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Box(msgspec.Struct):
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice in a shard: its bytes begin at ``offset``, counted from the start of the file."""

    part: TensorSlice
    path: Path
    offset: int

    def map(self) -> NDArray[np.unsignedinteger[Any]]:
        """The slice as a memory-mapped array of its box's shape; only what is touched is read."""
        return np.memmap(self.path, raw_dtype(self.part.dtype), mode="r", offset=self.offset, shape=self.part.size)


def raw_dtype(dtype: DType) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer type that holds the bits of ``dtype``."""
    return _RAW[dtype]


def byte_size(part: TensorSlice) -> int:
    """Bytes of a slice."""
    return math.prod(part.size) * raw_dtype(part.dtype).itemsize


def encode_header(parts: Sequence[TensorSlice]) -> bytes:
    """Length and header of a shard that holds ``parts`` in this order, filled with spaces to 8 bytes.

    Raises:
        ValueError: two parts have the same key, or a tensor has the name that the format reserves.
    """
    entries: dict[str, Any] = {_METADATA: {}}
    boxes: dict[str, Any] = {}
    offset = 0
    for part in parts:
        key = _key(part)
        if key in entries:
            raise ValueError(f"shard: {key} is given twice, or has a name that the file format reserves")
        stop = offset + byte_size(part)
        entries[key] = {"dtype": _CODES[part.dtype], "shape": part.size, "data_offsets": (offset, stop)}
        if part.size != part.shape:
            boxes[key] = {"name": part.name, "shape": part.shape, "start": part.start}
        offset = stop
    entries[_METADATA] = {"slices": json.dumps(boxes)}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _LONGEST_HEADER:
        raise ValueError(f"shard: a header of {len(header)} bytes; the format allows {_LONGEST_HEADER}: use more ranks")
    return len(header).to_bytes(8, "little") + header


def read_header(path: Path) -> list[StoredSlice]:
    """The slices of a shard, in the order of their bytes; a file of the safetensors library works as well.

    Raises:
        CheckpointError: the file is truncated, or its header is not what the format asks for.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = 8 + length
        if length > _LONGEST_HEADER or begin > size:
            raise CheckpointError(f"{path} is damaged: a header of {length} bytes in a file of {size} bytes")
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop(_METADATA, b"{}"), type=dict[str, str])
        boxes = msgspec.json.decode(metadata.get("slices", "{}"), type=dict[str, _Box])
        parsed = [_parse(key, entry, boxes.get(key)) for key, entry in entries.items()]
    except (ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read: {error}") from error
    parsed.sort(key=lambda item: item[1])
    end = 0
    for part, offsets in parsed:
        expected = (end, end + byte_size(part))
        if offsets != expected:
            raise CheckpointError(f"{path} is damaged: {_key(part)} expected at bytes {expected}, found at {offsets}")
        end = expected[1]
    if begin + end != size:
        raise CheckpointError(f"{path} is damaged: expected {begin + end} bytes, found {size}")
    return [StoredSlice(part, path, begin + offsets[0]) for part, offsets in parsed]


def _key(part: TensorSlice) -> str:
    if part.size == part.shape:
        return part.name
    box = ",".join(f"{a}:{b}" for a, b in zip(part.start, part.stop, strict=True))
    return f"{part.name}[{box}]"


def _parse(key: str, raw: msgspec.Raw, box: _Box | None) -> tuple[TensorSlice, tuple[int, int]]:
    entry = msgspec.json.decode(raw, type=_Entry)
    if entry.dtype not in _DTYPES:
        raise ValueError(f"{key} has the type {entry.dtype}; expected one of {', '.join(_DTYPES)}")
    dtype = _DTYPES[entry.dtype]
    if box is None:
        return TensorSlice.whole(key, dtype, entry.shape), entry.data_offsets
    stop = tuple(a + n for a, n in zip(box.start, entry.shape, strict=True))
    return TensorSlice(box.name, dtype, box.shape, box.start, stop), entry.data_offsets
