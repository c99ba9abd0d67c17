"""Rows of different lengths in few calls: groups that waste little on padding, and HiFT's decode of them.

Each row's samples are those of the row alone (fusions/hift.py); what padding costs is time, not quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from voxfuse.fusions.hift import samples_per_frame
from voxfuse.fusions.hift_graph import BUCKETS, Runners

WASTE = 0.25  # of a group's frames, at most, that are padding
ROWS = max(BUCKETS.rows)


def by_padding(lengths: Sequence[int], waste: float = WASTE, rows: int = ROWS) -> list[list[int]]:
    """Indices of ``lengths`` in groups of at most ``rows``, longest first, each with at most ``waste`` of its frames
    behind a row's end, counted to the length of its longest row.

    Raises ValueError for a share outside [0, 1), no row a group, or a negative length.
    """
    if not 0 <= waste < 1 or rows < 1 or min(lengths, default=0) < 0:
        raise ValueError(
            f"expected a share of waste in [0, 1), at least 1 row a group and lengths from 0 on, got {waste}, {rows} "
            f"and a shortest length of {min(lengths, default=0)}"
        )
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        group = groups[-1] if groups else []
        frames = sum(lengths[i] for i in group) + lengths[index]
        longest = lengths[group[0]] if group else lengths[index]
        if group and len(group) < rows and frames >= (1 - waste) * longest * (len(group) + 1):
            group.append(index)
        else:
            groups.append([index])
    return groups


def decode_rows(
    graphs: Runners, hift: Any, mels: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], waste: float = WASTE
) -> list[torch.Tensor]:
    """``decode`` of rows of different lengths, in their order: mels [bins, frames], sources [1, samples] → [samples].

    A group that no graph takes is decoded row by row by the generator's own ``decode``; the receipt counts it. Raises
    ValueError where a source is not as long as its mel spectrogram.
    """
    per_frame = samples_per_frame(hift)
    for mel, source in zip(mels, sources, strict=True):
        if source.shape != (1, mel.shape[1] * per_frame):
            raise ValueError(f"expected a source of [1, {mel.shape[1] * per_frame}], got {list(source.shape)}")
    audio: dict[int, torch.Tensor] = {}
    for group in by_padding([mel.shape[1] for mel in mels], waste):
        frames = [mels[i].shape[1] for i in group]
        mel = mels[group[0]].new_zeros(len(group), mels[group[0]].shape[0], frames[0])
        source = mel.new_zeros(len(group), 1, frames[0] * per_frame)
        for row, index in enumerate(group):
            mel[row, :, : frames[row]] = mels[index]
            source[row, :, : frames[row] * per_frame] = sources[index]
        together = graphs.decode(hift, mel, source, lengths=frames)
        for row, index in enumerate(group):
            if isinstance(together, str):
                audio[index] = hift.decode(x=mels[index][None], s=sources[index][None])[0]
            else:
                audio[index] = together[row, : frames[row] * per_frame]
    return [audio[index] for index in range(len(mels))]
