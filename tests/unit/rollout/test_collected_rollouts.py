import numpy as np

from beamline.chat import BeamChat
from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.collect import Job, requests, to_rollout
from tests.samples import make_problem

RESPONSE = "<|channel|>analysis<|message|>1+2=3<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"


def completed(request: Request, token_ids: list[int]) -> Completion:
    count = len(token_ids)
    logprobs, versions = -np.arange(1, count + 1, dtype=np.float32), np.full(count, 7, np.int32)
    return Completion(request.key, np.array(token_ids, np.int32), logprobs, versions, None, "stop")


def test_every_sampled_token_is_trained_the_second_start_of_the_assistant_too(chat: BeamChat) -> None:
    job = Job("train", 1, [make_problem("1+2")], 1, SamplingParams(64, stop_ids=chat.stop_ids))
    ((request,),) = requests(job, chat)
    ids = chat.encode(RESPONSE)
    rollout = to_rollout(request, completed(request, ids))
    prompt = len(request.prefix_ids)
    assert rollout.policy_mask.tolist() == [False] * prompt + [True] * len(ids)
    assert chat.decode(rollout.token_ids[rollout.policy_mask]) == RESPONSE
    assert rollout.response_tokens == len(ids)
    assert chat.channels(rollout.token_ids[rollout.policy_mask]).final == "3"


def test_what_was_not_sampled_has_no_log_probability_and_no_version(chat: BeamChat) -> None:
    request = Request(Key("train", 1, "p", 0), np.array(chat.encode("12"), np.int32), SamplingParams(8))
    rollout = to_rollout(request, completed(request, chat.encode("345")))
    assert rollout.logprobs.tolist() == [0, 0, -1, -2, -3]
    assert rollout.versions.tolist() == [-1, -1, 7, 7, 7]


def test_requests_begin_with_the_prompt_of_the_chat(chat: BeamChat) -> None:
    problem = make_problem("1+2")
    ((first, second),) = requests(Job("eval", 2, [problem], 2, SamplingParams(8)), chat)
    assert first.prefix_ids.tolist() == second.prefix_ids.tolist() == chat.prompt_ids(problem.messages).tolist()
    assert (first.key, second.key) == (Key("eval", 2, problem.id, 0), Key("eval", 2, problem.id, 1))
