from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from beamline.algorithms import advantages
from beamline.algorithms.advantages import has_signal, rewards_of, with_advantages
from beamline.config.advantages import Advantage, GrpoAdvantage, PassAtKAdvantage, ReinforcePlusPlusAdvantage
from tests.samples import make_grade, make_group
from tests.unit.algorithms.advantages.exact_advantages import judged

RIGHT, WRONG = make_grade(1.0, correct=True), make_grade(-1.0)
TIMEOUT, ERROR = make_grade(5.0, correct=True, status="timeout"), make_grade(5.0, correct=True, status="error")


def test_each_advantage_of_the_configuration_has_the_file_of_its_name() -> None:
    names = {section.model_fields["name"].default for section in get_args(get_args(Advantage)[0])}
    files = {path.stem for path in Path(advantages.__file__).parent.glob("*.py")} - {"__init__", "groups"}
    assert files == names


def test_rewards_of_a_group_and_which_of_them_count() -> None:
    late = make_grade(0.5, correct=True, overlong=-0.5)
    judgements = rewards_of(make_group(RIGHT, TIMEOUT, None, ERROR, WRONG, late))
    assert judgements.rewards_n.tolist() == [1.0, 0.0, 0.0, 0.0, -1.0, 0.5]  # what was not graded has none
    assert judgements.graded_n.tolist() == [True, False, False, False, True, True]
    assert judgements.correct_n.tolist() == [True, False, False, False, False, True]
    assert {name: part_n.tolist() for name, part_n in judgements.parts.items()} == {
        "answer": [1.0, 0.0, 0.0, 0.0, -1.0, 1.0],
        "overlong": [0.0, 0.0, 0.0, 0.0, 0.0, -0.5],
    }


def test_a_group_of_which_nothing_was_graded_has_no_parts() -> None:
    judgements = rewards_of(make_group(TIMEOUT, None))
    assert judgements.graded_n.tolist() == [False, False]
    assert judgements.parts == {}


def test_a_group_has_a_signal_when_two_graded_rewards_differ() -> None:
    grpo = GrpoAdvantage()
    assert has_signal(judged([1.0, 1.0, -1.0]), grpo)
    assert has_signal(judged([1.0, 1.0, np.nextafter(1.0, 2.0)]), grpo)
    assert not has_signal(judged([1.0, 1.0, -1.0], graded=[True, True, False]), grpo)
    assert not has_signal(judged([1.0, -1.0], graded=[True, False]), grpo)
    assert not has_signal(judged([]), grpo)


def test_a_mixed_group_has_no_signal_where_every_set_of_k_has_a_right_one() -> None:
    group = judged([1.0, 1.0, -1.0], correct=[True, True, False])
    assert has_signal(group, PassAtKAdvantage(k=1))
    assert not has_signal(group, PassAtKAdvantage(k=2))


def test_groups_get_the_advantages_that_the_configuration_names() -> None:
    step = [make_group(RIGHT, WRONG, WRONG, None), make_group(WRONG, RIGHT)]
    plain = with_advantages(step, GrpoAdvantage(norm_by_std=False))
    assert [group.advantages.tolist() for group in plain] == [
        pytest.approx([4 / 3, -2 / 3, -2 / 3, 0.0]),
        [-1.0, 1.0],
    ]
    of_pairs = with_advantages(step, PassAtKAdvantage(k=2))
    assert [group.advantages.tolist() for group in of_pairs] == [
        pytest.approx([0.5**0.5, -(0.5**0.5) / 2, -(0.5**0.5) / 2, 0.0]),
        [0.0, 0.0],
    ]
    assert [group.rollouts for group in plain] == [group.rollouts for group in step]


@pytest.mark.parametrize("config", [GrpoAdvantage(), ReinforcePlusPlusAdvantage()])
def test_a_step_without_groups_has_no_advantages(config: Advantage) -> None:
    assert with_advantages([], config) == []
