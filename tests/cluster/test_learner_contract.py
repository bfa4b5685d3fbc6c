"""What every learner must do, of one over Megatron-Core: the tests of the contract, on one rank in this process."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from beamline.runtime.determinism import make_deterministic
from tests.cluster.learner import megatron_learner, one_rank_on_the_cpu
from tests.contract.engines import LearnerFactory, PairFactory, with_local_sampler
from tests.contract.learning import batch, update
from tests.contract.test_learner import *  # noqa: F403
from tests.contract.test_learner_algorithms import *  # noqa: F403
from tests.contract.test_learner_state import *  # noqa: F403
from tests.tiny_beam import random_beam

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")  # of itself, a thousand times


@pytest.fixture
def learner_factory() -> LearnerFactory:
    return megatron_learner


@pytest.fixture
def pair_factory() -> PairFactory:
    return partial(with_local_sampler, megatron_learner)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    strict = torch.are_deterministic_algorithms_enabled()
    make_deterministic(threads=1)
    with one_rank_on_the_cpu():
        yield
    torch.use_deterministic_algorithms(strict)


def test_a_learner_that_is_let_go_of_leaves_no_memory_behind() -> None:
    learner: Any = megatron_learner(random_beam())
    update(learner, batch())
    kept, dropped = learner._rank.optimizer.memory()
    memory = [weakref.ref(tensor) for tensor in (*kept, *dropped)]
    del learner, kept, dropped
    gc.collect()
    assert [each() for each in memory] == [None] * len(memory)
