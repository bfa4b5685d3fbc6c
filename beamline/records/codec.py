"""One codec for everything between processes: msgpack with typed records and raw arrays, never pickle."""

from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

T = TypeVar("T")


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(record: Any) -> bytes:
    """Serialize a record (or a container of records) to bytes.

    Raises:
        TypeError: the value holds something that is neither a record, an array nor plain data.
    """
    return msgspec.msgpack.encode(record, enc_hook=_encode_array)


def decode(data: bytes, kind: type[T]) -> T:
    """Read what :func:`encode` wrote, checked against the type ``kind``.

    Raises:
        msgspec.ValidationError: the bytes do not describe a ``kind``.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> _Array:
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"codec: cannot encode a {type(value).__name__}")
    return _Array(value.dtype.str, value.shape, value.tobytes())


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray or get_origin(kind) is np.ndarray:
        array = msgspec.convert(value, _Array)
        return np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(array.shape)
    raise TypeError(f"codec: cannot decode a {kind}")
