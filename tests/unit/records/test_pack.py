from dataclasses import replace

import numpy as np
import pytest

from beamline.records import Batch, Experience, Support, pack
from tests.samples import make_rollout


def two_sequences() -> Batch:
    first = make_rollout(prompt=2, response=3, sample=0, temperature=0.5)
    second = make_rollout(prompt=1, response=2, sample=1, temperature=2.0)
    return pack([Experience(first, 1.5), Experience(second, -0.25)])


def test_a_row_holds_a_token_and_the_token_it_predicts() -> None:
    batch = two_sequences()
    assert batch.input_ids_N.tolist() == [0, 1, 2, 3, 100, 101]
    assert batch.target_ids_N.tolist() == [1, 2, 3, 4, 101, 102]
    assert batch.rows == 6


def test_positions_restart_and_borders_separate_the_sequences() -> None:
    batch = two_sequences()
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens_B1.tolist() == [0, 4, 6]


def test_per_token_values_stand_on_the_row_that_predicts_the_token() -> None:
    batch = two_sequences()
    assert batch.loss_mask_N.tolist() == [False, True, True, True, True, True]
    assert batch.sampler_logprobs_N.tolist() == [0, -1, -2, -3, -1, -2]


def test_advantages_are_spread_over_rows_and_temperatures_are_one_a_sequence() -> None:
    batch = two_sequences()
    assert batch.advantages_N.tolist() == [1.5] * 4 + [-0.25] * 2
    assert batch.temperature_B.tolist() == [0.5, 2.0]


def test_types_are_those_of_the_record() -> None:
    batch = two_sequences()
    ids = (batch.input_ids_N, batch.target_ids_N, batch.position_ids_N, batch.cu_seqlens_B1)
    assert {array.dtype for array in ids} == {np.dtype(np.int64)}
    assert batch.loss_mask_N.dtype == np.bool_
    assert {a.dtype for a in (batch.advantages_N, batch.sampler_logprobs_N, batch.temperature_B)} == {np.dtype("f4")}


def test_a_sequence_that_is_not_trained_has_rows_but_no_loss() -> None:
    batch = pack([Experience(make_rollout(), 1.0, trained=False), Experience(make_rollout(), 1.0)])
    assert batch.loss_mask_N.tolist() == [False] * 6 + [False, False, True, True, True, True]


def test_tokens_of_tools_in_the_middle_are_not_trained() -> None:
    rollout = replace(make_rollout(prompt=1, response=4), policy_mask=np.array([False, True, False, False, True]))
    assert pack([Experience(rollout, 1.0)]).loss_mask_N.tolist() == [True, False, False, True]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_stay_ragged_and_keep_their_type(dtype: type[np.unsignedinteger]) -> None:
    routes = [np.arange(6 * 2 * 3).reshape(6, 2, 3).astype(dtype), np.full((6, 2, 3), 7, dtype)]
    batch = pack([Experience(make_rollout(routes=r), 1.0) for r in routes])
    assert batch.routes_NLK is not None
    assert batch.routes_NLK.dtype == dtype
    assert np.array_equal(batch.routes_NLK, np.concatenate(routes))


def test_without_routes_there_are_none() -> None:
    assert two_sequences().routes_NLK is None


def test_routes_in_only_some_of_the_sequences_are_an_error() -> None:
    some = [Experience(make_rollout(routes=r), 1.0) for r in (np.zeros((6, 1, 1), np.uint8), None)]
    with pytest.raises(ValueError, match="1 of 2 sequences have routes"):
        pack(some)


def recorded() -> Batch:
    """A sequence without a support between two that have one, in which token t of the response could be t ids."""
    entries = [np.arange(n, dtype=np.int32) for n in (0, 0, 0, 1, 2, 3, 4)]
    some = replace(make_rollout(prompt=3, response=4), support=Support.of(entries))
    return pack([Experience(r, 1.0) for r in (some, make_rollout(prompt=1, response=2), some)])


def test_the_support_of_a_token_stands_on_the_row_that_predicts_it() -> None:
    support = recorded().support_N
    assert support is not None
    sizes = [0, 0, 1, 2, 3, 4]
    assert support.sizes.tolist() == [*sizes, 0, 0, *sizes]
    assert support.ids.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3] * 2


def test_the_support_of_some_rows_is_in_their_order() -> None:
    support = recorded().support_of(np.array([12, 6, 2]))
    assert support is not None
    assert support.sizes.tolist() == [3, 0, 1]


def test_without_recorded_supports_there_is_none() -> None:
    batch = two_sequences()
    assert (batch.support_N, batch.support_of(np.arange(2))) == (None, None)


def test_nothing_to_pack_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sequence"):
        pack([])


def test_a_sequence_of_one_token_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"sample=4.* has 1 tokens"):
        pack([Experience(make_rollout(prompt=0, response=1, sample=4), 1.0)])
