"""apply_patches: targets, choices, strictness and the environment's say, on a small upstream package."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from toystack import ToyStack, fused_norm, fused_residual, toy_fusion

import voxfuse
from voxfuse.evidence import acceptance
from voxfuse.fusions.registry import FUSIONS
from voxfuse.patches import PatchError, PatchWarning, engine, registry
from voxfuse.patches.engine import apply_patches
from voxfuse.patches.spec import Patch, StackPatches


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_a_stack_name_changes_the_class_for_models_already_built(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    original = vars(toy.layers.Norm)["forward"]
    with torch.no_grad():
        before = model(x)
        with apply("toyvoice") as patches:
            assert vars(toy.layers.Norm)["forward"] is not original
            after = model(x)
            (receipt,) = patches.receipts
    torch.testing.assert_close(after, before)
    assert vars(toy.layers.Norm)["forward"] is original
    assert (receipt.status, receipt.calls, receipt.count, receipt.backend) == ("applied", 2, 1, "reference")
    assert receipt.versions == {
        "voxfuse": voxfuse.__version__,
        "torch": torch.__version__,
        toy.name: "1.2",
        **({"triton": receipt.versions["triton"]} if "triton" in receipt.versions else {}),
    }


def test_a_model_changes_alone(toy: ToyStack) -> None:
    model, other, x = toy.voice(), toy.voice(), torch.randn(2, 8)
    patches = apply(model)
    with torch.no_grad():
        model(x), other(x)
    (receipt,) = patches.receipts
    assert (receipt.target, receipt.count, receipt.calls) == (toy.norm_target, 2, 2)
    assert not any("forward" in vars(module) for module in other.modules())
    patches.revert()
    assert not any("forward" in vars(module) for module in model.modules())
    assert patches.receipts[0].status == "reverted"
    assert patches.receipts[0].calls == 2  # what ran is still on record


def test_methods_other_than_forward_and_functions(toy: ToyStack) -> None:
    toy.use(*toy.all_patches)
    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad():
        before = model(x)
        with apply("toyvoice") as patches:
            torch.testing.assert_close(model(x), before)
            by_name = {receipt.fusion: receipt for receipt in patches.receipts}
    assert {name: receipt.status for name, receipt in by_name.items()} == dict.fromkeys(by_name, "applied")
    assert by_name["toy_residual"].calls == 2
    assert by_name["toy_norm"].calls == 0  # its method is never reached: the residual has absorbed it
    with apply(model) as patches:
        reasons = {receipt.fusion: receipt.reason for receipt in patches.receipts}
        assert all("_residual" in vars(block) for block in model.blocks)
    assert reasons["toy_gain"] == "gain is a function: patch the stack by name"


def test_of_two_patches_of_one_target_the_first_that_is_wanted_serves_it(toy: ToyStack) -> None:
    toy.use(*(toy.patch(name, toy.norm_target, fused_norm) for name in ("toy_gain", "toy_norm")))
    for model in ("toyvoice", toy.voice()):
        with apply(model, strict=True) as patches:
            first, second = patches.receipts
            assert (first.status, second.status) == ("applied", "skipped")
            assert second.reason == "fusion toy_gain serves this target"
        with apply(model, exclude=["toy_gain"]) as patches:
            assert [receipt.status for receipt in patches.receipts] == ["skipped", "applied"]


def test_a_patch_for_another_backend_is_left_out(toy: ToyStack) -> None:
    toy.use(dataclasses.replace(toy.patch("toy_norm", toy.norm_target, fused_norm), backends=("triton",)))
    with apply("toyvoice") as patches:
        (receipt,) = patches.receipts
        assert (receipt.status, receipt.reason) == ("skipped", "runs with backend triton, not reference")


def test_default_targets_are_the_speech_stacks_with_patches(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = StackPatches("kokoro", "no-such-distribution", (), _raise_import_error, {}, toy.all_patches[:1])
    monkeypatch.setitem(registry.STACKS, "kokoro", lambda: absent)
    for name in ("cosyvoice2", "cosyvoice3", "chatterbox"):
        monkeypatch.delitem(registry.STACKS, name)
    monkeypatch.setitem(registry.STACKS, "transformers", lambda: pytest.fail("a general library, only by name"))
    with apply() as patches:
        found = {receipt.stack: (receipt.status, receipt.reason) for receipt in patches.receipts}
    assert found == {"toyvoice": ("applied", None), "kokoro": ("skipped", "no-such-distribution is not installed")}


def _raise_import_error() -> None:
    raise ImportError("no module named so")


def test_a_broken_installation_is_skipped_with_its_error(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    broken = StackPatches("toyvoice", toy.name, (), explode, {}, toy.all_patches[:1])
    monkeypatch.setitem(registry.STACKS, "toyvoice", lambda: broken)
    (receipt,) = apply("toyvoice").receipts
    assert receipt.reason == f"{toy.name} cannot be imported: RuntimeError: operator torchvision::nms does not exist"


def test_known_stacks_without_patches_and_families() -> None:
    with apply("cosyvoice", "cosyvoice2", "moss_tts") as patches:
        receipts = patches.receipts
    assert {*(stacks := [receipt.stack for receipt in receipts])} == {"cosyvoice2", "cosyvoice3", "moss_tts"}
    for name in ("cosyvoice2", "cosyvoice3"):  # once though named twice
        stack = registry.patches_of(name)
        assert stack is not None and stacks.count(name) == len(stack.patches)
    assert (receipts[-1].status, receipts[-1].reason) == ("skipped", "no patches for this stack in this version")


def test_unknown_names_and_odd_targets(toy: ToyStack) -> None:
    with pytest.raises(ValueError, match="no stack named 'kokorro'; known: kokoro, cosyvoice2"):
        apply("kokorro")
    with pytest.raises(KeyError, match="no fusion named 'adain_snail'"):
        apply("toyvoice", include=["adain_snail"])
    with pytest.raises(TypeError, match=r"expected stack names or torch\.nn\.Module instances, got type"):
        apply(toy.layers.Norm)
    with pytest.raises(ValueError, match="policy: expected one of proven, bitwise, all, got 'some'"):
        apply("toyvoice", policy="some")
    with pytest.raises(ValueError, match="backend: expected one of triton, interpreter, reference, got 'cuda'"):
        apply("toyvoice", backend="cuda")
    with pytest.raises(ValueError, match="toy_norm both in include and in exclude"):
        apply("toyvoice", include="toy_norm", exclude=["toy_norm"])


def test_a_model_of_no_supported_stack() -> None:
    (receipt,) = apply(nn.Linear(2, 2)).receipts
    assert (receipt.status, receipt.target) == ("skipped", "torch.nn.modules.linear.Linear")
    assert receipt.reason == "no module of a supported stack in this model"
    with pytest.raises(PatchError, match="no module of a supported stack"):
        apply(nn.Linear(2, 2), strict=True)


def test_include_restricts_and_exclude_removes(toy: ToyStack) -> None:
    toy.use(*toy.all_patches)
    with apply("toyvoice", include=["toy_norm"]) as patches:
        assert [receipt.status for receipt in patches.receipts] == ["applied", "skipped", "skipped"]
        assert patches.receipts[1].reason == "not in include"
    with apply("toyvoice", exclude=["toy_norm"]) as patches:
        assert [receipt.status for receipt in patches.receipts] == ["skipped", "applied", "applied"]
        assert patches.receipts[0].reason == "excluded"


def test_policy_bitwise_is_that_contract_only(toy: ToyStack) -> None:
    toy.use(*toy.all_patches)
    with apply("toyvoice", policy="bitwise") as patches:
        applied = [receipt.fusion for receipt in patches.receipts if receipt.status == "applied"]
        assert applied == ["toy_gain"]
        assert patches.receipts[0].reason == "policy 'bitwise': its contract is same-precision"


def test_policy_proven_asks_the_ledger(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def accepted(fusion, stack, version, capability):
        asked.append((fusion.name, stack, version, capability))
        return acceptance.Acceptance(fusion.name == "toy_gain", "no micro verdict", fidelity_only=True)

    monkeypatch.setattr(acceptance, "accepted", accepted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    toy.use(*toy.all_patches)
    with apply("toyvoice", policy="proven") as patches:
        norm, _, gain = patches.receipts
    assert asked[0] == ("toy_norm", "toyvoice", "1.2", "9.0")
    assert (norm.status, norm.reason) == ("skipped", "not proven: no micro verdict")
    assert gain.reason == "accepted: fidelity-only"


def test_nothing_proven_on_a_cpu_says_how_to_apply_it(toy: ToyStack) -> None:
    with pytest.warns(PatchWarning, match="no fusion of toyvoice is proven here; policy='all' applies them"):
        apply("toyvoice", policy="proven")


def test_nothing_proven_names_the_command_that_settles_it(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "compute_capability", lambda: "9.0")
    with pytest.warns(PatchWarning, match="`voxfuse judge --stack toyvoice` judges them on this GPU"):
        (receipt,) = apply("toyvoice", policy="proven").receipts
    assert receipt.status == "skipped"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with apply("toyvoice", policy="proven", include=["toy_norm"]) as patches:  # asked for by name: as it is
            assert patches.receipts[0].status == "applied"


def test_triton_on_a_machine_without_gpu_patches_nothing(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voxfuse.kernels._op.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    original = vars(toy.layers.Norm)["forward"]
    (receipt,) = apply_patches("toyvoice", policy="all").receipts
    assert vars(toy.layers.Norm)["forward"] is original
    assert (receipt.status, receipt.reason) == (
        "skipped",
        "no GPU: backend 'triton' needs one; backend='reference' runs on a CPU",
    )
    with pytest.raises(PatchError, match="no GPU"):
        apply_patches("toyvoice", policy="all", strict=True)


def test_no_triton(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voxfuse.kernels._op.TRITON_VERSION", None)
    monkeypatch.setattr("voxfuse.patches.plan.TRITON_VERSION", None)
    (receipt,) = apply("toyvoice", backend="triton").receipts
    assert receipt.reason == "Triton is not installed: pip install triton"
    with apply("toyvoice") as patches:
        assert patches.receipts[0].status == "applied"
        assert "triton" not in patches.receipts[0].versions


def test_strict(toy: ToyStack) -> None:
    toy.use(*toy.all_patches, sources={"1.2": dict.fromkeys(_names(toy), "0" * 64)})
    assert {receipt.status for receipt in apply("toyvoice").receipts} == {"skipped"}
    with pytest.raises(PatchError, match=f"toy_norm on {toy.norm_target}: upstream changed"):
        apply("toyvoice", strict=True)
    with apply(strict=True) as patches:
        assert patches.receipts  # found by default, not asked for: skipped
    with pytest.raises(PatchError, match="toy_norm"):
        apply(strict=True, include=["toy_norm"])
    with pytest.raises(PatchError, match="toy_norm: no target has it"):
        apply("kokoro", strict=True, include=["toy_norm"])


def _names(toy: ToyStack) -> list[str]:
    return [name for patch in toy.all_patches for name in patch.absorbs]


def test_strict_takes_policy_and_exclusion_as_choices(toy: ToyStack) -> None:
    with pytest.warns(PatchWarning):
        apply("toyvoice", policy="proven", strict=True)
    apply("toyvoice", exclude=["toy_norm"], strict=True)
    assert apply("toyvoice", strict=True, dry_run=True).receipts[0].reason == "dry run: would apply"


def test_dry_run_changes_nothing(toy: ToyStack) -> None:
    model = toy.voice()
    original = vars(toy.layers.Norm)["forward"]
    for target in ("toyvoice", model):
        (receipt,) = apply(target, dry_run=True).receipts
        assert (receipt.status, receipt.reason) == ("skipped", "dry run: would apply")
    assert receipt.count == 2
    assert vars(toy.layers.Norm)["forward"] is original
    assert not any("forward" in vars(module) for module in model.modules())


def test_two_fusions_that_want_one_method(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUSIONS, "toy_rival", toy_fusion("toy_rival"))
    rival = toy.patch("toy_rival", toy.norm_target, fused_norm)
    toy.use(toy.patch("toy_norm", toy.norm_target, fused_norm), rival)
    for target in ("toyvoice", toy.voice()):
        with apply(target) as patches:
            first, second = patches.receipts
            assert (first.status, second.status) == ("applied", "skipped")
            assert second.reason == "fusion toy_norm serves this target"
            toy.use(rival)
            assert apply(target).receipts[0].reason == "already replaced by fusion toy_norm"
            toy.use(toy.patch("toy_norm", toy.norm_target, fused_norm), rival)


def test_a_failure_halfway_rolls_back_everything(toy: ToyStack) -> None:
    def broken(original, run):
        raise RuntimeError("cannot pack")

    toy.use(
        toy.patch("toy_norm", toy.norm_target, fused_norm),
        toy.patch("toy_residual", toy.residual_target, broken, (toy.norm_target,)),
    )
    model = toy.voice()
    norm, residual = vars(toy.layers.Norm)["forward"], vars(toy.layers.Block)["_residual"]
    for target in ("toyvoice", model):
        with pytest.raises(RuntimeError, match="cannot pack"):
            apply(target)
    assert vars(toy.layers.Norm)["forward"] is norm
    assert vars(toy.layers.Block)["_residual"] is residual
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_build_that_returns_no_new_function_is_a_clear_error(toy: ToyStack) -> None:
    toy.use(toy.patch("toy_norm", toy.norm_target, lambda original, run: original))
    with pytest.raises(TypeError, match="build must return a new function"):
        apply("toyvoice")


def test_torch_is_refused_at_the_specification(toy: ToyStack) -> None:
    fusion = toy_fusion("toy_norm")
    for target in ("torch.nn.modules.linear:Linear.forward", "torch:relu"):
        with pytest.raises(ValueError, match="torch is never patched"):
            Patch(fusion, target, (target,), fused_norm)
    hidden = f"{toy.name}.layers:nn.Linear.forward"  # not the module's own name, but torch's class all the same
    with pytest.raises(LookupError, match="no class nn"):
        toy.use(Patch(fusion, hidden, (hidden,), fused_norm))
    toy.layers.Borrowed = nn.Linear
    borrowed = f"{toy.name}.layers:Borrowed.forward"
    toy.use(Patch(fusion, borrowed, (borrowed,), fused_norm), sources={"1.2": {borrowed: "0"}})
    with pytest.raises(ValueError, match="torch is never patched"):
        apply("toyvoice")


def test_malformed_specifications(toy: ToyStack) -> None:
    fusion, target = toy_fusion("toy_norm"), toy.norm_target
    with pytest.raises(ValueError, match=r"expected 'package.module:Class.method'"):
        Patch(fusion, "package.module.Class.method", (), fused_norm)
    with pytest.raises(ValueError, match="absorbs must list the target"):
        Patch(fusion, target, (toy.residual_target,), fused_residual)
    with pytest.raises(ValueError, match=f"toyvoice 1.0: sources has no hash of {target}"):
        toy.use(Patch(fusion, target, (target,), fused_norm), sources={"1.0": {}})
