import pytest
import torch
from hypothesis import settings

from beamline.chat import BeamChat
from beamline.starter import STARTER

# The same examples in every run, and no deadline: the machine may be busy with something else.
settings.register_profile("beamline", derandomize=True, deadline=None, database=None)
settings.load_profile("beamline")

# Tests run side by side, and workers that have more threads than cores wait for each other in tiny operations.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def chat() -> BeamChat:
    """The starter's tokenizer and chat format."""
    return BeamChat(STARTER)
