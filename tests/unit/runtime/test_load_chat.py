import shutil
from pathlib import Path

import pytest

from beamline.config import load_config
from beamline.config.schema import RunConfig
from beamline.data import ProblemSet, usable
from beamline.model.beam import ModelError
from beamline.records import Message, Problem
from beamline.runtime.engines import load_chat
from beamline.starter import STARTER
from tests.chat_folders import chat_folder
from tests.samples import make_problem


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The starter's shape and tokenizer, with a chat template that knows efforts."""
    shutil.copy(STARTER / "config.json", tmp_path)
    return chat_folder(tmp_path)


def config(model: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"model.path={model}", *overrides])


def test_the_arguments_of_a_run_are_in_its_prompts(model: Path) -> None:
    chat = load_chat(config(model, "chat.template_arguments.reasoning_effort=low"))
    assert "effort low" in chat.decode(chat.prompt_ids([Message("user", "1")]))


def test_an_argument_that_the_model_does_not_use_is_an_error(model: Path) -> None:
    with pytest.raises(ModelError, match=r"chat\.template_arguments\.effort=low: the chat template of .* does not use"):
        load_chat(config(model, "chat.template_arguments.effort=low"))


def test_a_prompt_that_only_the_arguments_make_too_long_is_left_out(model: Path) -> None:
    problems = ProblemSet("set", (make_problem("1+2"), make_problem("1")))
    short = load_chat(config(model, "chat.template_arguments.reasoning_effort=max"))
    limit = len(short.prompt_ids(problems.problems[0].messages))
    long = load_chat(config(model, "chat.template_arguments.reasoning_effort=none"))
    longer = len(long.prompt_ids(problems.problems[0].messages))
    assert len(usable(problems, short, limit, "exact")) == 2
    kept = usable(problems, long, limit, "exact")
    assert [problem.text for problem in kept.problems] == ["1"]
    assert longer > limit
    assert kept.excluded[0].reason == f"prompt of {longer} tokens; rollout.max_prompt_tokens is {limit}"


def test_a_prompt_that_the_template_refuses_is_left_out_with_the_reason(model: Path) -> None:
    odd = Problem("odd", (Message("tool", "1"), Message("user", "2")), "3", "test")
    kept = usable(ProblemSet("set", (odd, make_problem("1+2"))), load_chat(config(model)), 64, "exact")
    assert [problem.id for problem in kept.problems] == ["id of 1+2"]
    assert kept.excluded[0].reason == "message 0 (tool) cannot be rendered: a tool does not begin"
