"""Kokoro's text side replayed from CUDA graphs: KModel.forward_with_tokens up to its decoder, as two graphs.

The token stage (bert, bert_encoder, DurationEncoder, predictor.lstm, duration_proj, TextEncoder) is bucketed by tokens,
the frame stage (ProsodyPredictor.F0Ntrain) by frames of 25 ms. Between them lies upstream's rounding of the durations,
whose sum the host waits for. Lengths are int64 [rows] on the device; attention sees them as an additive mask, an LSTM
as in ``lstm``, a convolution wider than one unit as a zero tail, AdaIN as in kokoro_decoder; the rest goes by the unit.

Upstream aligns tokens with frames by a product with a one-hot matrix. Here columns are selected: the same values where
that product is fp32, more exact ones where TF32 is allowed in it.
bert runs as its embeddings and its encoder with the mask in the form that attention takes: AlbertModel.forward of
transformers 4 looks at the mask's values, which waits for the device, and takes none that was prepared.
Source: kokoro/model.py, kokoro/modules.py, AdainResBlk1d in kokoro/istftnet.py; AlbertModel in transformers.
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import lstm
from voxfuse.fusions._beside import Beside, Graphs
from voxfuse.fusions._fork import Fork
from voxfuse.fusions.adain_conv_block import adain_leaky_relu_block
from voxfuse.fusions.adain_resblock import padded_styles
from voxfuse.fusions.buckets import Axes, Buckets, Length
from voxfuse.fusions.decoder_graph import BUCKETS as FRAME_BUCKETS
from voxfuse.fusions.decoder_graph import fault, replaced
from voxfuse.fusions.folded import convolve, output_lengths
from voxfuse.fusions.graph_runner import HOOKED, GraphRunner, no_graphs
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch
from voxfuse.kernels._weight_norm import hooked
from voxfuse.kernels.moments import moments
from voxfuse.records import Fusion, FusionPattern

TEXT_GRAPH = Fusion(
    name="text_graph",
    stacks=("kokoro",),
    operations=("text encoder", "duration predictor", "pitch and energy predictor"),
    contract="same-precision",
    envelope="fp32 on a CUDA GPU, inference without autocast, one row, up to 512 tokens, buckets captured before",
    kernels=("conv1d", "moments", "adain_channels_last", "mean_act"),
    graph=True,
    patterns=tuple(
        FusionPattern(modules=(name,))
        for name in ("CustomAlbert", "DurationEncoder", "TextEncoder", "ProsodyPredictor")
    ),
)
MEMORY_CAP_BYTES = 2 * 2**30  # for each stage of each model; cuBLAS takes most of it, for each arena a workspace
TEXT_LANE = 1  # of TextEncoder's branch (``_fork``); its LSTM takes the next one, those beside it lane 0
STYLE = 128  # ref_s [1, 256]: the first half is the decoder's, the second the text side's
# What the stages take apart, as upstream builds it.
STRUCTURE = (
    ("bert", "kokoro.modules.CustomAlbert"),
    ("bert_encoder", "torch.nn.modules.linear.Linear"),
    ("predictor", "kokoro.modules.ProsodyPredictor"),
    ("predictor.text_encoder", "kokoro.modules.DurationEncoder"),
    ("predictor.lstm", "torch.nn.modules.rnn.LSTM"),
    ("predictor.duration_proj", "kokoro.modules.LinearNorm"),
    ("predictor.shared", "torch.nn.modules.rnn.LSTM"),
    ("text_encoder", "kokoro.modules.TextEncoder"),
    ("text_encoder.lstm", "torch.nn.modules.rnn.LSTM"),
)
CONVOLUTION = ["Conv1d", "LayerNorm", "LeakyReLU", "Dropout"]  # a layer of TextEncoder
TRANSFORMERS = ("4", "5")  # major versions whose AlbertModel was read


def token_stage(
    model: Any, ids: torch.Tensor, style: torch.Tensor, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """The tokens of ``ids`` [rows, tokens], whole numbers in fp32, spoken in ``style`` [rows, style_dim].

    Gives [rows, channels, tokens], zero behind each row's end: upstream's d (hidden + style_dim channels), then t_en
    (hidden), then one of durations in frames at speed 1.
    """
    TALLIES.add(run.receipt)
    beyond = None
    if lengths is not None:
        beyond = torch.arange(ids.shape[1], device=ids.device) >= lengths.unsqueeze(1)
        ids = ids.masked_fill(beyond, 0.0)
    ids = ids.long()
    predictor = model.predictor
    t_en = Fork(functools.partial(_encode_text, model.text_encoder, ids, beyond, lengths), TEXT_LANE)
    d = _encode_durations(predictor.text_encoder, model.bert_encoder(_bert(model.bert, ids, beyond)), style, lengths)
    x = lstm.bidirectional(predictor.lstm, d, lengths)
    durations = torch.sigmoid(predictor.duration_proj(x)).sum(dim=-1)
    return _cleared(torch.cat([d.transpose(1, 2), t_en.join(), durations.unsqueeze(1)], dim=1), beyond)


def _bert(bert: Any, ids: torch.Tensor, beyond: torch.Tensor | None) -> torch.Tensor:
    """CustomAlbert.forward: [rows, tokens] → [rows, tokens, channels]."""
    x = bert.embeddings(ids)
    mask = None
    if beyond is not None:
        mask = torch.zeros(beyond.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(beyond, torch.finfo(x.dtype).min)[:, None, None]
    output: torch.Tensor = bert.encoder(x, mask)[0]
    return output


def _encode_durations(encoder: Any, x: torch.Tensor, style: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """DurationEncoder.forward: x [rows, tokens, hidden] → [rows, tokens, hidden + style_dim]."""
    styles = style.unsqueeze(1).expand(-1, x.shape[1], -1)
    x = torch.cat([x, styles], dim=2)
    for block in encoder.lstms:
        if type(block) is nn.LSTM:
            x = lstm.bidirectional(block, x, lengths)
        else:
            x = torch.cat([block(x, style), styles], dim=2)
    return x


def _encode_text(
    encoder: Any, ids: torch.Tensor, beyond: torch.Tensor | None, lengths: torch.Tensor | None
) -> torch.Tensor:
    """TextEncoder.forward: [rows, tokens] → [rows, hidden, tokens]."""
    x = encoder.embedding(ids).transpose(1, 2)
    for convolution, *rest in encoder.cnn:
        x = convolve(convolution, _cleared(x, beyond))
        for layer in rest:
            x = layer(x)
    return lstm.bidirectional(encoder.lstm, x.transpose(1, 2), lengths, TEXT_LANE + 1).transpose(1, 2)


def _cleared(x: torch.Tensor, beyond: torch.Tensor | None) -> torch.Tensor:
    """x [rows, channels, units] with zeros where ``beyond`` [rows, units] says so."""
    return x if beyond is None else x.masked_fill(beyond.unsqueeze(1), 0.0)


def frame_stage(
    predictor: Any, en: torch.Tensor, style: torch.Tensor, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """ProsodyPredictor.F0Ntrain: en [rows, channels, frames], style [rows, style_dim] → [rows, 2, 2·frames], F0 in Hz
    and N, zero behind each row's end."""
    shared = lstm.bidirectional(predictor.shared, en.transpose(1, 2), lengths).contiguous()
    curves = []
    ends = lengths
    for blocks, projection in ((predictor.F0, predictor.F0_proj), (predictor.N, predictor.N_proj)):
        norms = [(norm, norm.norm.num_features) for block in blocks for norm in (block.norm1, block.norm2)]
        projected = iter(padded_styles(blocks, norms, style))
        x, ends = shared, lengths
        for block in blocks:
            x = adain_leaky_relu_block(block, x, moments(x, ends, x.shape[1], 1, run=run), projected, ends, run)
            if ends is not None and block.upsample_type != "none":
                ends = output_lengths(block.pool, ends)
        curves.append(convolve(projection, x.transpose(1, 2)))
    both = torch.cat(curves, dim=1)
    return both if ends is None else _cleared(both, torch.arange(both.shape[2], device=en.device) >= ends.unsqueeze(1))


def token_axes(model: Any) -> tuple[Axes, ...]:
    """Axes of ids, style and the token stage's output behind the rows; the length counts tokens."""
    return (Length(1),), (model.predictor.text_encoder.sty_dim,), (sum(_split(model)), Length(1))


def frame_axes(predictor: Any) -> tuple[Axes, ...]:
    """Axes of en, style and the curves behind the rows; the length counts frames."""
    encoder = predictor.text_encoder
    return (encoder.d_model + encoder.sty_dim, Length(1)), (encoder.sty_dim,), (2, Length(2))


def _split(model: Any) -> tuple[int, int, int]:
    """Channels of the token stage's output: d, t_en, durations."""
    encoder = model.predictor.text_encoder
    return encoder.d_model + encoder.sty_dim, 2 * model.text_encoder.lstm.hidden_size, 1


class TextRunners(Beside):
    """The graphs of both stages: the token stage is beside a model, the frame stage beside its predictor."""

    @staticmethod
    def _fault(owner: Any) -> str | None:
        return foreign_part(owner) if hasattr(owner, "predictor") else _first_foreign(("predictor", owner))

    def _graphs(self, owner: Any) -> Graphs:
        without = [name for name, _ in owner.named_children() if name == "decoder"]  # the stages do not read it
        weights = functools.partial(lstm.WeightsThatMove, without=without)
        if not hasattr(owner, "predictor"):
            return Graphs(frame_stage, frame_axes(owner), FRAME_BUCKETS, MEMORY_CAP_BYTES, weights)
        longest = min(512, owner.context_length // 32 * 32)  # no bucket beyond bert's positions
        return Graphs(token_stage, token_axes(owner), Buckets(longest=longest), MEMORY_CAP_BYTES, weights)

    @torch.no_grad()
    def speak(
        self, model: Any, input_ids: torch.Tensor, ref_s: torch.Tensor, speed: float = 1
    ) -> tuple[torch.Tensor, torch.Tensor] | str:
        """KModel.forward_with_tokens: the waveform and the frames of each token, or the reason why not, which is
        counted on the receipt. Where only the frame stage has no graph, upstream's F0Ntrain runs, and is counted.
        """
        reason = unsupported(model, self._run, input_ids, ref_s)
        tokens = reason or self._runner(model)
        if isinstance(tokens, str):
            TALLIES.add(self._run.receipt, fallback=tokens)
            return tokens
        frames = self._runner(model.predictor)
        rows, count = input_ids.shape
        found = tokens.find(rows, count, ref_s.device, ref_s.dtype)
        if isinstance(found, str):
            tokens.count_miss(found)
            return found
        voice, style = ref_s[:, :STYLE], ref_s[:, STYLE:]
        encoded = tokens.replay(found, count, input_ids.to(ref_s.dtype), style)
        pred_dur = torch.round(encoded[:, -1] / speed).clamp(min=1).long().squeeze()
        indices = torch.repeat_interleave(torch.arange(count, device=ref_s.device), pred_dur)
        en, asr, _ = encoded.index_select(2, indices).split(_split(model), dim=1)
        f0, energy = self._curves(frames, model.predictor, en, style)
        return model.decoder(asr, f0, energy, voice).squeeze(), pred_dur

    def _curves(
        self, frames: GraphRunner | str, predictor: Any, en: torch.Tensor, style: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if isinstance(frames, str):
            TALLIES.add(self._run.receipt, fallback=frames)
            return predictor.F0Ntrain(en, style)  # type: ignore[no-any-return]
        found = frames.find(en.shape[0], en.shape[2], en.device, en.dtype)
        if isinstance(found, str):
            frames.count_miss(found)
            return predictor.F0Ntrain(en, style)  # type: ignore[no-any-return]
        return frames.replay(found, en.shape[2], en, style).unbind(1)


def unsupported(model: Any, run: Run, input_ids: torch.Tensor, ref_s: torch.Tensor) -> str | None:
    """Why a call with these inputs must run upstream's code, or None. Gradients play no part: upstream's call is under
    torch.no_grad() itself."""
    if (reason := no_graphs(run, ref_s.device)) is not None:
        return reason
    if needs_dispatch((input_ids, ref_s)):
        return "a dispatch mode is active, or an input is a tensor subclass"
    if input_ids.dtype != torch.int64 or ref_s.dtype != torch.float32 or input_ids.device != ref_s.device:
        found = f"{input_ids.dtype} on {input_ids.device} and {ref_s.dtype} on {ref_s.device}"
        return f"expected int64 tokens and an fp32 style on one device, got {found}"
    style = 1, STYLE + model.predictor.text_encoder.sty_dim
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or ref_s.shape != style:
        found = f"{list(input_ids.shape)} and {list(ref_s.shape)}"
        return f"expected tokens [1, n] and a style {list(style)}, got {found}"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if any(part.training for part in (model, model.bert, model.predictor, model.text_encoder)):
        return "the model is in training mode"
    return None


def foreign_part(model: Any) -> str | None:
    """What on the text side of a KModel is not as upstream builds it and so rules a graph out, or None."""
    if importlib.metadata.version("transformers").partition(".")[0] not in TRANSFORMERS:
        return f"transformers {importlib.metadata.version('transformers')}: known are {' and '.join(TRANSFORMERS)}"
    for path, expected in STRUCTURE:
        kind = type(operator.attrgetter(path)(model))
        if f"{kind.__module__}.{kind.__qualname__}" != expected:
            return f"{path} is {kind.__module__}.{kind.__qualname__}, expected {expected}"
    if model.bert.config._attn_implementation not in ("sdpa", "eager"):
        return f"bert's attention is {model.bert.config._attn_implementation}, expected sdpa or eager"
    for index, layer in enumerate(model.text_encoder.cnn):
        if (kinds := [type(part).__name__ for part in layer]) != CONVOLUTION:
            return f"text_encoder.cnn.{index} is {kinds}, expected {CONVOLUTION}"
    for index, block in enumerate(model.predictor.text_encoder.lstms):
        if type(block) is not nn.LSTM and type(block).__name__ != "AdaLayerNorm":
            return f"predictor.text_encoder.lstms.{index} is {type(block).__name__}, expected LSTM or AdaLayerNorm"
    children = ("bert", "bert_encoder", "predictor", "text_encoder")
    return _first_foreign(*((name, getattr(model, name)) for name in children))


def _first_foreign(*children: tuple[str, nn.Module]) -> str | None:
    parts = (named for child, module in children for named in module.named_modules(prefix=child))
    return next((f"{name}{reason}" for name, part in parts if (reason := _foreign(name, part))), None)


def _foreign(name: str, part: Any) -> str | None:
    if hooked(part):
        return f" {HOOKED}"
    if "forward" in vars(part):
        return ".forward was replaced on the instance"
    reason = lstm.unsupported(part) if isinstance(part, nn.LSTM) else fault(part)
    if reason is not None:
        return f": {reason}"
    return None if name.startswith("bert.") else replaced(part)  # bert's parts are called as they are
