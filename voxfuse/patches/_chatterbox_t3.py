"""Chatterbox's T3: its LlamaModel's one-token steps from CUDA graphs.

``T3.inference`` stays upstream's. It asks every step for attention maps and hidden states, of which it reads none
itself: they are not computed where no alignment analyser reads them. With one (multilingual models) steps run upstream,
counted. The GPT2 of the turbo model is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from voxfuse.fusions.decode_graph import DECODE_GRAPH
from voxfuse.kernels._op import Run
from voxfuse.patches import _decoding
from voxfuse.patches.spec import Patch

BACKEND = "chatterbox.models.t3.inference.t3_hf_backend"
STEP = f"{BACKEND}:T3HuggingfaceBackend.forward"
INFERENCE = "chatterbox.models.t3.t3:T3.inference"
ANALYSED = "the alignment analyser reads attention maps"


def _forward(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    steps = _decoding.decoding(run)
    make_output = inspect.unwrap(original).__globals__["CausalLMOutputWithCrossAttentions"]

    def forward(
        self: Any,
        inputs_embeds: torch.Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = True,
        return_dict: bool = True,
    ) -> Any:
        arguments = inputs_embeds, past_key_values, use_cache, output_attentions, output_hidden_states, return_dict
        prefill = past_key_values is None or inputs_embeds.shape[1] != 1
        if torch.compiler.is_compiling() or prefill or not (use_cache and output_hidden_states and return_dict):
            return original(self, *arguments)
        reason = ANALYSED if self.alignment_stream_analyzer is not None else _decoding.bypassed(self.model)
        if reason is not None:
            steps.count(reason)
            return original(self, *arguments)
        hidden = steps.step(self.model, inputs_embeds, past_key_values)
        if isinstance(hidden, str):
            return original(self, *arguments)
        return make_output(logits=self.speech_head(hidden), past_key_values=past_key_values)

    return forward


PATCHES = (
    Patch(
        fusion=DECODE_GRAPH,
        target=STEP,
        absorbs=(STEP, INFERENCE),
        build=_forward,
        by_name_only="T3 makes a new T3HuggingfaceBackend for each generation",
    ),
)
