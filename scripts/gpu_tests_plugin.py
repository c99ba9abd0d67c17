"""A pytest plugin of the step ``tests``: writes what came of each test as it ends, so that a run stopped by the clock
loses nothing, and leaves out those that passed before. It imports neither torch nor Triton: the tests' conftest sets
their switches first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

NOTES, PASSED = "VOXFUSE_GPU_TESTS_NOTES", "VOXFUSE_GPU_TESTS_PASSED"  # paths of a JSON-lines and of a JSON file


class Notes:
    """One JSON line for each test that has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of a phase: failures of any, passes of the test itself."""
        if report.failed or (report.when == "call" and report.passed):
            note = {
                "test": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "text": report.longreprtext[-4000:] if report.failed else "",
            }
            with self._path.open("a") as file:
                file.write(json.dumps(note) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """In the process that hears of all tests."""
    if NOTES in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notes(Path(os.environ[NOTES])), "gpu_tests_notes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed before."""
    if PASSED in os.environ:
        passed = set(json.loads(Path(os.environ[PASSED]).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
