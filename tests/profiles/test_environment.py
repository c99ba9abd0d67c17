"""The environment record: what it holds without a GPU, and where the commit comes from."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess

import pytest
import torch

from voxfuse.profiles import environment
from voxfuse.profiles.environment import COMMIT_VARIABLE, capture_environment
from voxfuse.records import to_json


def test_versions_are_those_installed_and_absent_packages_are_left_out():
    record = capture_environment(("numpy", "a-package-that-is-not-there"))
    assert record.packages == {"numpy": importlib.metadata.version("numpy")}
    assert record.torch == str(torch.__version__) and type(record.torch) is str
    assert to_json(record)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU records")
def test_without_a_gpu_its_fields_are_none():
    record = capture_environment()
    assert (record.gpu, record.gpu_uuid_sha256, record.compute_capability) == (None, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_is_named_and_its_uuid_only_hashed():
    record = capture_environment()
    assert record.gpu == torch.cuda.get_device_name()
    assert record.compute_capability == ".".join(map(str, torch.cuda.get_device_capability()))
    assert len(record.gpu_uuid_sha256) == 64
    assert record.driver


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_the_checkouts_and_the_variable_overrides_it(tmp_path, monkeypatch):
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "voxfuse" / "profiles" / "environment.py"))
    assert capture_environment().commit is None

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert capture_environment().commit == head
    (tmp_path / "file").write_text("two")
    assert capture_environment().commit == f"{head}-dirty"
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc")
    assert capture_environment().commit == "0123abc"
