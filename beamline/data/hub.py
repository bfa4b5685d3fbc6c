"""The data sets that are known by name, and where their raw files come from."""

from dataclasses import dataclass
from pathlib import Path

from beamline.data.errors import DataError


@dataclass(frozen=True, slots=True)
class Known:
    """A data set of the Hugging Face hub: its repository and file, and what it is called once it is prepared.

    ``data_source`` is for rows that do not name theirs.
    """

    repository: str
    file: str
    stem: str
    data_source: str


KNOWN = {
    "dapo": Known("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet", "dapo-math-17k", "math_dapo"),
    "aime-2024": Known("BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet", "aime-2024", "aime-2024"),
    "aime-2025": Known("zhuzilin/aime-2025", "aime-2025.jsonl", "aime-2025", "aime-2025"),
}


def fetch(name: str, again: str) -> Path:
    """The raw file of a known data set, downloaded into the hub's cache unless it is there.

    ``again`` is the command that goes on with a file that was downloaded elsewhere.

    Raises:
        DataError: it cannot be had; the message says what to download and how to go on.
    """
    from huggingface_hub import hf_hub_download  # it takes a second, and only this needs it

    known = KNOWN[name]
    try:
        return Path(hf_hub_download(known.repository, known.file, repo_type="dataset"))
    except OSError as error:  # what the hub's client raises for network, access and disk alike
        raise DataError(
            f"cannot fetch {known.file} of the data set {known.repository} from the Hugging Face hub "
            f"({type(error).__name__}: {(str(error) or 'no detail').splitlines()[0]}). Where there is a network, run\n"
            f"  hf download --repo-type dataset {known.repository} {known.file} --local-dir .\n"
            f"bring the file here, and run\n"
            f"  {again} --from {known.file}"
        ) from error
