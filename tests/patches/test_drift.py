"""The tested sources that every stack file declares are those of the installed release."""

import chatterbox_t3
import cosyvoice_lm
import hift_classes
import pytest

from voxfuse.patches import registry
from voxfuse.patches.guards import installed_version, replaced_by, resolve, source_sha256

LANGUAGE_MODELS = {"cosyvoice2": cosyvoice_lm, "chatterbox": chatterbox_t3}
if hift_classes.CHECKOUT:
    LANGUAGE_MODELS["cosyvoice3"] = cosyvoice_lm


@pytest.mark.parametrize("name", registry.STACKS)
def test_recorded_hashes_are_those_of_the_installed_release(name: str) -> None:
    if name in hift_classes.MODULES:
        hift_classes.upstream(name)  # its imports need more than the tests install, and CosyVoice3's may be ours
    if name in LANGUAGE_MODELS:
        LANGUAGE_MODELS[name].upstream()
    stack = registry.patches_of(name)
    assert stack is not None
    stack.load()
    version = installed_version(stack.distribution)
    if name == "cosyvoice3" or (hift_classes.CHECKOUT and name == "cosyvoice2"):
        (version,) = stack.sources  # a checkout has no release
    assert version in stack.sources, f"{stack.distribution} {version} is not a tested release"
    paths = {path for patch in stack.patches for path in patch.absorbs}
    assert all(replaced_by(resolve(path)) is None for path in paths)
    found = {path: source_sha256(resolve(path).function) for path in paths}
    assert {path: stack.sources[version][path] for path in paths} == found
