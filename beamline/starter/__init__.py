"""The starters: Beams of 1.5 M parameters with every trait of the big one, and the recipe that made them."""

from pathlib import Path
from typing import Any

STARTER = Path(__file__).parent / "data"
"""Folder of the packaged starter model, which adds numbers."""

STARTERS = {"starter": STARTER, "starter-math": Path(__file__).parent / "math"}
"""The packaged models by the name that ``model.path`` takes; ``starter-math`` solves problems worded in English."""

SETTINGS: dict[str, dict[str, Any]] = {
    "starter-math": {
        "chat": {"template_arguments": {"reasoning_effort": "minimal"}},
        "data": {"evaluation": {"competition": {"source": "competition", "problems": 256}}},
        "rollout": {"max_prompt_tokens": 128, "max_response_tokens": 80},
    }
}
"""What a packaged model was taught under, where that is not the default; its evaluation begins with these."""
