"""CosyVoice's ``ras_sampling`` with one transfer to the host for a token, and upstream's random stream.

Upstream walks over sorted probabilities element by element on the host and reads the token once or twice; here one
kernel decides (``kernels/ras_sampler.py``). Both draws are made before it; where the second was not needed, the
generator is set back to before it, so that the next token finds the state that upstream would have left.
Source: ras_sampling of CosyVoice (cosyvoice/utils/common.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.ras_sampler import ras_sample
from voxfuse.kernels.sampler import draw
from voxfuse.records import Fusion, FusionPattern

RAS_SAMPLING = Fusion(
    name="ras_sampling",
    stacks=("cosyvoice2", "cosyvoice3"),
    operations=("softmax", "sort", "multinomial"),
    contract="same-precision",
    envelope="scores of up to 16384 tokens on a CUDA GPU, upstream's ras_sampling with its own settings",
    kernels=("ras_sampler",),
    patterns=tuple(FusionPattern(operations=(op,), modules=("Qwen2LM",)) for op in ("sort", "multinomial")),
)

ON_HOST = "scores are not on a GPU: upstream's own chain, whose draws depend on the nucleus' size there"


class RasSampler:
    """A callable with the signature of upstream's ``sampling``; one for each generation at a time.

    ``exclude``: whether a repeated token is ruled out in the second draw (newer upstream; older releases draw from
    all).
    ``generator``: upstream uses the device's default one.
    """

    def __init__(
        self,
        run: Run,
        top_p: float = 0.8,
        top_k: int = 25,
        win_size: int = 10,
        tau_r: float = 0.1,
        exclude: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self._run, self._generator, self._exclude = run, generator, exclude
        self._top_p, self._top_k, self._window, self._repeats = top_p, top_k, win_size, win_size * tau_r
        self._staged: torch.Tensor | None = None  # in pinned memory
        self._held = torch.empty(0)

    def __call__(
        self, weighted_scores: torch.Tensor, decoded_tokens: Sequence[int], sampling: int | None = None
    ) -> int:
        """The next token of ``weighted_scores`` [vocabulary] after ``decoded_tokens``; ``sampling`` is ignored, as
        upstream does."""
        if weighted_scores.device.type != "cuda":
            TALLIES.add(self._run.receipt, fallback=ON_HOST)
            return self._on_host(weighted_scores, decoded_tokens)
        generator = self._generator or torch.cuda.default_generators[weighted_scores.device.index]
        return self._on_device(weighted_scores.unsqueeze(0), decoded_tokens, generator)

    def _on_device(self, scores: torch.Tensor, decoded: Sequence[int], generator: torch.Generator) -> int:
        """The token of scores [1, vocabulary], and the generator where upstream leaves it."""
        nucleus = draw(scores[:, : self._top_k], generator)
        before = generator.get_state()
        whole = draw(scores, generator)
        held = self._recent(scores.device, decoded[-self._window :])
        chosen = ras_sample(scores, held, nucleus, whole, self._top_p, self._repeats, self._exclude, run=self._run)
        token, again = chosen[0].tolist()
        if not again:
            generator.set_state(before)
        return int(token)

    def _recent(self, device: torch.device, tokens: Sequence[int]) -> torch.Tensor:
        """The last tokens on the device, [1, window]; the copy waits for nothing, and the last one has ended."""
        if self._staged is None or self._held.device != device:
            self._staged = torch.empty((1, self._window), dtype=torch.int64, pin_memory=device.type == "cuda")
            self._held = torch.empty((1, self._window), dtype=torch.int64, device=device)
        self._staged[0] = torch.tensor([*tokens, *[-1] * (self._window - len(tokens))])
        return self._held.copy_(self._staged, non_blocking=True)

    def _on_host(self, scores: torch.Tensor, decoded: Sequence[int]) -> int:
        """Upstream's chain and draws."""
        values, indices = scores.softmax(dim=0).sort(descending=True, stable=True)
        mass, size = torch.zeros_like(values[0]), 0
        while size < min(self._top_k, len(values)) and mass < self._top_p:
            mass, size = mass + values[size], size + 1
        token = int(indices[values[:size].multinomial(1, replacement=True, generator=self._generator)])
        if list(decoded[-self._window :]).count(token) < self._repeats:
            return token
        if self._exclude:
            scores = scores.index_fill(0, indices.new_tensor([token]), -torch.inf)
        return int(scores.softmax(dim=0).multinomial(1, replacement=True, generator=self._generator))
