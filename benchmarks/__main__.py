"""All benchmarks, each in a process of its own, then their picture.

    python -m benchmarks
    python -m benchmarks --only sampling

Leave the machine alone meanwhile: two threads on two cores stand still when another program takes one of them.
"""

import argparse
import subprocess
import sys

BENCHMARKS = (
    "sampling", "learner", "step", "memory", "lora", "profile", "grading", "prepare", "quickstart", "algorithms",
)  # fmt: skip


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BENCHMARKS, help="run this one alone, and draw nothing")
    only = parser.parse_args().only
    for name in [only] if only else [*BENCHMARKS, "plot"]:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
