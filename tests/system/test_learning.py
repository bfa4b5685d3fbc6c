from pathlib import Path

import torch
from safetensors.torch import load_file

from beamline.starter import STARTER
from tests.system.conftest import Cli
from tests.system.runs import TINY


def test_a_learning_rate_of_zero_leaves_every_weight_as_it_was(tmp_path: Path, cli: Cli) -> None:
    """The control of an experiment: all of the run happens, weight decay is on, and nothing moves."""
    settings = ("learner.optimizer.lr=0", "learner.optimizer.weight_decay=0.1", "steps=2", "evaluation.every=0")
    ended = cli("train", TINY, f"output={tmp_path}", *settings)
    assert ended.code == 0, ended.err
    assert "grad 0.00" not in ended.out
    before, after = (
        load_file(STARTER / "model.safetensors"),
        load_file(tmp_path / "export/global_step_2/model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert [
        name for name in after if not torch.equal(before[name].to(torch.float32), after[name].to(torch.float32))
    ] == []
