"""Module-level functions: every stale copy in every loaded module is rewritten, and restored."""

import sys
import types

import torch
from toystack import ToyStack

from voxfuse.patches.engine import apply_patches


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_copies_under_other_names_are_rewritten_and_restored(toy: ToyStack) -> None:
    toy.use(toy.all_patches[2])
    layers, user = toy.layers, toy.module("user")
    original = layers.gain
    assert user.louder is original
    with apply("toyvoice") as patches:
        assert patches.receipts[0].status == "applied"
        assert layers.gain is not original
        assert user.louder is layers.gain
    assert layers.gain is original
    assert user.louder is original


def test_a_module_imported_while_patched_is_restored_too(toy: ToyStack) -> None:
    toy.use(toy.all_patches[2])
    original = toy.layers.gain
    with apply("toyvoice"):
        with apply("toyvoice", backend="interpreter"):
            inner = toy.layers.gain
            user = toy.module("user")
            assert user.louder is inner
        assert user.louder is toy.layers.gain
        assert user.louder is not inner
    assert user.louder is original


def test_modules_that_compute_attributes_do_not_break_the_search(toy: ToyStack) -> None:
    toy.use(toy.all_patches[2])
    lazy, original = toy.module("lazy"), toy.layers.gain

    class Odd:  # not a module, and hostile: sys.modules may hold anything
        def __getattribute__(self, name):
            raise RuntimeError(name)

    sys.modules["toyvoice_odd"] = Odd()
    sys.modules["toyvoice_none"] = None
    try:
        with apply("toyvoice"):
            assert lazy.gain is toy.layers.gain
            assert lazy.gain is not original
    finally:
        del sys.modules["toyvoice_odd"], sys.modules["toyvoice_none"]
    assert lazy.gain is original


def test_pausing_a_function(toy: ToyStack) -> None:
    toy.use(toy.all_patches[2])
    user, original = toy.module("user"), toy.layers.gain
    with apply("toyvoice") as patches:
        with patches.paused():
            assert user.louder is original
            assert user.speak(torch.ones(1)).item() == 3.0
        assert user.louder is not original


def test_functions_of_the_same_name_elsewhere_are_not_touched(toy: ToyStack) -> None:
    toy.use(toy.all_patches[2])
    other = types.ModuleType("toyvoice_other")
    other.gain = theirs = lambda x, factor: x
    sys.modules["toyvoice_other"] = other
    try:
        with apply("toyvoice"):
            assert other.gain is theirs
    finally:
        del sys.modules["toyvoice_other"]
