"""Imports point one way, and what needs no torch imports none."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import beamline

PACKAGE = Path(beamline.__file__).parent

# Each level may import those above it, and itself only within one unit. A unit is a package or a part of it; a module
# belongs to the longest name that fits.
ORDER = (
    ("errors",),
    ("config", "records", "model", "kernels"),
    ("chat", "algorithms", "checkpoint", "transfer"),
    ("tasks", "starter"),  # graders read channels; the starter's tokenizer has the chat's control tokens
    ("data",),  # problems are generated and checked by tasks
    ("policy", "report", "starter.lessons"),  # the report strips known instructions off questions
    ("rollout", "learner"),
    ("runtime",),
    ("evaluate", "mismatch", "starter.build"),
    ("train",),
    ("cli",),
    ("__main__",),
)
LEVEL = {unit: level for level, units in enumerate(ORDER) for unit in units}
TORCH_FREE = ("config", "records", "model", "chat", "tasks", "data", "checkpoint", "report", "errors", "cli")


def modules() -> dict[str, Path]:
    """Every module of the package by its name without ``beamline.``; the package itself is the empty name."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a module names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            inner = name.removeprefix("beamline.")
            if inner not in (name, "__version__"):
                yield inner if inner in MODULES else inner.rpartition(".")[0]


def unit_of(module: str) -> str:
    name = module
    while name and name not in LEVEL:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    unit = unit_of(module)
    for name in imports(MODULES[module]):
        other = unit_of(name)
        assert other == unit or LEVEL[other] < LEVEL[unit], f"{module} imports {name}"


def test_every_module_has_a_place_and_every_place_a_module() -> None:
    units = {name: unit_of(name) for name in MODULES if name}
    assert [name for name, unit in units.items() if not unit] == []
    assert set(units.values()) == set(LEVEL)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {name: set(imports(path)) - {name} for name, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def run(program: str) -> str:
    """What a program prints in a process of its own."""
    ended = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_what_needs_no_torch_imports_none() -> None:
    free = sorted(name for name in MODULES if name.partition(".")[0] in TORCH_FREE)
    program = f"""
import importlib, sys
for name in {free}:
    importlib.import_module(f"beamline.{{name}}")
    found = {{"torch", "transformers"}} & set(sys.modules)
    if found:
        raise SystemExit(f"beamline.{{name}} imports {{found}}")
print("none")
"""
    assert run(program) == "none\n"


def test_the_package_can_be_run_as_torchrun_does() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "beamline", "--version"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert beamline.__version__ in ended.stdout


def test_help_answers_without_torch_and_what_else_is_slow() -> None:
    program = """
import sys
from beamline.cli import main
sys.argv = ["beamline", "--help"]
try:
    main()
except SystemExit as stopped:
    print("exit", stopped.code)
print("slow:", sorted({"torch", "transformers", "numpy", "pydantic", "plotly"} & set(sys.modules)))
"""
    printed = run(program)
    assert "train" in printed
    assert printed.endswith("exit 0\nslow: []\n")
