import subprocess
import sys
from pathlib import Path

import beamline


def test_the_configuration_imports_no_deep_learning_stack() -> None:
    code = (
        "import sys, beamline.config, beamline.config.describe\n"
        "print({'torch', 'transformers', 'numpy', 'ray', 'vllm'} & set(sys.modules))"
    )
    root = Path(beamline.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
