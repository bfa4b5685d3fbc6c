"""Tests of the learner over Megatron-Core, on the CPU. They need Python 3.12 and megatron-core."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("megatron") is None:
        for item in (item for item in items if HERE in item.path.parents):  # pytest gives those of all folders
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed (it needs Python 3.12 or later)"))
