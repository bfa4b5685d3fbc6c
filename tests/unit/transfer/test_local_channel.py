import pytest
import torch
from torch import Tensor

from beamline.model.layout import Layout, TensorSlice
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import Move, TransferError, TransferPlan, plan
from beamline.transfer.source import Tensors


def plan_of(tensors: dict[str, Tensor]) -> TransferPlan:
    side = Layout((tuple(TensorSlice.whole(name, "float32", tuple(t.shape)) for name, t in tensors.items()),))
    return plan(side, side)


def weights() -> dict[str, Tensor]:
    return {"matrix": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(7.0)}


def zeros(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in weights().items()}


def test_what_was_sent_arrives_in_place() -> None:
    channel, received, moves = LocalChannel(), zeros(), plan_of(weights())
    addresses = {name: tensor.data_ptr() for name, tensor in received.items()}
    channel.send(moves, Tensors(weights()))
    channel.receive(moves, received)
    assert all(torch.equal(received[name], tensor) for name, tensor in weights().items())
    assert {name: tensor.data_ptr() for name, tensor in received.items()} == addresses


def test_values_are_cast_to_the_receivers_type() -> None:
    channel, received, moves = LocalChannel(), zeros(torch.bfloat16), plan_of(weights())
    channel.send(moves, Tensors({"matrix": weights()["matrix"] + 1 / 3, "scalar": torch.tensor(0.1)}))
    channel.receive(moves, received)
    assert received["matrix"].dtype == torch.bfloat16
    assert torch.equal(received["matrix"], (weights()["matrix"] + 1 / 3).bfloat16())


def test_only_the_planned_slices_are_touched() -> None:
    channel, received = LocalChannel(), zeros()
    moves = TransferPlan((Move(0, 0, TensorSlice("matrix", "float32", (2, 3), (1, 0), (2, 2))),))
    channel.send(moves, Tensors(weights()))
    channel.receive(moves, received)
    assert received["matrix"].tolist() == [[0, 0, 0], [3, 4, 0]]
    assert received["scalar"] == 0


def test_receiving_before_anything_was_sent_is_an_error() -> None:
    with pytest.raises(TransferError, match=r"call learner\.send\(plan\) first"):
        LocalChannel().receive(plan_of(weights()), zeros())


def test_what_was_sent_is_received_once() -> None:
    channel, moves = LocalChannel(), plan_of(weights())
    channel.send(moves, Tensors(weights()))
    channel.receive(moves, zeros())
    with pytest.raises(TransferError, match="has not sent"):
        channel.receive(moves, zeros())


def test_what_was_sent_can_be_taken_as_it_is_once() -> None:
    channel, moves, sent = LocalChannel(), plan_of(weights()), Tensors(weights())
    channel.send(moves, sent)
    assert channel.take(moves) is sent
    with pytest.raises(TransferError, match="has not sent"):
        channel.take(moves)


def test_receiving_under_another_plan_is_an_error_and_changes_nothing() -> None:
    channel, received, moves = LocalChannel(), zeros(), plan_of(weights())
    channel.send(moves, Tensors(weights()))
    with pytest.raises(TransferError, match="under this plan"):
        channel.receive(TransferPlan(moves.moves[:1]), received)
    assert all(not tensor.any() for tensor in received.values())


def test_a_plan_is_compared_by_what_it_says() -> None:
    channel, received = LocalChannel(), zeros()
    channel.send(plan_of(weights()), Tensors(weights()))
    channel.receive(plan_of(weights()), received)
    assert received["scalar"] == 7
