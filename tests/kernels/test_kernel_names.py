"""Kernels' names: a profile tells kernels apart by nothing else."""

import ast
from collections import Counter
from pathlib import Path

import voxfuse.kernels

FOLDER = Path(voxfuse.kernels.__file__).parent


def entry_points() -> list[str]:
    """The names of the functions that a launcher starts: those that end in ``_kernel`` and take pointers."""
    return [
        node.name
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def test_no_two_kernels_have_one_name_and_none_is_nameless() -> None:
    names = Counter(entry_points())
    assert len(names) >= 12
    assert [name for name, count in names.items() if count > 1 or name == "_kernel"] == []
