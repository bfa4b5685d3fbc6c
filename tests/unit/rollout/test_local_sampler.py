"""What is the local sampler's own; all else is in the contract of samplers."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Key, Request, SamplingParams
from beamline.rollout.local import LocalSampler, Numerics
from beamline.rollout.local.worker import Drawn, NotFiniteError, Worker
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import plan
from beamline.transfer.source import Tensors
from tests.contract.sampling import run
from tests.exact import bits
from tests.tiny_beam import CONTEXT, THETA, VOCAB, beam_shape, random_beam


def local_sampler(
    positions: int = CONTEXT, module: nn.Module | None = None, slots: int = 2, threads: int = 1, **numerics: Any
) -> LocalSampler:
    channel = LocalChannel()
    sampler = LocalSampler(beam_shape(), Numerics(**numerics), THETA, slots, positions, 0, channel, threads)
    if module is not None:
        moves = plan(module_layout(module), sampler.layout("full"))
        channel.send(moves, Tensors(named_tensors(module)))
        sampler.receive(moves, 7, "keep")
    return sampler


def requests(count: int, max_tokens: int = 3) -> list[Request]:
    """Each with a prefix of its own."""
    params = SamplingParams(max_tokens)
    return [Request(Key("train", 1, "p", i), np.array([i % VOCAB], np.int32), params) for i in range(count)]


def test_sequences_longer_than_the_context_are_an_error() -> None:
    with pytest.raises(ValueError, match=f"{CONTEXT + 1} positions exceed the model's context of {CONTEXT}"):
        local_sampler(CONTEXT + 1)


def test_it_has_no_adapters() -> None:
    with pytest.raises(ValueError, match="has no adapters, and takes full weights only"):
        local_sampler().layout("adapter")


@pytest.mark.parametrize("level", [0, 3])
def test_there_are_two_levels_of_sleep(level: Any) -> None:
    with pytest.raises(ValueError, match=f"level must be 1 or 2, not {level}"):
        local_sampler().sleep(level)


def test_the_cache_cannot_wake_before_the_weights() -> None:
    sampler = local_sampler()
    sampler.sleep(2)
    with pytest.raises(RuntimeError, match=r"wake\(\['weights'\]\) first"):
        sampler.wake(["cache"])


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What workers are given as it happens: which work, in which thread, how many prefixes or rows."""
    seen: list[tuple[str, int, int]] = []

    def watch(name: str) -> None:
        original = getattr(Worker, name)

        def watched(self: Worker, share: Any, *rest: Any) -> Drawn:
            seen.append((name, threading.get_ident(), len(share)))
            drawn: Drawn = original(self, share, *rest)
            return drawn

        monkeypatch.setattr(Worker, name, watched)

    watch("prefill")
    watch("decode")
    return seen


def of(work: list[tuple[str, int, int]], name: str) -> NDArray[np.int64]:
    return np.array(sorted(size for kind, _, size in work if kind == name))


def test_work_is_shared_out_over_threads(work: list[tuple[str, int, int]]) -> None:
    sampler = local_sampler(module=random_beam(), slots=26, threads=3)
    sampler.submit(requests(26, max_tokens=2))
    assert len(sampler.poll(60.0)) == 26
    assert of(work, "prefill").tolist() == [8, 9, 9]
    assert of(work, "decode").tolist() == [8, 9, 9]
    assert threading.get_ident() in {thread for _, thread, _ in work}  # the one that polls works too


@pytest.mark.parametrize(("rows", "shares"), [(1, [1]), (8, [8]), (9, [4, 5]), (16, [8, 8]), (17, [5, 6, 6])])
def test_few_rows_wake_no_other_thread(work: list[tuple[str, int, int]], rows: int, shares: list[int]) -> None:
    sampler = local_sampler(module=random_beam(), slots=32, threads=3)
    sampler.submit(requests(rows, max_tokens=2))
    assert len(sampler.poll(60.0)) == rows
    assert of(work, "decode").tolist() == shares


def test_a_prefix_that_several_requests_share_is_evaluated_once(work: list[tuple[str, int, int]]) -> None:
    sampler = local_sampler(module=random_beam(), slots=8)
    of_two = [Request(r.key, np.array([i % 2], np.int32), r.params) for i, r in enumerate(requests(8, max_tokens=1))]
    sampler.submit(of_two)
    assert len(sampler.poll(60.0)) == 8
    assert of(work, "prefill").tolist() == [2]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_logits_that_are_not_finite_name_the_version(threads: int, last: bool) -> None:
    """Whichever thread it is that finds them."""
    asked = requests(3)
    sampler = local_sampler(module=random_beam(), slots=3, threads=threads)
    broken = int(asked[-1 if last else 0].prefix_ids[0])
    assert sampler._decoder is not None
    sampler._decoder.tensors["model.embed_tokens.weight"][broken] = torch.nan
    sampler.submit(asked)
    with pytest.raises(FloatingPointError, match="logits are not finite under version 7 of the weights"):
        sampler.poll(60.0)


def test_an_error_waits_until_no_thread_works_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, done = threading.Event(), []
    prefill = Worker.prefill

    def watched(self: Worker, share: Any, *rest: Any) -> Drawn:
        if threading.current_thread() is threading.main_thread():
            failing.set()
            raise NotFiniteError("logits are not finite")
        failing.wait()
        drawn = prefill(self, share, *rest)
        done.append(share)
        return drawn

    monkeypatch.setattr(Worker, "prefill", watched)
    sampler = local_sampler(module=random_beam(), threads=2)
    sampler.submit(requests(2))
    with pytest.raises(FloatingPointError):
        sampler.poll(60.0)
    assert len(done) == 1


def test_a_free_slot_is_taken_at_once(work: list[tuple[str, int, int]]) -> None:
    """One that waits enters with the next step; from then on all are decoded together."""
    sampler = local_sampler(module=random_beam(), slots=2)
    first, other, waiting = requests(3, max_tokens=4)
    short = Request(first.key, first.prefix_ids, SamplingParams(1))
    sampler.submit([short, other, waiting])
    assert [c.key for c in sampler.poll(60.0)] == [short.key]
    assert {c.key for c in sampler.poll(60.0)} == {other.key, waiting.key}
    assert [(kind, size) for kind, _, size in work] == [("prefill", 2), ("prefill", 1), *3 * [("decode", 2)]]


@pytest.mark.parametrize("tensor", ["gate.weight", "gate.e_score_correction_bias", "experts.3.up_proj.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tensor: str, value: float) -> None:
    """A router that is not finite would show in no logit: its experts are never chosen."""
    module = random_beam()
    with torch.no_grad():
        named_tensors(module)[f"model.layers.1.mlp.{tensor}"].view(-1)[5] = value
    with pytest.raises(FloatingPointError, match=f"{tensor} of version 7 holds values that are not finite"):
        local_sampler(module=module)


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_what_a_failed_prefill_left_is_evaluated_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not decoded from an empty cache."""
    asked = requests(4)
    sampler = local_sampler(module=random_beam(), slots=4)
    sampler.submit(asked)
    expected = {c.key: c.token_ids.tolist() for _ in range(4) for c in sampler.poll(60.0)}
    assert len(expected) == 4
    prefill, calls = Worker._prefill, []

    def interrupted(self: Worker, *arguments: Any) -> Drawn:
        calls.append(1)
        if len(calls) == failing + 1:
            raise KeyboardInterrupt
        return prefill(self, *arguments)

    monkeypatch.setattr(Worker, "_prefill", interrupted)
    sampler = local_sampler(module=random_beam(), slots=4)
    sampler.submit(asked)
    with pytest.raises(KeyboardInterrupt):
        sampler.poll(60.0)
    found = {c.key: c.token_ids.tolist() for _ in range(4) for c in sampler.poll(60.0)}
    assert found == expected


def test_stop_tokens_must_leave_one_for_min_tokens() -> None:
    params = SamplingParams(4, stop_ids=tuple(range(VOCAB)), min_tokens=2)
    with pytest.raises(ValueError, match=f"min_tokens, and all {VOCAB} tokens are stop tokens"):
        local_sampler(module=random_beam()).submit([Request(Key("train", 1, "p", 0), np.array([1], np.int32), params)])


def test_prefixes_are_compared_as_tokens() -> None:
    """``[5, 0]`` of 4 bytes each has the bytes of ``[5]`` of 8."""
    params = SamplingParams(3)
    asked = [
        Request(Key("train", 1, "p", 0), np.array([5, 0], np.int32), params),
        Request(Key("train", 1, "p", 1), np.array([5], np.int64).astype(np.int64), params),  # type: ignore[arg-type]
    ]
    together, alone = local_sampler(module=random_beam()), local_sampler(module=random_beam())
    together.submit(asked)
    found = {c.key: c.token_ids.tolist() for _ in range(2) for c in together.poll(60.0)}
    alone.submit(asked[1:])
    assert found[asked[1].key] == alone.poll(60.0)[0].token_ids.tolist()


@pytest.mark.parametrize(
    "numerics",
    [
        {"dtype": "bfloat16"},
        {"kv_dtype": "float8_e4m3"},
        {"head_dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "float8_e4m3", "head_dtype": "bfloat16"},
    ],
)
def test_in_every_type_a_response_goes_on_with_the_same_bits(numerics: dict[str, Any]) -> None:
    """From a prefix that is evaluated at once, as from tokens that are decoded one by one; and the type shows."""
    asked = Request(Key("train", 1, "p", 0), np.arange(20, dtype=np.int32), SamplingParams(40))
    whole, exact = (run(local_sampler(module=random_beam(), **given), [asked])[0] for given in (numerics, {}))
    begun = np.concatenate([asked.prefix_ids, whole.token_ids[:25]])
    (rest,) = run(local_sampler(module=random_beam(), **numerics), [Request(asked.key, begun, SamplingParams(15))])
    assert np.array_equal(rest.token_ids, whole.token_ids[25:])
    assert np.array_equal(bits(rest.logprobs), bits(whole.logprobs[25:]))
    assert np.array_equal(rest.routes, whole.routes)
    assert whole.logprobs[0] != exact.logprobs[0]
