"""The doctor on machines that this one is not: no compiler, no driver's torch, old versions, wrong variables."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from toystack import ToyStack
from verdicts import H200, verdict

from voxfuse import doctor
from voxfuse.doctor import folders
from voxfuse.evidence import ledger
from voxfuse.fusions.registry import FUSIONS
from voxfuse.kernels import _op
from voxfuse.patches import registry
from voxfuse.patches.registry import default_stacks
from voxfuse.records import to_json


@pytest.fixture(autouse=True)
def plain_cpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no driver, no voxfuse variables, kernels not interpreted; tests add to that."""
    for name in ("VOXFUSE", "VOXFUSE_BACKEND", "VOXFUSE_FUSIONS", "VOXFUSE_LEDGER", "VOXFUSE_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    monkeypatch.setattr(_op, "INTERPRETED", False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("VOXFUSE_CACHE", str(tmp_path / "voxfuse"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where torch sees one H200."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(doctor, "driver_version", lambda: "570.86")
    monkeypatch.setattr(doctor, "capture_environment", lambda: H200)


def found(subject: str) -> doctor.Finding:
    matching = [finding for finding in doctor.examine().findings if finding.subject == subject]
    assert len(matching) == 1, matching
    return matching[0]


def test_a_cpu_machine_has_no_problem_and_every_fusion_a_reason() -> None:
    diagnosis = doctor.examine()
    assert diagnosis.problems == []
    assert found("GPU").state == "note"
    default = {name for name, item in FUSIONS.items() if set(item.stacks) & set(default_stacks())}
    assert {receipt.fusion for receipt in diagnosis.receipts} == default
    for receipt in diagnosis.receipts:
        assert receipt.status == "skipped"
        assert receipt.reason == "no GPU: backend 'triton' needs one; backend='reference' runs on a CPU"


def test_the_reference_backend_shows_what_would_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE_BACKEND", "reference")
    monkeypatch.setenv("VOXFUSE_FUSIONS", "+adain_snake,-adain_leaky_relu")
    if found("stack kokoro").value == "not installed":
        reasons = {"adain_snake": "kokoro is not installed", "adain_leaky_relu": "kokoro is not installed"}
    else:
        reasons = {"adain_snake": "dry run: would apply", "adain_leaky_relu": "excluded"}
    receipts = {receipt.fusion: receipt for receipt in doctor.examine().receipts}
    assert {name: receipts[name].reason for name in reasons} == reasons
    assert doctor.is_on(receipts["adain_snake"]) == (reasons["adain_snake"] == "dry run: would apply")
    assert not doctor.is_on(receipts["adain_leaky_relu"])


def test_a_gpu_that_can_run_kernels(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.switches, "toolchain_missing", lambda: None)
    assert found("GPU 0").value == "NVIDIA H200, compute capability 9.0, 139 GiB, driver 570.86"
    assert found("backend triton").value == "available"
    assert doctor.examine().problems == []


def test_graphs_that_are_on_need_a_warm_up(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.switches, "toolchain_missing", lambda: None)
    on = {receipt.fusion for receipt in doctor.examine().receipts if doctor.is_on(receipt)}
    if "text_graph" not in on:
        pytest.skip("kokoro is absent")
    assert "text_graph" in found("graphs").value and "voxfuse.capturing()" in found("graphs").advice
    monkeypatch.setenv("VOXFUSE_CAPTURE", "first_use")
    assert not any(finding.subject == "graphs" for finding in doctor.examine().findings)


def test_a_fusion_of_two_targets_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = doctor.examine()
    doctor.show(diagnosis)
    shown = [line for line in capsys.readouterr().out.splitlines() if "kokoro" in line and "decoder_graph" in line]
    assert len(shown) == 1


def test_no_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler = found("C compiler")
    assert compiler.state == "note"
    assert compiler.advice.startswith("no C compiler: Triton needs gcc or clang on PATH, or CC set")


def test_no_c_compiler_on_a_gpu_machine(gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    diagnosis = doctor.examine()
    assert [problem.subject for problem in diagnosis.problems] == ["C compiler"]
    assert all("no C compiler" in (receipt.reason or "") for receipt in diagnosis.receipts)


def test_a_driver_that_torch_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: "570.86")
    assert found("GPU").state == "problem"
    assert "torch sees no GPU" in found("GPU").advice


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("Python", "3.9.18", "problem"),
        ("Python", "3.10.0", "ok"),
        ("torch", "2.8.1+cu128", "problem"),
        ("torch", "2.9.0", "ok"),
        ("torch", "2.13.0a0+git1", "ok"),
        ("torch", "3.0", "ok"),
        ("Triton", "3.4.0", "problem"),
        ("Triton", "3.5.0", "ok"),
        ("Triton", "3.10.0", "ok"),
    ],
)
def test_the_floor(name: str, version: str, state: str) -> None:
    finding = doctor._floor(name, version)
    assert finding.state == state
    assert state == "ok" or "unsupported: voxfuse needs" in finding.advice


@pytest.mark.parametrize(
    ("declared", "installed", "state"),
    [
        (["triton==3.7.1; platform_system == 'Linux'"], "3.7.1", "ok"),
        (["triton==3.7.1; platform_system == 'Linux'"], "3.9.0", "note"),
        (["triton~=3.8; platform_system == 'Linux'"], "3.8.2", "ok"),
        (["pytorch-triton-rocm==3.6.0"], "3.5.0", "note"),
        (["numpy"], "3.9.0", "ok"),
    ],
)
def test_the_torch_triton_pair(
    declared: list[str], installed: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "TRITON_VERSION", installed)
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: declared)
    triton = next(finding for finding in doctor._triton() if finding.subject == "Triton")
    assert triton.state == state
    assert state == "ok" or "this torch was built for Triton" in triton.advice


def test_a_variable_that_cannot_be_obeyed_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE_BACKEND", "cuda")
    diagnosis = doctor.examine()
    assert [problem.advice for problem in diagnosis.problems] == [
        "VOXFUSE_BACKEND: expected one of triton, interpreter, reference, got 'cuda'"
    ]
    assert diagnosis.receipts == ()


def test_an_unknown_variable_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE_BACKENDS", "reference")
    assert found("VOXFUSE_BACKENDS").state == "note"
    assert "no such variable" in found("VOXFUSE_BACKENDS").advice


def test_a_cache_that_cannot_be_written_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VOXFUSE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert found("voxfuse cache").state == "note"
    assert found("Triton cache") == doctor.Finding(subject="Triton cache", value=str(tmp_path / "new" / "cache"))


@pytest.mark.parametrize(
    ("mode", "parent_mode", "risk"),
    [
        (0o700, 0o755, None),
        (0o775, 0o755, None),  # a group of one's own is the default of many systems
        (0o777, 0o755, "every user may write into"),
        (0o1777, 0o755, "every user may write into"),
        (0o700, 0o777, "every user may replace what lies in"),
        (0o700, 0o1777, None),
        (None, 0o1777, "before this one does"),
        (None, 0o777, "every user may write into"),
        (None, 0o755, None),
    ],
)
def test_a_cache_that_others_can_write(mode: int | None, parent_mode: int, risk: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "shared" / "cache"
    folder.parent.mkdir()
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    folder.parent.chmod(parent_mode)
    said = folders.shared_unsafely(folder)
    assert said is None if risk is None else risk in str(said)


def test_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.os, "getuid", lambda: 12345)
    monkeypatch.setattr(folders, "ROOT_USER", 54321)
    assert f"{tmp_path} belongs to another user" in str(folders.shared_unsafely(tmp_path / "new"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert "belongs to another user" in str(folders.shared_unsafely(link))


def test_an_unsafe_cache_is_a_problem_where_kernels_run(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.switches, "toolchain_missing", lambda: None)
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton").chmod(0o777)
    [problem] = doctor.examine().problems
    assert problem.subject == "Triton cache" and "Point TRITON_CACHE_DIR to a folder of your own" in problem.advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("Triton cache").state == "note"


@pytest.mark.parametrize(("free", "state"), [(5 << 30, "ok"), (1 << 30, "note"), (1 << 20, "problem")])
def test_disk_space(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    disk = found("disk")
    assert disk.state == state and f"{free / 2**30:.1f} GiB free for" in disk.value and "Triton cache" in disk.value


def test_the_pth_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folders.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(folders.site, "getusersitepackages", lambda: str(tmp_path / "absent"))
    (tmp_path / "__editable__.voxfuse-0.1.0.pth").write_text("/work")
    assert (found(".pth file").value, found(".pth file").state) == ("none", "note")
    monkeypatch.setenv("VOXFUSE", "1")
    assert found(".pth file").state == "problem"
    (tmp_path / "voxfuse.pth").write_text("import voxfuse_activation")
    assert found(".pth file") == doctor.Finding(subject=".pth file", value=str(tmp_path / "voxfuse.pth"))


def test_stale_verdicts_of_this_gpu_are_to_be_judged_again(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path)
    ledger.append(verdict(), tmp_path)
    assert found("stale verdicts") == doctor.Finding(subject="stale verdicts", value="none on this GPU")
    monkeypatch.setattr(doctor, "capture_environment", lambda: msgspec.structs.replace(H200, triton="3.9.0"))
    stale = found("stale verdicts")
    assert (stale.value, stale.state) == ("1 on this GPU", "note")
    assert stale.advice == "re-judge: voxfuse judge --stack kokoro (Triton 3.7.1 then, 3.9.0 now)"


def test_without_a_gpu_nothing_is_stale() -> None:
    assert not [finding for finding in doctor.examine().findings if finding.subject == "stale verdicts"]


def test_an_installed_stack_without_patches_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.1.0" if name == "vocos" else None)
    finding = found("stack vocos")
    assert (finding.value, finding.state) == ("vocos 0.1.0", "note") and "no patches for it" in finding.advice


@pytest.mark.parametrize(
    ("version", "value", "state"),
    [
        ("0.9.4", "kokoro 0.9.4, tested", "ok"),
        ("9.9", "kokoro 9.9, untested", "note"),
        (None, "not installed", "note"),
    ],
)
def test_stacks(version: str | None, value: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda distribution: version)
    monkeypatch.setattr(doctor, "_import_error", lambda stack: None)
    finding = found("stack kokoro")
    assert (finding.value, finding.state) == (value, state)
    assert state == "ok" or "0.9.4" in finding.advice


def test_a_stack_that_is_installed_and_cannot_be_imported_is_not_ok(
    toy: ToyStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's receipts speak of the missing GPU, so this finding is all that tells."""

    def load() -> None:
        raise ModuleNotFoundError("No module named 'scipy'")

    assert found("stack toyvoice").state == "ok"
    broken = dataclasses.replace(registry.STACKS["toyvoice"](), load=load)
    monkeypatch.setitem(registry.STACKS, "toyvoice", lambda: broken)
    finding = found("stack toyvoice")
    assert finding.value.endswith(" 1.2, cannot be imported") and finding.state == "note"
    assert "ModuleNotFoundError: No module named 'scipy'" in finding.advice


def test_a_bad_record_of_the_ledger_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    monkeypatch.setenv("VOXFUSE_LEDGER", str(tmp_path))
    assert "bad.json" in found("warning").advice


def test_a_diagnosis_survives_json_and_shows_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = doctor.examine()
    decoded = msgspec.json.decode(to_json(diagnosis), type=doctor.Diagnosis)
    assert decoded == diagnosis
    doctor.show(diagnosis)
    shown = capsys.readouterr().out
    assert "torch" in shown and "adain_snake" in shown
