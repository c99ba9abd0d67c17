"""The weight that a convolution under weight norm uses, w = g · v / ‖v‖, told without calling the module.

Both forms of torch: the forward pre-hook (``torch.nn.utils.weight_norm``) and the parametrisation
(``torch.nn.utils.parametrizations.weight_norm``), which also gives the module a class of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm


def class_of(module: nn.Module) -> type:
    """The class that the module was made of, below a parametrisation."""
    return parametrize.type_before_parametrizations(module)


def hooked(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than weight norm's."""
    return bool(module._forward_hooks) or any(
        type(hook) is not WeightNorm for hook in module._forward_pre_hooks.values()
    )


def fault(conv: Any) -> str | None:
    """What else than weight norm stands between the parameters and the result of a convolution, or None."""
    hooks = list(conv._forward_pre_hooks.values())
    strange = [hook for hook in hooks if type(hook) is not WeightNorm or hook.name != "weight"]
    if strange or len(hooks) > 1 or conv._forward_hooks or "forward" in vars(conv):
        return f"the convolution has hooks or a forward of its own besides weight norm: {conv}"
    if parametrize.is_parametrized(conv):
        chain = [type(part) for part in getattr(conv.parametrizations, "weight", ())]
        if hooks or len(conv.parametrizations) > 1 or chain != [_WeightNorm]:
            return f"the convolution has parametrisations besides weight norm: {conv}"
    return None


def _factors(conv: Any) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """g, v and the dimension that keeps its norm, of a convolution without ``fault``; None without weight norm."""
    if parametrize.is_parametrized(conv):
        chain = conv.parametrizations.weight
        return chain.original0, chain.original1, chain[0].dim
    for hook in conv._forward_pre_hooks.values():
        return conv.weight_g, conv.weight_v, hook.dim
    return None


def sources(conv: Any) -> list[torch.Tensor]:
    """The parameters that the weight of a convolution without ``fault`` follows from."""
    factors = _factors(conv)
    return [conv.weight] if factors is None else list(factors[:2])


def folded(conv: Any) -> torch.Tensor:
    """The weight of a convolution without ``fault``, as its own call would compute it."""
    factors = _factors(conv)
    if factors is None:
        return conv.weight
    g, v, dim = factors
    return torch._weight_norm(v, g, dim)
