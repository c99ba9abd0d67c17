"""A whole decode step of a language model: transformers' own forward of one token, ``decode_step`` without a graph,
transformers' StaticCache in a plain CUDA graph, and ``decode_graph``, which is both.

Graphs save the host's time, so these arms are timed by the wall, every call waited for. All calls of an arm are alike:
behind the same ``held`` tokens, whose keys and values upstream's prefill made. The fp64 oracle goes on from those too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from voxfuse.fusions import decode_step
from voxfuse.fusions._decode_lanes import bucket_of, cuda_arena
from voxfuse.fusions.decode_cache import give
from voxfuse.fusions.decode_graph import DecodeRunner, DecodeSession
from voxfuse.kernels._op import Run
from voxfuse.microbench.operation import Arms, Operation, around
from voxfuse.microbench.timer import Call, Inputs
from voxfuse.recompute import EAGER, VOXFUSE
from voxfuse.records import Case, TensorSignature

NOT_COMPILED = "inductor takes about a minute for a model of so many layers: compiled in one case of this fusion only"
TINY_MODEL = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "vocabulary": 50}
POSITIONS = 32_768


def build(case: Case) -> Any:
    """The causal language model of a case, random weights on the default device. Raises ImportError."""
    import transformers

    sizes, (layers, _, kv_heads, _, head_dim) = case.parameters, case.tensors["keys"].shape
    config = getattr(transformers, f"{sizes['family']}Config")(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=layers,
        num_attention_heads=sizes["heads"],
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    return getattr(transformers, f"{sizes['family']}ForCausalLM")(config).eval()


def step_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """The token's embeddings [rows, 1, hidden], and one byte seen as all that a step has to read: weights and cache."""
    tensors = case.tensors
    with torch.device("meta"):
        model = build(case)
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "embed_tokens" not in name)
    held = sum(torch.Size(tensors[name].shape).numel() for name in ("keys", "values"))
    size = getattr(torch, tensors["keys"].dtype).itemsize * (weights + held)
    read = torch.zeros(1, dtype=torch.uint8, device=generator.device).expand(size)
    return around(0.0, 1.0, tensors["embeddings"], generator), read


class DecodeStep:
    """One token behind a cache of ``held`` tokens."""

    def __init__(self, case: Case, device: torch.device) -> None:
        keys = case.tensors["keys"]
        self._rows, self._held = keys.shape[1], keys.shape[3]
        self._compiled = bool(case.parameters["compiled"])
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            self._model = build(case).to(getattr(torch, keys.dtype))
            self._prompt = torch.randint(0, int(case.parameters["vocabulary"]), (self._rows, self._held))
        names = inspect.signature(type(self._model).forward).parameters
        self._name = "cache" if "cache" in names else "past_key_values"  # it was renamed in transformers 5
        self._takes_position = "cache_position" in names
        self._past = self._forward(input_ids=self._prompt)[self._name]
        self._contents = decode_step.tensors(self._past)
        self._exact: Any = None
        self._captured: DecodeSession | str = "no session was begun"

    def reference(self, embeddings: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """Upstream's logits [rows, 1, vocabulary]; for embeddings of doubles, all in doubles."""
        if embeddings.dtype == torch.float64:
            return self._oracle(embeddings)
        give(self._past, self._contents)
        return self._logits(embeddings, self._past)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused step in its graph; ``arms`` has captured it."""
        return _stepped(self._captured, args[0])

    def arms(self, run: Run, compile_backend: str) -> Arms:
        """``fused`` (no graph), ``graph`` (no fusion) and ``compile`` (no fusion, in a graph too)."""
        fused = self._session(run, graph=False)
        self._captured = self._session(run, graph=self._prompt.is_cuda)

        def fused_step(embeddings: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
            return _stepped(fused, embeddings)

        baselines: dict[str, Call | str] = {"fused": fused_step, "compile": NOT_COMPILED}
        counted: dict[str, Call] = {EAGER: self.reference, "fused": fused_step, VOXFUSE: fused_step}
        made = {"graph": lambda step: step}
        if self._compiled:
            made["compile"] = lambda step: torch.compile(step, dynamic=False, fullgraph=True, backend=compile_backend)
        for name, change in made.items():
            try:
                step = change(self._static_step())
                baselines[name] = self._graphed(step)
                counted[name] = lambda embeddings, read, step=step: step(embeddings)
            except Exception as error:  # of a transformers whose StaticCache is another: the arm is absent
                baselines[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
        return Arms(baselines, counted)

    def _forward(self, **inputs: Any) -> Any:
        with torch.no_grad():
            return self._model(use_cache=True, **inputs)

    def _logits(self, embeddings: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self._forward(inputs_embeds=embeddings, **{self._name: cache}).logits
        return logits

    def _oracle(self, embeddings: torch.Tensor) -> torch.Tensor:
        if self._exact is None:
            self._exact = copy.deepcopy(self._model).double()
        give(self._past, [tensor.double() for tensor in self._contents])
        with InDoubles():
            logits: torch.Tensor = self._exact(
                inputs_embeds=embeddings, use_cache=True, **{self._name: self._past}
            ).logits
        return logits

    def _session(self, run: Run, graph: bool) -> DecodeSession | str:
        """A session whose rows all rest: each step is one behind the same tokens, in the same slot of the cache."""
        runner = DecodeRunner(self._model.model, self._model.lm_head, run, capture="first_use" if graph else "warmup")
        give(self._past, self._contents)
        session = runner.session(self._past, [self._held] * self._rows)
        if isinstance(session, str):
            return session
        if graph and not runner.statistics.captures:
            return f"no graph was captured: {runner.statistics}"
        for row in range(self._rows):
            session.stop(row)
        return session

    def _static_step(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Upstream's step over its StaticCache of as many slots as ours has, its length set back before each token."""
        from transformers import StaticCache

        cache: Any = StaticCache(config=self._model.config, max_cache_len=bucket_of(self._held + 1))
        self._forward(input_ids=self._prompt, **{self._name: cache})
        lengths = torch.full((len(cache.layers),), self._held, device=self._prompt.device)
        pairs = zip(self._contents[::2], self._contents[1::2], strict=True)
        for layer, length, (keys, values) in zip(cache.layers, lengths, pairs, strict=True):
            layer.keys[:, :, : self._held], layer.values[:, :, : self._held] = keys, values
            if hasattr(layer, "cumulative_length"):  # transformers 5 keeps it on the device
                layer.cumulative_length = length
        position = torch.full((1,), self._held, device=self._prompt.device)
        others = {"cache_position": position} if self._takes_position else {}

        def step(embeddings: torch.Tensor) -> torch.Tensor:
            lengths.fill_(self._held)
            logits: torch.Tensor = self._model(
                inputs_embeds=embeddings, use_cache=True, position_ids=position[None], **{self._name: cache}, **others
            ).logits
            return logits

        return step

    def _graphed(self, step: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The step replayed from a plain CUDA graph, its input and output copied as ours are; on a CPU the step."""
        if not self._prompt.is_cuda:
            return lambda embeddings, read: step(embeddings)
        weight = self._model.lm_head.weight
        given = weight.new_zeros(self._rows, 1, weight.shape[1])
        arena = cuda_arena(weight.device)
        with torch.no_grad():
            step(given)  # compiles
            graph, output = arena.capture(lambda: step(given))

        def replayed(embeddings: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
            given.copy_(embeddings)
            graph.replay()
            return output.clone()

        return replayed


class InDoubles(TorchFunctionMode):
    """Casts of tensors to fp32 give doubles: upstream's norms and rotary embeddings go through fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in (*args, *kwargs.values())):
            return args[0].double()
        return func(*args, **kwargs)


def _stepped(session: DecodeSession | str, embeddings: torch.Tensor) -> torch.Tensor:
    if isinstance(session, str):
        raise RuntimeError(session)
    return session.step(embeddings)


def tiny(case: Case) -> Case:
    """A case of the same kind with a few tokens and a small model, for a dry run."""
    _, rows, kv_heads, _, _ = case.tensors["keys"].shape
    heads = min(2, kv_heads)
    keys = torch.empty(TINY_MODEL["layers"], rows, heads, 5, 8, device="meta")
    embeddings = torch.empty(rows, 1, TINY_MODEL["hidden"], device="meta")
    shapes = {"embeddings": embeddings, "keys": keys, "values": keys}
    tensors = {
        name: TensorSignature(shape=tuple(value.shape), dtype=case.tensors[name].dtype, strides=value.stride())
        for name, value in shapes.items()
    }
    sizes = {name: size for name, size in TINY_MODEL.items() if name in case.parameters}
    return msgspec.structs.replace(
        case, name=f"dry run, {case.name}", tensors=tensors, parameters={**case.parameters, **sizes}
    )


OPERATIONS: dict[str, Operation] = {
    "decode_step": Operation(
        DecodeStep, step_inputs, "a whole decode step", of_modules=True, timed="wall", arms=DecodeStep.arms
    ),
}
