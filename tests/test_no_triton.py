"""Without Triton voxfuse imports, patches with the reference backend, and says why the triton backend is out."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

needs_kokoro = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="kokoro is not installed")

BLOCK = "import sys; sys.modules['triton'] = None\n"  # what an absent package is to the import system


def run(code: str) -> Any:
    """The JSON that ``code`` prints last, in a process where ``import triton`` fails."""
    done = subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_of_the_package_imports() -> None:
    code = """
import importlib, json, pkgutil
import voxfuse, voxfuse.kernels, voxfuse.fusions, voxfuse.patches
names = []
for package in (voxfuse.kernels, voxfuse.fusions, voxfuse.patches):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        names.append(module.name)
from voxfuse.kernels._triton import TRITON_VERSION
print(json.dumps([names, TRITON_VERSION]))
"""
    names, version = run(code)
    assert {"voxfuse.kernels.adain", "voxfuse.fusions.registry", "voxfuse.patches.kokoro"} <= set(names)
    assert version is None


@needs_kokoro
def test_backends() -> None:
    code = """
import json, torch, voxfuse
from voxfuse.patches._kokoro_import import load_kokoro
load_kokoro()
from kokoro.istftnet import AdaINResBlock1
torch.manual_seed(0)
block = AdaINResBlock1(8, 3, (1, 3, 5), style_dim=4).eval()
x, style = torch.randn(2, 8, 50), torch.randn(2, 4)
with torch.no_grad():
    expected = block(x, style)
    with voxfuse.apply_patches("kokoro", policy="all", backend="reference") as patches:
        got = block(x, style)
        reference = [[r.fusion, r.status, r.calls] for r in patches.receipts]
triton = [[r.fusion, r.status, r.reason] for r in voxfuse.apply_patches("kokoro", policy="all").receipts]
interpreter = voxfuse.apply_patches("kokoro", policy="all", backend="interpreter").receipts
print(json.dumps([reference, triton, [r.status for r in interpreter], bool(torch.equal(got, expected))]))
"""
    reference, triton, interpreter, same = run(code)
    status = {fusion: (status, calls) for fusion, status, calls in reference}
    assert {"adain_snake", "adain_leaky_relu"} <= set(status) and status["text_graph"] == ("skipped", 0)
    assert status["adain_snake"][0] == "applied" and status["adain_snake"][1] > 0
    assert same
    assert {(status, reason) for _, status, reason in triton} == {
        ("skipped", "Triton is not installed: pip install triton")
    }
    assert set(interpreter) == {"skipped"}


def test_the_doctor_says_so_and_finds_no_problem_on_a_cpu() -> None:
    code = """
import json
import torch
torch.cuda.is_available = lambda: False
from voxfuse import doctor
doctor.driver_version = lambda: None
diagnosis = doctor.examine()
print(json.dumps([[f.subject, f.value, f.state, f.advice] for f in diagnosis.findings]))
"""
    findings = {subject: rest for subject, *rest in run(code)}
    assert findings["Triton"] == ["not installed", "note", "the triton backend cannot run: pip install triton"]
    assert "problem" not in {state for _, state, _ in findings.values()}
