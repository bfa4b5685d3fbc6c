"""What vLLM's own source says, for tests that go red when it says something else."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def names_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def tree(thing: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def used(thing: Any) -> set[str]:
    """Names that are looked up on ``self`` in a function or class."""
    return {node.attr for node in _of_self(thing)}


def written(thing: Any) -> set[str]:
    """Names that are set on ``self``."""
    return {node.attr for node in _of_self(thing) if isinstance(node.ctx, ast.Store)}


def _of_self(thing: Any) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree(thing)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node


def calls(thing: Any) -> list[ast.Call]:
    """Calls of plain names."""
    return [node for node in ast.walk(tree(thing)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]


def called(thing: Any) -> set[str]:
    """The names that are called."""
    return {node.func.id for node in calls(thing) if isinstance(node.func, ast.Name)}
