"""Which stacks voxfuse knows, and which of them have patches in this version."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from voxfuse.patches.spec import StackPatches

KNOWN_STACKS: tuple[str, ...] = (
    "kokoro",
    "cosyvoice2",
    "cosyvoice3",
    "chatterbox",
    "qwen_tts",
    "qwen3_omni",
    "moss_tts",
    "mimi",
    "dac",
    "bigvgan",
    "vocos",
    "transformers",
    "sglang_omni",
    "vllm_omni",
)
FAMILIES: dict[str, tuple[str, ...]] = {"cosyvoice": ("cosyvoice2", "cosyvoice3")}
GENERAL_LIBRARIES: tuple[str, ...] = ("transformers",)  # patched by name or instance, never by default


def _kokoro() -> StackPatches:
    from voxfuse.patches.kokoro import KOKORO

    return KOKORO


def _cosyvoice2() -> StackPatches:
    from voxfuse.patches.cosyvoice import cosyvoice2

    return cosyvoice2()


def _cosyvoice3() -> StackPatches:
    from voxfuse.patches.cosyvoice3 import cosyvoice3

    return cosyvoice3()


def _chatterbox() -> StackPatches:
    from voxfuse.patches.chatterbox import CHATTERBOX

    return CHATTERBOX


def _transformers() -> StackPatches:
    from voxfuse.patches.transformers import TRANSFORMERS

    return TRANSFORMERS


STACKS: dict[str, Callable[[], StackPatches]] = {
    "kokoro": _kokoro,
    "cosyvoice2": _cosyvoice2,
    "cosyvoice3": _cosyvoice3,
    "chatterbox": _chatterbox,
    "transformers": _transformers,
}


def expand(names: Iterable[str]) -> tuple[str, ...]:
    """Stack names, families spelled out, without repetition. Raises ValueError that lists the known names."""
    known = (*KNOWN_STACKS, *FAMILIES)
    expanded: list[str] = []
    for name in names:
        if name not in known:
            raise ValueError(f"no stack named {name!r}; known: {', '.join(known)}")
        expanded.extend(FAMILIES.get(name, (name,)))
    return tuple(dict.fromkeys(expanded))


def default_stacks() -> tuple[str, ...]:
    """The speech stacks that have patches: what ``apply_patches()`` without a target tries."""
    return tuple(name for name in STACKS if name not in GENERAL_LIBRARIES)


def patches_of(name: str) -> StackPatches | None:
    """The patches of a known stack, or None where this version has none."""
    return STACKS[name]() if name in STACKS else None
