"""AdaIN residual blocks (StyleTTS 2, Kokoro): instance norm, style affine and activation as one fused operation."""

from __future__ import annotations

from voxfuse.records import Fusion

ADAIN_SNAKE = Fusion(
    name="adain_snake",
    stacks=("kokoro",),
    operations=("instance_norm", "style affine", "snake"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 [rows, channels, frames]; inference only",
    kernels=("adain",),
)
ADAIN_LEAKY_RELU = Fusion(
    name="adain_leaky_relu",
    stacks=("kokoro",),
    operations=("instance_norm", "style affine", "leaky_relu"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 [rows, channels, frames]; inference only",
    kernels=("adain",),
)
