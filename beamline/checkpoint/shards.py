"""Slices of tensors in files, one file for each group and rank; any layout reads what any other wrote."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from beamline.checkpoint.errors import CheckpointError
from beamline.checkpoint.files import Bytes, FileDigest, make_folder, read_json, write_atomic, write_json
from beamline.checkpoint.header import StoredSlice, byte_size, encode_header, raw_dtype, read_header
from beamline.model.layout import TensorSlice

Group = Literal["policy", "optimizer"]

GROUPS: tuple[Group, ...] = ("policy", "optimizer")
SHARDS = "rank_*.safetensors"
"""Pattern of the shards in the folder of a group."""
RUN_STATE = "run_state"
MANIFEST = "manifest"


class ShardWriter:
    """Writes what one rank holds. ``digests`` has every file written so far, by its path relative to ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.digests: dict[str, FileDigest] = {}

    def write(self, group: Group, slices: Sequence[TensorSlice], buffers: Iterable[memoryview | np.ndarray]) -> None:
        """Write the rank's shard of a group, once: ``buffers`` gives the content of each slice, in their order.

        A buffer is an array of the slice's size and element width (of any type: bfloat16 goes as uint16), or a
        memoryview of the same bytes in C order. It is taken when its turn comes and not kept.

        Raises:
            ValueError: the group is written already, a slice is given twice, or buffers do not match the slices.
            OSError: the disk fails; see :func:`~beamline.checkpoint.files.write_atomic`.
        """
        relative = f"{group}/rank_{self.rank:05d}.safetensors"
        if relative in self.digests:
            raise ValueError(f"{self.folder / relative} is written already: give all slices of a group in one call")
        make_folder(self.folder / group)
        path = self.folder / relative
        content = chain([encode_header(slices)], _checked(path, slices, buffers))
        self.digests[relative] = write_atomic(path, content)

    def write_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Write small plain data, the same for every rank, as ``<name>.json``; one rank writes it.

        Raises:
            ValueError: the name is not a plain word, or is used by the checkpoint itself.
            TypeError: a value is not plain data, or a number is not finite.
        """
        if not name.isidentifier() or name in (RUN_STATE, MANIFEST):
            raise ValueError(f"state {name!r}: use a plain word other than {RUN_STATE} and {MANIFEST}")
        self.digests[f"{name}.json"] = write_json(self.folder / f"{name}.json", state)


class ShardReader:
    """Reads slices from the shards of all ranks in a checkpoint's folder, whatever layout wrote them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._indices: dict[Group, dict[str, list[StoredSlice]]] = {}

    def slices(self, group: Group) -> Sequence[TensorSlice]:
        """Every slice that the shards hold, replicas included, tensor by tensor.

        Raises:
            CheckpointError: the group has no shard, or one is damaged.
        """
        return [stored.part for holders in self._index(group).values() for stored in holders]

    def read(self, group: Group, part: TensorSlice) -> NDArray[np.unsignedinteger[Any]]:
        """The content of a box, put together from the slices that meet it; nothing else is read.

        Returns a new array of shape ``part.size`` whose elements are the raw bits: uint32 for float32, uint16 for
        bfloat16 and float16, uint8. Where slices overlap they are replicas, and the first one is taken.

        Raises:
            CheckpointError: the tensor is missing, has another shape or type, or is not covered; a shard is damaged.
        """
        holders = self._holders(group, part)
        result = np.empty(part.size, raw_dtype(part.dtype))
        missing = [part]
        for holder in holders:
            rest: list[TensorSlice] = []
            for box in missing:
                common = box.intersect(holder.part)
                if common is None:
                    rest.append(box)
                    continue
                result[common.within(part)] = holder.map()[common.within(holder.part)]
                rest.extend(box.without(common))
            missing = rest
        if missing:
            gaps = ", ".join(f"{box.start}:{box.stop}" for box in missing[:3])
            lost = sum(math.prod(box.size) for box in missing)
            raise CheckpointError(
                f"{self.folder / group}: no shard holds {lost} of the {math.prod(part.size)} elements of "
                f"{part.name}{list(part.shape)} at {part.start}:{part.stop}; the first gaps are {gaps}"
            )
        return result

    def read_state(self, name: str) -> dict[str, Any]:
        """What :meth:`ShardWriter.write_state` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return read_json(self.folder / f"{name}.json")

    def _holders(self, group: Group, part: TensorSlice) -> list[StoredSlice]:
        holders = self._index(group).get(part.name)
        if holders is None:
            raise CheckpointError(
                f"{self.folder / group}: no shard has the tensor {part.name} ({part.dtype} {list(part.shape)})"
            )
        for holder in holders:
            found = holder.part
            if (found.shape, found.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"{holder.path}: tensor {part.name}: expected {part.dtype} {list(part.shape)}, "
                    f"found {found.dtype} {list(found.shape)}"
                )
        return holders

    def _index(self, group: Group) -> dict[str, list[StoredSlice]]:
        if group not in self._indices:
            paths = sorted((self.folder / group).glob(SHARDS))
            if not paths:
                raise CheckpointError(f"{self.folder / group} holds no shard ({SHARDS})")
            index: dict[str, list[StoredSlice]] = {}
            for stored in chain.from_iterable(map(read_header, paths)):
                index.setdefault(stored.part.name, []).append(stored)
            self._indices[group] = index
        return self._indices[group]


def _checked(path: Path, slices: Sequence[TensorSlice], buffers: Iterable[memoryview | np.ndarray]) -> Iterator[Bytes]:
    """The buffers, each compared with the slice that it is for."""
    stream = iter(buffers)
    for count, part in enumerate(slices):
        buffer = next(stream, None)
        if buffer is None:
            raise ValueError(f"{path}: {len(slices)} slices but only {count} buffers")
        width = raw_dtype(part.dtype).itemsize
        if isinstance(buffer, np.ndarray) and (buffer.shape, buffer.itemsize) != (part.size, width):
            raise ValueError(
                f"{path}: {part.name}: expected an array {part.size} of {width} bytes an element, "
                f"got {buffer.shape} of {buffer.itemsize}"
            )
        if buffer.nbytes != byte_size(part):
            raise ValueError(f"{path}: {part.name}: expected {byte_size(part)} bytes, got {buffer.nbytes}")
        yield buffer
    if next(stream, None) is not None:
        raise ValueError(f"{path}: more buffers than the {len(slices)} slices")
