"""Cases of the sources whose f0 is one value a frame, held or stepped, and what tests of both check."""

import torch

from voxfuse.kernels import held_source as held_module
from voxfuse.kernels import stepped_source as stepped_module
from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.held_source import held_source
from voxfuse.kernels.stepped_source import stepped_source

RATE, AMPLITUDE, NOISE_STD, THRESHOLD = 24_000.0, 0.1, 0.003, 10.0
SIZES = [  # rows, frames, scale, harmonics
    (2, 1, 480, 9),
    (1, 2, 480, 9),
    (3, 13, 40, 9),
    (1, 17, 3, 1),
    (1, 30, 4, 16),
    (2, 15, 5, 2),
    (33, 2, 7, 9),
]


def frequencies(rows, frames):
    """Hz, with unvoiced, zero and negative frames."""
    f0 = 80 + 200 * torch.rand(rows, frames)
    f0[:, 3::7] = 0
    f0[:, 4::9] = -3
    return f0


def held_case(rows, frames, scale, device, harmonics=9, held=True):
    """Tensors and settings; the same noise for all rows, as upstream has it."""
    f0 = frequencies(rows, frames if held else frames * scale)
    sines = torch.sin(7 * torch.randn(rows, harmonics, frames)).transpose(1, 2)
    noise = torch.rand(1, frames * scale, harmonics).to(device).expand(rows, -1, -1)
    weight, bias = torch.randn(1, harmonics) * 0.7, torch.randn(1) * 0.1
    tensors = [value.to(device) for value in (sines, f0)] + [noise, weight.to(device), bias.to(device)]
    return held_source, held_module.reference, tensors, (scale, AMPLITUDE, NOISE_STD, THRESHOLD)


def stepped_case(rows, frames, scale, device, harmonics=9):
    initial = torch.rand(rows, harmonics) - 0.5
    initial[:, 0] = 0
    noise = torch.randn(rows, harmonics, frames * scale).transpose(1, 2)
    weight, bias = torch.randn(1, harmonics) * 0.7, torch.randn(1) * 0.1
    tensors = [value.to(device) for value in (frequencies(rows, frames), initial, noise, weight, bias)]
    return stepped_source, stepped_module.reference, tensors, (scale, RATE, AMPLITUDE, NOISE_STD, THRESHOLD)


def wide(tensors):
    return [tensor.double() for tensor in tensors]


def check_precision(case, run, same_precision):
    op, reference, tensors, settings = case
    result = op(*tensors, None, *settings, run=run)
    same_precision(result, reference(*tensors, None, *settings), reference(*wide(tensors), None, *settings))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def check_rows(make, device, run, second_by_frame):
    """Each row of a batch is what it is alone at its valid length. ``second_by_frame``: of the second tensor."""
    lengths, scale = [20, 19, 7, 2, 1, 0], 40
    op, _, tensors, settings = make(len(lengths), 20, scale, device)
    together = op(*tensors, torch.tensor(lengths, device=device), *settings, run=run)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        first, second, noise, *linear = tensors
        second = second[one, :length] if second_by_frame else second[one]
        alone = op(first[one, :length], second, noise[one, : length * scale], *linear, None, *settings, run=run)
        assert torch.equal(together[one, : length * scale], alone)
        assert torch.all(together[row, length * scale :] == 0)


def check_no_samples(make, device, run):
    for rows, frames in ((0, 5), (2, 0)):
        op, _, tensors, settings = make(rows, frames, 40, device)
        assert op(*tensors, None, *settings, run=run).shape == (rows, frames * 40)
