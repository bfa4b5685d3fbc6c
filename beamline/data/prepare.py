"""From a raw data set to a clean file of DAPO's columns, with a manifest that accounts for every row."""

import io
import platform
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

import beamline
from beamline.checkpoint.files import hash_file, make_folder, write_atomic, write_json
from beamline.data.cleaning import Advance, Cleaned, Wording, clean, distinct
from beamline.data.errors import DataError
from beamline.data.files import Row, batches, explained, is_parquet, read_rows
from beamline.data.hub import KNOWN, fetch

RULE = (
    "rows are unique by data_source, prompt, ability and reward_model, the first one stays; then every prompt with "
    "more than one ground_truth is dropped; order of first appearance"
)
_EVERY = 4096  # rows between signs of progress


@dataclass(frozen=True, slots=True)
class Raw:
    """A raw file, what its prepared file is called, and the data source of rows that name none."""

    file: Path
    stem: str
    data_source: str
    repository: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files that were written, and what the manifest says."""

    file: Path
    manifest_file: Path
    manifest: dict[str, Any]


def find(source: str, out: Path, file: Path | None = None, wording: Wording = "keep") -> Raw:
    """The raw file of a source: a known data set, from ``file`` or else from the hub, or the path of a file.

    ``out`` and ``wording`` are for the message that says how to go on.

    Raises:
        DataError: there is no such data set or file, or it cannot be fetched.
    """
    if source in KNOWN:
        known = KNOWN[source]
        if file is None:
            options = [] if wording == "keep" else ["--wording", wording]
            again = shlex.join(["beamline", "data", "prepare", source, "--out", str(out), *options])
            file = fetch(source, again)
        return Raw(file, known.stem, known.data_source, known.repository)
    if file is not None:
        raise DataError(f"--from names the raw file of {', '.join(KNOWN)}; {source!r} is none of them")
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source!r} is neither a file nor a known data set ({', '.join(KNOWN)})")
    return Raw(path, path.stem, path.stem)


def prepare(raw: Raw, out: Path, wording: Wording = "keep", advance: Advance = lambda rows: None) -> Prepared:
    """Clean a raw file into ``<out>/<stem>-cleaned.parquet``, with ``<stem>-cleaned.manifest.json`` beside it.

    The same raw file gives the same bytes, on every machine and any number of threads. Both files are written whole
    or not at all, the manifest last. ``advance`` is told of rows as they are read.

    Raises:
        DataError: the file cannot be read, or nothing is left of it.
        OSError: the disk fails.
    """
    cleaned = _cleaned(raw, wording, advance)
    if not cleaned.rows:
        first = f"; {cleaned.unusable[0].where}: {cleaned.unusable[0].reason}" if cleaned.unusable else ""
        raise DataError(f"nothing is left of the {cleaned.read} rows of {raw.file}{first}")
    buffer = io.BytesIO()
    cleaned.frame().write_parquet(buffer, compression="zstd", compression_level=3)
    make_folder(out)
    file = out / f"{raw.stem}-cleaned.parquet"
    digest = write_atomic(file, [buffer.getbuffer()])
    manifest = {
        "source": {"file": raw.file.name, "repository": raw.repository, **asdict(hash_file(raw.file))},
        "output": {"file": file.name, **asdict(digest)},
        "rows": cleaned.counts(),
        "rule": RULE,
        "wording": wording,
        "versions": {
            "beamline": beamline.__version__,
            "polars": pl.__version__,
            "python": platform.python_version(),
        },
    }
    manifest_file = file.with_suffix(".manifest.json")
    write_json(manifest_file, manifest)
    return Prepared(file, manifest_file, manifest)


def _cleaned(raw: Raw, wording: Wording, advance: Advance) -> Cleaned:
    if not is_parquet(raw.file):
        return clean(_counted(read_rows(raw.file), advance), raw.data_source, wording)
    with explained(raw.file):
        rows, read = distinct(batches(raw.file), advance)
    return clean(rows, raw.data_source, wording, read)


def _counted(rows: Iterator[Row], advance: Advance) -> Iterator[Row]:
    for count, row in enumerate(rows, start=1):
        if count % _EVERY == 0:
            advance(_EVERY)
        yield row
