"""``import voxfuse``: light, without model stacks and Triton, and honest about the interpreter."""

import os
import subprocess
import sys

import pytest

import voxfuse


def python(program: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    program = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import voxfuse\n"
        "took = time.perf_counter() - start\n"
        "heavy = {'triton', 'kokoro', 'transformers', 'rich'} & set(sys.modules)\n"
        "print(took, sorted(heavy))"
    )
    took, heavy = python(program).split(maxsplit=1)
    assert float(took) < 0.5
    assert heavy == "[]"


def test_import_without_torch_in_sight() -> None:
    assert python("import sys, voxfuse; print('torch' in sys.modules, voxfuse.__version__)") == (
        f"False {voxfuse.__version__}"
    )


def test_the_engine_works_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import voxfuse\n"
        "patches = voxfuse.apply_patches('kokoro', policy='all')\n"
        "print({receipt.reason for receipt in patches.receipts})"
    )
    assert python(program) == "{'Triton is not installed: pip install triton'}"


def test_the_public_names() -> None:
    from voxfuse.patches.patchset import PatchSet

    assert voxfuse.PatchSet is PatchSet
    assert {"apply_patches", "PatchSet", "__version__"} <= set(dir(voxfuse))
    with pytest.raises(AttributeError, match="module 'voxfuse' has no attribute 'apply_patch'"):
        _ = voxfuse.apply_patch


def test_the_interpreter_backend_is_set_before_kernels_are_imported() -> None:
    program = "import os, voxfuse, voxfuse.kernels._op as op; print(op.backend_unavailable('interpreter'))"
    assert python(program, VOXFUSE_BACKEND="interpreter") == "None"
    assert "needs VOXFUSE_BACKEND=interpreter" in python(program)
