"""How cuDNN is asked for a convolution of x [rows, frames, channels] with dilation: the form it is fastest in.

A plan says along which axis of cuDNN's image the taps lie, and how many frames g are taken as one of g times the
channels: narrow channels fill no tile of its kernels. The weight becomes block Toeplitz, [g · out, taps', g · in] with
taps' = ⌈(taps − 1) / g⌉ + 1, whose blocks outside the taps are zeros, so that the products are the same and the others
add zeros. (A value that is not finite spoils up to g − 1 frames more on either side.)

With b taps before the frame that is written, padding p of both ends in groups of g frames, and L frames of zeros in
front, group m of the result reads from group m − p of the buffer on, whose frame g · (m − p) is frame g · m − b of x
where L = b − g · p. So p = min(⌊(taps' − 1) / 2⌋, ⌊b / g⌋), at which no frame of the result is before its first one:
causal convolutions get their zeros from the producer, since cuDNN has no fast kernel for padding beyond half of the
taps. Zeros behind the frames fill the last group, and are as many as the result needs to have all frames.
"""

from __future__ import annotations

from typing import NamedTuple

from voxfuse.kernels._phases import Layout

MANY_ELEMENTS = 16 << 20  # of x: between one row of HiFT, 10 s, and sixteen; nothing in between was measured
ONE_IMAGE = 2  # images up to which cuDNN's choices are those of one


class Plan(NamedTuple):
    """``axis`` is a name in ``conv1d.STRATEGIES``; ``together`` frames are taken as one."""

    axis: str
    together: int

    def spans(self, taps: int) -> int:
        """How many taps are left, each of ``together`` frames."""
        return -(-(taps - 1) // self.together) + 1

    def padding(self, taps: int, before: int) -> int:
        """cuDNN's padding of both ends, in groups of frames; ``before`` of the taps are before the frame written."""
        return min((self.spans(taps) - 1) // 2, before // self.together)

    def layout(self, taps: int, before: int, dilation: int, frames: int) -> Layout:
        """How x must lie."""
        each, padding = -(-frames // dilation), self.padding(taps, before)
        lead = before - padding * self.together
        least = -(-each // self.together) + self.spans(taps) - 1 - 2 * padding
        groups = max(-(-(lead + each) // self.together), least)
        return Layout(dilation, lead, groups * self.together - lead - each)


FIRST, LAST = Plan("taps_first", 1), Plan("taps_last", 1)
FIRST_2, LAST_2 = Plan("taps_first", 2), Plan("taps_last", 2)
FIRST_4, LAST_4 = Plan("taps_first", 4), Plan("taps_last", 4)
FASTEST = {  # channels, taps: for one image, a few, many elements; µs there / without taking frames as one
    (64, 3): (LAST, LAST, FIRST),  # 14-15; 14; 144-171
    (64, 7): (LAST_4, FIRST_2, FIRST),  # 22 / 25; 20 / 25; 251-260
    (64, 11): (LAST_4, FIRST_2, FIRST_4),  # 27 / 36; 25 / 37; 327 / 392-420
    (128, 3): (LAST, FIRST, LAST_2),  # 16; 15; 127 / 165
    (128, 7): (LAST, FIRST, FIRST_2),  # 24; 24; 227 / 313
    (128, 11): (LAST, LAST, LAST),  # 33; 32; 304-318
}
# By channels, the most taps of two convolutions of a Snake block that one kernel (snake_conv_pair) does faster than the
# chain with these plans, on the same H200. µs of a pair, chain → kernel, one row; sixteen rows (10 s of HiFT, fp32):
#  64 channels: 3 taps 46 → 25; 650 → 347   7 taps 68 → 35; 870 → 478   11 taps 89 → 45; 1015 → 632 (dilation 5: 640)
# 128 channels: 3 taps 43 → 36; 500 → 447   7 taps 59 → 57; 662 → 839   11 taps 77 → 74; 814 → 881
MOST_TAPS_OF_A_PAIR = {64: 11, 128: 3}


def fastest(rows: int, frames: int, channels: int, taps: int, dilation: int) -> Plan:
    """The plan for a shape, as measured on an H200 (fp32 with TF32, torch 2.11): 1 and 16 rows of 10 s of HiFT."""
    narrow = next((known for known in (64, 128) if channels <= known), None)
    if narrow is None:
        return LAST
    few = rows * dilation > ONE_IMAGE
    many = rows * frames * channels >= MANY_ELEMENTS
    return FASTEST[narrow, next((known for known in (3, 7) if taps <= known), 11)][2 if many else int(few)]


def pair_wins(channels: int, taps: int) -> bool:
    """Whether one kernel for a pair of convolutions was measured to be faster than cuDNN and ``snake``."""
    return taps <= MOST_TAPS_OF_A_PAIR.get(channels, 0)
