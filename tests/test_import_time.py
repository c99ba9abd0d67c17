"""``import voxfuse`` costs next to nothing beyond torch, and brings in no stack and no Triton."""

import importlib.util
import subprocess
import sys

import pytest

BUDGET_S = 0.5
ROUNDS = 3

COST = """
import sys, time
{first}
before = set(sys.modules)
begin = time.perf_counter()
{then}
print(time.perf_counter() - begin, *sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def cost(first: str, then: str) -> tuple[float, set[str]]:
    """Seconds that ``then`` takes after ``first``, the best of three fresh processes, and the packages it loads."""
    code = COST.format(first=first, then=then)
    seconds = []
    for _ in range(ROUNDS):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        seconds.append(float(out[0]))
    return min(seconds), set(out[1:])


def test_import_voxfuse_adds_less_than_half_a_second_to_torch() -> None:
    seconds, loaded = cost("import torch", "import voxfuse")
    assert seconds < BUDGET_S
    assert loaded == {"voxfuse"}


def test_import_voxfuse_alone_does_not_even_load_torch() -> None:
    _, loaded = cost("", "import voxfuse")
    assert "voxfuse" in loaded and "torch" not in loaded


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_patch_engine_adds_less_than_half_a_second_to_torch_and_triton() -> None:
    seconds, loaded = cost("import torch, triton, triton.language", "import voxfuse; voxfuse.apply_patches")
    assert seconds < BUDGET_S
    assert not loaded & {"kokoro", "transformers", "typer", "numpy", "faster_whisper", "soundfile"}
